"""What a training run costs: its compute, time, memory, energy and price, before a GPU is rented.

    python budget.py                                          the chapter's three models on H100s
    python budget.py --params 1.3B --gpus 8 --gpu a100-80gb --price 2
    python budget.py --d-model 2048 --n-layer 24 --n-head 16 --seq-len 2048 --micro-batch 8 --gpus 8
    python budget.py --depth 18 20 22                         the report's model and its neighbours, on its two GPUs

It takes two seconds and trains nothing. The chapter finds 1.3 hours for a GPT-2 of 124M on one H100, 17.8 hours for
1.3B on eight, and for 7B on 64 GPUs model states of 112 GB, which no single one holds. The report trains its depth 20
on 6.0B tokens in 15.0 hours at 111,000 tokens/s, which is 188 TFLOP/s a GPU and 9 kWh.

This is also the one place with hardware facts: the table of GPUs, and how a script here meets its machine.
"""
import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

# Read once, when torch is imported, so scripts of several processes import this file first: join_group says in one
# line what went wrong, without a backtrace from C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import (GPT2_VOCAB, LOSS_ROWS, GPTConfig, Parser, UserError, add_model_flags, check_runs, command, count, outline, positive, save_results,
                   size_text)

TERA, GIGA = 1e12, 1e9
SECONDS_PER_HOUR = 3600
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")    # as gloo says it

CHAPTER_MFU = 0.4
TOKENS_PER_PARAM = 20                   # Hoffmann and others 2022, arXiv:2203.15556, as the chapter rounds it
STATE_BYTES = 16                        # a parameter: bf16 weight 2 and gradient 2; fp32 master weight, Adam's m and v, 12
ACTIVATION_BYTES = 34                   # a layer, token and unit of width, no attention scores kept: arXiv:2205.05198
KEPT_FREE = 0.05                        # of a GPU's memory, for what its allocator splits and its libraries take
PADDED_GPT2_VOCAB = 50_304              # GPT-2's 50,257 tokens, padded to a multiple of 128
# The report's run: its two cards, what it measured on each, its batch, data, power, and the largest of its small runs.
REPORT_GPU, REPORT_GPUS, REPORT_TFLOPS = "rtx-pro-6000-max-q", 2, 188
REPORT_OPTIMA, REPORT_ALPHA, REPORT_BETA = ((1e17, 33e6), (3e17, 62e6), (1e18, 116e6)), 0.75, 0.82      # (FLOPs, best N) of them
REPORT_E, REPORT_SHORTEST = 0.823, (457.6e6, 0.65e9, 0.917)             # bits a byte: the law's floor; (N, D, what the law predicted there)
REPORT_TOLD = "the report forecast 0.854, with a 90% interval of [0.832, 0.868], and observed 0.7914"
REPORT_TOKENS, REPORT_TOKENS_A_STEP, REPORT_SEQ_LEN, REPORT_MICRO_BATCH, REPORT_SWEEP = 6e9, 524_288, 2048, 16, 1e18


# --- GPUs -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class GPU:
    """One device's datasheet: dense peaks in TFLOP/s (None where it has no such units), memory in GB, power in W.

    tf32 is the Tensor Core rate of fp32 matrix products with TF32 on, fp32 the rate without.
    """

    name: str                           # exactly as torch.cuda.get_device_name() gives it
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    memory_gb: float
    watts: float
    aliases: tuple = ()

    def peak(self, precision):
        """Dense peak in FLOP/s for "bf16", "fp16", "tf32" or "fp32"; None where the device has none."""
        tflops = getattr(self, precision)
        return tflops and tflops * TERA


# Dense figures: half of what a datasheet prints "with sparsity". GeForce and RTX cards: Tensor Core rate with fp32
# accumulation, which is what training uses.
GPUS = (
    # NVIDIA B200: HGX B200 datasheet, an eighth of the board (36 PFLOPS sparse bf16, 18 sparse TF32, 600 TFLOPS fp32)
    GPU("NVIDIA B200", 2250, 2250, 1125, 75, 180, 1000, ("b200",)),
    # NVIDIA H200 Tensor Core GPU datasheet: 1,979 sparse bf16, 989 sparse TF32; NVL column 1,671 and 835
    GPU("NVIDIA H200", 989, 989, 494.5, 67, 141, 700, ("h200", "h200-sxm")),
    GPU("NVIDIA H200 NVL", 835.5, 835.5, 417.5, 60, 141, 600, ("h200-nvl",)),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM column; the chapter's 989e12
    GPU("NVIDIA H100 80GB HBM3", 989, 989, 494.5, 67, 80, 700, ("h100", "h100-sxm")),
    # NVIDIA H100 PCIe product brief (1,513 and 756 sparse) and H100 NVL datasheet, one GPU (1,671 and 835 sparse)
    GPU("NVIDIA H100 PCIe", 756.5, 756.5, 378, 51, 80, 350, ("h100-pcie",)),
    GPU("NVIDIA H100 NVL", 835.5, 835.5, 417.5, 60, 94, 400, ("h100-nvl",)),
    # NVIDIA A100 Tensor Core GPU datasheet, all four of its columns; the chapter's 312e12
    GPU("NVIDIA A100-SXM4-80GB", 312, 312, 156, 19.5, 80, 400, ("a100", "a100-80gb", "a100-sxm-80gb")),
    GPU("NVIDIA A100-SXM4-40GB", 312, 312, 156, 19.5, 40, 400, ("a100-40gb", "a100-sxm-40gb")),
    GPU("NVIDIA A100 80GB PCIe", 312, 312, 156, 19.5, 80, 300, ("a100-pcie-80gb",)),
    GPU("NVIDIA A100-PCIE-40GB", 312, 312, 156, 19.5, 40, 250, ("a100-pcie-40gb",)),
    # NVIDIA RTX Blackwell PRO GPU architecture whitepaper, appendix: bf16 with fp32 accumulation, dense
    GPU("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 503.8, 251.9, 126, 96, 600, ("rtx-pro-6000",)),
    GPU("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 438.9, 219.5, 109.7, 96, 300, ("rtx-pro-6000-max-q",)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A
    GPU("NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.8, 104.8, 32, 575, ("rtx-5090", "5090")),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (RTX 4090), and Ada professional appendix (RTX 6000, L40S)
    GPU("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6, 24, 450, ("rtx-4090", "4090")),
    GPU("NVIDIA RTX 6000 Ada Generation", 364.2, 364.2, 182.1, 91.1, 48, 300, ("rtx-6000-ada",)),
    # NVIDIA L40S datasheet, before sparsity; NVIDIA L4 datasheet: 242 sparse bf16, 120 sparse TF32
    GPU("NVIDIA L40S", 362.05, 362.05, 183, 91.6, 48, 350, ("l40s",)),
    GPU("NVIDIA L4", 121, 121, 60, 30.3, 24, 72, ("l4",)),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, tables of RTX 3090 and RTX A6000
    GPU("NVIDIA GeForce RTX 3090", 71, 71, 35.6, 35.6, 24, 350, ("rtx-3090", "3090")),
    GPU("NVIDIA RTX A6000", 154.8, 154.8, 77.4, 38.7, 48, 300, ("rtx-a6000",)),
    # NVIDIA RTX A4000 (153.4 sparse), A40 and A10 datasheets
    GPU("NVIDIA RTX A4000", 76.7, 76.7, 38.3, 19.2, 16, 140, ("rtx-a4000",)),
    GPU("NVIDIA A40", 149.7, 149.7, 74.8, 37.4, 48, 300, ("a40",)),
    GPU("NVIDIA A10", 125, 125, 62.5, 31.2, 24, 150, ("a10",)),
    # NVIDIA V100 and T4 datasheets: Tensor Cores for fp16 alone
    GPU("Tesla V100-SXM2-32GB", None, 125, None, 15.7, 32, 300, ("v100", "v100-32gb")),
    GPU("Tesla T4", None, 65, None, 8.1, 16, 70, ("t4",)),
)


def find_gpu(name):
    """The GPU whose name or alias, letter case aside, is exactly this; None where the table has none."""
    wanted = name.lower()
    return next((gpu for gpu in GPUS if wanted in (gpu.name.lower(), *gpu.aliases)), None)


def datasheet_peak(device, precision):
    """The dense peak of a torch.device in FLOP/s; None for a CPU and for a GPU that the table does not know."""
    gpu = find_gpu(device_name(device)) if device.type == "cuda" else None
    return gpu and gpu.peak(precision)


# --- the memory of a run --------------------------------------------------------------------------------------------

def in_block_matrices(model):
    """The parameters of a GPT's block matrices."""
    return sum(p.numel() for p in model.block_matrices().values())


def training_memory(config, micro_batch, gpus=1, sharded=False, recompute=False, optimizer="adamw", device_type="cuda", accumulate=True,
                    all_logits=False):
    """What train_gpu.py holds on each device when it holds most: a dict of bytes by name.

    Counted tensor by tensor: what autograd saves in model.py's forward pass, bf16 under autocast on a GPU and fp32 on a CPU
    (where RMSNorm's steps are saved one by one), and what one step holds beside it. Most is held at one of three moments:
    in the loss, with all activations; in the backward pass of the last block, which recompute has made once more by then;
    at the end of the backward pass, with all gradients. accumulate: a micro-batch before left its gradients. all_logits:
    the loss is not taken in chunks.
    """
    model = outline(config)
    n_params, matrices = model.num_params(), in_block_matrices(model)
    tokens, C, V, L, H = micro_batch * config.seq_len, config.d_model, config.padded_vocab, config.n_layer, config.mlp_hidden
    on_cpu = device_type == "cpu"
    half, share = (4 if on_cpu else 2), (gpus if sharded else 1)
    ends = n_params - matrices
    held = {"parameters": 4 * n_params / share,
            "optimizer states": (8 * n_params if optimizer == "adamw" else 8 * ends + 4 * matrices) / share}
    if not on_cpu:                      # autocast's bf16 copies of the matrices; with fsdp two blocks and the ends, gathered
        held["bf16 copies"] = 2 * (2 * matrices / L + ends) + 2 * (matrices / L + ends) if sharded else 2 * matrices
    gradients = 4 * n_params / share

    stream = 4 * C * (4 if on_cpu and config.gains else 2)                   # the block's input, and that of its MLP's norm, in fp32
    attention = half * (3 + 3 + 3) * C + 4 * config.n_head                   # inputs of three matrices; q, k, v; rotated q, k, output
    mlp = half * (4 if config.mlp == "swiglu" else 2) * H
    block = tokens * (stream + attention + mlp)
    inside_backward = tokens * half * 3 * H                                  # the widest gradients of one block
    activations = (tokens * L * 4 * C if recompute else L * block) + tokens * 4 * C * (2 if on_cpu and config.gains else 1)
    if all_logits:
        loss = 12 * tokens * V          # logits, their softmax and its gradient, in fp32
    else:                               # a chunk's logits and softmax; the matrix and its transpose, its gradient and a chunk's of it
        rows = min(tokens, LOSS_ROWS[device_type])
        loss = rows * V * (half + 4 + (0 if on_cpu else half)) + V * C * (8 + half * (1 if on_cpu else 3)) + 4 * tokens * C
    moments = [{**held, "gradients": gradients * accumulate, "activations": activations, "loss": loss},
               {**held, "gradients": gradients if accumulate else 4 * V * C / share, "activations": activations + block * recompute,
                "one block's gradients": inside_backward},
               {**held, "gradients": gradients, "activations": block + tokens * 4 * C, "one block's gradients": inside_backward}]
    return max(moments, key=lambda parts: sum(parts.values()))


def largest_micro_batch(config, memory_gb, **options):
    """The largest micro-batch whose training_memory, with these options, leaves KEPT_FREE of so many GB free; 0: none does."""
    room = memory_gb * GIGA * (1 - KEPT_FREE)

    def fits(micro_batch):
        return sum(training_memory(config, micro_batch, **options).values()) <= room

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ways_to_fit(config, memory_gb, gpus):
    """Each way to train on so many GPUs, in the order of the FLOPs that a token takes: dicts with strategy, recompute, the
    largest micro_batch (0: it does not fit), memory_gb of it and flops a token, which with recompute count the blocks' forward
    pass twice."""
    model, ways = outline(config), []
    again = 2 * in_block_matrices(model) + 4 * config.n_layer * config.seq_len * config.d_model      # the blocks' forward pass, a token
    for recompute in (False, True):
        for strategy in ("ddp", "fsdp") if gpus > 1 else ("ddp",):
            options = {"gpus": gpus, "sharded": strategy == "fsdp", "recompute": recompute}
            micro_batch = largest_micro_batch(config, memory_gb, **options)
            ways.append({"strategy": strategy, "recompute": recompute, "micro_batch": micro_batch, "flops": model.flops_per_token() + again * recompute,
                         "memory_gb": sum(training_memory(config, max(1, micro_batch), **options).values()) / GIGA})
    return ways


# --- the arithmetic of a run ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    """A training run to be paid for. Sizes are in GB (1e9 bytes) on each GPU; they need d_model and n_layer."""

    name: str
    n_params: float
    gpus: int = 1
    d_model: int | None = None
    n_layer: int | None = None
    seq_len: int = 1024
    micro_batch: int = 8
    n_tokens: float | None = None       # None: 20 a parameter
    vocab_size: int = PADDED_GPT2_VOCAB
    recompute: bool = False             # each block's input is kept alone, and one block's inside made again at a time
    config: GPTConfig | None = None     # None: the chapter's family, of these sizes

    @property
    def tokens(self):
        return TOKENS_PER_PARAM * self.n_params if self.n_tokens is None else self.n_tokens

    @property
    def flops(self):
        """6 N D: forward 2, backward 4 a parameter and token (Kaplan and others 2020, arXiv:2001.08361)."""
        return 6 * self.n_params * self.tokens

    def hours(self, peak, mfu=CHAPTER_MFU):
        """On GPUs of that peak in FLOP/s, of which the model's FLOPs use the share mfu."""
        return self.flops / (self.gpus * peak * mfu) / SECONDS_PER_HOUR

    def states(self, sharded=False):
        """Weights, gradients, master weights and Adam's moments; sharded over the GPUs with FSDP."""
        return STATE_BYTES * self.n_params / GIGA / (self.gpus if sharded else 1)

    @property
    def has_shape(self):
        return bool(self.d_model and self.n_layer)

    @property
    def activations(self):
        """The chapter's formula, 34 s b h bytes a layer: what backward needs, in bf16; with recompute, of one layer, and
        2 s b h for each layer's input."""
        bytes_a_unit = ACTIVATION_BYTES + 2 * self.n_layer if self.recompute else ACTIVATION_BYTES * self.n_layer
        return bytes_a_unit * self.seq_len * self.micro_batch * self.d_model / GIGA

    @property
    def shape(self):
        """Its configuration, one head where none is known: heads change little of the memory."""
        return self.config or GPTConfig(self.vocab_size, self.n_layer, 1, self.d_model, self.seq_len)

    def memory_parts(self, sharded=False):
        """training_memory of this shape in the chapter's family or its own, in GB."""
        parts = training_memory(self.shape, self.micro_batch, self.gpus, sharded, self.recompute)
        return {what: size / GIGA for what, size in parts.items()}

    def memory(self, sharded=False):
        """All of them together."""
        return sum(self.memory_parts(sharded).values())

    def strategy(self, memory_gb):
        """The simplest that fits in memory_gb: "ddp", "fsdp", or None."""
        return "ddp" if self.memory() <= memory_gb else "fsdp" if self.memory(sharded=True) <= memory_gb else None


CHAPTER_RUNS = (
    Run("124M (GPT-2)", 124e6, gpus=1, d_model=768, n_layer=12, seq_len=1024, micro_batch=16),
    Run("1.3B", 1.3e9, gpus=8, d_model=2048, n_layer=24, seq_len=2048, micro_batch=8),
    Run("7B", 7e9, gpus=64, d_model=4096, n_layer=32, seq_len=4096, micro_batch=2),
)


# --- printing -------------------------------------------------------------------------------------------------------

def print_table(runs, peak, mfu):
    """The chapter's table, a line a run."""
    print(f"{'model':<14s}  {'data':>12s}  {'compute':>12s}  {'GPUs':>8s}  {f'time (MFU {mfu:.0%})':>14s}   memory per GPU")
    for r in runs:
        activations = f"{r.activations:5.1f} GB" if r.has_shape else "n/a (give --d-model and --n-layer)"
        print(f"{r.name:<14s}  {r.tokens / 1e9:6.1f}B token  {r.flops:7.1e} FLOP  {r.gpus:4d} GPU  {r.hours(peak, mfu):8.1f} hours   "
              f"states DDP {r.states():5.1f} GB / FSDP {r.states(sharded=True):5.2f} GB, activations {activations}")


def fit_text(run, gpu):
    """Whether the run fits on its GPUs, how, and what the activation formula leaves out."""
    if not run.has_shape:
        fit = next((how for how, sharded in (("fit with DDP", False), (f"need FSDP ({run.states(True):.1f} GB each)", True))
                    if run.states(sharded) <= gpu.memory_gb), "do not fit, also sharded: it takes more GPUs")
        return f"the model states, {run.states():.1f} GB, {fit}; {gpu.memory_gb:g} GB a GPU"
    strategy = run.strategy(gpu.memory_gb)
    if strategy is None:
        advice = "does not fit: a smaller micro-batch, recomputation, or more GPUs and FSDP"
    elif strategy == "ddp":
        advice = "fits with DDP" if run.gpus > 1 else "fits"
    elif run.states() > gpu.memory_gb:
        advice = f"the model states alone exceed one GPU with DDP ({run.states():.1f} GB): it needs FSDP"
    else:
        advice = f"needs FSDP (with DDP {run.memory():.1f} GB)"
    sharded = strategy != "ddp" and run.gpus > 1
    parts = ", ".join(f"{what} {size:.1f}" for what, size in run.memory_parts(sharded).items())
    return f"{run.memory(sharded):.1f} of {gpu.memory_gb:g} GB, {advice}: as train_gpu.py holds it, {parts} GB"


def print_ways(name, config, gpu, gpus):
    """What --fit says: the largest micro-batch of each way to train, and the one that takes the fewest FLOPs; returns them."""
    ways = ways_to_fit(config, gpu.memory_gb, gpus)
    for way in ways:
        way["name"] = ("DDP" if way["strategy"] == "ddp" else "FSDP") * (gpus > 1) or "one GPU"
        way["name"] += ", --recompute" * way["recompute"]
        found = f"micro-batch {way['micro_batch']:5d}" if way["micro_batch"] else "does not fit     "
        print(f"{name}: {way['name']:20s}  {found}  {way['memory_gb']:7.1f} GB  {way['flops']:.3e} FLOPs a token")
    fitting = [way for way in ways if way["micro_batch"]]
    print(f"{name}: " + (f"fastest by its FLOPs: {fitting[0]['name']}, --micro-batch {fitting[0]['micro_batch']}" if fitting else
                         "nothing fits: it takes more GPUs, or a smaller model or context"))
    return ways


def cost_text(run, hours, watts, price):
    """GPU-hours, kWh and, with a price, the cost."""
    gpu_hours = hours * run.gpus
    text = f"{gpu_hours:,.1f} GPU-hours, {gpu_hours * watts / 1000:,.1f} kWh at {watts:g} W a GPU"
    return text + (f", cost {gpu_hours * price:,.2f} at {price:g} a GPU-hour" if price else "")


def report_row(depth, tokens, gpus, rate, flops_a_gpu, watts, kwh_price, price, sweep):
    """The report's quantities for one depth, by the names they are printed under. tokens None: the report's number of
    whole steps; rate in tokens/s, None: what flops_a_gpu, FLOP/s that each GPU achieves, gives."""
    config = GPTConfig.from_depth(depth)
    model = outline(config)
    flops, n = model.flops_per_token(), model.num_compute_params()
    steps = int((tokens or REPORT_TOKENS) // REPORT_TOKENS_A_STEP)
    if not steps:
        raise UserError(f"--tokens {tokens:g} is less than one step's {REPORT_TOKENS_A_STEP:,}")
    tokens = steps * REPORT_TOKENS_A_STEP
    rate = rate or flops_a_gpu * gpus / flops
    hours = tokens / rate / SECONDS_PER_HOUR
    kwh = gpus * watts * hours / 1000
    return {"layers": depth, "width": config.d_model, "heads": config.n_head, "blocks": in_block_matrices(model),
            "each embedding": model.embedding.weight.numel(), "N": n, "total": model.num_params(), "FLOPs a token": flops,
            "tokens a step": REPORT_TOKENS_A_STEP, "steps": steps, "tokens": tokens, "tokens a parameter": tokens / n,
            "FLOPs": flops * tokens, "times the sweep": flops * tokens / sweep, "tokens/s": rate, "hours": hours,
            "TFLOP/s a GPU": flops * rate / gpus / TERA, "kWh": kwh, "price of it": kwh_price and kwh * kwh_price,
            "GPU-hours": hours * gpus, "price of them": price and hours * gpus * price}


REPORT_FORMATS = {"blocks": "{:,.1f}M", "each embedding": "{:,.1f}M", "N": "{:,.1f}M", "total": "{:,.1f}M", "FLOPs a token": "{:.3e}",
                  "FLOPs": "{:.2e}", "tokens": "{:,}", "tokens a parameter": "{:.1f}", "times the sweep": "{:.1f}", "tokens/s": "{:,.0f}",
                  "hours": "{:.1f}", "TFLOP/s a GPU": "{:.1f}", "kWh": "{:.1f}", "price of it": "{:.2f}",
                  "GPU-hours": "{:,.1f}", "price of them": "{:,.2f}"}


def print_report(rows):
    """The rows side by side, a line a quantity."""
    for name in rows[0]:
        values = [row[name] / 1e6 if "M" in REPORT_FORMATS.get(name, "") else row[name] for row in rows]
        if None not in values:
            print(f"{name:<18s}  " + "  ".join(f"{REPORT_FORMATS.get(name, '{:,}').format(value):>14s}" for value in values))


def tokens_at(flops, n_params):
    """Tokens D = C / (6N + 12 d T h) that a budget C of FLOPs buys a model of the report's family with this N, whose depth
    d, width 64 d, is the one (not whole) that gives it: N = 12 d (64 d)^2 + 64 d of the vocabulary."""
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        depth = (low + high) / 2
        low, high = (depth, high) if 12 * 64 ** 2 * depth ** 3 + PADDED_GPT2_VOCAB * 64 * depth < n_params else (low, depth)
    return flops / (6 * n_params + 12 * depth * REPORT_SEQ_LEN * 64 * depth)


def report_law(n_params, tokens):
    """The report's law L(N, D) in bits a byte. It prints E, alpha and beta; A and B follow from two more of its figures:
    alpha A/N^alpha = beta B/D^beta at the optimum of its largest budget, and the loss that the law predicted at REPORT_SHORTEST."""
    (flops, n), (large, shortest, predicted) = REPORT_OPTIMA[-1], REPORT_SHORTEST
    d = tokens_at(flops, n)

    def terms(N, D):                    # in units of A/n^alpha
        return (n / N) ** REPORT_ALPHA + REPORT_ALPHA / REPORT_BETA * (d / D) ** REPORT_BETA
    return REPORT_E + (predicted - REPORT_E) * terms(n_params, tokens) / terms(large, shortest)


def sweep_text():
    """What follows from the optima and the law's exponents that the report found: tokens a parameter, and how both grow."""
    optima = ", ".join(f"{n / 1e6:.0f}M at {flops:g} FLOPs with {tokens_at(flops, n) / n:.1f} tokens a parameter" for flops, n in REPORT_OPTIMA)
    share = REPORT_BETA / (REPORT_ALPHA + REPORT_BETA)
    return (f"the report's sweep: best N {optima}; by its law's alpha {REPORT_ALPHA:g} and beta {REPORT_BETA:g}, N grows as "
            f"C^{share:.2f} and D as C^{1 - share:.2f}")


def bits_per_byte(nats, bytes_per_token):
    """A loss in nats a token as bits a byte of a text of so many UTF-8 bytes a token."""
    return nats / math.log(2) / bytes_per_token


def losses_text(nats, bytes_per_token):
    """A loss in nats a token as bits a byte, and what guessing evenly among GPT-2's tokens would give."""
    return (f"{nats:g} nats a token at {bytes_per_token:g} bytes a token: {bits_per_byte(nats, bytes_per_token):.4f} bits a byte; guessing evenly among "
            f"{GPT2_VOCAB:,} tokens: {bits_per_byte(math.log(GPT2_VOCAB), bytes_per_token):.1f}")


# --- how a script meets its machine ---------------------------------------------------------------------------------

def pick_device(name):
    """The torch.device of a --device flag; UserError where this machine has none such."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if not device or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: no such device; these scripts run on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: {torch.cuda.device_count() or 'no'} CUDA device here; to try it on a CPU: --device cpu")
    return device


def synchronize(device):
    """Wait for a GPU to finish what was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_count():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device):
    """The device as its maker calls it: what find_gpu knows, or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(device=torch.device("cpu")):
    """One line: the device, the threads and the versions that a measurement was made with."""
    return (f"machine: {device_name(device)}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}, "
            f"Python {platform.python_version()}")


def compile_failure(error):
    """Why torch.compile does not work on this machine, in one line; None where the error is not the compiler's."""
    if isinstance(error, OSError):
        return f"its cache cannot be used: {error}"
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    if any(sign in str(error) for sign in ("InvalidCxxCompiler", "CppCompileError")):
        return "no working C++ compiler: install g++, or set CXX"
    return str(error).strip().splitlines()[0]


def peak_memory_gb(device):
    """The most memory this process has held: allocated on its GPU, or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIGA
    with contextlib.suppress(OSError):  # Linux: getrusage would count what the process that started this one held
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIGA
    import resource                     # POSIX has it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIGA


def keep_memory():
    """Ask glibc to keep freed memory for the next step instead of returning it to the system; False elsewhere.

    A step allocates and frees the same large buffers (logits of 64 MB at the chapter's size). Each one that malloc
    maps anew is paid for once more in page faults: a quarter to a half of a small model's step.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4         # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):                        # musl, macOS, Windows
        return False
    # Some versions cap the threshold at 32 MB; there, map nothing at all.
    kept = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_MAX, 0)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


# --- several processes ----------------------------------------------------------------------------------------------

def launched():
    """Whether this process is one of several that something started: torchrun sets all of these."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def from_launcher(name, least, most=1 << 20, default=None):
    """A whole number that torchrun puts into the environment. Raises UserError where it is none, or out of bounds."""
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal() or not least <= int(text) <= most:
        raise UserError(f"one of several processes, but {name} is {'missing' if text is None else repr(text)}; start with torchrun, which sets it")
    return int(text)


def new_name(store, rank, world, timeout):
    """A name for this start of the group, the same on all its ranks and on none of an earlier start's.

    A launcher that restarts a group keeps its store, with what the processes before left there, and its count of
    restarts differs between nodes. So each rank asks under a name that only it knows, rank 0 answers with another, and
    goes on answering, for it may have read a dead rank's question, until each rank has shown that it knows the answer.
    """
    def read(key):
        return store.get(key).decode() if store.check([key]) else ""

    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"ask/{rank}", mine)
    waiting = set(range(1, world)) if rank == 0 else {0}
    while waiting:
        if rank == 0:
            for r in waiting:
                store.set(f"answer/{r}", f"{read(f'ask/{r}')} {mine}")
            waiting = {r for r in waiting if read(f"known/{r}") != mine}
        else:
            asked, _, answer = read(f"answer/{rank}").partition(" ")
            if asked == mine:
                store.set(f"known/{rank}", answer)
                return answer
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank} waited for {'rank 0' if rank else f'ranks {sorted(waiting)}'}")
        time.sleep(0.02)
    return mine


def join_group(device=None, timeout=600):
    """Join the process group that torchrun's variables describe, or be a group of one; returns this process's device:
    the one given, with several processes on GPUs each its own; with none given, GPUs where there is one a process.

    Raises UserError for incomplete variables, a taken port, too few GPUs, or others that do not come within timeout s.
    """
    alone = not launched()
    if not alone:
        world = from_launcher("WORLD_SIZE", 1)
        from_launcher("RANK", 0, world - 1)
        local_world = from_launcher("LOCAL_WORLD_SIZE", 1, default="1")
        local_rank = from_launcher("LOCAL_RANK", 0, local_world - 1, default="0")
        where = f"{os.environ.get('MASTER_ADDR', '')}:{from_launcher('MASTER_PORT', 1, 65535)}"
        if where.startswith(":"):
            raise UserError("one of several processes, but MASTER_ADDR is missing; start with torchrun, which sets it")
        device = device or torch.device("cuda" if local_world <= torch.cuda.device_count() else "cpu")
        if device.type == "cuda" and torch.cuda.device_count() < local_world:
            raise UserError(f"{local_world} processes for {torch.cuda.device_count()} GPUs; start one process a GPU")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if alone:
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return device
    wait = timedelta(seconds=timeout)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        store = dist.PrefixStore(new_name(store, rank, world, timeout), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except (ValueError, RuntimeError) as error:
        if "address already in use" in str(error).lower():
            raise UserError(f"{where}: port in use; choose another MASTER_PORT, or torchrun --standalone, which finds a free one") from None
        raise UserError(f"{where}: no group of {world} processes within {timeout} s; are all of them started, with the same "
                        f"address and port? ({str(error).splitlines()[0]})") from None
    torch.set_num_threads(max(1, cpu_count() // local_world))       # torchrun sets OMP_NUM_THREADS=1 and wastes the rest
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return device


def is_lost_peer(error):
    """Whether an exception says that another process of the group has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)


@contextlib.contextmanager
def process_group(device=None, timeout=600):
    """Join a process group as join_group does, yield this process's device, and leave together with the others.

    Where something fails here, leave at once: the others may never come, and to wait for them is to hang. Where one of
    them fails, the message is one line, for its own says more.
    """
    device = join_group(device, timeout)
    try:
        yield device
    except BaseException as error:
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        if is_lost_peer(error):
            raise UserError(f"rank {dist.get_rank()}: another process of the group has ended; its own message says why") from error
        raise
    gc.collect()                        # DDP and its hooks refer to each other; a thread of theirs that outlives the
    dist.barrier()                      # interpreter ends the process with "terminate called without an active exception"
    dist.destroy_process_group()


def on_rank_0(act):
    """act() on rank 0 alone, and what it returns there; what is refused there is refused on every rank, so that none waits."""
    result, refusal = None, [None]
    if dist.get_rank() == 0:
        try:
            result = act()
        except (UserError, OSError) as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise UserError(refusal[0])
    return result


def first_on_rank_0(make):
    """make() on rank 0, then on the others, who find what it left on disk."""
    made = on_rank_0(make)
    return make() if made is None else made


@contextlib.contextmanager
def noted_signals():
    """SIGTERM and SIGINT are noted in the list this yields; the training loop ends when it has finished its step."""
    noted = []
    before = {s: signal.signal(s, lambda number, frame: noted.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shares(n):
    """This rank's share of n pieces of work, each with whether it counts: past the end a rank does the last once more,
    for under fsdp all have to take part."""
    for i in range(dist.get_rank(), n + -n % dist.get_world_size(), dist.get_world_size()):
        yield min(i, n - 1), i < n


def same_on_all_ranks(value, where, what):
    """Raise UserError, on all ranks, where their values, a text each, differ: each node may have read files of its own."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise UserError(f"{where}: the processes find different {what} there ({' and '.join(sorted(set(values)))}); give every node the same")


def start_worker(stop, prepare, *args):
    """Make a process of worker_pool's ready: interrupts are its parent's matter, and it outlives neither it nor the pool."""
    def watch():
        while multiprocessing.parent_process().is_alive() and not stop.wait(0.1):
            pass
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()
    prepare(*args)


@contextlib.contextmanager
def worker_pool(prepare, *args, workers=None, start_method="forkserver"):
    """A ProcessPoolExecutor with that many processes, or one a core, each of which has called prepare(*args). What ends it
    early, an interrupt say, ends its processes at once. Raises UserError where one of them is ended.

    They are forked from one that has imported torch and done nothing else: to fork this one would copy its threads' locks,
    and to start each anew takes seconds.
    """
    context = multiprocessing.get_context(start_method)
    context.set_forkserver_preload(["torch", "model"])
    stop = context.Event()
    pool = ProcessPoolExecutor(workers or cpu_count(), context, start_worker, (stop, prepare, *args))
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError("a worker process was ended (out of memory?); start the same command again") from None
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def data_parallel(model, device):
    """The model under DistributedDataParallel, which averages gradients over the ranks in the backward pass."""
    return DDP(model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)


# --- the command ----------------------------------------------------------------------------------------------------

def parse_args(argv):
    parser = Parser(description=__doc__)
    parser.add_argument("--params", type=count, metavar="N", help="parameters, e.g. 124M or 1.3e9 (default: the chapter's three models)")
    add_model_flags(parser, default=None)
    parser.add_argument("--vocab-size", type=positive(int), metavar="N", help=f"tokens in the vocabulary (default: {PADDED_GPT2_VOCAB})")
    parser.add_argument("--micro-batch", type=positive(int), metavar="N", help="sequences a GPU holds at once (default: 8)")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--tokens", type=count, metavar="N", help="training tokens, e.g. 6B")
    data.add_argument("--tokens-per-param", type=positive(float), metavar="X", help=f"(default: {TOKENS_PER_PARAM})")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--gpus", type=positive(int), metavar="N", help="how many (default: 1; with --depth 2)")
    parser.add_argument("--gpu", metavar="NAME", help="exact device name or alias (default: h100; with --depth the report's)")
    parser.add_argument("--mfu", type=positive(float), metavar="X", help=f"model FLOPs utilization, a share (default: {CHAPTER_MFU})")
    parser.add_argument("--price", type=positive(float), metavar="X", help="of one GPU for one hour, in any currency")
    parser.add_argument("--watts", type=positive(float), metavar="X", help="of one GPU (default: its board power)")
    report = parser.add_argument_group("the report's family")
    parser.add_argument("--fit", action="store_true", help="the largest micro-batch that fits, with and without recomputation and sharding")
    report.add_argument("--depth", type=positive(int, 1000), nargs="+", metavar="D", help="depths, side by side; the report's is 20")
    report.add_argument("--measured-tokens-per-s", type=positive(float), metavar="X",
                        help=f"of one depth, on all GPUs (default: what the report's MFU gives, on its GPU {REPORT_TFLOPS} TFLOP/s)")
    report.add_argument("--kwh-price", type=positive(float), metavar="X", help="of a kWh, in any currency")
    report.add_argument("--sweep", type=positive(float), default=REPORT_SWEEP, metavar="C", help="FLOPs to compare with (default: 1e18)")
    report.add_argument("--loss", type=positive(float), metavar="X", help="in nats a token: also print it in bits a byte")
    report.add_argument("--bytes-per-token", type=positive(float), default=4.62, metavar="X", help="of the text (default: 4.62)")
    args = parser.parse_args(argv)
    if args.mfu is not None and args.mfu > 1:
        raise UserError(f"--mfu {args.mfu:g} is above 1; it is a share of the peak")
    about_a_model = ("params", "d_model", "n_layer", "n_head", "vocab_size", "tokens_per_param", "micro_batch", "seq_len")
    if args.depth and (given := [name for name in about_a_model if getattr(args, name) is not None]):
        raise UserError(f"--depth sets the model and its batch; leave out --{given[0].replace('_', '-')}")
    if not args.depth and args.kwh_price:
        raise UserError("--kwh-price is of --depth's table; without it, --price is of a GPU-hour")
    if args.measured_tokens_per_s and args.mfu:
        raise UserError("--measured-tokens-per-s and --mfu both set the rate; give one")
    if args.measured_tokens_per_s and len(args.depth or ()) != 1:
        raise UserError("--measured-tokens-per-s is one depth's: give --depth with one number")
    if args.fit and args.params and not args.d_model:
        raise UserError("--fit is of a model's shape: give --d-model and --n-layer, or --depth")
    args.any_run = any(getattr(args, name) is not None for name in (*about_a_model, "tokens", "gpus"))
    return args


def run_from(args):
    """The Run that the flags describe; its parameters are counted where --params does not give them."""
    if bool(args.d_model) != bool(args.n_layer) or args.n_head and not args.d_model:
        raise UserError("a model's size takes both --d-model and --n-layer")
    if args.d_model:
        # One head where none is said: the parameters are the same for any number of them.
        config = GPTConfig(d_model=args.d_model, n_layer=args.n_layer, n_head=args.n_head or 1, vocab_size=args.vocab_size or PADDED_GPT2_VOCAB)
    given = {name: getattr(args, name) for name in ("d_model", "n_layer", "seq_len", "micro_batch", "vocab_size", "gpus")
             if getattr(args, name) is not None}
    n_params = args.params
    if n_params is None:
        if not args.d_model:
            raise UserError("which model? give --params, or --d-model and --n-layer")
        n_params = outline(config).num_params()
    n_tokens = args.tokens or (args.tokens_per_param and args.tokens_per_param * n_params)
    return Run(size_text(n_params), n_params, n_tokens=n_tokens, recompute=args.recompute, **given)


def chosen_gpu(args):
    """The GPU of the flags. Raises UserError where the table has none of that name."""
    name = args.gpu or (REPORT_GPU if args.depth else "h100")
    gpu = find_gpu(name)
    if gpu is None:
        raise UserError(f"--gpu {name}: not in the table, which knows {', '.join(g.aliases[0] for g in GPUS)} and exact device names")
    return gpu


def print_depths(args, gpu, peak):
    """The report's table for --depth; returns its rows."""
    mfu = args.mfu or REPORT_TFLOPS * TERA / find_gpu(REPORT_GPU).peak("bf16")
    gpus, flops_a_gpu = args.gpus or REPORT_GPUS, peak * mfu
    rows = [report_row(depth, args.tokens, gpus, args.measured_tokens_per_s, flops_a_gpu, args.watts or gpu.watts, args.kwh_price, args.price,
                       args.sweep) for depth in args.depth]
    print_report(rows)
    for row in rows:
        run = Run(f"depth {row['layers']}", row["total"], gpus, row["width"], row["layers"], REPORT_SEQ_LEN, REPORT_MICRO_BATCH, row["tokens"],
                  recompute=args.recompute, config=GPTConfig.from_depth(row["layers"]))
        print(f"{run.name}: {fit_text(run, gpu)}; MFU {row['TFLOP/s a GPU'] * TERA / peak:.0%}")
        print(f"{run.name}: the report's law, L = {REPORT_E:g} + A/N^{REPORT_ALPHA:g} + B/D^{REPORT_BETA:g}, forecasts "
              f"{report_law(row['N'], row['tokens']):.3f} bits a byte")
        if args.fit:
            row["fit"] = print_ways(run.name, run.config, gpu, gpus)
    print(f"{sweep_text()}; {REPORT_TOLD}")
    return rows


def print_runs(args, gpu, peak):
    """The chapter's table, of its three runs or of the one that the flags describe; returns its rows."""
    runs, mfu = [run_from(args)] if args.any_run else CHAPTER_RUNS, args.mfu or CHAPTER_MFU
    watts = args.watts or gpu.watts
    print_table(runs, peak, mfu)
    rows = []
    for r in runs:
        hours, strategy = r.hours(peak, mfu), r.strategy(gpu.memory_gb) if r.has_shape else None
        print(f"{r.name}: {fit_text(r, gpu)}")
        print(f"{r.name}: {cost_text(r, hours, watts, args.price)}")
        rows.append({"name": r.name, "params": r.n_params, "tokens": r.tokens, "flops": r.flops, "gpus": r.gpus, "hours": hours, "mfu": mfu,
                     "gpu_hours": hours * r.gpus, "kwh": hours * r.gpus * watts / 1000, "cost": args.price and hours * r.gpus * args.price,
                     "states_ddp_gb": r.states(), "states_fsdp_gb": r.states(sharded=True), "strategy": strategy,
                     "activations_gb": r.activations if r.has_shape else None,
                     "memory_parts_gb": r.memory_parts(strategy != "ddp") if r.has_shape else None,
                     "memory_gb": r.memory(strategy != "ddp") if r.has_shape else None,
                     "fit": print_ways(r.name, r.shape, gpu, r.gpus) if args.fit and r.has_shape else None})
    return rows


@command
def main(argv=None):
    args = parse_args(argv)
    check_runs()
    gpu = chosen_gpu(args)
    peak = gpu.peak("bf16") or gpu.peak("fp16")     # Tensor Cores before Ampere have fp16 alone
    print(f"{gpu.name}: {peak / TERA:g} dense {'bf16' if gpu.bf16 else 'fp16'} TFLOP/s, {gpu.memory_gb:g} GB, {gpu.watts:g} W")
    rows = (print_depths if args.depth else print_runs)(args, gpu, peak)
    if args.loss:
        print(losses_text(args.loss, args.bytes_per_token))
    save_results("budget", {"gpu": gpu.name, "peak": peak, "rows": rows})


if __name__ == "__main__":
    main()
