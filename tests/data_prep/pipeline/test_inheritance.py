"""Additions pass what the data set passed: filters and deduplication are inherited, and differences are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document, open_dataset, prepare
from data_prep.base.errors import UserError
from data_prep.dataset.safeguards import ADDITION
from tests.support.data_prep_command import Command
from tests.support.error_codes import coded
from tests.support.living_data_sets import file_bytes, problems_of
from tests.support.preparations import forget_filters, read_texts

SHARDS: dict[str, Any] = {"min_shards": 2, "valid_fraction": 0.2}
LEAKED = "The quick brown evaluation question jumps over every lazy training document in this corpus tonight."


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)


def write(path: Path, texts: list[str], host: str, score: int = 5) -> Path:
    lines = [{"text": text, "url": f"https://{host}/{n}", "score": score} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(folder: Path) -> dict[str, Any]:
    """Filters with a blocklist and an evaluation set, whose files are in the folder."""
    filters = [
        {"name": "metadata", "keep": "score >= 3"},
        {"name": "url_blocklist", "domains": f"{folder}/domains.txt"},
        {"name": "decontamination", "sets": {"quiz": f"{folder}/quiz.jsonl"}},
    ]
    return {"documents": {"url_field": "url", "metadata_fields": ["score"], "filters": filters}, "shards": SHARDS}


@pytest.fixture(scope="module")
def original(texts: list[str], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inheritance")
    (folder / "domains.txt").write_text("bad.org\nworse.org\n")
    (folder / "quiz.jsonl").write_text(json.dumps({"text": LEAKED}) + "\n")
    corpus = write(folder / "corpus.jsonl", texts[:60], "a.org")
    prepare(corpus, tokenizer=small_tokenizer, output=folder / "set", config=settings(folder), num_workers=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A data set of its own, which reads the lists of the module's folder."""
    shutil.copytree(original / "set", tmp_path / "set")
    return tmp_path


def more(folder: Path, texts: list[str], name: str = "more") -> Path:
    """Write 5 good documents, and one for each filter."""
    path = write(folder / f"{name}.jsonl", texts, "good.org")
    for bad in (("x.bad.org", 5, "Blocked."), ("good.org/low", 1, "Low."), ("good.org/leak", 5, LEAKED)):
        url, score, text = bad
        line = {"text": f"{name} {text} {texts[0]}", "url": f"https://{url}", "score": score}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return path


DROPPED = {"filter decontamination: quiz": 1, "filter metadata: not score >= 3": 1, "filter url_blocklist: domain": 1}


@pytest.mark.fault(
    row="65",
    fault="additions whose configuration lacks the filters of the data set",
    required="the filters are inherited",
)
def test_an_addition_without_filters_inherits_them_again_and_again(folder: Path, texts: list[str]) -> None:
    for number in range(2):
        name = f"more{number}"
        inputs = more(folder, texts[60 + 5 * number : 65 + 5 * number], name)
        dataset = prepare(inputs, add_to=folder / "set", source_name=name, config={"shards": SHARDS}, num_workers=1)
        assert dataset.sources[name].dropped == DROPPED and dataset.sources[name].documents == 5
        assert dataset.manifest.preparations[-1][ADDITION] == {"not_passed": [], "grown": []}
    assert problems_of(folder / "set") == []
    card = (folder / "set" / "DATA_CARD.md").read_text()
    assert card.count("passed the filters and the deduplication of the data set") == 2


def test_the_command_inherits_as_the_python_api_and_a_finished_addition_is_complete(
    command: Command, folder: Path, texts: list[str]
) -> None:
    inputs = more(folder, texts[60:65])
    arguments = ("--input", inputs, "--source-name", "more", "--add-to", folder / "set", "--workers", 1)
    assert command("shards", *arguments, "shards.valid_fraction=0.2", "--dry-run") == 0, command.errors
    for part in ("1/2", "2/2"):
        assert command("shards", *arguments, "shards.valid_fraction=0.2", "--shard-range", part) == 0, command.errors
    assert command("merge", *arguments, "shards.valid_fraction=0.2") == 0, command.errors
    assert open_dataset(folder / "set").sources["more"].dropped == DROPPED
    before = file_bytes(folder / "set")
    assert command("shards", *arguments, "shards.valid_fraction=0.2") == 0 and "is complete" in command.output
    assert file_bytes(folder / "set") == before
    assert command("shards", *arguments, "documents.filters=[]") == 2 and "[addition-differs]" in command.errors


@pytest.mark.parametrize("changed", ["domains.txt", "quiz.jsonl"])
def test_a_list_that_has_grown_is_taken_and_one_that_lost_an_entry_is_refused(
    texts: list[str], small_tokenizer: Path, tmp_path: Path, changed: str
) -> None:
    lists = {"domains.txt": "bad.org\nworse.org\n", "quiz.jsonl": json.dumps({"text": LEAKED}) + "\n"}
    for name, content in lists.items():
        (tmp_path / name).write_text(content)
    corpus = write(tmp_path / "corpus.jsonl", texts[:40], "a.org")
    output, config = tmp_path / "set", settings(tmp_path)
    prepare(corpus, tokenizer=small_tokenizer, output=output, config=config, num_workers=1)
    entry = {"domains.txt": "aaa.org", "quiz.jsonl": json.dumps({"text": f"Another {LEAKED.lower()} Again."})}[changed]
    (tmp_path / "grown").mkdir()
    for name, content in lists.items():
        (tmp_path / "grown" / name).write_text((f"{entry}\n" if name == changed else "") + content)
    grown = settings(tmp_path / "grown")
    dataset = prepare(more(tmp_path, texts[40:45]), add_to=output, source_name="more", config=grown, num_workers=1)
    assert dataset.sources["more"].dropped == DROPPED
    assert len(dataset.manifest.preparations[-1][ADDITION]["grown"]) == 1
    assert "grew from" in (output / "DATA_CARD.md").read_text() and problems_of(output) == []
    inputs = more(tmp_path, texts[45:50], "again")
    with pytest.raises(UserError, match="lacks 1 of its", check=coded("addition-differs")):
        prepare(inputs, add_to=output, source_name="again", config=config, num_workers=1)
    dataset = prepare(inputs, add_to=output, source_name="again", config={"shards": SHARDS}, num_workers=1)
    assert dataset.manifest.preparations[-1][ADDITION] == {"not_passed": [], "grown": []}, "the grown list is inherited"
    again = prepare(tmp_path / "more.jsonl", add_to=output, source_name="more", config=grown, num_workers=1)
    assert again.manifest.digest == dataset.manifest.digest, "a finished addition stays complete"


@pytest.mark.fault(
    row="65",
    fault="additions with other filters or another deduplication than the data set",
    required="refused with the list, unless the user allows it; then the data card states it",
)
@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"documents": {"filters": []}}, "documents.filters was metadata, url_blocklist, decontamination"),
        ({"documents": {"filters": [{"name": "metadata", "keep": "score >= 1"}]}}, "is now metadata"),
        ({"deduplication": {"near": True}}, "deduplication.near was false and is now true"),
        ({"deduplication": {"exact": False}}, "deduplication.exact was true and is now false"),
    ],
)
def test_any_other_difference_is_refused_unless_it_is_allowed(
    folder: Path, texts: list[str], config: dict[str, Any], difference: str
) -> None:
    inputs, before = more(folder, texts[60:65]), file_bytes(folder / "set")
    config = {"shards": SHARDS, **config}
    arguments: dict[str, Any] = {"add_to": folder / "set", "source_name": "more", "config": config, "num_workers": 1}
    with pytest.raises(UserError, match=difference, check=coded("addition-differs")):
        prepare(inputs, **arguments)
    assert file_bytes(folder / "set") == before
    dataset = prepare(inputs, **arguments, allow_other_filters=True)
    (stated,) = dataset.manifest.preparations[-1][ADDITION]["not_passed"]
    assert difference in stated and "did not pass all filters" in (folder / "set" / "DATA_CARD.md").read_text()
    assert prepare(inputs, **arguments, allow_other_filters=True).manifest.digest == dataset.manifest.digest
    later = prepare(
        more(folder, texts[65:70], "later"),
        add_to=folder / "set",
        source_name="later",
        config={"shards": SHARDS},
        num_workers=1,
    )
    assert later.sources["later"].dropped == DROPPED, "an exception is not inherited"


def test_a_parameter_that_is_no_list_must_stay(folder: Path, original: Path, texts: list[str]) -> None:
    config = settings(original)
    config["documents"]["filters"][2]["ngram"] = 20
    with pytest.raises(UserError, match="ngram", check=coded("addition-differs")):
        prepare(more(folder, texts[60:65]), add_to=folder / "set", source_name="more", config=config, num_workers=1)


def test_a_python_function_must_be_given_again(texts: list[str], small_tokenizer: Path, tmp_path: Path) -> None:
    def no_question(document: Document) -> str | None:
        return "question" if "Really so" in document.text else None

    def other(document: Document) -> str | None:
        return None

    config = {
        "documents": {"metadata_fields": ["score"], "filters": [{"name": "metadata", "keep": "score >= 3"}]},
        "shards": SHARDS,
    }
    corpus = write(tmp_path / "corpus.jsonl", texts[:40], "a.org")
    first: dict[str, Any] = {"tokenizer": small_tokenizer, "output": tmp_path / "set", "num_workers": 1}
    prepare(corpus, **first, config=config, filters=[no_question])
    inputs = write(tmp_path / "more.jsonl", [*texts[40:45], "Really so?"], "a.org")
    arguments: dict[str, Any] = {
        "add_to": tmp_path / "set",
        "source_name": "more",
        "config": {"shards": SHARDS},
        "num_workers": 1,
    }
    with pytest.raises(UserError, match="no_question", check=coded("addition-differs")):
        prepare(inputs, **arguments)
    with pytest.raises(UserError, match="other", check=coded("addition-differs")):
        prepare(inputs, **arguments, filters=[other])
    low = write(tmp_path / "low.jsonl", texts[50:53], "a.org", score=1)
    dataset = prepare([inputs, low], **arguments, filters=[no_question])
    assert set(dataset.sources["more"].dropped.values()) == {1, 3} and dataset.sources["more"].documents == 5


def test_fields_for_names_are_inherited_so_that_takedowns_hold(
    command: Command, folder: Path, texts: list[str]
) -> None:
    (folder / "urls.txt").write_text("https://good.org/2\n")
    assert command("remove", folder / "set", "--urls", folder / "urls.txt", "--workers", 1) == 0, command.errors
    other = write(folder / "other.jsonl", texts[70:75], "good.org")
    other.write_text(other.read_text().replace('"url"', '"link"'))
    own = {"documents": {"url_field": "link", "min_document_characters": 5}, "shards": SHARDS}
    arguments: dict[str, Any] = {"add_to": folder / "set", "config": own, "num_workers": 1}
    dataset = prepare(other, source_name="other", **arguments)
    assert dataset.sources["other"].dropped == {"removed earlier": 1}
    dataset = prepare(
        more(folder, texts[60:65]), add_to=folder / "set", source_name="more", config={"shards": SHARDS}, num_workers=1
    )
    assert dataset.sources["more"].dropped == {**DROPPED, "removed earlier": 1}, "what an addition sets is its own"
    assert dataset.manifest.preparations[-1]["documents"]["min_document_characters"] == 1
    assert {document.url for document in dataset if document.source == "more"} >= {"https://good.org/1"}


def test_lists_that_a_release_did_not_keep_must_be_given_again(folder: Path, original: Path, texts: list[str]) -> None:
    manifest = json.loads((folder / "set" / "manifest.json").read_text())
    del manifest["config"]["safeguards"]
    (folder / "set" / "manifest.json").write_text(json.dumps(manifest))
    arguments: dict[str, Any] = {"add_to": folder / "set", "source_name": "more", "num_workers": 1}
    with pytest.raises(UserError, match="url_blocklist", check=coded("addition-differs")):
        prepare(more(folder, texts[60:65]), **arguments, config={"shards": SHARDS})
    dataset = prepare(folder / "more.jsonl", **arguments, config=settings(original))
    assert dataset.sources["more"].dropped == DROPPED


def test_a_missing_inherited_list_is_named_with_the_fix(
    texts: list[str], small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "domains.txt").write_text("bad.org\n")
    config = {
        "documents": {"url_field": "url", "filters": [{"name": "url_blocklist", "domains": f"{tmp_path}/domains.txt"}]},
        "shards": SHARDS,
    }
    corpus = write(tmp_path / "corpus.jsonl", texts[:20], "a.org")
    prepare(corpus, tokenizer=small_tokenizer, output=tmp_path / "set", config=config, num_workers=1)
    (tmp_path / "domains.txt").rename(tmp_path / "moved.txt")
    forget_filters()  # as in another process
    inputs = more(tmp_path, texts[20:25])
    arguments: dict[str, Any] = {"add_to": tmp_path / "set", "source_name": "more", "num_workers": 1}
    with pytest.raises(UserError, match="domains.txt.*inherits.*documents.filters", check=coded("unreadable-file")):
        prepare(inputs, **arguments, config={"shards": SHARDS})
    (tmp_path / "domains.txt").write_text("other.org\n")
    with pytest.raises(UserError, match="Fix: restore", check=coded("addition-differs")):
        prepare(inputs, **arguments, config={"shards": SHARDS})
    config["documents"]["filters"][0]["domains"] = f"{tmp_path}/moved.txt"  # type: ignore[index]
    assert prepare(inputs, **arguments, config=config).sources["more"].dropped["filter url_blocklist: domain"] == 1


def test_the_lists_are_a_file_of_the_data_set(command: Command, folder: Path) -> None:
    name = "filter-lists-000001.safetensors"
    assert command("verify", folder / "set", "--workers", 1) == 0
    assert command("remove", folder / "set", "--purge") == 0 and (folder / "set" / name).exists()
    (folder / "set" / name).write_bytes(b"damaged")
    assert command("verify", folder / "set", "--workers", 1) == 1 and name in command.errors
    assert len(open_dataset(folder / "set").manifest.preparations) == 1


def test_the_permission_needs_a_data_set_to_add_to(folder: Path, small_tokenizer: Path) -> None:
    with pytest.raises(UserError, check=coded("contradicting-arguments")):
        prepare(folder / "x.jsonl", tokenizer=small_tokenizer, output=folder / "new", allow_other_filters=True)
