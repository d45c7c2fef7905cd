"""A tokenizer's folder after damage to one of its files: the very same ids or a refusal, and never a crash."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizer.foreign_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from data_prep.tokenizer.tokenizer import INFO_NAME, MODEL_NAME, Tokenizer
from data_prep.tokenizer.tokenizer_info import TokenizerInfo
from tests.fuzzing.mutations import EXAMPLES, damage, fuzz, mutated_bytes
from tests.fuzzing.watching import read_or_refuse

TEXT = "The old cat crossed the river.\n\nIt rained 漢字 [MASK] [CLS] on <0x41> ships, \u00e9."
_OPEN_MANY = """
import sys
from pathlib import Path
from data_prep.base.errors import UserError
from data_prep.tokenizer.sentencepiece_model import open_model, token_spans, vocabulary_of
num_opened = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    print(path.name, flush=True)
    try:
        processor = open_model(path.read_bytes(), path.name)
    except UserError:
        continue
    vocabulary_of(processor)
    processor.encode([" The old cat crossed the river.", " \\u6f22"], num_threads=1)
    token_spans(processor, " It rained.")
    num_opened += 1
print("opened", num_opened)
"""


def copied(tokenizer: Path, factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tokenizer, factory.mktemp("copy") / "tokenizer"))


def ids_of(folder: Path) -> list[int]:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode_text(TEXT)
    tokenizer.decode(ids.tolist())
    return [int(number) for number in ids]


@functools.cache
def original(folder: Path) -> tuple[TokenizerInfo, list[int]]:
    """The information and the ids of a tokenizer that stays as it is."""
    return Tokenizer.load(folder).info, ids_of(folder)


@pytest.mark.spawn
def test_no_damaged_model_crashes_the_process_that_opens_it(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """In a process of its own, which a fault of the C++ library would end."""
    folder = tmp_path / "models"
    folder.mkdir()
    whole = (tiny_tokenizer / MODEL_NAME).read_bytes()
    (folder / "whole").write_bytes(whole)
    written: list[bytes] = []

    @fuzz(500)
    @given(data=mutated_bytes(whole))
    def write(data: bytes) -> None:
        (folder / f"{len(written):06d}").write_bytes(data)
        written.append(data)

    write()
    command = [sys.executable, "-c", _OPEN_MANY, str(folder)]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 + EXAMPLES)
    lines = answer.stdout.split("\n")
    assert answer.returncode == 0, f"{lines[-2]} of {folder}: status {answer.returncode}\n{answer.stderr[-2000:]}"
    assert int(lines[-2].removeprefix("opened ")) > 0 and len(written) >= 200


@fuzz(50)
@given(data=st.data())
def test_a_damaged_model_is_refused_or_gives_the_same_ids(
    data: st.DataObject, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copied(tiny_tokenizer, tmp_path_factory)
    is_changed = data.draw(st.booleans()) and damage(data, folder / MODEL_NAME)
    found = read_or_refuse(lambda: ids_of(folder), folder)
    assert found == original(tiny_tokenizer)[1] or (is_changed and found is None)


@fuzz(60)
@given(data=st.data())
def test_damaged_information_is_refused_or_gives_the_same_ids(
    data: st.DataObject, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copied(tiny_tokenizer, tmp_path_factory)
    damage(data, folder / INFO_NAME)
    found = read_or_refuse(lambda: ids_of(folder), folder)
    assert found is None or found == original(tiny_tokenizer)[1]


@fuzz(60)
@given(data=st.data())
def test_a_damaged_foreign_tokenizer_is_refused_or_says_that_it_is_another(
    data: st.DataObject, tiny_foreign_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """There is no information file, so any sound tokenizer is taken; its fingerprint tells whether it is this one."""
    folder = copied(tiny_foreign_tokenizer, tmp_path_factory)
    name = data.draw(st.sampled_from((TOKENIZER_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME)))
    damage(data, folder / name)

    def read() -> tuple[str, list[int], int]:
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode_text(TEXT)
        tokenizer.decode(ids.tolist())
        assert not np.isin(ids, tokenizer.special_tokens.never_in_text).any()
        assert len(ids) == 0 or int(ids.max()) < tokenizer.vocab_size
        return tokenizer.fingerprint, ids.tolist(), tokenizer.vocab_size

    found = read_or_refuse(read, folder)
    info, ids = original(tiny_foreign_tokenizer)
    if found is not None and found[0] == info.fingerprint:
        assert found[1:] == (ids, info.vocab_size)


@fuzz(50)
@given(data=st.data())
def test_a_foreign_tokenizer_with_information_is_refused_or_gives_the_same_ids(
    data: st.DataObject, tiny_foreign_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copied(tiny_foreign_tokenizer, tmp_path_factory)
    original(tiny_foreign_tokenizer)[0].write(folder)
    name = data.draw(st.sampled_from((TOKENIZER_NAME, INFO_NAME)))
    is_changed = data.draw(st.booleans()) and damage(data, folder / name)
    found = read_or_refuse(lambda: ids_of(folder), folder)
    assert found == original(tiny_foreign_tokenizer)[1] or (is_changed and found is None)
