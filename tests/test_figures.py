"""tests/README.md, the page of the documents' figures: what a quick command prints is run and compared, what takes longer has to
stand in the output that the main README shows."""
import re
import shlex

import pytest

import budget
from conftest import ROOT

PAGE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| (.+) \| `(\w+)\.py ?([^`]*)` \| (.+) \|$", PAGE, re.M)
SHOWN = "\n".join(re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S))


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize("figure, document, script, flags, here", ROWS, ids=[row[0] for row in ROWS])
def test_the_figure_is_what_its_command_prints(figure, document, script, flags, here, capsys):
    if here.startswith("not run"):
        return
    if script == "budget":
        budget.main(shlex.split(flags))
        assert squeezed(here) in squeezed(capsys.readouterr().out)
    assert squeezed(here) in squeezed(SHOWN)


def test_the_page_has_the_figures_of_both_documents():
    assert len(ROWS) == PAGE.count("\n| ") - 2 and len(ROWS) > 50        # every line but two headings parses
    assert {script for _, _, script, _, _ in ROWS} == {"prepare_data", "speed", "grad_accum", "ddp_train", "scaling", "budget", "train_gpu"}
