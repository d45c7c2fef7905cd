"""`inspect` on the command line: which report it gives, of which tokenizer, from where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from data_prep import Tokenizer, open_dataset, prepare
from data_prep.base.errors import UsageError
from data_prep.commands import inspect
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.living_data_sets import problems_of, read_index


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    capsys.readouterr()
    inspect.run(parser.parse_args([str(argument) for argument in arguments]), [])
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def remote_shards(small_shards: Path) -> str:
    url = "memory://inspect-command/set"
    for path in small_shards.rglob("*"):
        if path.is_file():
            storage.write_bytes(storage.join(url, str(path.relative_to(small_shards))), path.read_bytes())
    return url


def test_a_remote_data_set_is_shown_as_a_local_one(
    remote_shards: str, small_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = open_dataset(remote_shards).manifest
    document_id = read_index(str(small_shards), manifest.valid.shards[0]).document_ids[3]
    for options in (["--split", "valid", "--documents", 2, "--skip", 1], ["--document", f"{document_id:016x}"]):
        shown = run(capsys, remote_shards, *options)
        assert shown == run(capsys, small_shards, *options) and len(shown) > 2
    assert f"document id   {document_id:016x}" in shown and "split         valid" in shown


def test_the_tokenizer_of_a_data_set_or_a_folder_explains_a_text(
    remote_shards: str, small_shards: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run(capsys, small_tokenizer, "--tokenizer", "the old river\x1b[31m")
    assert shown == run(capsys, small_shards, "--tokenizer", "the old river\x1b[31m")
    assert shown == run(capsys, remote_shards, "--tokenizer", "the old river\x1b[31m")
    text = "\n".join(shown)
    assert "\x1b" not in text
    tokenizer = Tokenizer.load(small_tokenizer)
    for token in tokenizer.encode(" the old river").tolist():
        assert str(token) in text and tokenizer.pieces[token] in text


def test_the_vocabulary_is_written_with_every_piece(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, small_shards, "--vocabulary", tmp_path / "out" / "pieces.txt") == [
        f"{tmp_path / 'out' / 'pieces.txt'}: 800 tokens"
    ]
    lines = (tmp_path / "out" / "pieces.txt").read_text(encoding="utf-8").splitlines()
    pieces = Tokenizer.load(small_shards / "tokenizer").pieces
    assert len(lines) >= len(pieces) == 800
    assert all(piece in line for piece, line in zip(pieces, lines[-800:], strict=True))


def test_documents_that_are_skipped_are_not_shown(small_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*options: object) -> list[str]:
        return [line for line in run(capsys, small_shards, *options) if line.startswith("=== ")]

    every = shown("--documents", 4)
    assert len(set(every)) == 4 and shown("--documents", 3, "--skip", 1) == every[1:]
    assert shown("--documents", 3) == every[:3]


@pytest.mark.parametrize(("name", "least"), [("documents", 1), ("shard", 0), ("skip", 0)])
def test_a_smaller_number_is_refused(
    name: str, least: int, small_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(capsys, small_shards, f"--{name}", least - 1)
    said = capsys.readouterr().err
    assert f"argument --{name}: must be a whole number of {least} or more, got '{least - 1}'" in said


def test_one_report_at_a_time(small_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(capsys, small_shards, "--document", "12", "--tokenizer", "text")


@pytest.mark.parametrize(
    ("asked", "unused"),
    [
        (("--document", "12"), ("--documents", 3)),
        (("--url", "u"), ("--split", "train")),
        (("--id", "a"), ("--skip", 0)),
        (("--source", "corpus"), ("--shard", 0)),
        (("--tokenizer", "text"), ("--documents", 1)),
    ],
)
def test_an_option_that_a_report_does_not_use_is_refused(
    asked: tuple[str, str], unused: tuple[str, object], small_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UsageError, match=f"{asked[0]} does not use {unused[0]}\\.", check=coded("contradicting-options")
    ):
        run(capsys, small_shards, *asked, *unused)


def test_a_near_duplicate_is_named_where_the_kept_document_is_shown(
    tmp_path: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"word{number} of the old river." for number in range(60))
    texts = [words, words + " More.", words, "Another text about a village."]
    rows = [{"id": f"doc-{number}", "text": text} for number, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["documents.id_field=id", "deduplication.near=true", "deduplication.threshold=0.6"]
    prepare(str(tmp_path / "in.jsonl"), tokenizer=small_tokenizer, output=tmp_path / "out", overrides=settings)
    assert problems_of(tmp_path / "out") == []
    near = "was dropped as a duplicate of this document"
    shown = {row["id"]: run(capsys, tmp_path / "out", "--id", row["id"]) for row in rows}
    named = [id for id, lines in shown.items() if f"{id} {near}" in lines]
    assert named in (["doc-0", "doc-2"], ["doc-1"]), "all but the kept text"
    assert not any(near in line for id, lines in shown.items() if id not in named for line in lines)
