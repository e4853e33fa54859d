"""Data parallelism: several processes, each with its own data, train the model that one process would.

    torchrun --standalone --nproc-per-node 2 ddp_train.py
    python ddp_train.py                                   the same: it starts two processes by itself

It takes half a minute. Every rank trains on 8 sequences a step for 30 steps under DistributedDataParallel (gloo, or
nccl where each process has a GPU); then rank 0 trains a plain model on all the ranks' sequences at once. The chapter
finds their parameters equal to within 1e-4. Beside it: what is wasted when every rank reads the same data, and the
gradient syncs that no_sync saves under accumulation.
"""
import contextlib
import os
import sys

from budget import cpu_count, data_parallel, first_on_rank_0, launched, machine, on_rank_0, process_group

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from model import RUNS, GPT, GPTConfig, Parser, check_runs, command, positive, save_results, written_whole
from prepare_data import add_data_flag, load_corpus, sample_batch

PER_RANK, SEQ_LEN, STEPS, LEARNING_RATE = 8, 64, 30, 3e-3
MICRO_BATCHES = 4                       # of the accumulation whose syncs are counted
TOLERANCE = 1e-4
DEFAULT_PROCESSES = 2


def batch(tokens, config, step, rank, device):
    """The sequences of one rank at one step, a function of both and nothing else."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(t.to(device) for t in sample_batch(tokens, config.seq_len, PER_RANK, generator))


def new_model(config, device, dtype=torch.float32):
    """The same initial model, and its optimizer, at every call and on every rank."""
    torch.manual_seed(0)
    model = GPT(config).to(device, dtype)
    return model, model.adamw(LEARNING_RATE)


def train(model, optimizer, batches):
    """One update for each (inputs, targets) of batches; returns the losses."""
    losses = []
    for x, y in batches:
        loss = model(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()                 # under DDP the gradients are averaged over the ranks here, bucket by bucket
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_ddp(tokens, config, device, data_rank, dtype=torch.float32):
    """Train under DDP, this rank reading the data of data_rank; returns the plain model and the last loss, averaged
    over the ranks."""
    model, optimizer = new_model(config, device, dtype)
    losses = train(data_parallel(model, device), optimizer, (batch(tokens, config, step, data_rank, device) for step in range(STEPS)))
    loss = losses[-1]
    dist.all_reduce(loss)
    return model, loss.item() / dist.get_world_size()


def train_single(tokens, config, device, data_ranks, dtype=torch.float32):
    """The control: one process whose batch is the sequences of all data_ranks."""
    model, optimizer = new_model(config, device, dtype)
    batches = ([torch.cat(parts) for parts in zip(*(batch(tokens, config, step, r, device) for r in data_ranks))]
               for step in range(STEPS))
    train(model, optimizer, batches)
    return model


def count_syncs(tokens, config, device, no_sync):
    """All-reduces of the whole gradient in STEPS updates of MICRO_BATCHES micro-batches each, and the gradient's bytes.

    With no_sync every backward pass but an update's last one keeps its gradients to itself.
    """
    model, optimizer = new_model(config, device)
    ddp = data_parallel(model, device)
    counted = {"syncs": 0, "bytes": 0}

    def count_and_reduce(group, bucket):
        counted["syncs"] += bucket.is_last()
        counted["bytes"] += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, count_and_reduce)
    x, y = batch(tokens, config, 0, dist.get_rank(), device)
    for _ in range(STEPS):
        for i, (xs, ys) in enumerate(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES))):
            quiet = no_sync and i < MICRO_BATCHES - 1
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                (ddp(xs, ys)[1] / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return counted


def max_difference(model, other):
    """The largest absolute difference between two models' parameters, of the same shapes."""
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters()))


def measure(corpus, device):
    """What rank 0 prints and the model it saves, None on the others; every rank takes part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = corpus.train
    config = GPTConfig(vocab_size=corpus.vocab_size, d_model=64, n_head=2, n_layer=2, seq_len=SEQ_LEN)
    model, loss = train_ddp(tokens, config, device, data_rank=rank)
    wasted, _ = train_ddp(tokens, config, device, data_rank=0)
    exact, _ = train_ddp(tokens, config, device, data_rank=rank, dtype=torch.float64)
    syncs = {name: count_syncs(tokens, config, device, no_sync) for name, no_sync in (("every", False), ("no_sync", True))}
    if rank:
        return None, None
    results = {
        "corpus": corpus.name, "world": world, "threads": torch.get_num_threads(), "steps": STEPS, "per_rank": PER_RANK,
        "loss": loss, "bits_per_byte": corpus.bits_per_byte(loss, "train"), "max_diff": max_difference(model, train_single(tokens, config, device, range(world))),
        "fp64_max_diff": max_difference(exact, train_single(tokens, config, device, range(world), torch.float64)),
        "same_data_max_diff": max_difference(wasted, train_single(tokens, config, device, [0])),
        "micro_batches": MICRO_BATCHES, "syncs": syncs["no_sync"]["syncs"], "syncs_without_no_sync": syncs["every"]["syncs"],
        "bytes": syncs["no_sync"]["bytes"], "bytes_without_no_sync": syncs["every"]["bytes"]}
    return results, model.state_dict()          # of the plain model: no "module." before its names


def print_results(r):
    world, steps = r["world"], r["steps"]
    print(f"{world} processes, {PER_RANK} sequences each a step: after {steps} steps the largest parameter difference from a "
          f"single process ({PER_RANK * world} a step) is below 1e-4: {r['max_diff'] < TOLERANCE} ({r['max_diff']:.1e})")
    print(f"the same in fp64: {r['fp64_max_diff']:.1e}; what is left is rounding: the sums are taken in another order, and Adam "
          f"turns a gradient of nearly zero into a step of full size, whose sign the rounding decides")
    bits = "" if r["bits_per_byte"] is None else f" ({r['bits_per_byte']:.3f} bits a byte)"
    print(f"loss of the last step, mean over ranks: {r['loss']:.3f}{bits}")
    print(f"the same data on every rank: the largest difference from a single process with {PER_RANK} a step is "
          f"{r['same_data_max_diff']:.1e}: {world} processes did the work of one, {(world - 1) / world:.0%} of it is wasted")
    print(f"{MICRO_BATCHES} micro-batches a step: {r['syncs_without_no_sync']} gradient syncs in {steps} steps "
          f"({r['bytes_without_no_sync'] / 1e6:.0f} MB a process); with no_sync until the last one: {r['syncs']} ({r['bytes'] / 1e6:.0f} MB)")
    print(f"rank 0 wrote {RUNS / 'ddp_model.pt'}")


def report(results, weights):
    """Print, and leave the numbers and the trained model in runs/."""
    with written_whole(RUNS / "ddp_model.pt") as part:
        torch.save(weights, part)
    print_results(results)
    save_results("ddp_train", results)


def become_launcher(argv, processes):
    """Turn this process into torchrun, which runs the script on this machine: signals and exit status are its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    threads = max(1, cpu_count() // processes)
    sys.stdout.flush()
    os.execve(sys.executable, [*launcher, __file__, *argv], {"OMP_NUM_THREADS": str(threads), **os.environ})


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    add_data_flag(parser)
    parser.add_argument("--processes", type=positive(int, 1024), default=DEFAULT_PROCESSES, metavar="N",
                        help=f"to start when run without torchrun (default: {DEFAULT_PROCESSES})")
    parser.add_argument("--timeout", type=positive(int), default=120, metavar="S",
                        help="seconds to wait for the other processes (default: 120)")
    args = parser.parse_args(argv)
    check_runs()
    if not launched():
        load_corpus(args.data, SEQ_LEN)     # what is wrong with it is said once, here
        become_launcher(argv, args.processes)
    with process_group(timeout=args.timeout) as device:
        corpus = first_on_rank_0(lambda: load_corpus(args.data, SEQ_LEN))
        if dist.get_rank() == 0:
            print(corpus)
            print(f"{machine(device)}, {dist.get_world_size()} processes over {dist.get_backend()}")
        results, weights = measure(corpus, device)
        on_rank_0(lambda: report(results, weights))


if __name__ == "__main__":
    main()
