"""budget.py: the chapter's table digit for digit, the GPU table, and the habits that all scripts share."""
import json
import os

import pytest
import torch

import budget
from budget import CHAPTER_RUNS, GPUS, Run, find_gpu, keep_memory, main, pick_device, save_results, written_whole
from conftest import assert_one_line, run_script
from model import Parser, UserError, add_model_flags, command, config_from, count, duration_text, positive, size_text

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


def test_what_the_activation_formula_leaves_out():
    one, eight = CHAPTER_RUNS[0].left_out(), CHAPTER_RUNS[1].left_out()
    assert one["logits"] == pytest.approx(10 * 16 * 1024 * 50304 / 1e9) and "gradient buckets" not in one
    assert eight["gradient buckets"] == pytest.approx(2.6)
    assert "two gathered layers" in CHAPTER_RUNS[2].left_out(sharded=True)


def test_gpus_are_matched_exactly_never_by_a_part_of_the_name():
    assert find_gpu("NVIDIA A40").bf16 == 149.7 and find_gpu("NVIDIA RTX A4000").bf16 == 76.7
    assert find_gpu("nvidia h100 80gb hbm3") is find_gpu("H100") is H100
    for stranger in ("NVIDIA A400", "A4", "H100 80GB", "NVIDIA H100", "NVIDIA RTX A4500", "GH200", ""):
        assert find_gpu(stranger) is None
    names = [name.lower() for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_gpu_table_is_of_dense_figures(gpu):
    if gpu.bf16 is not None:
        assert gpu.bf16 == gpu.fp16 and gpu.fp32 <= gpu.tf32 <= gpu.bf16 / 1.9     # TF32's rate is half of bf16's, on all of them
        assert gpu.bf16 / gpu.watts < 4                 # TFLOP/s a watt: sparse figures would show
    assert gpu.peak("fp32") == gpu.fp32 * 1e12 and gpu.memory_gb > 0


@pytest.mark.parametrize("argv, words", [
    (["--gpu", "a4"], "--gpu a4"), (["--params", "0"], "--params"), (["--params", "-1B"], "--params"), (["--params", "many"], "--params"),
    (["--params", "inf"], "--params"), (["--params", ""], "--params"), (["--params", "B"], "--params"), (["--gpus", "0"], "--gpus"), (["--gpus", "8"], "which model"),
    (["--mfu", "40", "--params", "1B"], "share of the peak"), (["--mfu", "0"], "--mfu"), (["--d-model", "64"], "--n-layer"),
    (["--d-model", "65", "--n-layer", "2", "--n-head", "4"], "does not divide"), (["--tokens", "1B", "--tokens-per-param", "3"], "not allowed"),
    (["--price", "-2"], "--price"), (["--nonsense"], "--nonsense"), (["--param", "1B"], "--param")])
def test_refusals(argv, words, refused, tmp_path):
    refused(main, *argv, words=(words,))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text, value", [("124M", 124e6), ("1.3b", 1.3e9), ("6e9", 6e9), ("2T", 2e12), ("500", 500), ("8K", 8e3)])
def test_counts(text, value):
    assert count(text) == pytest.approx(value)


@pytest.mark.parametrize("n, text", [(124e6, "124M"), (1.3e9, "1.3B"), (999, "999"), (1.5e13, "15T"), (619e3, "619K")])
def test_short_forms(n, text):
    assert size_text(n) == text


@pytest.mark.parametrize("seconds, text", [(0.34, "0.3 seconds"), (119, "119.0 seconds"), (180, "3.0 minutes"), (54000, "15.0 hours"), (None, "n/a")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text


# --- the habits -----------------------------------------------------------------------------------------------------

def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with written_whole(path) as part:
        part.write_text("old")
    with pytest.raises(RuntimeError), written_whole(path) as part:
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_results_replace_each_other():
    for value in (1, 2):
        save_results("name", {"value": value})
    assert json.load(open("runs/name.json")) == {"value": 2} and os.listdir("runs") == ["name.json"]


def test_a_runs_that_is_no_directory_is_one_line(tmp_path, refused):
    (tmp_path / "runs").write_text("a file")
    refused(main, words=("runs",))


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


@pytest.mark.parametrize("name, words", [("cuda:99", "CUDA"), ("mps", "cpu and cuda"), ("nonsense", "no such device")])
def test_devices_that_are_not_there(name, words):
    with pytest.raises(UserError, match=words):
        pick_device(name)
    assert pick_device("cpu") == torch.device("cpu")


def test_keeping_memory_is_asked_for_where_it_can_be():
    assert keep_memory() in (True, False)
    torch.ones(40_000_000).sum()            # and memory still comes and goes


def test_model_flags_make_a_configuration():
    parser = Parser()
    add_model_flags(parser)
    config = config_from(parser.parse_args(["--d-model", "64", "--n-head", "2"]), vocab_size=99)
    assert (config.d_model, config.n_head, config.n_layer, config.vocab_size) == (64, 2, 4, 99)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1.5x", ""])
def test_positive_numbers(text):
    with pytest.raises(Exception, match="positive"):
        positive(float)(text)


@pytest.mark.parametrize("script", ["prepare_data.py", "speed.py", "grad_accum.py", "ddp_train.py", "scaling.py", "budget.py", "train_gpu.py"])
def test_every_script_helps_and_refuses_from_the_shell(script):
    helped = run_script(script, "--help")
    assert helped.returncode == 0 and f"python {script}" in helped.stdout
    assert_one_line(run_script(script, "--nonsense"), script, "--nonsense")
