"""Where a training step's time goes: tokens/s, achieved FLOP/s, and how much of the machine's peak that is.

    python speed.py
    python speed.py --profile                      also a timeline of the step, for Perfetto
    python speed.py --device cuda --d-model 768 --n-layer 12 --n-head 12 --seq-len 1024

It takes about a minute on two cores. The chapter measures 9,136 tokens/s (106 GFLOP/s) on two cores, 22% more with
torch.compile, and a bf16 that is slower on a CPU without bf16 instructions. MFU, the model FLOPs utilization, is the
achieved FLOP/s over the peak: on a CPU the rate of large matrix products measured here, on a GPU its datasheet's.
"""
import statistics
import time

import torch

from budget import TERA, compile_failure, datasheet_peak, device_name, machine, pick_device, synchronize
from model import RUNS, GPT, Parser, add_model_flags, check_runs, command, config_from, positive, save_results, written_whole
from prepare_data import add_data_flag, load_corpus, sample_batch

WARMUP_STEPS = 3                        # the first steps allocate, and compile
LEARNING_RATE = 1e-3
PEAK_SIZES = {"cpu": 2048, "cuda": 8192}        # of the square matrices whose product is the peak
PEAK_SECONDS, PEAK_PRODUCTS = 4.0, 40           # measure until one of these is spent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PHASES = ("forward", "backward", "optimizer")
ROWS = (("fp32", "fp32", False), ("bf16 autocast", "bf16", False), ("fp32 + torch.compile", "fp32", True))


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
    """One step; mark() is called before and after each of its phases."""
    mark()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, y)[1]
    mark()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    mark()
    optimizer.step()
    mark()


def new_step(config, x, y, precision, compiled):
    """A function that makes one training step of a new model, optionally compiled: the chapter's plain step, with
    torch's default AdamW and malloc."""
    torch.manual_seed(0)
    model = GPT(config).to(x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    forward = torch.compile(model) if compiled else model
    return lambda mark=lambda: None: training_step(forward, optimizer, x, y, precision, mark)


def warm_up(step):
    """The steps that are not counted."""
    for _ in range(WARMUP_STEPS):
        step()


def step_seconds(steps, device, count):
    """Median seconds of each of steps, functions by name, over count rounds, and of each of its phases.

    Each round makes one step of every row, so that a machine whose speed drifts treats all rows alike. The phases come
    from rounds of their own: on a GPU each phase is waited for, which a step that is timed whole is not.
    """
    whole = {name: [] for name in steps}
    phases = {name: {phase: [] for phase in PHASES} for name in steps}
    marks = []

    def mark():
        synchronize(device)
        marks.append(time.perf_counter())

    for _ in range(count):
        for name, step in steps.items():
            marks.clear()
            mark()
            step()
            mark()
            whole[name].append(marks[1] - marks[0])
    for _ in range(count):
        for name, step in steps.items():
            marks.clear()
            step(mark)
            for phase, start, end in zip(PHASES, marks, marks[1:]):
                phases[name][phase].append(end - start)
    return {name: (statistics.median(whole[name]), {p: statistics.median(t) for p, t in phases[name].items()}) for name in steps}


def new_row(name, seconds, phases, flops, tokens, peak):
    """A row of the table: flops and tokens are one step's, peak is in FLOP/s or None."""
    return {"name": name, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "flops_per_s": flops / seconds,
            "mfu": flops / seconds / peak if peak else None, "phases_ms": {p: s * 1e3 for p, s in phases.items()}}


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
    print(f"{row['name']:21s} {row['ms']:8.1f} ms  {row['tokens_per_s']:9,.0f}  {row['flops_per_s'] / 1e9:9.1f} GFLOP/s  {mfu:>5s}   {split} ms")
    if row["mfu"] is not None and row["mfu"] > 1:
        print(f"  warning: {row['name']} above 100% of the peak: the peak is not this device's, or was measured while it was busy")


def parse_args(argv):
    parser = Parser(description=__doc__)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument("--batch", type=positive(int), default=16, metavar="N", help="sequences a step (default: 16)")
    parser.add_argument("--steps", type=positive(int), default=10, metavar="N", help="steps counted for each row (default: 10)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out the row that compiles")
    parser.add_argument("--profile", action="store_true", help="write a timeline of the fp32 step to runs/speed-trace.json")
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
    with torch.device("meta"):
        model = GPT(config)
    flops, tokens = x.numel() * model.flops_per_token(), x.numel()
    print(f"model: {model.num_params():,} parameters, {flops / tokens / 1e6:.1f} MFLOP a token; {args.batch} x {config.seq_len} tokens a step")
    measured = {p: measured_peak(device, p) for p in DTYPES}
    sheet = {p: datasheet_peak(device, p) for p in DTYPES}
    peak = measured if device.type == "cpu" else sheet
    print_peaks(device, measured, sheet)
    print(f"\n{'':21s} {'a step':>11s}  {'tokens/s':>9s}  {'achieved':>17s}    MFU   {' / '.join(PHASES)}")
    steps, precisions, skipped = {}, {}, {}
    for name, precision, compiled in ROWS[:None if args.compile else -1]:
        try:
            step = new_step(config, x, y, precision, compiled)
            warm_up(step)
        except Exception as error:
            skipped[name] = compile_failure(error) if compiled else None
            if skipped[name] is None:
                raise
            continue
        steps[name], precisions[name] = step, precision
    rows = [new_row(name, seconds, phases, flops, tokens, peak[precisions[name]])
            for name, (seconds, phases) in step_seconds(steps, device, args.steps).items()]
    for row in rows:
        print_row(row)
    for name, reason in skipped.items():
        print(f"{name:21s} not measured: {reason}")
    print(f"\n{why_bf16(measured, rows[0]['ms'] / rows[1]['ms'])}")
    save_results("speed", {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__,
                           "corpus": corpus.name, "peak": peak, "measured_peak": measured, "rows": rows, "skipped": skipped})
    if args.profile:
        path, table = write_trace(new_step(config, x, y, "fp32", compiled=False), device)
        print(f"\n{table}\nwrote {path}: open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing")


if __name__ == "__main__":
    main()
