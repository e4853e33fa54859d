"""Train a GPT, from one CPU core to many GPUs.

    python train_gpu.py                                               one GPU: the chapter's 29M model, 2000 steps
    torchrun --standalone --nproc-per-node 8 train_gpu.py             the same run on eight
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 8 train_gpu.py      on two nodes (1 on the other)
    torchrun --standalone --nproc-per-node 8 --max-restarts 3 train_gpu.py --resume           and through interruptions
    python train_gpu.py --device cpu --d-model 64 --n-layer 2 --n-head 2 --seq-len 64 --steps 100     to try it, a minute

The chapter reads this script; here it runs. bf16 over fp32 weights (fp32 throughout on a CPU), torch.compile, fused
AdamW, DDP or FSDP. The global batch and the data of every step are fixed, whatever the number of processes: the same
command trains the same model on 1, 2 or 8 of them. Checkpoints, the log and the curve go to the run's directory.
"""
import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from budget import (CHAPTER_MFU, Run, compile_failure, data_parallel, datasheet_peak, first_on_rank_0, keep_memory, machine, on_rank_0,
                    peak_memory_gb, pick_device, process_group, synchronize)

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import (RUNS, GPT, GPTConfig, Parser, UserError, add_model_flags, check_runs, command, config_from, duration_text, plot, positive,
                   save_results, size_text, written_whole)
from prepare_data import add_data_flag, load_corpus, load_tokenizer, window_starts, windows_at

LARGEST_MICRO_BATCH = 32                # the chapter's, where the global batch and the processes allow it
LOG_EVERY = 50
KEEP_CHECKPOINTS = 2
EVAL_WINDOWS, EVAL_BATCH = 128, 8
FETCHED_AHEAD = 2                       # micro-batches
SAMPLE_TOKENS = 100
SCHEDULES = ("cosine", "wsd", "constant")


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


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


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
            starts = window_starts(len(tokens), config.seq_len, global_batch, seed, step)
            batch = windows_at(tokens, starts[index * micro_batch:(index + 1) * micro_batch], config.seq_len)
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


def data_identity(corpus):
    """A fingerprint of a corpus, wherever its file lies: the lengths of its parts and a sample of their tokens."""
    digest = hashlib.sha256()
    for part in (corpus.train, corpus.val):
        sample = part[::max(1, len(part) // 100_000)]
        digest.update(f"{len(part)} {sample.tolist()}".encode())
    return f"{len(corpus.train):,} training tokens, {digest.hexdigest()[:16]}"


# --- the model on its devices ---------------------------------------------------------------------------------------

class Parallel:
    """A GPT, built on the CPU, as its processes train it together: forward(x, y), and a context for each pass.

    model is the plain module (its parameters sharded with fsdp), without the wrappers' prefixes in its names.
    """

    def __init__(self, model, strategy, device, compiled):
        self.model, self.strategy, self.device = model, strategy, device
        if strategy == "fsdp":          # each block goes to the device and is sharded before the next one: never the whole model
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
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
        stack = contextlib.ExitStack()
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(last)
        elif self.forward is not self.model and not last:
            stack.enter_context(self.forward.no_sync())
        return stack

    def precision(self):
        """bf16 autocast over fp32 weights on a GPU; under fsdp its own policy does that. fp32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda" and self.strategy == "ddp")

    def clip(self, limit):
        """Scale the gradient to a norm of at most limit; returns the norm it had, over all parameters and ranks."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


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


@torch.no_grad()
def evaluate(parallel, tokens, at_once=EVAL_BATCH):
    """Mean loss over fixed windows of tokens in nats a token, the same for any number of ranks.

    Windows are spread evenly and computed in fixed groups, which the ranks share out; the uncompiled module does it.
    """
    seq_len = parallel.model.config.seq_len
    model, rank, world = parallel.model, dist.get_rank(), dist.get_world_size()
    n = max(1, min(EVAL_WINDOWS, (len(tokens) - 1) // seq_len))
    groups = np.array_split(np.linspace(0, len(tokens) - seq_len - 1, n).astype(np.int64), math.ceil(n / at_once))
    sums = torch.zeros(len(groups), dtype=torch.float64, device=parallel.device)
    model.eval()
    with torch.compiler.set_stance("force_eager"), parallel.precision():
        for i in range(0, len(groups), world):
            mine = i + rank
            # Past the end a rank computes the last group once more, for under fsdp all have to take part; it is not counted.
            group = groups[min(mine, len(groups) - 1)]
            x, y = (t.to(parallel.device) for t in windows_at(tokens, group, seq_len))
            loss = model(x, y)[1]
            if mine < len(groups):
                sums[mine] = loss.double() * len(group)
    model.train()
    dist.all_reduce(sums)
    return sums.sum().item() / n


# --- checkpoints ----------------------------------------------------------------------------------------------------

class Checkpoints:
    """The checkpoints of one run: step-0000500.pt with ddp, a directory step-0000500 with fsdp.

    Each is written under another name beside the last one and renamed when it is whole; the newest two are kept.
    """

    def __init__(self, directory, parallel, optimizer, identity):
        self.directory, self.parallel, self.optimizer, self.identity = directory, parallel, optimizer, identity
        self.suffix = "" if parallel.strategy == "fsdp" else ".pt"

    def clean(self):
        """Remove what an interrupted save left."""
        for part in self.directory.glob("*.part"):
            shutil.rmtree(part) if part.is_dir() else part.unlink()

    def save(self, step):
        """Write the state after so many steps; every rank takes part, and all raise UserError where one cannot write:
        the last whole checkpoint is untouched then."""
        path = self.directory / f"step-{step:07d}{self.suffix}"
        about = {"step": step, "config": asdict(self.parallel.model.config), "identity": self.identity}
        if self.parallel.strategy == "fsdp":
            self.save_sharded(path, about)
        else:
            on_rank_0(lambda: self.save_single(path, about))
        on_rank_0(self.prune)

    def save_single(self, path, about):
        state = {"model": self.parallel.model.state_dict(), "optimizer": self.optimizer.state_dict(), **about}
        with written_whole(path) as part:
            torch.save(state, part)

    def save_sharded(self, path, about):
        part = path.with_name(path.name + ".part")
        on_rank_0(lambda: part.mkdir(parents=True))
        state, _ = self.sharded_state()
        failure = None
        try:
            dcp.save(state, checkpoint_id=part)
        except dcp.api.CheckpointException as error:        # the ranks' errors, on all of them
            failure = next(str(reason) for reason, _ in error.failures.values())
        on_rank_0(lambda: self.finish_sharded(path, part, about, failure))

    def finish_sharded(self, path, part, about, failure):
        if failure:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(f"{path} cannot be written ({failure}); is the disk full or read-only?")
        with written_whole(part / "about.json") as about_part:
            about_part.write_text(json.dumps(about))
        if path.exists():               # one that was not whole, and is now written again
            shutil.rmtree(path)
        os.rename(part, path)

    def sharded_state(self):
        """What torch.distributed.checkpoint stores, tensors alone, and the optimizer's options, which the flags give."""
        model, optimizer = get_state_dict(self.parallel.model, self.optimizer)
        return {"model": model, "optimizer": optimizer["state"]}, optimizer["param_groups"]

    def prune(self):
        for old in self.newest_first()[KEEP_CHECKPOINTS:]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def newest_first(self):
        return sorted((p for p in self.directory.glob("step-*") if p.suffix in ("", ".pt")), reverse=True)

    def check(self, path, about):
        """Raise UserError, naming it, where a checkpoint is of another model, other data or another batch."""
        theirs = {**about["config"], **about["identity"]}
        ours = {**asdict(self.parallel.model.config), **self.identity}
        for what, value in ours.items():
            if theirs.get(what) != value:
                raise UserError(f"{path}: its {what} is {theirs.get(what)}, this run's is {value}; resume with the same, or "
                                f"start another run with --out DIR")

    def load(self, path):
        """Put a checkpoint's state into the model and the optimizer; returns the steps it has behind it."""
        if path.is_dir():
            about = json.loads((path / "about.json").read_text())
            self.check(path, about)
            refuse_code(path / ".metadata")
            state, options = self.sharded_state()
            dcp.load(state, checkpoint_id=path)
            set_state_dict(self.parallel.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict={"state": state["optimizer"], "param_groups": options})
            return about["step"]
        stored = torch.load(path, weights_only=True, map_location="cpu")
        self.check(path, stored)
        self.parallel.model.load_state_dict(stored["model"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(stored["optimizer"])
        for group, option in zip(self.optimizer.param_groups, options):
            group.update(option)        # --weight-decay is the flags', as with fsdp
        return stored["step"]

    def resume(self):
        """Load the newest whole checkpoint; returns its step, 0 where there is none yet. All ranks find the same one."""
        step = self.load_newest()
        steps = torch.tensor([step, -step], device=self.parallel.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        if steps.sum():
            raise UserError(f"{self.directory}: the processes find different checkpoints there (here step {step}); give every "
                            f"node the same directory")
        return step

    def load_newest(self):
        candidates = self.newest_first()
        for path in candidates:
            if (path.suffix == ".pt") != (self.parallel.strategy == "ddp"):
                raise UserError(f"{path}: saved with --strategy {'ddp' if path.suffix == '.pt' else 'fsdp'}; resume with the same")
            try:
                step = self.load(path)
                say(f"resumed from {path}")
                return step
            except UserError:
                raise
            except Exception as error:      # a stranger's bytes or a damaged disk: the unpickler may raise anything
                say(f"{path} is not whole ({type(error).__name__}): trying the one before")
        if candidates:
            raise UserError(f"{self.directory}: none of its {len(candidates)} checkpoints is whole; start another run with --out DIR")
        say(f"no checkpoint in {self.directory} yet: starting from the beginning")
        return 0


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
    """One JSON line a record in log.jsonl, on rank 0; what a resumed run will compute again is dropped from it.

    A line that cannot be written is noted in failure, for the ranks to agree on: rank 0 must not leave them waiting.
    """

    def __init__(self, path, resumed_at):
        self.path, self.file, self.failure = path, None, None
        on_rank_0(lambda: self.open(resumed_at))

    def open(self, resumed_at):
        records = [r for r in read_log(self.path) if r["step"] <= resumed_at]
        with written_whole(self.path) as part:
            part.write_text("".join(json.dumps(r) + "\n" for r in records))
        self.file = open(self.path, "a")

    def write(self, **record):
        if self.file and not self.failure:
            try:
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()
            except OSError as error:
                self.failure = error.strerror


def read_log(path):
    """The records of a log; a line that was cut short, or is no record, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]


@dataclass
class Progress:
    """What happened since the last printed line: losses of all steps, and time and tokens of those that count."""

    tokens_a_step: int
    flops_per_token: int
    peak: float | None                  # FLOP/s of all devices together
    device: torch.device

    def __post_init__(self):
        self.losses, self.seconds, self.waited, self.timed = [], 0.0, 0.0, 0

    def add(self, loss, seconds, waited, counts):
        """A step's mean loss, its seconds and those it waited for data; one that compiled does not count."""
        self.losses.append(loss)
        if counts:
            self.seconds, self.waited, self.timed = self.seconds + seconds, self.waited + waited, self.timed + 1

    def rate(self):
        return self.timed * self.tokens_a_step / self.seconds if self.seconds else None

    def rate_text(self):
        rate = self.rate()
        mfu = f"{rate * self.flops_per_token / self.peak:.0%}" if rate and self.peak else "n/a"
        return f"{f'{rate:,.0f}' if rate else 'n/a'} tokens/s  MFU {mfu}  memory {peak_memory_gb(self.device):.2f} GB"

    def line(self, step, lr, grad_norm):
        wait = f"{self.waited / self.seconds:.1%}" if self.seconds else "n/a"
        return (f"step {step:5d}  loss {sum(self.losses) / len(self.losses):.3f}  lr {lr:.2e}  grad_norm {grad_norm:.2f}  "
                f"{self.rate_text()}  data wait {wait}")


def plan_text(args, model, corpus, cost, first_step, seconds, world):
    """What will run, as a text: the model, the batch, the data, and the forecast of time (seconds, or None) and memory."""
    tokens_a_step, steps = args.global_batch * model.config.seq_len, args.steps - first_step
    total = steps * tokens_a_step
    time_text = "time n/a (no peak is known for this device)" if seconds is None else f"{duration_text(seconds)} at {CHAPTER_MFU:.0%} MFU"
    return "\n".join((
        f"model: {cost.n_params:,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP a token",
        f"batch: {tokens_a_step:,} tokens a step = {args.global_batch} sequences of {model.config.seq_len}: micro-batch {args.micro_batch} "
        f"x {args.global_batch // args.micro_batch // world} accumulated x {world} processes ({args.strategy})",
        f"data: {size_text(total)} tokens in {steps:,} steps, {total / len(corpus.train):.1f} times through the training part",
        f"forecast: {time_text}, {cost.memory(args.strategy == 'fsdp'):.2f} GB a device (states, activations, logits)"))


def write_curve(log, path, title):
    """The losses of a log, drawn over its steps."""
    with plot(path, title, xlabel="steps", ylabel="loss (nats a token)") as axes:
        for key, style in (("loss", "-"), ("val_loss", "o-")):
            points = [(r["step"], r[key]) for r in log if key in r]
            if points:
                axes.plot(*zip(*points), style, label=key, markersize=3, linewidth=1)


def sample(model, data, prompt, device):
    """A continuation of prompt by the tokenizer beside the data; all ranks take part."""
    tokenizer = load_tokenizer(data)
    idx = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    with torch.compiler.set_stance("force_eager"):
        out = model.generate(idx, SAMPLE_TOKENS, temperature=0.8, top_k=50, generator=torch.Generator(device).manual_seed(0))
    return tokenizer.decode(out[0].tolist())


def validate(args, parallel, corpus, step, log):
    """Measure, print and log the loss on the validation part."""
    nats = evaluate(parallel, corpus.val, min(EVAL_BATCH, args.micro_batch))
    bits = corpus.bits_per_byte(nats)
    say(f"step {step:5d}  validation loss {nats:.4f}" + (f"  bits per byte {bits:.4f}" if bits is not None else ""))
    log.write(step=step, val_loss=nats, bits_per_byte=bits)


# --- the run --------------------------------------------------------------------------------------------------------

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


def agree(loss, noted, log, device):
    """The mean loss over the ranks, and the signal that any of them got (or None): the same answer on all ranks.

    Raises UserError on all of them where rank 0 cannot write the log.
    """
    sums = torch.tensor([0.0, signal.SIGTERM in noted, signal.SIGINT in noted, log.failure is not None], dtype=torch.float64, device=device)
    sums[0] = loss
    dist.all_reduce(sums)
    total, terminated, interrupted, failed = sums.tolist()
    if failed:
        raise UserError(f"{log.path} cannot be written ({log.failure or 'on rank 0'}); is the disk full? the last whole checkpoint stays")
    return total / dist.get_world_size(), signal.SIGTERM if terminated else signal.SIGINT if interrupted else None


def train(args, corpus, parallel, optimizer, checkpoints, log, first_step, progress, noted):
    """The loop, from first_step to the end, --stop-at or a signal; returns (steps done, the signal or None)."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), parallel.device
    loader = Loader(corpus.train, parallel.model.config, args.global_batch, args.micro_batch, args.seed, device, first_step, rank, world)
    last = min(args.steps, args.stop_at or args.steps)
    per_line = replace(progress)
    step, stopped = first_step, None
    while step < last and not stopped:
        synchronize(device)
        start, waited = time.perf_counter(), loader.waited
        lr = learning_rate(step, args.steps, args.lr, args.warmup, args.schedule, args.decay)
        set_learning_rate(optimizer, lr)
        loss = accumulate(parallel, loader, args.global_batch // args.micro_batch // world)
        grad_norm = parallel.clip(args.clip).item()
        loss, stopped = agree(loss, noted, log, device)
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise UserError(f"step {step + 1}: the {what} is {value}; stopped before the update, and the last checkpoint stays. "
                               f"Try a smaller --lr or a longer --warmup")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds, step = time.perf_counter() - start, step + 1
        for p in (progress, per_line):
            p.add(loss, seconds, loader.waited - waited, counts=step > first_step + 1)
        log.write(step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=seconds, data_wait=loader.waited - waited)
        if step % LOG_EVERY == 0 or step == last or stopped:
            say(per_line.line(step, lr, grad_norm))
            per_line = replace(progress)
        if step % args.eval_every == 0 or step == args.steps:
            validate(args, parallel, corpus, step, log)
        if step % args.save_every == 0 or step == last or stopped:
            checkpoints.save(step)
    loader.close()
    return step, stopped


def run(args, device):
    """Train as the flags say, in a process group that is joined already; returns the signal that ended it, or None."""
    started, world = time.perf_counter(), dist.get_world_size()
    args.micro_batch = micro_batch_size(args.global_batch, world, args.micro_batch)
    corpus = first_on_rank_0(lambda: load_corpus(args.data, args.seq_len))
    config = config_from(args, vocab_size=corpus.vocab_size)
    say(f"{corpus}\n{machine(device)}, {world} process{'es' if world > 1 else ''}")
    sampled = args.sample and can_sample(args.data, args.sample, config.vocab_size)
    torch.manual_seed(args.seed)        # the same model on every rank
    model = GPT(config)
    model.recompute = args.recompute
    flops, n_params = model.flops_per_token(), model.num_params()           # of all of it: fsdp leaves each rank its shard
    parallel = Parallel(model, args.strategy, device, args.compile)
    optimizer = model.adamw(args.lr, args.weight_decay)
    checkpoints = Checkpoints(args.out, parallel, optimizer, {"data": data_identity(corpus), "global_batch": args.global_batch,
                                                              "seed": args.seed, "optimizer": args.optimizer})
    on_rank_0(lambda: (args.out.mkdir(parents=True, exist_ok=True), checkpoints.clean()))
    if checkpoints.newest_first() and not args.resume:
        raise UserError(f"{args.out} holds checkpoints of a run; continue it with --resume, or start another with --out DIR")
    dist.barrier()                      # every rank has looked before rank 0 writes
    first_step = checkpoints.resume() if args.resume else 0
    log = Log(args.out / "log.jsonl", first_step)

    peak, tokens_a_step = datasheet_peak(device, "bf16"), args.global_batch * config.seq_len
    cost = Run("", n_params, world, config.d_model, config.n_layer, config.seq_len, args.micro_batch, args.steps * tokens_a_step,
               config.vocab_size, args.recompute)
    forecast = (args.steps - first_step) * tokens_a_step * flops / (world * peak * CHAPTER_MFU) if peak else None
    say(plan_text(args, model, corpus, cost, first_step, forecast, world))
    progress = Progress(tokens_a_step, flops, peak and world * peak, device)
    with noted_signals() as noted:
        step, stopped = train(args, corpus, parallel, optimizer, checkpoints, log, first_step, progress, noted)
    say(f"{'stopped by ' + stopped.name if stopped else 'done'} at step {step}: {duration_text(progress.seconds)} in timed steps of "
        f"{duration_text(time.perf_counter() - started)} (forecast of all steps {duration_text(forecast)}), "
        f"{progress.rate_text()} (forecast {cost.memory(args.strategy == 'fsdp'):.2f} GB)")
    if stopped:
        say(f"saved; go on with --resume --out {args.out}")
        return stopped
    on_rank_0(lambda: leave_results(args, corpus, log, {"world": world, "params": n_params, "step": step, "tokens_per_s": progress.rate(),
                                                        "peak_memory_gb": peak_memory_gb(device)}))
    if sampled:
        say(sample(model, args.data, args.sample, device))
    return None


def leave_results(args, corpus, log, measured):
    """The curve, and the run's figures in runs/train_gpu.json."""
    records = read_log(log.path)
    last = {key: next((r[key] for r in reversed(records) if key in r), None) for key in ("loss", "val_loss", "bits_per_byte")}
    save_results("train_gpu", {"corpus": corpus.name, "out": str(args.out), **last, **measured})
    write_curve(records, args.out / "loss.png", corpus.name)


def can_sample(data, prompt, vocab_size):
    """Whether --sample can be answered at the end: said now, not after the run."""
    try:
        ids = load_tokenizer(data).encode(prompt).ids
        reason = "the prompt is empty" if not ids else "the tokenizer is not the data's: its ids exceed the vocabulary" if max(ids) >= vocab_size else None
    except UserError as error:
        reason = error
    if reason:
        say(f"--sample: {reason}, so no text will be written")
    return not reason


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
        ("--lr", {"type": number, "default": 1e-3, "metavar": "X"}, "peak learning rate"),
        ("--warmup", {"type": whole, "default": 100, "metavar": "N"}, "steps of linear warm-up"),
        ("--schedule", {"choices": SCHEDULES, "default": "cosine"}, "of the learning rate after it"),
        ("--decay", {"type": number, "default": 0.2, "metavar": "X"}, "share of the steps in which wsd falls to zero"),
        ("--optimizer", {"choices": ("adamw",), "default": "adamw"}, "what updates the parameters"),
        ("--weight-decay", {"type": float, "default": 0.1, "metavar": "X"}, "of the matrices"),
        ("--clip", {"type": number, "default": 1.0, "metavar": "X"}, "largest norm of the gradient"),
        ("--seed", {"type": int, "default": 0, "metavar": "N"}, "of the initial weights and the order of the data"),
        ("--eval-every", {"type": whole, "default": 250, "metavar": "N"}, "steps between validations"),
        ("--save-every", {"type": whole, "default": 500, "metavar": "N"}, "steps between checkpoints"),
        ("--stop-at", {"type": whole, "metavar": "N"}, "stop there, saved; the schedule is still that of --steps"),
        ("--sample", {"metavar": "TEXT"}, "write a continuation of it at the end"),
    )
    for name, options, text in flags:
        default = f" (default: {options['default']})" if "default" in options else ""
        parser.add_argument(name, help=text + default, **options)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile (default: on a GPU)")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass to save memory")
    parser.add_argument("--resume", action="store_true", help="continue from the run's newest whole checkpoint, if it has one")
    args = parser.parse_args(argv)
    if args.decay > 1:
        parser.error(f"--decay {args.decay:g} is a share of the steps, at most 1")
    if not 0 <= args.weight_decay < math.inf or args.seed < 0:
        parser.error("--weight-decay and --seed cannot be negative")
    return args


@command
def main(argv=None):
    args = parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {args.device}: no CUDA device here; to try it on a CPU: --device cpu")
    device = pick_device(args.device)
    check_runs()
    if args.compile is None:
        args.compile = device.type == "cuda"
    torch.set_float32_matmul_precision("high")      # TF32: what stays fp32 uses the Tensor Cores too
    keep_memory()
    try:
        with process_group(device) as device:
            stopped = run(args, device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory ({str(error).split('.')[0]}): a smaller --micro-batch, --recompute or "
                        f"--strategy fsdp would help") from None
    except Exception as error:
        reason = None if isinstance(error, OSError) else compile_failure(error)
        if reason is None:
            raise
        raise UserError(f"--compile: {reason}; or go without, --no-compile") from None
    if stopped:
        raise SystemExit(128 + stopped)


if __name__ == "__main__":
    main()
