"""How much better a larger model gets, measured on models small enough for a CPU.

    python scaling.py             four sizes, the same data and 400 steps each: the chapter's table (6 minutes on 2 cores)
    python scaling.py lr          exercise 1: three learning rates at two sizes (10 minutes)

The chapter finds validation losses of 6.49, 6.34, 6.26 and 6.22 nats for 0.62M, 1.12M, 1.80M and 3.34M parameters:
larger is better, by less each time, and the training loss runs ahead, for 410,000 tokens are too few for any of them.
Tables go to standard output, numbers to runs/scaling-<experiment>.json, curves to runs/scaling-<experiment>.png.
"""
import math
import sys

import torch
from tqdm import tqdm

from budget import keep_memory, machine, pick_device
from model import RUNS, GPT, GPTConfig, Parser, UserError, check_runs, command, plot, positive, save_results
from prepare_data import add_data_flag, load_corpus, sample_batch
from train_gpu import learning_rate, set_learning_rate

SIZES = ((64, 2), (96, 3), (128, 4), (192, 4))          # d_model, n_layer
HEAD_DIM, SEQ_LEN = 32, 128
STEPS, BATCH, LEARNING_RATE, WARMUP, CLIP = 400, 16, 3e-3, 50, 1.0
EVALUATIONS = 4                         # at each quarter of the run
VAL_BATCHES, VAL_BATCH, VAL_SEED = 8, 32, 123
LR_SIZES, LR_SWEEP = ((128, 4), (192, 4)), (1e-3, 3e-3, 1e-2)


def validation_batches(corpus, device):
    """The same windows of the validation part for every model."""
    generator = torch.Generator().manual_seed(VAL_SEED)
    return [tuple(t.to(device) for t in sample_batch(corpus.val, SEQ_LEN, VAL_BATCH, generator)) for _ in range(VAL_BATCHES)]


@torch.no_grad()
def evaluate(model, batches):
    """Mean loss over batches in nats a token."""
    model.eval()
    loss = sum(model(x, y)[1].item() for x, y in batches) / len(batches)
    model.train()
    return loss


def train(d_model, n_layer, corpus, batches, steps=STEPS, peak_lr=LEARNING_RATE, device=torch.device("cpu"), label=""):
    """Train one model as the chapter does; returns a row of its table: sizes, the validation loss at each quarter of
    the run and the last step's training loss, in nats."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=corpus.vocab_size, d_model=d_model, n_layer=n_layer, n_head=d_model // HEAD_DIM, seq_len=SEQ_LEN)
    model = GPT(config).to(device)
    optimizer = model.adamw(peak_lr)
    generator, val_loss = torch.Generator().manual_seed(0), []
    evaluate_at = {steps * quarter // EVALUATIONS for quarter in range(1, EVALUATIONS + 1)}
    bar = tqdm(range(steps), desc=label or f"d {d_model}, {n_layer} layers", disable=None, leave=False)
    for step in bar:
        set_learning_rate([optimizer], learning_rate(step, steps, 1.0, WARMUP))
        x, y = (t.to(device) for t in sample_batch(corpus.train, SEQ_LEN, BATCH, generator))
        loss = model(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step + 1 in evaluate_at:
            val_loss.append(evaluate(model, batches))
            bar.set_postfix(val=f"{val_loss[-1]:.2f}")
    return {"d_model": d_model, "n_layer": n_layer, "params": model.num_params(), "steps": sorted(evaluate_at),
            "val_loss": val_loss, "train_loss": loss.item(), "lr": peak_lr}


def bits_per_byte(corpus, nats):
    value = corpus.bits_per_byte(nats)
    return "n/a" if value is None else f"{value:.3f}"


def plot_curves(rows, title, path):
    """Validation loss against steps, one line a row."""
    several_rates = len({row["lr"] for row in rows}) > 1
    with plot(path, title, xlabel="steps", ylabel="validation loss (nats a token)") as axes:
        for row in rows:
            axes.plot(row["steps"], row["val_loss"], "o-", label=f"{row['params'] / 1e6:.2f}M" + f", lr {row['lr']:g}" * several_rates)


# --- the experiments ------------------------------------------------------------------------------------------------

def sizes(corpus, args):
    """The chapter's table: four sizes on the same data for the same number of steps."""
    batches = validation_batches(corpus, args.device)
    rows = []
    at = [args.steps * quarter // EVALUATIONS for quarter in range(1, EVALUATIONS + 1)]
    print(f"{'d':>3s}  layers   params   validation loss at step " + "  ".join(f"{step:5d}" for step in at)
          + "   last training loss   bits per byte")
    for d_model, n_layer in SIZES:
        row = train(d_model, n_layer, corpus, batches, args.steps, device=args.device)
        rows.append(row)
        print(f"{d_model:3d}  {n_layer:6d}   {row['params'] / 1e6:5.2f}M   {'':23s} " + "  ".join(f"{v:5.2f}" for v in row["val_loss"])
              + f"   {row['train_loss']:18.2f}   {bits_per_byte(corpus, row['val_loss'][-1]):>13s}", flush=True)
    first, last = rows[0], rows[-1]
    print(f"{last['params'] / first['params']:.1f} times the parameters, {first['val_loss'][-1] - last['val_loss'][-1]:.2f} nats less; the "
          f"training loss is {first['val_loss'][-1] - first['train_loss']:.2f} below the validation loss at the smallest size, "
          f"{last['val_loss'][-1] - last['train_loss']:.2f} at the largest")
    return rows


def lr(corpus, args):
    """Exercise 1: the final validation loss for each learning rate at two sizes."""
    batches = validation_batches(corpus, args.device)
    rows, best = [], []
    print("params   " + "  ".join(f"{f'lr {rate:g}':>9s}" for rate in args.rates) + "   best")
    for d_model, n_layer in LR_SIZES:
        swept = [train(d_model, n_layer, corpus, batches, args.steps, rate, args.device, f"d {d_model}, lr {rate:g}") for rate in args.rates]
        losses = [row["val_loss"][-1] for row in swept]
        winner = min((i for i, loss in enumerate(losses) if math.isfinite(loss)), key=losses.__getitem__, default=None)
        verdict = "none: no loss is finite" if winner is None else f"{args.rates[winner]:g}"
        if winner in (0, len(losses) - 1) and len(losses) > 1:
            verdict += ", at the sweep's edge: the best may lie beyond it"
        print(f"{swept[0]['params'] / 1e6:5.2f}M   "
              + "  ".join(f"{f'{v:.3f}' + '*' * (i == winner):>9s}" for i, v in enumerate(losses)) + f"   {verdict}", flush=True)
        rows += swept
        best.append(winner)
    same = len(set(best)) == 1 and None not in best
    print("the best learning rate is " + ("the same at both sizes" if same else "not the same at both sizes"))
    return rows


def parse_args(argv):
    """The experiment's flags; without an experiment's name, sizes."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["sizes", *argv]
    parser = Parser(description=__doc__)
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    for run, text in ((sizes, "four sizes, the chapter's table (the default)"), (lr, "exercise 1: learning rates at two sizes")):
        sub = experiments.add_parser(run.__name__, help=text, description=run.__doc__)
        sub.set_defaults(run=run)
        add_data_flag(sub)
        sub.add_argument("--steps", type=positive(int), default=STEPS, metavar="N", help=f"for each model (default: {STEPS})")
        sub.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
        if run is lr:
            sub.add_argument("--rates", type=positive(float), nargs="+", default=LR_SWEEP, metavar="LR",
                             help="learning rates to try (default: 0.001 0.003 0.01)")
    args = parser.parse_args(argv)
    if args.steps < EVALUATIONS:
        raise UserError(f"--steps {args.steps}: the loss is measured {EVALUATIONS} times, so take {EVALUATIONS} or more")
    args.device = pick_device(args.device)
    args.rates = sorted(args.rates) if args.run is lr else [LEARNING_RATE]
    return args


@command
def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    check_runs()
    keep_memory()
    corpus = load_corpus(args.data, SEQ_LEN)
    print(corpus)
    print(machine(args.device))
    rows = args.run(corpus, args)
    save_results(f"scaling-{args.experiment}", {"corpus": corpus.name, "steps": args.steps, "rows": rows})
    curves = RUNS / f"scaling-{args.experiment}.png"
    plot_curves(rows, corpus.name, curves)
    print(f"curves: {curves}")


if __name__ == "__main__":
    main()
