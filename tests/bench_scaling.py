"""scaling.py's loop against the same loop written plainly, at the chapter's four sizes.

    python tests/bench_scaling.py [STEPS]             needs a tokens.pt here; 100 steps take about 4 minutes on two cores

Both train the same models on the same batches and evaluate them four times, as a run of 400 steps does; the plain loop
runs first, before memory is kept between steps.
"""
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch

from budget import keep_memory, machine
from prepare_data import load_corpus
from scaling import LEARNING_RATE, SIZES, evaluate, train, validation_batches
from test_scaling import plain_loop


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(steps):
    corpus = load_corpus()
    batches = validation_batches(corpus, torch.device("cpu"))

    def plain(size):
        model, _ = plain_loop(corpus, *size, steps, LEARNING_RATE)
        for _ in range(4):
            evaluate(model, batches)

    plain_seconds = [seconds(lambda: plain(size)) for size in SIZES]
    keep_memory()
    ours_seconds = [seconds(lambda: train(*size, corpus, batches, steps)) for size in SIZES]
    print(machine())
    for (d_model, n_layer), before, after in zip(SIZES, plain_seconds, ours_seconds):
        print(f"d {d_model:3d}, {n_layer} layers, {steps} steps: plain {before:6.1f} s, scaling.py {after:6.1f} s, {before / after:.2f} times faster")
    print(f"all four: {sum(plain_seconds) / sum(ours_seconds):.2f} times faster")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
