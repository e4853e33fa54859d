"""scaling.py against a plain training loop, its schedule's closed form, and the chapter's twenty losses."""
import json
import math

import pytest
import torch

import prepare_data
import scaling
from conftest import save_tokens
from model import GPT, GPTConfig
from prepare_data import load_corpus
from scaling import evaluate, main, train, validation_batches
from train_gpu import learning_rate

CPU = torch.device("cpu")
CHAPTER = {(64, 2): (6.85, 6.63, 6.52, 6.49, 5.83), (96, 3): (6.79, 6.52, 6.39, 6.34, 5.65),
           (128, 4): (6.74, 6.47, 6.33, 6.26, 5.52), (192, 4): (6.70, 6.44, 6.28, 6.22, 5.41)}


@pytest.fixture
def small(monkeypatch):
    """The experiments in seconds: short contexts, small batches, two sizes."""
    for name, value in {"SEQ_LEN": 16, "BATCH": 4, "VAL_BATCHES": 2, "VAL_BATCH": 4, "SIZES": ((32, 1), (64, 2)),
                        "LR_SIZES": ((32, 1), (64, 1)), "WARMUP": 3}.items():
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
    (["nonsense"], "nonsense"), (["--data", "none.pt"], "none.pt"), (["--rates", "1"], "--rates")])
def test_refusals(argv, words, small, refused, tmp_path):
    refused(main, *argv, words=(words,))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_chapters_twenty_losses(novel, capsys):
    prepare_data.main([str(novel)])
    main([])
    rows = json.load(open("runs/scaling-sizes.json"))["rows"]
    assert [f"{row['params'] / 1e6:.2f}M" for row in rows] == ["0.62M", "1.12M", "1.80M", "3.34M"]
    for row in rows:
        for ours, chapters in zip([*row["val_loss"], row["train_loss"]], CHAPTER[row["d_model"], row["n_layer"]], strict=True):
            assert abs(ours - chapters) <= 0.01, (row["d_model"], ours, chapters)
