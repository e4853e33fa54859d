"""How fast text becomes shards: on one core, on all, and tiktoken's own batch encoding, in turn.

    python tests/bench_prepare_data.py [MEGABYTES]

It takes a minute on 50 MB of Python's own sources, and needs GPT-2's vocabulary (or a network to fetch it).
"""
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from budget import cpu_count, machine
from prepare_data import stdlib_parts, tiktoken_encoding, write_shards

ROUNDS = 3


def corpus(megabytes):
    """A list of so many MB of documents of some thousand characters."""
    text, documents, size = "".join(stdlib_parts()[2]), [], 0
    while size < megabytes * 1e6:
        start = 7919 * len(documents) % (len(text) - 9000)
        documents.append(text[start:start + 1000 + 613 * len(documents) % 5000])
        size += len(documents[-1].encode())
    return documents, size


def shards_seconds(file, out):
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        write_shards([file], "gpt2", out)
    return time.perf_counter() - start


def main():
    if sys.argv[1:2] == ["--shards"]:               # this process alone, on the cores that it was given
        tiktoken_encoding("gpt2")
        print(shards_seconds(Path(sys.argv[2]), Path(sys.argv[3])))
        return
    documents, size = corpus(float(sys.argv[1]) if len(sys.argv) > 1 else 50)
    encoding, cores, seconds = tiktoken_encoding("gpt2"), sorted(os.sched_getaffinity(0)), {"one core": [], "all": [], "tiktoken": []}
    print(f"{machine()}, {len(cores)} cores, {size / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "a.jsonl")
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        for _ in range(ROUNDS):
            for name, allowed in (("one core", cores[:1]), ("all", cores)):
                done = subprocess.run([sys.executable, __file__, "--shards", file, Path(directory, "out")], capture_output=True, text=True, check=True,
                                      preexec_fn=lambda: os.sched_setaffinity(0, allowed))
                seconds[name].append(float(done.stdout))
            start = time.perf_counter()
            encoding.encode_ordinary_batch(documents, num_threads=cpu_count())
            seconds["tiktoken"].append(time.perf_counter() - start)
            print("  ".join(f"{name} {size / 1e6 / times[-1]:.1f} MB/s" for name, times in seconds.items()), flush=True)
    one, every, theirs = (statistics.median(seconds[name]) for name in ("one core", "all", "tiktoken"))
    print(f"median: {one / every:.2f} times one core, {theirs / every:.2f} times tiktoken's encode_ordinary_batch")


if __name__ == "__main__":
    main()
