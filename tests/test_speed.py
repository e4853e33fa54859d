"""speed.py: its arithmetic, its table and what it does without a compiler or a known GPU. No test asserts a time."""
import json
from concurrent.futures import Future

import pytest
import torch

import budget
import speed
from budget import compile_failure, datasheet_peak, find_gpu
from conftest import run_script, save_tokens
from model import GPTConfig
from speed import ROWS, Row, main, measured_peak, new_row, new_step, step_seconds, why_bf16

SMALL = ("--d-model", "32", "--n-layer", "1", "--n-head", "2", "--seq-len", "16", "--batch", "2", "--steps", "2")


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    monkeypatch.setattr(speed, "PEAK_SIZES", {"cpu": 128, "cuda": 128})


def test_rows_are_consistent_with_each_other(capsys):
    save_tokens()
    main([*SMALL, "--no-compile", "--profile"])
    results = json.load(open("runs/speed.json"))
    assert {"device", "threads", "peak", "rows"} <= results.keys() and results["peak"].keys() == {"fp32", "bf16"}
    flops_per_token = 6 * (512 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32) + 12 * 16 * 32
    assert [row["name"] for row in results["rows"]] == [row.name for row in ROWS if not row.compile]
    for row, precision in zip(results["rows"], [row.precision for row in ROWS if not row.compile], strict=True):
        assert row["tokens_per_s"] == pytest.approx(32 / row["ms"] * 1e3)
        assert row["flops_per_s"] == pytest.approx(row["tokens_per_s"] * flops_per_token)
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / results["peak"][precision])
        assert set(row["phases_ms"]) == {"forward", "backward", "optimizer"} and row["memory_gb"] > 0
        assert row["loss_differs"] < (1e-5 if precision == "fp32" else 0.1)
    out = capsys.readouterr().out
    assert out.startswith("corpus: test") and "best in fp32: " in out and "best in bf16: bf16 alone" in out
    assert json.load(open("runs/speed-trace.json"))["traceEvents"] and "perfetto" in out


def test_the_median_of_the_counted_steps_in_turn():
    turns, answers = [], {("a", "seconds"): iter([3.0, 1.0, 2.0, 50.0, 2.0]), ("b", "seconds"): iter([4.0] * 5),
                          ("a", "phases"): iter([[1.0, 2.0, 3.0]] * 4 + [[9.0, 9.0, 9.0]]), ("b", "phases"): iter([[0.0, 1.0, 0.0]] * 5)}

    def ask(name, what):
        turns.append(name)
        return next(answers[name, what])

    seconds = step_seconds(ask, ["a", "b"], 5)
    assert seconds["a"] == (2.0, {"forward": 1.0, "backward": 2.0, "optimizer": 3.0}) and seconds["b"][0] == 4.0
    assert "".join(turns) == "ab" * 10


def test_every_row_makes_the_same_steps_as_the_plain_one():
    """The levers change how a step is made, not what it does: losses agree to rounding, and fall."""
    x = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    config = GPTConfig(vocab_size=64, d_model=32, n_head=2, n_layer=1, seq_len=16)
    curves = {}
    for row in ROWS:
        if not row.compile:
            step = new_step(config, x, x, row)
            curves[row] = [step().item() for _ in range(5)]
    plain = curves[ROWS[0]]
    assert plain[-1] < plain[0]
    for row, curve in curves.items():
        assert curve == pytest.approx(plain, rel=1e-5 if row.precision == "fp32" else 1e-2), row
    assert curves[ROWS[1]] != plain


def test_an_unknown_device_has_no_mfu_and_a_known_one_its_datasheets(monkeypatch, capsys):
    assert datasheet_peak(torch.device("cpu"), "bf16") is None
    monkeypatch.setattr(budget, "device_name", lambda device: "NVIDIA H200")
    assert datasheet_peak(torch.device("cuda", 0), "bf16") == 989e12
    assert datasheet_peak(torch.device("cuda", 0), "fp32") == find_gpu("h200").fp32 * 1e12
    monkeypatch.setattr(budget, "device_name", lambda device: "NVIDIA H2000")
    assert datasheet_peak(torch.device("cuda", 0), "bf16") is None
    row = new_row("plain", 0.1, dict.fromkeys(speed.PHASES, 0.03), 1e6, 10, None, 0.5, 0.0)
    speed.print_row(row)
    assert row["mfu"] is None and "n/a" in capsys.readouterr().out


def test_above_the_peak_is_a_warning(capsys):
    row = {"name": "fp32", "ms": 1.0, "tokens_per_s": 1.0, "flops_per_s": 2e9, "mfu": 1.2, "memory_gb": 0.5, "loss_differs": 0.0, "phases_ms": dict.fromkeys(speed.PHASES, 0.1)}
    speed.print_row(row)
    assert "120%" in (out := capsys.readouterr().out) and "warning" in out


def test_the_peak_is_a_rate_of_products():
    assert measured_peak(torch.device("cpu"), "fp32") > 1e8


@pytest.mark.parametrize("products, step, words", [(0.3, 0.4, "only adds conversions"), (1.0, 1.1, "half the bytes"),
                                                   (2.2, 1.4, "leave of that"), (2.2, 0.8, "cost more than")])
def test_the_sentence_on_bf16_follows_from_the_measurements(products, step, words):
    sentence = why_bf16({"fp32": 1e11, "bf16": products * 1e11}, step)
    assert words in sentence and f"{products:.2f} times" in sentence and f"{step:.2f} times" in sentence


@pytest.mark.slow
def test_without_a_compiler_the_other_rows_run(tmp_path):
    save_tokens()
    done = run_script("speed.py", *SMALL, env={"PATH": str(tmp_path), "CXX": "g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    results = json.load(open("runs/speed.json"))
    assert [row["name"] for row in results["rows"]] == [row.name for row in ROWS if not row.compile]
    assert "C++ compiler" in results["skipped"]["compile alone"] and "not measured" in done.stdout


class Pool:
    """A pool whose process is this one, and whose work fails with an error, if any."""

    def __init__(self, error=None):
        self.error = error

    def submit(self, work):
        future = Future()
        future.set_exception(self.error) if self.error else future.set_result((6.0, 0.5))
        return future


def test_with_a_compile_cache_that_cannot_be_written_the_other_rows_run():
    x, refusal = torch.zeros(1, 4, dtype=torch.long), PermissionError(13, "Permission denied", "cache")
    benches = {row.name: speed.Bench(GPTConfig(), x, x, row) for row in (Row("a"), Row("b", compile=True))}
    warm, skipped = speed.started(benches, {"a": Pool(), "b": Pool(refusal)})
    assert list(warm) == ["a"] and "its cache cannot be used" in skipped["b"]
    for error in (refusal, RuntimeError("a fault of ours")):        # of a row that does not compile it is no answer
        with pytest.raises(type(error)):
            speed.started(benches, {"a": Pool(error), "b": Pool()})


def test_a_fault_that_is_not_the_compilers_is_not_taken_for_it():
    assert compile_failure(RuntimeError("InvalidCxxCompiler")) is None


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
    assert len(json.load(open("runs/speed.json"))["rows"]) == len(ROWS)
