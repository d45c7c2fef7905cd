"""Row 40 of the fault list: labeled data that cannot be learned from, through launch/finetune.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from launch import finetune
from tests.support.error_codes import coded

GOOD = "text\tlabel\n" + "a city\tnoun\na river\twater\n" * 20


@pytest.fixture
def fit(exported: Path, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Fine-tune on this content of train.tsv; returns what is said before the first step, where the fit would begin."""

    def run(content: str, *more: str, label: str = "label") -> str:
        (desk / "train.tsv").write_text(content, encoding="utf-8")
        arguments = ["--model", str(exported), "--task", "classification", "--train", "train.tsv", "--no-tracking"]
        arguments += ["--text-column", "text", "--label-column", label, "--dry-run", *more]
        monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments])
        finetune.main()
        return capsys.readouterr().out

    return run


@pytest.mark.fault(
    row="40",
    fault="fine-tuning data with one class, missing labels or texts, unknown columns, unpaired quotes, no row",
    required="one paragraph that names file, column and row; nothing is written",
)
@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (GOOD.replace("water", "noun"), {}, r"train\.tsv has only one class \('noun'\)"),
        (
            GOOD + "a town\t\n",
            {},
            r"train\.tsv has 1 row of 41 .* column 'label': row 41",
        ),
        (GOOD + "\tnoun\n", {}, "column 'text': row 41"),
        (GOOD, {"label": "class"}, r"train\.tsv has no column 'class'.*: text, label.*--label-column"),
        (GOOD + 'a "town\tnoun\na "city\tnoun\n' + '"a lake\twater\n', {}, r"train\.tsv cannot be read.*--no-quoting"),
        ("text\tlabel\n", {}, r"train\.tsv has no rows"),
    ],
    ids=["one class", "missing label", "missing text", "unknown column", "unpaired quotes", "no row"],
)
def test_row_40_data_that_cannot_be_learned_is_told(content, more, said, fit, desk: Path) -> None:
    with pytest.raises(UserError, match=said) as refused:
        fit(content, **more)
    assert refused.value.exit_status != 0 and "\n" not in str(refused.value)
    assert [path.name for path in desk.iterdir()] == ["train.tsv"]


@pytest.mark.fault(
    row="40",
    fault="labels of the test file that training lacks",
    required="one paragraph that names the file and the labels",
)
def test_row_40_labels_that_training_lacks_are_named(fit, desk: Path) -> None:
    (desk / "test.tsv").write_text(GOOD + "a lake\tlake\n")
    with pytest.raises(UserError, match=r"test\.tsv .*: lake", check=coded("unknown-label")):
        fit(GOOD, "--test", "test.tsv")


@pytest.mark.fault(
    row="40",
    fault="texts much longer than the model's positions; unpaired quotes with --no-quoting",
    required="cut and counted; read as they stand",
)
def test_row_40_long_texts_are_cut_and_counted_and_quotes_are_text(fit, observed) -> None:
    long = "a city and a river " * 200
    said = fit(GOOD + f"{long}\tnoun\n" * 3 + 'a "town\tnoun\n', "--no-quoting")
    assert re.search(r"^3 of [\d,]+ texts longer than .* 32 tokens", said, re.MULTILINE)
    assert "dry run: nothing was fitted" in said
    numbers = [int(line.split()[1]) for line in said.splitlines() if line.startswith(("train ", "valid ", "test "))]
    assert sum(numbers) == 44
    observed(
        f"3 of {sum(numbers)} texts cut and counted; quotes are read as they stand",
        lost="what a long text holds beyond the model's positions",
    )
