"""Train a GPT, from one CPU core to many GPUs.

    python train_gpu.py                                               one GPU: the chapter's 29M model, 2000 steps
    torchrun --standalone --nproc-per-node 8 train_gpu.py             the same run on eight
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 8 train_gpu.py      on two nodes (1 on the other)
    torchrun --standalone --nproc-per-node 8 --max-restarts 3 train_gpu.py --resume           and through interruptions
    python train_gpu.py --device cpu --d-model 64 --n-layer 2 --n-head 2 --seq-len 64 --steps 100     to try it, a minute
    torchrun --standalone --nproc-per-node 2 train_gpu.py --preset report --data DIR          the report's 522M on two GPUs

The chapter reads this script; here it runs. bf16 over fp32 weights (fp32 throughout on a CPU), torch.compile, fused
AdamW, DDP or FSDP. The global batch and the data of every step are fixed, whatever the number of processes: the same
command trains the same model on 1, 2 or 8 of them. Checkpoints, the log and the curve go to the run's directory.
"""
import argparse
import contextlib
import itertools
import json
import math
import os
import pickle
import re
import shutil
import sys
import signal
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from budget import (CHAPTER_MFU, GIGA, REPORT_MICRO_BATCH, REPORT_SEQ_LEN, REPORT_TOKENS, REPORT_TOKENS_A_STEP, compile_failure, data_parallel,
                    datasheet_peak, first_on_rank_0, is_lost_peer, keep_memory, machine, noted_signals, on_rank_0, peak_memory_gb, pick_device,
                    process_group, same_on_all_ranks, shares, synchronize, training_memory)

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import (EMBEDDING_LR, LOSS_ROWS, RUNS, WEIGHT_DECAY, GPT, GPTConfig, Parser, UserError, add_model_flags, check_runs, command,
                   config_from, count, duration_text, is_out_of_memory, locked, outline, plot, positive, save_results, size_text, whole, within, written_whole)
from prepare_data import add_data_flag, load_choices, load_corpus, load_prompt, step_positions

LARGEST_MICRO_BATCH = 32                # the chapter's, where the global batch and the processes allow it
LOG_EVERY = 50
KEEP_CHECKPOINTS = 2
EVAL_WINDOWS, EVAL_BATCH = 128, 8
FETCHED_AHEAD = 2                       # micro-batches
SAMPLE_TOKENS = 100
SCHEDULES = ("cosine", "wsd", "constant")
PRESETS = {"report": {"depth": 20, "micro_batch": REPORT_MICRO_BATCH, "global_batch": REPORT_TOKENS_A_STEP // REPORT_SEQ_LEN,
                      "steps": int(REPORT_TOKENS // REPORT_TOKENS_A_STEP), "optimizer": "muon", "schedule": "wsd", "warmup": 1}}
OF_THE_RUN = ("steps", "lr", "embedding_lr", "warmup", "schedule", "decay", "weight_decay", "clip")     # that a checkpoint remembers


# --- the learning rate ----------------------------------------------------------------------------------------------

def learning_rate(step, steps, peak, warmup, schedule="cosine", decay=0.2):
    """The rate of a step, counted from 0, of a run of so many steps: a linear warm-up times the schedule.

    cosine: from peak to a tenth of it, as the chapter has it; wsd: constant, then linear to zero over the last share
    decay of the steps, as the report has it; constant: peak.
    """
    if schedule == "cosine":
        shape = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps))
    elif schedule == "wsd":
        shape = min(1.0, (steps - step) / (decay * steps))
    else:
        shape = 1.0
    return peak * min(1.0, (step + 1) / warmup) * shape


def set_learning_rate(optimizers, share):
    """Every group's rate to a share of its own peak, which it was made with."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = share * group.setdefault("peak_lr", group["lr"])


# --- the batch and its data -----------------------------------------------------------------------------------------

def micro_batch_size(global_batch, world, wanted=None):
    """Sequences a process computes at once: wanted, or the largest up to the chapter's 32 that divides its share.

    Raises UserError, naming the nearest global batches that do, where the global batch cannot be shared out.
    """
    size = wanted or next((m for m in range(LARGEST_MICRO_BATCH, 0, -1) if global_batch % (m * world) == 0), 1)
    at_once = size * world
    if global_batch % at_once:
        below = global_batch // at_once * at_once
        nearest = f"{below} or {below + at_once}" if below else str(at_once)
        raise UserError(f"--global-batch {global_batch} does not divide into micro-batches of {size} on {world} processes "
                        f"({at_once} sequences at once); the nearest that does: {nearest}")
    return size


class Loader:
    """This rank's micro-batches from a step on, in order, each fetched by a thread while others are computed.

    Rank r of W takes micro-batches r, r + W, ... of each step. waited is how long the trainer stood waiting, in seconds.
    """

    def __init__(self, tokens, config, global_batch, micro_batch, seed, device, first_step, rank, world):
        def fetch(step, index):
            positions = step_positions(tokens.positions(config.seq_len), global_batch, seed, step)
            batch = tokens.windows(positions[index * micro_batch:(index + 1) * micro_batch], config.seq_len)
            return tuple(t.pin_memory() for t in batch) if device.type == "cuda" else batch

        keys = ((step, index) for step in itertools.count(first_step) for index in range(rank, global_batch // micro_batch, world))
        self.device, self.waited = device, 0.0
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.submit = lambda: self.pending.append(self.pool.submit(fetch, *next(keys)))
        self.pending = deque()
        for _ in range(FETCHED_AHEAD):
            self.submit()

    def next(self):
        """The next micro-batch, inputs and targets, each (micro_batch, seq_len) int64 on the device."""
        start = time.perf_counter()
        batch = self.pending.popleft().result()
        self.waited += time.perf_counter() - start
        self.submit()
        return tuple(t.to(self.device, non_blocking=True) for t in batch)

    def close(self):
        self.pool.shutdown(wait=False, cancel_futures=True)


# --- the model on its devices ---------------------------------------------------------------------------------------

class Parallel:
    """A GPT, built on the CPU, as its processes train it together: forward(x, y), and a context for each pass.

    model is the plain module (its parameters sharded with fsdp), without the wrappers' prefixes in its names.
    """

    def __init__(self, model, strategy, device, compiled):
        self.model, self.strategy, self.device = model, strategy, device
        if strategy == "fsdp":          # each block goes to the device and is sharded before the next one: never the whole model
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")       # logits without the padding are a view; nothing writes to it
            # Inputs stay as they are: the embedding gives bf16 already, and the rotary tables need their fp32.
            half = MixedPrecisionPolicy(torch.bfloat16 if device.type == "cuda" else None, torch.float32, cast_forward_inputs=False)
            for block in model.blocks:
                if compiled:
                    block.compile()
                fully_shard(block, mesh=mesh, mp_policy=half)
            fully_shard(model, mesh=mesh, mp_policy=half)
        else:
            model.to(device)
            if compiled:
                model.compile()         # in place: evaluation and names stay the plain module's
        self.forward = data_parallel(model, device) if strategy == "ddp" and dist.get_world_size() > 1 else model

    def reduced_if(self, last):
        """Gradients are reduced over the ranks in the last micro-batch of a step only."""
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext() if last or self.forward is self.model else self.forward.no_sync()

    def precision(self):
        """bf16 autocast over fp32 weights on a GPU; under fsdp its own policy does that. fp32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda" and self.strategy == "ddp")

    @contextlib.contextmanager
    def evaluating(self):
        """Without gradients, by the uncompiled module."""
        self.model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self.precision():
            yield
        self.model.train()

    def clip(self, limit):
        """Scale the gradient to a norm of at most limit; returns the norm it had, over all parameters and ranks."""
        return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))


def accumulate(parallel, loader, micro_batches):
    """Forward and backward of this rank's micro-batches of a step; returns their mean loss, not yet over the ranks."""
    total = torch.zeros((), device=parallel.device)
    for i in range(micro_batches):
        x, y = loader.next()
        with parallel.reduced_if(last=i == micro_batches - 1):
            with parallel.precision():
                loss = parallel.forward(x, y)[1] / micro_batches
            loss.backward()
        total += loss.detach()
    return total


def evaluate(parallel, tokens, at_once=EVAL_BATCH):
    """Mean loss over fixed windows of tokens in nats a token, the same for any number of ranks.

    Windows are spread evenly and computed in fixed groups, which the ranks share out; the uncompiled module does it.
    """
    seq_len = parallel.model.config.seq_len
    n = max(1, min(EVAL_WINDOWS, (len(tokens) - 1) // seq_len))
    groups = np.array_split(np.linspace(0, tokens.positions(seq_len) - 1, n).astype(np.int64), math.ceil(n / at_once))
    sums = torch.zeros(len(groups), dtype=torch.float64, device=parallel.device)
    with parallel.evaluating():
        for i, counts in shares(len(groups)):
            x, y = (t.to(parallel.device) for t in tokens.windows(groups[i], seq_len))
            loss = parallel.model(x, y)[1]
            if counts:
                sums[i] = loss.double() * len(groups[i])
    dist.all_reduce(sums)
    return sums.sum().item() / n


# --- checkpoints ----------------------------------------------------------------------------------------------------

class Checkpoints:
    """The checkpoints of one run: step-0000500.pt with ddp, a directory step-0000500 with fsdp.

    Each is written under another name beside the last one and renamed when it is whole; the newest two are kept.
    """

    def __init__(self, directory, parallel, optimizers, identity, run, keep):
        self.directory, self.parallel, self.optimizers, self.identity, self.run = directory, parallel, optimizers, identity, run
        self.keep, self.branched_from = set(keep), None
        self.suffix = "" if parallel.strategy == "fsdp" else ".pt"

    def claim(self, resuming):
        """Take the run's directory: one run at a time, and no start over the checkpoints of another. What an interrupted
        save left there is removed. Raises UserError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = locked(self.directory)
        if self.newest_first() and not resuming:
            raise UserError(f"{self.directory} holds checkpoints of a run; continue it with --resume, or start another with --out DIR")
        for part in self.directory.glob("*.part"):
            shutil.rmtree(part) if part.is_dir() else part.unlink()

    def state(self):
        """The tensors of the model and of the optimizers, by their parameters' names; and the optimizers' options."""
        model, optimizers = get_state_dict(self.parallel.model, self.optimizers)
        return {"model": model, "optimizer": optimizers["state"]}, optimizers["param_groups"]

    def save(self, step):
        """Write the state after so many steps; every rank takes part, and all raise UserError where one cannot write:
        the last whole checkpoint is untouched then."""
        path = self.directory / f"step-{step:07d}{self.suffix}"
        about = {"step": step, "config": asdict(self.parallel.model.config), "identity": self.identity, "run": self.run,
                 "keep": sorted(self.keep), "branched_from": self.branched_from}
        state, _ = self.state()
        if self.parallel.strategy == "fsdp":
            self.save_sharded(path, state, about)
        else:
            on_rank_0(lambda: self.save_single(path, state | about))
        on_rank_0(self.prune)

    def save_single(self, path, stored):
        with written_whole(path) as part:
            torch.save(stored, part)

    def save_sharded(self, path, state, about):
        part, hook = path.with_name(path.name + ".part"), sys.unraisablehook
        sys.unraisablehook = lambda ignored: None           # its files that a full disk cut short complain once more when let go of
        try:
            dcp.save(state, checkpoint_id=part)
        except dcp.api.CheckpointException as error:        # the ranks' errors, on all of them
            shutil.rmtree(part, ignore_errors=True)
            reason = next(str(reason) or repr(reason) for reason, _ in error.failures.values())
            raise UserError(f"{path} cannot be written ({reason}); is the disk full or read-only?") from None
        sys.unraisablehook = hook
        on_rank_0(lambda: self.finish_sharded(path, part, about))

    def finish_sharded(self, path, part, about):
        with written_whole(part / "about.json") as about_part:
            about_part.write_text(json.dumps(about))
        if path.exists():               # one that was not whole, and is now written again
            shutil.rmtree(path)
        os.rename(part, path)

    def prune(self):
        for old in [path for path in self.newest_first()[KEEP_CHECKPOINTS:] if step_of(path) not in self.keep]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def newest_first(self):
        """The run's checkpoints, of either strategy; a file of another name is somebody else's."""
        return sorted((p for p in self.directory.glob("step-*") if re.fullmatch(r"step-\d+(\.pt)?", p.name)), key=step_of, reverse=True)

    def check(self, path, about):
        """Raise UserError, naming it, where a checkpoint is of another model, other data or another batch."""
        theirs = {**asdict(GPTConfig(**about["config"])), **about["identity"]}
        ours = {**asdict(self.parallel.model.config), **self.identity}
        for what, value in ours.items():
            if theirs.get(what) != value:
                raise UserError(f"{path}: its {what} is {theirs.get(what)}, this run's is {value}; resume with the same, or "
                                f"start another run with --out DIR")
        for what, value in self.run.items():
            if about["run"][what] != value:
                say(f"note: {path} was saved with --{what.replace('_', '-')} {about['run'][what]}, and goes on with {value}")

    def load(self, path):
        """Put a checkpoint's tensors into the model and the optimizers, whose options stay the flags'; returns what it says
        of itself."""
        sharded = path.is_dir()
        stored = json.loads((path / "about.json").read_text()) if sharded else torch.load(path, weights_only=True, map_location="cpu")
        self.check(path, stored)
        state, options = self.state()
        if sharded:
            refuse_code(path / ".metadata")
            dcp.load(state, checkpoint_id=path)
        elif isinstance(stored["optimizer"], list):
            raise UserError(f"{path}: saved by an earlier version of this script, with which it can go on; start another run with --out DIR")
        else:
            fill(state, {name: stored[name] for name in state})
        set_state_dict(self.parallel.model, self.optimizers, model_state_dict=state["model"],
                       optim_state_dict={"state": state["optimizer"], "param_groups": options})
        return stored

    def start(self, resume):
        """Load what --resume says: nothing, the newest whole checkpoint here, or, where there is none yet, the one to branch
        off; returns its step, 0 for a start from the beginning. All ranks find the same one. Raises UserError."""
        if not resume:
            return 0
        damaged, source = [], resume if isinstance(resume, Path) else None
        about = self.branch(source) if source and not self.newest_first() else self.load_newest(damaged)
        if source and about["branched_from"] != str(source):
            raise UserError(f"{self.directory} holds checkpoints already; continue it with --resume alone, or branch off with another --out DIR")
        same_on_all_ranks(f"step {about['step']}", self.directory, "checkpoints")
        self.branched_from = about["branched_from"]
        self.keep |= set(about["keep"])
        # A damaged one would take one of the two places that are kept; it may still help to find out what happened.
        on_rank_0(lambda: [set_aside(path) for path in damaged])
        return about["step"]

    def branch(self, path):
        """Load a checkpoint of another run, to go on from there in this directory; returns what it says of itself. Raises
        UserError where the learning rate would jump, because one of the two runs is in its decay there."""
        if not path.exists() or not re.fullmatch(r"step-\d+(\.pt)?", path.name):
            raise UserError(f"--resume {path}: no such checkpoint")
        try:
            about = self.load_whole(path)
        except NotWhole as error:
            raise UserError(f"--resume {path}: not a whole checkpoint ({error})") from None
        step = about["step"]
        if step >= self.run["steps"]:
            raise UserError(f"--resume {path}: --steps {self.run['steps']} is not beyond the checkpoint's {step}")
        rates = [learning_rate(step, run["steps"], run["lr"], run["warmup"], run["schedule"], run["decay"]) for run in (about["run"], self.run)]
        if not math.isclose(*rates):
            raise UserError(f"--resume {path}: the learning rate was {rates[0]:.3g} there and would go on with {rates[1]:.3g}; branch off in "
                            f"the constant phase of both runs, with the same --lr")
        say(f"branched off {path}")
        return {**about, "branched_from": str(path), "keep": []}

    def load_newest(self, damaged):
        """Load the newest whole checkpoint; returns what it says of itself. Those that are not whole go into damaged."""
        candidates = self.newest_first()
        for path in candidates:
            try:
                about = self.load_whole(path)
                say(f"resumed from {path}")
                return about
            except NotWhole as error:
                say(f"{path} is not whole ({error}): trying the one before")
                damaged.append(path)
        if candidates:
            raise UserError(f"{self.directory}: none of its {len(candidates)} checkpoints is whole; start another run with --out DIR")
        say(f"no checkpoint in {self.directory} yet: starting from the beginning")
        return {"step": 0, "branched_from": None, "keep": []}

    def load_whole(self, path):
        """As load; raises NotWhole for a damaged checkpoint, and UserError for one of the other strategy."""
        if (path.suffix == ".pt") != (self.parallel.strategy == "ddp"):
            raise UserError(f"{path}: saved with --strategy {'ddp' if path.suffix == '.pt' else 'fsdp'}; resume with the same")
        try:
            about = self.load(path)
            return {"step": int(about["step"]), "run": dict(about["run"]), "branched_from": about["branched_from"], "keep": list(about["keep"])}
        except UserError:
            raise
        except (Exception, dcp.api.CheckpointException) as error:       # a stranger's bytes or a damaged disk may raise anything
            unreadable = isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError)
            if unreadable or is_out_of_memory(error) or is_lost_peer(error):
                raise
            raise NotWhole(type(error).__name__) from None


class NotWhole(Exception):
    """A checkpoint that is damaged or none."""


def step_of(path):
    """The steps that a checkpoint has behind it, by its name."""
    return int(path.name.removeprefix("step-").removesuffix(".pt"))


class PlainUnpickler(pickle.Unpickler):
    """Reads the index of a sharded checkpoint, which is a pickle, and builds nothing but the index."""

    KNOWN = {"torch.distributed.checkpoint.metadata": {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                                                       "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
             "torch.distributed.checkpoint.filesystem": {"_StorageInfo"}, "torch.serialization": {"_get_layout"},
             "torch": {"Size", "float32", "bfloat16", "float16", "int64"}, "collections": {"OrderedDict"},
             "pathlib": {"PosixPath"}, "pathlib._local": {"PosixPath"}}

    def find_class(self, module, name):
        if name in self.KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def fill(state, stored):
    """Copy the tensors of nested dicts into those of the same places, so that none is held twice. Raises KeyError or
    ValueError where the two are not of one form."""
    for name, value in state.items():
        if isinstance(value, dict):
            fill(value, stored[name])
        elif value.shape != stored[name].shape:
            raise ValueError(f"{name} has the shape {tuple(stored[name].shape)}")
        else:
            value.copy_(stored[name])


def set_aside(path):
    """Rename a damaged checkpoint, over an earlier one of its step."""
    aside = path.with_name(path.name + ".damaged")
    if aside.is_dir():
        shutil.rmtree(aside)
    os.replace(path, aside)


def refuse_code(path):
    """Raise UnpicklingError where loading a sharded checkpoint would run code that its files bring along: where its index
    holds more than an index, or lists anything but tensors, which are loaded as such."""
    with open(path, "rb") as f:
        index = PlainUnpickler(f).load()
    if not all(isinstance(item, TensorStorageMetadata) for item in index.state_dict_metadata.values()):
        raise pickle.UnpicklingError("more than tensors")


# --- telling --------------------------------------------------------------------------------------------------------

def say(text):
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Log:
    """One JSON line a record in log.jsonl, on rank 0; what a resumed run will compute again is dropped from it: the steps
    beyond resumed_at and, where again says so, that step's validation, whose new record keeps what only the old one knows.

    A line that cannot be written is noted in failure, for the ranks to agree on: rank 0 must not leave them waiting.
    """

    def __init__(self, path, resumed_at, again=False):
        self.path, self.file, self.failure, self.dropped = path, None, None, {}
        on_rank_0(lambda: self.open(resumed_at, again))

    def open(self, resumed_at, again):
        records = [r for r in read_log(self.path) if r["step"] <= resumed_at]
        if again:
            self.dropped = next((r for r in records if r["step"] == resumed_at and "val_loss" in r), {})
        with written_whole(self.path) as part:
            part.write_text("".join(json.dumps(r) + "\n" for r in records if r is not self.dropped))
        self.file = open(self.path, "a")

    def write(self, **record):
        if "val_loss" in record and record["step"] == self.dropped.get("step"):
            record = self.dropped | record
        if self.file and not self.failure:
            try:
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()
            except OSError as error:
                self.failure = error.strerror

    def check(self):
        """Raise UserError where a line could not be written."""
        if self.failure:
            raise UserError(f"{self.path} cannot be written ({self.failure}); is the disk full? the last whole checkpoint stays")


def read_log(path):
    """The records of a log; a line that was cut short, or is no record, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]


@dataclass
class Progress:
    """What happened in some steps: the loss of all, and the time of those that count."""

    tokens_a_step: int
    flops_per_token: int
    peak: float | None                  # FLOP/s of all devices together
    device: torch.device

    def __post_init__(self):
        self.loss, self.steps, self.seconds, self.waited, self.timed = 0.0, 0, 0.0, 0.0, 0

    def add(self, loss, seconds, waited, counts):
        """A step's mean loss, its seconds and those it waited for data; one that compiled does not count."""
        self.loss, self.steps = self.loss + loss, self.steps + 1
        if counts:
            self.seconds, self.waited, self.timed = self.seconds + seconds, self.waited + waited, self.timed + 1

    def forecast(self, steps):
        """Seconds of so many steps at the chapter's MFU; None, as below, where a peak is not known or no step was timed."""
        return steps * self.tokens_a_step * self.flops_per_token / (self.peak * CHAPTER_MFU) if self.peak else None

    def rate(self):
        """Tokens a second."""
        return self.timed * self.tokens_a_step / self.seconds if self.seconds else None

    def mfu(self):
        """Achieved FLOP/s over the devices' peak."""
        return self.rate() * self.flops_per_token / self.peak if self.seconds and self.peak else None

    def waiting(self):
        """The share of the time spent waiting for data."""
        return self.waited / self.seconds if self.seconds else None

    def rate_text(self):
        """Tokens/s, MFU and memory as they are printed."""
        return f"{or_na(self.rate(), ',.0f')} tokens/s  MFU {or_na(self.mfu(), '.0%')}  memory {peak_memory_gb(self.device):.2f} GB"

    def text(self, step, lr, grad_norm, corpus):
        """What is printed of these steps, the last of which is step."""
        loss = self.loss / self.steps
        bits = corpus.bits_per_byte(loss, "train")
        return (f"step {step:5d}  loss {loss:.3f}{'' if bits is None else f'  bits per byte {bits:.3f}'}  lr {lr:.2e}  grad_norm {grad_norm:.2f}  "
                f"{self.rate_text()}  data wait {or_na(self.waiting(), '.1%')}")


def or_na(value, form):
    """A number in that format; n/a for None."""
    return "n/a" if value is None else format(value, form)


def plan_text(args, config, corpus, steps, world, seconds, gigabytes):
    """What will run: the model, the batch, the data, and the forecast of time (None where no peak is known) and memory."""
    model, batch = outline(config), args.global_batch * config.seq_len
    time_text = f"{duration_text(seconds)} at {CHAPTER_MFU:.0%} MFU" if seconds is not None else "time n/a (no peak is known for this device)"
    return (f"model: {model.num_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP a token\n"
            f"batch: {batch:,} tokens a step = {args.global_batch} sequences of {config.seq_len}: micro-batch {args.micro_batch} "
            f"x {args.global_batch // args.micro_batch // world} accumulated x {world} processes ({args.strategy})\n"
            f"data: {size_text(steps * batch)} tokens in {steps:,} steps, {steps * batch / len(corpus.train):.1f} times through the training part\n"
            f"forecast: {time_text}, {gigabytes:.2f} GB a device (states, activations, loss)")


def score_choices(parallel, questions):
    """The share of questions whose right candidate is the likeliest as a continuation: by its whole log-probability, and by
    that divided by its bytes. The ranks share the work."""
    right = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    with parallel.evaluating():
        for i, counts in shares(len(questions)):
            context, candidates, n_bytes, answer = questions[i]
            scores = parallel.model.log_probabilities(context, candidates)
            per_byte = scores / torch.tensor(n_bytes, device=scores.device)
            if counts:
                right += torch.stack([scores.argmax() == answer, per_byte.argmax() == answer])
    dist.all_reduce(right)
    return (right / len(questions)).tolist()


def sample(parallel, tokenizer, ids):
    """A continuation of a prompt's ids as text; all ranks take part."""
    idx = torch.tensor([ids], device=parallel.device)
    with torch.compiler.set_stance("force_eager"):
        out = parallel.model.generate(idx, SAMPLE_TOKENS, temperature=0.8, top_k=50, generator=torch.Generator(parallel.device).manual_seed(0))
    return tokenizer.decode(out[0].tolist())


def is_validated(args, step):
    """Whether a validation follows a step."""
    return step > 0 and (step % args.eval_every == 0 or step == args.steps)


def validate(args, parallel, corpus, step, log):
    """Measure, print and log the loss on the validation part."""
    nats = evaluate(parallel, corpus.val, args.eval_batch)
    bits = corpus.bits_per_byte(nats)
    say(f"step {step:5d}  validation loss {nats:.4f}" + (f"  bits per byte {bits:.4f}" if bits is not None else ""))
    record = {}
    if args.questions:
        summed, per_byte = score_choices(parallel, args.questions)
        say(f"step {step:5d}  of {len(args.questions):,} questions right: {summed:.3f} by log-probability, {per_byte:.3f} by that a byte")
        record = {"choices": summed, "choices_per_byte": per_byte}
    log.write(step=step, val_loss=nats, bits_per_byte=bits, **record)


# --- the run --------------------------------------------------------------------------------------------------------

def clock(device):
    """The time in seconds, when a GPU has done what was asked of it."""
    synchronize(device)
    return time.perf_counter()


def agree(loss, noted, log, device):
    """The mean loss over the ranks, and the signal that any of them got (or None): the same answer on all ranks.

    Raises UserError on all of them where rank 0 cannot write the log.
    """
    sums = torch.tensor([0.0, signal.SIGTERM in noted, signal.SIGINT in noted, log.failure is not None], dtype=torch.float64, device=device)
    sums[0] = loss
    dist.all_reduce(sums)
    total, terminated, interrupted, failed = sums.tolist()
    if failed:
        on_rank_0(log.check)
    return total / dist.get_world_size(), signal.SIGTERM if terminated else signal.SIGINT if interrupted else None


def check_finite(step, loss, grad_norm):
    """Raise UserError where a step's loss or the norm of its gradient is not a number to go on with."""
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise UserError(f"step {step}: the {what} is {value}; stopped before the update, and the last checkpoint stays. "
                            f"Try a smaller --lr or a longer --warmup")


def train(args, corpus, parallel, optimizers, checkpoints, log, first_step, last_step, progress, noted):
    """The loop, from first_step to last_step or a signal; returns (steps done, the signal or None)."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), parallel.device
    loader = Loader(corpus.train, parallel.model.config, args.global_batch, args.micro_batch, args.seed, device, first_step, rank, world)
    step, stopped, since_line = first_step, None, replace(progress)
    while not stopped:
        if is_validated(args, step):    # a resumed run begins with its checkpoint's
            validate(args, parallel, corpus, step, log)
        if step >= last_step:
            break
        start, waited = clock(device), loader.waited
        share = learning_rate(step, args.steps, 1.0, args.warmup, args.schedule, args.decay)
        set_learning_rate(optimizers, share)
        loss = accumulate(parallel, loader, args.global_batch // args.micro_batch // world)
        grad_norm = parallel.clip(args.clip).item()
        loss, stopped = agree(loss, noted, log, device)
        step += 1
        check_finite(step, loss, grad_norm)
        printed = step % LOG_EVERY == 0 or step == last_step or stopped
        if printed:                     # outside the step's time, and when the activations' memory is free again
            aside = clock(device)
            before = {name: p.detach().clone() for name, p in parallel.model.block_matrices().items()}
            start += clock(device) - aside
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds, waited, timed = clock(device) - start, loader.waited - waited, step > first_step + 1       # the first one compiles
        for p in (progress, since_line):
            p.add(loss, seconds, waited, timed)
        log.write(step=step, loss=loss, lr=share * args.lr, grad_norm=grad_norm, seconds=seconds, data_wait=waited, timed=timed,
                  train_bits_per_byte=corpus.bits_per_byte(loss, "train"), **({"matrices": parallel.model.matrix_sizes(before)} if printed else {}))
        if printed:
            say(since_line.text(step, share * args.lr, grad_norm, corpus))
            since_line = replace(progress)
        if step % args.save_every == 0 or step in args.keep_at or step == last_step or stopped:
            checkpoints.save(step)
    loader.close()
    on_rank_0(log.check)
    return step, stopped


def build(args, config, device):
    """The model, the same on every rank, as its processes train it; and its optimizers."""
    torch.manual_seed(args.seed)
    model = GPT(config)
    model.recompute, model.loss_rows = args.recompute, LOSS_ROWS[device.type]
    parallel = Parallel(model, args.strategy, device, args.compile)
    optimizers = model.muon(args.lr, args.weight_decay, args.embedding_lr) if args.optimizer == "muon" else [model.adamw(args.lr, args.weight_decay)]
    set_learning_rate(optimizers, 1.0)  # the flags' peaks, which no checkpoint overrides
    return parallel, optimizers


def run(args, device):
    """Train as the flags say, in a process group that is joined already; returns the signal that ended it, or None."""
    started, world = time.perf_counter(), dist.get_world_size()
    args.eval_batch = min(EVAL_BATCH, args.micro_batch or EVAL_BATCH)           # the same for any number of processes
    args.micro_batch = micro_batch_size(args.global_batch, world, args.micro_batch)
    corpus = first_on_rank_0(lambda: load_corpus(args.data, args.seq_len))
    identity = {"data": corpus.identity(), "global_batch": args.global_batch, "seed": args.seed, "optimizer": args.optimizer}
    same_on_all_ranks(identity["data"], args.data, "tokens")
    config = GPTConfig.from_depth(args.depth, corpus.vocab_size, args.seq_len) if args.depth else config_from(args, vocab_size=corpus.vocab_size)
    args.questions = load_choices(args.choices, args.data, config) if args.choices else []
    say(f"{corpus}\n{machine(device)}, {world} process{'es' if world > 1 else ''}")
    prompt = None
    if args.sample:
        try:
            prompt = load_prompt(args.sample, args.data, config)
        except UserError as error:      # said now, and not when the run is done
            say(f"--sample: {error}, so no text will be written")
        prompts = [None] * world        # all ranks write it, or none
        dist.all_gather_object(prompts, prompt is not None)
        prompt = prompt if all(prompts) else None
    memory = training_memory(config, args.micro_batch, world, args.strategy == "fsdp", args.recompute, args.optimizer, device.type,
                             accumulate=args.global_batch > args.micro_batch * world)
    gigabytes = peak_memory_gb(device) + sum(memory.values()) / GIGA            # on a CPU beside Python and torch themselves
    parallel, optimizers = build(args, config, device)
    checkpoints = Checkpoints(args.out, parallel, optimizers, identity, {name: getattr(args, name) for name in OF_THE_RUN}, args.keep_at)
    on_rank_0(lambda: checkpoints.claim(args.resume))
    first_step = checkpoints.start(args.resume)
    last_step = max(first_step, min(args.steps, args.stop_at or args.steps))
    log = Log(args.out / "log.jsonl", first_step, again=is_validated(args, first_step))

    peak = datasheet_peak(device, "bf16")
    progress = Progress(args.global_batch * config.seq_len, outline(config).flops_per_token(), peak and world * peak, device)
    seconds = progress.forecast(last_step - first_step)
    say(plan_text(args, config, corpus, last_step - first_step, world, seconds, gigabytes))
    with noted_signals() as noted:
        step, stopped = train(args, corpus, parallel, optimizers, checkpoints, log, first_step, last_step, progress, noted)
    say(f"{'stopped by ' + stopped.name if stopped else 'done'} at step {step}: {duration_text(progress.seconds)} in timed steps of "
        f"{duration_text(time.perf_counter() - started)} (forecast {duration_text(seconds)}), "
        f"{progress.rate_text()} (forecast {gigabytes:.2f} GB)")
    if stopped:
        say(f"saved; go on with --resume --out {args.out}")
        return stopped
    on_rank_0(lambda: leave_results(args, corpus, log, {
        "world": world, "params": outline(config).num_params(), "step": step, "tokens_per_s": progress.rate(), "mfu": progress.mfu(),
        "data_wait": progress.waiting(), "seconds": progress.seconds, "forecast_seconds": seconds,
        "peak_memory_gb": peak_memory_gb(device), "forecast_gb": gigabytes}))
    if prompt:
        say(sample(parallel, *prompt))
    return None


def leave_results(args, corpus, log, measured):
    """The run's figures in runs/train_gpu.json, and its losses drawn over the steps."""
    records = read_log(log.path)
    keys = ("loss", "val_loss", "bits_per_byte", "choices", "choices_per_byte")
    last = {key: next((r[key] for r in reversed(records) if key in r), None) for key in keys}
    save_results("train_gpu", {"corpus": corpus.name, "out": str(args.out), **last, **measured})
    with plot(args.out / "loss.png", corpus.name, xlabel="steps", ylabel="loss (nats a token)") as axes:
        for key, style in (("loss", "-"), ("val_loss", "o-")):
            if points := [(r["step"], r[key]) for r in records if key in r]:
                axes.plot(*zip(*points), style, label=key, markersize=3, linewidth=1)


def numbers(text):
    """An argparse type: whole numbers with commas between."""
    return tuple(positive(int)(part) for part in text.split(","))


def parse_args(argv):
    parser = Parser(description=__doc__)
    add_data_flag(parser)
    add_model_flags(parser, GPTConfig(d_model=512, n_layer=8, n_head=8, seq_len=512))
    whole, number = positive(int), positive(float)
    flags = (
        ("--out", {"type": Path, "default": RUNS / "gpt", "metavar": "DIR"}, "where checkpoints, log and curve go"),
        ("--device", {"default": "cuda", "metavar": "NAME"}, "cuda, or cpu to try it"),
        ("--strategy", {"choices": ("ddp", "fsdp"), "default": "ddp"}, "copies of the model, or its parameters sharded"),
        ("--micro-batch", {"type": whole, "metavar": "N"}, f"sequences a process computes at once; up to {LARGEST_MICRO_BATCH} if not given"),
        ("--global-batch", {"type": whole, "default": 128, "metavar": "N"}, "sequences a step, on all processes together"),
        ("--steps", {"type": whole, "default": 2000, "metavar": "N"}, "updates"),
        ("--tokens", {"type": count, "metavar": "N"}, "tokens to train on, e.g. 6B, instead of --steps"),
        ("--lr", {"type": number, "metavar": "X"}, "peak learning rate (default: 0.001, of muon 0.02)"),
        ("--warmup", {"type": whole, "default": 100, "metavar": "N"}, "steps of linear warm-up"),
        ("--schedule", {"choices": SCHEDULES, "default": "cosine"}, "of the learning rate after it"),
        ("--decay", {"type": positive(float, 1), "default": 0.2, "metavar": "X"}, "share of the steps in which wsd falls to zero"),
        ("--optimizer", {"choices": ("adamw", "muon"), "default": "adamw"},
         "of all parameters, or muon of the blocks' matrices and adamw of the rest"),
        ("--embedding-lr", {"type": number, "default": EMBEDDING_LR, "metavar": "X"}, "peak learning rate of adamw beside muon"),
        ("--weight-decay", {"type": within(float, 0, 1000), "metavar": "X"}, "of the matrices (default: 0.1, of muon 0)"),
        ("--clip", {"type": number, "default": 1.0, "metavar": "X"}, "largest norm of the gradient"),
        ("--seed", {"type": within(int, 0, (1 << 63) - 1), "default": 0, "metavar": "N"}, "of the initial weights and the order of the data"),
        ("--eval-every", {"type": whole, "default": 250, "metavar": "N"}, "steps between validations"),
        ("--save-every", {"type": whole, "default": 500, "metavar": "N"}, "steps between checkpoints"),
        ("--keep-at", {"type": numbers, "default": (), "metavar": "N,N"}, "steps whose checkpoints are kept, to branch off from"),
        ("--choices", {"type": Path, "metavar": "FILE"}, "a .jsonl of HellaSwag's or ARC's questions, answered at each validation"),
        ("--stop-at", {"type": whole, "metavar": "N"}, "stop there, saved; the schedule is still that of --steps"),
        ("--sample", {"metavar": "TEXT"}, "write a continuation of it at the end"),
    )
    for name, options, text in flags:
        default = f" (default: {options['default']})" if options.get("default") else ""
        parser.add_argument(name, help=text + default, **options)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile (default: on a GPU)")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass to save memory")
    parser.add_argument("--resume", nargs="?", const=True, metavar="CHECKPOINT", type=Path,
                        help="continue from the run's newest whole checkpoint, if it has one; or branch off that of another run")
    parser.add_argument("--depth", type=positive(int, 1000), metavar="D",
                        help="a model of the report's family instead, of D layers (context 2048 if not given)")
    parser.add_argument("--preset", choices=PRESETS, help="report: the report's run; other flags change it")
    early, _ = parser.parse_known_args(argv)
    preset = PRESETS.get(early.preset, {})
    if early.depth or "depth" in preset:
        parser.set_defaults(seq_len=REPORT_SEQ_LEN, d_model=None, n_layer=None, n_head=None)
    parser.set_defaults(**preset)
    args = parser.parse_args(argv)
    if args.depth and (args.d_model or args.n_layer or args.n_head):
        parser.error("--depth sets width, layers and heads: leave out --d-model, --n-layer and --n-head")
    if args.keep_at and max(args.keep_at) > args.steps and not args.tokens:
        parser.error(f"--keep-at {max(args.keep_at)} is beyond the {args.steps} steps")
    if args.tokens:
        args.steps = int(args.tokens // (args.global_batch * args.seq_len))
        if not args.steps:
            parser.error(f"--tokens is less than one step's {args.global_batch * args.seq_len:,}")
    lr, weight_decay = (0.02, 0.0) if args.optimizer == "muon" else (1e-3, WEIGHT_DECAY)
    args.lr = args.lr or lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay
    return args


@command
def main(argv=None):
    args = parse_args(argv)
    device = pick_device(args.device)
    check_runs()
    if args.compile is None:
        args.compile = device.type == "cuda"
    torch.set_float32_matmul_precision("high")      # TF32: what stays fp32 uses the Tensor Cores too
    keep_memory()
    try:
        with process_group(device) as device:
            stopped = run(args, device)
    except Exception as error:
        if is_out_of_memory(error):
            helpful = [flag for flag, helps in (("a smaller --micro-batch", args.micro_batch != 1), ("--recompute", not args.recompute),
                                                ("--strategy fsdp on several GPUs", args.strategy != "fsdp")) if helps]
            raise UserError(f"out of memory ({str(error).split('. ')[0][:100]}): {', '.join(helpful) or 'a smaller model or context'} would help") from None
        reason = None if isinstance(error, OSError) else compile_failure(error)
        if reason is None:
            raise
        raise UserError(f"--compile: {reason}; or go without, --no-compile") from None
    if stopped:
        raise SystemExit(128 + stopped)


if __name__ == "__main__":
    main()
