"""The files of texts, pairs and ids that commands read, after damage: every line as it stands, or a refusal."""

from __future__ import annotations

import argparse
import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset.removed_names import read_document_ids
from launch.embed import input_texts
from launch.fill_mask import read_texts
from launch.next_sentence import read_pairs
from tests.fuzzing.mutations import HOSTILE_TEXTS, fuzz, mutated_bytes
from tests.fuzzing.watching import read_or_refuse

TEXTS = "\ufeffThe old [MASK] crossed the river.\r\n\n漢字 [MASK] 🙂\u2028 more\rand more\n  spaces \t\n\nlast".encode()
PAIRS = "The door opened.\tThe room was dark.\n\n漢字\t🙂 \u2028\tx\r\nlast\tone\n".encode()
IDS = b"# of 2024\n00f3a9c2d4e5b617\nFFFFFFFFFFFFFFFF # \xe6\xbc\xa2\r\n\n  0000000000000001\n00f3a9c2d4e5b617\n"
_ENDS_OF_LINES = "\r\n|[\n\r]"

hostile_lines = st.lists(st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=5), max_size=3).map(
    lambda lines: "\n".join(lines).encode(errors="surrogatepass")
)


def lines_of(content: bytes) -> list[str]:
    """The lines that hold anything, by the plainest reading; none of what is no UTF-8."""
    try:
        return [line.strip() for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    except UnicodeDecodeError:
        return []


def give(patch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let standard input hold these bytes."""
    patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))


@fuzz(120)
@given(content=mutated_bytes(TEXTS) | hostile_lines)
def test_damaged_lines_of_text_are_refused_or_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("texts") / "input.txt"
    path.write_bytes(content)
    expected = lines_of(content) or None
    assert read_or_refuse(lambda: input_texts(argparse.Namespace(input=path)), path.parent) == expected
    with pytest.MonkeyPatch.context() as patch:
        give(patch, content)
        found = read_or_refuse(lambda: read_texts([]), path.parent)
        assert (None if found is None else [one.text for one in found]) == expected
        give(patch, content)
        assert read_or_refuse(lambda: input_texts(argparse.Namespace(input=None)), path.parent) == expected


@fuzz(80)
@given(content=mutated_bytes(PAIRS) | hostile_lines)
def test_damaged_pairs_are_refused_or_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [tuple(text.strip() for text in line.split("\t", 1)) for line in content_lines(content)]
    expected = pairs if pairs and all(len(pair) == 2 and all(pair) for pair in pairs) else None
    with pytest.MonkeyPatch.context() as patch:
        give(patch, content)
        assert read_or_refuse(lambda: read_pairs([]), folder) == expected


def content_lines(content: bytes) -> list[str]:
    """The same, with the tabs at their ends."""
    try:
        return [line for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    except UnicodeDecodeError:
        return []


@fuzz(80)
@given(content=mutated_bytes(IDS) | hostile_lines)
def test_damaged_ids_are_refused_or_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ids") / "ids.txt"
    path.write_bytes(content)
    found = read_or_refuse(lambda: read_document_ids(str(path)), path.parent)
    assert (None if found is None else found.tolist()) == ids_of(content)
    assert found is None or found.dtype == np.uint64


def ids_of(content: bytes) -> list[int] | None:
    """The ids of a file, by the plainest reading; None where it has to be refused."""
    try:
        lines = re.split(_ENDS_OF_LINES, content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None
    words = [word for line in lines if (word := line.split("#")[0].strip())]
    if not words or any(len(word) != 16 or set(word) - set("0123456789abcdefABCDEF") for word in words):
        return None
    return sorted({int(word, 16) for word in words})


def test_whole_files_are_read() -> None:
    assert lines_of(TEXTS)[1:] == ["漢字 [MASK] 🙂\u2028 more\rand more", "spaces", "last"]
    assert ids_of(IDS) == [1, 0x00F3A9C2D4E5B617, 0xFFFFFFFFFFFFFFFF]
