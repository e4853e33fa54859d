"""scaling.py's table of sizes against the same table by a loop written plainly, at the chapter's four sizes.

    python tests/bench_scaling.py [STEPS]             needs a tokens.pt here; 40 steps take about 4 minutes on two cores

Both train the same models on the same batches and evaluate them four times. The plain loop trains one after another in a
process with all threads, and keeps no memory between steps; ours as scaling.py does. They take turns, plain, ours, ours,
plain, so that a machine whose speed drifts treats them alike.
"""
import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch

from budget import machine, worker_pool
from prepare_data import TOKENS, load_corpus
from scaling import EVALUATIONS, LEARNING_RATE, SIZES, chapter_rows, evaluate, validation_batches
from test_scaling import plain_loop

CPU = torch.device("cpu")


def load():
    plain.corpus = load_corpus()
    plain.batches = validation_batches(plain.corpus, CPU)


def plain(size, steps):
    """(seconds, the last validation loss) of a plain run."""
    start = time.perf_counter()
    model, _ = plain_loop(plain.corpus, *size, steps, LEARNING_RATE)
    loss = [evaluate(model, plain.batches) for _ in range(EVALUATIONS)][-1]
    return time.perf_counter() - start, loss


def plain_table(steps):
    """(seconds, {size: the last validation loss})."""
    with worker_pool(load, workers=1) as process:
        found = {size: process.submit(plain, size, steps).result() for size in SIZES}
    print("plain:      " + ", ".join(f"d {d} {found[d, n][0]:.1f} s" for d, n in SIZES), flush=True)
    return sum(seconds for seconds, _ in found.values()), {size: loss for size, (_, loss) in found.items()}


def our_table(steps):
    """The same; the seconds hold what starts the processes, too."""
    start = time.perf_counter()
    args = argparse.Namespace(data=TOKENS, device=CPU, steps=steps)
    rows = list(chapter_rows(args, load_corpus(), [(*size, LEARNING_RATE) for size in SIZES]))
    seconds = time.perf_counter() - start
    print(f"scaling.py: {seconds:.1f} s", flush=True)
    return seconds, {(row["d_model"], row["n_layer"]): row["val_loss"][-1] for row in rows}


def main(steps):
    print(machine())
    turns = [(table is plain_table, *table(steps)) for table in (plain_table, our_table, our_table, plain_table)]
    plainly, ours = (sum(seconds for is_plain, seconds, _ in turns if is_plain == wanted) for wanted in (True, False))
    apart = max(abs(turns[0][2][size] - turns[1][2][size]) for size in SIZES)
    print(f"all four, {steps} steps: {plainly / ours:.2f} times faster; losses differ by {apart:.0e} at most")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
