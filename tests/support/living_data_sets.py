"""Data sets of named sources that tests add to and remove from, and what they hold, independent of shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config.preparation_config import PreparationConfig
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.shards import read_records
from data_prep.pipeline.plan import make_plan
from data_prep.pipeline.preparation import prepare_shards
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

Contents = Counter[tuple[str, str, int, tuple[int, ...], tuple[int, ...]]]
"""Split, source, id, tokens and sentence starts of every document."""


def read_texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]


def make_data_set(
    folder: Path,
    texts: Mapping[str, Sequence[str]],
    tokenizer_folder: Path,
    *,
    add: bool = False,
    fresh: bool = False,
    inputs: Path | None = None,
    **settings: Any,
) -> Manifest:
    """Make a data set of these sources, or add them to the one in `folder`; the texts lie in the folder `inputs`."""
    inputs = inputs or folder.parent / f"{folder.name}-inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    sources = []
    for name, lines in texts.items():
        path = inputs / f"{name}.jsonl"
        if not path.exists():  # written again it would be another input
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines), encoding="utf-8")
        sources.append({"name": name, "input": str(path), "license": "CC0-1.0"})
    shards = {"min_shards": 3, "valid_fraction": 0.2, "record_tokens": 1500}
    config = PreparationConfig.model_validate({"sources": sources, "shards": shards, **settings})
    tokenizer = Tokenizer.load(tokenizer_folder)
    plan = make_plan(config, tokenizer, read_manifest(str(folder)) if add else None)
    return prepare_shards(plan, tokenizer, str(folder), 1, fresh)[0]


def contents(folder: Path, digest: str | None = None) -> Contents:
    """What a version of the data set holds, read record by record."""
    manifest = read_manifest(str(folder), digest)
    names = [source.name for source in manifest.sources]
    found: Contents = Counter()
    for shard in manifest.shards:
        split = shard.name.partition("-")[0]
        for _, record, _ in read_records(folder / shard.name):
            stops = [*record.documents[1:].tolist(), len(record.tokens)]
            columns = (record.documents.tolist(), stops, record.sources.tolist(), record.document_ids.tolist())
            for start, stop, source, document in zip(*columns, strict=True):
                sentences = record.sentences[(record.sentences >= start) & (record.sentences < stop)].astype(np.int64)
                tokens = tuple(record.tokens[start:stop].tolist())
                found[(split, names[source], document, tokens, tuple((sentences - start).tolist()))] += 1
    return found


def document_ids(folder: Path, source: str | None = None) -> list[int]:
    """Ids of all documents, or of a source's, rising."""
    return sorted(document for _, name, document, _, _ in contents(folder) if source in (None, name))


def file_bytes(folder: Path) -> dict[str, bytes]:
    """The files that lie in the folder itself."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def stopped_after(num_writes: int) -> Iterator[None]:
    """Within the block the process is stopped (KeyboardInterrupt) at its next write after so many to local files."""
    local_write, left = storage.local_write, num_writes

    def write(url: str | Path) -> AbstractContextManager[Path]:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return local_write(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "local_write", write)
        yield
