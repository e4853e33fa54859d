"""ddp_train.py: several processes equal one, syncs are counted, and what goes wrong at the start is one line."""
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import ROOT, assert_one_line, run_script, save_tokens
from budget import first_on_rank_0
from ddp_train import main
from model import GPT, GPTConfig

GROUP = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def check(world):
    r = json.load(open("runs/ddp_train.json"))
    assert (r["world"], r["steps"]) == (world, 30)
    assert r["fp64_max_diff"] < 1e-9                        # in exact arithmetic there would be no difference
    assert r["syncs"] == 30 and r["syncs_without_no_sync"] == 30 * 4
    assert r["bytes_without_no_sync"] == 4 * r["bytes"]
    assert r["same_data_max_diff"] < 1e-2                   # the others added nothing (in fp32, Adam's signs aside)
    return r


def test_two_processes_equal_one():
    save_tokens(vocab_size=512)
    done = run_script("ddp_train.py")
    assert done.returncode == 0, done.stderr
    results = check(world=2)
    assert results["max_diff"] < 1e-4
    assert "2 processes, 8 sequences each a step" in done.stdout and "below 1e-4: True" in done.stdout
    # One gradient is the model's size: the syncs carry all of it and nothing twice.
    model = GPT(GPTConfig(vocab_size=512, d_model=64, n_head=2, n_layer=2, seq_len=64))
    assert results["bytes"] == 30 * 4 * model.num_params()
    state = torch.load("runs/ddp_model.pt", weights_only=True)
    model.load_state_dict(state)                            # strictly: no prefix, nothing missing
    assert done.stdout.count("mean over ranks") == 1        # printed by one rank


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_processes(world):
    save_tokens(vocab_size=512)
    done = run_script("ddp_train.py", "--processes", world)
    assert done.returncode == 0, done.stderr
    check(world)


@pytest.mark.parametrize("changed", [
    {"WORLD_SIZE": None}, {"MASTER_ADDR": None}, {"MASTER_PORT": None}, {"RANK": ""}, {"RANK": "many"}, {"RANK": "-1"}, {"RANK": "1"},
    {"WORLD_SIZE": "many"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "-1"}, {"MASTER_PORT": "many"}, {"MASTER_PORT": "70000"},
    {"LOCAL_WORLD_SIZE": "x"}, {"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_RANK": "-1"}, {"MASTER_ADDR": ""}])
def test_rendezvous_variables_that_are_missing_or_wrong(changed, monkeypatch, refused):
    save_tokens()
    for name, value in {**GROUP, **changed}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    refused(main, "--timeout", "2", words=(*changed, "torchrun"))


def test_a_port_in_use():
    save_tokens()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_script("ddp_train.py", env={**GROUP, "MASTER_PORT": str(taken.getsockname()[1])})
    assert_one_line(done, "port in use", taken.getsockname()[1] if taken.fileno() >= 0 else "")


def test_processes_that_do_not_come():
    save_tokens()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run_script("ddp_train.py", "--timeout", 2, env={**GROUP, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)})
    assert_one_line(done, "are all of them started")


def children(pid):
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()


def test_a_signal_to_it_ends_all_the_processes_it_started():
    save_tokens()
    process = subprocess.Popen([sys.executable, str(ROOT / "ddp_train.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.time() + 60
    while len(ranks := children(process.pid)) < 2:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.1)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0 and not [pid for pid in ranks if Path("/proc", pid).exists()]


@pytest.mark.parametrize("argv, words", [(["--processes", "0"], "--processes"), (["--data", "no.pt"], "no such file")])
def test_refusals_come_before_any_process_starts(argv, words, refused, monkeypatch):
    monkeypatch.setattr("ddp_train.become_launcher", lambda *args: pytest.fail("started"))
    refused(main, *argv, words=(words,))


def test_rank_0_makes_what_the_others_find(monkeypatch):
    calls = []
    for rank in (0, 1):
        monkeypatch.setattr("budget.dist.get_rank", lambda rank=rank: rank)
        monkeypatch.setattr("budget.dist.broadcast_object_list", lambda refusal: calls.append("wait"))
        assert first_on_rank_0(lambda rank=rank: calls.append(rank) or "corpus") == "corpus"
    assert calls == [0, "wait", "wait", 1]


@pytest.mark.slow
def test_the_chapters_line_under_torchrun(novel):
    import prepare_data

    prepare_data.main([str(novel)])
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(ROOT / "ddp_train.py")], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "after 30 steps the largest parameter difference from a single process (16 a step) is below 1e-4: True" in done.stdout
    assert check(world=2)["max_diff"] < 1e-4
