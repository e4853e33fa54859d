"""model.py against closed forms, another implementation of the same network, and PyTorch's own FLOP counter; and the
habits that all scripts share."""
import argparse
import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import budget
from conftest import assert_one_line, free_port, run_script
from grad_accum import saved_bytes
from model import (REPORT_FAMILY, GPT, GPTConfig, Muon, Parser, UserError, add_model_flags, attend, command, config_from, count, duration_text, plot, positive,
                   rope_tables, rotate, save_results, size_text, written_whole)

TINY = GPTConfig(vocab_size=97, n_layer=2, n_head=2, d_model=32, seq_len=16)


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**vars(TINY), **changes}))


def tokens(B=3, T=16, vocab=97, seed=1):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d_model, n_layer, n_head, millions", [
    (64, 2, 2, "0.62"), (96, 3, 3, "1.12"), (128, 4, 4, "1.80"), (192, 4, 6, "3.34"), (512, 8, 8, "29.11")])
def test_parameter_counts(d_model, n_layer, n_head, millions):
    with torch.device("meta"):
        model = GPT(GPTConfig(d_model=d_model, n_layer=n_layer, n_head=n_head))
    assert f"{model.num_params() / 1e6:.2f}" == millions


def test_the_default_is_the_chapters_model():
    assert GPT(GPTConfig()).num_params() == 1_803_392


def reference_logits(model, idx):
    """The network once more, written from its description: complex rotation, explicit softmax, one head at a time."""
    c, w = model.config, dict(model.named_parameters())

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain

    half = c.head_dim // 2
    angle = torch.tensor([[t * c.rope_base ** (-2 * i / c.head_dim) for i in range(half)] for t in range(idx.shape[1])],
                         dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rope(x):
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    x = w["embedding.weight"][idx]
    future = torch.ones(idx.shape[1], idx.shape[1]).triu(1).bool()
    for i in range(c.n_layer):
        def p(name):
            return w[f"blocks.{i}.{name}.weight"]
        q, k, v = (norm(x, p("attn_norm")) @ p("attn.qkv").T).split(c.d_model, -1)
        heads = []
        for h in range(c.n_head):
            part = slice(h * c.head_dim, (h + 1) * c.head_dim)
            scores = rope(q[..., part]) @ rope(k[..., part]).transpose(1, 2) / math.sqrt(c.head_dim)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., part])
        x = x + torch.cat(heads, -1) @ p("attn.proj").T
        gate, up = (norm(x, p("mlp_norm")) @ p("mlp.gate_up").T).split(c.mlp_hidden, -1)
        x = x + (gate * gate.sigmoid() * up) @ p("mlp.down").T
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].T


@pytest.mark.parametrize("T", [1, 5, 16])
def test_forward_is_the_network_described(T):
    model = tiny().double()
    torch.nn.init.normal_(model.norm.weight)                # gains other than 1
    torch.testing.assert_close(model(tokens(T=T)), reference_logits(model, tokens(T=T)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("d_model, hidden", [(8, 32), (64, 160), (96, 256), (128, 320), (192, 512), (512, 1344)])
def test_mlp_hidden_is_eight_thirds_rounded_down_to_32s(d_model, hidden):
    assert GPTConfig(d_model=d_model, n_head=2).mlp_hidden == hidden


def test_no_position_sees_its_future():
    model, idx = tiny(), tokens()
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_loss_is_mean_cross_entropy_in_fp32():
    model, idx = tiny(), tokens()
    targets = idx.roll(-1, 1)
    logits, loss = model(idx, targets)
    assert torch.equal(logits, model(idx)) and loss.dtype == torch.float32
    by_hand = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss.item() == pytest.approx(math.log(97), rel=0.02)     # nothing learned yet
    targets[:, 3:] = -100
    assert model(idx, targets)[1].item() == pytest.approx(model(idx[:, :3], targets[:, :3])[1].item(), rel=1e-6)


CHUNKED = pytest.mark.parametrize("changes", [{}, {**REPORT_FAMILY, "vocab_multiple": 32}], ids=["tied", "padded"])


def losses_and_gradients(model, x, y):
    model.zero_grad(set_to_none=True)
    loss = model(x, y)[1]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@CHUNKED
@pytest.mark.parametrize("rows", [1, 7, 48, 1000])
def test_the_loss_in_chunks_is_the_loss(changes, rows):
    """In fp64 to the last places, in fp32 to rounding, whatever the chunks; targets of -100 are left out of both."""
    x, y = tokens(), tokens(seed=2)
    y[0, :5], y[2] = -100, -100
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        model = tiny(**changes).to(dtype)
        whole = losses_and_gradients(model, x, y)
        model.loss_rows = rows
        assert model(x, y)[0] is None and model(x)[:, :, 0].shape == x.shape
        chunked = losses_and_gradients(model, x, y)
        assert chunked[0].dtype == dtype and torch.allclose(chunked[0], whole[0], rtol=close)
        for name, grad in whole[1].items():
            assert (chunked[1][name] - grad).abs().max() <= close * grad.abs().max().clip(min=1e-3), name
        with torch.no_grad():
            assert torch.equal(model(x, y)[1], chunked[0])


def test_the_loss_in_chunks_of_no_target_a_certain_one_and_a_hopeless_one():
    model = tiny()
    model.loss_rows = 5
    assert model(tokens(), torch.full((3, 16), -100))[1].isnan()
    with torch.no_grad():
        model.norm.weight.mul_(1e5)     # losses of thousands of nats: the target's probability is zero in fp32
    found = model(tokens(), tokens(seed=2))[1]
    model.loss_rows = None
    assert found.isfinite() and found > 100 and torch.allclose(found, model(tokens(), tokens(seed=2))[1], rtol=1e-5)


def test_the_loss_in_chunks_under_autocast_is_bf16s():
    """As near to the fp32 loss and gradients as the whole loss under autocast is, and it keeps no logits."""
    x, y = tokens(8), tokens(8, seed=2)
    exact = losses_and_gradients(tiny(), x, y)
    found = {}
    for rows in (None, 16):
        model = tiny()
        model.loss_rows = rows
        with torch.autocast("cpu", torch.bfloat16):
            found[rows] = losses_and_gradients(model, x, y)
    assert found[16][0].dtype == torch.float32
    for name, grad in exact[1].items():
        errors = {rows: (found[rows][1][name] - grad).norm() / grad.norm() for rows in found}
        assert errors[16] < 1.5 * errors[None] + 1e-3, name


def test_the_loss_in_chunks_keeps_a_fraction_for_the_backward_pass():
    config = GPTConfig(vocab_size=4096, n_layer=1, n_head=2, d_model=16, seq_len=64)
    kept = {}
    for rows in (None, 32):
        model = GPT(config)
        model.loss_rows = rows
        x = tokens(4, 64)
        kept[rows] = saved_bytes(model, x, x)
    logits = 4 * 64 * 4096 * 4
    assert kept[None] > logits and kept[32] < kept[None] - 0.7 * logits


def test_attention_in_bf16_on_a_cpu_is_no_further_from_the_truth_than_torchs():
    q, k, v = (torch.randn(2, 3, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    half = [t.bfloat16() for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*half, is_causal=True)
    ours = attend(*half)
    assert ours.dtype == torch.bfloat16 and (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


def test_initialisation():
    model = GPT(GPTConfig())
    for name, p in model.named_parameters():
        if p.dim() < 2:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
        assert p.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.03), name
    assert model.head.weight is model.embedding.weight


def test_the_order_of_random_draws():
    """Default initialisations as built, then every weight (the tied one twice), then the residual projections."""
    def draws(model):
        for block in model.blocks:
            yield from (block.attn.qkv, block.attn.proj, block.mlp.gate_up, block.mlp.down)

    model = tiny(seed=5)
    torch.manual_seed(5)
    torch.nn.init.normal_(torch.empty(97, 32))                      # nn.Embedding's own
    for module in draws(model):
        torch.nn.Linear(module.in_features, module.out_features, bias=False)
    torch.nn.Linear(32, 97, bias=False)
    expected = {}
    torch.nn.init.normal_(torch.empty(97, 32), std=0.02)            # the embedding, drawn again when the output matrix is
    for i, module in enumerate(draws(model)):
        expected[i] = torch.nn.init.normal_(torch.empty_like(module.weight), std=0.02)
    tied = torch.nn.init.normal_(torch.empty(97, 32), std=0.02)
    for i, module in enumerate(draws(model)):
        if i % 4 in (1, 3):
            expected[i] = torch.nn.init.normal_(torch.empty_like(module.weight), std=0.02 / 2)
    assert torch.equal(model.embedding.weight, tied)
    for i, module in enumerate(draws(model)):
        assert torch.equal(module.weight, expected[i]), i


@pytest.mark.parametrize("config, T", [(GPTConfig(), 128), (GPTConfig(), 64), (GPTConfig(d_model=192, n_head=6, n_layer=3), 128)])
def test_flops_are_pytorchs_count(config, T):
    """On the meta device, for on a CPU the counter takes attention for nothing. Gains are not matrix products."""
    with torch.device("meta"):
        model, idx = GPT(config), torch.zeros(2, T, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(idx, idx)[1].backward()
    gains = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert counter.get_total_flops() == 2 * T * (model.flops_per_token(T) - 6 * gains)
    assert gains < 0.001 * model.num_params()


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    model = tiny()
    matrices, gains = model.adamw(1e-3).param_groups
    assert (matrices["weight_decay"], gains["weight_decay"]) == (0.1, 0.0)
    assert sorted(map(id, matrices["params"] + gains["params"])) == sorted(map(id, model.parameters()))
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in gains["params"]} == {1}


def test_generation():
    model, prompt = tiny(), tokens(B=2, T=3)

    def sample(**options):
        return model.generate(prompt, 30, generator=torch.Generator().manual_seed(0), **options)

    out = sample()
    assert out.shape == (2, 33) and torch.equal(out[:, :3], prompt) and 0 <= out.min() and out.max() < 97
    assert torch.equal(out, sample()) and model.training
    greedy = sample(temperature=0)
    assert torch.equal(greedy, sample(top_k=1))
    context = greedy[:, -17:-1]                                     # longer than the context by then: the last 16 decide
    assert torch.equal(greedy[:, -1], model(context)[:, -1].argmax(-1))
    assert torch.equal(out, sample(top_k=10_000))                   # more than there are
    assert torch.equal(greedy, sample(temperature=1e-30))           # so cold that nothing may overflow


def test_top_k_never_leaves_the_k_likeliest():
    model, prompt = tiny(), tokens(B=1, T=4)
    likeliest = set(model(prompt)[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    seen = {model.generate(prompt, 1, top_k=3, generator=generator)[0, -1].item() for _ in range(60)}
    assert seen == likeliest


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}])
def test_generation_refuses(options):
    with pytest.raises(UserError):
        tiny().generate(tokens(), 1, **options)
    with pytest.raises(UserError):
        tiny().generate(torch.empty(1, 0, dtype=torch.long), 1)


@pytest.mark.parametrize("changes, words", [
    ({"n_head": 3}, "does not divide"), ({"d_model": 0}, "d_model"), ({"n_layer": -1}, "n_layer"), ({"vocab_size": 0}, "vocab_size"),
    ({"seq_len": 0}, "seq_len"), ({"d_model": 6, "n_head": 2}, "even")])
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(UserError, match=words):
        GPTConfig(**changes)


def test_a_sequence_longer_than_the_context():
    with pytest.raises(UserError, match="17.*16"):
        tiny()(tokens(T=17))


# --- the report's family --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("depth, width, heads, blocks, embedding, n, total", [
    (20, 1280, 10, "393.2", "64.4", "457.6", "522.0"), (4, 256, 2, "3.1", "12.9", "16.0", "28.9"),
    (12, 768, 6, "84.9", "38.6", "123.6", "162.2"), (14, 896, 7, "134.9", "45.1", "179.9", "225.0")])
def test_the_reports_sizes(depth, width, heads, blocks, embedding, n, total):
    config = GPTConfig.from_depth(depth)
    with torch.device("meta"):
        model = GPT(config)
    assert (config.d_model, config.n_head, config.head_dim, config.seq_len, config.padded_vocab) == (width, heads, 128, 2048, 50_304)
    assert sum(p.numel() for p in model.blocks.parameters()) == 12 * width ** 2 * depth
    counts = (12 * width ** 2 * depth, model.embedding.weight.numel(), model.num_compute_params(), model.num_params())
    assert tuple(f"{count / 1e6:.1f}" for count in counts) == (blocks, embedding, n, total)
    assert model.flops_per_token() == 6 * model.num_compute_params() + 12 * depth * 2048 * width


def test_odd_depths_have_a_whole_number_of_heads():
    assert [(GPTConfig.from_depth(d).d_model, GPTConfig.from_depth(d).n_head) for d in (1, 3, 5)] == [(128, 1), (256, 2), (384, 3)]


def small_report(seed=0, **changes):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{"vocab_size": 97, "n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 16, **REPORT_FAMILY, **changes}))
    for p in model.block_matrices().values():       # away from the zeros it starts with
        torch.nn.init.normal_(p, std=0.1)
    return model


def test_the_reports_network_is_the_one_described():
    """Once more by hand: norms without gains, queries and keys normalised, squared ReLU, an output matrix of its own."""
    model = small_report().double()
    c, w, idx = model.config, dict(model.named_parameters()), tokens()

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    x = w["embedding.weight"][idx]
    for i in range(c.n_layer):
        q, k, v = (norm(x) @ w[f"blocks.{i}.attn.qkv.weight"].T).view(3, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = rotate(norm(q), *rope_tables(c)), rotate(norm(k), *rope_tables(c))
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(3, 16, 32) @ w[f"blocks.{i}.attn.proj.weight"].T
        x = x + (norm(x) @ w[f"blocks.{i}.mlp.up.weight"].T).clamp(min=0) ** 2 @ w[f"blocks.{i}.mlp.down.weight"].T
    torch.testing.assert_close(model(idx), (norm(x) @ w["head.weight"].T)[..., :97], rtol=1e-5, atol=1e-6)
    assert not [name for name, p in model.named_parameters() if p.dim() < 2]


def test_the_padding_of_the_vocabulary_takes_no_part():
    model, idx = small_report(), tokens()
    assert model.config.padded_vocab == 128 and model(idx).shape == (3, 16, 97)
    loss = model(idx, idx)[1]
    loss.backward()
    assert model.head.weight.grad[97:].abs().max() == 0 and model.embedding.weight.grad[97:].abs().max() == 0
    with torch.no_grad():
        model.head.weight[97:] = 1e3
    assert torch.equal(model(idx, idx)[1], loss)
    assert model.generate(idx, 50, temperature=50.0, generator=torch.Generator().manual_seed(0)).max() < 97


def test_the_reports_initialisation():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=500, n_layer=2, n_head=2, d_model=64, seq_len=16, **REPORT_FAMILY))
    idx = tokens(vocab=500)
    assert torch.equal(model.blocks[0](x := torch.randn(2, 16, 64), model.cos, model.sin), x)      # a block is the identity
    assert model(idx, idx)[1].item() == pytest.approx(math.log(500), abs=0.01)
    for name, p in model.named_parameters():
        std = 0 if name.endswith(("attn.proj.weight", "mlp.down.weight")) else {"embedding.weight": 1, "head.weight": 0.001}.get(name, 64 ** -0.5)
        assert p.std().item() == pytest.approx(std, rel=0.05), name


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    for model in (small_report(), tiny()):
        muon, adamw = model.muon(0.02)
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [[names[id(p)] for group in optimizer.param_groups for p in group["params"]] for optimizer in (muon, adamw)]
        assert sorted(groups[0] + groups[1]) == sorted(names.values())              # each in exactly one
        assert all(name.startswith("blocks.") and "norm" not in name for name in groups[0])
        assert {"embedding.weight"} <= set(groups[1]) and not [name for name in groups[1] if name.startswith("blocks.") and "norm" not in name]
        assert {group["weight_decay"] for group in adamw.param_groups} == {0.0}


def test_muons_update_is_orthogonal_and_a_rows_share_of_it_is_the_wholes():
    torch.manual_seed(0)
    direction = torch.randn(64, 16)
    group = {"lr": 0.5, "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None}
    p = torch.nn.Parameter(torch.ones(64, 16))
    p.grad = direction.clone()
    torch.optim.Muon([p], lr=0.5, weight_decay=0.0, momentum=0.0).step()
    torch.testing.assert_close(Muon.move(direction.clone(), group), p.detach() - 1, rtol=1e-2, atol=1e-3)
    values = torch.linalg.svdvals(Muon.move(direction, group)) / (0.5 * math.sqrt(64 / 16))
    assert 0.6 < values.min() and values.max() < 1.3


def update_of_two_ranks(rank, port, results):
    """Two steps of Muon on a sharded model, whole; rank 0 leaves the matrices."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    with budget.process_group(torch.device("cpu")):
        model = small_report(d_model=48, n_layer=2)                 # 48 rows, 144 and 192: shares of another shape than the whole
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        matrices = two_steps(model)
        if rank == 0:
            torch.save(matrices, results)


def two_steps(model):
    optimizers = model.muon(0.02, weight_decay=0.1)
    for seed in (1, 2):
        model(tokens(seed=seed), tokens(seed=seed + 9))[1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in model.named_parameters()}


def test_two_ranks_sharded_update_is_one_processs(tmp_path):
    """Up to the bf16 in which the orthogonalisation computes: both ranks see the same data, so the gradients are the same."""
    mp.spawn(update_of_two_ranks, (free_port(), tmp_path / "two.pt"), nprocs=2)
    two, start = torch.load(tmp_path / "two.pt", weights_only=True), {n: p.detach().clone() for n, p in small_report(d_model=48).named_parameters()}
    one = two_steps(small_report(d_model=48))
    for name in one:
        error = (two[name] - one[name]).norm() / (one[name] - start[name]).norm()
        assert error < 0.02, (name, error)


def test_log_probabilities_by_hand_and_of_unequal_lengths():
    model = tiny()
    context, continuations = [5, 6, 7], [[1], [2, 3, 4], [8, 9]]
    scores = model.log_probabilities(context, continuations)
    for score, c in zip(scores, continuations, strict=True):
        log_p = model(torch.tensor([context + c])).log_softmax(-1)[0]
        assert score.item() == pytest.approx(sum(log_p[len(context) - 1 + i, token].item() for i, token in enumerate(c)), rel=1e-5)
    longer = model.log_probabilities(list(range(90)), [[1, 2]])     # of a context too long its end is seen
    assert longer.item() == pytest.approx(model.log_probabilities(list(range(75, 90)), [[1, 2]]).item(), rel=1e-5)
    for wrong in (([], [[1]]), ([1], [[]]), ([1], [list(range(17))])):
        with pytest.raises(UserError, match="can be scored"):
            model.log_probabilities(*wrong)


# --- the habits all scripts share ------------------------------------------------------------------------------------

def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with written_whole(path) as part:
        part.write_text("old")
    for fault, refusal in ((KeyError("a bug"), KeyError), (RuntimeError("PytorchStreamWriter failed"), UserError), (KeyboardInterrupt(), KeyboardInterrupt),
                           (OSError(28, "No space left on device"), UserError), (Exception("No space left on device (os error 28)"), UserError)):
        with pytest.raises(refusal), written_whole(path) as part:
            part.write_text("half")
            part.with_name(part.name + ".tmp").write_text("what a library writes beside")
            raise fault
        assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_is_named_before_anything_is(tmp_path):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "directory").mkdir()
    for place, words in (("directory", "is a directory"), ("file/deeper", "file/deeper cannot be written"), ("/proc/none", "/proc/none cannot be written")):
        with pytest.raises(UserError, match=words), written_whole(tmp_path / place) as part:
            part.write_text("never")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "file"]


def test_results_that_are_not_finite_are_null_and_the_file_is_json():
    save_results("name", {"rows": [{"loss": math.nan, "mfu": (math.inf, 0.5)}], "none": None})
    with open("runs/name.json") as f:
        assert json.load(f, parse_constant=lambda name: pytest.fail(name)) == {"rows": [{"loss": None, "mfu": [None, 0.5]}], "none": None}


def test_any_name_can_stand_over_a_plot(capfd):
    with plot("a.png", "price $5 or $^{6$, 三国演义 \x07", xlabel="x") as axes:
        axes.plot([1, 2])
    assert open("a.png", "rb").read(4) == b"\x89PNG" and capfd.readouterr().err == ""


def test_a_name_that_the_terminal_cannot_show_is_escaped():
    code = "import model; model.command(lambda argv: print('三国', '\\udce9'))([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.strip() == rb"\u4e09\u56fd \udce9", done.stderr


def test_recomputation_keeps_a_fraction_for_the_backward_pass():
    model = GPT(GPTConfig(vocab_size=64, d_model=32, n_layer=6, n_head=2, seq_len=32))
    x = torch.zeros((4, 32), dtype=torch.long)
    kept = saved_bytes(model, x, x)
    model.recompute = True
    inputs = 6 * 4 * 4 * 32 * 32        # one a block, 4 bytes a token and unit of width; what the head and the loss need stays
    assert saved_bytes(model, x, x) + inputs < 0.4 * kept


def test_results_replace_each_other():
    for value in (1, 2):
        save_results("name", {"value": value})
    assert json.load(open("runs/name.json")) == {"value": 2} and os.listdir("runs") == ["name.json"]


def test_a_runs_that_is_no_directory_is_one_line(tmp_path, refused):
    (tmp_path / "runs").write_text("a file")
    refused(budget.main, words=("runs",))


@pytest.mark.parametrize("error, status, words", [
    (UserError("this and\nthat"), 2, "this and that"), (PermissionError(13, "Permission denied", "a/b"), 2, "a/b: Permission denied"),
    (KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 2, "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "out of memory")])
def test_what_ends_a_script_in_one_line(error, status, words, capsys):
    @command
    def script(argv=None):
        raise error

    with pytest.raises(SystemExit) as stopped:
        script([])
    line = capsys.readouterr().err
    assert stopped.value.code == status and words in line and line.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback():
    @command
    def script(argv=None):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        script([])


def test_model_flags_make_a_configuration():
    parser = Parser()
    add_model_flags(parser)
    config = config_from(parser.parse_args(["--d-model", "64", "--n-head", "2"]), vocab_size=99)
    assert (config.d_model, config.n_head, config.n_layer, config.vocab_size) == (64, 2, 4, 99)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1.5x", "", "1e308", "1e-300", "9" * 400])
def test_positive_numbers(text):
    for kind in (int, float):
        with pytest.raises(argparse.ArgumentTypeError, match="positive") as refused:
            positive(kind)(text)
        assert len(str(refused.value)) < 120
    assert positive(int, 10)("10") == 10 and positive(float)("2.5") == 2.5


@pytest.mark.parametrize("script, flags", [
    ("speed", ["--batch", "--steps", "--seq-len", "--d-model", "--n-layer", "--n-head"]), ("grad_accum", ["--parts"]),
    ("ddp_train", ["--processes", "--timeout"]), ("scaling", ["--steps"]), ("prepare_data", ["--vocab-size"]),
    ("budget", ["--gpus", "--seq-len", "--micro-batch", "--vocab-size", "--tokens", "--price", "--watts"]),
    ("train_gpu", ["--steps", "--micro-batch", "--global-batch", "--lr", "--warmup", "--save-every", "--stop-at", "--clip"])])
def test_numbers_beyond_any_run_are_refused(script, flags, refused):
    for flag in flags:
        refused(importlib.import_module(script).main, flag, "9" * 400, words=(flag, "positive"))


@pytest.mark.parametrize("script", ["prepare_data.py", "speed.py", "grad_accum.py", "ddp_train.py", "scaling.py", "budget.py", "train_gpu.py"])
def test_every_script_helps_and_refuses_from_the_shell(script, capsys):
    with pytest.raises(SystemExit) as helped:
        importlib.import_module(script.removesuffix(".py")).main(["--help"])
    assert helped.value.code == 0 and f"python {script}" in capsys.readouterr().out
    assert_one_line(run_script(script, "--nonsense"), script, "--nonsense")


@pytest.mark.parametrize("text, value", [("124M", 124e6), ("1.3b", 1.3e9), ("6e9", 6e9), ("2T", 2e12), ("500", 500), ("8K", 8e3)])
def test_counts(text, value):
    assert count(text) == pytest.approx(value)


@pytest.mark.parametrize("n, text", [(124e6, "124M"), (1.3e9, "1.3B"), (999, "999"), (1.5e13, "15T"), (619e3, "619K")])
def test_short_forms(n, text):
    assert size_text(n) == text


@pytest.mark.parametrize("seconds, text", [(0.34, "0.3 seconds"), (119, "119.0 seconds"), (180, "3.0 minutes"), (54000, "15.0 hours"), (None, "n/a")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text
