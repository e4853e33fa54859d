"""grad_accum.py: accumulation equals the large batch, and each trap is as wrong as arithmetic says."""
import json

import pytest
import torch
import torch.nn as nn

from conftest import save_tokens
from grad_accum import (accumulate, main, measure_batch_norm, measure_parts, measure_unequal, new_model, saved_bytes, split)
from model import GPTConfig
from prepare_data import load_corpus, sample_batch

CONFIG = GPTConfig(vocab_size=512, d_model=32, n_head=2, n_layer=2, seq_len=64)


@pytest.fixture
def batch():
    save_tokens()
    return sample_batch(load_corpus().train, 64, 32, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("parts", [2, 4, 8, 32])
def test_parts_give_the_gradient_of_the_whole(batch, parts):
    row = measure_parts(CONFIG, *batch, parts, repeats=1)
    assert row["max_diff"] < 1e-6 < row["max_grad"]
    assert row["forgotten_ratio"] == pytest.approx(parts, rel=1e-4)     # the division forgotten: parts times too long


def test_in_float64_the_equality_is_exact_to_its_rounding(batch):
    model = new_model(CONFIG).double()
    whole = accumulate(model, [batch], [1.0])
    assert (accumulate(model, split(*batch, 8), [1 / 8] * 8) - whole).abs().max() < 1e-15


@pytest.mark.parametrize("valid", [(7, 1), (1, 63), (7, 0), (0, 5)])
def test_unequal_targets(batch, valid):
    row = measure_unequal(CONFIG, *batch, valid)
    assert row["sum_diff"] < 1e-6 and row["mean_of_means_diff"] > 1e-3
    assert (row["mean_of_means_loss"] is None) == (0 in valid)


def test_equal_targets_are_no_trap(batch):
    assert measure_unequal(CONFIG, *batch, (7, 7))["mean_of_means_diff"] < 1e-6


def test_batch_norm_breaks_the_equivalence(batch):
    assert measure_batch_norm(CONFIG, *batch, 8)["max_diff"] > 1e-4
    assert measure_batch_norm(CONFIG, *batch, 1)["max_diff"] == 0


def test_saved_bytes_of_a_network_counted_by_hand():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 5))

        def forward(self, x, y):
            return None, ((x @ self.weight) ** 2).sum()         # keeps x for the weight, and x @ weight for the square

    assert saved_bytes(Squares(), torch.ones(11, 7), None) == 4 * (11 * 7 + 11 * 5)


def test_half_the_part_keeps_half_the_bytes(batch):
    kept = [measure_parts(CONFIG, *batch, parts, repeats=1)["saved_bytes"] for parts in (1, 2, 4)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.02) and kept[2] == pytest.approx(kept[0] / 4, rel=0.03)


def test_the_script(batch, capsys):
    main([])
    out, results = capsys.readouterr().out, json.load(open("runs/grad_accum.json"))
    assert out.startswith("corpus: test") and out.count("True") == 4
    assert [row["parts"] for row in results["rows"]] == [2, 4, 8]
    assert all({"parts", "max_diff", "max_grad", "seconds", "saved_bytes"} <= row.keys() for row in results["rows"])


@pytest.mark.parametrize("argv, words", [(["--parts", "5"], "does not divide"), (["--parts", "0"], "positive"), (["--parts", "64"], "does not divide"),
                                         (["--data", "no.pt"], "no such file")])
def test_refusals(argv, words, refused):
    save_tokens()
    refused(main, *argv, words=(words,))


@pytest.mark.slow
def test_the_chapters_figures(novel):
    import prepare_data
    prepare_data.main([str(novel)])
    main([])
    for row in json.load(open("runs/grad_accum.json"))["rows"]:
        assert row["max_diff"] < 1e-6 and f"{row['max_grad']:.2f}" == "0.06"
