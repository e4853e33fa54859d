"""How much better a larger model gets, and how far ahead that can be told, on models small enough for a CPU.

    python scaling.py                    the chapter's table: four sizes, the same data, 400 steps each (6 minutes on 2 cores)
    python scaling.py lr                 exercise 1: three learning rates at two sizes (10 minutes)
    python scaling.py isoflop            the report's sweep: the best size at each of three budgets (7 minutes)
    python scaling.py fit FILE.csv       L(N, D) = E + A/N^alpha + B/D^beta to any table of runs (seconds)
    python scaling.py forecast --run     what the sweep says of 20 times its compute, then that run (8 minutes)
    python scaling.py duration           one size trained for longer and longer, against the sweep's law (5 minutes)
    python scaling.py recipe             Muon against AdamW, weight norms, decay, noise (9 minutes)

The chapter finds validation losses of 6.49, 6.34, 6.26 and 6.22 nats for 0.62M, 1.12M, 1.80M and 3.34M parameters:
larger is better, by less each time. The report fits a law to fourteen small runs (alpha 0.75, beta 0.82, E 0.823 bits a
byte), forecasts a run of twenty times the compute as 0.854 with a 90% interval [0.832, 0.868], and observes 0.7914.
Tables go to standard output, numbers to runs/scaling-<experiment>.json, curves to runs/scaling-<experiment>.png; trained
runs are remembered in runs/scaling-runs/, so that an interrupted sweep goes on and a repeated one is free.
"""
import argparse
import contextlib
import copy
import csv
import datetime
import functools
import hashlib
import inspect
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from budget import bits_per_byte, cpu_count, from_launcher, keep_memory, launched, machine, pick_device, worker_pool
from model import (EMBEDDING_LR, LOSS_ROWS, REPORT_FAMILY, RUNS, GPT, GPTConfig, Parser, UserError, check_runs, command, outline, plain, plot,
                   positive, save_results, size_text, within, written_whole)
from prepare_data import (add_data_flag, byte_corpus, load_corpus, printable, read_json, regular_file, sample_batch, stdlib_parts, step_positions,
                          write as write_tokens)
from train_gpu import learning_rate, set_learning_rate

SIZES = ((64, 2), (96, 3), (128, 4), (192, 4))          # d_model, n_layer
HEAD_DIM, SEQ_LEN = 32, 128
STEPS, BATCH, LEARNING_RATE, WARMUP, CLIP = 400, 16, 3e-3, 50, 1.0
EVALUATIONS = 4                         # at each quarter of the run
VAL_BATCHES, VAL_BATCH, VAL_SEED = 8, 32, 123
LR_SIZES, LR_SWEEP = ((128, 4), (192, 4)), (1e-3, 3e-3, 1e-2)

# The law: Hoffmann and others 2022, arXiv:2203.15556, section 3.3 and appendix D.4.
DELTA = 1e-3                            # of the Huber loss, on residuals of log loss
POLISHED, ITERATIONS = 24, 300          # of the grid's starts; Newton's steps at most
LOWEST, HIGHEST = (-30.0, 0.0, -30.0, 0.0, -30.0), (10.0,) * 5          # of a, alpha, b, beta, e about the data's centre
LEAST_ROWS, MOST_ROWS, LEAST_DISTINCT = 6, 100_000, 3
MAX_CONDITION = 10.0                    # of log N and log D, each scaled to unit length
OUTLIER = 6.0                           # robust standard deviations
BOOTSTRAP = 4000
AT_ONCE = 120_000                       # rows of all fits that are made at once
# The forecast's interval: 90% of a normal distribution; of Student's t, by its degrees of freedom from 1.
NOMINAL, NORMAL_95, STUDENT_95 = 0.9, 1.645, (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
CUTS, FIRST_CUT, BACKTEST_BOOTSTRAP = 8, 0.4, 100
# What is known of laws before a table is read, as if of so many forecasts within it: 3% of the loss a decade of compute. Public
# tables drift by 1 to 3%; the report's run, 7.6% below its forecast over 1.3 decades, by 5.8%.
PRIOR_CUTS, PRIOR_DRIFT = 2, 0.03

# The sweep. On a CPU, bytes of source code: (d_model, n_layer), a head for every 32 of width, and the sizes tried at each budget.
FACTOR = 20                             # of the largest budget, the run that is forecast
BYTE_SEQ_LEN, BYTE_BATCH, BYTE_HEAD, BYTE_SEEDS = 128, 16, 32, 2      # the losses of two seeds of so small a model differ by 1%
BYTE_EMBEDDING_LR = 3e-2                # the best of 0.003, 0.01, 0.03, 0.06 and 0.1 at 33k and 164k parameters; Muon's 0.02, of 0.01 to 0.04
LADDER = ((16, 1), (16, 2), (24, 1), (32, 1), (32, 2), (40, 2), (48, 2), (48, 3), (64, 3), (80, 3), (96, 3), (96, 4), (96, 5), (128, 4), (128, 5), (160, 5))
BUDGETS = {1e11: LADDER[:6], 4e11: LADDER[2:8], 1.6e12: LADDER[4:10]}
# On a GPU the report's: depths, at each budget those with a reasonable number of tokens a parameter.
REPORT_BUDGETS = {1e17: range(4, 8), 3e17: range(5, 11), 1e18: range(8, 15, 2)}
REPORT_SEQUENCES, REPORT_MICRO_BATCH = 64, 16
WIDE_VOCAB = 1024                       # from there on the loss in chunks is faster
MUON_LR, WARMUP_STEPS, DECAY = 0.02, 1, 0.2
LEAST_STEPS, VAL_WINDOWS, NORMS = 10, 1024, 6             # block matrices' norms are noted at each sixth of a run
DURATION_SIZE, DURATIONS = (64, 3), (0.6e6, 1.2e6, 2.4e6, 4.8e6, 9.6e6)
# The recipe: 1.8M parameters of the report's family at 8192 tokens; each optimizer's rates, widened where the best is at an edge.
RECIPE_SIZE, RECIPE_STEPS, RECIPE_SEEDS, RECIPE_DECAY = (96, 2), 300, 4, 0.5
RECIPE_WIDEST = 6                       # learning rates
RECIPE_RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (1e-2, 2e-2, 4e-2)}


# --- training -------------------------------------------------------------------------------------------------------

def validation_batches(corpus, device):
    """The same windows of the validation part for every model."""
    generator = torch.Generator().manual_seed(VAL_SEED)
    return [tuple(t.to(device) for t in sample_batch(corpus.val, SEQ_LEN, VAL_BATCH, generator)) for _ in range(VAL_BATCHES)]


def precision(device):
    """bf16 on a GPU, fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def evaluate(model, batches):
    """Mean loss over batches of one size in nats a token."""
    model.eval()
    with precision(batches[0][0].device):
        loss = sum(model(x, y)[1].item() for x, y in batches) / len(batches)
    model.train()
    return loss


def training(model, optimizers, batch, share, steps, label, micro_batch=None):
    """Train through steps, a range: batch(step) gives inputs and targets, share(step) the share of the peak learning
    rates. After each step yields (steps done, its loss in nats a token, a tensor)."""
    device = next(model.parameters()).device
    for step in tqdm(steps, desc=label, disable=None, leave=False) if label else steps:      # in a worker tqdm's lock would be left behind
        set_learning_rate(optimizers, share(step))
        x, y = (t.to(device) for t in batch(step))
        model.zero_grad(set_to_none=True)
        total = 0.0
        for part, targets in zip(x.split(micro_batch or len(x)), y.split(micro_batch or len(x))):
            with precision(device):
                loss = model(part, targets)[1] * (len(part) / len(x))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        yield step + 1, total


def chapter_config(corpus, d_model, n_layer):
    return GPTConfig(vocab_size=corpus.vocab_size, d_model=d_model, n_layer=n_layer, n_head=d_model // HEAD_DIM, seq_len=SEQ_LEN)


def train(d_model, n_layer, corpus, batches, steps=STEPS, peak_lr=LEARNING_RATE, device=torch.device("cpu"), label=""):
    """Train one model as the chapter does; returns a row of its table: sizes, the validation loss at each quarter of
    the run and the last step's training loss, in nats."""
    torch.manual_seed(0)
    model = GPT(chapter_config(corpus, d_model, n_layer)).to(device)
    model.loss_rows = LOSS_ROWS[device.type]
    generator, val_loss = torch.Generator().manual_seed(0), []
    evaluate_at = {steps * quarter // EVALUATIONS for quarter in range(1, EVALUATIONS + 1)}
    for done, loss in training(model, [model.adamw(peak_lr)], lambda step: sample_batch(corpus.train, SEQ_LEN, BATCH, generator),
                               lambda step: learning_rate(step, steps, 1.0, WARMUP), range(steps), label):
        if done in evaluate_at:
            val_loss.append(evaluate(model, batches))
    return {"d_model": d_model, "n_layer": n_layer, "params": model.num_params(), "steps": sorted(evaluate_at),
            "val_loss": val_loss, "train_loss": loss.item(), "lr": peak_lr}


def across_cores(jobs, first, workers, threads, make, *source):
    """make(*source)(job) of each job, in order as they come, in that many processes of so many threads each; those in
    first are started before the others."""
    with worker_pool(get_ready, threads, make, *source, workers=workers) as pool:
        started = {job: pool.submit(work, job) for job in dict.fromkeys((*first, *jobs))}
        with tqdm(total=len(started), desc="training", disable=None, leave=False) as bar:
            for future in started.values():
                future.add_done_callback(lambda future: bar.update())
            for job in jobs:
                yield started[job].result()


def get_ready(threads, make, *source):
    """Make a worker process ready."""
    torch.set_num_threads(threads)
    keep_memory()
    work.ready = functools.cache(functools.partial(make, *source))      # made by the first job, which can tell of a refusal


def work(job):
    return work.ready()(job)


def chapter_trainer(data, steps, device):
    """A function from (d_model, n_layer, learning rate) to train's row on a token file."""
    corpus = load_corpus(data, SEQ_LEN)
    batches = validation_batches(corpus, device)
    return lambda job, label="": train(*job[:2], corpus, batches, steps, job[2], device, label)


def chapter_rows(args, corpus, jobs):
    """chapter_trainer's rows in order as they come. On a CPU in as many processes as the largest model leaves work for, it
    first, each with its share of the cores: a small model gains more from a process of its own than from threads."""
    params = [outline(chapter_config(corpus, *size)).num_params() for *size, _ in jobs]
    workers = min(cpu_count(), sum(params) // max(params))
    source = args.data, args.steps, args.device
    if args.device.type == "cuda" or workers < 2:
        run = chapter_trainer(*source)
        return (run(job, f"d {job[0]}, {job[1]} layers, lr {job[2]:g}") for job in jobs)
    largest = [job for job, n in zip(jobs, params) if n == max(params)]
    return across_cores(jobs, largest, workers, cpu_count() // workers, chapter_trainer, *source)


# --- the law --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta: N parameters, D tokens, L in the unit of the losses it was fitted to."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, N, D):
        """The law's loss of N parameters and D tokens, numbers or arrays."""
        return self.E + self.A / np.power(N, self.alpha) + self.B / np.power(D, self.beta)

    @property
    def n_exponent(self):
        """a of N_opt ~ C^a, where C = 6ND; D_opt ~ C^(1 - a)."""
        return self.beta / (self.alpha + self.beta)

    def best_n(self, C):
        """The N that is best for C = 6ND FLOPs (equation 4 of Hoffmann and others)."""
        return (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta)) * (C / 6) ** self.n_exponent


RUN = np.dtype([(name, np.float64) for name in ("N", "D", "loss", "C", "row")])       # C in FLOPs; row: its number in the file, from 1


def table(rows):
    """Dicts with N, D, loss and C, and row where it is not their place, as a record array: table.N and so on."""
    return np.array([(row["N"], row["D"], row["loss"], row["C"], row.get("row", place)) for place, row in enumerate(rows, 1)], dtype=RUN).view(np.recarray)


@dataclass
class Fit:
    """A fitted law: objective is the sum over the rows of Huber's loss, theta (5,) its parameters about centre (3,), the
    means of log N, log D and log loss."""

    law: Law
    objective: float
    theta: torch.Tensor
    centre: np.ndarray
    agree: int                          # of the polished starts, those that came to this optimum
    warnings: list = field(default_factory=list)

    @property
    def n_exponent(self):
        """The law's, or None where one of its terms is not identified."""
        return None if lost_terms(self.theta) else self.law.n_exponent


def read_runs(path, columns=("N", "D", "loss"), where=None):
    """A .csv table of runs; where, "column=value", keeps some of its rows. C is the column of that name, else 6ND.
    Raises UserError, with the row's number, for what is missing, not a number, or not finite and positive."""
    try:
        with open(regular_file(path), newline="", encoding="utf-8-sig") as f:
            reader = csv.DictReader(f)
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or []]
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a .csv table ({error})") from None
    key, _, wanted = (where or "").partition("=")
    for name in (*columns, *([key] if where else [])):
        if name not in names:
            raise UserError(f"{path}: no column {name!r} among {printable(', '.join(names))[:200] or 'none'}; name the three with --columns N,D,loss")
    chosen = [(number, row) for number, row in enumerate(lines, 1) if not where or same_value(row[key], wanted)]
    if not chosen:
        raise UserError(f"{path}: no rows{f' with {where}' if where else ''}")
    rows = []
    for number, row in chosen:
        if None in row:                 # csv's key for what no column names
            raise UserError(f"{path}: row {number} (line {number + 1}) has more cells than the header; write numbers without commas in them")
        N, D, loss = (number_in(row, name, number, path) for name in columns)
        rows.append({"N": N, "D": D, "loss": loss, "C": number_in(row, "C", number, path) if "C" in names else 6.0 * N * D, "row": number})
    return table(rows)


def same_value(text, wanted):
    """Whether a table's cell is that value: as text, or as a number."""
    try:
        return float(text) == float(wanted)
    except (TypeError, ValueError):
        return text == wanted


def number_in(row, name, number, path):
    """A cell as a float. Raises UserError unless it is finite and positive."""
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not sys.float_info.min <= value < math.inf:
        raise UserError(f"{path}: row {number} (line {number + 1}): {name} is {str(row[name])[:40]!r}, and has to be a positive finite number; mend it or leave the row out")
    return value


def condition(runs):
    """How nearly log N and log D vary together: the condition number of the two, each centred and scaled to unit length.
    1 is best; without bound where D is a power of N, as for D = 20 N or a single budget."""
    with np.errstate(invalid="ignore", divide="ignore"):
        r = abs(np.corrcoef(np.log(runs.N), np.log(runs.D))[0, 1])
        return math.inf if not r < 1 else math.sqrt((1 + r) / (1 - r))


def check_design(runs):
    """Raise UserError where the rows cannot tell the law's five parameters apart."""
    if not LEAST_ROWS <= len(runs) <= MOST_ROWS:
        raise UserError(f"{len(runs)} rows, and a law of five parameters needs {LEAST_ROWS} or more, and {MOST_ROWS:,} at most: train more sizes "
                        f"and budgets, or choose among the rows")
    for name in ("N", "D"):
        if (distinct := len(np.unique(getattr(runs, name)))) < LEAST_DISTINCT:
            raise UserError(f"{distinct} distinct {name}, and an exponent needs {LEAST_DISTINCT} or more: vary {name}")
    if (found := condition(runs)) > MAX_CONDITION:
        raise UserError(f"N and D do not vary apart (condition number {found:.3g}, above {MAX_CONDITION:g}): with D a function of N the two terms "
                        f"can trade places, and the rows give no exponent; train several sizes on several numbers of tokens each")


def log_terms(theta, x, y):
    """log A/N^alpha, log B/D^beta and log E about the centre, (..., rows, 3), of theta (..., 5) = a, alpha, b, beta, e."""
    a, alpha, b, beta, e = (t[..., None] for t in theta.unbind(-1))
    return torch.stack(torch.broadcast_tensors(a - alpha * x, b - beta * y, e + 0 * x), dim=-1)


def huber(u):
    """Huber's loss with delta 1."""
    return torch.where(u.abs() <= 1, 0.5 * u * u, u.abs() - 0.5)


def misfit(theta, rows, weight):
    """Huber's loss over the rows, each weight times, in units of delta^2: a sum, for a mean of such small numbers ends an
    optimiser early."""
    x, y, z = rows
    return (weight * huber((torch.logsumexp(log_terms(theta, x, y), -1) - z) / DELTA)).sum(-1)


def derivatives(theta, rows, weight):
    """misfit, its gradient (..., 5) and its Hessian (..., 5, 5)."""
    x, y, z = rows
    terms = log_terms(theta, x, y)
    f = torch.logsumexp(terms, -1)
    shares = (terms - f[..., None]).exp()
    u = (f - z) / DELTA
    value, slope = (weight * huber(u)).sum(-1), weight * u.clamp(-1, 1) / DELTA
    n, d, e = shares.unbind(-1)
    jacobian = torch.stack((n, -n * x, d, -d * y, e), -1)
    # The second derivative of log-sum-exp is diag(shares) - shares shares': the second part joins the Gauss-Newton term.
    hessian = jacobian.mT @ ((weight * (u.abs() <= 1) / DELTA ** 2 - slope)[..., None] * jacobian)
    for i, share, v in ((0, slope * n, x), (2, slope * d, y)):
        block = torch.stack((share.sum(-1), -(share * v).sum(-1), -(share * v).sum(-1), (share * v * v).sum(-1)), -1)
        hessian[..., i:i + 2, i:i + 2] += block.unflatten(-1, (2, 2))
    hessian[..., 4, 4] += (slope * e).sum(-1)
    return value, (slope[..., None] * jacobian).sum(-2), hessian


@contextlib.contextmanager
def one_thread():
    """Small matrices gain nothing from threads, which stand in each other's way on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def polish(theta, rows, weight):
    """Minimise misfit from each of theta (starts, 5), all at once: (theta, misfit). Newton's steps with the Hessian's
    eigenvalues made positive, damped where they do not help, within LOWEST and HIGHEST."""
    lowest, highest = torch.tensor([LOWEST, HIGHEST], dtype=torch.float64)
    theta, weight = theta.clone(), weight.expand(len(theta), -1)
    best, damping, live = misfit(theta, rows, weight), torch.full((len(theta),), 1e-3, dtype=torch.float64), torch.arange(len(theta))
    for _ in range(ITERATIONS):
        now = theta[live]
        value, gradient, hessian = derivatives(now, rows, weight[live])
        held = ((now <= lowest) & (gradient > 0)) | ((now >= highest) & (gradient < 0))        # at a bound, and pushed against it
        gradient, hessian = gradient.masked_fill(held, 0), hessian.masked_fill(held[..., None] | held[..., None, :], 0)
        scale = hessian.diagonal(dim1=-1, dim2=-2).abs().sqrt().clamp_min(1e-8)
        curvature, axes = torch.linalg.eigh(hessian / scale[..., None] / scale[..., None, :])
        along = (axes.mT @ (gradient / scale)[..., None])[..., 0]
        step = (axes @ (along / (curvature.abs() + damping[live, None]))[..., None])[..., 0] / scale
        new = torch.clamp(now - step.masked_fill(held, 0), lowest, highest)
        found = misfit(new, rows, weight[live])
        better = found < value
        theta[live], best[live] = torch.where(better[:, None], new, now), torch.where(better, found, value)
        gain = (along ** 2 / (curvature.abs() + damping[live, None])).sum(-1)
        damping[live] *= torch.where(better, 0.2, 5.0)
        live = live[(gain > 1e-11 * (1 + value)) & (damping[live] < 1e12)]
        if not len(live):
            break
    return theta, best


@functools.cache
def grid():
    """Where fits start: exponents, and the shares that the two power laws have in a loss at the data's centre."""
    exponents, parts = (0.05, 0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.3, 2.0), (0.03, 0.1, 0.25, 0.45)
    return torch.tensor([(math.log(n), alpha, math.log(d), beta, math.log(1 - n - d))
                         for alpha, beta, n, d in itertools.product(exponents, exponents, parts, parts)], dtype=torch.float64)


def about(centre, runs):
    """log N, log D and log loss less their centre, as float64 tensors."""
    return tuple(torch.from_numpy(np.log(column) - c) for column, c in zip((runs.N, runs.D, runs.loss), centre))


def laws(theta, centre):
    """The parameters E, A, B, alpha, beta, (..., 5), of theta about the centre."""
    a, alpha, b, beta, e = theta.unbind(-1)
    n, d, loss = centre
    return torch.stack(((e + loss).exp(), (a + loss + alpha * n).exp(), (b + loss + beta * d).exp(), alpha, beta), -1).numpy()


def predicted(theta, centre, runs):
    """log loss at the runs' N and D, (..., rows), by theta (..., 5)."""
    x, y, _ = about(centre, runs)
    return (torch.logsumexp(log_terms(theta, x, y), -1) + centre[2]).numpy()


def fit_law(runs, polished=POLISHED):
    """The law that fits the runs best: a grid of starts is scored, the best are polished. Raises UserError where the rows
    cannot give it; what is doubtful about it is in its warnings."""
    check_design(runs)
    centre = np.array([np.log(column).mean() for column in (runs.N, runs.D, runs.loss)])
    rows, weight = about(centre, runs), torch.ones(len(runs), dtype=torch.float64)
    scores = torch.cat([misfit(part, rows, weight) for part in grid().split(max(1, AT_ONCE // len(runs)))])
    starts = grid()[scores.argsort(stable=True)[:polished]]
    theta, value = polish(starts, rows, weight)
    best = value.argmin()
    agree = int((value <= value[best] * (1 + 1e-6) + 1e-9).sum())
    fitted = Fit(Law(*laws(theta[best], centre).tolist()), value[best].item() * DELTA ** 2, theta[best], centre, agree)
    fitted.warnings = doubts(fitted, runs, moved=(theta[best] - starts[best]).abs().max().item())
    return fitted


def lost_terms(theta):
    """The names of the law's terms that the rows do not show."""
    return [name for name, i in (("A/N^alpha", 0), ("B/D^beta", 2)) if theta[i] < -20 or theta[i + 1] < 1e-3 or theta[i + 1] >= HIGHEST[i + 1]]


def doubts(fitted, runs, moved):
    """What a reader of the fit has to know, a line each."""
    found, law, points = [], fitted.law, np.stack((runs.N, runs.D, runs.loss), 1)
    if repeated := len(points) - len(np.unique(points, axis=0)):
        found.append(f"{repeated} row{'s are exact copies' if repeated > 1 else ' is an exact copy'} of others, and count{'' if repeated > 1 else 's'} again")
    residual = np.log(runs.loss) - predicted(fitted.theta, fitted.centre, runs)
    spread = max(1.4826 * np.median(np.abs(residual - np.median(residual))), 1e-6)
    far = np.flatnonzero(np.abs(residual) > OUTLIER * spread)
    if len(far):
        shown = ", ".join(f"row {runs.row[i]:.0f} ({np.expm1(residual[i]):+.1%})" for i in far[np.argsort(-np.abs(residual[far]))][:5])
        found.append(f"{len(far)} outlier{'s' if len(far) > 1 else ''} beyond {OUTLIER:g} robust standard deviations ({spread:.2%}) of the fit: {shown}")
    if law.E < 0.01 * runs.loss.min():
        found.append("the floor is not identified (E near 0): losses still fall like a power law, and say nothing of where they end")
    found += [f"the term {name} is not identified (it vanishes, does not vary, or drops at once), so there is no exponent" for name in lost_terms(fitted.theta)]
    if (budgets := len(budgets_of(runs))) < 3:
        found.append(f"{budgets} budgets: with fewer than three the law's bend between them is not seen, and no forecast within the rows is left")
    if moved < 1e-6 and fitted.objective > 1e-12:
        found.append("the fit sits on its start: the optimiser has not moved")
    return found


def bootstrap(fitted, runs, n, seed=0):
    """theta (n, 5) of fits to n resamples of the rows, each from the fit of all."""
    at_once = max(1, AT_ONCE // len(runs))
    rng, rows, chunks = np.random.default_rng(seed), about(fitted.centre, runs), [torch.empty(0, 5, dtype=torch.float64)]
    for size in [at_once] * (n // at_once) + [n % at_once] * (n % at_once > 0):
        weight = torch.from_numpy(rng.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size).astype(np.float64))
        chunks.append(polish(fitted.theta.expand(size, -1), rows, weight)[0])
    return torch.cat(chunks)


# --- how far a law can be trusted -----------------------------------------------------------------------------------

def scatter(fitted, runs):
    """The standard deviation of log loss about the law, which spent five parameters."""
    residual = np.log(runs.loss) - predicted(fitted.theta, fitted.centre, runs)
    return math.sqrt((residual ** 2).sum() / max(1, len(runs) - len(fitted.theta)))


def decades(runs, beyond):
    """How far runs lie beyond so many FLOPs, in powers of ten of compute."""
    return np.maximum(0, np.log10(runs.C / beyond))


def backtests(runs):
    """Forecasts within the runs: at each of up to CUTS budgets the cheaper runs are fitted and the dearer ones forecast.
    Returns, a cut, the drift a decade of compute, in log loss, that noise and parameters leave unexplained."""
    runs, drifts, seen = runs[np.argsort(runs.C, kind="stable")], [], set()
    for place in np.unique(np.linspace(max(LEAST_ROWS, FIRST_CUT * len(runs)), len(runs) - 2, CUTS).astype(int)):
        cut = runs.C[place - 1] * 1.02                  # a budget's runs differ by the rounding of their steps
        cheap, dear = runs[runs.C <= cut], runs[runs.C > cut]
        if len(dear) < 2 or len(cheap) in seen:
            continue
        seen.add(len(cheap))
        try:
            fitted = fit_law(cheap, polished=8)
        except UserError:
            continue
        error = np.log(dear.loss) - predicted(fitted.theta, fitted.centre, dear)
        explained = scatter(fitted, cheap) ** 2 + predicted(bootstrap(fitted, cheap, BACKTEST_BOOTSTRAP), fitted.centre, dear).var(0)
        distance = decades(dear, cheap.C.max())
        drifts.append(math.sqrt(np.maximum(error ** 2 - explained, 0).sum() / (distance ** 2).sum()))
    return drifts


def forecast_losses(fitted, runs, targets, replicates):
    """What the law forecasts for targets, a table of runs (their losses unused), with two intervals at NOMINAL:

    plain: the bootstrap's, of the law's parameters alone. interval: also of the noise of a new run, and of the form
    itself, which is wrong by an amount that grows with each decade of compute: so much as when the table's own dearer runs
    are forecast from its cheaper ones. That is the root mean square of those drifts and of PRIOR_CUTS more of PRIOR_DRIFT,
    times Student's t for their number: a sweep of three budgets holds one such forecast, and one is no measure of spread.
    """
    point, sampled = predicted(fitted.theta, fitted.centre, targets), predicted(replicates, fitted.centre, targets)
    noise, parameters, drifts, distance = scatter(fitted, runs), sampled.std(0), backtests(runs), decades(targets, runs.C.max())
    freedom = PRIOR_CUTS + len(drifts)
    drift = math.sqrt((PRIOR_CUTS * PRIOR_DRIFT ** 2 + np.square(drifts).sum()) / freedom)
    form = STUDENT_95[min(freedom, len(STUDENT_95)) - 1] * drift * distance
    half = np.sqrt(NORMAL_95 ** 2 * (noise ** 2 + parameters ** 2) + form ** 2)
    tail = (1 - NOMINAL) / 2
    return {"point": np.exp(point), "plain": np.exp(np.quantile(sampled, (tail, 1 - tail), axis=0)), "interval": np.exp((point - half, point + half)),
            "noise": noise, "parameters": parameters, "drift": drift, "cuts": len(drifts), "decades": distance}


# --- the sweep's runs -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Experiment:
    """One training run of the report's family: all that its loss depends on besides the corpus and the kind of device."""

    config: GPTConfig
    steps: int
    batch: int                          # sequences a step
    lr: float = MUON_LR
    embedding_lr: float = EMBEDDING_LR
    optimizer: str = "muon"
    schedule: str = "wsd"
    weight_decay: float = 0.0
    seed: int = 0

    @property
    def D(self):
        return self.steps * self.batch * self.config.seq_len

    @property
    def C(self):
        """D (6N + 12 d T h) FLOPs."""
        return self.D * counted(self.config)[1]

    def models(self, device):
        """The model as it starts, and its optimizers: Muon of the blocks' matrices and AdamW of the embeddings, or AdamW of all."""
        torch.manual_seed(self.seed)
        model = GPT(self.config).to(device)
        model.loss_rows = LOSS_ROWS[device.type] if self.config.vocab_size > WIDE_VOCAB else None
        muon = self.optimizer == "muon"
        return model, model.muon(self.lr, self.weight_decay, self.embedding_lr) if muon else [model.adamw(self.lr, self.weight_decay)]

    def share(self, step):
        """The share of each peak rate that a step takes."""
        return learning_rate(step, self.steps, 1.0, WARMUP_STEPS, self.schedule, DECAY)


def counted(config):
    """(N, FLOPs a token) of a configuration: N as the report counts it, blocks and output matrix."""
    model = outline(config)
    return model.num_compute_params(), model.flops_per_token()


class Lab:
    """Where experiments are trained, or remembered: a corpus, a device, and runs/scaling-runs/, a file an experiment."""

    def __init__(self, data, texts, device):
        self.data, self.texts, self.device = data, texts, device
        self.seq_len, self.batch = (BYTE_SEQ_LEN, BYTE_BATCH) if device.type == "cpu" else (2048, REPORT_SEQUENCES)
        self.corpus = load_corpus(data, self.seq_len) if data else byte_corpus(texts, self.seq_len)
        self.identity = self.corpus.identity()

    def config(self, size):
        """The report's family at a size: (d_model, n_layer) on a CPU, a depth on a GPU."""
        if isinstance(size, int):
            return replace(GPTConfig.from_depth(size), vocab_size=self.corpus.vocab_size, seq_len=self.seq_len)
        return GPTConfig(self.corpus.vocab_size, size[1], max(1, size[0] // BYTE_HEAD), size[0], self.seq_len, **REPORT_FAMILY)

    def experiment(self, size, C=None, D=None):
        """The run of that size for C FLOPs or D tokens, to the nearest step."""
        config = self.config(size)
        tokens, cpu = D or C / counted(config)[1], self.device.type == "cpu"
        steps = round(tokens / (self.batch * self.seq_len))
        if steps < LEAST_STEPS:
            raise UserError(f"--scale leaves {size_text(counted(config)[0])} parameters {max(0, steps)} steps: too few to count budgets by; take a larger one")
        return Experiment(config, steps, self.batch, embedding_lr=BYTE_EMBEDDING_LR if cpu else EMBEDDING_LR)

    def path(self, experiment, *scored):
        """The experiment's file; scored: the identities of other texts that its model was scored on, too."""
        key = json.dumps([asdict(experiment), self.identity, self.device.type, *scored], sort_keys=True)
        return RUNS / "scaling-runs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def remembered(self, experiment, *scored):
        """What is known of an experiment, or None."""
        try:
            row = json.loads(self.path(experiment, *scored).read_text(encoding="utf-8"))
            return row if row["loss"] is None or row["loss"] > 0 else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, experiment, loss, seconds, norms=None, scored=(), losses=None):
        row = {"C": experiment.C, "N": counted(experiment.config)[0], "D": experiment.D, "loss": loss if math.isfinite(loss) else None,
               "seconds": seconds, "norms": norms, "losses": losses, "data": self.corpus.name, "experiment": asdict(experiment)}
        with written_whole(self.path(experiment, *scored)) as part:
            part.write_text(json.dumps(plain(row), indent=1) + "\n", encoding="utf-8")
        return row

    def batches(self, experiment):
        """A function from a step to its batch: a function of the seed and the step, so that a longer run begins as a shorter one."""
        positions = self.corpus.train.positions(self.seq_len)
        return lambda step: self.corpus.train.windows(step_positions(positions, experiment.batch, experiment.seed, step), self.seq_len)

    @functools.cached_property
    def validation(self):
        """Windows spread evenly over the validation part, the same for all experiments."""
        at_once = BYTE_BATCH if self.device.type == "cpu" else REPORT_MICRO_BATCH
        positions = np.linspace(0, self.corpus.val.positions(self.seq_len) - 1, VAL_WINDOWS).astype(np.int64)
        return [tuple(t.to(self.device) for t in self.corpus.val.windows(positions[i:i + at_once], self.seq_len))
                for i in range(0, VAL_WINDOWS, at_once)]

    def continued(self, experiment, model, optimizers, first=0, last=None, label="", norms=None):
        """Train on, from step first to last; returns the loss in nats a token on the validation windows. norms, a list, is given
        the norm of the block matrices together at the start and at each sixth, (step, norm, the step's update relative to it)."""
        steps = range(first, experiment.steps if last is None else last)
        micro_batch = None if self.device.type == "cpu" else REPORT_MICRO_BATCH
        matrices, moments = model.block_matrices(), {experiment.steps * i // NORMS for i in range(1, NORMS + 1)} if norms is not None else ()
        before = {name: p.detach().clone() for name, p in matrices.items()}
        if moments:
            norms.append((first, math.hypot(*(p.norm().item() for p in before.values())), None))
        for done, _ in training(model, optimizers, self.batches(experiment), experiment.share, steps, label, micro_batch):
            if done in moments:
                sizes = model.matrix_sizes(before).values()
                norm = math.hypot(*(size["norm"] for size in sizes))
                norms.append((done, norm, math.hypot(*(size["norm"] * (size["relative_update"] or 0) for size in sizes)) / norm))
            if done + 1 in moments:
                before = {name: p.detach().clone() for name, p in matrices.items()}
        return evaluate(model, self.validation)

    def row(self, experiment, label=""):
        """The experiment's row: C, N, D, loss (nats a token, None where it diverged) and seconds; trained where it is not remembered."""
        if known := self.remembered(experiment):
            return known
        start, norms = time.perf_counter(), []
        loss = self.continued(experiment, *experiment.models(self.device), label=label, norms=norms)
        return self.remember(experiment, loss, time.perf_counter() - start, norms)

    def rows(self, experiments):
        """Each one's row, in order, as they come: trained a process a core on a CPU, one after another on a GPU."""
        missing = sum(not self.remembered(e) for e in experiments)
        if self.device.type == "cuda" or missing < 2 or cpu_count() < 2:
            return (self.row(e, "training") for e in experiments)
        return across_cores(experiments, (), cpu_count(), 1, trainer, self.data, self.texts, self.device)

    def share_out(self, experiments):
        """Under torchrun: train every world-th one, and on rank 0 wait for the others', which come by way of runs/."""
        rank, world = from_launcher("RANK", 0), from_launcher("WORLD_SIZE", 1)
        for experiment in experiments[rank::world]:
            self.row(experiment)
        if rank:
            raise SystemExit(0)
        while not all(map(self.remembered, experiments)):
            time.sleep(0.5)


def trainer(*source):
    """A function from an experiment to its row in a lab."""
    return Lab(*source).row


# --- budgets and their optima ---------------------------------------------------------------------------------------

def budgets_of(runs):
    """The runs of each budget: from the cheapest on, those of up to 15% more FLOPs."""
    runs, budgets = runs[np.argsort(runs.C, kind="stable")], []
    while len(runs):
        one = runs.C <= 1.15 * runs.C[0]
        budgets.append(runs[one])
        runs = runs[~one]
    return budgets


def optimum(budget):
    """The vertex of the parabola in log N through one budget's losses: {"C", "N", "D", "loss", "valid", "why"}; valid where
    the parabola opens upwards and the vertex lies within the sizes tried. D by a parabola of log D in log N."""
    C = math.exp(np.log(budget.C).mean())
    if len(np.unique(budget.N)) < 3:
        return {"C": C, "N": None, "D": None, "loss": None, "valid": False, "why": "fewer than three sizes"}
    middle = np.log(budget.N).mean()
    x = np.log(budget.N) - middle
    a, b, c = np.polyfit(x, budget.loss, 2)
    if a <= 0:
        return {"C": C, "N": None, "D": None, "loss": None, "valid": False, "why": "the parabola opens downwards"}
    vertex = -b / (2 * a)
    within = x.min() < vertex < x.max()
    place = min(max(vertex, x.min() - 3), x.max() + 3)          # further out its N is no number to print
    return {"C": C, "N": math.exp(middle + place), "D": math.exp(np.polyval(np.polyfit(x, np.log(budget.D), 2), place)),
            "loss": float(c - b * b / (4 * a)), "valid": bool(within), "why": "" if within else "the vertex lies outside the sizes tried"}


def exponents(optima):
    """Powers of C by which the valid optima's N and D grow, and D's coefficient: straight lines in logarithms; None with
    fewer than two of them."""
    valid = [o for o in optima if o["valid"]]
    if len(valid) < 2:
        return {"n_exponent": None, "d_exponent": None, "d_coefficient": None}
    C, N, D = (np.log([o[name] for o in valid]) for name in ("C", "N", "D"))
    n, (d, intercept) = np.polyfit(C, N, 1)[0], np.polyfit(C, D, 1)
    return {"n_exponent": float(n), "d_exponent": float(d), "d_coefficient": math.exp(intercept)}


# --- the experiments ------------------------------------------------------------------------------------------------

def bits_text(bits):
    return "n/a" if bits is None else f"{bits:.3f}"


def sizes(args):
    """The chapter's table: four sizes on the same data for the same number of steps."""
    corpus = chapters_corpus(args)
    rows = []
    at = [args.steps * quarter // EVALUATIONS for quarter in range(1, EVALUATIONS + 1)]
    print(f"{'d':>3s}  layers   params   validation loss at step " + "  ".join(f"{step:5d}" for step in at)
          + "   last training loss   bits per byte")
    for row in chapter_rows(args, corpus, [(*size, LEARNING_RATE) for size in SIZES]):
        rows.append(row)
        print(f"{row['d_model']:3d}  {row['n_layer']:6d}   {row['params'] / 1e6:5.2f}M   {'':23s} " + "  ".join(f"{v:5.2f}" for v in row["val_loss"])
              + f"   {row['train_loss']:18.2f}   {bits_text(corpus.bits_per_byte(row['val_loss'][-1])):>13s}", flush=True)
    first, last = rows[0], rows[-1]
    print(f"{last['params'] / first['params']:.1f} times the parameters, {first['val_loss'][-1] - last['val_loss'][-1]:.2f} nats less; the "
          f"training loss is {first['val_loss'][-1] - first['train_loss']:.2f} below the validation loss at the smallest size, "
          f"{last['val_loss'][-1] - last['train_loss']:.2f} at the largest")
    leave_curves("sizes", corpus, args.steps, rows)


def lr(args):
    """Exercise 1: the final validation loss for each learning rate at two sizes."""
    corpus = chapters_corpus(args)
    rows, best, rates = [], [], sorted(set(args.rates))
    print("params   " + "  ".join(f"{f'lr {rate:g}':>9s}" for rate in rates) + "   best")
    for row in chapter_rows(args, corpus, [(*size, rate) for size in LR_SIZES for rate in rates]):
        rows.append(row)
        if len(rows) % len(rates):
            continue
        swept = rows[-len(rates):]
        losses = [row["val_loss"][-1] for row in swept]
        winner = min((i for i, loss in enumerate(losses) if math.isfinite(loss)), key=losses.__getitem__, default=None)
        verdict = "none: no loss is finite" if winner is None else f"{rates[winner]:g}"
        if winner in (0, len(losses) - 1) and len(losses) > 1:
            verdict += ", at the sweep's edge: the best may lie beyond it"
        print(f"{swept[0]['params'] / 1e6:5.2f}M   "
              + "  ".join(f"{f'{v:.3f}' + '*' * (i == winner):>9s}" for i, v in enumerate(losses)) + f"   {verdict}", flush=True)
        best.append(winner)
    same = len(set(best)) == 1 and None not in best
    print("the best learning rate is " + ("the same at both sizes" if same else "not the same at both sizes"))
    leave_curves("lr", corpus, args.steps, rows)


def chapters_corpus(args):
    """The token file of --data, said with the machine that trains on it."""
    corpus = load_corpus(args.data, SEQ_LEN)
    print(f"{corpus}\n{machine(args.device)}")
    return corpus


def leave_curves(name, corpus, steps, rows):
    """The rows in runs/, and their validation losses against steps, one line a row."""
    save_results(f"scaling-{name}", {"corpus": corpus.name, "steps": steps, "rows": rows})
    several_rates = len({row["lr"] for row in rows}) > 1
    picture(name, corpus.name, [(row["steps"], row["val_loss"], "o-", f"{row['params'] / 1e6:.2f}M" + f", lr {row['lr']:g}" * several_rates)
                                for row in rows], xlabel="steps", ylabel="validation loss (nats a token)")


def picture(name, title, curves, **labels):
    """Draw curves, each (x, y, matplotlib's format, label or None), into runs/scaling-<name>.png."""
    path = RUNS / f"scaling-{name}.png"
    with plot(path, title, **labels) as axes:
        for x, y, style, label in curves:
            axes.plot(x, y, style, label=label)
    print(f"curves: {path}")


def sweep(args):
    """(lab, the sweep's rows): trained or remembered, and printed; for what builds on a finished sweep, in one line."""
    lab = Lab(args.data, args.text, args.device)
    budgets = BUDGETS if args.device.type == "cpu" else REPORT_BUDGETS
    experiments = [replace(lab.experiment(size, C * args.scale), seed=seed)
                   for C, tried in budgets.items() for size in tried for seed in range(BYTE_SEEDS if args.device.type == "cpu" else 1)]
    if launched():
        lab.share_out(experiments)
    done = args.experiment != "isoflop" and all(map(lab.remembered, experiments))
    say = (lambda *text, **how: None) if done else print
    print(f"{lab.corpus}\n{machine(args.device)}")
    if done:
        print(f"the sweep: {len(experiments)} runs, remembered; python scaling.py isoflop prints them")
    say("  budget      d  layers        N         D   tokens a parameter    steps   seed   loss (nats)   bits a byte", flush=True)
    rows = []
    for experiment, row in zip(experiments, lab.rows(experiments)):
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
        bits = None if row["loss"] is None else lab.corpus.bits_per_byte(row["loss"])
        say(f"{row['C']:8.2e}  {experiment.config.d_model:5d}  {experiment.config.n_layer:6d}  {size_text(row['N']):>7s}  {size_text(row['D']):>8s}   "
            f"{row['D'] / row['N']:18.1f}   {experiment.steps:6d}   {experiment.seed:4d}   {loss:>11s}   {bits_text(bits):>11s}", flush=True)
        if row["loss"] is not None:
            rows.append({name: row[name] for name in ("C", "N", "D", "loss", "seconds")})
    return lab, rows


def isoflop(args):
    """The report's sweep: at each of three budgets the loss of several sizes, the best of them by a parabola in log N, and
    how the best N and D grow with the budget. --from FILE.csv (columns C, N, D, loss) takes measured runs instead."""
    if args.file:
        runs = read_runs(args.file, args.columns, args.where)
        name, rows = printable(str(args.file)), [{column: float(run[column]) for column in ("C", "N", "D", "loss")} for run in runs]
    else:
        lab, rows = sweep(args)
        name, runs = lab.corpus.name, table(rows)
    budgets = budgets_of(runs)
    optima = [optimum(budget) for budget in budgets]
    print("  budget   sizes     best N         D   tokens a parameter     loss")
    for budget, best in zip(budgets, optima):
        found = (f"{size_text(best['N']):>8s}  {size_text(best['D']):>8s}   {best['D'] / best['N']:18.1f}   {best['loss']:.4f}" if best["N"] else "")
        print(f"{best['C']:8.2e}   {len(budget):5d}   {found}{'  ' * bool(found and best['why'])}{best['why'] and 'left out: ' + best['why']}")
    powers = exponents(optima)
    left_out = sum(not o["valid"] for o in optima)
    warnings = [f"{left_out} of {len(optima)} parabolas left out of the exponents"] * (left_out > 0)
    if len(optima) - left_out < 3:
        warnings.append(f"{len(optima) - left_out} budgets give an optimum: three are the least that can show a straight line")
    if powers["n_exponent"] is not None:
        print(f"best N ~ C^{powers['n_exponent']:.3f}, best D = {powers['d_coefficient']:.3g} C^{powers['d_exponent']:.3f}; "
              f"the report: C^0.52 and C^0.48, 11.5, 9.9 and 9.5 tokens a parameter")
    say_warnings(warnings)
    save_results("scaling-isoflop", {"name": name, "runs": rows, "optima": optima, **powers, "warnings": warnings})
    curves = []
    for i, (budget, best) in enumerate(zip(budgets, optima)):
        curves.append((budget.N, budget.loss, f"C{i}o", f"{best['C']:.1e} FLOPs"))
        if best["valid"]:
            x = np.log(np.geomspace(budget.N.min(), budget.N.max(), 100))
            curves.append((np.exp(x), np.polyval(np.polyfit(np.log(budget.N), budget.loss, 2), x), f"C{i}-", None))
            curves.append(([best["N"]], [best["loss"]], "k*", None))
    picture("isoflop", name, curves, xlabel="N, parameters", ylabel="loss", xscale="log")


def say_warnings(warnings):
    for warning in warnings:
        print(f"warning: {warning}")


def law_text(fitted, errors=None):
    """The law's parameters, a line each, with their standard errors."""
    lines = []
    for name, value in {**asdict(fitted.law), "n_exponent": fitted.n_exponent}.items():
        label, text = "exponent of N" if name == "n_exponent" else name, "none" if value is None else f"{value:.5g}"
        lines.append(f"{label:>14s}  {text:<12s}" + (f" ± {errors[name]:.3g}" if errors and value is not None else ""))
    return "\n".join(map(str.rstrip, lines))


def standard_errors(replicates, centre):
    """The standard deviation of each parameter over bootstrap replicates, and of the exponent of N."""
    values = laws(replicates, centre)
    share = values[:, 4] / np.maximum(values[:, 3] + values[:, 4], 1e-12)
    return dict(zip(("E", "A", "B", "alpha", "beta", "n_exponent"), np.append(values.std(0), share.std()).tolist()))


def fit(args):
    """L(N, D) = E + A/N^alpha + B/D^beta to a table of runs (columns N, D, loss): Huber's loss of the residuals of log loss
    (delta 0.001), a grid of starts scored and the best polished, in float64; standard errors by bootstrap."""
    runs = read_runs(args.file, args.columns, args.where)
    start = time.perf_counter()
    found = fit_law(runs)
    seconds = time.perf_counter() - start
    print(f"{printable(str(args.file))}: {len(runs)} rows{f' with {args.where}' if args.where else ''}, condition number {condition(runs):.2f} "
          f"(at most {MAX_CONDITION:g})\nobjective {found.objective:.10f} (Huber's loss, delta {DELTA:g}, summed over the rows); of the "
          f"{POLISHED} best starts {found.agree} agree; {seconds:.2f} s", flush=True)
    start = time.perf_counter()
    replicates = bootstrap(found, runs, args.bootstrap)
    errors = standard_errors(replicates, found.centre) if args.bootstrap > 1 else None
    print(law_text(found, errors))
    if errors:
        print(f"± one standard error, of {args.bootstrap:,} resamples of the rows; {time.perf_counter() - start:.1f} s")
        if np.mean(laws(replicates, found.centre)[:, 0] < 0.01 * runs.loss.min()) > 0.05 and found.law.E >= 0.01 * runs.loss.min():
            found.warnings.append("the floor is hardly identified: one resample in twenty and more puts E near 0")
    results = {**asdict(found.law), "objective": found.objective, "n_exponent": found.n_exponent, "rows": len(runs), "delta": DELTA,
               "condition": condition(runs), "bootstrap": {"n": args.bootstrap, "se": errors}, "forecast": None}
    if args.forecast_above:
        results["forecast"] = held_out(runs, args.forecast_above)
    say_warnings(found.warnings)
    save_results("scaling-fit", {**results, "warnings": found.warnings})
    curves, C = [(runs.C, runs.loss, ".", "runs")], np.geomspace(runs.C.min(), runs.C.max(), 100)
    if found.n_exponent is not None:
        N = found.law.best_n(C)
        curves.append((C, found.law.loss(N, C / 6 / N), "k-", "the law at its best N, C = 6ND"))
    picture("fit", printable(str(args.file)), curves, xlabel="C, FLOPs", ylabel="loss", xscale="log")


def held_out(runs, above):
    """Fit the runs of no more than so many FLOPs, forecast those above, print and return how many each interval covers."""
    cheap, dear = runs[runs.C <= above], runs[runs.C > above]
    if not len(dear):
        raise UserError(f"--forecast-above {above:g}: no run has more FLOPs; the largest has {runs.C.max():.3g}")
    found = fit_law(cheap)
    told = forecast_losses(found, cheap, dear, bootstrap(found, cheap, BOOTSTRAP // 4))
    covered = {name: np.mean((told[name][0] <= dear.loss) & (dear.loss <= told[name][1])) for name in ("plain", "interval")}
    widths = {name: np.median(told[name][1] - told[name][0]) for name in ("plain", "interval")}
    print(f"forecast of the {len(dear)} rows above {above:g} FLOPs, up to {10 ** told['decades'].max():.1f} times the largest fitted, from the {len(cheap)} "
          f"others: median error {np.median(told['point'] - dear.loss):+.4f}\n  the bootstrap's {NOMINAL:.0%} interval covers {covered['plain']:.0%} of them "
          f"(median width {widths['plain']:.4f}), ours {covered['interval']:.0%} (median width {widths['interval']:.4f}: noise {told['noise']:.2%}, "
          f"form {told['drift']:.2%} a decade by {told['cuts']} forecast{'s' * (told['cuts'] != 1)} within the fitted rows, and {PRIOR_DRIFT:.0%} known of other tables)")
    return {"rows": len(dear), "nominal": NOMINAL, "coverage": float(covered["interval"]), "width": float(widths["interval"]),
            "plain_coverage": float(covered["plain"]), "plain_width": float(widths["plain"])}


def in_bits(lab, rows):
    """(rows with their losses in bits a byte, the unit's name): where the corpus does not tell its bytes, as they are."""
    if lab.corpus.bytes_per_token is None:
        return rows, "nats a token"
    return [{**row, "loss": None if row["loss"] is None else lab.corpus.bits_per_byte(row["loss"])} for row in rows], "bits a byte"


def forecast(args):
    """Write down what the sweep's law says of a run with 20 times the compute of its largest budget, at the best size: the
    point, the bootstrap's interval as the report has it, and one that also knows noise and the error of the form. --run
    trains that run and says which held."""
    lab, rows = sweep(args)
    rows, unit = in_bits(lab, rows)
    runs = table(rows)
    found = fit_law(runs)
    say_warnings(found.warnings)
    C = FACTOR * runs.C.max()
    tried = [lab.experiment(size, C) for size in (LADDER if args.device.type == "cpu" else range(4, 41, 2))]
    experiment = min(tried, key=lambda e: found.law.loss(counted(e.config)[0], e.D))
    N = counted(experiment.config)[0]
    target = table([{"C": experiment.C, "N": N, "D": experiment.D, "loss": 1.0}])
    told = forecast_losses(found, runs, target, bootstrap(found, runs, BOOTSTRAP // 4))
    point, plain, interval = float(told["point"][0]), told["plain"][:, 0].tolist(), told["interval"][:, 0].tolist()
    written = {"rows": rows, "rows_sha256": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest(), "unit": unit, "law": asdict(found.law),
               "objective": found.objective, "target": {"C": experiment.C, "N": N, "D": experiment.D, "d_model": experiment.config.d_model,
                                                        "n_layer": experiment.config.n_layer}, "extrapolation": experiment.C / runs.C.max(),
               "nominal": NOMINAL, "point": point, "plain": plain, "interval": interval, "noise": told["noise"], "parameters": float(told["parameters"][0]),
               "drift_a_decade": told["drift"], "cuts": told["cuts"], "warnings": found.warnings}
    date = written_before(written) or datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    save_results("scaling-forecast", {"date": date, **written, "observed": None})
    print(f"{law_text(found)}\nforecast, written down {date}: {size_text(N)} parameters (d_model {experiment.config.d_model}, {experiment.config.n_layer} "
          f"layers), {size_text(experiment.D)} tokens, {experiment.C:.2e} FLOPs: {experiment.C / runs.C.max():.1f} times the largest run's\n"
          f"{'predicted':>36s}  {point:.4f} {unit}\n{'90% interval of the bootstrap':>36s}  [{plain[0]:.4f}, {plain[1]:.4f}]\n"
          f"{'with noise and the error of the form':>36s}  [{interval[0]:.4f}, {interval[1]:.4f}]: noise {told['noise']:.2%}, form {told['drift']:.2%} a decade "
          f"({told['cuts']} forecast{'s' * (told['cuts'] != 1)} within the sweep, and {PRIOR_DRIFT:.0%} known of other tables)", flush=True)
    observed = None
    if args.run:
        row = lab.row(experiment, f"d {experiment.config.d_model}, {experiment.config.n_layer} layers")
        if row["loss"] is None:
            raise UserError("the run that was forecast has diverged: its loss is not finite")
        observed = in_bits(lab, [row])[0][0]["loss"]
        held = {name: low <= observed <= high for name, (low, high) in (("plain", plain), ("interval", interval))}
        print(f"{'observed':>36s}  {observed:.4f}, {observed - point:+.4f} from the forecast ({row['seconds'] / 60:.1f} minutes); the bootstrap's interval "
              f"{'held' if held['plain'] else 'failed'}, ours {'held' if held['interval'] else 'failed'}; the fitted floor is {found.law.E:.4f}\n"
              f"the report: predicted 0.854 [0.832, 0.868], observed 0.7914, below its fitted floor of 0.823 bits a byte")
        save_results("scaling-forecast", {"date": date, **written, "observed": observed, "seconds": row["seconds"], "held": held})
    else:
        print("to train it: python scaling.py forecast --run")
    there, costs = experiment.C, np.geomspace(runs.C.min(), experiment.C, 100)
    best = np.min([found.law.loss(N, costs / flops) for N, flops in (counted(e.config) for e in tried)], axis=0)
    picture("forecast", lab.corpus.name, [
        (runs.C, runs.loss, "C0.", "the sweep"), (costs, best, "k-", "the law at its best size"), ([there] * 2, interval, "C1_-", "with noise and the form's error"),
        ([there] * 2, plain, "C3_-", "the bootstrap's 90%")] + [([there], [observed], "k*", "observed")] * (observed is not None),
        xlabel="C, FLOPs", ylabel=f"loss ({unit})", xscale="log")


def written_before(forecast):
    """The date of the forecast in runs/, if it says the same: that it was made before its run stays to be seen."""
    try:
        before = read_json(RUNS / "scaling-forecast.json")
        return before["date"] if all(before[name] == forecast[name] for name in ("rows_sha256", "target", "point")) else None
    except (UserError, OSError, KeyError, TypeError):
        return None


def train_durations(lab, ended):
    """Train the trunk at a constant rate once, and from it each of ended, shortest first, over its decay; remember their
    losses, and the trunk's where a shorter run ends. A branch is the run of its own length to the bit: its data and its rate
    until then are the same."""
    trunk = replace(ended[-1], schedule="constant")
    moments = sorted([(int(e.steps * (1 - DECAY)), 0, e) for e in ended] + [(e.steps, 1, e) for e in ended[:-1]], key=lambda m: m[:2])
    if all(lab.remembered(replace(e, schedule="constant") if kind else e) for _, kind, e in moments):
        return
    model, optimizers = trunk.models(lab.device)
    done, start = 0, time.perf_counter()
    for step, kind, e in moments:
        loss = lab.continued(trunk, model, optimizers, done, step, "the trunk")
        done = step
        if kind:
            lab.remember(replace(e, schedule="constant"), loss, time.perf_counter() - start)
        else:
            branch = copy.deepcopy((model, optimizers))         # at once, so that the optimizers hold the copy's parameters
            lab.remember(e, lab.continued(e, *branch, first=step, label=f"{size_text(e.D)} tokens"), time.perf_counter() - start)


def duration(args):
    """One size for longer and longer: branches of one trunk at a constant learning rate, each decaying over its last fifth,
    against what the sweep's law predicts; the law fitted again with them; and what the decay alone is worth."""
    lab, rows = sweep(args)
    rows, unit = in_bits(lab, rows)
    before = fit_law(table(rows))
    size, tokens = (DURATION_SIZE, DURATIONS) if args.device.type == "cpu" else (12, (0.25e9, 0.5e9, 1e9, 2e9))
    ended = [lab.experiment(size, D=D * args.scale) for D in tokens]
    train_durations(lab, ended)
    print(f"{size_text(counted(ended[0].config)[0])} parameters for longer and longer, in {unit}\n       D   tokens a parameter   predicted   observed   "
          f"observed - predicted   constant rate   the decay is worth")
    longer = []
    for e in ended:
        constant = lab.remembered(replace(e, schedule="constant"))
        row, *rest = in_bits(lab, [known for known in (lab.remembered(e), constant) if known])[0]
        told = float(before.law.loss(row["N"], row["D"]))
        worth = rest[0]["loss"] - row["loss"] if rest else None
        print(f"{size_text(row['D']):>8s}   {row['D'] / row['N']:18.1f}   {told:9.4f}   {row['loss']:8.4f}   {row['loss'] - told:+20.4f}   "
              + (f"{rest[0]['loss']:13.4f}   {worth:18.4f}" if rest else ""))
        longer.append({name: row[name] for name in ("C", "N", "D", "loss")} | {"predicted": told, "constant": rest[0]["loss"] if rest else None, "decay_worth": worth})
    after = fit_law(table(rows + longer))
    worth = [row["decay_worth"] for row in longer if row["decay_worth"] is not None]
    print(f"fitted again with them: E {before.law.E:.3f} to {after.law.E:.3f}, beta {before.law.beta:.2f} to {after.law.beta:.2f} (the report: 0.823 to 0.63, "
          f"0.82 to 0.38); the decay alone is worth {min(worth):.3f} to {max(worth):.3f} at equal tokens (the report: about 0.025 bits a byte)")
    say_warnings([f"before: {w}" for w in before.warnings] + [f"after: {w}" for w in after.warnings])
    save_results("scaling-duration", {"name": lab.corpus.name, "unit": unit, "runs": longer, "before": asdict(before.law), "after": asdict(after.law),
                                      "warnings": {"before": before.warnings, "after": after.warnings}})
    D = [row["D"] for row in longer]
    picture("duration", lab.corpus.name, [
        (D, [row["loss"] for row in longer], "o-", "decayed"), (D[:len(worth)], [row["constant"] for row in longer[:len(worth)]], "o:", "constant rate"),
        (D, [row["predicted"] for row in longer], "--", "the sweep's law"),
        (D, [float(after.law.loss(row["N"], row["D"])) for row in longer], "--", "fitted again")], xlabel="D, tokens", ylabel=f"loss ({unit})", xscale="log")


def swept(lab, base, optimizer, rates):
    """The optimizer's runs over learning rates, the sweep widened until its best lies inside: (rates, rows, best)."""
    rates = sorted(rates)
    while True:
        rows, _ = in_bits(lab, list(lab.rows([replace(base, optimizer=optimizer, lr=rate) for rate in rates])))
        losses = [math.inf if row["loss"] is None else row["loss"] for row in rows]
        best = int(np.argmin(losses))
        if math.isinf(losses[best]):
            raise UserError(f"{optimizer}: no learning rate of {', '.join(f'{rate:g}' for rate in rates)} gives a finite loss")
        inside = 0 < best < len(rates) - 1
        if inside or len(rates) >= RECIPE_WIDEST:
            break
        rates = [rates[0] ** 2 / rates[1], *rates] if best == 0 else [*rates, rates[-1] ** 2 / rates[-2]]
    print(f"{optimizer:>6s}   " + "   ".join(f"lr {rate:.2g}: {loss:.4f}{'*' * (i == best)}" for i, (rate, loss) in enumerate(zip(rates, losses)))
          + ("" if inside else "   the best is at the sweep's edge: a better one may lie beyond it"), flush=True)
    return rates, rows, best


def power(t, y):
    """The power p of y ~ t^p: a straight line in logarithms."""
    return float(np.polyfit(np.log(t), np.log(y), 1)[0])


def recipe(args):
    """The report's choices, each measured at 1.8M parameters: Muon against AdamW, each at its best learning rate; the noise of
    four seeds, in which every difference is counted; the growth of weight norms, and weight decay; the decay of the rate.
    --compare FILE FILE... trains the same model on each of several texts and scores it on all of them."""
    lab = Lab(args.data or default_tokens(), None, args.device)
    base = Experiment(lab.config(RECIPE_SIZE), args.steps, lab.batch)
    print(f"{lab.corpus}\n{machine(args.device)}\n{size_text(GPT(base.config).num_params())} parameters, {args.steps} steps of "
          f"{base.batch * lab.seq_len:,} tokens; losses in {in_bits(lab, [])[1]}")
    for _ in lab.rows([replace(base, optimizer=optimizer, lr=rate) for optimizer, rates in RECIPE_RATES.items() for rate in rates]):
        pass                            # all at once, so that no core waits between the two sweeps
    tried = {optimizer: swept(lab, base, optimizer, rates) for optimizer, rates in RECIPE_RATES.items()}
    adamw, muon = (rows[best] for _, rows, best in tried.values())
    chosen = replace(base, lr=tried["muon"][0][tried["muon"][2]])
    others = [replace(chosen, seed=seed) for seed in range(1, RECIPE_SEEDS)] + [replace(chosen, weight_decay=RECIPE_DECAY), replace(chosen, schedule="constant")]
    *seeds, decayed, constant = in_bits(lab, list(lab.rows(others)))[0]
    seeds = [muon["loss"], *(row["loss"] for row in seeds)]
    spread = float(np.std(seeds, ddof=1))
    print(f"noise: {len(seeds)} seeds give {', '.join(f'{loss:.4f}' for loss in seeds)}: a standard deviation of {spread:.4f}, of a difference of two runs {spread * 2 ** 0.5:.4f}")

    def deviations(difference):
        return abs(difference) / (spread * 2 ** 0.5)

    (_, start, _), *moments = [moment for moment in muon["norms"] if moment[0] <= (1 - DECAY) * args.steps]
    steps, norms, updates = map(np.array, zip(*moments))
    grown = np.sqrt(np.maximum(norms ** 2 - start ** 2, 1e-12))         # an update at right angles adds its square, whatever was there
    growth, shrinking, c = power(steps, grown), power(steps, updates), math.exp(np.mean(np.log(grown / np.sqrt(steps))))
    print(f"norm of the block matrices, {start:.1f} at the start: " + ", ".join(
        f"{norm:.1f} after {step} steps (grown by {g:.1f}, c sqrt(t) {c * math.sqrt(step):.1f})" for step, norm, g in zip(steps, norms, grown))
        + "\nsize of an update, and relative to the norm: " + ", ".join(f"{update * norm:.3f} {update:.2e}" for update, norm in zip(updates, norms)))
    better, smaller = adamw["loss"] - muon["loss"], muon["norms"][-1][1] / decayed["norms"][-1][1]
    change, worth = decayed["loss"] - muon["loss"], constant["loss"] - muon["loss"]
    unit = in_bits(lab, [])[1]
    findings = [
        f"Muon ends {better:+.4f} {unit} better than AdamW, {deviations(better):.1f} standard deviations: the report's 0.034 "
        + ("was seen here" if better > 2 * spread * 2 ** 0.5 else "was not seen here"),
        f"without weight decay the norms grow beyond their start as t^{growth:.2f} and the relative updates shrink as t^{shrinking:.2f}: the report's square "
        f"root was " + ("seen here" if abs(growth - 0.5) < 0.1 else "not seen here") + (
            "" if abs(shrinking + 0.5) < 0.1 else ", in the norms; the relative updates follow once the start counts for little"),
        f"weight decay {RECIPE_DECAY:g} makes the norms {smaller:.1f} times smaller and changes the loss by {change:+.4f}, {deviations(change):.1f} standard "
        f"deviations: the report's 2.6 times without a clear difference " + ("was seen here" if smaller > 1.5 and deviations(change) < 2 else "was not seen here"),
        f"the decay of the learning rate is worth {worth:+.4f} at equal tokens, {deviations(worth):.1f} standard deviations: the report's 0.025 "
        + ("was seen here" if worth > 2 * spread * 2 ** 0.5 else "was not seen here")]
    data = compare(args) if args.compare else None
    findings += [data["finding"]] if data else []
    print("\n".join(f"- {finding}" for finding in findings))
    save_results("scaling-recipe", {
        "name": lab.corpus.name, "unit": unit, "steps": args.steps, "optimizers": {name: {"lr": rates, "loss": [row["loss"] for row in rows]} for name, (rates, rows, _) in tried.items()},
        "seeds": seeds, "std": spread, "norms": {"without": muon["norms"], "with_decay": decayed["norms"], "power": growth, "update_power": shrinking},
        "muon_better": better, "weight_decay": {"times_smaller": smaller, "change": change}, "decay_worth": worth, "data": data, "findings": findings})
    picture("recipe", lab.corpus.name, [(rates, [math.nan if row["loss"] is None else row["loss"] for row in rows], "o-", name)
                                        for name, (rates, rows, _) in tried.items()], xlabel="learning rate", ylabel=f"loss ({unit})", xscale="log")
    curves = [(*zip(*[moment[:2] for moment in row["norms"]]), "o-", label) for label, row in (("Muon", muon), (f"Muon, weight decay {RECIPE_DECAY:g}", decayed))]
    picture("recipe-norms", lab.corpus.name, [*curves, (steps, np.sqrt(start ** 2 + c ** 2 * steps), "--", "start, and c sqrt(t) at right angles")], xlabel="steps", ylabel="norm of the block matrices")


def default_tokens():
    """The standard library as 8192 kinds of tokens, made where it is not there."""
    place = RUNS / "stdlib"
    if not (place / "tokens.pt").exists():
        write_tokens(*stdlib_parts(), out=place)
    return place / "tokens.pt"


def compare(args):
    """The same model trained on the bytes of each of several texts, and scored on all of them, in bits a byte."""
    labs = [Lab(None, [path], args.device) for path in args.compare]
    names = [printable(path.name)[:24] for path in args.compare]
    crossed = []
    print("trained on \\ bits a byte of   " + "  ".join(f"{name:>24s}" for name in names))
    scored = [lab.identity for lab in labs]
    for i, (lab, name) in enumerate(zip(labs, names)):
        experiment, start = Experiment(lab.config(RECIPE_SIZE), args.steps, lab.batch, embedding_lr=BYTE_EMBEDDING_LR), time.perf_counter()
        row = lab.remembered(experiment, *scored)
        if not row:
            model, optimizers = experiment.models(args.device)
            lab.continued(experiment, model, optimizers, label=name)
            losses = [evaluate(model, other.validation) for other in labs]
            row = lab.remember(experiment, losses[i], time.perf_counter() - start, scored=scored, losses=losses)
        crossed.append([bits_per_byte(math.nan if loss is None else loss, 1) for loss in row["losses"]])
        print(f"{name:>28s}   " + "  ".join(f"{bits:24.3f}" for bits in crossed[-1]), flush=True)
    own, mean = int(np.nanargmin(np.diag(crossed))), int(np.nanargmin(np.mean(crossed, axis=1)))
    finding = (f"{names[own]} has the lowest loss on its own validation part, the model of {names[mean]} the lowest mean over all: losses on different texts "
               f"are no comparison of models, as the report says" if own != mean else
               f"{names[own]} has the lowest loss on its own validation part and over all")
    return {"files": names, "bits_per_byte": crossed, "finding": finding}


# --- the command ----------------------------------------------------------------------------------------------------

EXPERIMENTS = {"sizes": (sizes, "four sizes, the chapter's table (the default)"), "lr": (lr, "exercise 1: learning rates at two sizes"),
               "isoflop": (isoflop, "the report's sweep: the best size at each of three budgets"),
               "fit": (fit, "the law of a table of runs"), "forecast": (forecast, "what the sweep says of 20 times its compute, and that run"),
               "duration": (duration, "one size for longer and longer, against the sweep's law"),
               "recipe": (recipe, "Muon, decay, weight norms and noise, each measured")}


def columns(text):
    """An argparse type: three column names with commas between."""
    names = tuple(text.split(","))
    if len(names) != 3 or not all(names):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not three names with commas between, such as N,D,loss")
    return names


def add_table_flags(parser):
    parser.add_argument("--columns", type=columns, default=("N", "D", "loss"), metavar="N,D,LOSS",
                        help="names of the table's columns of parameters, tokens and loss (default: N,D,loss); C, FLOPs, is read where there is one")
    parser.add_argument("--where", metavar="COLUMN=VALUE", help="take only rows with that value, e.g. used=1")


def add_sweep_flags(parser):
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="train on the bytes of these text files (default: Python's standard library)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="or on a token file or directory of shards")
    parser.add_argument("--scale", type=positive(float), default=1.0, metavar="X", help="take X times each number of FLOPs or tokens (default: 1)")


def parse_args(argv):
    """The experiment's flags; without an experiment's name, sizes."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["sizes", *argv]
    parser = Parser(description=__doc__)
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    for name, (run, text) in EXPERIMENTS.items():
        sub = experiments.add_parser(name, help=text, description=inspect.cleandoc(run.__doc__))
        sub.set_defaults(act=run)
        if name == "fit":
            sub.add_argument("file", type=Path, metavar="FILE.csv", help="a table of runs, with a header")
            add_table_flags(sub)
            sub.add_argument("--bootstrap", type=within(int, 0, 10 ** 6), default=BOOTSTRAP, metavar="N", help=f"resamples for the standard errors (default: {BOOTSTRAP})")
            sub.add_argument("--forecast-above", type=positive(float, 1e40), metavar="C", help="also fit only the runs of up to C FLOPs, and forecast those above")
            continue
        sub.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
        if name in ("sizes", "lr"):
            add_data_flag(sub)
            sub.add_argument("--steps", type=positive(int), default=STEPS, metavar="N", help=f"for each model (default: {STEPS})")
        elif name != "recipe":
            add_sweep_flags(sub)
        else:
            sub.add_argument("--data", type=Path, metavar="FILE", help="token file or directory of shards (default: the standard library as 8192 kinds of tokens)")
            sub.add_argument("--steps", type=positive(int), default=RECIPE_STEPS, metavar="N", help=f"for each model (default: {RECIPE_STEPS})")
            sub.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="texts to train the same model on, two or more")
        if name == "lr":
            sub.add_argument("--rates", type=positive(float), nargs="+", default=LR_SWEEP, metavar="LR", help="learning rates to try (default: 0.001 0.003 0.01)")
        if name == "isoflop":
            sub.add_argument("--from", dest="file", type=Path, metavar="FILE.csv", help="take these runs instead of training any")
            add_table_flags(sub)
        if name == "forecast":
            sub.add_argument("--run", action="store_true", help="train the run that is forecast, and compare")
    args = parser.parse_args(argv)
    if "device" in args:
        args.device = pick_device(args.device)
    if launched() and args.experiment != "isoflop":
        raise UserError(f"{args.experiment} is one process: start it with python; torchrun shares out the runs of isoflop")
    if launched() and args.device.type == "cuda":
        args.device = torch.device("cuda", from_launcher("LOCAL_RANK", 0, torch.cuda.device_count() - 1))
    if "text" in args and args.device.type == "cuda" and not (args.text or args.data or args.experiment == "isoflop" and args.file):
        raise UserError("--device cuda: the report's budgets take billions of tokens; make them with prepare_data.py --tokenizer gpt2 --out DIR FILE..., "
                        "and give --data DIR")
    if args.experiment == "isoflop" and args.where and not args.file:
        raise UserError("--where chooses rows of a table: give it with --from FILE.csv")
    if args.experiment == "recipe" and args.steps < 2 * NORMS:
        raise UserError(f"--steps {args.steps}: the norms are measured {NORMS} times, so take {2 * NORMS} or more")
    if args.experiment == "recipe" and args.compare and len(args.compare) < 2:
        raise UserError("--compare takes two texts or more")
    if args.experiment in ("sizes", "lr") and args.steps < EVALUATIONS:
        raise UserError(f"--steps {args.steps}: the loss is measured {EVALUATIONS} times, so take {EVALUATIONS} or more")
    return args


@command
def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    check_runs()
    keep_memory()
    args.act(args)


if __name__ == "__main__":
    main()
