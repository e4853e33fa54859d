"""The GPT that every script in this collection shares.

A decoder-only transformer: pre-norm blocks, RMSNorm, rotary embedding, causal attention. The defaults are the chapter's
model: SwiGLU, the output matrix tied to the embedding, 1,803,392 parameters. GPTConfig.from_depth(20) is the report's.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig())
    logits, loss = model(idx, targets)        # idx, targets: (B, T) int64

Shapes below: B sequences, T positions, C = d_model, H heads of size C / H, V = vocab_size.
"""
import argparse
import contextlib
import fcntl
import functools
import json
import math
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02
EMBEDDING_STD, HEAD_STD = 1.0, 0.001    # of the report's family, after nanochat's gpt.py
GPT2_VOCAB = 50_257
NORM_EPS = torch.finfo(torch.float32).eps
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
EMBEDDING_LR = 1e-2                     # of AdamW beside Muon: the best of 3e-3, 1e-2 and 3e-2 at 2M parameters
RUNS = Path("runs")                     # where scripts leave their results
IGNORED = -100                          # a target that is left out of the loss, as in torch.nn.functional.cross_entropy
LOSS_ROWS = {"cpu": 512, "cuda": 4096}  # positions whose logits fit into a cache, or keep a GPU busy
ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
OUT_OF_MEMORY = ("out of memory", "allocate memory", "Storage size calculation overflowed")     # as torch says it


class UserError(ValueError):
    """Something that the person at the keyboard can put right; its text is one line that says how."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and parts of a GPT, in the field's own names. Raises UserError where they do not fit together."""

    vocab_size: int = 8192
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    seq_len: int = 128          # the longest context, in tokens
    rope_base: float = 10000.0
    vocab_multiple: int = 1     # the embeddings have vocab_size rows, rounded up to a multiple of this
    mlp: str = "swiglu"         # or "relu2", squared ReLU
    gains: bool = True          # whether RMSNorm learns a gain
    qk_norm: bool = False       # whether queries and keys are normalised
    tied: bool = True           # whether the output matrix is the embedding
    zero_init: bool = False     # whether a block starts as the identity; else as GPT-2's

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (str, bool)) and not value > 0:
                raise UserError(f"{field.name} is {value}; it has to be positive")
        if self.mlp not in MLPS:
            raise UserError(f"mlp is {self.mlp}; it is one of {', '.join(MLPS)}")
        if self.d_model % self.n_head:
            raise UserError(f"n_head {self.n_head} does not divide d_model {self.d_model}; "
                            f"choose a width that is a multiple of the number of heads")
        if self.head_dim % 2:
            raise UserError(f"d_model {self.d_model} over n_head {self.n_head} gives heads of size {self.head_dim}; "
                            f"rotary embedding pairs dimensions, so choose an even head size")

    @classmethod
    def from_depth(cls, depth, vocab_size=GPT2_VOCAB, seq_len=2048):
        """The report's family, which one number sizes: width 64 depth, rounded up to a multiple of 128, heads of 128."""
        width = -(-64 * depth // 128) * 128
        return cls(vocab_size, depth, width // 128, width, seq_len, **REPORT_FAMILY)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embeddings: matrix products like round sizes."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def mlp_hidden(self) -> int:
        """4 d_model; of SwiGLU 8/3 d_model, which gives its three matrices the parameters of a plain MLP's two
        (Shazeer 2020, arXiv:2002.05202), rounded down to a multiple of 32."""
        return max(32, 8 * self.d_model // 3 // 32 * 32) if self.mlp == "swiglu" else 4 * self.d_model


REPORT_FAMILY = {"vocab_multiple": 128, "mlp": "relu2", "gains": False, "qk_norm": True, "tied": False, "zero_init": True}


def rope_tables(config: GPTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * base^(-2i/head_dim): two tensors (seq_len, head_dim / 2), fp32.
    Su and others 2021, arXiv:2104.09864."""
    i = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    angle = torch.outer(torch.arange(config.seq_len, dtype=torch.float32), config.rope_base ** (-i / config.head_dim))
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x_i, x_{i + head_dim/2}) of x (B, H, T, head_dim) by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def rms_norm(width, gains):
    """RMSNorm over the last dimension, with a learned gain or without (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return nn.RMSNorm(width, eps=NORM_EPS, elementwise_affine=gains)


def attend(q, k, v):
    """Causal attention: q, k, v and the result (B, H, T, head_dim). On a CPU in fp32, for torch's backward pass of it in
    bf16 takes three times as long."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            return attend(q.float(), k.float(), v.float()).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with one fused query-key-value projection: (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.qk_norm = rms_norm(config.head_dim, gains=False) if config.qk_norm else nn.Identity()

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k = self.qk_norm(q), self.qk_norm(k)
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """An MLP with a gate, gate and up projections fused, gate first: (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.d_model, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SquaredReLU(nn.Module):
    """An MLP of width 4 C (So and others 2021, arXiv:2109.08668): (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.d_model, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


MLPS = {"swiglu": SwiGLU, "relu2": SquaredReLU}


class Block(nn.Module):
    """Attention, then the MLP, each on the normalised stream and added to it: (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn_norm = rms_norm(config.d_model, config.gains)
        self.mlp_norm = rms_norm(config.d_model, config.gains)
        self.attn = Attention(config)
        self.mlp = MLPS[config.mlp](config)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


def whole(tensor):
    """A tensor over all ranks, where fully_shard has spread it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor):
    """Whether it is a DTensor: told by its method, for the class's import would cost every script half a second."""
    return hasattr(tensor, "full_tensor")


def product(x, w):
    """x (m, k) times w (n, k) transposed, without a gradient. In fp32 on a CPU by oneDNN, as torch's compiler calls it: on
    an AMD processor 1.2 to 1.5 times as fast, for these shapes, as MKL, which torch.nn.functional.linear takes."""
    if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        return ONEDNN(x, w, None, "none", [], "")
    return F.linear(x, w)


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy, in nats, of the logits of x (n, C) and the output matrix w (rows, C), without ever holding
    more of them than those of at_once positions.

    The forward pass makes a chunk's logits, their loss and its gradients with respect to x and w, and lets the logits go;
    the backward pass has nothing left to multiply (Hsu and others 2024, arXiv:2410.10989). Products are in x's precision
    or autocast's, the softmax and all sums in fp32 at least. targets (n,) int64; those of -100 are left out; rows of w
    from vocab_size on are padding. grad: whether a backward pass will follow.
    """

    @staticmethod
    def forward(ctx, x, w, targets, vocab_size, at_once, grad):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        wide = torch.promote_types(dtype, torch.float32)
        counted = (targets != IGNORED)[:, None]
        n = counted.sum()
        loss, grad_x, grad_w = torch.zeros((), dtype=wide, device=x.device), [], 0.0
        with torch.autocast(kind, enabled=False):
            x, w = x.to(dtype), w.to(dtype)
            w_t = w.t().contiguous() if grad else None
            for h, y, used in zip(x.split(at_once), targets[:, None].where(counted, 0).split(at_once), counted.split(at_once)):
                logits = product(h, w)
                logits[:, vocab_size:] = -torch.inf
                p = logits.softmax(dim=-1, dtype=wide)
                # The likeliest token's p is never zero, as the target's may be: ln sum exp(logits) = max logits - ln max p.
                log_sum = logits.amax(dim=-1, keepdim=True) - p.amax(dim=-1, keepdim=True).log()
                loss += ((log_sum - logits.gather(1, y)) * used).sum() / n
                if grad:
                    p.scatter_add_(1, y, torch.full_like(y, -1, dtype=wide))
                    p, share = p.to(dtype), used.to(wide) / n
                    grad_x.append(product(p, w_t) * share)
                    grad_w += product((h * share).to(dtype).t(), p.t()).to(wide)
                del logits, p           # before the next chunk's
        if grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_w.t())
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad_loss, grad_w * grad_loss, None, None, None, None


class GPT(nn.Module):
    """Token ids to logits, or to the loss. Two ways to save memory: recompute = True keeps only each block's input for the
    backward pass and computes the rest of the block once more there, about a third more FLOPs for a fraction of the
    memory; loss_rows = n makes the logits of n positions at a time for the loss, and returns none."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.recompute, self.loss_rows = False, None
        self.embedding = nn.Embedding(config.padded_vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = rms_norm(config.d_model, config.gains)
        self.head = nn.Linear(config.d_model, config.padded_vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self):
        """The chapter's initialisation, GPT-2's: normal, standard deviation 0.02; the projections into the residual
        stream, 2 n_layer of them, by 0.02 / sqrt(2 n_layer), so that the stream's variance does not grow with depth.

        With zero_init, nanochat's (gpt.py, init_weights), for squared ReLU and Muon: those projections zero, so that
        each block starts as the identity and Muon, whose updates are of one size, builds them up; the other matrices of
        a block normal by 1 / sqrt(fan-in), the embedding by 1, and the output matrix small, so that the first loss is
        the logarithm of the vocabulary.

        The order of the draws (modules as built, then the residual projections once more) is part of the chapter's
        printed digits: another order trains as well, and prints other last places.
        """
        def draw(module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = INIT_STD
                if self.config.zero_init:
                    std = EMBEDDING_STD if module is self.embedding else HEAD_STD if module is self.head else module.in_features ** -0.5
                nn.init.normal_(module.weight, std=std)

        self.apply(draw)
        for name, p in self.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.down.weight")):
                nn.init.normal_(p, std=0 if self.config.zero_init else INIT_STD / (2 * self.config.n_layer) ** 0.5)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 to logits (B, T, V); with targets (B, T) int64 to (logits, mean cross-entropy in nats), where
        loss_rows is set to (None, the same).

        The rows that pad the vocabulary give no logits: they take no part in the loss and are never sampled.

        The loss is computed in fp32 (in fp64 for a model in fp64); targets of -100 are left out of the mean. Raises
        UserError for T > seq_len.
        """
        T = idx.shape[1]
        if T > self.config.seq_len:
            raise UserError(f"a sequence of {T} tokens is longer than the model's context of {self.config.seq_len}")
        x = self.embedding(idx)
        cos, sin = self.cos[:T], self.sin[:T]
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        x = self.norm(x)
        if targets is not None and self.loss_rows:
            return None, self.chunked_loss(x, targets)
        logits = self.head(x)
        if self.config.padded_vocab > self.config.vocab_size:
            logits = logits[..., :self.config.vocab_size]
        if targets is None:
            return logits
        at_least_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits, F.cross_entropy(at_least_fp32.flatten(0, 1), targets.flatten())

    def compile(self, *args, **kwargs):
        """As torch.nn.Module's, in place; the chunked loss stays as it is: its loop would be unrolled, and run no faster."""
        self.chunked_loss = torch.compiler.disable(self.chunked_loss)
        super().compile(*args, **kwargs)

    def chunked_loss(self, x, targets):
        return ChunkedLoss.apply(x.flatten(0, 1), self.head.weight, targets.flatten(), self.config.vocab_size, self.loss_rows, torch.is_grad_enabled())

    def num_params(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())

    def num_compute_params(self) -> int:
        """N, the parameters that take part in matrix products, as both documents count it: all but an embedding that
        is a lookup alone. A tied one is the output matrix too."""
        return self.num_params() - (0 if self.config.tied else self.embedding.weight.numel())

    def flops_per_token(self, seq_len=None) -> int:
        """FLOPs of one training step a token: 6N + 12 L T d, N as num_compute_params counts it.

        Forward is 2 a parameter (a multiply and an add), backward 4. Attention's scores and their product with the
        values have no parameters: 2 products of 2 T d FLOPs a layer forward, three times that with backward. All T
        positions are counted although causal attention needs half: the convention of PaLM (arXiv:2204.02311, appendix
        B) and of both documents, and what a kernel that masks computes. Gains are counted as if they were multiplied
        like matrices, 1,152 of the chapter's 1.8M parameters.
        """
        T = seq_len or self.config.seq_len
        return 6 * self.num_compute_params() + 12 * self.config.n_layer * T * self.config.d_model

    def param_groups(self, weight_decay=WEIGHT_DECAY) -> list[dict]:
        """The parameters for AdamW: matrices decay, gains do not."""
        params = [p for p in self.parameters() if p.requires_grad]
        return [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
                {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]

    def adamw(self, lr, weight_decay=WEIGHT_DECAY, fused=True) -> torch.optim.AdamW:
        """AdamW over param_groups. fused takes one pass over memory instead of several; it rounds as the plain one."""
        return torch.optim.AdamW(self.param_groups(weight_decay), lr=lr, betas=ADAM_BETAS, fused=fused)

    def block_matrices(self) -> dict:
        """The blocks' matrices by name: what Muon updates, and whose norms the report follows."""
        return {f"blocks.{name}": p for name, p in self.blocks.named_parameters() if p.dim() == 2}

    def matrix_sizes(self, before) -> dict:
        """By name, each block matrix's norm and that of its last update relative to it: before holds the matrices until then."""
        sizes = {}
        for name, p in self.block_matrices().items():
            norm, update = whole(p.detach().norm()).item(), whole((p.detach() - before[name]).norm()).item()
            sizes[name] = {"norm": norm, "relative_update": update / norm if norm else None}
        return sizes

    def muon(self, lr, weight_decay=0.0, embedding_lr=None) -> list[torch.optim.Optimizer]:
        """Muon on the blocks' matrices, AdamW without decay on all else, the embeddings and gains: the report's two."""
        matrices = self.block_matrices()
        others = [p for name, p in self.named_parameters() if name not in matrices]
        return [Muon(matrices.values(), lr=lr, weight_decay=weight_decay),
                torch.optim.AdamW(others, lr=embedding_lr or EMBEDDING_LR, betas=ADAM_BETAS, weight_decay=0.0, fused=True)]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None) -> torch.Tensor:
        """Continue idx (B, T) int64 by max_new_tokens sampled tokens: (B, T + max_new_tokens).

        Temperature 0 takes the likeliest token, top_k samples among the k likeliest, generator (on the model's device)
        makes it repeatable. The model sees at most its last seq_len tokens. Raises UserError for an empty prompt, a
        negative temperature or a top_k below 1.
        """
        if not idx.numel() or temperature < 0 or (top_k is not None and top_k < 1):
            raise UserError("generation takes a prompt of a token or more, a temperature of 0 or more and a top_k of 1 or more")
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.seq_len:])[:, -1].float()
            if temperature == 0 or top_k == 1:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits.shape[-1]:
                    kth = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -torch.inf)
                logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature     # no overflow, however cold
                chosen = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            idx = torch.cat((idx, chosen), dim=1)
        return idx

    @torch.no_grad()
    def log_probabilities(self, context, continuations) -> torch.Tensor:
        """ln p of each of continuations after context, all lists of ids: (len(continuations),) fp32, summed over a
        continuation's tokens. Of a context that is too long its end is seen. Raises UserError for an empty context or
        continuation, or one that leaves no room for a context."""
        longest = max(map(len, continuations), default=0)
        if not context or not all(continuations) or longest >= self.config.seq_len + 1:
            raise UserError(f"a continuation of 1 to {self.config.seq_len} tokens after a context of one or more can be scored; "
                            f"here {longest} after {len(context)}")
        context = context[-(self.config.seq_len + 1 - longest):]
        width = len(context) + longest
        # Shorter ones are filled up behind their end, where causal attention does not look.
        ids = torch.tensor([(context + c + [0] * width)[:width] for c in continuations], device=self.embedding.weight.device)
        log_p = self(ids[:, :-1]).float().log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        place = torch.arange(1, width, device=ids.device)
        ends = torch.tensor([[len(context) + len(c)] for c in continuations], device=ids.device)
        return (log_p * ((place >= len(context)) & (place < ends))).sum(dim=-1)


@functools.cache
def outline(config):
    """A GPT of a configuration whose tensors are sizes alone, on torch's meta device: to be counted, not run."""
    with torch.device("meta"):
        return GPT(config)


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Jordan 2024), also on matrices whose rows fully_shard has spread over the ranks.

    To orthogonalise takes the whole matrix. torch's step on sharded ones multiplies shards and sums the products in
    bf16 between the ranks, which rounds otherwise than one process does. Here the momentum stays sharded; each matrix's
    direction is gathered in fp32 and orthogonalised whole, the same on every rank, and each rank moves its own rows.
    """

    @torch.no_grad()
    def step(self, closure=None):
        groups = [(group, [p for p in group["params"] if is_sharded(p) and p.grad is not None]) for group in self.param_groups]
        if closure or not any(sharded for _, sharded in groups):
            return super().step(closure)
        for group, sharded in groups:
            for p in sharded:
                grad, state = p.grad.to_local(), self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].to_local()
                momentum.lerp_(grad, 1 - group["momentum"])
                direction = p.grad.clone()
                direction.to_local().copy_(grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)
                rows = self.move(whole(direction), group).chunk(p.device_mesh.size())
                p.to_local().mul_(1 - group["lr"] * group["weight_decay"])
                if p.to_local().numel():        # a rank beyond the rows has none
                    p.to_local().add_(rows[p.device_mesh.get_local_rank()])

    @staticmethod
    def move(direction, group):
        """What torch's own step adds to a matrix that goes in this direction (m, n): its step on zeros, without momentum."""
        moved = torch.zeros_like(direction, requires_grad=True)
        moved.grad = direction
        options = {key: group[key] for key in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([moved], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
        return moved.detach()


# --- what the scripts' command lines share: refusals of one line, sizes, files ---------------------------------------

class Parser(argparse.ArgumentParser):
    """argparse with the script's docstring as its help; a wrong flag is one line and exit status 2."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def within(kind, least, most):
    """An argparse type: a number of that kind (int or float) from least to most."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            words = f"{'positive ' if least > 0 else ''}{'whole ' if kind is int else ''}number{'' if least > 0 else f' from {least}'}"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {words} up to {most:,.10g}")
        return value
    return parse


def positive(kind, most=None):
    """An argparse type: a number above zero and no larger than any real run's."""
    return within(kind, 1, most or 10 ** 9) if kind is int else within(kind, 1e-18, most or 1e18)


def count(text):
    """An argparse type: a positive count such as 124000000, 1.3e9, 124M or 6B."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    return positive(float)(text[:-1] if scale else text) * (scale or 1)


def size_text(n):
    """A count in the field's short form: 124M, 1.3B, 26B."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= scale:
            return f"{n / scale:.4g}{unit}"
    return f"{n:.4g}"


def duration_text(seconds):
    """Seconds in the unit that fits; n/a for None."""
    if seconds is None:
        return "n/a"
    unit, size = ("hours", 3600) if seconds >= 7200 else ("minutes", 60) if seconds >= 120 else ("seconds", 1)
    return f"{seconds / size:.1f} {unit}"


def is_out_of_memory(error):
    """Whether an exception says that memory ran out, Python's, a CPU's or a GPU's."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)


def command(main):
    """Decorate a script's main(argv=None): what a person can put right ends it with one line and exit status 2."""
    def stop(reason, status=2):
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {' '.join(str(reason).split())}\n")       # at once: ranks share a terminal
        raise SystemExit(status)

    @functools.wraps(main)
    def wrapped(argv=None):
        for stream in (sys.stdout, sys.stderr):     # a name that the terminal cannot show is escaped, and ends nothing
            stream.reconfigure(errors="backslashreplace")
        try:
            return main(argv)
        except UserError as error:
            stop(error)
        except BrokenPipeError:         # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1)
        except OSError as error:
            stop(f"{error.filename or 'file system'}: {error.strerror or error}")
        except KeyboardInterrupt:
            stop("interrupted", 130)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            stop("out of memory; take a smaller batch, context or model")
    return wrapped


def add_model_flags(parser, default=GPTConfig()):
    """Flags for a model's size, with the defaults of that configuration; None leaves them to the script."""
    group = parser.add_argument_group("the model's size")
    for field, text, most in (("d_model", "width", 10 ** 6), ("n_layer", "blocks", 10 ** 4), ("n_head", "attention heads", 10 ** 6),
                              ("seq_len", "context in tokens", 10 ** 8)):
        value = getattr(default, field, None)
        group.add_argument(f"--{field.replace('_', '-')}", type=positive(int, most), default=value, metavar="N",
                           help=f"{text} (default: {value})" if value else text)


def config_from(args, **fixed):
    """The GPTConfig that add_model_flags' flags describe. Raises UserError as it does."""
    return GPTConfig(**{name: getattr(args, name) for name in ("d_model", "n_layer", "n_head", "seq_len")}, **fixed)


def locked(directory):
    """Take a directory for this process alone, until it ends; returns the lock, to be held on to. Raises UserError where
    another process has it. (Some network file systems have no locks; there nothing is taken.)"""
    lock = open(Path(directory) / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{directory}: another run is writing there; wait for it, or take another --out DIR") from None
    except OSError:
        pass
    return lock


@contextlib.contextmanager
def written_whole(path):
    """Yield a name to write to; it becomes path when all went well, and nothing of it stays when not.

    Raises UserError, before anything is written, where path is a directory, and where the disk is full or read-only.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; move it away, for a file of that name is to be written")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", suffix=".part", dir=path.parent) as directory:
            part = Path(directory, path.name)
            yield part
            with open(part, "rb") as f:
                os.fsync(f.fileno())    # the rename must not reach the disk before the bytes do
            os.replace(part, path)
    except Exception as error:
        # A full disk is an OSError from Python, a RuntimeError from torch.save and a plain Exception from tokenizers.
        full = isinstance(error, (OSError, RuntimeError)) or type(error) is Exception
        if not full or is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"{path} cannot be written ({reason}); is the disk full, or the directory read-only?") from error


def check_runs():
    """Refuse now, not when the work is done, where runs/ cannot be written. Raises UserError."""
    place = RUNS if RUNS.exists() else RUNS.absolute().parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"{RUNS}: results cannot be written there ({place} is not a directory that can be written); start it from one that can")


def plain(value):
    """value as JSON can hold it: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_results(name, results):
    """Leave a script's numbers, a dict of plain values, in runs/<name>.json."""
    with written_whole(RUNS / f"{name}.json") as part:
        part.write_text(json.dumps(plain(results), indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def plot(path, title, **labels):
    """Yield axes to draw on, labelled as axes.set takes it; the picture is written to path as PNG."""
    import matplotlib
    matplotlib.use("Agg")               # draws without a display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    try:
        axes.set(**labels)
        axes.set_title(title, parse_math=False)     # a corpus may have a $ in its name
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        with written_whole(path) as part, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")      # or characters that the font does not have
            figure.savefig(part, format="png", dpi=120)
    finally:
        plt.close(figure)
