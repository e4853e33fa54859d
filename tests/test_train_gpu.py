"""train_gpu.py: the same model from any number of processes, from any interruption, and one clear line for the rest."""
import contextlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import prepare_data
import train_gpu
from conftest import ROOT, assert_one_line, free_port, run_script, save_tokens
from model import GPT, GPTConfig, UserError
from prepare_data import Tokens, load_corpus, step_positions
from train_gpu import Loader, learning_rate, main, micro_batch_size, read_log

SIZE = ("--d-model", "16", "--n-layer", "2", "--n-head", "2", "--seq-len", "16")
TINY = ("--device", "cpu", *SIZE, "--steps", "10", "--global-batch", "8", "--micro-batch", "4", "--warmup", "3",
        "--clip", "0.5", "--save-every", "5", "--eval-every", "5")
CONFIG = GPTConfig(vocab_size=128, d_model=16, n_layer=2, n_head=2, seq_len=16)


@pytest.fixture(autouse=True)
def tokens():
    torch.set_num_threads(1)            # sums in one order, and no quarrel over two cores
    return save_tokens(vocab_size=128)


def train(*flags, out="run"):
    main([*TINY, *map(str, flags), "--out", out])
    return final(out)


def launch(processes, *flags, out="run", strategy="ddp", launcher=("--standalone",), **popen):
    """Start the script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes),
               str(ROOT / "train_gpu.py"), *TINY, "--micro-batch", "2", "--strategy", strategy, "--out", out, *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen)


def ranks(processes, *flags, out="run", strategy="ddp"):
    """Run the script in as many processes, as torchrun would start them but forked from one that has it imported already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["train_gpu", "pytest"])
    argv = [*TINY, "--micro-batch", "2", "--strategy", strategy, "--out", out, *map(str, flags)]
    started = [context.Process(target=as_rank, args=(rank, processes, port, argv)) for port in [free_port()] for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0] * processes


def as_rank(rank, world, port, argv):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    main(argv)


def finish(process, status=0):
    out, _ = process.communicate(timeout=240)
    assert process.returncode == status, out
    return out


def fails(process):
    """Wait for a launcher whose ranks fail: the lines they wrote on standard error, and no traceback but the launcher's own."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and out.count("Traceback") == out.count("ChildFailedError:"), out
    return [line for line in out.splitlines() if line.startswith("train_gpu.py: ")]


def final(out, step=10):
    """A checkpoint's content; a sharded one's put together by torch's own converter."""
    path = Path(out) / f"step-{step:07d}"
    if path.is_dir():
        dcp_to_torch_save(path, path.with_suffix(".whole"))
        return torch.load(path.with_suffix(".whole"), weights_only=True)
    return torch.load(path.with_suffix(".pt"), weights_only=True)


def same(a, b):
    """Bit for bit, whatever is nested."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def difference(a, b):
    return max((a["model"][k] - b["model"][k]).abs().max().item() for k in a["model"])


def losses(out):
    return [r["loss"] for r in read_log(Path(out) / "log.jsonl") if "loss" in r]


# --- schedules, batches, data order ---------------------------------------------------------------------------------

def test_schedules():
    chapter = [learning_rate(step, 400, 1.0, 50) for step in range(401)]
    assert chapter[0] == pytest.approx(1 / 50) and chapter[200] == pytest.approx(0.55) and chapter[400] == pytest.approx(0.1)
    top = chapter.index(max(chapter))
    assert 45 <= top <= 50 and chapter[top:] == sorted(chapter[top:], reverse=True)
    assert learning_rate(1000, 2000, 1e-3, 100) == pytest.approx(1e-3 * 0.55)
    assert learning_rate(49, 2000, 1e-3, 100) == pytest.approx(0.5e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * 49 / 2000))))
    wsd = [learning_rate(step, 100, 1.0, 10, "wsd", 0.2) for step in range(101)]
    assert wsd[9:81] == [1.0] * 72 and wsd[100] == 0 and wsd[90] == pytest.approx(0.5) and wsd[4] == pytest.approx(0.5)
    assert np.allclose(np.diff(wsd[80:]), -1 / 20)
    assert {learning_rate(step, 100, 2.0, 1, "constant") for step in range(100)} == {2.0}


@pytest.mark.parametrize("global_batch, world, wanted, size", [(128, 1, None, 32), (128, 8, None, 16), (128, 4, None, 32), (128, 1, 8, 8),
                                                               (12, 1, None, 12), (6, 2, None, 3), (100, 1, None, 25)])
def test_the_micro_batch_follows_from_the_global_batch(global_batch, world, wanted, size):
    assert micro_batch_size(global_batch, world, wanted) == size


@pytest.mark.parametrize("global_batch, world, wanted, words", [(100, 2, 32, "64 or 128"), (10, 3, None, "9 or 12"), (2, 4, None, "that does: 4")])
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(global_batch, world, wanted, words):
    with pytest.raises(UserError, match=words) as refused:
        micro_batch_size(global_batch, world, wanted)
    assert f"--global-batch {global_batch}" in str(refused.value) and f"{world} processes" in str(refused.value)


def test_every_position_is_equally_likely_and_none_is_outside():
    n, T = 40, 16
    tokens = Tokens([np.arange(n)], n)
    starts = np.concatenate([step_positions(tokens.positions(T), 1000, 0, step) for step in range(60)])
    counts = np.bincount(starts, minlength=n - T)
    assert len(counts) == n - T                                     # the last window's last target is the last token
    assert ((counts - 2500) ** 2 / 2500).sum() < 60                 # chi-square with 23 degrees of freedom, p < 1e-4
    x, y = tokens.windows([n - T - 1], T)
    assert y[0, -1] == n - 1 and torch.equal(x[0, 1:], y[0, :-1])


def test_windows_are_a_function_of_seed_and_step():
    assert np.array_equal(step_positions(1000, 8, 3, 7), step_positions(1000, 8, 3, 7))
    streams = [tuple(step_positions(10 ** 9, 8, seed, step)) for seed in range(5) for step in range(20)]
    assert len(set(streams)) == 100


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_share_out_the_same_windows(world, micro_batch, tokens):
    """Together the ranks read each step's windows once, whatever their number and the micro-batch."""
    per_step = 8 // micro_batch // world
    part = load_corpus().train
    loaders = [Loader(part, CONFIG, 8, micro_batch, 0, torch.device("cpu"), 2, rank, world) for rank in range(world)]
    for step in (2, 3, 4):
        rows = [loader.next() for _ in range(per_step) for loader in loaders]
        expected = part.windows(step_positions(20_000 - 16, 8, 0, step), 16)
        assert torch.equal(torch.cat([x for x, _ in rows]), expected[0]) and torch.equal(torch.cat([y for _, y in rows]), expected[1])
    for loader in loaders:
        loader.close()


def anonymous_memory():
    """Bytes of this process that no file backs: what was allocated, not mapped."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Anonymous:")))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
def test_tokens_are_never_copied_whole_into_memory():
    n = 50_000_000
    torch.save({"train": torch.ones(n, dtype=torch.int16), "val": torch.ones(100, dtype=torch.int16)}, "tokens.pt")
    before = anonymous_memory()
    train_part = load_corpus().train
    loader = Loader(train_part, CONFIG, 8, 4, 0, torch.device("cpu"), 0, 0, 1)
    for _ in range(20):
        loader.next()
    loader.close()
    assert len(train_part) == n and anonymous_memory() - before < 2 * n / 4


# --- several processes ----------------------------------------------------------------------------------------------

def test_one_two_and_four_processes_and_fsdp_train_the_same_model():
    flags = ("--steps", "30", "--micro-batch", "2", "--save-every", "30")
    main([*TINY, *flags, "--out", "one"])
    one, log = final("one", 30), read_log(Path("one/log.jsonl"))
    for name, processes, strategy in (("two", 2, "ddp"), ("four", 4, "ddp"), ("sharded", 2, "fsdp")):
        ranks(processes, *flags, out=name, strategy=strategy)
        theirs = read_log(Path(name) / "log.jsonl")
        for a, b in zip(log, theirs, strict=True):
            assert a["step"] == b["step"]
            for key in a.keys() & {"loss", "grad_norm", "val_loss"}:            # the norm is the global one, clipped or sharded
                assert b[key] == pytest.approx(a[key], abs=2e-5), (name, a, b)
        assert difference(one, final(name, 30)) < 1e-4, name
    # Sharded checkpoints are whole directories; one process reads what two wrote, and goes on from there.
    assert sorted(p.name for p in Path("sharded").glob("step-*") if p.is_dir()) == ["step-0000030"]
    for out, strategy in (("sharded", "fsdp"), ("one", "ddp")):
        main([*TINY, *flags, "--steps", "40", "--save-every", "40", "--resume", "--strategy", strategy, "--out", out])
    for a, b in zip(read_log(Path("one/log.jsonl")), read_log(Path("sharded/log.jsonl")), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), abs=5e-5)


def test_evaluation_does_not_depend_on_who_computes_it(tokens, monkeypatch):
    """Ranks 0 and 1 of two, one after the other, give the sums that one process gives, exactly."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    monkeypatch.setattr(train_gpu.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(train_gpu.dist, "get_rank", lambda: 0)
    parallel = train_gpu.Parallel(model, "ddp", torch.device("cpu"), compiled=False)
    collected = []
    monkeypatch.setattr(train_gpu.dist, "all_reduce", collected.append)
    val = load_corpus().val
    alone = train_gpu.evaluate(parallel, val)
    for world in (2, 3, 5):
        monkeypatch.setattr(train_gpu.dist, "get_world_size", lambda: world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(train_gpu.dist, "get_rank", lambda: rank)
            train_gpu.evaluate(parallel, val)
            parts.append(collected[-1])
        assert torch.equal(sum(parts), collected[0])
    n = 128
    x, y = val.windows(np.linspace(0, 4000 - 17, n).astype(int), 16)
    assert alone == pytest.approx(model(x, y)[1].item(), rel=1e-6)


def count_reductions(rank, port, strategy, counts):
    """One of two ranks: the gradient reductions of one step of four micro-batches, as the profiler saw them."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with train_gpu.process_group(torch.device("cpu")) as device:
        torch.manual_seed(0)
        parallel = train_gpu.Parallel(GPT(CONFIG), strategy, device, compiled=False)
        loader = Loader(load_corpus().train, CONFIG, 8, 1, 0, device, 0, rank, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            train_gpu.accumulate(parallel, loader, 4)
        counts[rank] = sum(e.count for e in profiler.key_averages() if e.key in ("c10d::allreduce_", "c10d::_reduce_scatter_base_"))
        loader.close()


@pytest.mark.parametrize("strategy, expected", [("ddp", 1), ("fsdp", CONFIG.n_layer + 1)])
def test_gradients_are_reduced_once_a_step(strategy, expected):
    """One all-reduce with ddp; with fsdp one reduce-scatter for each block and the root."""
    counts = mp.get_context("spawn").Array("i", 2)
    mp.spawn(count_reductions, (free_port(), strategy, counts), nprocs=2)
    assert list(counts) == [expected, expected]


# --- resuming -------------------------------------------------------------------------------------------------------

def test_ten_steps_are_five_and_resume_and_five():
    whole = train(out="whole")
    train_part = [*TINY, "--out", "parts"]
    main([*train_part, "--stop-at", "5"])
    assert not Path("parts/step-0000010.pt").exists()
    main([*train_part, "--resume"])
    assert same(whole, final("parts")) and losses("whole") == losses("parts") and len(losses("whole")) == 10
    main([*train_part, "--resume"])                                 # nothing left to do, nothing lost
    assert same(whole, final("parts")) and len(losses("parts")) == 10


def test_a_refusal_on_several_ranks_ends_them_all_in_one_line_each():
    process = launch(2, "--data", "none.pt")
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and out.count("none.pt: no such file") == 2 and "RuntimeError" not in out


def test_three_processes_resume_what_one_began():
    """Another world size goes on with the same windows: the same model to rounding."""
    flags = ("--micro-batch", "2", "--global-batch", "12")
    main([*TINY, *flags, "--out", "one"])
    main([*TINY, *flags, "--out", "three", "--stop-at", "5"])
    ranks(3, *flags, "--resume", out="three")
    assert difference(final("one"), final("three")) < 1e-4


def test_what_the_log_holds_beyond_the_checkpoint_is_written_again(monkeypatch):
    main([*TINY, "--out", "run", "--stop-at", "8"])
    Path("run/step-0000008.pt").unlink()                            # killed after step 8, saved at 5
    with open("run/log.jsonl", "a") as f:
        f.write('{"step": 9, "lo')
    train("--resume")
    assert [r["step"] for r in read_log(Path("run/log.jsonl")) if "loss" in r] == list(range(1, 11))


def test_every_validation_is_in_the_log_once_wherever_the_run_ended(monkeypatch, refused):
    """Also where it ended between the step's checkpoint and its validation."""
    def full(*args):
        raise UserError("here")

    main([*TINY, "--out", "whole"])
    main([*TINY, "--out", "stopped", "--stop-at", "5"])
    with monkeypatch.context() as patch:
        patch.setattr(train_gpu, "evaluate", full)
        refused(main, *TINY, "--out", "cut", words=("here",))
    found = {}
    for out in ("whole", "stopped", "cut"):
        main([*TINY, "--out", out, "--resume"])
        found[out] = [(r["step"], r["val_loss"]) for r in read_log(Path(out) / "log.jsonl") if "val_loss" in r]
    assert [step for step, _ in found["whole"]] == [5, 10] and found["whole"] == found["stopped"] == found["cut"]


@pytest.mark.parametrize("first, then, steps", [
    (("--steps", "3"), ("--steps", "10"), [3, 5, 10]), (("--stop-at", "5"), ("--eval-every", "4"), [5, 8, 10]),
    ((), ("--steps", "12", "--eval-every", "6"), [5, 10, 12])])
def test_a_validation_that_a_resumed_run_does_not_measure_again_stays_in_the_log(first, then, steps):
    train_part = [*TINY, "--eval-every", "5", "--out", "run"]
    main([*train_part, *first])
    before = [r for r in read_log(Path("run/log.jsonl")) if "val_loss" in r]
    main([*train_part, *then, "--resume"])
    after = [r for r in read_log(Path("run/log.jsonl")) if "val_loss" in r]
    assert [r["step"] for r in after] == steps and after[:len(before)] == before


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resume_holds_no_tensor_twice(optimizer, monkeypatch):
    """What is read is copied into the tensors that are there, and these are the ones that train on."""
    main([*TINY, "--optimizer", optimizer, "--stop-at", "5", "--out", "run"])
    state, held = train_gpu.Checkpoints.state, []

    def tensors(tree):
        return [t for value in tree.values() for t in (tensors(value) if isinstance(value, dict) else [value])]

    def noted(self):
        found = state(self)
        held.append([t.data_ptr() for t in tensors(found[0])])
        return found

    monkeypatch.setattr(train_gpu.Checkpoints, "state", noted)
    main([*TINY, "--optimizer", optimizer, "--resume", "--out", "run"])
    assert len(held) == 2 and held[0] == held[1] and len(held[0]) > 10          # as it was loaded, and as it was saved at the end


def test_a_checkpoint_of_the_earlier_form_is_refused_and_not_called_damaged(refused):
    stored = train()
    torch.save({**stored, "optimizer": [{"state": {}, "param_groups": []}]}, "run/step-0000010.pt")
    refused(main, *TINY, "--out", "run", "--resume", words=("step-0000010.pt", "earlier version"))
    assert Path("run/step-0000010.pt").exists()


def test_a_checkpoint_whose_tensors_have_other_shapes_is_not_whole(capsys):
    stored = train(out="run")
    name = "blocks.0.attn.qkv.weight"
    torch.save({**stored, "model": stored["model"] | {name: stored["model"][name][:1]}}, "run/step-0000010.pt")
    assert same(stored, train("--resume")) and "step-0000010.pt is not whole" in capsys.readouterr().out


def test_a_step_that_is_damaged_twice_is_set_aside_twice():
    for strategy, damaged in (("ddp", "step-0000010.pt"), ("fsdp", "step-0000010/.metadata")):
        flags = [*TINY, "--strategy", strategy, "--out", strategy]
        main(flags)
        for _ in range(2):
            (Path(strategy) / damaged).write_bytes(b"cut")
            main([*flags, "--resume"])
        assert len(losses(strategy)) == 10 and len(list(Path(strategy).glob("*.damaged"))) == 1


def test_a_checkpoint_loads_into_a_plain_gpt():
    stored = train()
    assert stored.keys() == {"model", "optimizer", "step", "config", "identity", "run", "keep", "branched_from"} and stored["step"] == 10
    model = GPT(GPTConfig(**stored["config"]))
    model.load_state_dict(stored["model"])
    assert not [k for k in stored["model"] if "module." in k or "_orig_mod." in k]


@pytest.mark.slow
def test_compiled_it_trains_the_same_and_saves_plain_names():
    plain, compiled = train(out="plain"), train("--compile", out="compiled")
    assert compiled["model"].keys() == plain["model"].keys() and difference(plain, compiled) < 1e-3
    finish(launch(2, "--compile", out="two"))
    finish(launch(2, "--compile", out="sharded", strategy="fsdp"))
    assert difference(plain, final("two")) < 1e-3
    assert losses("sharded") == pytest.approx(losses("plain"), abs=1e-3)


def test_recomputation_changes_memory_not_the_model():
    assert same(train(out="kept")["model"], train("--recompute", out="recomputed")["model"])


def test_the_newest_two_are_kept_and_remains_are_removed():
    Path("run").mkdir()
    Path("run/step-0000003.pt.77.part").write_bytes(b"cut")
    Path("run/step-0000004.part").mkdir()
    train("--save-every", "2")
    assert sorted(p.name for p in Path("run").glob("step-*")) == ["step-0000008.pt", "step-0000010.pt"]


def test_a_half_written_checkpoint_is_not_taken_for_whole(capsys):
    whole = train(out="whole")
    shutil.copytree("whole", "run")
    newest = Path("run/step-0000010.pt")
    newest.write_bytes(newest.read_bytes()[:3000])
    assert same(whole, train("--resume"))
    assert "step-0000010.pt is not whole" in (out := capsys.readouterr().out) and "resumed from run/step-0000005.pt" in out


def test_a_run_none_of_whose_checkpoints_is_whole_is_not_started_over(refused):
    train()
    for path in Path("run").glob("step-*"):
        path.write_bytes(b"")
    refused(main, *TINY, "--out", "run", "--resume", words=("none of its 2 checkpoints is whole",))


class Explosive:
    def __reduce__(self):
        return (open, ("executed", "w"))


DOTTED = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93\x8c\x0etouch executed\x85R."


@pytest.mark.parametrize("code", [pickle.dumps(Explosive()), DOTTED])
def test_code_in_a_checkpoint_is_refused_not_run(code, refused):
    main([*TINY, "--strategy", "fsdp", "--out", "sharded"])
    train(out="single")
    for path in (Path("single/step-0000010.pt"), Path("single/step-0000005.pt")):
        torch.save({"model": Explosive()}, path)
    for index in Path("sharded").glob("step-*/.metadata"):
        index.write_bytes(code)
    refused(main, *TINY, "--out", "single", "--resume", words=("none of its 2 checkpoints",))
    refused(main, *TINY, "--strategy", "fsdp", "--out", "sharded", "--resume", words=("none of its 2 checkpoints",))
    assert not Path("executed").exists()


def test_a_sharded_run_falls_back_to_its_last_whole_checkpoint_and_writes_the_damaged_one_again():
    flags = [*TINY, "--strategy", "fsdp", "--out", "sharded"]
    main(flags)
    whole = losses("sharded")
    Path("sharded/step-0000010/.metadata").write_bytes(b"cut")
    main([*flags, "--resume"])
    assert losses("sharded") == whole and Path("sharded/step-0000010/.metadata").stat().st_size > 100


def test_resume_without_a_checkpoint_starts_from_the_beginning(capsys):
    """So that one command does for the first start and for every restart."""
    assert same(train(out="fresh"), train("--resume", out="resumed"))
    assert "starting from the beginning" in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [
    ((), ("--resume", "--out")), (("--resume", "--d-model", "32"), ("d_model", "16", "32")), (("--resume", "--global-batch", "4"), ("global_batch", "8", "4")),
    (("--resume", "--seed", "1"), ("seed",)), (("--resume", "--strategy", "fsdp"), ("--strategy ddp",)), (("--resume", "--data", "other.pt"), ("its data is",))])
def test_what_is_refused_where_a_run_is_already(flags, words, refused):
    train()
    save_tokens("other.pt", vocab_size=128, seed=9)
    before = {p: p.read_bytes() for p in Path("run").iterdir()}
    refused(main, *TINY, "--out", "run", *flags, words=words)
    assert before == {p: p.read_bytes() for p in Path("run").iterdir()}


def interrupt_at(monkeypatch, step, act):
    """act() while the step's record is written, so within the loop."""
    original = train_gpu.Log.write

    def write(self, **record):
        original(self, **record)
        if record["step"] == step and "loss" in record:
            act()

    monkeypatch.setattr(train_gpu.Log, "write", write)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_saved_and_resume_goes_on(number, status, monkeypatch, capsys):
    whole, handler = train(out="whole"), signal.getsignal(number)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, lambda: signal.raise_signal(number))
        with pytest.raises(SystemExit) as stopped:
            train()
    assert stopped.value.code == status and [p.name for p in Path("run").glob("step-*")] == ["step-0000004.pt"]
    assert number.name in capsys.readouterr().out and signal.getsignal(number) == handler
    assert same(whole, train("--resume"))


def wait_for_steps(out, steps, process):
    deadline = time.time() + 120
    while len(read_log(Path(out) / "log.jsonl")) < steps:
        assert process.poll() is None and time.time() < deadline, process.communicate()[0]
        time.sleep(0.05)


def ranks_of(launcher):
    """The process ids of a launcher's ranks, in order."""
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()]


LONG = ("--steps", "300", "--save-every", "300", "--eval-every", "300")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The directory of a run of two ranks that nothing interrupts."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    before = os.getcwd()
    os.chdir(directory)
    save_tokens(vocab_size=128)
    ranks(2, *LONG)
    os.chdir(before)
    return directory / "run"


def test_under_torchrun_a_terminated_run_resumes_to_the_uninterrupted_ones_model(uninterrupted):
    interrupted = launch(2, *LONG, out="run")
    wait_for_steps("run", 20, interrupted)
    interrupted.send_signal(signal.SIGTERM)                         # to the launcher
    out, _ = interrupted.communicate(timeout=120)
    assert interrupted.returncode != 0
    saved = [p.name for p in Path("run").glob("step-*")]
    assert len(saved) == 1 and saved[0] != "step-0000300.pt", (saved, out)
    finish(launch(2, *LONG, "--resume", out="run"))
    assert same(final(uninterrupted, 300), final("run", 300)) and losses(uninterrupted) == losses("run")


def test_a_signal_to_any_one_rank_stops_all_saved():
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = launch(2, *LONG, out=number.name)
        wait_for_steps(number.name, 20, process)
        os.kill(ranks_of(process)[-1], number)                      # not the one that writes
        out, _ = process.communicate(timeout=120)
        assert process.returncode != 0 and f"stopped by {number.name}" in out and f"exitcode  : {status}" in out, out
        assert len(list(Path(number.name).glob("step-*.pt"))) == 1


def test_max_restarts_goes_on_by_itself(uninterrupted):
    process = launch(2, *LONG, "--resume", launcher=("--standalone", "--max-restarts", "1"))
    wait_for_steps("run", 20, process)
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    out = finish(process)
    assert "stopped by SIGTERM" in out and "resumed from" in out
    assert same(final(uninterrupted, 300), final("run", 300))


@pytest.mark.slow
def test_two_nodes_restart_together(uninterrupted):
    """Two launchers; a rank of one is killed. Only its launcher counts that as a restart, and the group forms anew."""
    address = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test", "--max-restarts", "2")
    flags = (*LONG, "--save-every", "10", "--resume")
    nodes = [launch(1, *flags, launcher=address) for _ in range(2)]
    wait_for_steps("run", 50, nodes[0])
    os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)
    outs = [finish(node) for node in nodes]
    assert any("resumed from" in out for out in outs), outs
    assert same(final(uninterrupted, 300)["model"], final("run", 300)["model"])


def test_a_rank_that_is_killed_ends_the_others_in_one_line():
    process = launch(2, *LONG)
    wait_for_steps("run", 20, process)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    lines = fails(process)
    assert len(lines) == 1 and "rank 0: another process of the group has ended" in lines[0], lines


KILLED_IN_A_SAVE = """
import os, signal, sys, torch, train_gpu
save = torch.save
def cut_short(state, path):
    save(state, path)
    if state["step"] == 10:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = cut_short
train_gpu.main(sys.argv[1:])
"""


def test_killed_inside_a_save():
    whole = train(out="whole")
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_SAVE, *TINY, "--out", "run"], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL and len(list(Path("run").glob("*.part"))) == 1
    assert [p.name for p in Path("run").glob("step-*.pt")] == ["step-0000005.pt"]
    assert same(whole, train("--resume")) and losses("whole") == losses("run") and not list(Path("run").glob("*.part"))


@pytest.mark.slow
def test_kill_9_at_any_moment_twenty_times():
    """Every other kill waits for a save to begin; each resume succeeds and the end is the same."""
    flags = ("--steps", "1000", "--save-every", "2", "--eval-every", "1000", "--d-model", "128")
    rng, log, inside = np.random.default_rng(0), Path("run/log.jsonl"), 0
    for kill in range(20):
        before = log.stat().st_ino if log.exists() else None
        process = subprocess.Popen([sys.executable, str(ROOT / "train_gpu.py"), *TINY, *flags, "--resume", "--out", "run"],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.time() + 60
        while not log.exists() or log.stat().st_ino == before:     # resumed: the log is a new file, and it trains
            assert process.poll() is None and time.time() < deadline, process.communicate()[0]
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        while kill % 2 and not list(Path("run").glob("step-*.part")):
            assert process.poll() is None and time.time() < deadline, process.communicate()[0]
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.wait()
        inside += bool(list(Path("run").glob("step-*.part")))
    assert losses("run") and inside >= 3
    main([*TINY, *flags, "--resume", "--out", "run"])
    main([*TINY, *flags, "--out", "whole"])
    assert same(final("whole", 1000), final("run", 1000)) and losses("whole") == losses("run")
    assert not list(Path("run").glob("*.part"))


# --- the report's run -----------------------------------------------------------------------------------------------

MUON = ("--optimizer", "muon", "--schedule", "wsd", "--warmup", "1")


def test_muon_trains_the_same_model_under_ddp_and_sharded():
    """The losses of ten steps; a bf16 orthogonalisation rounds each update by a percent or so."""
    main([*TINY, *MUON, "--out", "one"])
    one = losses("one")
    assert one[-1] < one[0] - 0.05
    for strategy in ("ddp", "fsdp"):
        ranks(2, *MUON, out=strategy, strategy=strategy)
        assert losses(strategy) == pytest.approx(one, abs=5e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_muon_resumes_bit_for_bit(strategy):
    flags = [*TINY, *MUON, "--strategy", strategy]
    main([*flags, "--out", "whole"])
    main([*flags, "--stop-at", "5", "--out", "parts"])
    main([*flags, "--resume", "--out", "parts"])
    assert same(final("whole"), final("parts")) and losses("whole") == losses("parts")      # momentum and all


def test_a_depth_gives_the_reports_family_and_tokens_the_steps():
    flags = ["--device", "cpu", "--depth", "1", "--seq-len", "16", "--global-batch", "4", "--tokens", "200", *MUON, "--out", "deep"]
    main(flags)
    stored = final("deep", 3)                                       # 200 tokens are three steps of 64 and a rest
    assert GPTConfig(**stored["config"]) == GPTConfig.from_depth(1, vocab_size=128, seq_len=16) and stored["run"]["steps"] == 3


def test_the_reports_preset_is_the_reports_run():
    args = train_gpu.parse_args(["--preset", "report"])
    assert (args.depth, args.seq_len, args.micro_batch, args.steps, args.optimizer, args.schedule, args.decay) == (20, 2048, 16, 11_444, "muon", "wsd", 0.2)
    assert args.global_batch * args.seq_len == 524_288 and micro_batch_size(args.global_batch, 2, args.micro_batch) == 16       # 8 times on 2 GPUs
    assert args.steps * 524_288 == pytest.approx(6.0e9, rel=1e-4) and args.weight_decay == 0
    smaller = train_gpu.parse_args(["--preset", "report", "--depth", "4", "--steps", "10", "--seq-len", "64"])
    assert (smaller.depth, smaller.steps, smaller.seq_len, smaller.optimizer) == (4, 10, 64, "muon")


WSD = ("--schedule", "wsd", "--decay", "0.2", "--warmup", "1")


def test_a_branch_ends_as_a_run_of_its_length_does():
    """Ten steps branched off a trunk of forty are the ten steps that a run of ten makes, decay and all."""
    main([*TINY, *WSD, "--steps", "40", "--save-every", "10", "--keep-at", "4,6", "--out", "trunk"])
    assert sorted(p.name for p in Path("trunk").glob("step-*")) == [f"step-{n:07d}.pt" for n in (4, 6, 30, 40)]
    short = train(*WSD, out="short")
    main([*TINY, *WSD, "--resume", "trunk/step-0000006.pt", "--out", "branch"])
    branch = final("branch")
    assert all(same(short[key], branch[key]) for key in ("model", "optimizer", "run")) and losses("branch") == losses("short")[6:]
    assert len(list(Path("trunk").glob("step-*"))) == 4             # the trunk is as it was


@pytest.mark.parametrize("flags, words", [
    (("--resume", "trunk/step-0000009.pt", "--out", "branch"), "learning rate"),           # in the branch's own decay
    (("--resume", "trunk/step-0000018.pt", "--steps", "40", "--out", "branch"), "learning rate"),       # in the trunk's
    (("--resume", "trunk/step-0000004.pt", "--lr", "1e-2", "--out", "branch"), "learning rate"),
    (("--resume", "trunk/step-0000004.pt", "--out", "trunk"), "holds checkpoints already"),
    (("--resume", "trunk/step-0000005.pt", "--out", "branch"), "no such checkpoint"), (("--resume", "tokens.pt", "--out", "branch"), "no such checkpoint"),
    (("--resume", "trunk/step-0000004.pt", "--strategy", "fsdp", "--out", "branch"), "--strategy ddp"),
    (("--resume", "step-0000001.pt", "--out", "branch"), "not a whole checkpoint"), (("--resume", "step-0000002.pt", "--out", "branch"), "not a whole checkpoint"),
    (("--resume", "step-0000003.pt", "--out", "branch"), "not a whole checkpoint"), (("--resume", "trunk/step-0000004.pt", "--steps", "4", "--out", "branch"), "not beyond"),
    (("--resume", "trunk/step-0000004.pt", "--n-layer", "1", "--out", "branch"), "n_layer")])
def test_branches_that_are_refused(flags, words, refused):
    main([*TINY, *WSD, "--steps", "20", "--save-every", "18", "--keep-at", "4,9", "--out", "trunk"])
    Path("step-0000001.pt").write_bytes(b"PK half")
    torch.save([1, 2], "step-0000002.pt")
    Path("step-0000003.pt").write_bytes(Path("trunk/step-0000004.pt").read_bytes()[:5000])
    refused(main, *TINY, *WSD, *flags, words=(words,))
    assert not list(Path("branch").glob("step-*"))


def test_what_changed_since_a_checkpoint_is_said(capsys, monkeypatch):
    main([*TINY, "--stop-at", "5", "--out", "run"])
    original, rates = train_gpu.set_learning_rate, []

    def noted(optimizers, share):
        original(optimizers, share)
        rates.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])

    monkeypatch.setattr(train_gpu, "set_learning_rate", noted)
    train("--resume", "--lr", "2e-3", "--clip", "0.25")
    out = capsys.readouterr().out
    assert "saved with --lr 0.001, and goes on with 0.002" in out and "--clip 0.5, and goes on with 0.25" in out and out.count("note:") == 2
    assert rates[1:] == [[pytest.approx(learning_rate(step, 10, 2e-3, 3))] * 2 for step in range(5, 10)]       # what was said is what was done


def test_kept_checkpoints_stay_without_the_flag():
    main([*TINY, "--save-every", "1", "--keep-at", "2", "--stop-at", "4", "--out", "run"])
    train("--resume", "--save-every", "1")
    assert sorted(p.name for p in Path("run").glob("step-*")) == [f"step-{n:07d}.pt" for n in (2, 9, 10)]


def test_an_interrupted_branch_goes_on_with_the_same_command():
    main([*TINY, *WSD, "--steps", "40", "--save-every", "40", "--keep-at", "4", "--out", "trunk"])
    branch = [*TINY, *WSD, "--resume", "trunk/step-0000004.pt"]
    main([*branch, "--out", "whole"])
    main([*branch, "--stop-at", "7", "--out", "parts"])
    main([*branch, "--out", "parts"])
    assert same(final("whole"), final("parts"))


def test_a_sharded_checkpoint_cut_short_anywhere_falls_back():
    flags = [*TINY, "--strategy", "fsdp", "--out", "sharded"]
    for damage in (lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink):
        shutil.rmtree("sharded", ignore_errors=True)
        main(flags)
        damage(next(Path("sharded/step-0000010").glob("*.distcp")))
        main([*flags, "--resume"])
        assert Path("sharded/step-0000010.damaged").exists() and len(losses("sharded")) == 10


def test_matrix_norms_and_updates_are_logged(monkeypatch):
    monkeypatch.setattr(train_gpu, "LOG_EVERY", 5)
    ranks(2, *MUON, "--lr", "0.02", out="sharded", strategy="fsdp")
    main([*TINY, *MUON, "--lr", "0.02", "--save-every", "1", "--keep-at", "4", "--out", "run"])
    records = {r["step"]: r["matrices"] for r in read_log(Path("run/log.jsonl")) if "matrices" in r}
    before, after = (final("run", step)["model"] for step in (4, 10))
    assert set(records) == {5, 10} and set(records[5]) == {name for name in after if name.startswith("blocks.") and "norm" not in name}
    for name, sizes in records[10].items():
        assert sizes["norm"] == pytest.approx(after[name].norm().item(), rel=1e-5)
    nine = torch.load("run/step-0000009.pt", weights_only=True)["model"]
    name = "blocks.0.attn.qkv.weight"
    assert records[10][name]["relative_update"] == pytest.approx(((after[name] - nine[name]).norm() / after[name].norm()).item(), rel=1e-3)
    theirs = [r["matrices"] for r in read_log(Path("sharded/log.jsonl")) if "matrices" in r][-1]
    assert theirs[name]["norm"] == pytest.approx(records[10][name]["norm"], rel=2e-2)


# --- multiple choice ------------------------------------------------------------------------------------------------

class Letters:
    """A tokenizer of one id a character."""

    def encode(self, text):
        return SimpleNamespace(ids=[ord(c) % 128 for c in text])

    def decode(self, ids):
        return "".join(map(chr, ids))


class Given:
    """A model whose log-probability of a continuation is its length times a value that its first letter decides."""

    config = CONFIG

    def log_probabilities(self, context, continuations):
        return torch.tensor([{"a": -1.0, "b": -0.6}[chr(c[0])] * len(c) for c in continuations])


def test_the_likeliest_whole_and_the_likeliest_a_byte_disagree_where_lengths_differ(monkeypatch):
    parallel = SimpleNamespace(model=Given(), device=torch.device("cpu"), evaluating=contextlib.nullcontext)
    # "a": -1 in all, -1 a byte; "bbbb": -2.4 in all, -0.6 a byte.
    questions = [([1], [[97], [98] * 4], [1, 4], answer) for answer in (0, 1, 1)]
    for world in (1, 2):
        sums = []
        monkeypatch.setattr(train_gpu.dist, "get_world_size", lambda: world)
        monkeypatch.setattr(train_gpu.dist, "all_reduce", lambda right: sums.append(right.clone()))
        for rank in range(world):
            monkeypatch.setattr(train_gpu.dist, "get_rank", lambda: rank)
            train_gpu.score_choices(parallel, questions)
        assert sum(sums).tolist() == [1.0, 2.0]


HELLASWAG = {"ind": 1, "ctx": "A man is", "endings": ["a", "bb", "ccc", "d"], "label": 2}
ARC = {"id": "x", "question": {"stem": "What?", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}, "answerKey": "B"}
ARC_DIGITS = {"question": {"stem": "What?", "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]}, "answerKey": "1"}
ARC_COLUMNS = {"question": "What?", "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}, "answerKey": "C"}


def test_hellaswags_and_arcs_own_formats_are_read():
    with open("choices.jsonl", "w", encoding="utf-8-sig") as f:
        f.writelines(q and json.dumps(q, ensure_ascii=False) + "\n" or "\n" for q in (
            HELLASWAG, ARC, ARC_DIGITS, ARC_COLUMNS, None, {**HELLASWAG, "ctx": "A man is\u2028so", "label": "3"}))
    assert prepare_data.read_choices(Path("choices.jsonl")) == [
        (1, "A man is", ["a", "bb", "ccc", "d"], 2), (2, "Question: What?\nAnswer:", ["a", "b"], 1), (3, "Question: What?\nAnswer:", ["a", "b"], 0),
        (4, "Question: What?\nAnswer:", ["a", "b", "c"], 2), (6, "A man is\u2028so", ["a", "bb", "ccc", "d"], 3)]


@pytest.mark.parametrize("line", ["not json", "[]", "{}", json.dumps({**HELLASWAG, "label": 4}), json.dumps({**HELLASWAG, "label": ""}), json.dumps({**HELLASWAG, "endings": []}),
                                  json.dumps({**ARC, "answerKey": "E"}), json.dumps({**HELLASWAG, "ctx": ""}), json.dumps({**HELLASWAG, "endings": ["", "a"], "label": 1}),
                                  json.dumps({**HELLASWAG, "ctx": 5}), json.dumps({**HELLASWAG, "endings": "abc"}), json.dumps({**HELLASWAG, "ctx": "\ud800"}), "[" * 200_000], ids=range(13))
def test_questions_that_are_none_are_named_by_their_line(line, refused):
    Path("choices.jsonl").write_text(json.dumps(HELLASWAG) + "\n" + line + "\n")
    refused(main, *TINY, "--choices", "choices.jsonl", "--out", "run", words=("choices.jsonl, line 2",))
    assert not list(Path("run").glob("step-*"))


def test_choices_are_answered_at_each_validation(monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda data: Letters())
    Path("choices.jsonl").write_text(json.dumps(HELLASWAG) + "\n" + json.dumps({**ARC, "question": {**ARC["question"], "stem": "W"}}) + "\n")
    main([*TINY, "--seq-len", "32", "--choices", "choices.jsonl", "--out", "run"])
    main([*TINY, "--seq-len", "32", "--resume", "--out", "run"])               # measures the last loss again, and keeps the answers
    records = [r for r in read_log(Path("run/log.jsonl")) if "choices" in r]
    assert [r["step"] for r in records] == [5, 10] and capsys.readouterr().out.count("of 2 questions right") == 2
    assert all(r[key] in (0.0, 0.5, 1.0) for r in records for key in ("choices", "choices_per_byte"))


@pytest.mark.parametrize("changed", [{"endings": ["a", "b" * 400, "c"]}, {"ctx": "三"}])
def test_questions_that_the_model_cannot_be_asked_are_refused_before_the_run(changed, refused, monkeypatch):
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda data: SimpleNamespace(encode=lambda text: SimpleNamespace(ids=list(map(ord, text)))))
    Path("choices.jsonl").write_text(json.dumps({**HELLASWAG, **changed}) + "\n")
    refused(main, *TINY, "--choices", "choices.jsonl", "--out", "run", words=("choices.jsonl, line 1", "of more than the context's 16"))
    assert not Path("run").exists()


def test_choices_without_a_tokenizer_are_refused_before_the_run(refused):
    Path("choices.jsonl").write_text(json.dumps(HELLASWAG))
    refused(main, *TINY, "--choices", "choices.jsonl", "--out", "run", words=("no tokenizer beside the tokens",))
    assert not Path("run").exists()


def test_shards_are_trained_on():
    """A directory of shards as prepare_data.py and others write them; the windows of an epoch come from all of them."""
    Path("data").mkdir()
    for name, n in (("train_000000", 3000), ("train_000001", 500), ("val_000000", 900)):
        with open(f"data/{name}.bin", "wb") as f:
            np.array([20240520, 1, n, *[0] * 253], np.int32).tofile(f)
            (np.arange(n) * 7 % 128).astype(np.uint16).tofile(f)
    Path("data/meta.json").write_text(json.dumps({"corpus": "sharded", "vocab_size": 128, "bytes_per_token": {"train": 4.0, "val": 4.0}}))
    main([*TINY, "--data", "data", "--steps", "40", "--lr", "1e-2", "--out", "run"])
    assert losses("run")[-1] < losses("run")[0] - 0.5


# --- what it prints, leaves behind and survives ---------------------------------------------------------------------

def test_what_it_says_and_leaves_behind(capsys, monkeypatch):
    monkeypatch.setattr(train_gpu, "LOG_EVERY", 5)
    train()
    out, log = capsys.readouterr().out, read_log(Path("run/log.jsonl"))
    for words in ("corpus: test", "machine:", "parameters", "128 tokens a step = 8 sequences of 16: micro-batch 4 x 2 accumulated x 1",
                  "0.1 times through the training part", "forecast:", "validation loss", "bits per byte", "done at step 10"):
        assert words in out, words
    line = next(line for line in out.splitlines() if line.startswith("step     5  loss"))
    for words in ("lr ", "grad_norm ", "tokens/s", "MFU n/a", "memory ", "data wait "):
        assert words in line
    steps = [r for r in log if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 11)) and {"lr", "grad_norm", "seconds"} <= steps[0].keys()
    mean = sum(r["loss"] for r in steps[:5]) / 5
    assert f"bits per byte {mean / math.log(2) / 4:.3f}" in line and steps[0]["train_bits_per_byte"] == pytest.approx(steps[0]["loss"] / math.log(2) / 4)
    assert f"loss {mean:.3f}" in line                               # over the steps since the last line
    val = [r for r in log if "val_loss" in r]
    assert [r["step"] for r in val] == [5, 10] and val[0]["bits_per_byte"] == pytest.approx(val[0]["val_loss"] / math.log(2) / 4)
    assert open("run/loss.png", "rb").read(4) == b"\x89PNG"
    assert json.load(open("runs/train_gpu.json"))["val_loss"] == val[-1]["val_loss"]


def test_evaluation_saving_and_the_first_step_are_not_in_the_step_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(train_gpu.time, "perf_counter", lambda: clock[0])

    def taking(seconds, original):
        def slowly(*args, **kwargs):
            clock[0] += seconds
            return original(*args, **kwargs)
        return slowly

    monkeypatch.setattr(train_gpu, "accumulate", taking(1.0, train_gpu.accumulate))
    monkeypatch.setattr(train_gpu, "evaluate", taking(1000.0, train_gpu.evaluate))
    monkeypatch.setattr(train_gpu.Checkpoints, "save", taking(1000.0, train_gpu.Checkpoints.save))
    lines = []
    monkeypatch.setattr(train_gpu.Progress, "rate", lambda self: lines.append((self.timed, self.seconds)) or 1.0)
    train()
    assert [r["seconds"] for r in read_log(Path("run/log.jsonl")) if "loss" in r] == [1.0] * 10
    assert set(lines) == {(9, 9.0)}


def test_training_learns(capsys):
    main([*TINY, "--steps", "60", "--lr", "1e-2", "--schedule", "wsd", "--save-every", "60", "--eval-every", "30", "--out", "run"])
    curve = losses("run")
    assert curve[-1] < curve[0] - 0.5


def test_a_loss_that_is_not_finite_stops_at_that_step_and_the_last_checkpoint_stays(monkeypatch, refused):
    original, calls = train_gpu.accumulate, []

    def poisoned(parallel, *args):
        calls.append(1)
        loss = original(parallel, *args)
        if len(calls) == 7:
            next(parallel.model.parameters()).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(train_gpu, "accumulate", poisoned)
    refused(main, *TINY, "--out", "run", words=("step 7", "gradient norm is nan"))
    assert [p.name for p in Path("run").glob("step-*")] == ["step-0000005.pt"] and len(losses("run")) == 6
    monkeypatch.undo()


def test_a_loss_that_is_not_finite_stops_all_ranks():
    lines = fails(launch(2, "--lr", "1e18", "--warmup", "1"))
    assert len(lines) == 2 and all("stopped before the update" in line for line in lines), lines


@pytest.mark.parametrize("processes, strategy, limit, words", [
    (2, "ddp", 20_000, "step-0000005.pt cannot be written"),
    (2, "fsdp", 10_000, "step-0000005 cannot be written"), (2, "ddp", 500, "log.jsonl cannot be written")])
def test_a_full_disk_is_one_line_and_nothing_is_lost(processes, strategy, limit, words):
    """A limit on the size of files fails a write as a full disk does, in the library that makes it."""
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    main([*TINY, "--micro-batch", "2", "--strategy", strategy, "--stop-at", "1", "--out", "run"])
    before = {p: p.read_bytes() for p in Path("run").glob("step-*/*" if strategy == "fsdp" else "step-*")}
    lines = fails(launch(processes, "--resume", strategy=strategy, preexec_fn=limited, env={**os.environ, "MPLCONFIGDIR": "."}))
    assert len(lines) == processes and all(words in line for line in lines), lines
    assert len(list(Path("run").glob("step-*"))) == 1 and before == {p: p.read_bytes() for p in before}


def test_without_a_compiler_the_flag_is_named():
    done = run_script("train_gpu.py", *TINY, "--compile", env={"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": "cache", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"})
    assert_one_line(done, "--compile: no working C++ compiler", "--no-compile")


def test_out_of_memory_says_what_would_help(monkeypatch, refused):
    def exhausted(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(train_gpu, "accumulate", exhausted)
    refused(main, *TINY, "--out", "run", words=("--micro-batch", "--recompute", "--strategy fsdp"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_and_no_device_flag(refused, tmp_path):
    refused(main, words=("--device cpu", "no CUDA device"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags, words", [
    (("--global-batch", "7"), "--global-batch 7"), (("--steps", "0"), "--steps"), (("--decay", "1.5"), "--decay"), (("--lr", "nan"), "--lr"),
    (("--clip", "0"), "--clip"), (("--weight-decay", "-1"), "--weight-decay"), (("--schedule", "linear"), "--schedule"),
    (("--n-head", "3"), "does not divide"), (("--data", "none.pt"), "none.pt"), (("--seq-len", "3999"), "a context of 3,999"), (("--out", "tokens.pt"), "tokens.pt"),
    (("--device", "tpu"), "--device"), (("--seed", "-1"), "--seed"), (("--micro-batch", "0"), "--micro-batch")])
def test_refusals(flags, words, refused, tmp_path):
    refused(main, *TINY, *flags, words=(words,))
    assert not list(tmp_path.glob("**/step-*"))


def test_a_sample_at_the_end(capsys):
    from conftest import chinese_text
    from prepare_data import main as prepare
    Path("novel.txt").write_text(chinese_text(), encoding="utf-8")
    prepare(["novel.txt", "--force"])
    prompt = chinese_text()[20:24]
    train("--sample", prompt)
    text = capsys.readouterr().out.split("GB)\n")[-1]
    assert text.startswith(prompt) and len(text) > len(prompt) + 20      # a continuation, and the tokens joined as text
    Path("tokenizer.json").unlink()
    train("--sample", prompt, out="other")
    assert "no tokenizer beside the tokens" in capsys.readouterr().out


def test_as_a_reader_runs_it():
    assert_one_line(run_script("train_gpu.py", "--device", "cpu", "--global-batch", "7", "--micro-batch", "2"), "train_gpu.py", "--global-batch 7")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_in_bf16_and_compiled():
    main([*TINY, "--device", "cuda", "--compile", "--out", "run"])
    assert all(map(math.isfinite, losses("run")))
    main([*TINY, "--device", "cuda", "--strategy", "fsdp", "--out", "sharded"])
    assert losses("sharded") == pytest.approx(losses("run"), abs=0.05)
