"""scaling.py's loop against the same loop written plainly, at the chapter's four sizes.

    python tests/bench_scaling.py [STEPS]             needs a tokens.pt here; 40 steps take about 4 minutes on two cores

Both train the same models on the same batches and evaluate them four times, in two processes, of which only ours keeps
memory between steps. They take turns, plain, ours, ours, plain, so that a machine whose speed drifts treats them alike.
"""
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch

from budget import keep_memory, machine, worker_pool
from prepare_data import load_corpus
from scaling import EVALUATIONS, LEARNING_RATE, SIZES, evaluate, train, validation_batches
from test_scaling import plain_loop


def prepare(keep):
    if keep:
        keep_memory()
    plain.corpus = load_corpus()
    plain.batches = validation_batches(plain.corpus, torch.device("cpu"))


def plain(size, steps):
    """(seconds, the last validation loss) of a plain run."""
    start = time.perf_counter()
    model, _ = plain_loop(plain.corpus, *size, steps, LEARNING_RATE)
    loss = [evaluate(model, plain.batches) for _ in range(EVALUATIONS)][-1]
    return time.perf_counter() - start, loss


def ours(size, steps):
    start = time.perf_counter()
    loss = train(*size, plain.corpus, plain.batches, steps)["val_loss"][-1]
    return time.perf_counter() - start, loss


def main(steps):
    total = {plain: 0.0, ours: 0.0}
    with worker_pool(prepare, False, workers=1) as plainly, worker_pool(prepare, True, workers=1) as kept:
        print(machine())
        for size in SIZES:
            spent, losses = {plain: 0.0, ours: 0.0}, {}
            for run in (plain, ours, ours, plain):
                seconds, losses[run] = (plainly if run is plain else kept).submit(run, size, steps).result()
                spent[run] += seconds / 2
                total[run] += seconds / 2
            print(f"d {size[0]:3d}, {size[1]} layers, {steps} steps: plain {spent[plain]:6.1f} s, scaling.py {spent[ours]:6.1f} s, "
                  f"{spent[plain] / spent[ours]:.2f} times faster; losses differ by {abs(losses[plain] - losses[ours]):.0e}", flush=True)
    print(f"all four: {total[plain] / total[ours]:.2f} times faster")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
