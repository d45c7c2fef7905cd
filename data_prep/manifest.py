"""The manifest: the one file that makes a folder of shards a data set.

It names every shard with its checksum and counts, the tokenizer by fingerprint, the configuration, the inputs and
what was dropped. It is written last and atomically: no manifest, no data set.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep import storage
from data_prep.errors import UserError

MANIFEST_NAME = "manifest.json"
TOKEN_COUNTS_NAME = "token_counts.safetensors"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1

Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """A file of the data set by name (no folder in it), size in bytes and sha256."""

    name: FileName
    bytes: Count
    sha256: Sha256


class ShardRecord(FileRecord):
    """A shard tar, its index file and its counts."""

    index: FileRecord
    records: Count
    documents: Count
    sentences: Count
    tokens: Count
    min_document_tokens: Count = Field(description="tokens of the shortest document; bounds the sequences in a row")


class SplitRecord(_Record):
    """The shards of `train` or `valid`, in order, with totals."""

    shards: tuple[ShardRecord, ...]
    documents: Count
    sentences: Count
    tokens: Count
    unigram_entropy_nats: float | None = Field(
        description="entropy of the split's own token frequencies: the MLM loss of a model that knows no context"
    )


class TokenizerRecord(_Record):
    """The tokenizer that made the ids."""

    fingerprint: Sha256
    vocab_size: Annotated[int, Field(gt=5)]
    token_dtype: Literal["uint16", "uint32"]


class InputRecord(_Record):
    """One input file, as it was when it was read."""

    url: str
    source: str = Field(description="name of the source that it belongs to")
    bytes: Count
    fingerprint: str = Field(description="sha256 of the file, or of the sha256 of its parts")


class SourceRecord(_Record):
    """A named source of text; its number is its place in `Manifest.sources`."""

    name: str
    url: str | None = None
    licence: str | None = None
    date: str | None = None
    language: str | None = None
    documents: Count
    sentences: Count
    tokens: Count


class Manifest(_Record):
    """A data set of shards."""

    format_version: Literal[1]
    clozeworks_version: str
    tokenizer: TokenizerRecord
    config: dict[str, Any]
    inputs: tuple[InputRecord, ...]
    sources: tuple[SourceRecord, ...]
    dropped: dict[str, Count] = Field(description="documents left out, by reason")
    train: SplitRecord
    valid: SplitRecord
    token_counts: FileRecord = Field(
        description="safetensors: train, valid (vocab_size,) int64 counts of every token id"
    )
    parent: str | None = Field(None, description="digest of the data set that this one grew from")

    def split(self, name: Literal["train", "valid"]) -> SplitRecord:
        return self.train if name == "train" else self.valid

    @property
    def digest(self) -> str:
        """sha256 of the manifest's canonical JSON: the name of exactly this data."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def read_manifest(folder: str) -> Manifest:
    """Read the manifest of the shard set at `folder` (a path or URL).

    Raises:
        UserError: there is none, it is of a newer format, or it is not a manifest.
    """
    url = storage.join(folder, MANIFEST_NAME)
    where = storage.redact(url)
    if not storage.exists(url):
        raise UserError(
            f"{storage.redact(folder)} holds no {MANIFEST_NAME}, so it is no complete shard set; "
            "make one with 'python -m data_prep shards', or run it again if it was stopped"
        )
    try:
        values = json.loads(storage.read_bytes(url))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not JSON ({error}); it was damaged or edited, make the shards again") from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{where} has format version {version!r} and this release reads {FORMAT_VERSION}; "
            "use the release that wrote it, or make the shards again"
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where} is damaged at {place}: {first['msg']}; make the shards again") from None


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest atomically; the last act of a preparation."""
    storage.write_bytes(storage.join(folder, MANIFEST_NAME), manifest.to_json().encode())
