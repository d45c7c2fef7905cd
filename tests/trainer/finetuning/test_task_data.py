"""Errors of labeled files, and the split of one file: each example in one part, classes in proportion."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from trainer.finetuning.examples import Columns
from trainer.finetuning.task_data import (
    Files,
    class_names,
    data_lines,
    encode_task,
    make_task,
    read_task,
    split,
)
from trainer.inference.preprocessor import Preprocessor

COLUMNS = Columns("text", None, "label")


@pytest.mark.parametrize(("cell", "is_named"), [('"a dog', True), ("a dog", False)])
def test_empty_cells_name_no_quoting_where_cells_start_with_a_quotation_mark(
    cell: str, is_named: bool, tmp_path: Path
) -> None:
    path = write(tmp_path, "text\tlabel", f"{cell}\t1", 'a cat"', "end\t0", name="train.tsv")
    with pytest.raises(UsageError, check=coded("empty-cells")) as raised:
        read_task("classification", Files(path), COLUMNS, 0)
    assert ("--no-quoting" in raised.value.fix) == is_named


@pytest.mark.parametrize("skip_incomplete", [False, True])
def test_every_bad_row_is_named_by_its_number_in_the_file(skip_incomplete: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    cells = ["a", None, ["x"], "b", {"y": 1}] if skip_incomplete else ["a", "c", ["x"], "b", {"y": 1}]
    path.write_text("".join(json.dumps({"text": cell, "label": "1"}) + "\n" for cell in cells))
    with pytest.raises(UsageError, match="row 3, .*a list.*; row 5 ", check=coded("invalid-cell")):
        read_task("classification", Files(path, skip_incomplete=skip_incomplete), COLUMNS, 0)


def write(folder: Path, *lines: str, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def many(*labels: str) -> list[str]:
    return ["text,label", *(f"text {number},{labels[number % len(labels)]}" for number in range(40))]


def test_one_file_is_cut_in_three_with_every_class_in_each(tmp_path: Path) -> None:
    task, parts = read_task("classification", Files(write(tmp_path, *many("no", "yes"))), COLUMNS, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 32, "valid": 4, "test": 4}
    assert all(set(part.labels or []) == {"no", "yes"} for part in parts.values())
    assert task.head_options()["id2label"] == {0: "no", 1: "yes"}


def test_a_test_file_leaves_only_valid_to_be_cut_and_a_valid_file_nothing(tmp_path: Path) -> None:
    train, other = write(tmp_path, *many("0", "1")), write(tmp_path, *many("0", "1"), name="other.csv")
    _, parts = read_task("classification", Files(train, test=other), COLUMNS, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 36, "valid": 4, "test": 40}
    _, parts = read_task("classification", Files(train, valid=other), COLUMNS, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 40, "valid": 40}


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        ("classification", many("1"), "only one class .*'1'"),
        ("classification", ["text,label", "a,1", "b,", "c,0"], "1 row of 3 .* column 'label'.*row 2"),
        ("classification", ["text,label", "a,1", ",0"], "1 row of 2 .* column 'text'"),
        ("classification", ["text,label"], "has no rows"),
        ("classification", ["text,label", "a,1", "b,0"], "too few"),
        ("regression", ["text,label", "a,1.5", "b,good"], "row 2, column 'label': 'good' is not a number"),
        ("regression", ["text,label", "a,1.5", "b,inf"], "not finite"),
        ("regression", many("1"), "the same number in every row"),
        ("classification", ["text,label", *(f"a,{number}" for number in range(40))], "40 classes for 40 examples"),
        ("token_classification", ["text,label", "a b,O O", "a b,O"], "1 tags for 2 words"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(tmp_path: Path, task: str, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_task(task, Files(write(tmp_path, *lines)), COLUMNS, 0)


def test_a_whole_number_is_one_class_whichever_way_it_is_written(tmp_path: Path) -> None:
    files = Files(write(tmp_path, *many("0.0", "1.0")), valid=write(tmp_path, *many("0", "1"), name="valid.csv"))
    task, parts = read_task("classification", files, COLUMNS, 0)
    assert task.head_options()["id2label"] == {0: "0", 1: "1"} and set(parts["train"].labels or []) == {"0", "1"}


@pytest.mark.parametrize(
    ("cell", "message"), [(["a", "b"], "a list"), ({"a": 1}, "a dict"), ("a \ud800", "half a surrogate pair")]
)
def test_a_cell_that_is_no_text_is_refused_by_its_row(tmp_path: Path, cell: object, message: str) -> None:
    path = tmp_path / "train.jsonl"
    rows = [{"text": "a" if number else cell, "label": number % 2} for number in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=f"row 1, column 'text': .*{message}", check=coded("invalid-cell")):
        read_task("classification", Files(path), COLUMNS, 0)


@pytest.mark.parametrize(
    ("task", "label", "message"),
    [
        ("token_classification", ["O", None], "word 2 has no tag"),
        ("token_classification", [float("nan"), "O"], "word 1 has no tag"),
        ("token_classification", ["O", " "], "word 2 has no tag"),
        ("token_classification", ["O", ["x"]], "the cell contains a list"),
        ("token_classification", ["O", "B-\ud800"], "half a surrogate pair"),
        ("token_classification", "O B-\ud800", "half a surrogate pair"),
        ("token_classification", 5, "a int, and this task reads a list of tags"),
        ("token_classification", {"O": 1, "B": 2}, "a dict, and this task reads a list of tags"),
        ("regression", 10**400, "1000.* is not finite"),
        ("regression", 1e39, "1e.39 is not finite"),
        ("question_answering", {"text": ["a"], "answer_start": [float("inf")]}, "answer_start inf is not a position"),
        ("question_answering", {"text": ["a", None], "answer_start": [0, 0]}, "this task reads a text"),
    ],
)
def test_a_cell_that_is_no_label_is_refused_by_its_row(tmp_path: Path, task: str, label: object, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": "a b", "label": label}))
    pair = "text" if task == "question_answering" else None
    with pytest.raises(UserError, match=f"row 1, column 'label': .*{message}", check=coded("invalid-cell")):
        read_task(task, Files(path), Columns("text", pair, "label"), 0)


@pytest.mark.parametrize(("cell", "message"), [(["a", float("nan")], "NaN"), (5, "a list of words")])
def test_a_cell_that_is_no_list_of_words_is_refused(cell: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("token_classification").parse_text(cell)


def test_tags_of_parquet_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pandas.DataFrame({"text": [["a", "b"]] * 20, "label": [[0, 1]] * 20}).to_parquet(path)
    _, parts = read_task("token_classification", Files(path), COLUMNS, 0)
    assert parts["train"].labels is not None and parts["train"].labels[0] == ["0", "1"]


def test_classes_that_differ_in_capitals_only_are_warned_of(tmp_path: Path, preprocessor: Preprocessor) -> None:
    for labels, warning in ((("NaN", "nan", "b"), "warning: the classes 'NaN', 'nan' differ"), (("a", "b"), None)):
        task, parts = read_task("classification", Files(write(tmp_path, *many(*labels))), COLUMNS, 0)
        shown = "\n".join(data_lines(encode_task(task, parts, preprocessor)))
        assert warning in shown if warning else "differ" not in shown


def test_rows_swallowed_by_a_quotation_mark_are_warned_of(tmp_path: Path, preprocessor: Preprocessor) -> None:
    lines = ["text\tlabel", '"so good\t0', 'bad"\t1', *(f"text {number}\t{number % 2}" for number in range(40))]
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(lines) + "\n")
    task, parts = read_task("classification", Files(path), COLUMNS, 0)
    assert sum(map(len, parts.values())) == 41  # of 42
    data = encode_task(task, parts, preprocessor)
    assert "warning: 1 text with tabs and line breaks" in "\n".join(data_lines(data))
    _, parts = read_task("classification", Files(path, quoting=False), COLUMNS, 0)
    assert sum(map(len, parts.values())) == 42 and not any(part.num_swallowing for part in parts.values())
    lines = ["text,label", '"so\tgood', '\tbad",1', *many("0", "1")[1:]]  # tabs separate nothing in csv
    _, parts = read_task("classification", Files(write(tmp_path, *lines)), COLUMNS, 0)
    assert sum(map(len, parts.values())) == 41 and not any(part.num_swallowing for part in parts.values())


def test_long_texts_are_counted_with_the_length_and_where_it_comes_from(
    tmp_path: Path, preprocessor: Preprocessor
) -> None:
    path = write(tmp_path, *many("0", "1"), "the cat " * 60 + ",1")
    task, parts = read_task("classification", Files(path), COLUMNS, 0)
    for used, length, option in ((preprocessor, 32, False), (shortened(preprocessor), 16, True)):
        (line,) = [line for line in data_lines(encode_task(task, parts, used)) if "longer than" in line]
        assert line.startswith("1 of 41 texts ") and f" {length} tokens" in line and ("--max-length" in line) == option


def shortened(preprocessor: Preprocessor) -> Preprocessor:
    return replace(preprocessor, max_length=16, is_shortened=True)


def test_examples_have_a_digest_of_their_file_or_of_what_they_were_split_from(tmp_path: Path) -> None:
    train, test = write(tmp_path, *many("1")), write(tmp_path, "text,label", "a,1", name="test.csv")
    split, separate = Files(train), Files(train, test=test)
    assert (
        separate.examples_sha256("test", 0)
        == separate.examples_sha256("test", 1)
        == sha256(test.read_bytes()).hexdigest()
    )
    digests = {split.examples_sha256(part, seed) for part in ("valid", "test") for seed in (0, 1)}
    assert len(digests | {sha256(train.read_bytes()).hexdigest()}) == 5
    assert split.examples_sha256("test", 0) == Files(train).examples_sha256("test", 0)


def test_labels_that_training_does_not_have_are_named(tmp_path: Path) -> None:
    files = Files(write(tmp_path, *many("0", "1")), valid=write(tmp_path, *many("0", "2"), name="valid.csv"))
    with pytest.raises(UserError, match="valid.csv .*: 2;", check=coded("unknown-label")):
        read_task("classification", files, COLUMNS, 0)


def test_columns_must_be_there_and_be_as_many_as_the_task_reads(tmp_path: Path) -> None:
    files = Files(write(tmp_path, *many("0", "1")))
    with pytest.raises(UsageError, match="'sentence'.*text, label.*--text-column", check=coded("unknown-column")):
        read_task("classification", files, Columns("sentence", None, "label"), 0)
    with pytest.raises(UsageError, check=coded("missing-pair-column")):
        read_task("pair_classification", files, COLUMNS, 0)
    with pytest.raises(UsageError, check=coded("unexpected-pair-column")):
        read_task("classification", files, Columns("text", "label", "label"), 0)


def test_an_answer_must_stand_in_its_context(tmp_path: Path) -> None:
    lines = ["context,question,answer", "the cat sat,who,cat", "the dog ran,who,cat"]
    with pytest.raises(UserError, match="row 2.*'cat' does not occur in the context"):
        read_task("question_answering", Files(write(tmp_path, *lines)), Columns("context", "question", "answer"), 0)


def test_class_numbers_are_sorted_as_numbers() -> None:
    assert class_names(["10", "2", "1", "b", "a"], Path("x")) == ("1", "2", "10", "a", "b")


def test_classes_keep_their_proportion() -> None:
    groups = ["a"] * 900 + ["b"] * 100
    train, valid, test = split(groups, [0.1, 0.1], seed=0)
    for part, a, b in ((train, 720, 80), (valid, 90, 10), (test, 90, 10)):
        assert Counter(groups[place] for place in part) == {"a": a, "b": b}


def test_only_the_seed_determines_a_split() -> None:
    groups = ["a", "b"] * 50
    assert split(groups, [0.2], 1) == split(groups, [0.2], 1) != split(groups, [0.2], 2)


@given(
    groups=st.lists(st.sampled_from("abcde"), max_size=80),
    fractions=st.lists(st.floats(0.05, 0.3), max_size=3),
    seed=st.integers(0, 99),
)
def test_every_example_is_in_exactly_one_part(groups: list[str], fractions: list[float], seed: int) -> None:
    parts = split(groups, fractions, seed)
    assert sorted(place for part in parts for place in part) == list(range(len(groups)))
    assert {groups[place] for place in parts[0]} == set(groups)  # training has an example of every class


def test_many_rare_classes_together_fill_their_share() -> None:
    groups = [number // 2 for number in range(200)]  # 100 classes of two examples
    _, valid = split(groups, [0.1], 0)
    assert 18 <= len(valid) <= 22
