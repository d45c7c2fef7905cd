"""Bad input to `python -m data_prep`: rows 1 to 10 of the fault list, each made with real files through the command."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_prep import Tokenizer
from data_prep.config.preparation_config import DocumentSettings
from tests.support.data_prep_command import Command, assert_nothing_half_made
from tests.support.living_data_sets import records_of
from tests.support.preparations import normalized, read_texts

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = [f"The old teacher crossed the river number {number}. Nobody knew why." for number in range(40)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


class Shards:
    """`shards` with one worker, into a new folder each time; every refusal must leave nothing half-made."""

    def __init__(self, command: Command, tokenizer: Path, folder: Path) -> None:
        self.command, self.tokenizer = command, tokenizer
        self._folders = (folder / str(number) for number in itertools.count())
        self.output = next(self._folders)

    def __call__(self, inputs: list[Path], *settings: str) -> int:
        self.output = next(self._folders)
        return self.again(inputs, *settings)

    def again(self, inputs: list[Path], *settings: str) -> int:
        arguments = ["--tokenizer", self.tokenizer, "--output", self.output, "--workers", 1, *settings]
        return self.command("shards", "--input", *inputs, *arguments, "shards.min_shards=2")

    def refused(self, inputs: list[Path], message: str, *settings: str, status: int = 1) -> None:
        assert self(inputs, *settings) == status
        assert re.search(message, self.command.errors), self.command.errors
        assert len(self.command.errors.strip().splitlines()[-1]) < 1000
        assert_nothing_half_made(self.output)

    def made(self, inputs: list[Path], *settings: str) -> dict[str, Any]:
        """Make them; returns the manifest, which `verify` agrees with."""
        assert self(inputs, *settings) == 0, self.command.errors
        self.told = self.command.errors
        assert self.command("verify", self.output, "--workers", 1) == 0
        return json.loads((self.output / "manifest.json").read_text())

    def skipped(self, inputs: list[Path], *settings: str) -> dict[str, Any]:
        return self.made(inputs, "documents.on_bad_input=skip", *settings)


@pytest.fixture
def shards(command: Command, small_tokenizer: Path, tmp_path: Path) -> Shards:
    return Shards(command, small_tokenizer, tmp_path / "outputs")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_bytes(lines(TEXTS))
    return path


def held(manifest: dict[str, Any]) -> int:
    return manifest["train"]["documents"] + manifest["valid"]["documents"]


def dropped(manifest: dict[str, Any]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for source in manifest["sources"]:
        for reason, count in source["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return reasons


@pytest.mark.fault(
    row=1,
    fault="no file matches; a folder; an empty file; a file of only white space",
    required="clear error when nothing is left; an empty file beside good ones is counted",
)
def test_row_01_no_file_a_folder_an_empty_file_and_white_space(shards: Shards, good: Path, tmp_path: Path) -> None:
    empty, white = tmp_path / "empty.txt", tmp_path / "white.jsonl"
    empty.touch()
    white.write_text(" \n\n\t\n")
    shards.refused([tmp_path / "*.xyz.jsonl"], r"no input file matches .*\.xyz\.jsonl", status=2)
    shards.refused([tmp_path], "is a folder", status=2)
    shards.refused([empty, white], r"nothing is left of the inputs \(2 files without a document\)")
    manifest = shards.made([good, empty, white])
    assert held(manifest) == len(TEXTS) and dropped(manifest) == {}


@pytest.mark.fault(
    row=2,
    fault="a binary file with a text ending; NUL bytes; invalid UTF-8 in the middle of a file",
    required="clear error with file and byte or line; or skipped and counted by policy",
)
def test_row_02_binary_file_and_invalid_utf8(
    shards: Shards, good: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    image = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + random.Random(2).randbytes(5000)
    cases: dict[str, tuple[bytes, str, str]] = {
        "image.txt": (image, r"image\.txt is not text: it contains NUL \(byte 8 of the file\)", "binary"),
        "image.jsonl": (image, r"image\.jsonl line 1 is not UTF-8 \(byte 0 of the line\)", "invalid UTF-8"),
        "nul.txt": (b"text " * 900 + b"\0 more", r"nul\.txt .*NUL \(byte 4500 of the file\)", "binary"),
        "middle.txt": (b"text " * 900 + b"\xff more", r"middle\.txt is not UTF-8 \(byte 4500 of", "invalid UTF-8"),
        "middle.jsonl": (
            lines(TEXTS[:2]) + b'{"text": "ab\xe2\x28"}\n' + lines(TEXTS[2:4]),
            r"middle\.jsonl line 3 is not UTF-8 \(byte 12 of the line\)",
            "invalid UTF-8",
        ),
        "nul.jsonl": (
            lines(TEXTS[:2]) + b'{"text": "ab\0cd"}\n' + lines(TEXTS[2:4]),
            r"nul\.jsonl line 3 is not JSON \(",
            "invalid JSON",
        ),
    }
    for name, (data, message, reason) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        shards.refused([good, path], message)
        manifest = shards.skipped([good, path])
        assert dropped(manifest).get(reason), (name, dropped(manifest))
        assert held(manifest) == len(TEXTS)
    observed(
        f"each of {len(cases)} files named with byte or line; with documents.on_bad_input=skip it is counted, and all "
        f"{len(TEXTS)} good documents are there",
        lost="with on_bad_input=skip the bad files and lines",
    )


@pytest.mark.fault(
    row=3,
    fault="truncated .gz and .zst; a file that is not what its ending says",
    required="named with file and place, fatal or skipped by policy; the documents before the cut are not used",
)
@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet", ".csv", ".arrow"])
def test_row_03_truncated_archives_and_wrong_endings(
    ending: str, shards: Shards, good: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    compress: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    texts = [f"cut document {random.Random(number).random()}" for number in range(2000)]
    table = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), table)
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": texts}))
    content = {
        ".jsonl": lines(texts),
        ".txt": "\n\n".join(texts).encode(),
        ".parquet": table.getvalue(),
        ".csv": "\n".join(["text", *texts]).encode(),
        ".arrow": stream.getvalue(),
    }[ending]
    for compression, compressed in compress.items():
        cut, wrong = tmp_path / f"cut{ending}{compression}", tmp_path / f"wrong{ending}{compression}"
        cut.write_bytes(compressed(content)[:-1000])
        wrong.write_bytes(content)
        places = {".parquet": "after [0-9,]+ bytes of its content", ".arrow": "(at or before line|in) "}
        where = places.get(ending, r"at or before line \d+")
        blocks = "documents.txt_documents=blank_lines"
        shards.refused([good, cut], rf"cut{ending}{compression} is damaged or cut short {where}", blocks)
        kinds = {".parquet": "is a Parquet file", ".arrow": "is an Arrow file"}
        message = kinds.get(ending, "is not .*-compressed")
        shards.refused([good, wrong], rf"wrong{ending}{compression} {message}, which contradicts its extension", blocks)
        manifest = shards.skipped([good, cut, wrong], blocks)
        assert (held(manifest), dropped(manifest)) == (len(TEXTS), {"damaged file": 1, "wrong ending": 1})
        assert f"{cut} is damaged" in shards.told and f"{wrong} is" in shards.told.replace("the content of ", "")
    observed(
        f"{ending} cut or misnamed as {' '.join(compress)}: named with its place; with documents.on_bad_input=skip "
        f"counted, and the {len(TEXTS)} good documents alone are there",
        lost="with on_bad_input=skip all of a damaged file",
    )


@pytest.mark.fault(
    row=3,
    fault="gzip bytes named .jsonl, Zstandard bytes named .jsonl.gz, JSON lines named .parquet",
    required="told what they are and how to rename them; or skipped and counted by policy, and nothing of them is used",
)
def test_row_03_content_of_another_kind_than_the_name_says(shards: Shards, good: Path, tmp_path: Path) -> None:
    content = lines(["A document under a wrong name."])
    cases = {
        "gzip.jsonl": (gzip.compress(content), r"is gzip-compressed, .*rename it to end in \.gz"),
        "zstandard.jsonl.gz": (zstandard.compress(content), r"is Zstandard-compressed, .*rename it to end in \.zst"),
        "lines.parquet": (content, r"is not a Parquet file, .*rename it without \.parquet"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        shards.refused([good, tmp_path / name], rf"{re.escape(name)} {message}")
    manifest = shards.skipped([good, *(tmp_path / name for name in cases)])
    assert (held(manifest), dropped(manifest)) == (len(TEXTS), {"wrong ending": len(cases)})


@pytest.mark.fault(
    row=4,
    fault="JSONL with a missing field, a number for text, a broken line, a UTF-8 BOM, CRLF",
    required="named by line; BOM and CRLF simply work",
)
def test_row_04_jsonl_with_faulty_lines(shards: Shards, tmp_path: Path, observed: Callable[..., None]) -> None:
    path = tmp_path / "faulty.jsonl"
    faults = {
        b'{"body": "x"}': (r"line 41 has no field 'text' \(its fields: body\)", "missing field"),
        b'{"text": 3}': ("line 41 has a number for 'text', not text", "not text"),
        b'{"text": "cut': (r"line 41 is not JSON \(", "invalid JSON"),
    }
    for line, (message, reason) in faults.items():
        path.write_bytes(lines(TEXTS) + line + b"\n" + lines(["The last one."]))
        shards.refused([path], rf"faulty\.jsonl {message}")
        manifest = shards.skipped([path])
        assert (held(manifest), dropped(manifest)) == (len(TEXTS) + 1, {reason: 1})
    path.write_bytes(b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n"))
    manifest = shards.made([path])
    assert (held(manifest), dropped(manifest)) == (len(TEXTS), {})
    observed(
        f"each of {len(faults)} faulty lines named; with documents.on_bad_input=skip it is counted, and the "
        f"{len(TEXTS) + 1} others are there; BOM and CRLF simply work",
        lost="with on_bad_input=skip the faulty lines",
    )


@pytest.mark.fault(
    row=4,
    fault="a table with a short row, no UTF-8, NUL, no text; a score that is text; a filter that fails",
    required="one paragraph with file and line, or skipped and counted by policy; a filter that fails always stops",
)
def test_row_04_tables_and_filters_with_faulty_rows(
    shards: Shards, tmp_path: Path, observed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "faulty.csv"
    table = b"text,score\n" + b"".join(f"{text},3\n".encode() for text in TEXTS)
    keeps = "documents.filters=[{name: metadata, keep: score >= 3}]"
    reads = "documents.metadata_fields=[score]"
    faults = {
        b"short\n": ("line 42 has 1 cells, and the header has 2", "invalid CSV"),
        b"\xff,3\n": ("line 42 is not UTF-8 in 'text'", "invalid UTF-8"),
        b"a\0b,3\n": ("line 42 is not text: it contains NUL", "binary"),
        b",3\n": ("line 42 has no text in 'text'", "missing field"),
        b"x,many\n": ("line 42: filter 'metadata': score='many'", "filter metadata: cannot be judged"),
    }
    for line, (message, reason) in faults.items():
        path.write_bytes(table + line + b"The last one.,4\nA bad one.,2\n")
        shards.refused([path], rf"faulty\.csv {message}", reads, keeps)
        manifest = shards.skipped([path], reads, keeps)
        expected = {reason: 1, "filter metadata: not score >= 3": 1}
        assert (held(manifest), dropped(manifest)) == (len(TEXTS) + 1, expected)
    (tmp_path / "failing_filter.py").write_text("def keep(document): return document.metadata['absent']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path.write_bytes(table)
    for policy in ("error", "skip"):
        failing = ["documents.filters=[{name: failing_filter:keep}]", f"documents.on_bad_input={policy}"]
        shards.refused([path], r"failing_filter:keep' failed at .*failing_filter\.py:1 .*faulty\.csv line 2", *failing)
    observed(
        f"each of {len(faults)} faulty rows named; with documents.on_bad_input=skip it is counted, the others are there"
    )


def write_monsters(folder: Path, line_bytes: int, word_bytes: int, num_words: int, num_different: int) -> list[Path]:
    """A line, a word, and very many documents of one word, so many of them different."""
    line, word, words = folder / "line.jsonl", folder / "word.jsonl", folder / "words.jsonl"
    with open(line, "wb") as file:
        file.write(b'{"text": "')
        file.writelines(b"some text " * (1 << 17) for _ in range(line_bytes // (1 << 20)))
        file.write(b'"}\n' + lines(["The line after it."]))
    word.write_bytes(lines(["x" * word_bytes, "The word after it."]))
    with open(words, "wb") as file:
        file.writelines(b'{"text": "word%d"}\n' % (number % num_different) for number in range(num_words))
    return [line, word, words]


def check_monsters(
    folder: Path, tokenizer: Path, sizes: tuple[int, int, int, int], longest_bytes: int, most_bytes: int
) -> str:
    """Make shards of monsters of these sizes in less memory than that; what was seen, in words."""
    inputs = write_monsters(folder, *sizes)
    program = (
        "import re, sys\nfrom data_prep.__main__ import main\nsys.argv[0] = 'data_prep'\nmain()\n"
        "print('PEAK', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    command = [sys.executable, "-c", program, "shards", "--input", *map(str, inputs), "--tokenizer", str(tokenizer)]
    command += ["--output", str(folder / "out"), "--workers", "1", "shards.min_shards=2"]
    command.append(f"documents.max_document_bytes={longest_bytes}")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert "left out, longer than documents.max_document_bytes" in done.stderr
    peak_bytes = int(done.stdout.rpartition("PEAK ")[2]) * 1024
    assert peak_bytes < most_bytes
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    *_, num_words, num_different = sizes
    duplicates = {"duplicate": num_words - num_different} if num_words > num_different else {}
    assert dropped(manifest) == {"too many bytes": 1, **duplicates}
    assert held(manifest) == num_different + 3, "the long word, and what comes after it and after the line"
    return f"{peak_bytes / 1e6:,.0f} MB of memory at most; the line is left out and counted, all others are read"


@pytest.mark.spawn
@pytest.mark.fault(
    row=5,
    fault="one line of 400 MB; one word of 10 MB; 50,000 documents of one word",
    required="bounded memory, counted",
)
def test_row_05_long_line_long_word_and_tiny_documents(
    small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    sizes = (400 << 20, 10 << 20, 50_000, 50_000)
    # 1,230 MB where the long line is read whole.
    observed(check_monsters(tmp_path, small_tokenizer, sizes, 16 << 20, 600_000_000), lost="the line of 400 MB")


@pytest.mark.spawn
@pytest.mark.fault(
    row=57,
    fault="one unbroken word of 15 MB; one document of 60 MB without a space, a token for every byte",
    required="memory within the stated bound per worker",
)
@pytest.mark.parametrize(
    ("text", "count", "longest_bytes"),
    [("x", 15 << 20, 16 << 20), pytest.param("\U0001f9ff", 15_000_000, None, marks=pytest.mark.slow)],
)
def test_row_57_an_unbroken_word_and_a_document_of_60_mb_stay_within_the_stated_memory(
    text: str,
    count: int,
    longest_bytes: int | None,
    small_tokenizer: Path,
    tmp_path: Path,
    command: Command,
    observed: Callable[..., None],
) -> None:
    path = tmp_path / "word.jsonl"
    texts = [text * count, "The word after it.", "And another one."]
    path.write_text("".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in texts), encoding="utf-8")
    settings = [] if longest_bytes is None else [f"documents.max_document_bytes={longest_bytes}"]
    peak_bytes = peak_of_shards([path], small_tokenizer, tmp_path / "out", *settings)
    bound = DocumentSettings(max_document_bytes=longest_bytes or 64 << 20).worker_memory_bytes
    assert peak_bytes <= bound
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert held(manifest) == 3 and dropped(manifest) == {}
    assert [source["cut_words"] for source in manifest["sources"]] == [1]
    assert sum(source["text_bytes"] for source in manifest["sources"]) > count * len(text.encode()), "no byte is lost"
    assert command("shards", "--help") == 0
    assert "256 MiB plus 20 times documents.max_document_bytes of memory" in " ".join(command.output.split())
    observed(f"{peak_bytes / 1e6:,.0f} MB of memory at most where {bound / 1e6:,.0f} are stated; the word is counted")


def peak_of_shards(inputs: list[Path], tokenizer: Path, output: Path, *settings: str) -> int:
    """Most memory that a preparation in one process takes, in bytes."""
    program = (
        "import re, sys\nfrom data_prep.__main__ import main\nsys.argv[0] = 'data_prep'\nmain()\n"
        "print('PEAK', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    command = [sys.executable, "-c", program, "shards", "--input", *map(str, inputs), "--tokenizer", str(tokenizer)]
    command += [
        "--output",
        str(output),
        "--workers",
        "1",
        "shards.min_shards=2",
        "shards.valid_fraction=0.3",
        *settings,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("PEAK ")[2]) * 1024


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=5,
    fault="one line of 1 GB; one word of 10 MB; 10 million different documents of one word",
    required="bounded memory, counted",
)
def test_row_05_a_line_of_a_gigabyte_and_ten_million_documents(
    small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    sizes = (1 << 30, 10 << 20, 10_000_000, 10_000_000)
    observed(check_monsters(tmp_path, small_tokenizer, sizes, 64 << 20, 1_500_000_000), lost="the line of 1 GB")


@pytest.mark.fault(
    row=6,
    fault="documents that clean to nothing, or are all duplicates",
    required="counted by reason; clear error if nothing is left",
)
def test_row_06_documents_that_clean_to_nothing_or_are_duplicates(shards: Shards, good: Path, tmp_path: Path) -> None:
    nothing, same = tmp_path / "nothing.jsonl", tmp_path / "same.jsonl"
    nothing.write_bytes(lines([" \n\t", "\u200b", "\ufeff\u0001", ""]))
    same.write_bytes(lines(["Only one text.", "Only  one\ntext."] * 5))
    shards.refused([nothing], r"nothing is left of the inputs \(4 empty\)")
    shards.refused([same], "no document is left to train on")
    manifest = shards.made([good, nothing, same])
    assert (held(manifest), dropped(manifest)) == (len(TEXTS) + 1, {"duplicate": 9, "empty": 4})


@pytest.mark.fault(
    row=7,
    fault="emoji, combining marks, right-to-left, private-use, unassigned, lone surrogates, metaspace, literal [MASK]",
    required="text round-trips by the stated normalization; a literal special token never becomes its id",
)
def test_row_07_hard_characters_and_literal_special_tokens(
    shards: Shards, small_tokenizer: Path, tmp_path: Path
) -> None:
    texts = [
        "emoji \U0001f469\u200d\U0001f469\u200d\U0001f467 and \U0001f1e9\U0001f1ea",
        "combining e\u0301 o\u0308\u0323",
        "\u05e9\u05dc\u05d5\u05dd \u202b\u05e2\u05d5\u05dc\u05dd\u202c",
        "private \ue000 unassigned \U000e0fff \u0378",
        "lone \ud800 surrogate \udfff",
        "\u2581meta\u2581space",
        "[MASK] and [SEP], [CLS] [PAD] [UNK] and <0x41>",
    ]
    path = tmp_path / "hard.jsonl"
    path.write_bytes(lines(texts))
    assert shards([path], "shards.valid_fraction=0.3") == 0
    tokenizer = Tokenizer.load(small_tokenizer)
    found = []
    for tar in shards.output.glob("*.tar"):
        for record in records_of(tar):
            assert record.tokens.min() >= 5, "no id of a special token"
            stops = [*record.documents[1:].tolist(), len(record.tokens)]
            for start, stop in zip(record.documents.tolist(), stops, strict=True):
                found.append(tokenizer.decode(record.tokens[start:stop].tolist()))
    assert sorted(text.strip() for text in found) == sorted(normalized(text).strip() for text in texts)


@pytest.mark.fault(
    row=8,
    fault="a vocabulary larger than the corpus can give; smaller than the character set",
    required="clear error that says the possible range",
)
def test_row_08_a_vocabulary_that_the_corpus_cannot_give(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    said = []
    for size, problem in ((100_000, "is too large"), (270, "is too small")):
        output = tmp_path / "out"
        assert command("tokenizer", "--input", small_corpus, "--output", output, "--vocab-size", size) == 2
        said.append(re.search(rf"vocab_size={size} {problem} .* from (\d+) to (\d+) tokens", command.errors))
        assert not output.exists()
    smallest, largest = said[0].groups()
    assert said[1].groups() == (smallest, largest)
    for size in (smallest, largest):
        arguments = ["tokenizer", "--input", small_corpus, "--output", tmp_path / size, "--vocab-size", size]
        assert command(*arguments) == 0, command.errors


@pytest.mark.fault(
    row=9,
    fault="a Parquet file without the column; an empty one; one with the column and no row; nested types",
    required="clear error with the columns there are; no row is counted as an empty file",
)
def test_row_09_parquet_without_the_column_empty_and_nested(shards: Shards, good: Path, tmp_path: Path) -> None:
    tables = {
        "other": {"body": ["x", "y"], "id": [1, 2]},
        "empty": {"content": pa.array([], pa.string())},
        "nested": {"text": [{"a": "x"}], "lists": [["b"]]},
    }
    shown = {
        "other": r"other\.parquet has no column 'text' \(its columns: body, id\)",
        "empty": r"empty\.parquet has no column 'text' \(its columns: content\)",
        "nested": r"nested\.parquet has struct<a: string> in column 'text', not text \(its columns: text struct",
    }
    for name, table in tables.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        shards.refused([good, tmp_path / f"{name}.parquet"], shown[name])
    rowless = tmp_path / "rowless.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), rowless)
    shards.refused([rowless], r"nothing is left of the inputs \(1 file without a document\)")
    (tmp_path / "zero.parquet").touch()
    manifest = shards.skipped([good, *sorted(tmp_path.glob("*.parquet"))])
    assert held(manifest) == len(TEXTS)
    assert dropped(manifest) == {"missing field": 2, "not text": 1}


@pytest.mark.fault(
    row=10,
    fault="two sources with the same file; input changed between two runs of one output",
    required="noticed",
)
def test_row_10_the_same_file_twice_and_a_changed_input(
    shards: Shards, good: Path, tmp_path: Path, small_corpus: Path
) -> None:
    link, config = tmp_path / "link.jsonl", tmp_path / "two.yaml"
    link.symlink_to(good)
    config.write_text(f"sources: [{{name: one, input: {good}}}, {{name: two, input: {link}}}]\n")
    arguments = ["--config", config, "--tokenizer", shards.tokenizer, "--output", shards.output]
    assert shards.command("shards", *arguments) == 2 and "in two sources, one and two" in shards.command.errors
    assert_nothing_half_made(shards.output)
    shards.made([good])
    before = {path.name: path.read_bytes() for path in shards.output.iterdir() if path.is_file()}
    good.write_bytes(lines(read_texts(small_corpus)[:50]))
    assert shards.again([good]) == 1
    assert f"{good}" in shards.command.errors and "--fresh" in shards.command.errors
    assert {path.name: path.read_bytes() for path in shards.output.iterdir() if path.is_file()} == before
    assert shards.again([good], "--fresh") == 0
