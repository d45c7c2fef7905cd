"""Decontamination: every planted leak is found, and near misses are kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import Document
from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.filters.decontamination import tokens_of
from tests.support.error_codes import coded
from tests.support.preparations import Step, filter_identity, filter_step
from tests.support.reading import files_of_input, reader_of

WORDS = [f"w{number}" for number in range(300)]


def step_for(**parameters: Any) -> Step:
    return filter_step("decontamination", **parameters)


def sentence(chance: random.Random, length: int) -> str:
    return " ".join(chance.choices(WORDS, k=length))


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Any]:
    chance = random.Random(1)
    questions = [{"question": sentence(chance, 20), "answer": sentence(chance, 15)} for _ in range(50)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "lines.txt").write_text("\n".join(sentence(chance, length) for length in (4, 8, 12, 13, 30)))
    return {
        "questions": {"files": str(tmp_path / "questions.jsonl"), "fields": ["question", "answer"]},
        "lines": str(tmp_path / "*.txt"),
    }


def test_every_planted_leak_is_found_and_counts_for_its_set(tmp_path: Path, sets: dict[str, Any]) -> None:
    step, chance = step_for(sets=sets), random.Random(2)
    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    leaks = [(text, "questions") for row in rows for text in row.values()]
    leaks += [(line, "lines") for line in (tmp_path / "lines.txt").read_text().splitlines()[1:]]
    for text, name in leaks:
        words = text.split()
        first = chance.randrange(max(1, len(words) - 12))
        part = ", ".join(words[first : first + 13]).upper()
        assert step.apply(Document(f"{sentence(chance, 40)} «{part}»! {sentence(chance, 40)}")) == name
        assert step.apply(Document(part)) == name
    clean = [Document(sentence(chance, 200)) for _ in range(200)]
    assert [step.apply(document) for document in clean] == [None] * 200


def test_a_leak_of_short_lines_is_found(tmp_path: Path) -> None:
    lines = ["Which of these is a river?", "(A) the Danube", "(B) the Alps", "(C) Vienna, a town", "(D) none of them"]
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"text": "\n".join(lines)}) + "\n")
    step = step_for(sets={"quiz": str(tmp_path / "quiz.jsonl")})
    assert step.apply(Document(f"A page of a forum. {' '.join(lines).upper()} Who knows?")) == "quiz"
    assert step.apply(Document(f"A page of a forum. {' '.join(lines[1:4])} Who knows?")) is None, "eleven words"


def test_twelve_words_in_common_and_short_examples_are_kept(tmp_path: Path, sets: dict[str, Any]) -> None:
    step = step_for(sets=sets)
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    assert step.apply(Document(" ".join(lines[-1].split()[:12]))) is None
    assert step.apply(Document(lines[0])) is None, "four words"
    assert step.apply(Document("")) is None


def test_the_sets_are_identified_by_their_content(tmp_path: Path, sets: dict[str, Any]) -> None:
    described = filter_identity("decontamination", sets=sets)
    assert described["parameters"]["sets"]["lines"]["examples"] == 5
    assert described["parameters"]["sets"]["lines"]["too_short"] == 1
    assert described["parameters"]["sets"]["questions"]["examples"] == 100
    (tmp_path / "lines.txt").rename(tmp_path / "moved.txt")
    sets["lines"] = str(tmp_path / "moved.txt")
    assert filter_identity("decontamination", sets=sets) == described


def test_text_without_spaces_is_compared_by_characters(tmp_path: Path) -> None:
    (tmp_path / "zh.txt").write_text("他们在早上开会决定在冬天之前修好那座桥。")
    step = step_for(sets={"zh": str(tmp_path / "zh.txt")})
    assert step.apply(Document("昨天的新闻说他们在早上开会决定在冬天之前修好那座桥但是没有钱")) == "zh"
    assert step.apply(Document("他们在早上开会")) is None


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({"sets": {}}, "filter-parameters"),
        ({"sets": {"a": 3}}, "filter-parameters"),
        ({"sets": {"a": {"files": "x", "field": "y"}}}, "filter-parameters"),
        ({"sets": {"a": "x"}, "ngram": 5}, "filter-parameters"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError, check=coded(code)):
        step_for(**parameters)


@pytest.mark.long
@settings(max_examples=30)
@given(st.text())
def test_tokens_are_those_of_the_same_text_in_another_case(text: str) -> None:
    assert all(token and not token.isspace() for token in tokens_of(text))
    assert tokens_of(f"{text} «» {text}") == tokens_of(text) * 2


@pytest.mark.slow
def test_planted_examples_are_dropped_and_real_documents_are_kept(corpora: Path) -> None:
    """Of 50,000 documents of pack_medium fewer than 0.1% share text with SST-2, MRPC or allocine."""
    labelled = corpora / "labelled"
    given = {
        "sst2": {"files": str(labelled / "sst2" / "*.tsv"), "fields": ["sentence"]},
        "mrpc": {"files": str(labelled / "mrpc" / "*.tsv"), "fields": ["#1 String", "#2 String"]},
        "allocine": {"files": str(labelled / "fr_allocine_films" / "*.csv"), "fields": ["text"]},
    }
    step, chance = step_for(sets=given), random.Random(5)
    settings = DocumentSettings(on_bad_input="skip")
    examples = [
        (" ".join(text.split()), name)
        for name, each in given.items()
        for path in sorted(files_of_input(each["files"]))  # type: ignore[arg-type]
        for document in reader_of(path, settings, each["fields"][0])
        for text in document.text.splitlines()
        if len(tokens_of(text)) >= 8
    ]
    num_documents, num_dropped, hosts = 0, 0, []
    for path in sorted((corpora / "pack_medium").glob("*.jsonl.gz")):
        for document in reader_of(path, settings):
            num_documents += 1
            num_dropped += step.apply(document) is not None
            if num_documents % 50 == 0:
                hosts.append(document.text[:5_000])
    missed = 0
    planted = chance.sample(examples, min(len(examples), 1_000))
    for example, _ in planted:
        host = chance.choice(hosts)
        place = host.find(" ", chance.randrange(len(host)))
        missed += step.apply(Document(f"{host[:place]} {example.upper()}\n{host[place:]}")) is None
    print(f"{num_dropped} of {num_documents:,} documents dropped; {missed} of {len(planted):,} planted examples missed")
    assert num_documents > 40_000 and num_dropped < num_documents / 1_000 and len(planted) == 1_000 and missed == 0


def test_files_without_a_name_are_sets_of_their_own_names(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"{name[:3]} " + " ".join(WORDS[:20]))
    files = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    described = [step_for(sets=sets).identity["parameters"]["sets"] for sets in (files, files[0])]
    assert described == [step_for(sets=sets).identity["parameters"]["sets"] for sets in (
        {"one": files[0], "two": files[1]}, {"one": files[0]}
    )]  # fmt: skip
    with pytest.raises(UserError, check=coded("filter-parameters")):
        step_for(sets=5)


def test_a_set_without_the_field_text_is_answered_with_the_setting_of_its_fields(tmp_path: Path) -> None:
    (tmp_path / "mmlu.jsonl").write_text(json.dumps({"question": "one two three four five six seven eight nine"}))
    files = str(tmp_path / "*.jsonl")
    with pytest.raises(UserError, check=coded("missing-field")) as caught:
        step_for(sets={"mmlu": files})
    assert caught.value.fix == f'name its fields: sets: {{mmlu: {{files: ["{files}"], fields: [FIELD]}}}}'
    step = step_for(sets={"mmlu": {"files": [files], "fields": ["question"]}})
    assert step.apply(Document("so: one two three four five six seven eight nine")) is not None


def test_a_set_without_an_ending_is_answered_with_the_setting_of_its_format(tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_text(json.dumps({"text": "one two three four five six seven eight nine"}))
    files = str(tmp_path / "part-*")
    with pytest.raises(UserError, check=coded("unsupported-file-type")) as caught:
        step_for(sets={"mmlu": files})
    assert caught.value.fix == f'name its format: sets: {{mmlu: {{files: ["{files}"], format: NAME}}}}'
    for pattern in (files, str(tmp_path)):
        step = step_for(sets={"mmlu": {"files": pattern, "format": "jsonl"}})
        assert step.apply(Document("so: one two three four five six seven eight nine")) is not None
    with pytest.raises(UserError, check=coded("filter-parameters")):
        step_for(sets={"mmlu": {"files": files, "format": 5}})
