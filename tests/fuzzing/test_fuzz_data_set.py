"""A whole data set of which one file was changed: `verify` finds it, whichever file and whatever the change."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import open_dataset
from data_prep.dataset.manifest import MANIFEST_NAME, TOKENIZER_FOLDER
from data_prep.dataset.verification import verify_shards
from data_prep.dataset.versions import STAMPS_NAME
from data_prep.tokenizer.tokenizer_info import INFO_NAME, TokenizerInfo
from tests.fuzzing.mutations import damage, fuzz, mutated_bytes
from tests.fuzzing.sealed import damaged_tensors, sealed_tar
from tests.fuzzing.watching import read_or_refuse, temporary_folder
from tests.support.living_data_sets import ShardIndex, read_index, read_records
from trainer.data.shard_set import open_shard_set

TAR, INDEX = "train-000000.tar", "train-000000.index.safetensors"


def copied(shards: Path, factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(shards, factory.mktemp("copy") / "shards"))


@fuzz(60, slow=True)
@given(data=st.data())
def test_verify_accepts_no_data_set_with_a_changed_file(
    data: st.DataObject, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = sorted(str(path.relative_to(tiny_shards)) for path in tiny_shards.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(names))
    folder = copied(tiny_shards, tmp_path_factory)
    is_changed = damage(data, folder / name)
    found = read_or_refuse(lambda: verify_shards(str(folder))[1], folder.parent, temporary_folder())
    if is_changed and not found and found is not None:
        # What tokenizer_info.json says of the training, and how it is laid out, is under no checksum. The stamps of the
        # inputs are of no version: where they are damaged, the content of the inputs is compared.
        assert name in (f"{TOKENIZER_FOLDER}/{INFO_NAME}", STAMPS_NAME), f"{name} was changed and verify finds nothing"
        assert _what_counts(folder) == _what_counts(tiny_shards)


def _what_counts(folder: Path) -> tuple[object, ...]:
    """What the information on a tokenizer decides."""
    info = TokenizerInfo.read(folder / TOKENIZER_FOLDER)
    assert info is not None and info.settings is not None
    settings = info.settings
    decisive = (settings.normalization, settings.user_symbols)
    return (info.fingerprint, info.vocab_size, info.kind, info.special_tokens, *decisive)


@fuzz(150)
@given(data=st.data())
def test_a_damaged_tar_gives_whole_records_or_is_refused(
    data: st.DataObject, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    original = (tiny_shards / TAR).read_bytes()
    path = tmp_path_factory.mktemp("tar") / TAR
    path.write_bytes(data.draw(mutated_bytes(original) | sealed_tar(original)))
    records = read_or_refuse(lambda: list(read_records(path)), path.parent)
    for _, record, offset in records or ():
        tokens = record.tokens.tobytes()
        assert path.read_bytes()[offset : offset + len(tokens)] == tokens


@fuzz(150)
@given(data=st.data())
def test_an_index_with_a_checksum_of_its_own_is_consistent_or_refused(
    data: st.DataObject, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whoever made the index made the manifest too: sha256 and size agree."""
    record = open_dataset(tiny_shards).manifest.train.shards[0]
    changed = data.draw(damaged_tensors((tiny_shards / INDEX).read_bytes()))
    folder = tmp_path_factory.mktemp("index")
    (folder / INDEX).write_bytes(changed)
    file = record.index.model_copy(update={"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()})
    record = record.model_copy(update={"index": file})
    index: ShardIndex | None = read_or_refuse(lambda: read_index(str(folder), record), folder)
    if index is not None:
        assert int(index.document_lengths.sum(dtype=np.int64)) == record.tokens
        assert len(index.document_ids) == len(index.document_sources) == record.documents


@fuzz(60)
@given(data=st.data())
def test_token_counts_with_a_checksum_of_their_own_are_refused_or_usable(
    data: st.DataObject, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = json.loads((tiny_shards / MANIFEST_NAME).read_bytes())
    name = values["token_counts"]["name"]
    changed = data.draw(damaged_tensors((tiny_shards / name).read_bytes()))
    folder = tmp_path_factory.mktemp("counts")
    (folder / name).write_bytes(changed)
    values["token_counts"] |= {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    (folder / MANIFEST_NAME).write_text(json.dumps(values))
    counts = read_or_refuse(lambda: open_shard_set(str(folder)).token_counts("train"), folder)
    if counts is not None:
        assert counts.shape == (values["tokenizer"]["vocab_size"],) and counts.dtype == np.int64
