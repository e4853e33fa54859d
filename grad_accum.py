"""Gradient accumulation: several small backward passes give the gradient of one large one.

    python grad_accum.py

It takes a few seconds. 32 sequences go through a small model whole and in 2, 4 and 8 parts; the chapter finds the
gradients equal to within 1e-6 of a largest 0.06. Beside it stand the ways to get it wrong (the division forgotten,
parts with unequal numbers of targets, an operation across samples), and what each split costs in time and saves in
the memory that the backward pass needs.
"""
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from budget import keep_memory, machine
from model import IGNORED, GPT, GPTConfig, Parser, UserError, check_runs, command, positive, save_results
from prepare_data import add_data_flag, load_corpus, sample_batch

SEQUENCES, PARTS = 32, (2, 4, 8)
TOLERANCE = 1e-6
UNEQUAL = ((7, 1), (7, 0))              # valid targets in two micro-batches


class AcrossSamples(nn.Module):
    """BatchNorm in place of the final RMSNorm: (B, T, C) normalised over B and T, so over the samples."""

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.BatchNorm1d(d_model)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).view_as(x)


def new_model(config, batch_norm=False):
    """The same model at every call."""
    torch.manual_seed(0)
    model = GPT(config)
    if batch_norm:
        model.norm = AcrossSamples(config.d_model)
    return model


def gradient(model):
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def accumulate(model, micro_batches, scales):
    """The gradient of the sum of scale * mean loss over micro-batches, each a pair (inputs, targets), computed one
    after another."""
    model.zero_grad(set_to_none=True)
    for (x, y), scale in zip(micro_batches, scales, strict=True):
        (model(x, y)[1] * scale).backward()
    return gradient(model)


def split(x, y, parts):
    """Inputs and targets (B, T) as a list of so many pairs of (B / parts, T)."""
    return list(zip(x.chunk(parts), y.chunk(parts)))


def saved_bytes(model, x, y):
    """Bytes that autograd keeps between forward and backward, each storage counted once, parameters not."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x, y)[1]
    total = sum(storages.values())      # counted while the graph is alive, so that no address was used twice
    del loss
    return total


def measure_parts(config, x, y, parts, repeats=5):
    """One row: the largest difference from the gradient of the whole batch, with and without the division by parts;
    the median seconds of a gradient; the bytes that one part keeps for its backward pass."""
    model = new_model(config)
    whole = accumulate(model, [(x, y)], [1.0])
    micro_batches, seconds = split(x, y, parts), []
    for _ in range(repeats):
        start = time.perf_counter()
        summed = accumulate(model, micro_batches, [1 / parts] * parts)
        seconds.append(time.perf_counter() - start)
    forgotten = accumulate(model, micro_batches, [1.0] * parts)
    return {"parts": parts, "max_diff": (summed - whole).abs().max().item(), "max_grad": whole.abs().max().item(),
            "forgotten_ratio": (forgotten.norm() / whole.norm()).item(),
            "seconds": sorted(seconds)[repeats // 2], "saved_bytes": saved_bytes(model, *micro_batches[0])}


def measure_unequal(config, x, y, valid):
    """Two micro-batches of one sequence with valid[0] and valid[1] targets each, the rest ignored.

    Against the gradient of both at once: the mean of the two means, whose loss is None where a part has no target to
    take a mean of, and the sum of losses over all valid targets divided by their number.
    """
    model, x, y = new_model(config), x[:2], y[:2].clone()
    for row, n in zip(y, valid):
        row[n:] = IGNORED
    whole = accumulate(model, [(x, y)], [1.0])
    means = accumulate(model, split(x, y, 2), [0.5, 0.5])
    with torch.no_grad():
        mean_loss = sum(model(xs, ys)[1].item() for xs, ys in split(x, y, 2)) / 2
    model.zero_grad(set_to_none=True)
    for xs, ys in split(x, y, 2):
        total = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten(), ignore_index=IGNORED, reduction="sum")
        (total / sum(valid)).backward()
    return {"valid": list(valid), "mean_of_means_loss": mean_loss if math.isfinite(mean_loss) else None,
            "mean_of_means_diff": (means - whole).abs().max().item(),
            "sum_diff": (gradient(model) - whole).abs().max().item(), "max_grad": whole.abs().max().item()}


def measure_batch_norm(config, x, y, parts):
    """The difference that so many parts make to a model that normalises across the samples of a batch."""
    model = new_model(config, batch_norm=True)
    whole = accumulate(model, [(x, y)], [1.0])
    summed = accumulate(model, split(x, y, parts), [1 / parts] * parts)
    return {"parts": parts, "max_diff": (summed - whole).abs().max().item(), "max_grad": whole.abs().max().item()}


def print_parts(rows):
    print(f"\n{SEQUENCES} sequences at once and in parts, each part's loss divided by their number")
    print("parts   largest difference   below 1e-6   gradient maximum   undivided, the gradient is   ms a gradient   kept for backward")
    for r in rows:
        print(f"{r['parts']:5d}   {r['max_diff']:18.1e}   {str(r['max_diff'] < TOLERANCE):>10s}   {r['max_grad']:16.2f}   "
              f"{r['forgotten_ratio']:18.2f} times   {r['seconds'] * 1e3:13.1f}   {r['saved_bytes'] / 1e6:14.1f} MB")


def print_traps(unequal, batch_norm):
    print("\nparts with unequal numbers of targets: largest difference from the gradient of all targets at once")
    for r in unequal:
        note = "" if r["mean_of_means_loss"] is not None else "; a mean over no targets: its loss is nan"
        print(f"  {r['valid'][0]} and {r['valid'][1]} targets   mean of the two means {r['mean_of_means_diff']:.1e}   "
              f"sum over all, divided by {sum(r['valid'])}: {r['sum_diff']:.1e}   (gradient maximum {r['max_grad']:.2f}{note})")
    print(f"\nBatchNorm for the final norm, {batch_norm['parts']} parts: {batch_norm['max_diff']:.1e} (gradient maximum "
          f"{batch_norm['max_grad']:.2f}): each part is normalised by its own mean and variance, another function")


@command
def main(argv=None):
    parser = Parser(description=__doc__)
    add_data_flag(parser)
    parser.add_argument("--parts", type=positive(int), nargs="+", default=PARTS, metavar="K",
                        help=f"numbers of parts to split {SEQUENCES} sequences into (default: 2 4 8)")
    args = parser.parse_args(argv)
    check_runs()
    for parts in args.parts:
        if SEQUENCES % parts:
            raise UserError(f"--parts {parts} does not divide the {SEQUENCES} sequences; take a power of 2 up to {SEQUENCES}")
    keep_memory()
    corpus = load_corpus(args.data, seq_len=64)
    print(corpus)
    print(machine())
    config = GPTConfig(vocab_size=corpus.vocab_size, d_model=64, n_head=2, n_layer=2, seq_len=64)
    x, y = sample_batch(corpus.train, config.seq_len, SEQUENCES, torch.Generator().manual_seed(0))
    rows = [measure_parts(config, x, y, parts) for parts in (1, *args.parts)]
    unequal = [measure_unequal(config, x, y, valid) for valid in UNEQUAL]
    batch_norm = measure_batch_norm(config, x, y, max(args.parts))
    print_parts(rows)
    print_traps(unequal, batch_norm)
    save_results("grad_accum", {"corpus": corpus.name, "rows": rows[1:], "whole": rows[0],
                                "unequal": unequal, "batch_norm": batch_norm})


if __name__ == "__main__":
    main()
