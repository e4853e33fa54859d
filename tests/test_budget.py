"""budget.py: the chapter's table digit for digit, the GPU table, and how scripts meet their machine."""
import json
import math
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import budget
from budget import CHAPTER_RUNS, GPUS, Run, find_gpu, keep_memory, main, new_name, pick_device
from conftest import ROOT
from grad_accum import saved_bytes
from model import GPT, LOSS_ROWS, REPORT_FAMILY, GPTConfig, UserError

H100 = find_gpu("h100")


@pytest.mark.parametrize("run, tokens, flops, hours, ddp, fsdp, activations", [
    (CHAPTER_RUNS[0], "2.5", "1.8e+18", "1.3", "2.0", "1.98", "5.1"),
    (CHAPTER_RUNS[1], "26.0", "2.0e+20", "17.8", "20.8", "2.60", "27.4"),
    (CHAPTER_RUNS[2], "140.0", "5.9e+21", "64.5", "112.0", "1.75", "36.5")])
def test_the_chapters_table(run, tokens, flops, hours, ddp, fsdp, activations):
    assert (f"{run.tokens / 1e9:.1f}", f"{run.flops:.1e}", f"{run.hours(989e12):.1f}") == (tokens, flops, hours)
    assert (f"{run.states():.1f}", f"{run.states(sharded=True):.2f}", f"{run.activations:.1f}") == (ddp, fsdp, activations)


def test_what_it_prints_and_leaves_behind(capsys):
    main([])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "token " in line]
    for line, figures in zip(lines, (("2.5B", "1.8e+18 FLOP", "1 GPU", "1.3 hours", "2.0 GB", "1.98 GB", "5.1 GB"),
                                     ("26.0B", "2.0e+20 FLOP", "8 GPU", "17.8 hours", "20.8 GB", "2.60 GB", "27.4 GB"),
                                     ("140.0B", "5.9e+21 FLOP", "64 GPU", "64.5 hours", "112.0 GB", "1.75 GB", "36.5 GB")), strict=True):
        for figure in figures:
            assert figure in line
    assert "1.3B: " in out and "fits with DDP" in out and "needs FSDP" in out
    rows = json.load(open("runs/budget.json"))["rows"]
    assert {"name", "tokens", "flops", "gpus", "hours", "states_ddp_gb", "states_fsdp_gb", "activations_gb"} <= rows[0].keys()
    assert [row["strategy"] for row in rows] == ["ddp", "ddp", "fsdp"]
    assert rows[1]["hours"] == pytest.approx(6 * 1.3e9 * 26e9 / (8 * 989e12 * 0.4) / 3600)


def test_the_chapters_claim_that_the_micro_batch_of_1_3b_cannot_double():
    run = CHAPTER_RUNS[1]
    doubled = Run(run.name, run.n_params, run.gpus, run.d_model, run.n_layer, run.seq_len, 2 * run.micro_batch)
    assert run.strategy(80) == "ddp" and doubled.memory() > 80


def test_the_reports_energy(capsys):
    """15 hours on two cards of 300 W: 9 kWh."""
    run = Run("458M", 457.6e6, gpus=2, n_tokens=6e9)
    hours = 15.0
    assert "30.0 GPU-hours, 9.0 kWh" in budget.cost_text(run, hours, 300, None)
    assert "cost 60.00 at 2 a GPU-hour" in budget.cost_text(run, hours, 300, 2.0)


def test_the_reports_table(capsys):
    main(["--depth", "18", "20", "22", "--kwh-price", "0.28", "--loss", "2.533"])
    out, rows = capsys.readouterr().out, json.load(open("runs/budget.json"))["rows"]
    column = {line[:18].strip(): line.split()[-2] for line in out.splitlines() if len(line.split()) >= 4}
    for name, figure in (("layers", "20"), ("width", "1,280"), ("heads", "10"), ("blocks", "393.2M"), ("each embedding", "64.4M"), ("N", "457.6M"),
                         ("total", "522.0M"), ("FLOPs a token", "3.375e+09"), ("tokens a step", "524,288"), ("steps", "11,444"),
                         ("tokens", "5,999,951,872"), ("times the sweep", "20.2"), ("hours", "15.0"), ("kWh", "9.0"), ("price of it", "2.51")):
        assert column[name] == figure, name
    assert "0.7910 bits a byte" in out and "tokens: 3.4" in out and [row["layers"] for row in rows] == [18, 20, 22]
    assert "33M at 1e+17 FLOPs with 11.6 tokens" in out and "62M at 3e+17 FLOPs with 9.8" in out and "116M at 1e+18 FLOPs with 9.5" in out
    assert "N grows as C^0.52 and D as C^0.48" in out
    assert len({f"{row['TFLOP/s a GPU']:.0f}" for row in rows}) == 1        # the report: close to 188 from depth 18 to 22


def test_the_reports_forecast_follows_from_its_law(capsys):
    """The figures the report prints of its law agree: from four of them comes the fifth, 0.854."""
    main(["--depth", "20"])
    out = capsys.readouterr().out
    assert "forecasts 0.854 bits a byte" in out and "[0.832, 0.868]" in out and "observed 0.7914" in out
    assert budget.report_law(457.6e6, 6e9) == pytest.approx(0.854, abs=5e-4)
    for flops, n in budget.REPORT_OPTIMA[-1:]:          # the optimum of its largest budget is the law's
        losses = [budget.report_law(n * share, budget.tokens_at(flops, n) / share) for share in (0.98, 1, 1.02)]
        assert losses[1] < min(losses[0], losses[2])


def test_the_reports_measured_rate(capsys):
    main(["--depth", "20", "--measured-tokens-per-s", "111000"])
    row = json.load(open("runs/budget.json"))["rows"][0]
    assert f"{row['hours']:.1f}" == "15.0" and 187 < row["TFLOP/s a GPU"] < 188 and f"{row['kWh']:.0f}" == "9"
    assert row["TFLOP/s a GPU"] == pytest.approx((6 * 457_605_120 + 12 * 20 * 2048 * 1280) * 111_000 / 2 / 1e12)
    main(["--depth", "20", "--gpu", "t4"])
    assert json.load(open("runs/budget.json"))["rows"][0]["TFLOP/s a GPU"] == pytest.approx(65 * 188 / 438.9)       # never beyond a card's peak
    main(["--depth", "20", "--gpu", "h100", "--gpus", "8", "--mfu", "0.5", "--tokens", "9B"])
    row = json.load(open("runs/budget.json"))["rows"][0]
    assert row["steps"] == 17_166 and row["TFLOP/s a GPU"] == pytest.approx(989 / 2)


@pytest.mark.parametrize("budget_flops, n, tokens_a_param", [(1e17, 33e6, 11.5), (3e17, 62e6, 9.9), (1e18, 116e6, 9.5)])
def test_the_sweeps_tokens_a_parameter_follow_from_its_count_of_flops(budget_flops, n, tokens_a_param):
    """D = C / (6N + 12 d T h) at the optimum's N, of the family whose blocks and output matrix make N: by a search over depths."""
    depth = min((d / 1000 for d in range(2000, 20_000)), key=lambda d: abs(12 * 64 ** 2 * d ** 3 + 50_304 * 64 * d - n))
    assert budget_flops / (6 * n + 12 * depth * 2048 * 64 * depth) / n == pytest.approx(tokens_a_param, rel=0.02)
    # The report prints N to two or three digits; half a unit of the last is as much as twice that share of D / N.
    assert budget.tokens_at(budget_flops, n + 0.5e6) / (n + 0.5e6) - 0.05 <= tokens_a_param <= budget.tokens_at(budget_flops, n - 0.5e6) / (n - 0.5e6) + 0.05


def test_a_run_too_large_for_one_gpu_without_a_shape():
    text = budget.fit_text(Run("70B", 70e9, gpus=64), H100)
    assert "need FSDP (17.5 GB each)" in text and "more GPUs" in budget.fit_text(Run("70B", 70e9, gpus=2), H100)


def test_any_run_by_flags(capsys):
    main(["--d-model", "2048", "--n-layer", "24", "--n-head", "16", "--seq-len", "2048", "--gpus", "8", "--gpu", "A100-80GB",
          "--vocab-size", "50304", "--tokens", "26B", "--mfu", "0.5", "--price", "2", "--watts", "350"])
    row = json.load(open("runs/budget.json"))["rows"][0]
    hidden = 8 * 2048 // 3 // 32 * 32
    by_hand = 50304 * 2048 + 24 * (4 * 2048 ** 2 + 3 * 2048 * hidden + 2 * 2048) + 2048
    assert row["params"] == by_hand and row["tokens"] == 26e9
    assert row["hours"] == pytest.approx(6 * by_hand * 26e9 / (8 * 312e12 * 0.5) / 3600)
    assert f"{row['hours'] * 8 * 0.35:,.1f} kWh at 350 W" in capsys.readouterr().out
    main(["--params", "124M", "--tokens-per-param", "10"])
    row = json.load(open("runs/budget.json"))["rows"][0]
    assert row["tokens"] == 1.24e9 and row["activations_gb"] is None        # no shape, no guess


def test_more_parameters_than_int64_has_flops_for(capsys):
    main(["--params", "1e13"])
    assert json.load(open("runs/budget.json"))["rows"][0]["flops"] == pytest.approx(6 * 1e13 * 2e14)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors' storages that are alive: the most at once is in peak."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.alive = 0, 0, set()

    def gone(self, key, size):
        self.alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out


def train_two_steps(config, micro_batch, optimizer, loss_rows, accumulate, recompute):
    """As train_gpu.py does, on a CPU."""
    model = GPT(config)
    model.loss_rows, model.recompute = loss_rows, recompute
    optimizers = model.muon(0.02) if optimizer == "muon" else [model.adamw(1e-3)]
    x = torch.randint(0, config.vocab_size, (micro_batch, config.seq_len))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        for _ in range(2 if accumulate else 1):
            model(x, x)[1].backward()
        for o in optimizers:
            o.step()


CHAPTERS, REPORTS = {}, REPORT_FAMILY
MEMORY_CASES = (        # family, d_model, n_layer, seq_len, vocabulary, micro-batch, optimizer, loss_rows, accumulate, recompute
    (CHAPTERS, 128, 4, 128, 8192, 16, "adamw", 512, False, False), (CHAPTERS, 128, 4, 128, 8192, 4, "adamw", 512, True, False),
    (CHAPTERS, 128, 4, 128, 8192, 16, "adamw", 0, False, False), (CHAPTERS, 256, 4, 256, 8192, 8, "adamw", 512, True, False),
    (CHAPTERS, 256, 8, 256, 1000, 4, "adamw", 512, False, True), (CHAPTERS, 512, 4, 64, 1000, 1, "adamw", 512, False, False),
    (REPORTS, 256, 3, 256, 8192, 4, "muon", 512, False, False), (REPORTS, 128, 6, 256, 8192, 8, "muon", 512, True, True),
    (REPORTS, 128, 2, 128, 50257, 16, "adamw", 512, False, False), (REPORTS, 256, 2, 128, 257, 16, "muon", 512, True, False))


@pytest.mark.parametrize("case", MEMORY_CASES, ids=range(len(MEMORY_CASES)))
def test_the_memory_of_a_run_is_what_its_tensors_take(case):
    """Within a tenth of every tensor counted, over both families, micro-batches, optimizers, accumulation and recomputation."""
    family, d_model, n_layer, seq_len, vocab_size, micro_batch, optimizer, loss_rows, accumulate, recompute = case
    config = GPTConfig(vocab_size, n_layer, d_model // 64, d_model, seq_len, **family)
    with Live() as live:
        train_two_steps(config, micro_batch, optimizer, loss_rows or None, accumulate, recompute)
    parts = budget.training_memory(config, micro_batch, optimizer=optimizer, device_type="cpu", accumulate=accumulate, recompute=recompute,
                                   all_logits=not loss_rows)
    assert sum(parts.values()) == pytest.approx(live.peak, rel=0.1), parts


@pytest.mark.parametrize("family", [CHAPTERS, REPORTS], ids=["chapter's", "report's"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_activations_are_what_autograd_saves(family, micro_batch):
    config = GPTConfig(512, 6, 4, 128, 128, **family)
    model = GPT(config)
    model.loss_rows = 512
    x = torch.randint(0, 512, (micro_batch, 128))
    loss_saves = 4 * 128 * (config.padded_vocab + x.numel())        # the gradients that ChunkedLoss has made
    activations = budget.training_memory(config, micro_batch, device_type="cpu")["activations"]
    assert activations == pytest.approx(saved_bytes(model, x, x) - loss_saves, rel=0.02)


RESIDENT = """
import sys; sys.path.insert(0, {tests!r})
import gc, test_budget as t
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))
t.train_two_steps(t.GPTConfig(512, 2, 2, 64, 64, **t.REPORT_FAMILY), 2, "muon", 64, True, True)      # what libraries load once
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
t.train_two_steps(t.GPTConfig(8192, 6, 4, 256, 256, **{family!r}), 16, "adamw", 512, {accumulate}, {recompute})
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("family, accumulate, recompute", [(CHAPTERS, False, False), (CHAPTERS, True, True), (REPORTS, True, False)],
                         ids=["chapter's", "recomputed", "report's"])
def test_the_memory_of_a_run_is_what_its_process_takes(family, accumulate, recompute):
    """Resident memory, of a malloc that is told to give back what is freed: within a tenth."""
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    code = RESIDENT.format(tests=str(ROOT / "tests"), family=family, accumulate=accumulate, recompute=recompute)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **returned})
    parts = budget.training_memory(GPTConfig(8192, 6, 4, 256, 256, **family), 16, device_type="cpu", accumulate=accumulate, recompute=recompute)
    assert sum(parts.values()) == pytest.approx(int(done.stdout), rel=0.1), (parts, done.stderr)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", [CHAPTERS, REPORTS], ids=["chapter's", "report's"])
@pytest.mark.parametrize("micro_batch, recompute", [(4, False), (16, False), (16, True)])
def test_the_memory_of_a_run_is_what_a_gpu_allocates(family, micro_batch, recompute):
    config = GPTConfig(50257, 12, 6, 768, 1024, **family)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"), torch.autocast("cuda", torch.bfloat16):
        train_two_steps(config, micro_batch, "adamw", LOSS_ROWS["cuda"], True, recompute)
    parts = budget.training_memory(config, micro_batch, recompute=recompute)
    assert sum(parts.values()) == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.1), parts


def test_sharded_over_many_gpus_the_states_vanish_and_the_activations_stay():
    config = GPTConfig.from_depth(20)
    alone, sharded = budget.training_memory(config, 16), budget.training_memory(config, 16, gpus=1000, sharded=True)
    for what in ("parameters", "optimizer states", "gradients"):
        assert sharded[what] == pytest.approx(alone[what] / 1000)
    assert sharded["activations"] == alone["activations"] and budget.training_memory(config, 16, gpus=1000) == alone
    assert alone["parameters"] + alone["gradients"] + alone["optimizer states"] == pytest.approx(16 * 522e6, rel=1e-3)


@pytest.mark.parametrize("memory_gb", [20, 80, 141])
def test_the_largest_micro_batch_fits_and_the_next_does_not(memory_gb):
    config, room = GPTConfig.from_depth(12), memory_gb * 1e9 * 0.95
    for options in ({}, {"recompute": True}, {"gpus": 8, "sharded": True}):
        found = budget.largest_micro_batch(config, memory_gb, **options)
        assert sum(budget.training_memory(config, found, **options).values()) <= room
        assert sum(budget.training_memory(config, found + 1, **options).values()) > room
    assert budget.largest_micro_batch(config, 1) == 0


def test_fit_says_what_fits_and_what_takes_the_fewest_flops(capsys):
    main(["--depth", "20", "--fit"])
    ways = json.load(open("runs/budget.json"))["rows"][0]["fit"]
    assert [(way["strategy"], way["recompute"]) for way in ways] == [("ddp", False), ("fsdp", False), ("ddp", True), ("fsdp", True)]
    plain, _, recomputed, sharded = (way["micro_batch"] for way in ways)
    assert plain < recomputed < sharded and f"fastest by its FLOPs: DDP, --micro-batch {plain}" in capsys.readouterr().out
    assert ways[0]["flops"] == pytest.approx(3.375e9, rel=1e-3) and ways[2]["flops"] - ways[0]["flops"] == 2 * 393_216_000 + 4 * 20 * 2048 * 1280
    main(["--fit"])
    out = capsys.readouterr().out
    assert "7B: DDP " in out and "does not fit" in out and "7B: fastest by its FLOPs: FSDP" in out and "124M (GPT-2): one GPU" in out
    main(["--depth", "60", "--gpu", "t4", "--fit"])
    assert "nothing fits" in capsys.readouterr().out


def test_gpus_are_matched_exactly_never_by_a_part_of_the_name():
    assert find_gpu("NVIDIA A40").bf16 == 149.7 and find_gpu("NVIDIA RTX A4000").bf16 == 76.7
    assert find_gpu("nvidia h100 80gb hbm3") is find_gpu("H100") is H100
    for stranger in ("NVIDIA A400", "A4", "H100 80GB", "NVIDIA H100", "NVIDIA RTX A4500", "GH200", ""):
        assert find_gpu(stranger) is None
    names = [name.lower() for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


# What the datasheets print with sparsity, twice the dense rate: TFLOP/s in bf16 (fp16 where there is no bf16).
SPARSE = {"NVIDIA H200": 1979, "NVIDIA H100 80GB HBM3": 1979, "NVIDIA H100 PCIe": 1513, "NVIDIA H100 NVL": 1671, "NVIDIA H200 NVL": 1671,
          "NVIDIA A100-SXM4-80GB": 624, "NVIDIA A100-SXM4-40GB": 624, "NVIDIA A100 80GB PCIe": 624, "NVIDIA A100-PCIE-40GB": 624,
          "NVIDIA B200": 4500, "NVIDIA L40S": 724.1, "NVIDIA L4": 242, "NVIDIA A40": 299.4, "NVIDIA A10": 250, "NVIDIA RTX A4000": 153.4,
          "NVIDIA RTX A6000": 309.7, "NVIDIA RTX 6000 Ada Generation": 728.5, "NVIDIA GeForce RTX 4090": 330.4,
          "NVIDIA GeForce RTX 3090": 142, "NVIDIA GeForce RTX 5090": 419, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1007.6,
          "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 877.9}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_gpu_table_is_of_dense_figures(gpu):
    if gpu.bf16 is not None:
        assert gpu.bf16 == pytest.approx(SPARSE[gpu.name] / 2, rel=2e-3)
        assert gpu.bf16 == gpu.fp16 and gpu.fp32 <= gpu.tf32 <= gpu.bf16 / 1.9     # TF32's rate is half of bf16's, on all of them
    assert gpu.peak("fp32") == gpu.fp32 * 1e12 and gpu.memory_gb > 0


def test_the_largest_run_that_flags_can_name_is_still_a_number():
    main(["--params", "1e18T", "--tokens-per-param", "1e18", "--mfu", "1e-18", "--price", "1e18"])
    row = json.loads(open("runs/budget.json").read(), parse_constant=lambda name: pytest.fail(name))["rows"][0]
    assert row["flops"] == pytest.approx(6e78) and math.isfinite(row["hours"])


def test_recomputing_keeps_one_layer_and_the_inputs_of_the_others():
    run = CHAPTER_RUNS[1]
    unit = 2048 * 8 * 2048 / 1e9
    assert replace(run, recompute=True).activations == pytest.approx((34 + 2 * 24) * unit) and run.activations == pytest.approx(34 * 24 * unit)


@pytest.mark.parametrize("argv, words", [
    (["--fit", "--params", "1B"], "--d-model and --n-layer"),
    (["--gpu", "a4"], "--gpu a4"), (["--params", "0"], "--params"), (["--params", "-1B"], "--params"), (["--params", "many"], "--params"),
    (["--params", "inf"], "--params"), (["--params", ""], "--params"), (["--params", "B"], "--params"), (["--gpus", "0"], "--gpus"), (["--gpus", "8"], "which model"),
    (["--mfu", "40", "--params", "1B"], "share of the peak"), (["--mfu", "0"], "--mfu"), (["--d-model", "64"], "--n-layer"),
    (["--d-model", "65", "--n-layer", "2", "--n-head", "4"], "does not divide"), (["--tokens", "1B", "--tokens-per-param", "3"], "not allowed"),
    (["--d-model", "65", "--n-layer", "2"], "even head size"), (["--params", "1B", "--n-head", "7"], "--d-model"), (["--n-layer", "100000000"], "--n-layer"),
    (["--params", "1e308"], "--params"), (["--mfu", "1e-300", "--params", "1B"], "--mfu"), (["--vocab-size", "9" * 21], "--vocab-size"),
    (["--depth", "20", "--d-model", "64"], "--d-model"), (["--depth", "0"], "--depth"), (["--measured-tokens-per-s", "5"], "--depth"),
    (["--depth", "18", "20", "--measured-tokens-per-s", "5"], "one number"), (["--depth", "20", "--d-model", "64"], "--d-model"), (["--depth", "0"], "--depth"), (["--measured-tokens-per-s", "5"], "--depth"),
    (["--depth", "18", "20", "--measured-tokens-per-s", "5"], "one number"), (["--depth", "20", "--tokens", "100K"], "less than one step's"), (["--kwh-price", "2"], "--depth"),
    (["--depth", "20", "--mfu", "0.5", "--measured-tokens-per-s", "5"], "give one"), (["--price", "-2"], "--price"), (["--nonsense"], "--nonsense"), (["--param", "1B"], "--param")])
def test_refusals(argv, words, refused, tmp_path):
    refused(main, *argv, words=(words,))
    assert not (tmp_path / "runs").exists()


# --- the machine and its processes -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name, words", [("cuda:99", "CUDA"), ("mps", "cpu and cuda"), ("nonsense", "no such device")])
def test_devices_that_are_not_there(name, words):
    with pytest.raises(UserError, match=words):
        pick_device(name)
    assert pick_device("cpu") == torch.device("cpu")


def test_keeping_memory_is_asked_for_where_it_can_be():
    assert keep_memory() in (True, False)
    torch.ones(40_000_000).sum()            # and memory still comes and goes


def ranks(store, world):
    """What new_name gives each of world ranks that start together on a store."""
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: new_name(store, rank, world, 20), range(world)))


def test_a_restarted_group_agrees_on_a_name_of_its_own():
    """Whatever an earlier start left in the launcher's store, also one that was ended half-way."""
    store, names = dist.HashStore(), []
    for world in (3, 3, 1, 4):
        together = ranks(store, world)
        assert len(set(together)) == 1
        names += together[:1]
        store.set("ask/2", "dead")
        store.set("answer/1", "dead older")
    assert len(set(names)) == 4


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RuntimeError, match=r"rank 0 waited for ranks \[1\]"):
        new_name(dist.HashStore(), 0, 2, 0.1)
    with pytest.raises(RuntimeError, match="rank 1 waited for rank 0"):
        new_name(dist.HashStore(), 1, 2, 0.1)


@pytest.mark.parametrize("error", [UserError("no such file"), OSError(28, "No space left on device", "runs")])
def test_what_rank_0_refuses_all_refuse(error, monkeypatch):
    def act():
        raise error

    told = []
    monkeypatch.setattr(budget.dist, "broadcast_object_list", lambda refusal: told.append(refusal[0]) if refusal[0] else refusal.__setitem__(0, told[0]))
    for rank in (0, 1):
        monkeypatch.setattr(budget.dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(UserError, match=str(error).replace("[", "\\[")):
            budget.on_rank_0(act if rank == 0 else lambda: pytest.fail("not on rank 1"))
