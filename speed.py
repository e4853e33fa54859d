"""Where a training step's time goes: tokens/s, achieved FLOP/s, and how much of the machine's peak that is.

    python speed.py
    python speed.py --profile                      also a timeline of the step, for Perfetto
    python speed.py --device cuda --d-model 768 --n-layer 12 --n-head 12 --seq-len 1024

It takes about two minutes on two cores. The chapter measures 9,136 tokens/s (106 GFLOP/s) on two cores, 22% more with
torch.compile, and a bf16 that is slower on a CPU without bf16 instructions. MFU, the model FLOPs utilization, is the
achieved FLOP/s over the peak: on a CPU the rate of large matrix products measured here, on a GPU its datasheet's.

The rows are a ladder: the chapter's plain step, each of its two changes alone, and then one lever after another, each on
top of those before it.
"""
import contextlib
import os
import statistics
import time
from dataclasses import dataclass

import torch

from budget import (TERA, compile_failure, datasheet_peak, device_name, keep_memory, machine, peak_memory_gb, pick_device, synchronize,
                    worker_pool)
from model import LOSS_ROWS, RUNS, GPT, Parser, add_model_flags, check_runs, command, config_from, outline, positive, save_results, written_whole
from prepare_data import add_data_flag, load_corpus, sample_batch

WARMUP_STEPS = 3                        # the first steps allocate, and compile
LEARNING_RATE = 1e-3
PEAK_SIZES = {"cpu": 2048, "cuda": 8192}        # of the square matrices whose product is the peak
PEAK_SECONDS, PEAK_PRODUCTS = 4.0, 40           # measure until one of these is spent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Row:
    """A way to make the chapter's training step; by default as plainly as the chapter does."""

    name: str
    precision: str = "fp32"             # "bf16": autocast over fp32 weights
    compile: bool = False
    keep: bool = False                  # malloc keeps freed memory for the next step
    fused: bool = False                 # AdamW in one pass over memory
    chunked: bool = False               # the loss without all logits at once


ROWS = (Row("plain"), Row("bf16 alone", "bf16"), Row("compile alone", compile=True),
        Row("memory kept", keep=True), Row("+ fused AdamW", keep=True, fused=True),
        Row("+ chunked loss", keep=True, fused=True, chunked=True), Row("+ compile", compile=True, keep=True, fused=True, chunked=True),
        Row("+ bf16", "bf16", compile=True, keep=True, fused=True, chunked=True))


def measured_peak(device, precision):
    """FLOP/s of the fastest of several products of two large square matrices: what this machine can do at best."""
    n = PEAK_SIZES[device.type]
    a, b = (torch.randn(n, n, device=device).to(DTYPES[precision]) for _ in range(2))
    best, spent = float("inf"), 0.0
    for _ in range(PEAK_PRODUCTS):
        start = time.perf_counter()
        a @ b
        synchronize(device)
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > PEAK_SECONDS:
            break
    return 2 * n ** 3 / best


def training_step(model, optimizer, x, y, precision, mark=lambda: None):
    """One step; returns its loss, a tensor. mark() is called before and after each of its phases."""
    mark()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, y)[1]
    mark()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    mark()
    optimizer.step()
    mark()
    return loss


def new_step(config, x, y, row):
    """A function that makes one training step of a new model as a row has it, and returns its loss."""
    torch.manual_seed(0)
    model = GPT(config).to(x.device)
    model.loss_rows = LOSS_ROWS[x.device.type] if row.chunked else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=row.fused or None)
    if row.compile:
        model.compile()
    return lambda mark=lambda: None: training_step(model, optimizer, x, y, row.precision, mark)


def warm_up(step):
    """The steps that are not counted; returns the last one's loss in nats a token."""
    for _ in range(WARMUP_STEPS):
        loss = step()
    return loss.item()


class Bench:
    """A row in the process of its own that measures it: malloc's settings and the most memory held are a process's."""

    def __init__(self, config, x, y, row):
        self.config, self.batch, self.row, self.device = config, (x.cpu(), y.cpu()), row, x.device

    def start(self):
        """Build and warm up, in that process; returns the loss after it, and the memory that it took in GB."""
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")     # no processes beside the ones that are measured
        if self.row.keep:
            keep_memory()
        before = peak_memory_gb(self.device)
        Bench.step = staticmethod(new_step(self.config, *(t.to(self.device) for t in self.batch), self.row))
        loss = warm_up(Bench.step)
        Bench.device = self.device
        return loss, peak_memory_gb(self.device) - before

    @staticmethod
    def seconds():
        """One step's."""
        synchronize(Bench.device)
        start = time.perf_counter()
        Bench.step()
        synchronize(Bench.device)
        return time.perf_counter() - start

    @staticmethod
    def phases():
        """The seconds of one step's phases. On a GPU each is waited for, which a step that is timed whole is not."""
        marks = []

        def mark():
            synchronize(Bench.device)
            marks.append(time.perf_counter())

        Bench.step(mark)
        return [end - start for start, end in zip(marks, marks[1:])]


def started(benches, pools):
    """Start the benches, by name, each in its pool: ({name: (loss, GB)}, {name: why it cannot be measured})."""
    warm, skipped = {}, {}
    for name, bench in benches.items():
        try:
            warm[name] = pools[name].submit(bench.start).result()
        except Exception as error:
            skipped[name] = compile_failure(error) if bench.row.compile else None
            if skipped[name] is None:
                raise
    return warm, skipped


def step_seconds(ask, names, count):
    """Median seconds of a step of each row, over count rounds, and of each of its phases, which come from rounds of their
    own: {name: (seconds, {phase: seconds})}. ask(name, "seconds") and ask(name, "phases") make a step of a row.

    Each round makes one step of every row, so that a machine whose speed drifts treats all rows alike.
    """
    whole, phases = ([{name: ask(name, what) for name in names} for _ in range(count)] for what in ("seconds", "phases"))
    return {name: (statistics.median(r[name] for r in whole),
                   {phase: statistics.median(r[name][i] for r in phases) for i, phase in enumerate(PHASES)}) for name in names}


def measure(config, x, y, rows, count):
    """Measure rows together: ({name: (seconds, phases)}, {name: (loss after warming up, GB)}, {name: why not})."""
    with contextlib.ExitStack() as stack:
        benches = {row.name: Bench(config, x, y, row) for row in rows}
        pools = {name: stack.enter_context(worker_pool(torch.set_num_threads, torch.get_num_threads(), workers=1)) for name in benches}
        warm, skipped = started(benches, pools)
        return step_seconds(lambda name, what: pools[name].submit(getattr(Bench, what)).result(), list(warm), count), warm, skipped


def new_row(name, seconds, phases, flops, tokens, peak, memory_gb, loss_differs):
    """A row of the table: flops and tokens are one step's, peak is in FLOP/s or None; loss_differs, in nats, is how far the
    row's loss is from the plain one's after the same steps."""
    return {"name": name, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "flops_per_s": flops / seconds,
            "mfu": flops / seconds / peak if peak else None, "memory_gb": memory_gb, "loss_differs": loss_differs,
            "phases_ms": {p: s * 1e3 for p, s in phases.items()}}


def why_bf16(peak, step_ratio):
    """One sentence on bf16's speed: peak holds the two measured here, step_ratio is fp32's step time over bf16's."""
    products = peak["bf16"] / peak["fp32"]
    if products < 1.2:
        reason = "so this device has no fast bf16 matrix instructions, and " + (
            "autocast only adds conversions" if step_ratio <= 1 else "what the step gains is from moving half the bytes")
    elif step_ratio > 1:
        reason = "and the step keeps what its conversions and the work that is no matrix product leave of that"
    else:
        reason = "but at this size its conversions cost more than the products save"
    return (f"bf16's step is {step_ratio:.2f} times as fast as fp32's here: large bf16 products run at {products:.2f} times the "
            f"fp32 rate, {reason}")


def write_trace(step, device):
    """Profile three steps; returns the trace's path and a table of the operations that took longest."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        synchronize(device)
    path = RUNS / "speed-trace.json"
    with written_whole(path) as part:
        profiler.export_chrome_trace(str(part))
    sort_by = f"self_{device.type}_time_total".replace("cuda", "device")
    return path, profiler.key_averages().table(sort_by=sort_by, row_limit=8, max_name_column_width=40)


# --- printing -------------------------------------------------------------------------------------------------------

def print_peaks(device, measured, sheet):
    print("peak, measured by large matrix products: " + ", ".join(f"{p} {v / 1e9:,.0f} GFLOP/s" for p, v in measured.items()))
    if device.type == "cuda":
        print("peak, datasheet, the MFU's denominator: " + ", ".join(
            f"{p} {v / TERA:g} TFLOP/s" if v else f"{p} n/a" for p, v in sheet.items()))


def print_row(row):
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.0%}"
    split = " / ".join(f"{row['phases_ms'][phase]:.0f}" for phase in PHASES)
    print(f"{row['name']:14s} {row['ms']:8.1f} ms  {row['tokens_per_s']:9,.0f}  {row['flops_per_s'] / 1e9:9.1f} GFLOP/s  {mfu:>5s}  "
          f"{row['memory_gb']:6.2f} GB  {row['loss_differs']:8.0e}   {split} ms")
    if row["mfu"] is not None and row["mfu"] > 1:
        print(f"  warning: {row['name']} above 100% of the peak: the peak is not this device's, or was measured while it was busy")


def print_best(rows):
    """What the levers buy together."""
    plain, by_name = rows[0], {row["name"]: row for row in rows}
    for precision in ("fp32", "bf16"):
        names = [row.name for row in ROWS if row.precision == precision and row.name in by_name]
        best = max((by_name[name] for name in names), key=lambda row: row["flops_per_s"])
        print(f"best in {precision}: {best['name']}, {plain['ms'] / best['ms']:.2f} times as fast as plain"
              + (f", {best['mfu']:.0%} of the {precision} peak" if best["mfu"] else ""))


def parse_args(argv):
    parser = Parser(description=__doc__)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument("--batch", type=positive(int), default=16, metavar="N", help="sequences a step (default: 16)")
    parser.add_argument("--steps", type=positive(int), default=10, metavar="N", help="steps counted for each row (default: 10)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out the rows that compile")
    parser.add_argument("--profile", action="store_true", help="write a timeline of the plain step to runs/speed-trace.json")
    add_data_flag(parser)
    add_model_flags(parser)
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    check_runs()
    device = pick_device(args.device)
    corpus = load_corpus(args.data, args.seq_len)
    config = config_from(args, vocab_size=corpus.vocab_size)
    print(corpus)
    print(machine(device))
    x, y = (t.to(device) for t in sample_batch(corpus.train, config.seq_len, args.batch, torch.Generator().manual_seed(0)))
    model = outline(config)
    flops, tokens = x.numel() * model.flops_per_token(), x.numel()
    print(f"model: {model.num_params():,} parameters, {flops / tokens / 1e6:.1f} MFLOP a token; {args.batch} x {config.seq_len} tokens a step")
    measured = {p: measured_peak(device, p) for p in DTYPES}
    sheet = {p: datasheet_peak(device, p) for p in DTYPES}
    peak = measured if device.type == "cpu" else sheet
    print_peaks(device, measured, sheet)
    print(f"\n{'':14s} {'a step':>11s}  {'tokens/s':>9s}  {'achieved':>17s}    MFU     memory  loss off   {' / '.join(PHASES)}")
    rows = [row for row in ROWS if args.compile or not row.compile]
    # On a CPU, whose speed drifts, all rows take turns; a GPU's memory is for one at a time.
    results, warm, skipped = {}, {}, {}
    for together in [rows] if device.type == "cpu" else [[row] for row in rows]:
        for found, new in zip((results, warm, skipped), measure(config, x, y, together, args.steps)):
            found.update(new)
    rows = [new_row(row.name, *results[row.name], flops, tokens, peak[row.precision], warm[row.name][1], abs(warm[row.name][0] - warm["plain"][0]))
            for row in rows if row.name in results]
    for row in rows:
        print_row(row)
    for name, reason in skipped.items():
        print(f"{name:14s} not measured: {reason}")
    print()
    print_best(rows)
    print(why_bf16(measured, rows[0]["ms"] / rows[1]["ms"]))
    save_results("speed", {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__,
                           "corpus": corpus.name, "peak": peak, "measured_peak": measured, "rows": rows, "skipped": skipped})
    if args.profile:
        path, table = write_trace(new_step(config, x, y, ROWS[0]), device)
        print(f"\n{table}\nwrote {path}: open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing")


if __name__ == "__main__":
    main()
