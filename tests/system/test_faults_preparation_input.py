"""Bad input to `python -m data_prep` as a whole (rows 4, 5 and 57 of the fault list).

Each kind of bad input is refused or counted in the tests of its format, which are marked with their rows.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.config.preparation_config import DocumentSettings
from tests.support.data_prep_command import Command, assert_nothing_half_made

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = [f"The old teacher crossed the river number {number}. Nobody knew why." for number in range(40)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def held(manifest: dict[str, Any]) -> int:
    return manifest["train"]["documents"] + manifest["valid"]["documents"]


def dropped(manifest: dict[str, Any]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for source in manifest["sources"]:
        for reason, count in source["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return reasons


@pytest.mark.fault(
    row=4,
    fault="JSONL with a missing field, a number for text, a broken line, a UTF-8 BOM, CRLF; in a command",
    required="one paragraph that names the line, and nothing half-made; or counted by policy, and verified",
)
def test_row_04_a_command_names_faulty_lines_or_counts_them(
    command: Command, small_tokenizer: Path, tmp_path: Path
) -> None:
    path, numbers = tmp_path / "faulty.jsonl", itertools.count()

    def run(content: bytes, *settings: str) -> Path:
        path.write_bytes(content)
        output = tmp_path / f"out-{next(numbers)}"
        words = ["--input", path, "--tokenizer", small_tokenizer, "--output", output, "--workers", 1]
        status = command("shards", *words, "shards.min_shards=2", *settings)
        assert status == (0 if (output / "manifest.json").exists() else 1)
        return output

    def counted(output: Path) -> tuple[int, dict[str, int]]:
        manifest = json.loads((output / "manifest.json").read_text())
        assert command("verify", output, "--workers", 1) == 0
        return held(manifest), dropped(manifest)

    faults = {
        b'{"body": "x"}': (r"line 41 has no field 'text' \(its fields: body\)", "missing field"),
        b'{"text": 3}': ("line 41 has a number for 'text', not text", "not text"),
        b'{"text": "cut': (r"line 41 is not JSON \(", "invalid JSON"),
    }
    for line, (message, reason) in faults.items():
        content = lines(TEXTS) + line + b"\n" + lines(["The last one."])
        assert_nothing_half_made(run(content))
        assert re.search(rf"faulty\.jsonl {message}", command.errors), command.errors
        assert len(command.errors.strip().splitlines()[-1]) < 1000
        assert counted(run(content, "documents.on_bad_input=skip")) == (len(TEXTS) + 1, {reason: 1})
    plain = b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n")
    assert counted(run(plain)) == (len(TEXTS), {})


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
    peak_bytes, told = peak_of_shards(
        inputs, tokenizer, folder / "out", f"documents.max_document_bytes={longest_bytes}"
    )
    assert "left out, longer than documents.max_document_bytes" in told and peak_bytes < most_bytes
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
    peak_bytes, _ = peak_of_shards([path], small_tokenizer, tmp_path / "out", "shards.valid_fraction=0.3", *settings)
    bound = DocumentSettings(max_document_bytes=longest_bytes or 64 << 20).worker_memory_bytes
    assert peak_bytes <= bound
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert held(manifest) == 3 and dropped(manifest) == {}
    assert [source["cut_words"] for source in manifest["sources"]] == [1]
    assert sum(source["text_bytes"] for source in manifest["sources"]) > count * len(text.encode()), "no byte is lost"
    assert command("shards", "--help") == 0
    assert "256 MiB plus 20 times documents.max_document_bytes of memory" in " ".join(command.output.split())
    observed(f"{peak_bytes / 1e6:,.0f} MB of memory at most where {bound / 1e6:,.0f} are stated; the word is counted")


def peak_of_shards(inputs: list[Path], tokenizer: Path, output: Path, *settings: str) -> tuple[int, str]:
    """Most memory that a preparation in one process takes, in bytes, and what it prints of errors."""
    program = (
        "import re, sys\nfrom data_prep.__main__ import main\nsys.argv[0] = 'data_prep'\nmain()\n"
        "print('PEAK', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    command = [sys.executable, "-c", program, "shards", "--input", *map(str, inputs), "--tokenizer", str(tokenizer)]
    command += ["--output", str(output), "--workers", "1", "shards.min_shards=2", *settings]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("PEAK ")[2]) * 1024, done.stderr


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
