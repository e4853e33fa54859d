"""budget.py's memory against every tensor counted, and the ways to compute the loss against each other.

    python tests/bench_memory.py                      about two minutes on two cores

The first table repeats test_budget.py's cases. The second is the loss of 4,096 positions, width 256 and GPT-2's padded
vocabulary, forward and backward, each way in a process of its own; its memory is what resident memory grew by.
"""
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch
import torch.nn.functional as F

import budget
from model import LOSS_ROWS, ChunkedLoss, GPTConfig
from test_budget import MEMORY_CASES, Live, train_two_steps

POSITIONS, WIDTH, VOCAB = 4096, 256, 50_304
CPU = torch.device("cpu")


def plain(x, w, y):
    return F.cross_entropy(F.linear(x, w).float(), y)


def compiled(x, w, y):
    return compiled.function(x, w, y)


def torchs(x, w, y):
    """torch's own chunked loss, where it has one."""
    options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=LOSS_ROWS["cpu"])
    return F.linear_cross_entropy(x, w, y, options=options)


def ours(x, w, y):
    return ChunkedLoss.apply(x, w, y, len(w), LOSS_ROWS["cpu"], True)


def measure(way, half):
    """(loss in nats, seconds, GB) of one way."""
    budget.keep_memory()
    compiled.function = torch.compile(plain)
    torch.manual_seed(0)
    x, w = torch.randn(POSITIONS, WIDTH, requires_grad=True), (0.02 * torch.randn(VOCAB, WIDTH)).requires_grad_()
    y, times, before = torch.randint(0, VOCAB, (POSITIONS,)), [], budget.peak_memory_gb(CPU)
    for _ in range(6):
        x.grad = w.grad = None
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = way(x, w, y)
        loss.backward()
        times.append(time.perf_counter() - start)
    return loss.item(), statistics.median(times[2:]), budget.peak_memory_gb(CPU) - before


def main():
    print(budget.machine())
    print("\nfamily     width  layers  context   vocabulary  micro-batch  optimizer           forecast   counted")
    for family, d_model, n_layer, seq_len, vocab_size, micro_batch, optimizer, loss_rows, accumulate, recompute in MEMORY_CASES:
        config = GPTConfig(vocab_size, n_layer, d_model // 64, d_model, seq_len, **family)
        with Live() as live:
            train_two_steps(config, micro_batch, optimizer, loss_rows or None, accumulate, recompute)
        forecast = sum(budget.training_memory(config, micro_batch, optimizer=optimizer, device_type="cpu", accumulate=accumulate,
                                              recompute=recompute, all_logits=not loss_rows).values())
        notes = ", ".join(note for note, said in (("accumulated", accumulate), ("recomputed", recompute), ("all logits", not loss_rows)) if said)
        print(f"{'report' if family else 'chapter':9s}  {d_model:5d}  {n_layer:6d}  {seq_len:7d}  {vocab_size:11,}  {micro_batch:11d}  {optimizer:9s}  "
              f"{forecast / 1e6:14.1f} MB  {live.peak / 1e6:6.1f} MB  {forecast / live.peak - 1:+.1%}  {notes}")
    print(f"\nthe loss of {POSITIONS:,} positions, width {WIDTH}, {VOCAB:,} tokens; all logits in fp32 are {4 * POSITIONS * VOCAB / 1e9:.2f} GB")
    for half in (False, True):
        for way in (plain, compiled, torchs, ours):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                try:
                    loss, seconds, gigabytes = pool.submit(measure, way, half).result()
                except AttributeError as error:
                    print(f"{way.__name__}: not in this torch ({error})")
                    continue
            print(f"{'bf16' if half else 'fp32'}  {way.__name__:9s}  {loss:.4f} nats  {seconds:6.2f} s  {gigabytes:5.2f} GB")


if __name__ == "__main__":
    main()
