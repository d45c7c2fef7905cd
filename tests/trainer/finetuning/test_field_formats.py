"""Labeled files as the field has them: SQuAD's json, CoNLL's columns in every scheme, lines of text, rows to skip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from trainer.finetuning.examples import Columns
from trainer.finetuning.field_formats import NUM_BLANK, as_iob2, as_scheme_of
from trainer.finetuning.tables import column, read_table, write_table
from trainer.finetuning.task_data import Files, data_lines, encode_task, make_task, read_task
from trainer.inference.preprocessor import Preprocessor

CONTEXT = "The cat sat on the mat."
SQUAD = Columns("context", "question", "answers")


def squad(folder: Path, *questions: dict[str, Any], name: str = "train.json", num_contexts: int = 1) -> Path:
    asked = [{"id": str(number), **question} for number, question in enumerate(questions)]
    paragraphs = [
        {"context": CONTEXT + number * " So.", "qas": asked[number::num_contexts]} for number in range(num_contexts)
    ]
    content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}
    (folder / name).write_text(json.dumps(content), encoding="utf-8-sig")
    return folder / name


ANSWERED = {
    "question": "Who sat?",
    "answers": [{"text": "The cat", "answer_start": 0}, {"text": "cat", "answer_start": 4}],
}
IMPOSSIBLE = {
    "question": "Who ran?",
    "is_impossible": True,
    "answers": [],
    "plausible_answers": [{"text": "The cat", "answer_start": 0}],
}


def test_squad_is_read_and_a_question_without_an_answer_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = squad(tmp_path, *[ANSWERED] * 60)
    _, examples = read_task("question_answering", Files(path, valid=path), SQUAD, 0)
    first = examples["train"].labels[0]
    assert (first.text, first.start, first.others) == ("The cat", 0, ("cat",))
    assert (examples["train"].texts[0], examples["train"].pairs[0]) == (CONTEXT, "Who sat?")
    path = squad(tmp_path, ANSWERED, IMPOSSIBLE, ANSWERED)
    with pytest.raises(UsageError, match="row 2, column 'answers': there is no answer", check=coded("invalid-cell")):
        read_task("question_answering", Files(path), SQUAD, 0)


@pytest.mark.parametrize(("num_contexts", "sizes"), [(40, (32, 4, 4)), (7, (5, 1, 1)), (3, (1, 1, 1))])
def test_every_context_of_squad_is_in_one_part_with_all_its_questions(
    num_contexts: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    path = squad(tmp_path, *[ANSWERED] * num_contexts * 5, num_contexts=num_contexts)
    _, parts = read_task("question_answering", Files(path), SQUAD, 0)
    contexts = [set(part.texts) for part in parts.values()]
    assert tuple(map(len, contexts)) == sizes and len(set.union(*contexts)) == num_contexts
    assert [len(part) for part in parts.values()] == [5 * size for size in sizes]
    _, others = read_task("question_answering", Files(path), SQUAD, 1)
    assert num_contexts == 3 or set(others["train"].texts) != contexts[0]


def test_too_few_contexts_to_split_are_refused(tmp_path: Path) -> None:
    path = squad(tmp_path, *[ANSWERED] * 60, num_contexts=2)
    with pytest.raises(UsageError, match="after the split by context", check=coded("too-few-examples")) as raised:
        read_task("question_answering", Files(path), SQUAD, 0)
    assert "more contexts" in raised.value.fix


def test_questions_in_a_table_are_split_one_by_one_as_before(tmp_path: Path) -> None:
    write_table(read_table(squad(tmp_path, *[ANSWERED] * 40)), tmp_path / "train.jsonl")
    _, parts = read_task("question_answering", Files(tmp_path / "train.jsonl"), SQUAD, 0)
    assert [len(part) for part in parts.values()] == [32, 4, 4]


def test_the_digest_of_a_part_tells_how_it_was_split_off(tmp_path: Path) -> None:
    path = squad(tmp_path, ANSWERED)
    (tmp_path / "same.jsonl").write_bytes(path.read_bytes())
    files, table = Files(path, valid=path), Files(tmp_path / "same.jsonl", valid=path)
    assert files.examples_sha256("test", 0) != table.examples_sha256("test", 0)
    assert files.examples_sha256("valid", 0) == table.examples_sha256("valid", 0)


@pytest.mark.parametrize("value", ["false", "true", 0, None])
def test_a_mark_of_impossible_questions_that_is_neither_true_nor_false_is_refused(value: Any, tmp_path: Path) -> None:
    path = squad(tmp_path, {**ANSWERED, "is_impossible": False}, {**ANSWERED, "is_impossible": value})
    with pytest.raises(UserError, match="question 2 has is_impossible", check=coded("unreadable-table")) as raised:
        read_table(path)
    assert "true or false" in raised.value.fix


def test_an_answer_beside_its_place_is_refused_as_such(tmp_path: Path) -> None:
    shifted = {"question": "Who sat?", "answers": [{"text": "The cat", "answer_start": 1}]}
    with pytest.raises(UsageError, match="'The cat' is not at character 1 of the context", check=coded("invalid-cell")):
        read_task("question_answering", Files(squad(tmp_path, shifted)), SQUAD, 0)


def test_bad_rows_are_skipped_by_request_and_counted(tmp_path: Path, preprocessor: Preprocessor) -> None:
    unplaced = {"question": "x", "answers": [{"text": "y"}]}
    path = squad(tmp_path, ANSWERED, IMPOSSIBLE, *[ANSWERED] * 60, unplaced)
    valid = squad(tmp_path, ANSWERED, name="valid.json")
    task, examples = read_task("question_answering", Files(path, valid=valid, skip_bad=True), SQUAD, 0)
    assert len(examples["train"]) == 61
    (line,) = [line for line in data_lines(encode_task(task, examples, preprocessor)) if line.startswith("skipped")]
    assert line.startswith("skipped 2 rows of the file of train, the first one 2 (column 'answers': there is no answer")
    with pytest.raises(UsageError, check=coded("invalid-cell")):
        read_task("question_answering", Files(squad(tmp_path, *[IMPOSSIBLE] * 5), skip_bad=True), SQUAD, 0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "json"),
        ("[]", "form of SQuAD"),
        ('{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}', "form of SQuAD"),
        ('{"data": [{"paragraphs": [{"context": 1, "qas": [{"question": "a"}]}]}]}', "no text under the key 'context'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1}]}]}]}', "question 1 is not an object"),
        ("[" * 100_000, "json"),
    ],
)
def test_a_json_file_that_is_no_squad_is_refused_with_the_reason(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=told, check=coded("unreadable-table")):
        read_table(tmp_path / "a.json")


CONLL = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Anna NNP B-NP I-PER
Smith NNP I-NP I-PER
Boris NNP I-NP B-PER

"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_conll_file_gives_words_and_the_chosen_column(line_end: str, tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_bytes(CONLL.replace("\n", line_end).encode())
    table = read_table(path)
    assert list(table.columns) == ["1", "2", "3", "4"]
    assert column(table, "1", path, "") == [["EU", "rejects"], ["Anna", "Smith", "Boris"]]
    assert column(table, "2", path, "") == [["NNP", "VBZ"], ["NNP", "NNP", "NNP"]]
    assert column(table, "4", path, "") == [["B-ORG", "O"], ["B-PER", "I-PER", "B-PER"]]  # of IOB1
    with pytest.raises(UsageError, match="its columns: 1, 2, 3, 4", check=coded("unknown-column")):
        column(table, "5", path, "--label-column")


def conll(folder: Path, *lines: str) -> Path:
    (folder / "train.conll").write_text("-DOCSTART- -X- O\n\n" + "\n".join(lines) + "\n")
    return folder / "train.conll"


@pytest.mark.parametrize("odd", ["-X-", "B-", "PER", "b-PER"])
def test_a_column_of_entities_with_another_tag_is_refused_as_labels_by_its_line(odd: str, tmp_path: Path) -> None:
    path = conll(tmp_path, "Anna NNP I-PER", "Smith NNP I-PER", f"ran {odd} {odd}", "far NNP O")
    with pytest.raises(UsageError, match=f"conll, line 5, column '3': '{odd}' ", check=coded("invalid-cell")) as raised:
        read_task("token_classification", Files(path, skip_bad=True), Columns("1", None, "3"), 0)
    assert "write O" in raised.value.fix
    table = read_table(path)
    assert column(table, "1", path, "--text-column") == [["Anna", "Smith", "ran", "far"]]
    assert column(table, "2", path, "--label-column") == [["NNP", "NNP", odd, "NNP"]]  # no tags of entities


def test_words_that_look_like_tags_are_words(tmp_path: Path) -> None:
    path = conll(tmp_path, "B-52 O", "I-95 O", "flew O")
    assert column(read_table(path), "1", path, "--text-column") == [["B-52", "I-95", "flew"]]


@pytest.mark.parametrize("number", ["1-2", "8.1"])
def test_lines_of_conllu_that_are_no_words_are_refused_with_their_line(number: str, tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text(f"# text = im\n1\tin\tADP\n{number}\tim\t_\n2\tdem\tDET\n\n1\tja\tINTJ\n")
    with pytest.raises(UserError, match=f"line 3 .* {number}, ", check=coded("unreadable-table")) as raised:
        read_table(path)
    assert raised.value.fix.startswith("remove the lines")
    path.write_text("1\tin\tADP\n2\tdem\tDET\n")
    assert column(read_table(path), "2", path, "") == [["in", "dem"]]
    path.write_text(f"{number}\tNUM\nof\tADP\n")
    assert column(read_table(path), "1", path, "") == [[number, "of"]]


def test_a_line_without_its_word_or_tag_is_refused_or_skipped_with_its_sentence(tmp_path: Path) -> None:
    columns = Columns("1", None, "2")
    good = ["a\tI-X", "b\tO", ""] * 40
    for line, told in (("\tO", "column '1': word 2 is empty"), ("c\t", "column '2': word 2 has no tag")):
        path = conll(tmp_path, "a\tI-X", line, "", *good)
        with pytest.raises(UsageError, match=f"row 1, {told}", check=coded("invalid-cell")):
            read_task("token_classification", Files(path), columns, 0)
        _, parts = read_task("token_classification", Files(path, skip_bad=True), columns, 0)
        assert sum(len(part) for part in parts.values()) == 40
        assert all(label == ["B-X", "O"] for part in parts.values() for label in part.labels or [])


def test_a_conll_file_with_tabs_has_comments_and_words_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text("# newdoc\nNew York\tB-LOC\n#\tO\n\n\n\nrain\tO\n")
    assert read_table(path)["1"].tolist() == [["New York", "#"], ["rain"]]
    path.write_text("a O\nb\n")
    with pytest.raises(UserError, match="line 2 has 1 columns, and the first one 2", check=coded("unreadable-table")):
        read_table(path)


@pytest.mark.parametrize(
    "lines",
    [
        "# id 7 of a set of many\nAnna NNP B-X\n# SYM O",
        "# id 7\tdomain=en of a\nAnna NNP B-X\n# SYM O",
        "# sent_id = 7\nAnna NNP B-X\n# SYM O",
        "Anna NNP B-X\n# SYM O\n#",
    ],
)
def test_a_conll_file_with_spaces_has_comments_and_the_word_of_their_sign(lines: str, tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text(f"-DOCSTART- O\n\n{lines}\n")
    assert read_table(tmp_path / "train.conll").to_numpy().tolist() == [[["Anna", "#"], ["NNP", "SYM"], ["B-X", "O"]]]


def test_a_conll_file_of_that_sign_or_of_comments_alone(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("# O\n")
    assert read_table(tmp_path / "train.conll").to_numpy().tolist() == [[["#"], ["O"]]]
    (tmp_path / "train.conll").write_text("-DOCSTART- O\n\n# text = a\n")
    with pytest.raises(UsageError, check=coded("no-examples")):
        read_task("token_classification", Files(tmp_path / "train.conll"), Columns("1", None, "2"), 0)


def test_a_word_of_a_conll_file_may_have_a_no_break_space(tmp_path: Path) -> None:
    path = tmp_path / "train.conll"
    path.write_text("10\u00a0000 O \n \u3000  O\nc I-X\n", encoding="utf-8")
    assert read_table(path).to_numpy().tolist() == [[["10\u00a0000", "\u3000", "c"], ["O", "O", "B-X"]]]


def test_a_comma_in_one_cell_makes_spaces_part_of_the_classes_of_the_others(tmp_path: Path) -> None:
    columns = Columns("text", None, "label")
    for labels, expected in (
        (["sci fi, drama", "sci fi", "drama"], [["sci fi", "drama"], ["sci fi"], ["drama"]]),
        (["sci fi", "fi", "drama"], [["sci", "fi"], ["fi"], ["drama"]]),
        (['["sci fi", "fi"]', "fi drama", "[b]"], [["sci fi", "fi"], ["fi", "drama"], ["[b]"]]),
    ):
        rows = [f"a{number}\t{label}" for number, label in enumerate(labels * 20)]
        (tmp_path / "a.tsv").write_text("\n".join(["text\tlabel", *rows]))
        files = Files(tmp_path / "a.tsv", quoting=False)
        _, examples = read_task("multilabel_classification", files, columns, 0)
        read = {text: label for part in examples.values() for text, label in zip(part.texts, part.labels, strict=True)}
        assert [read[f"a{number}"] for number in range(3)] == expected


@pytest.mark.parametrize("task", ["token_classification", "multilabel_classification"])
def test_a_list_as_python_prints_it_is_refused_and_as_json_it_is_read(task: str, tmp_path: Path) -> None:
    text = '["New York", "is", "far"]'
    for labels, is_read in (("['B-X', 'O', 'Z']", False), ('["B-X", "O", "Z"]', True)):
        (tmp_path / "a.tsv").write_text("text\tlabel\n" + f"{text}\t{labels}\n" * 40)
        files = Files(tmp_path / "a.tsv", quoting=False)
        if not is_read:
            with pytest.raises(UsageError, match="'label': .*a list as Python prints it", check=coded("invalid-cell")):
                read_task(task, files, Columns("text", None, "label"), 0)
            continue
        _, parts = read_task(task, files, Columns("text", None, "label"), 0)
        assert parts["train"].labels is not None and parts["train"].labels[0] == ["B-X", "O", "Z"]
        is_tagger = task == "token_classification"
        assert parts["train"].texts[0] == (["New York", "is", "far"] if is_tagger else text)


@pytest.mark.parametrize("cell", ["1_5", True])
def test_what_python_alone_reads_as_a_number_is_none(cell: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        make_task("regression").parse_label(cell, "")
    assert make_task("regression").parse_label("1.5", "") == 1.5


@pytest.mark.parametrize(
    ("tags", "odd"),
    [
        ("S-PER O B-ORG E-ORG", "S-PER"),
        ("B-PER I-PER X O", "X"),
        ("B-PER I-PER O", None),
        ("I-PER I-PER O", None),
        ("NOUN VERB O S-X", None),
        ("O O", None),
    ],
)
def test_tags_of_a_table_that_are_not_scored_as_entities_are_warned_of(tags: str, odd: str | None) -> None:
    warnings = list(make_task("token_classification").label_warnings([tags.split()]))
    assert [repr(odd) in warning and "instead of entities" in warning for warning in warnings] == [True] * bool(odd)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("S-PER O B-ORG I-ORG E-ORG S-ORG", "B-PER O B-ORG I-ORG I-ORG B-ORG"),
        ("U-PER O B-ORG L-ORG", "B-PER O B-ORG I-ORG"),
        ("I-PER I-PER B-PER I-ORG", "B-PER I-PER B-PER B-ORG"),
        ("B-PER I-PER O I-PER", "B-PER I-PER O B-PER"),
        ("NOUN O VERB", "NOUN O VERB"),
        ("O O", "O O"),
        ("B- I-", "B- I-"),
        ("B-a-b I-a-b I-a", "B-a-b I-a-b B-a"),
    ],
)
def test_every_scheme_of_entities_becomes_iob2_and_other_tags_stay(tags: str, expected: str) -> None:
    assert as_iob2([tags.split()]) == [expected.split()]
    assert as_iob2([expected.split()]) == [expected.split()]


IOB2, BIOES, BILOU = (
    "B-PER O B-ORG I-ORG I-ORG B-ORG I-ORG",
    "S-PER O B-ORG I-ORG E-ORG B-ORG E-ORG",
    "U-PER O B-ORG I-ORG L-ORG B-ORG L-ORG",
)


@pytest.mark.parametrize("given", [IOB2, BIOES, BILOU])
@pytest.mark.parametrize("model", [IOB2, BIOES, BILOU])
def test_tags_of_a_scored_file_become_those_of_the_model(model: str, given: str) -> None:
    assert as_scheme_of(model.split(), [given.split()]) == [model.split()]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("NOUN VERB O", BIOES),
        (BIOES, "NOUN VERB O"),
        (IOB2, "I-PER O"),
        (BIOES, "O O"),
        ("O", "O"),
        (IOB2, "S-PER PER"),
    ],
)
def test_tags_that_are_not_of_two_schemes_of_entities_stay(model: str, given: str) -> None:
    assert as_scheme_of(model.split(), [given.split()]) == [given.split()]


def test_the_parts_of_a_fit_may_have_different_schemes(tmp_path: Path) -> None:
    words = " ".join("abcdefg")
    row = json.dumps({"1": words.split(), "2": BIOES.split()}) + "\n"
    (tmp_path / "train.jsonl").write_text(row * 8)
    valid = conll(tmp_path, *map(" ".join, zip(words.split(), BIOES.split(), strict=True)))
    assert read_table(valid)["2"].tolist() == [IOB2.split()]
    files = Files(tmp_path / "train.jsonl", valid=valid)
    task, parts = read_task("token_classification", files, Columns("1", None, "2"), 0)
    assert set(task.names) == set(BIOES.split())
    assert parts["valid"].labels == [BIOES.split()] == parts["train"].labels[:1]


def test_lines_of_text_are_a_table_that_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one text\r\n\n  \nanother\ttext\n")
    assert read_table(tmp_path / "a.txt")["text"].tolist() == ["one text", "another\ttext"]
    assert read_table(tmp_path / "a.txt").attrs == {NUM_BLANK: 2}
    with pytest.raises(UsageError, check=coded("unsupported-file-type")):
        write_table(read_table(tmp_path / "a.txt"), tmp_path / "b.txt")
