"""The manifest: the one file that makes a folder of shards a data set.

It names every shard with its checksum and counts, the tokenizer by fingerprint, the configuration, the inputs and
what was dropped. It is written last and atomically: no manifest, no data set. manifest.json is the current version;
those before it stay as manifest-000001.json and so on, for runs that began with them (`data_prep.data_set.versions`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from data_prep.errors import UserError
from data_prep.files import storage
from data_prep.tokenizing.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens

MANIFEST_NAME = "manifest.json"
TOKEN_COUNTS_NAME = "token_counts.safetensors"
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 2

STEPS: dict[str, tuple[str, ...]] = {
    "reading": (
        "invalid UTF-8",
        "invalid JSON",
        "no object",
        "missing field",
        "not text",
        "binary",
        "damaged file",
        "wrong ending",
        "empty file",
        "too many bytes",
        "unreadable",
    ),
    "cleaning": ("empty", "too short", "too long"),
    "deduplication": ("duplicate", "near duplicate", "in the data set already", "removed earlier"),
    "removal": ("removed",),
}
"""The steps that may leave a document out, in their order, each with its reasons; the last is the command `remove`."""

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
    special_tokens: SpecialTokens = Field(OWN_SPECIAL_TOKENS, description="left out in JSON where they are ids 0 to 4")

    @model_serializer(mode="wrap")
    def _without_own_special_tokens(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Manifests from before there were foreign tokenizers keep their digest.
        values: dict[str, Any] = serialise(self)
        if self.special_tokens == OWN_SPECIAL_TOKENS:
            del values["special_tokens"]
        return values


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
    dropped: dict[str, Count] = Field(description="what was left out of it, by reason (`STEPS` names them)")
    documents: Count
    sentences: Count
    tokens: Count
    words: Count = Field(description="runs of characters between spaces; tokens / words is its fertility")
    text_bytes: Count = Field(description="UTF-8 bytes of normalised text")


class StepRecord(_Record):
    """What a step of preparation took in, left out by reason, and gave out, in documents."""

    name: str
    documents_in: Count
    dropped: dict[str, Count]
    documents_out: Count


class UnknownVersion(UserError):
    """A data set has no version of the digest that is asked for."""


class RemovalRecord(_Record):
    """What the command `remove` took out of the data set: a whole source, or documents by their ids."""

    version: PositiveInt = Field(description="the first version without it")
    source: str | None = Field(None, description="name of the source")
    ids: FileRecord | None = Field(
        None, description="safetensors: document_ids (n,) uint64, rising; they are left out of additions too"
    )
    documents: Count = Field(description="documents taken out, each piece of one that was split counted")
    tokens: Count
    note: str | None = Field(None, description="what the user says of it, such as who asked for it and when")

    @model_validator(mode="after")
    def _of_one_kind(self) -> RemovalRecord:
        if (self.source is None) == (self.ids is None):
            raise ValueError("a removal names either a source or a file of ids")
        return self


class Manifest(_Record):
    """A data set of shards."""

    format_version: Literal[2]
    clozeworks_version: str
    tokenizer: TokenizerRecord
    config: dict[str, Any]
    inputs: tuple[InputRecord, ...]
    sources: tuple[SourceRecord, ...]
    train: SplitRecord
    valid: SplitRecord
    token_counts: FileRecord = Field(
        description="safetensors: train, valid (vocab_size,) int64 counts of every token id"
    )
    version: PositiveInt = Field(1, description="counts the manifests of this folder")
    parent: str | None = Field(None, description="digest of the version before, from which this one was made")
    removals: tuple[RemovalRecord, ...] = Field((), description="what was removed, in this and all earlier versions")

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """All shards, train first."""
        return (*self.train.shards, *self.valid.shards)

    @property
    def removed_sources(self) -> frozenset[str]:
        """Names of the sources that were removed; they keep their numbers and have no document."""
        return frozenset(removal.source for removal in self.removals if removal.source is not None)

    def split(self, name: Literal["train", "valid"]) -> SplitRecord:
        return self.train if name == "train" else self.valid

    @property
    def dropped(self) -> dict[str, int]:
        """Documents left out of all sources, by reason, in the order of `STEPS`."""
        totals: Counter[str] = Counter()
        for source in self.sources:
            totals.update(source.dropped)
        return {reason: totals[reason] for reasons in STEPS.values() for reason in reasons if totals[reason]}

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """What each step took in, dropped and gave out; the last gives out what the shards hold."""
        dropped = self.dropped
        left = sum(source.documents for source in self.sources) + sum(dropped.values())
        records = []
        for name, reasons in STEPS.items():
            here = {reason: dropped[reason] for reason in reasons if reason in dropped}
            records.append(
                StepRecord(name=name, documents_in=left, dropped=here, documents_out=left - sum(here.values()))
            )
            left = records[-1].documents_out
        return tuple(records)

    @property
    def digest(self) -> str:
        """sha256 of the manifest's canonical JSON: the name of exactly this data."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def read_manifest(folder: str, digest: str | None = None) -> Manifest:
    """Read the manifest of the shard set at `folder` (a path or URL): the current version, or that of `digest`.

    Raises:
        UserError: there is none, it is of a newer format, or it is not a manifest.
        UnknownVersion: no version that is kept has that digest.
    """
    url = storage.join(folder, MANIFEST_NAME)
    if not storage.exists(url):
        raise UserError(
            f"{storage.redact(folder)} holds no {MANIFEST_NAME}, so it is no complete shard set; "
            "make one with 'python -m data_prep shards', or run it again if it was stopped"
        )
    current = _parse(url)
    if digest is None or current.digest == digest:
        return current
    versions = [*_older_versions(folder, current), current]
    for version in versions:
        if version.digest == digest:
            return version
    known = ", ".join(f"{version.version} ({version.digest[:16]})" for version in versions)
    raise UnknownVersion(
        f"{storage.redact(folder)} holds no version with the manifest digest {digest[:16]}, only {known}; "
        "it was deleted by 'remove --purge', or this is another data set"
    )


def list_versions(folder: str) -> list[Manifest]:
    """All versions that are kept, the oldest first, the current last.

    Raises:
        UserError: as `read_manifest`, of any of them.
    """
    current = read_manifest(folder)
    return [*_older_versions(folder, current), current]


def older_version_name(version: int) -> str:
    """Name of the manifest of a version that is not the current one."""
    return f"manifest-{version:06d}.json"


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest atomically; the last act of a preparation. `versions.publish` keeps the old one."""
    storage.write_bytes(storage.join(folder, MANIFEST_NAME), manifest.to_json().encode())


def _older_versions(folder: str, current: Manifest) -> list[Manifest]:
    # By name, since what lies at https:// cannot be listed.
    urls = [storage.join(folder, older_version_name(number)) for number in range(1, current.version)]
    return [_parse(url) for url in urls if storage.exists(url)]


def _parse(url: str) -> Manifest:
    where = storage.redact(url)
    try:
        values = json.loads(storage.read_bytes(url))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
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
