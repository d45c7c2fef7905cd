"""Preparation: every text once, the same bytes however it is run, and work that is gone on with or refused."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UsageError, UserError
from data_prep.pipeline.reduce_task import seeded_order
from data_prep.reports.stats import read_statistics
from data_prep.reports.tables import stats_report
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing, disk_full_at, stopped_after
from tests.support.living_data_sets import problems_of, records_of
from tests.support.preparations import (
    NAMING_INPUTS,
    Manifest,
    id_of,
    normalized,
    paragraphs_of,
    planned,
    prepared,
    read_texts,
    trained,
    write_texts,
)
from tests.support.references import sentence_starts, sentence_token_starts
from tests.support.work_units import limit_batches, limit_memory

OVERRIDES = ["shards.min_shards=3", "shards.valid_fraction=0.1", "shards.record_tokens=1500", "shards.unit_bytes=30000"]
REPOSITORY = Path(__file__).resolve().parents[3]


def make(inputs: Sequence[Path], tokenizer: Tokenizer, output: Path, *overrides: str, **options: Any) -> Manifest:
    return prepared(inputs, tokenizer, output, *OVERRIDES, *overrides, **options)


def decoded(folder: Path, tokenizer: Tokenizer, split: str) -> list[str]:
    """All texts of a split, in order."""
    texts = []
    for path in sorted(folder.glob(f"{split}-*.tar")):
        for record in records_of(path):
            stops = [*record.documents.tolist()[1:], len(record.tokens)]
            for start, stop in zip(record.documents.tolist(), stops, strict=True):
                texts.append(tokenizer.decode(record.tokens[start:stop]))
    return texts


def test_every_text_comes_back_exactly_once(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    manifest = make([small_corpus], tokenizer, tmp_path)
    found = decoded(tmp_path, tokenizer, "train") + decoded(tmp_path, tokenizer, "valid")
    expected = [normalized(text) for text in read_texts(small_corpus)]
    assert Counter(found) == Counter(expected)
    assert max(Counter(expected).values()) == 1
    assert manifest.train.documents + manifest.valid.documents == len(expected)
    assert not (tmp_path / ".work").exists()


def test_ids_and_sentences_are_those_of_the_text(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    make([small_corpus], tokenizer, tmp_path)
    paragraphs = {id_of(text): paragraphs_of(text) for text in read_texts(small_corpus)}
    for path in tmp_path.glob("*.tar"):
        for record in records_of(path):
            stops = [*record.documents.tolist()[1:], len(record.tokens)]
            for number, (start, stop) in enumerate(zip(record.documents.tolist(), stops, strict=True)):
                own = record.sentences[(record.sentences >= start) & (record.sentences < stop)] - start
                source = paragraphs.pop(int(record.document_ids[number]))
                tokens = tokenizer.encode("".join(f" {paragraph}" for paragraph in source))
                assert np.array_equal(tokens, record.tokens[start:stop])
                expected = sentence_token_starts(tokenizer, tokens, sentence_starts(source, "en"))
                assert own.tolist() == expected.tolist()
    assert not paragraphs


def test_records_hold_whole_documents_up_to_their_size(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    long_text = " ".join(read_texts(small_corpus)[:40])
    other = write_texts(tmp_path / "long.jsonl", [long_text])
    make([small_corpus, other], tokenizer, tmp_path / "out")
    sizes = [
        (len(record.tokens), len(record.documents))
        for path in (tmp_path / "out").glob("*.tar")
        for record in records_of(path)
    ]
    assert len(sizes) > 10
    assert [documents for tokens, documents in sizes if tokens > 1500] == [1]


@pytest.mark.fault(row=6, fault="documents that are duplicates", required="counted")
def test_a_text_in_two_files_is_kept_once_and_counted(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = read_texts(small_corpus)
    copies = write_texts(tmp_path / "copies.jsonl", [texts[3].replace(" ", "  "), "A new text.", texts[3], texts[7]])
    manifest = make([small_corpus, copies], tokenizer, tmp_path / "out")
    found = decoded(tmp_path / "out", tokenizer, "train") + decoded(tmp_path / "out", tokenizer, "valid")
    assert manifest.dropped == {"duplicate": 3}
    assert Counter(found) == Counter(normalized(text) for text in [*texts, "A new text."])


def test_the_copy_of_the_first_source_is_kept(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = read_texts(small_corpus)
    first, second = (write_texts(tmp_path / "z.jsonl", texts[:20]), write_texts(tmp_path / "a.jsonl", texts[10:40]))
    sources = {"one": first, "two": {"input": second, "license": "CC0-1.0"}}
    manifest = make(sources, tokenizer, tmp_path / "out")
    assert [(source.name, source.documents, source.license) for source in manifest.sources] == [
        ("one", 20, None),
        ("two", 20, "CC0-1.0"),
    ]
    assert sum(source.tokens for source in manifest.sources) == manifest.train.tokens + manifest.valid.tokens


def test_adding_a_file_moves_no_document_between_train_and_valid(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    texts = read_texts(small_corpus)
    old, new = (write_texts(tmp_path / "old.jsonl", texts[:100]), write_texts(tmp_path / "new.jsonl", texts[100:]))
    make([old], tokenizer, tmp_path / "before")
    make([old, new], tokenizer, tmp_path / "after", "shards.min_shards=5")
    for split in ("train", "valid"):
        before = set(decoded(tmp_path / "before", tokenizer, split))
        assert before and before <= set(decoded(tmp_path / "after", tokenizer, split))


def test_figures_of_the_manifest_are_those_of_the_shards(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    stored = safetensors.numpy.load((small_shards / "token_counts.safetensors").read_bytes())
    for name in ("train", "valid"):
        tokens = np.concatenate(
            [record.tokens for path in small_shards.glob(f"{name}-*.tar") for record in records_of(path)]
        )
        counts = Counter(tokens.tolist())
        entropy = -sum(count / len(tokens) * math.log(count / len(tokens)) for count in counts.values())
        assert manifest.split(name).tokens == len(tokens)
        assert manifest.split(name).unigram_entropy_nats == pytest.approx(entropy, rel=1e-12)
        assert np.array_equal(stored[name], np.bincount(tokens, minlength=manifest.tokenizer.vocab_size))


def test_a_compressed_copy_gives_the_same_shards(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    packed = tmp_path / "small.jsonl.gz"
    packed.write_bytes(gzip.compress(small_corpus.read_bytes()))
    make([small_corpus], tokenizer, tmp_path / "plain")
    make([packed], tokenizer, tmp_path / "packed")
    plain, packed_files = files_of(tmp_path / "plain"), files_of(tmp_path / "packed")
    assert plain.keys() == packed_files.keys()
    assert [name for name in plain if plain[name] != packed_files[name]] == NAMING_INPUTS


def test_small_buffers_give_the_same_shards(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make([small_corpus], tokenizer, tmp_path / "large")
    limit_memory(monkeypatch, work_file=2_000, shard=2_000)
    limit_batches(monkeypatch, characters=900)
    make([small_corpus], tokenizer, tmp_path / "small")
    assert files_of(tmp_path / "large") == files_of(tmp_path / "small")


@pytest.mark.parametrize("seed", [0, 7])
def test_the_seed_orders_the_documents_of_a_shard(seed: int) -> None:
    ids = np.array([9, 4, 9, 2**64 - 1, 4, 77], np.uint64)
    order = seeded_order(ids, seed)
    assert sorted(order.tolist()) == list(range(6))
    assert ids[order].tolist() == ids[::-1][seeded_order(ids[::-1], seed)].tolist()
    assert order.tolist().index(0) < order.tolist().index(2) and order.tolist().index(1) < order.tolist().index(4)
    many = np.arange(100, dtype=np.uint64)
    assert seeded_order(many, seed).tolist() != seeded_order(many, seed + 1).tolist()


def test_a_corpus_without_a_held_out_hash_holds_out_the_nearest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"Document number {number} says hello." for number in range(6)]
    ids = [id_of(text) for text in texts]
    assert min(ids) >> 32 >= 0.0001 * 2**32
    corpus = write_texts(tmp_path / "tiny.jsonl", [*texts, *texts])
    manifest = make([corpus], tokenizer, tmp_path / "out", "shards.valid_fraction=0.0001")
    assert decoded(tmp_path / "out", tokenizer, "valid") == [" " + texts[ids.index(min(ids))]]
    assert (manifest.train.documents, manifest.valid.documents, manifest.dropped) == (5, 1, {"duplicate": 6})
    assert [shard.name for shard in manifest.train.shards] == [
        f"train-{number:06d}.tar" for number in range(len(manifest.train.shards))
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_with_a_valid_fraction_of_0_every_document_is_for_training(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, weighted: bool
) -> None:
    texts = read_texts(small_corpus)
    paths = [
        write_texts(tmp_path / f"{name}.jsonl", texts[:first]) for name, first in (("a", 30), ("b", 60), ("c", 90))
    ]
    sources = {path.stem: {"input": path, **({"weight": 1.0} if weighted else {})} for path in paths}
    added = {"c": sources.pop("c")}
    output, shards = tmp_path / "out", {"min_shards": 2, "valid_fraction": 0, "unit_bytes": 30000}
    manifest = prepared(sources, tokenizer, output, shards=shards)
    assert (manifest.train.documents, manifest.valid.documents) == (60, 0) and not manifest.valid.shards
    grown = prepared(added, tokenizer, output, shards=shards, add=True)
    assert (grown.train.documents, grown.valid.documents) == (90, 0)
    assert problems_of(output) == []
    assert "| valid | 0 | 0 |" in (output / "DATA_CARD.md").read_text()
    assert list(stats_report(read_statistics(str(output))))
    with pytest.raises(UsageError, match=r"set shards\.valid_fraction=0\.?", check=coded("other-valid-fraction")):
        planned(added, tokenizer, "shards.valid_fraction=0.01", parent=grown)


@pytest.mark.fault(row=1, fault="an empty file alone", required="clear error")
@pytest.mark.fault(row=6, fault="nothing is left of the documents", required="an error that counts the reasons")
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([" \n\t", "\u200b", ""], "nothing is left of the inputs .3 empty."),
        ([], "nothing is left of the inputs .1 file without a document."),
        (["Only one text.", "Only  one text."], "no document is left to train on"),
        (["tiny"], "nothing is left of the inputs .1 too short."),
    ],
)
def test_a_corpus_without_a_usable_document_is_an_error(
    texts: list[str], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus = write_texts(tmp_path / "corpus.jsonl", texts)
    with pytest.raises(UserError, match=message):
        make([corpus], tokenizer, tmp_path / "out", "documents.min_document_characters=5")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.fault(row=3, fault="a truncated .gz beside good files", required="counted, and nothing of it is used")
@pytest.mark.fault(row=1, fault="an empty file beside good ones", required="it is counted")
def test_bad_input_stops_or_is_counted_by_reason(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "A good line."}\n{"text": 5}\n{"txt": "x"}\n{"text": "  "}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(small_corpus.read_bytes())[:5000])
    (tmp_path / "empty.txt").write_bytes(b"")
    inputs = [small_corpus, *(tmp_path / name for name in ("bad.jsonl", "cut.jsonl.gz", "empty.txt"))]
    with pytest.raises(UserError, match="bad.jsonl line 2.*'text'", check=coded("not-text")):
        make(inputs[:2], tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = make(inputs, tokenizer, tmp_path / "skipped", "documents.on_bad_input=skip")
    assert manifest.dropped == {"damaged file": 1, "empty": 1, "missing field": 1, "not text": 1}
    assert manifest.train.documents + manifest.valid.documents == len(read_texts(small_corpus)) + 1


def test_an_empty_result_names_the_settings_to_loosen(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"Text {n}.", "score": n % 3}) + "\n" for n in range(1_500)))
    for least, shortest, reasons, fix in (
        (5, 1, "1,500 filter 1 metadata: not score >= 5", "documents.filters"),
        (0, 99, "1,500 too short", "min_document_characters"),
        (1, 99, "1,000 too short, 500 filter 1 metadata: not score >= 1", "min_document_characters"),
        (2, 99, "1,000 filter 1 metadata: not score >= 2, 500 too short", "documents.filters"),
    ):
        filters = [{"name": "metadata", "keep": f"score >= {least}"}]
        settings = {"metadata_fields": ["score"], "filters": filters, "min_document_characters": shortest}
        with pytest.raises(UserError, match=re.escape(reasons), check=coded("nothing-left")) as caught:
            make([corpus], tokenizer, tmp_path / f"out{least}", documents=settings)
        assert fix in caught.value.fix and str(corpus) in caught.value.problem


@pytest.mark.parametrize("kind", ["no line", "all dropped", "copies"])
def test_a_source_without_documents_is_named_and_refused_with_a_budget(
    kind: str, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"no line": [], "all dropped": [" "], "copies": read_texts(small_corpus)[:3]}[kind]
    other = write_texts(tmp_path / "other.jsonl", texts)
    for budget in ({}, {"weight": 2.0}):
        sources = {"good": small_corpus, "notes": {"input": other, **budget}}
        if budget:
            with pytest.raises(UserError, match="source notes", check=coded("source-without-documents")):
                prepared(sources, tokenizer, tmp_path / "budget")
            assert not (tmp_path / "budget" / "manifest.json").exists()
        else:
            dropped = {"no line": {}, "all dropped": {"empty": 1}, "copies": {"duplicate": 3}}[kind]
            assert prepared(sources, tokenizer, tmp_path / "out").sources[1].dropped == dropped
            assert capsys.readouterr().err.count("warning: source notes gives no document (") == 1


def test_the_same_command_again_does_nothing(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus, out = Path(shutil.copy(small_corpus, tmp_path / "touched.jsonl")), tmp_path / "out"  # others read that one
    made = make([corpus], tokenizer, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    os.utime(corpus)
    assert make([corpus], tokenizer, out) == made
    before[out / ".stamps.json"] = (out / ".stamps.json").stat().st_mtime_ns  # of the touched file, for the next time
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


@pytest.mark.long
def test_other_settings_inputs_or_tokenizer_are_named(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    make([small_corpus], tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="shards.seed.*0.*3", check=coded("other-preparation")):
        make([small_corpus], tokenizer, tmp_path / "out", "shards.seed=3")
    other = write_texts(tmp_path / "more.jsonl", ["another"])
    with pytest.raises(UserError, match="more.jsonl", check=coded("other-preparation")):
        make([small_corpus, other], tokenizer, tmp_path / "out")
    upper = trained(map(str.upper, read_texts(small_corpus)), tmp_path / "tokenizer", vocab_size=800)
    with pytest.raises(UserError, match=f"{upper.fingerprint[:8]}", check=coded("other-preparation")):
        make([small_corpus], upper, tmp_path / "out")


def test_finished_units_of_a_stopped_run_are_not_redone(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make([small_corpus], tokenizer, tmp_path / "whole")
    done: list[str] = []
    for file in ("map-*.sections", "*.done.json"):
        with pytest.raises(KeyboardInterrupt), before_writing("*", lambda: None) as written, stopped_after(2, file):
            make([small_corpus], tokenizer, tmp_path / "out")
        assert not (tmp_path / "out" / "manifest.json").exists()
        done += written
    with before_writing("*", lambda: None) as written:
        make([small_corpus], tokenizer, tmp_path / "out")
    finished = [name for name in [*done, *written] if fnmatch(name, "map-*.sections") or name.endswith(".done.json")]
    assert len(finished) == len(set(finished)) > 8
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_unfinished_work_of_other_settings_is_refused(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(0, "train-*.tar"):
        make([small_corpus], tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="shards.seed.*0.*1", check=coded("other-preparation")):
        make([small_corpus], tokenizer, tmp_path / "out", "shards.seed=1")
    make([small_corpus], tokenizer, tmp_path / "out")


def test_shards_without_a_manifest_are_not_overwritten_unasked(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make([small_corpus], tokenizer, tmp_path)
    (tmp_path / "manifest.json").unlink()
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="manifest.json", check=coded("shards-without-manifest")):
        make([small_corpus], tokenizer, tmp_path)
    assert files_of(tmp_path) == before
    (tmp_path / "notes.md").write_text("mine")
    make([small_corpus], tokenizer, tmp_path, fresh=True)
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.fault(row=13, fault="the disk is full", required="the same command ends right afterwards")
@pytest.mark.long
def test_a_full_disk_stops_clearly_and_the_same_command_ends_right(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make([small_corpus], tokenizer, tmp_path / "whole")
    for fatal_name in ("map-*", "train-000001.tar", "train-000001.index*", "token_counts*", "manifest.json"):
        with disk_full_at(fatal_name), pytest.raises(UserError, match="No space left", check=coded("unwritable-file")):
            make([small_corpus], tokenizer, tmp_path / "out")
        assert not (tmp_path / "out" / "manifest.json").exists()
        assert not list((tmp_path / "out").rglob("*.partial"))
    make([small_corpus], tokenizer, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_missing_language_field_and_unknown_languages_are_reported_once(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make([small_corpus], tokenizer, tmp_path / "misspelt", "documents.language_field=lnag")
    message = "warning: source corpus: none of its 200 documents names a language in the field 'lnag'; their sentences"
    assert capfd.readouterr().err.count(message) == 1
    lines = small_corpus.read_text(encoding="utf-8").splitlines()
    named = tmp_path / "named.jsonl"
    named.write_text("".join(json.dumps({**json.loads(line), "lang": "German"}) + "\n" for line in lines[:9]))
    (tmp_path / "text.txt").write_text("A text has no fields.")
    make([small_corpus, named, tmp_path / "text.txt"], tokenizer, tmp_path / "out", "documents.language_field=lang")
    error = capfd.readouterr().err
    assert "source corpus: 9 of its documents name a language in the field 'lang' that is unknown (such as" in error
    assert "none of" not in error and "end by the rules of en" in error


@pytest.mark.fault(row=7, fault="rare Unicode and a literal [MASK]", required="the text round-trips")
def test_text_that_looks_special_is_ordinary_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [
        "[MASK] and [SEP], [CLS] [PAD] [UNK] and <0x41>",
        "lone \ud800 surrogate \udfff",
        "\u2581meta\u2581space",
        "שלום \u202b עולם 👩‍👩‍👧 \U0001f1e9\U0001f1ea e\u0301 o\u0308\u0323",
        "private \ue000 unassigned \U000e0fff \u0378",
    ]
    corpus = write_texts(tmp_path / "odd.jsonl", texts)
    make([corpus], tokenizer, tmp_path / "out", "shards.valid_fraction=0.3")
    found = decoded(tmp_path / "out", tokenizer, "train") + decoded(tmp_path / "out", tokenizer, "valid")
    assert sorted(found) == sorted(normalized(text) for text in texts)
    for path in (tmp_path / "out").glob("*.tar"):
        assert all(record.tokens.min() >= 5 for record in records_of(path))


def _command(corpus: Path, tokenizer: Tokenizer, output: Path, workers: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "data_prep",
        "shards",
        "--input",
        str(corpus),
        "--tokenizer",
        str(tokenizer.folder),
        "--output",
        str(output),
        "--workers",
        str(workers),
        *OVERRIDES,
    ]


@pytest.mark.spawn
def test_two_processes_give_the_same_bytes_as_one(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    make([small_corpus], tokenizer, tmp_path / "one")
    make([small_corpus], tokenizer, tmp_path / "two", num_workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.long
@pytest.mark.spawn
def test_a_killed_run_goes_on_to_the_same_bytes(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    make([small_corpus], tokenizer, tmp_path / "whole")
    output, work = tmp_path / "out", tmp_path / "out" / ".work"
    command = _command(small_corpus, tokenizer, output, 1)
    for number, pattern in (("2", "map-*.sections"), ("1", "*.done.json")):
        dying = ["-m", "tests.support.kill_points", "SIGKILL", pattern, number]
        killed = subprocess.run([sys.executable, *dying, *command[3:]], cwd=REPOSITORY, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert list(work.glob(pattern)) and not (output / "manifest.json").exists()
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert files_of(output) == files_of(tmp_path / "whole")


def test_folders_among_the_files_of_the_tokenizer_are_not_copied(small_corpus: Path, small_tokenizer: Path) -> None:
    own = small_tokenizer.parent / "tokenizer with more"
    shutil.copytree(small_tokenizer, own)
    make([small_corpus], Tokenizer.load(own), own / "shards")
    assert {path.name for path in (own / "shards" / "tokenizer").iterdir()} == {
        path.name for path in small_tokenizer.iterdir() if path.is_file() and path.name[0] != "."
    }


def test_files_of_a_killed_worker_are_removed_from_the_data_set(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    left = tmp_path / "out" / ".train-000001.tar.1-ab.partial"
    with before_writing("train-000001.tar", lambda: left.write_bytes(b"half")):
        make([small_corpus], tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.partial"))
