"""What a training run costs: its compute, time, memory, energy and price, before a GPU is rented.

    python budget.py                                          the chapter's three models on H100s
    python budget.py --params 1.3B --gpus 8 --gpu a100-80gb --price 2
    python budget.py --d-model 2048 --n-layer 24 --n-head 16 --seq-len 2048 --micro-batch 8 --gpus 8

It takes two seconds and trains nothing. The chapter finds 1.3 hours for a GPT-2 of 124M on one H100, 17.8 hours for
1.3B on eight, and for 7B on 64 GPUs model states of 112 GB, which no single one holds.

This is also the one place with hardware facts: the table of GPUs, and how a script here meets its machine.
"""
import contextlib
import ctypes
import gc
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")   # read once, at import: join_group says in one line what went wrong

import torch
import torch.distributed as dist

from model import GPT, GPTConfig, Parser, UserError, add_model_flags, command, count, positive, size_text

TERA, GIGA = 1e12, 1e9
SECONDS_PER_HOUR = 3600
RUNS = Path("runs")
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

CHAPTER_MFU = 0.4
TOKENS_PER_PARAM = 20                   # Hoffmann and others 2022, arXiv:2203.15556, as the chapter rounds it
STATE_BYTES = 16                        # a parameter: bf16 weight 2 and gradient 2; fp32 master weight, Adam's m and v, 12
ACTIVATION_BYTES = 34                   # a layer, token and unit of width, no attention scores kept: arXiv:2205.05198
LOGIT_BYTES = 2 + 4 + 4                 # a logit: bf16 from the matrix product, its fp32 copy for the loss, the gradient
GPT2_VOCAB = 50_304                     # GPT-2's 50,257 tokens, padded to a multiple of 128


# --- GPUs -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class GPU:
    """One device's datasheet: dense peaks in TFLOP/s (None where it has no such units), memory in GB, power in W.

    tf32 is the Tensor Core rate of fp32 matrix products with TF32 on, fp32 the rate without.
    """

    name: str                           # exactly as torch.cuda.get_device_name() gives it
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    memory_gb: float
    watts: float
    aliases: tuple = ()

    def peak(self, precision):
        """Dense peak in FLOP/s for "bf16", "fp16", "tf32" or "fp32"; None where the device has none."""
        tflops = getattr(self, precision)
        return tflops and tflops * TERA


# Dense figures: half of what a datasheet prints "with sparsity". GeForce and RTX cards: Tensor Core rate with fp32
# accumulation, which is what training uses.
GPUS = (
    # NVIDIA B200: HGX B200 datasheet, an eighth of the board (36 PFLOPS sparse bf16, 18 sparse TF32, 600 TFLOPS fp32)
    GPU("NVIDIA B200", 2250, 2250, 1125, 75, 180, 1000, ("b200",)),
    # NVIDIA H200 Tensor Core GPU datasheet: 1,979 sparse bf16, 989 sparse TF32; NVL column 1,671 and 835
    GPU("NVIDIA H200", 989, 989, 494.5, 67, 141, 700, ("h200", "h200-sxm")),
    GPU("NVIDIA H200 NVL", 835.5, 835.5, 417.5, 60, 141, 600, ("h200-nvl",)),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM column; the chapter's 989e12
    GPU("NVIDIA H100 80GB HBM3", 989, 989, 494.5, 67, 80, 700, ("h100", "h100-sxm")),
    # NVIDIA H100 PCIe product brief (1,513 and 756 sparse) and H100 NVL datasheet, one GPU (1,671 and 835 sparse)
    GPU("NVIDIA H100 PCIe", 756.5, 756.5, 378, 51, 80, 350, ("h100-pcie",)),
    GPU("NVIDIA H100 NVL", 835.5, 835.5, 417.5, 60, 94, 400, ("h100-nvl",)),
    # NVIDIA A100 Tensor Core GPU datasheet, all four of its columns; the chapter's 312e12
    GPU("NVIDIA A100-SXM4-80GB", 312, 312, 156, 19.5, 80, 400, ("a100", "a100-80gb", "a100-sxm-80gb")),
    GPU("NVIDIA A100-SXM4-40GB", 312, 312, 156, 19.5, 40, 400, ("a100-40gb", "a100-sxm-40gb")),
    GPU("NVIDIA A100 80GB PCIe", 312, 312, 156, 19.5, 80, 300, ("a100-pcie-80gb",)),
    GPU("NVIDIA A100-PCIE-40GB", 312, 312, 156, 19.5, 40, 250, ("a100-pcie-40gb",)),
    # NVIDIA RTX Blackwell PRO GPU architecture whitepaper, appendix: bf16 with fp32 accumulation, dense
    GPU("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 503.8, 251.9, 126, 96, 600, ("rtx-pro-6000",)),
    GPU("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 438.9, 219.5, 109.7, 96, 300, ("rtx-pro-6000-max-q",)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A
    GPU("NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.8, 104.8, 32, 575, ("rtx-5090", "5090")),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (RTX 4090), and Ada professional appendix (RTX 6000, L40S)
    GPU("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6, 24, 450, ("rtx-4090", "4090")),
    GPU("NVIDIA RTX 6000 Ada Generation", 364.2, 364.2, 182.1, 91.1, 48, 300, ("rtx-6000-ada",)),
    # NVIDIA L40S datasheet, before sparsity; NVIDIA L4 datasheet: 242 sparse bf16, 120 sparse TF32
    GPU("NVIDIA L40S", 362.05, 362.05, 183, 91.6, 48, 350, ("l40s",)),
    GPU("NVIDIA L4", 121, 121, 60, 30.3, 24, 72, ("l4",)),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, tables of RTX 3090 and RTX A6000
    GPU("NVIDIA GeForce RTX 3090", 71, 71, 35.6, 35.6, 24, 350, ("rtx-3090", "3090")),
    GPU("NVIDIA RTX A6000", 154.8, 154.8, 77.4, 38.7, 48, 300, ("rtx-a6000",)),
    # NVIDIA RTX A4000 (153.4 sparse), A40 and A10 datasheets
    GPU("NVIDIA RTX A4000", 76.7, 76.7, 38.3, 19.2, 16, 140, ("rtx-a4000",)),
    GPU("NVIDIA A40", 149.7, 149.7, 74.8, 37.4, 48, 300, ("a40",)),
    GPU("NVIDIA A10", 125, 125, 62.5, 31.2, 24, 150, ("a10",)),
    # NVIDIA V100 and T4 datasheets: Tensor Cores for fp16 alone
    GPU("Tesla V100-SXM2-32GB", None, 125, None, 15.7, 32, 300, ("v100", "v100-32gb")),
    GPU("Tesla T4", None, 65, None, 8.1, 16, 70, ("t4",)),
)


def find_gpu(name):
    """The GPU whose name or alias, letter case aside, is exactly this; None where the table has none."""
    wanted = name.lower()
    return next((gpu for gpu in GPUS if wanted in (gpu.name.lower(), *gpu.aliases)), None)


# --- the arithmetic of a run ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    """A training run to be paid for. Sizes are in GB (1e9 bytes) on each GPU; they need d_model and n_layer."""

    name: str
    n_params: float
    gpus: int = 1
    d_model: int | None = None
    n_layer: int | None = None
    seq_len: int = 1024
    micro_batch: int = 8
    n_tokens: float | None = None       # None: 20 a parameter
    vocab_size: int = GPT2_VOCAB

    @property
    def tokens(self):
        return TOKENS_PER_PARAM * self.n_params if self.n_tokens is None else self.n_tokens

    @property
    def flops(self):
        """6 N D: forward 2, backward 4 a parameter and token (Kaplan and others 2020, arXiv:2001.08361)."""
        return 6 * self.n_params * self.tokens

    def hours(self, peak, mfu=CHAPTER_MFU):
        """On GPUs of that peak in FLOP/s, of which the model's FLOPs use the share mfu."""
        return self.flops / (self.gpus * peak * mfu) / SECONDS_PER_HOUR

    def states(self, sharded=False):
        """Weights, gradients, master weights and Adam's moments; sharded over the GPUs with FSDP."""
        return STATE_BYTES * self.n_params / GIGA / (self.gpus if sharded else 1)

    @property
    def has_shape(self):
        return bool(self.d_model and self.n_layer)

    @property
    def activations(self):
        """The chapter's formula, 34 s b h bytes a layer: what backward needs, in bf16, nothing recomputed."""
        return ACTIVATION_BYTES * self.seq_len * self.micro_batch * self.d_model * self.n_layer / GIGA

    def left_out(self, sharded=False):
        """What that formula does not count, by name.

        The logits; the widest temporaries of one layer's backward pass (the bf16 gradients of the MLP's two tensors
        of width 4 d_model); and with several GPUs DDP's gradient buckets, a second copy of the bf16 gradients, or the
        two layers that FSDP holds whole at once, weights and gradients, while it gathers one ahead.
        """
        tokens = self.seq_len * self.micro_batch
        sizes = {"logits": LOGIT_BYTES * tokens * self.vocab_size,
                 "one layer's temporaries": 2 * 2 * 4 * tokens * self.d_model}
        if sharded and self.gpus > 1:
            sizes["two gathered layers"] = 2 * (2 + 2) * self.n_params / self.n_layer
        elif self.gpus > 1:
            sizes["gradient buckets"] = 2 * self.n_params
        return {what: size / GIGA for what, size in sizes.items()}

    def memory(self, sharded=False):
        """All of the above together."""
        return self.states(sharded) + self.activations + sum(self.left_out(sharded).values())

    def strategy(self, memory_gb):
        """The simplest that fits in memory_gb: "ddp", "fsdp", or None."""
        return "ddp" if self.memory() <= memory_gb else "fsdp" if self.memory(sharded=True) <= memory_gb else None


CHAPTER_RUNS = (
    Run("124M (GPT-2)", 124e6, gpus=1, d_model=768, n_layer=12, seq_len=1024, micro_batch=16),
    Run("1.3B", 1.3e9, gpus=8, d_model=2048, n_layer=24, seq_len=2048, micro_batch=8),
    Run("7B", 7e9, gpus=64, d_model=4096, n_layer=32, seq_len=4096, micro_batch=2),
)


# --- printing -------------------------------------------------------------------------------------------------------

def print_table(runs, peak, mfu):
    """The chapter's table, a line a run."""
    print(f"{'model':<14s}  {'data':>12s}  {'compute':>12s}  {'GPUs':>8s}  {f'time (MFU {mfu:.0%})':>14s}   memory per GPU")
    for r in runs:
        activations = f"{r.activations:5.1f} GB" if r.has_shape else "n/a (give --d-model and --n-layer)"
        print(f"{r.name:<14s}  {r.tokens / 1e9:6.1f}B token  {r.flops:7.1e} FLOP  {r.gpus:4d} GPU  {r.hours(peak, mfu):8.1f} hours   "
              f"states DDP {r.states():5.1f} GB / FSDP {r.states(sharded=True):5.2f} GB, activations {activations}")


def fit_text(run, gpu):
    """Whether the run fits on its GPUs, how, and what the activation formula leaves out."""
    if not run.has_shape:
        return f"model states {'fit' if run.states() <= gpu.memory_gb else 'do not fit'} one {gpu.name} of {gpu.memory_gb:g} GB"
    strategy = run.strategy(gpu.memory_gb)
    if strategy is None:
        advice = "does not fit: a smaller micro-batch, recomputation, or more GPUs and FSDP"
    elif strategy == "ddp":
        advice = "fits with DDP" if run.gpus > 1 else "fits"
    elif run.states() > gpu.memory_gb:
        advice = f"the model states alone exceed one GPU with DDP ({run.states():.1f} GB): it needs FSDP"
    else:
        advice = f"needs FSDP (with DDP {run.memory():.1f} GB)"
    sharded = strategy != "ddp" and run.gpus > 1
    beyond = ", ".join(f"{what} {size:.1f}" for what, size in run.left_out(sharded).items())
    return f"{run.memory(sharded):.1f} of {gpu.memory_gb:g} GB, {advice}; in it, beyond the activation formula: {beyond} GB"


def cost_text(run, hours, watts, price):
    """GPU-hours, kWh and, with a price, the cost."""
    gpu_hours = hours * run.gpus
    text = f"{gpu_hours:,.1f} GPU-hours, {gpu_hours * watts / 1000:,.1f} kWh at {watts:g} W a GPU"
    return text + (f", cost {gpu_hours * price:,.2f} at {price:g} a GPU-hour" if price else "")


# --- how a script meets its machine ---------------------------------------------------------------------------------

def pick_device(name):
    """The torch.device of a --device flag; UserError where this machine has none such."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if not device or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: no such device; these scripts run on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def synchronize(device):
    """Wait for a GPU to finish what was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_count():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device):
    """The device as its maker calls it: what find_gpu knows, or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(device=torch.device("cpu")):
    """One line: the device, the threads and the versions that a measurement was made with."""
    return (f"machine: {device_name(device)}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}, "
            f"Python {platform.python_version()}")


def peak_memory_gb(device):
    """The most memory this process has held: allocated on its GPU, or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIGA
    import resource                     # POSIX has it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIGA


def keep_memory():
    """Ask glibc to keep freed memory for the next step instead of returning it to the system; False elsewhere.

    A step allocates and frees the same large buffers (logits of 64 MB at the chapter's size). Each one that malloc
    maps anew is paid for once more in page faults: a quarter to a half of a small model's step.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4         # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):                        # musl, macOS, Windows
        return False
    # Some versions cap the threshold at 32 MB; there, map nothing at all.
    kept = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_MAX, 0)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


# --- several processes ----------------------------------------------------------------------------------------------

def join_group(device, timeout=600):
    """Join the process group that torchrun's variables describe, or be a group of one; returns this process's device:
    the one given, or with several processes on GPUs each its own.

    Raises UserError for incomplete variables, a taken port, too few GPUs, or others that do not come within timeout s.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return device
    missing = [name for name in RENDEZVOUS if not os.environ.get(name)]
    if missing:
        raise UserError(f"RANK is set but not {', '.join(missing)}; start with torchrun, which sets them all")
    world, where = os.environ["WORLD_SIZE"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
        wait = timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))
        # A restarted group must not read the addresses that the one before it left in the launcher's store.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    except (ValueError, RuntimeError) as error:
        if "address already in use" in str(error).lower():
            raise UserError(f"{where}: port in use; choose another MASTER_PORT, or torchrun --standalone, which finds a free one") from None
        raise UserError(f"{where}: no group of {world} processes within {timeout} s; are all of them started, with the same "
                        f"address and port? ({str(error).splitlines()[0]})") from None
    torch.set_num_threads(max(1, cpu_count() // local_world))       # torchrun sets OMP_NUM_THREADS=1 and wastes the rest
    if device.type == "cpu":
        return device
    if torch.cuda.device_count() < local_world:
        raise UserError(f"{local_world} processes for {torch.cuda.device_count()} GPUs; start one process a GPU")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def first_on_rank_0(make):
    """make() on rank 0, then on the others, who find what it left on disk; what rank 0 refuses, all refuse."""
    made, refusal = None, [None]
    if dist.get_rank() == 0:
        try:
            made = make()
        except UserError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise UserError(refusal[0])
    return made or make()


def leave_group():
    """Leave the process group, all ranks together.

    First drop what still holds it (DDP and its hooks refer to each other): a thread of its that outlives the
    interpreter and asks for its lock brings the process down ("terminate called without an active exception").
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


# --- files ----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def written_whole(path):
    """Yield a name beside path to write to; it becomes path when all went well, and is removed when not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as f:
            os.fsync(f.fileno())        # the rename must not reach the disk before the bytes do
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save_results(name, results):
    """Leave a script's numbers, a dict of plain values, in runs/<name>.json."""
    path = RUNS / f"{name}.json"
    with written_whole(path) as part:
        part.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


@contextlib.contextmanager
def plot(path, **labels):
    """Yield axes to draw on, labelled as axes.set takes it; the picture is written to path as PNG."""
    import matplotlib
    matplotlib.use("Agg")               # draws without a display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    try:
        axes.set(**labels)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        with written_whole(path) as part:
            figure.savefig(part, format="png", dpi=120)
    finally:
        plt.close(figure)


# --- the command ----------------------------------------------------------------------------------------------------

def parse_args(argv):
    parser = Parser(description=__doc__)
    parser.add_argument("--params", type=count, metavar="N", help="parameters, e.g. 124M or 1.3e9 (default: the chapter's three models)")
    add_model_flags(parser, default=None)
    parser.add_argument("--vocab-size", type=positive(int), metavar="N", help=f"tokens in the vocabulary (default: {GPT2_VOCAB})")
    parser.add_argument("--micro-batch", type=positive(int), metavar="N", help="sequences a GPU holds at once (default: 8)")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--tokens", type=count, metavar="N", help="training tokens, e.g. 6B")
    data.add_argument("--tokens-per-param", type=positive(float), metavar="X", help=f"(default: {TOKENS_PER_PARAM})")
    parser.add_argument("--gpus", type=positive(int), metavar="N", help="how many (default: 1)")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="exact device name or alias (default: h100)")
    parser.add_argument("--mfu", type=positive(float), default=CHAPTER_MFU, metavar="X", help="model FLOPs utilization, a share (default: 0.4)")
    parser.add_argument("--price", type=positive(float), metavar="X", help="of one GPU for one hour, in any currency")
    parser.add_argument("--watts", type=positive(float), metavar="X", help="of one GPU (default: its board power)")
    return parser.parse_args(argv)


def run_from(args):
    """The Run that the flags describe; its parameters are counted where --params does not give them."""
    if bool(args.d_model) != bool(args.n_layer):
        raise UserError("a model's size takes both --d-model and --n-layer")
    given = {name: getattr(args, name) for name in ("d_model", "n_layer", "seq_len", "micro_batch", "vocab_size", "gpus")
             if getattr(args, name) is not None}
    n_params = args.params
    if n_params is None:
        if not args.d_model:
            raise UserError("which model? give --params, or --d-model and --n-layer")
        shape = {name: given[name] for name in ("d_model", "n_layer") if name in given}
        config = GPTConfig(**shape, n_head=args.n_head or args.d_model // 2 or 1, vocab_size=args.vocab_size or GPT2_VOCAB)
        with torch.device("meta"):      # counted, not allocated
            n_params = GPT(config).num_params()
    n_tokens = args.tokens or (args.tokens_per_param and args.tokens_per_param * n_params)
    return Run(size_text(n_params), n_params, n_tokens=n_tokens, **given)


@command
def main(argv=None):
    args = parse_args(argv)
    if args.mfu > 1:
        raise UserError(f"--mfu {args.mfu:g} is above 1; it is a share of the peak")
    gpu = find_gpu(args.gpu)
    if gpu is None:
        raise UserError(f"--gpu {args.gpu}: not in the table, which knows {', '.join(g.aliases[0] for g in GPUS)} and exact device names")
    peak = gpu.peak("bf16") or gpu.peak("fp16")     # Tensor Cores before Ampere have fp16 alone
    about_a_model = ("params", "d_model", "n_layer", "n_head", "seq_len", "vocab_size", "micro_batch", "tokens", "tokens_per_param", "gpus")
    runs = [run_from(args)] if any(getattr(args, name) is not None for name in about_a_model) else CHAPTER_RUNS
    print(f"{gpu.name}: {peak / TERA:g} dense {'bf16' if gpu.bf16 else 'fp16'} TFLOP/s, {gpu.memory_gb:g} GB, {gpu.watts:g} W")
    print_table(runs, peak, args.mfu)
    for run in runs:
        print(f"{run.name}: {fit_text(run, gpu)}")
        print(f"{run.name}: {cost_text(run, run.hours(peak, args.mfu), args.watts or gpu.watts, args.price)}")
    save_results("budget", {"gpu": gpu.name, "peak": peak, "mfu": args.mfu, "rows": [
        {"name": r.name, "params": r.n_params, "tokens": r.tokens, "flops": r.flops, "gpus": r.gpus, "hours": r.hours(peak, args.mfu),
         "states_ddp_gb": r.states(), "states_fsdp_gb": r.states(sharded=True),
         "activations_gb": r.activations if r.has_shape else None, "left_out_gb": r.left_out() if r.has_shape else None,
         "strategy": r.strategy(gpu.memory_gb) if r.has_shape else None} for r in runs]})


if __name__ == "__main__":
    main()
