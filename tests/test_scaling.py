"""scaling.py against a plain training loop and the chapter's twenty losses; its law against closed forms, other optimisers
and public tables; its forecasts against rows that they have not seen; its sweep against runs made one by one."""
import csv
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prepare_data
import scaling
from conftest import ROOT, english_text, save_tokens
from model import GPT, GPTConfig, UserError
from prepare_data import load_corpus
from scaling import Law, Lab, bootstrap, budgets_of, evaluate, exponents, fit_law, forecast_losses, main, optimum, table, train, validation_batches
from train_gpu import learning_rate

CPU = torch.device("cpu")
CHAPTER = {(64, 2): (6.85, 6.63, 6.52, 6.49, 5.83), (96, 3): (6.79, 6.52, 6.39, 6.34, 5.65),
           (128, 4): (6.74, 6.47, 6.33, 6.26, 5.52), (192, 4): (6.70, 6.44, 6.28, 6.22, 5.41)}


@pytest.fixture
def small(monkeypatch):
    """The experiments in seconds: short contexts, small batches, two sizes."""
    for name, value in {"SEQ_LEN": 16, "BATCH": 4, "VAL_BATCHES": 2, "VAL_BATCH": 4, "SIZES": ((32, 1), (64, 2)),
                        "LR_SIZES": ((32, 1), (64, 1)), "WARMUP": 3, "cpu_count": lambda: 1}.items():        # a pool's processes would not see these
        monkeypatch.setattr(scaling, name, value)
    save_tokens(vocab_size=128)


def test_validation_is_the_same_for_every_model_and_is_a_mean(small):
    corpus = load_corpus()
    first, again = validation_batches(corpus, CPU), validation_batches(corpus, CPU)
    assert all(torch.equal(a, b) for one, other in zip(first, again) for a, b in zip(one, other))
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=128, d_model=32, n_head=1, n_layer=1, seq_len=16))
    x, y = (torch.cat(parts) for parts in zip(*first))
    assert evaluate(model, first) == pytest.approx(model(x, y)[1].item(), rel=1e-5) and model.training


def plain_loop(corpus, d_model, n_layer, steps, peak_lr):
    """The chapter's training written as simply as it can be: one window at a time, PyTorch's default AdamW."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=corpus.vocab_size, d_model=d_model, n_layer=n_layer, n_head=d_model // 32, seq_len=scaling.SEQ_LEN))
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                                   {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}],
                                  lr=peak_lr, betas=(0.9, 0.95), fused=False, foreach=False)
    generator, T, losses = torch.Generator().manual_seed(0), scaling.SEQ_LEN, []
    data = torch.from_numpy(corpus.train.arrays[0]).long()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak_lr, scaling.WARMUP)
        starts = torch.randint(0, len(data) - T - 1, (scaling.BATCH,), generator=generator).tolist()
        loss = model(torch.stack([data[j:j + T] for j in starts]), torch.stack([data[j + 1:j + 1 + T] for j in starts]))[1]
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses[-1]


def test_training_is_the_plain_loop(small):
    corpus = load_corpus()
    batches = validation_batches(corpus, CPU)
    row = train(64, 2, corpus, batches, steps=12, peak_lr=3e-3)
    model, last = plain_loop(corpus, 64, 2, 12, 3e-3)
    assert row["train_loss"] == pytest.approx(last, abs=1e-4)
    assert row["val_loss"][-1] == pytest.approx(evaluate(model, batches), abs=1e-4)
    assert row["steps"] == [3, 6, 9, 12] and len(row["val_loss"]) == 4 and row["params"] == model.num_params()


@pytest.mark.parametrize("cores, jobs, processes, threads", [
    (2, [(32, 1, 1e-3), (64, 1, 1e-3), (64, 1, 3e-3), (32, 1, 3e-3)], 2, 1), (8, [(32, 1, 1e-3), (64, 1, 1e-3), (64, 1, 3e-3)], 2, 4)])
def test_side_by_side_the_models_are_those_of_one_after_another(monkeypatch, cores, jobs, processes, threads):
    """In their order, though the largest is started first; no more threads than cores."""
    save_tokens(vocab_size=128)
    args = SimpleNamespace(data=Path("tokens.pt"), device=CPU, steps=4)
    pool, seen = scaling.worker_pool, []

    def noted(get_ready, threads, *source, workers):
        seen.append((workers, threads))
        return pool(get_ready, 1, *source, workers=workers)         # sums in one order

    monkeypatch.setattr(scaling, "worker_pool", noted)
    monkeypatch.setattr(scaling, "cpu_count", lambda: cores)
    together = list(scaling.chapter_rows(args, load_corpus(), jobs))
    monkeypatch.setattr(scaling, "cpu_count", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert list(scaling.chapter_rows(args, load_corpus(), jobs)) == together and seen == [(processes, threads)]
    torch.set_num_threads(before)
    assert [(row["d_model"], row["n_layer"], row["lr"]) for row in together] == jobs


def test_what_a_worker_refuses_is_one_line(monkeypatch, refused):
    """Ids beyond the vocabulary that are found only when the validation windows are read."""
    Path("shards").mkdir()
    for split, bad in (("train", 0), ("val", 1)):
        ids = np.zeros(250_000, np.uint16)
        ids[200_000:] = bad * 60_000
        ids.tofile(f"shards/{split}.bin")
    monkeypatch.setattr(scaling, "cpu_count", lambda: 2)
    monkeypatch.setattr(scaling, "SIZES", ((32, 1), (32, 1)))
    refused(main, "sizes", "--data", "shards", "--steps", "4", words=("60,000", "vocabulary"))


def test_sizes_and_what_it_leaves_behind(small, capsys):
    main(["--steps", "8"])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-sizes.json"))
    assert out.startswith("corpus: test") and results["corpus"] == "test"
    assert [(row["d_model"], row["n_layer"], len(row["val_loss"])) for row in results["rows"]] == [(32, 1, 4), (64, 2, 4)]
    assert f"{results['rows'][1]['val_loss'][3]:.2f}" in out
    assert f"{results['rows'][1]['val_loss'][3] / math.log(2) / 4:.3f}" in out          # bits a byte, at 4 bytes a token
    assert open("runs/scaling-sizes.png", "rb").read(4) == b"\x89PNG"


def test_lr_marks_the_best_and_says_when_it_is_at_the_edge(small, capsys):
    main(["lr", "--steps", "8", "--rates", "1e-5", "1e-4", "3e-3"])
    out, rows = capsys.readouterr().out, json.load(open("runs/scaling-lr.json"))["rows"]
    assert len(rows) == 6 and out.count("*") == 2 and out.count("at the sweep's edge") == 2
    for i in (0, 3):
        assert min(rows[i:i + 3], key=lambda row: row["val_loss"][-1])["lr"] == 3e-3


def test_a_rate_that_diverges_is_not_the_best(small, capsys, monkeypatch):
    monkeypatch.setattr(scaling, "WARMUP", 1)
    main(["lr", "--steps", "8", "--rates", "1e18", "1e-3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "nan" in line]
    assert len(lines) == 2 and all("*" in line.split("nan")[0] and "0.001, at the sweep's edge" in line for line in lines)
    main(["lr", "--steps", "8", "--rates", "1e18"])
    assert capsys.readouterr().out.count("none: no loss is finite") == 2
    assert json.load(open("runs/scaling-lr.json"))["rows"][0]["train_loss"] is None


def test_a_token_file_of_the_earlier_chapters(small, capsys):
    save_tokens(vocab_size=8192, meta=False, n_train=3000, n_val=600)
    main(["--steps", "4"])
    assert "no meta" in (out := capsys.readouterr().out) and "n/a" in out


def test_the_progress_bar_keeps_off_what_is_no_terminal(small, capsys):
    main(["--steps", "4"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv, words", [
    (["--steps", "3"], "--steps 3"), (["--steps", "0"], "positive"), (["sizes", "--device", "cuda:9"], "--device"), (["lr", "--rates", "0"], "--rates"),
    (["nonsense"], "nonsense"), (["--data", "none.pt"], "none.pt"), (["--rates", "1"], "--rates"), (["isoflop", "--where", "a=1"], "--from"),
    (["isoflop", "--text", "none.txt"], "none.txt"), (["isoflop", "--device", "cuda:9"], "--device"), (["forecast", "--scale", "0"], "--scale"),
    (["fit"], "FILE.csv"), (["fit", "none.csv"], "none.csv"), (["fit", "none.csv", "--bootstrap", "-1"], "--bootstrap"),
    (["fit", "none.csv", "--columns", "N,D"], "--columns"), (["recipe", "--steps", "11"], "--steps 11"), (["recipe", "--compare", "a.txt"], "--compare"),
    (["isoflop", "--scale", "1e-4"], "--scale")])
def test_refusals(argv, words, small, refused, tmp_path):
    refused(main, *argv, words=(words,))
    assert not (tmp_path / "runs").exists()


# --- the law --------------------------------------------------------------------------------------------------------

TRUE = Law(E=1.8, A=480.0, B=2000.0, alpha=0.35, beta=0.37)
SIZES_TRIED = np.geomspace(1e7, 3e9, 7)


def runs_from(law=TRUE, budgets=(1e19, 1e20, 1e21), sizes=SIZES_TRIED, noise=0.0, seed=0):
    """An IsoFLOP sweep of runs that obey the law, up to noise in log loss."""
    C, N = (column.ravel() for column in np.meshgrid(budgets, sizes, indexing="ij"))
    D = C / (6 * N)
    loss = law.loss(N, D) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(N)))
    return table([{"N": n, "D": d, "loss": value, "C": c} for n, d, value, c in zip(N, D, loss, C)])


def write_csv(runs, path="runs.csv", **extra):
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(["N", "D", "loss", *extra])
        writer.writerows([repr(float(r.N)), repr(float(r.D)), repr(float(r.loss)), *(values[i] for values in extra.values())] for i, r in enumerate(runs))
    return path


def plain_objective(law, runs, delta=1e-3):
    """Hoffmann and others' objective, written as the paper does: the Huber loss of log-sum-exp less log loss, summed."""
    r = np.logaddexp.reduce([math.log(law.A) - law.alpha * np.log(runs.N), math.log(law.B) - law.beta * np.log(runs.D),
                             np.full(len(runs), math.log(law.E))]) - np.log(runs.loss)
    return float(np.where(np.abs(r) <= delta, r * r / 2, delta * (np.abs(r) - delta / 2)).sum())


def test_a_law_comes_back_from_runs_that_obey_it():
    fitted = fit_law(runs_from())
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(fitted.law, name) == pytest.approx(getattr(TRUE, name), rel=1e-5)
    assert fitted.law.n_exponent == pytest.approx(0.37 / 0.72) and fitted.objective < 1e-15 and not fitted.warnings


def test_the_best_n_is_where_no_neighbour_is_better():
    C = 1e21
    N = TRUE.best_n(C)
    losses = [TRUE.loss(N * share, C / (6 * N * share)) for share in (0.99, 1.0, 1.01)]
    assert losses[1] < min(losses[0], losses[2])
    assert TRUE.best_n(100 * C) / N == pytest.approx(100 ** TRUE.n_exponent)


def test_derivatives_are_those_of_autograd():
    runs = runs_from(noise=0.01)
    fitted = fit_law(runs)
    rows, weight = scaling.about(fitted.centre, runs), torch.arange(1.0, len(runs) + 1, dtype=torch.float64)
    for theta in (fitted.theta, fitted.theta + 0.05 * torch.tensor([1.0, -1.0, 0.5, 1.0, -0.3], dtype=torch.float64)):
        value, gradient, hessian = scaling.derivatives(theta, rows, weight)
        expected = torch.func.grad(scaling.misfit)(theta, rows, weight)
        assert value.item() == pytest.approx(scaling.misfit(theta, rows, weight).item())
        assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-6)
        assert torch.allclose(hessian, torch.func.jacfwd(torch.func.grad(scaling.misfit))(theta, rows, weight), rtol=1e-8, atol=1e-3)


def test_no_other_optimiser_finds_a_better_fit():
    """torch's LBFGS, in the plain parameters, from many starts; and the objective is the paper's."""
    runs = runs_from(noise=0.01)
    fitted = fit_law(runs)
    assert fitted.objective == pytest.approx(plain_objective(fitted.law, runs), rel=1e-9)
    rows, weight, found = scaling.about(fitted.centre, runs), torch.ones(len(runs), dtype=torch.float64), []
    for start in scaling.grid()[::130]:
        theta = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([theta], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            value = scaling.misfit(theta, rows, weight)
            value.backward()
            return value
        optimizer.step(closure)
        found.append(closure().item() * scaling.DELTA ** 2)
    assert fitted.objective <= min(found) * (1 + 1e-9) and min(found) == pytest.approx(fitted.objective, rel=1e-3)


@pytest.mark.parametrize("change, expected", [
    (lambda r: table([{"N": x.N, "D": x.D, "loss": 7 * x.loss, "C": x.C} for x in r]), {"E": 7, "A": 7, "B": 7}),
    (lambda r: table([{"N": x.N / 1e6, "D": x.D, "loss": x.loss, "C": x.C} for x in r]), {"A": 1e6 ** -0.3}),
    (lambda r: r[np.tile(np.arange(len(r)), 3)], {"objective": 3}),
    (lambda r: r[np.random.default_rng(0).permutation(len(r))], {}),
    (lambda r: table([{"N": x.D, "D": x.N, "loss": x.loss, "C": x.C} for x in r]), "swapped")], ids=["loss times k", "N in millions", "tripled", "shuffled", "swapped"])
def test_what_does_not_matter_changes_nothing(change, expected):
    runs = runs_from(noise=0.01)
    before, after = fit_law(runs), fit_law(change(runs))
    values = {**vars(before.law), "objective": before.objective, "n_exponent": before.law.n_exponent}
    if expected == "swapped":
        values |= {"A": values["B"], "B": values["A"], "alpha": values["beta"], "beta": values["alpha"], "n_exponent": 1 - values["n_exponent"]}
        expected = {}
    if "A" in expected and "E" not in expected:
        expected = {"A": 1e6 ** -before.law.alpha}
    for name, value in {**vars(after.law), "objective": after.objective, "n_exponent": after.law.n_exponent}.items():
        assert value == pytest.approx(values[name] * expected.get(name, 1), rel=1e-5), name


def test_products_beyond_64_bits_are_no_trouble():
    runs = runs_from(budgets=(1e28, 1e29, 1e30), sizes=np.geomspace(1e12, 1e15, 6))
    write_csv(runs)
    main(["fit", "runs.csv", "--bootstrap", "20"])
    assert json.load(open("runs/scaling-fit.json"))["n_exponent"] == pytest.approx(TRUE.n_exponent, rel=1e-3)


def test_a_resample_is_fitted_as_its_rows_are():
    """Weights stand for rows drawn again: the same law as a fit to the rows themselves, from any start."""
    runs = runs_from(noise=0.01)
    fitted = fit_law(runs)
    drawn = np.random.default_rng(5).multinomial(len(runs), np.full(len(runs), 1 / len(runs)), 3)
    for theta, counts in zip(bootstrap(fitted, runs, 3, seed=5), drawn):
        again = fit_law(runs[np.repeat(np.arange(len(runs)), counts)])
        assert scaling.laws(theta, fitted.centre) == pytest.approx(list(vars(again.law).values()), rel=1e-3)


# --- what cannot be fitted, and what is doubtful --------------------------------------------------------------------

def twenty_tokens_a_parameter(jitter=0.0):
    N = np.geomspace(1e7, 1e10, 12)
    D = 20 * N * np.exp(jitter * np.random.default_rng(0).standard_normal(12))
    return table([{"N": n, "D": d, "loss": TRUE.loss(n, d), "C": 6 * n * d} for n, d in zip(N, D)])


@pytest.mark.parametrize("bad", ["nan", "inf", "-1", "0", "", "two"])
@pytest.mark.parametrize("column", ["N", "D", "loss"])
def test_a_cell_that_is_no_number_is_named_by_row_and_column(bad, column, refused):
    lines = open(write_csv(runs_from())).read().splitlines()
    cells = lines[5].split(",")
    cells[["N", "D", "loss"].index(column)] = bad
    Path("runs.csv").write_text("\n".join([*lines[:5], ",".join(cells), *lines[6:]]))
    refused(main, "fit", "runs.csv", words=("row 5", column, bad[:3]))


@pytest.mark.parametrize("runs, words", [
    (runs_from()[:5], ("5 rows", "6 or more")), (runs_from(sizes=SIZES_TRIED[:2]), ("2 distinct N", "3 or more")),
    (runs_from(budgets=(1e20,)), ("do not vary apart",)), (twenty_tokens_a_parameter(), ("do not vary apart", "no exponent", "above 10")),
    (twenty_tokens_a_parameter(0.1), ("do not vary apart",))], ids=["five rows", "two sizes", "one budget", "D = 20 N", "D about 20 N"])
def test_rows_that_cannot_give_a_law_are_refused(runs, words, refused):
    write_csv(runs)
    refused(main, "fit", "runs.csv", words=words)
    assert not Path("runs/scaling-fit.json").exists()


@pytest.mark.parametrize("content, argv, words", [
    ("", (), ("no column", "N")), ("a,b\n1,2\n", (), ("no column 'N'", "--columns")), ("N,D,loss\n", (), ("no rows",)),
    ("N,D,loss\n1,2,3\n", ("--where", "used=1"), ("no column 'used'",)), ("N,D,loss,used\n1,2,3,0\n", ("--where", "used=1"), ("no rows", "used=1")),
    (b"\xff\xfe\x00N", (), ("runs.csv",)), ("N,D,loss\n1,2\n", (), ("row 1", "loss")), ("N,D,loss\n1,2,3\n1,234,2,3\n", (), ("row 2", "more cells")),
    ("N,D,loss\n1,2,1e-320\n", (), ("row 1", "loss")), ("N;D;loss\n1;2;3\n", (), ("no column 'N' among N;D;loss",)), ("N,D,lo\x1b[31mss\n1,2,3\n", (), ("lo?[31mss",)),
    ("N,D,loss\n" + "9" * 200_000 + ",1,1\n", (), ("not a .csv table",)), ("N,D,loss\n" + "1,2,3\n" * 100_001, (), ("100001 rows", "100,000 at most"))])
def test_what_is_no_table_of_runs_is_refused(content, argv, words, refused):
    Path("runs.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(main, "fit", "runs.csv", *argv, words=words)


def test_rows_may_be_chosen_and_columns_named(capsys):
    runs = runs_from()
    write_csv(runs, used=["1.0"] * (len(runs) - 3) + ["0"] * 3)
    text = Path("runs.csv").read_text().replace("N,D,loss", "params,tokens,bpb")
    Path("runs.csv").write_text(text)
    main(["fit", "runs.csv", "--columns", "params,tokens,bpb", "--where", "used=1", "--bootstrap", "0"])
    results = json.load(open("runs/scaling-fit.json"))
    assert results["rows"] == len(runs) - 3 and results["alpha"] == pytest.approx(TRUE.alpha, rel=1e-4)
    assert results["bootstrap"] == {"n": 0, "se": None} and results["forecast"] is None


@pytest.mark.parametrize("loss, lost", [(lambda r: np.full(len(r), 2.0), ("A/N^alpha", "B/D^beta")), (lambda r: 1.8 + 480 / r.N ** 0.35, ("B/D^beta",)),
                                        (lambda r: 1.8 + 2000 / r.D ** 0.37, ("A/N^alpha",))], ids=["constant", "D does nothing", "N does nothing"])
def test_a_term_that_the_rows_do_not_show_gives_no_exponent(loss, lost, capsys):
    runs = runs_from()
    runs.loss = loss(runs)
    write_csv(runs)
    main(["fit", "runs.csv", "--bootstrap", "20"])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-fit.json"))
    assert results["n_exponent"] is None and "exponent of N  none" in out
    for term in ("A/N^alpha", "B/D^beta"):
        assert (f"the term {term} is not identified" in out) == (term in lost)


def test_headers_may_have_blanks_and_files_windows_ends():
    text = open(write_csv(runs_from())).read().replace("N,D,loss", " N , D , loss ").replace("\n", "\r\n")
    Path("runs.csv").write_text("\ufeff" + text, newline="")
    assert fit_law(scaling.read_runs(Path("runs.csv"))).law.alpha == pytest.approx(TRUE.alpha, rel=1e-4)


def test_doubts_are_said_and_the_fit_goes_on(capsys):
    clean = runs_from(noise=0.002)
    outlying = clean.copy()
    outlying.loss[4] *= 1.25
    falling = runs_from(Law(1e-9, 480.0, 2000.0, 0.35, 0.37), noise=0.001)
    for runs, words in ((clean[np.append(np.arange(len(clean)), [0, 0])], "2 rows are exact copies"), (outlying, "1 outlier beyond 6 robust standard deviations"),
                        (falling, "the floor is not identified (E near 0)"), (runs_from(budgets=(1e19, 1e20), noise=0.002), "2 budgets: with fewer than three")):
        assert any(words in warning for warning in fit_law(runs).warnings), words
    write_csv(outlying)
    main(["fit", "runs.csv", "--bootstrap", "50"])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-fit.json"))
    assert "warning: 1 outlier" in out and "row 5 (+2" in out and len(results["warnings"]) == 1 and results["bootstrap"]["n"] == 50
    assert set(results["bootstrap"]["se"]) == {"E", "A", "B", "alpha", "beta", "n_exponent"} and results["delta"] == 1e-3
    assert open("runs/scaling-fit.png", "rb").read(4) == b"\x89PNG"


def test_an_optimiser_that_does_not_move_is_found_out(monkeypatch):
    runs = runs_from(noise=0.01)
    monkeypatch.setattr(scaling, "ITERATIONS", 0)
    assert any("sits on its start" in warning for warning in fit_law(runs).warnings)


# --- forecasts ------------------------------------------------------------------------------------------------------

def test_an_interval_covers_runs_that_obey_the_law_and_grows_with_the_distance():
    runs = runs_from(budgets=np.geomspace(1e19, 1e21, 6), noise=0.005)
    fitted, far = fit_law(runs), runs_from(budgets=(3e21, 3e22, 3e23), noise=0.005, seed=1)
    told = forecast_losses(fitted, runs, far, bootstrap(fitted, runs, 200))
    low, high = told["interval"]
    assert np.mean((low <= far.loss) & (far.loss <= high)) >= 0.9 and told["cuts"] >= 3
    for narrower in (told["plain"],):
        assert np.all(low < narrower[0]) and np.all(narrower[1] < high)
    width = np.log(high / low).reshape(3, -1).mean(axis=1)
    assert width[0] < width[1] < width[2] and np.all(told["decades"].reshape(3, -1) > [[0.47], [1.47], [2.47]])


def test_what_the_form_has_missed_within_the_rows_widens_the_interval():
    """A law that bends: losses fall faster and faster below any E + A/N^a + B/D^b, as the report's did. The bootstrap, which
    believes the form, fails; the forecasts within the rows have seen it."""
    bend = lambda runs: table([{"N": r.N, "D": r.D, "loss": r.loss * (1 - 0.004 * math.log10(r.C / 1e19) ** 2), "C": r.C} for r in runs])
    runs, far = bend(runs_from(budgets=np.geomspace(1e19, 1e22, 10), noise=0.002)), bend(runs_from(budgets=(1e23, 2e23), noise=0.002, seed=1))
    fitted = fit_law(runs)
    told = forecast_losses(fitted, runs, far, bootstrap(fitted, runs, 200))
    covered = {name: np.mean((told[name][0] <= far.loss) & (far.loss <= told[name][1])) for name in ("plain", "interval")}
    assert covered["plain"] < 0.3 and covered["interval"] >= 0.9


def test_with_one_forecast_within_the_sweep_what_is_known_of_others_counts():
    runs = runs_from(noise=0.003)
    fitted = fit_law(runs)
    assert len(scaling.backtests(runs)) == 1
    told = forecast_losses(fitted, runs, runs_from(budgets=(2e22,)), bootstrap(fitted, runs, 100))
    half = np.log(told["interval"][1] / told["interval"][0]) / 2
    assert np.all(half > 2.353 * 0.02 * told["decades"]) and np.all(half < 0.5)


# --- parabolas ------------------------------------------------------------------------------------------------------

def parabola(C, best, height=1.0, sizes=None, sign=1.0):
    N = np.array(sizes if sizes is not None else best * np.geomspace(0.2, 5, 6))
    return [{"N": n, "D": C / (6 * n), "loss": height + sign * 0.1 * math.log(n / best) ** 2, "C": C} for n in N]


def test_optima_and_exponents_are_those_of_exact_parabolas():
    runs = table([row for C in (1e17, 1e18, 1e19) for row in parabola(C, 0.01 * C ** 0.55, 2.0)])
    optima = [optimum(budget) for budget in budgets_of(runs)]
    for C, found in zip((1e17, 1e18, 1e19), optima, strict=True):
        assert found["valid"] and found["C"] == pytest.approx(C) and found["loss"] == pytest.approx(2.0)
        assert found["N"] == pytest.approx(0.01 * C ** 0.55) and found["D"] == pytest.approx(C ** 0.45 / 0.06)
    powers = exponents(optima)
    assert powers["n_exponent"] == pytest.approx(0.55) and powers["d_exponent"] == pytest.approx(0.45)
    assert powers["d_coefficient"] == pytest.approx(1 / 0.06, rel=1e-6)


def test_parabolas_that_show_no_optimum_are_left_out_and_counted(capsys):
    rows = [*parabola(1e17, 1e7), *parabola(1e18, 3e7), *parabola(1e19, 1e8, sign=-1.0), *parabola(1e20, 3e8, sizes=[1e9, 2e9, 3e9]),
            *parabola(1e21, 1e9, sizes=[1e9, 2e9])]
    with open("runs.csv", "w") as f:
        f.write("C,N,D,loss\n" + "\n".join(f"{r['C']},{r['N']},{r['D']},{r['loss']}" for r in rows))
    main(["isoflop", "--from", "runs.csv"])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-isoflop.json"))
    assert [o["valid"] for o in results["optima"]] == [True, True, False, False, False]
    assert "opens downwards" in out and "outside the sizes" in out and "fewer than three sizes" in out
    assert "3 of 5 parabolas left out" in out and "2 budgets give an optimum" in out
    assert results["n_exponent"] == pytest.approx(math.log(3) / math.log(10)) and len(results["runs"]) == len(rows)


# --- the sweep ------------------------------------------------------------------------------------------------------

@pytest.fixture
def bytes_of_text(monkeypatch):
    """The sweep in seconds, on the bytes of a small text."""
    Path("a.txt").write_text(english_text(200))
    for name, value in {"BYTE_SEQ_LEN": 16, "BYTE_BATCH": 2, "VAL_WINDOWS": 16, "LADDER": ((64, 1), (96, 1)),
                        "BUDGETS": {C: ((16, 1), (24, 1), (32, 1)) for C in (5e7, 15e7, 45e7)},
                        "DURATION_SIZE": (16, 1), "DURATIONS": (640, 1280, 2560, 5120), "BYTE_SEEDS": 1}.items():
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(scaling, "cpu_count", lambda: 1)        # a pool's processes would not see these
    monkeypatch.setattr(scaling, "FACTOR", 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ["--text", "a.txt"]
    torch.set_num_threads(threads)


def lab():
    return Lab(None, [Path("a.txt")], CPU)


def test_experiments_cost_what_the_report_counts(bytes_of_text):
    experiment = lab().experiment((32, 1), C=1e9)
    N = 12 * 32 ** 2 + 256 * 32
    assert scaling.counted(experiment.config) == (N, 6 * N + 12 * 1 * 16 * 32)
    assert experiment.C == experiment.D * (6 * N + 12 * 16 * 32) and abs(experiment.C / 1e9 - 1) < 0.02
    assert lab().experiment((32, 1), D=6400).D == 6400


def test_on_a_gpu_the_sweep_is_the_reports():
    """Fourteen runs, 16M to 180M, and at each budget its optimum, 33M, 62M and 116M, lies inside the sizes tried."""
    save_tokens(vocab_size=50_257, n_train=5000, n_val=5000)
    here = Lab(Path("tokens.pt"), None, torch.device("cuda"))
    sizes = {C: [scaling.counted(here.config(depth))[0] for depth in depths] for C, depths in scaling.REPORT_BUDGETS.items()}
    assert sum(map(len, sizes.values())) == 14 and {f"{n / 1e6:.0f}M" for n in map(lambda f: f(sum(sizes.values(), [])), (min, max))} == {"16M", "180M"}
    for (C, tried), best in zip(sizes.items(), (33e6, 62e6, 116e6), strict=True):
        assert min(tried) < best < max(tried)
        e = here.experiment(scaling.REPORT_BUDGETS[C][0], C=C)
        assert abs(e.C / C - 1) < 1e-3 and e.config.seq_len == 2048 and e.config.padded_vocab == 50_304 and e.batch % scaling.REPORT_MICRO_BATCH == 0


def test_micro_batches_are_the_batch(bytes_of_text):
    """What a GPU takes in parts is the step that a CPU takes whole."""
    here = lab()
    experiment = replace(here.experiment((16, 1), D=320), batch=6, steps=3)
    losses = []
    for micro_batch in (None, 2, 4):
        model, optimizers = experiment.models(CPU)
        losses.append([loss.item() for _, loss in scaling.training(model, optimizers, here.batches(experiment), experiment.share, range(3), "", micro_batch)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_sweep_is_remembered_and_goes_on(bytes_of_text, capsys, monkeypatch):
    experiments = [lab().experiment(size, C=2e8) for size in ((16, 1), (32, 1))]
    first = [row["loss"] for row in lab().rows(experiments)]
    path = lab().path(experiments[1])
    path.write_text("{ torn")
    again = lab()
    again.continued = None                              # nothing may be trained
    assert again.row(experiments[0])["loss"] == first[0]
    assert lab().row(experiments[1])["loss"] == first[1] and json.loads(path.read_text())["loss"] == first[1]
    Path("a.txt").write_text(english_text(201))
    assert lab().remembered(experiments[0]) is None     # another text, another run


def test_a_branch_of_the_trunk_is_the_run_of_its_length(bytes_of_text):
    here = lab()
    ended = [here.experiment((16, 1), D=D) for D in (640, 1280, 2560, 5120)]
    scaling.train_durations(here, ended)
    branched = [here.remembered(e)["loss"] for e in ended]
    constant = [here.remembered(replace(e, schedule="constant"))["loss"] for e in ended[:-1]]
    assert here.remembered(replace(ended[-1], schedule="constant")) is None
    for e, loss in [*zip(ended, branched), *zip((replace(e, schedule="constant") for e in ended), constant)]:
        here.path(e).unlink()
        assert here.row(e)["loss"] == loss


def test_isoflop_and_what_it_leaves_behind(bytes_of_text, capsys):
    main(["isoflop", *bytes_of_text])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-isoflop.json"))
    assert len(results["runs"]) == 9 and len(results["optima"]) == 3 and "a.txt, as bytes" in out
    for run in results["runs"]:
        assert f"{run['loss']:.4f}" in out and f"{run['loss'] / math.log(2):.3f}" in out
        assert run["loss"] < math.log(256)
    assert open("runs/scaling-isoflop.png", "rb").read(4) == b"\x89PNG"


def test_worker_processes_and_ranks_train_the_same_runs(monkeypatch):
    Path("a.txt").write_text(english_text(60))
    monkeypatch.setattr(scaling, "cpu_count", lambda: 2)
    experiments = [scaling.Experiment(replace(lab().config((16, 1)), n_layer=n), 3, 2) for n in (1, 2)]
    pooled = [row["loss"] for row in lab().rows(experiments)]
    monkeypatch.setattr(scaling, "cpu_count", lambda: 1)
    for e in experiments:
        lab().path(e).unlink()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert [row["loss"] for row in lab().rows(experiments)] == pooled
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_an_interrupt_ends_a_sweep_at_once_and_it_goes_on():
    Path("a.txt").write_text(english_text(200))
    script = subprocess.Popen([sys.executable, str(ROOT / "scaling.py"), "isoflop", "--text", "a.txt"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(Path("runs/scaling-runs").glob("*.json")) and script.poll() is None:
        time.sleep(0.1)
    os.killpg(script.pid, signal.SIGINT)                # as a terminal does, to the workers too
    start = time.monotonic()
    assert script.wait(timeout=60) == 130 and time.monotonic() - start < 10 and script.stderr.read().strip().endswith("interrupted")
    whole = [json.loads(path.read_text()) for path in Path("runs/scaling-runs").iterdir()]
    assert whole and all(row["loss"] > 0 for row in whole)


def test_a_text_too_short_for_a_context_is_refused(refused):
    Path("short.txt").write_text("one line\n\nanother\n")
    refused(main, "isoflop", "--text", "short.txt", words=("short.txt", "a context of 128"))
    Path("one.txt").write_text("one paragraph")
    refused(main, "isoflop", "--text", "one.txt", words=("one.txt", "one document"))


def test_ranks_share_out_the_runs(bytes_of_text, monkeypatch):
    experiments = [lab().experiment((16, 1), D=D) for D in (320, 640, 960)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        lab().share_out(experiments)
    assert ended.value.code == 0 and [lab().remembered(e) is not None for e in experiments] == [False, True, False]
    monkeypatch.setenv("RANK", "0")
    lab().share_out(experiments)
    assert all(map(lab().remembered, experiments))


@pytest.mark.parametrize("argv", (["sizes"], ["forecast"], ["duration"]))
def test_what_is_one_process_is_refused_under_torchrun(argv, refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    refused(main, *argv, words=(argv[0], "start it with python"))


def test_a_forecast_is_written_before_its_run_and_keeps_its_date(bytes_of_text, capsys, monkeypatch):
    monkeypatch.setattr(scaling, "MAX_CONDITION", 1e9)
    main(["forecast", *bytes_of_text])
    before = json.load(open("runs/scaling-forecast.json"))
    assert before["observed"] is None and before["plain"][0] <= before["point"] <= before["plain"][1]
    assert before["interval"][0] < before["point"] < before["interval"][1] and before["unit"] == "bits a byte"
    assert before["rows_sha256"] == hashlib.sha256(json.dumps(before["rows"], sort_keys=True).encode()).hexdigest()
    assert before["extrapolation"] == pytest.approx(3, rel=0.05) and f"{before['extrapolation']:.1f} times" in capsys.readouterr().out
    before["date"] = "2020-01-01T00:00:00+00:00"
    Path("runs/scaling-forecast.json").write_text(json.dumps(before))
    main(["forecast", "--run", *bytes_of_text])
    after, out = json.load(open("runs/scaling-forecast.json")), capsys.readouterr().out
    assert after["date"] == before["date"] and after["point"] == before["point"] and f"{after['observed']:.4f}" in out
    low, high = after["interval"]
    assert after["held"]["interval"] == (low <= after["observed"] <= high) and ("ours held" in out) == after["held"]["interval"]


def test_duration_predicts_observes_and_fits_again(bytes_of_text, capsys):
    main(["duration", *bytes_of_text])
    results, out = json.load(open("runs/scaling-duration.json")), capsys.readouterr().out
    assert [run["D"] for run in results["runs"]] == [640, 1280, 2560, 5120] and results["unit"] == "bits a byte"
    before = Law(**results["before"])
    for run in results["runs"]:
        assert run["predicted"] == pytest.approx(float(before.loss(run["N"], run["D"]))) and f"{run['loss']:.4f}" in out
    assert [run["decay_worth"] is None for run in results["runs"]] == [False, False, False, True]
    assert "the report: 0.823 to 0.63" in out


# --- the recipe -----------------------------------------------------------------------------------------------------

def test_the_recipe_says_what_was_measured(bytes_of_text, capsys, monkeypatch):
    for name, value in {"RECIPE_SIZE": (16, 1), "RECIPE_SEEDS": 3, "RECIPE_RATES": {"adamw": (1e-3, 1e-2), "muon": (1e-2, 2e-2)}, "RECIPE_WIDEST": 3}.items():
        monkeypatch.setattr(scaling, name, value)
    save_tokens(vocab_size=128)
    Path("b.txt").write_text(english_text(100, seed=3).upper())
    main(["recipe", "--data", "tokens.pt", "--steps", "24", "--compare", "a.txt", "b.txt"])
    out, results = capsys.readouterr().out, json.load(open("runs/scaling-recipe.json"))
    assert len(results["seeds"]) == 3 and results["std"] == pytest.approx(np.std(results["seeds"], ddof=1))
    best = {name: min(tried["loss"]) for name, tried in results["optimizers"].items()}
    assert results["muon_better"] == pytest.approx(best["adamw"] - best["muon"]) and len(results["optimizers"]["adamw"]["lr"]) == 3
    steps, norms, _ = zip(*results["norms"]["without"])
    assert steps == (0, 4, 8, 12, 16, 20, 24) and results["weight_decay"]["times_smaller"] == pytest.approx(norms[-1] / results["norms"]["with_decay"][-1][1])
    # Each difference in standard deviations of a difference; each verdict from the figures.
    spread = results["std"] * math.sqrt(2)
    for difference, line in ((results["muon_better"], 0), (results["weight_decay"]["change"], 2), (results["decay_worth"], 3)):
        finding = results["findings"][line]
        assert f"{difference:+.4f}" in finding and f"{abs(difference) / spread:.1f} standard" in finding and finding in out
    for difference, line in ((results["muon_better"], 0), (results["decay_worth"], 3)):
        assert ("was seen here" in results["findings"][line]) == (difference > 2 * spread)
    cross = np.array(results["data"]["bits_per_byte"])
    assert cross[0, 0] < cross[0, 1] and cross[1, 1] < cross[1, 0] and "a.txt" in out         # each does best at home
    monkeypatch.setattr(Lab, "continued", None)         # a second time nothing is trained
    main(["recipe", "--data", "tokens.pt", "--steps", "24", "--compare", "a.txt", "b.txt"])
    assert json.load(open("runs/scaling-recipe.json")) == results
    assert Path("runs/scaling-recipe.png").exists() and Path("runs/scaling-recipe-norms.png").exists()


def test_a_sweep_of_rates_widens_until_its_best_is_inside(bytes_of_text, capsys):
    here = lab()
    loss = {0.25: 3.0, 0.5: 2.0, 1.0: 1.0, 2.0: 0.5, 4.0: 0.7, 8.0: None}
    here.rows = lambda experiments: [{"loss": loss[e.lr]} for e in experiments]
    rates, rows, best = scaling.swept(here, here.experiment((16, 1), D=320), "muon", (0.5, 1.0))
    assert rates == [0.5, 1.0, 2.0, 4.0] and best == 2 and "2: " in capsys.readouterr().out
    loss.update({2.0: None, 1.0: None, 0.5: None})
    with pytest.raises(UserError, match="no learning rate"):
        scaling.swept(here, here.experiment((16, 1), D=320), "muon", (0.5, 1.0))


def test_the_norms_that_are_noted_are_the_matrices(bytes_of_text):
    here = lab()
    experiment = replace(here.experiment((16, 1), D=32 * 12), schedule="constant")
    model, optimizers = experiment.models(CPU)
    norms = []
    here.continued(experiment, model, optimizers, norms=norms)
    total = math.sqrt(sum(p.double().square().sum().item() for p in model.blocks.parameters()))
    assert [step for step, *_ in norms] == [0, 2, 4, 6, 8, 10, 12] and norms[-1][1] == pytest.approx(total)
    again, optimizers = experiment.models(CPU)
    here.continued(experiment, again, optimizers, last=11)
    update = math.sqrt(sum((p - q).double().square().sum().item() for p, q in zip(model.blocks.parameters(), again.blocks.parameters())))
    assert norms[-1][2] == pytest.approx(update / total, rel=1e-4)


# --- the public tables, where SCALING_DATA names their directory ------------------------------------------------------

@pytest.fixture
def public():
    place = Path(os.environ.get("SCALING_DATA", "none"))
    if not (place / "chinchilla_epoch.csv").exists():
        pytest.skip("SCALING_DATA names no directory with chinchilla_epoch.csv and isoflop_llama3.csv")
    return place


def test_chinchillas_table_gives_the_known_law(public, capsys):
    main(["fit", str(public / "chinchilla_epoch.csv"), "--where", "used=1", "--forecast-above", "1e21"])
    results = json.load(open("runs/scaling-fit.json"))
    assert results["rows"] == 240 and results["objective"] <= 0.00101827405
    for name, value in {"E": "1.8172", "A": "477.8", "B": "2143", "alpha": "0.34731", "beta": "0.36717", "n_exponent": "0.5139"}.items():
        assert f"{results[name]:.{len(value.partition('.')[2])}f}" == value
    for name, value in {"A": 124.5, "B": 1293, "E": 0.0257, "alpha": 0.0154, "beta": 0.0206}.items():
        assert results["bootstrap"]["se"][name] == pytest.approx(value, rel=0.2)
    forecast = results["forecast"]
    assert forecast["rows"] == 23 and forecast["plain_coverage"] < 0.2 and forecast["coverage"] >= 0.8 and forecast["width"] < 0.15


def test_llama_3s_table_gives_the_known_exponent(public):
    main(["isoflop", "--from", str(public / "isoflop_llama3.csv")])
    results = json.load(open("runs/scaling-isoflop.json"))
    assert results["d_exponent"] == pytest.approx(0.537, abs=5e-4) and results["d_coefficient"] == pytest.approx(0.299, abs=5e-4)


@pytest.mark.slow
def test_the_chapters_twenty_losses(novel, capsys):
    prepare_data.main([str(novel)])
    main([])
    rows = json.load(open("runs/scaling-sizes.json"))["rows"]
    assert [f"{row['params'] / 1e6:.2f}M" for row in rows] == ["0.62M", "1.12M", "1.80M", "3.34M"]
    for row in rows:
        for ours, chapters in zip([*row["val_loss"], row["train_loss"]], CHAPTER[row["d_model"], row["n_layer"]], strict=True):
            assert abs(ours - chapters) <= 0.01, (row["d_model"], ours, chapters)
