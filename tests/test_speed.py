"""speed.py: its arithmetic, its table and what it does without a compiler or a known GPU. No test asserts a time."""
import json

import pytest
import torch

import budget
import speed
from budget import compile_failure, datasheet_peak, find_gpu
from conftest import run_script, save_tokens
from model import GPTConfig
from speed import main, measured_peak, new_row, new_step, step_seconds, why_bf16

SMALL = ("--d-model", "32", "--n-layer", "1", "--n-head", "2", "--seq-len", "16", "--batch", "2", "--steps", "2")


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    monkeypatch.setattr(speed, "PEAK_SIZES", {"cpu": 128, "cuda": 128})


def test_rows_are_consistent_with_each_other(capsys):
    save_tokens()
    main([*SMALL, "--no-compile"])
    results = json.load(open("runs/speed.json"))
    assert {"device", "threads", "peak", "rows"} <= results.keys() and results["peak"].keys() == {"fp32", "bf16"}
    flops_per_token = 6 * (512 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32) + 12 * 16 * 32
    for row, precision in zip(results["rows"], ("fp32", "bf16"), strict=True):
        assert row["tokens_per_s"] == pytest.approx(32 / row["ms"] * 1e3)
        assert row["flops_per_s"] == pytest.approx(row["tokens_per_s"] * flops_per_token)
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / results["peak"][precision])
        assert set(row["phases_ms"]) == {"forward", "backward", "optimizer"}
    assert capsys.readouterr().out.startswith("corpus: test")


def test_the_median_of_the_counted_steps_in_turn(monkeypatch):
    now, turns = [0.0], []
    durations = {"a": iter([3.0, 1.0, 2.0, 50.0, 2.0] + [3.0] * 5), "b": iter([4.0] * 10)}
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def stepper(name):
        def step(mark=lambda: None):
            turns.append(name)
            duration = next(durations[name])
            for share in (0, 0.25, 0.5, 0.25):
                now[0] += duration * share
                mark()
        return step

    seconds = step_seconds({"a": stepper("a"), "b": stepper("b")}, torch.device("cpu"), 5)
    assert seconds["a"] == (2.0, {"forward": 0.75, "backward": 1.5, "optimizer": 0.75}) and seconds["b"][0] == 4.0
    assert "".join(turns) == "ab" * 10


def test_every_row_starts_from_the_same_model_and_learns(monkeypatch):
    losses = {}

    class Recording(speed.GPT):
        def forward(self, idx, targets=None):
            logits, loss = super().forward(idx, targets)
            losses[precision].append(loss.item())
            return logits, loss

    monkeypatch.setattr(speed, "GPT", Recording)
    x = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    config = GPTConfig(vocab_size=64, d_model=32, n_head=2, n_layer=1, seq_len=16)
    for precision in ("fp32", "bf16"):
        losses[precision] = []
        step = new_step(config, x, x, precision, compiled=False)
        for _ in range(5):
            step()
    assert losses["fp32"][0] == pytest.approx(losses["bf16"][0], rel=1e-2) and losses["fp32"] != losses["bf16"]
    assert all(curve[-1] < curve[0] for curve in losses.values())


def test_an_unknown_device_has_no_mfu_and_a_known_one_its_datasheets(monkeypatch, capsys):
    assert datasheet_peak(torch.device("cpu"), "bf16") is None
    monkeypatch.setattr(budget, "device_name", lambda device: "NVIDIA H200")
    assert datasheet_peak(torch.device("cuda", 0), "bf16") == 989e12
    assert datasheet_peak(torch.device("cuda", 0), "fp32") == find_gpu("h200").fp32 * 1e12
    monkeypatch.setattr(budget, "device_name", lambda device: "NVIDIA H2000")
    assert datasheet_peak(torch.device("cuda", 0), "bf16") is None
    row = new_row("fp32", 0.1, dict.fromkeys(speed.PHASES, 0.03), 1e6, 10, None)
    speed.print_row(row)
    assert row["mfu"] is None and "n/a" in capsys.readouterr().out


def test_above_the_peak_is_a_warning(capsys):
    row = {"name": "fp32", "ms": 1.0, "tokens_per_s": 1.0, "flops_per_s": 2e9, "mfu": 1.2, "phases_ms": dict.fromkeys(speed.PHASES, 0.1)}
    speed.print_row(row)
    assert "120%" in (out := capsys.readouterr().out) and "warning" in out


def test_the_peak_is_a_rate_of_products():
    assert measured_peak(torch.device("cpu"), "fp32") > 1e8


@pytest.mark.parametrize("products, step, words", [(0.3, 0.4, "only adds conversions"), (1.0, 1.1, "half the bytes"),
                                                   (2.2, 1.4, "leave of that"), (2.2, 0.8, "cost more than")])
def test_the_sentence_on_bf16_follows_from_the_measurements(products, step, words):
    sentence = why_bf16({"fp32": 1e11, "bf16": products * 1e11}, step)
    assert words in sentence and f"{products:.2f} times" in sentence and f"{step:.2f} times" in sentence


def test_without_a_compiler_the_other_rows_run(tmp_path):
    save_tokens()
    done = run_script("speed.py", *SMALL, env={"PATH": str(tmp_path), "CXX": "g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    results = json.load(open("runs/speed.json"))
    assert [row["name"] for row in results["rows"]] == ["fp32", "bf16 autocast"]
    assert "C++ compiler" in results["skipped"]["fp32 + torch.compile"] and "not measured" in done.stdout


def test_with_a_compile_cache_that_cannot_be_written_the_other_rows_run(monkeypatch, capsys):
    def refuse(model):
        raise PermissionError(13, "Permission denied", "cache")

    save_tokens()
    monkeypatch.setattr(torch, "compile", refuse)
    main([*SMALL])
    assert "fp32 + torch.compile  not measured: its cache cannot be used" in capsys.readouterr().out
    assert len(json.load(open("runs/speed.json"))["rows"]) == 2


def test_a_fault_that_is_not_the_compilers_is_not_taken_for_it():
    assert compile_failure(RuntimeError("InvalidCxxCompiler")) is None


def test_the_trace(capsys):
    save_tokens()
    main([*SMALL, "--no-compile", "--profile"])
    assert json.load(open("runs/speed-trace.json"))["traceEvents"] and "perfetto" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["--device", "cuda:9"], "--device"), (["--batch", "0"], "--batch"), (["--seq-len", "-4"], "--seq-len"), (["--n-head", "3"], "does not divide"),
    (["--seq-len", "50000"], "a context of 50,000"), (["--data", "none.pt"], "none.pt")])
def test_refusals(argv, words, refused, tmp_path):
    save_tokens()
    refused(main, *argv, words=(words,))
    assert not (tmp_path / "runs").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    save_tokens()
    main([*SMALL, "--device", "cuda"])
    assert len(json.load(open("runs/speed.json"))["rows"]) == 3
