"""The parts of a manifest: files, shards, tokenizer, inputs, sources, removals; each with its counts and checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
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

from data_prep.base.errors import UserError
from data_prep.base.validation import FileName, Sha256, first_problem
from data_prep.documents.rejects import READING_REASONS
from data_prep.filters.protocol import is_filter_reason
from data_prep.storage import storage
from data_prep.tokenizer.special_tokens import MAX_VOCAB_SIZE, OWN_SPECIAL_TOKENS, SpecialTokens

REBUILD = (
    "restore it from a copy, or make the data set again in another folder, with the same bytes ('clozeworks verify' "
    "prints the command)"
)
"""The fix for a damaged shard, index, provenance sidecar or file of token counts."""

STEPS: dict[str, tuple[str, ...]] = {
    "reading": READING_REASONS,
    "filtering": (),
    "cleaning": ("empty", "too short", "too long"),
    "deduplication": ("duplicate", "near duplicate", "in the data set already", "removed earlier"),
    "removal": ("removed",),
}
"""The steps that may leave a document out, in their order, each with its reasons in the order of reports.

The last step is the command `remove`.
"""


def step_of(reason: str) -> str:
    """Return the step that drops documents for this reason.

    A filter's reason names the filter. Every reason that no later step has is one of reading: formats have their own.
    """
    if is_filter_reason(reason):
        return "filtering"
    return next((step for step, reasons in STEPS.items() if reason in reasons), "reading")


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
ShardFileName = Annotated[str, Field(pattern=r"^(train|valid)-[0-9]{6}\.tar$")]


class ManifestPart(BaseModel):
    """A frozen part of a manifest; unknown fields are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class FileRecord(ManifestPart):
    """A file of the data set: name without a folder, size in bytes, sha256."""

    name: FileName
    bytes: Count
    sha256: Sha256


def record_of(name: str, data: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return FileRecord(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def read_file(folder: str, file: FileRecord, fix: str = REBUILD) -> bytes:
    """Return the content of a file of the data set in `folder`; `fix` is that of the errors."""
    url = storage.join(folder, file.name)
    if not storage.exists(url):
        raise UserError(f"{storage.redact(url)} is missing", fix=fix, code="missing-data-file")
    data = storage.read_bytes(url)
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise UserError(
            f"{storage.redact(url)} has other content: its sha256 is {found}, and the manifest names {file.sha256}",
            fix=fix,
            code="checksum-mismatch",
        )
    return data


class ShardRecord(FileRecord):
    """A shard tar, its index file and its counts."""

    name: ShardFileName
    index: FileRecord
    records: Count
    documents: Count
    sentences: Count
    tokens: Count
    min_document_tokens: Count = Field(description="tokens of the shortest document")
    source: str | None = Field(
        None, description="name of the one source of its documents, where sources have weights or budgets"
    )
    provenance: FileRecord | None = Field(
        None, description="Parquet: id, URL and metadata of every document read, dropped copies included"
    )

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The shard, its index and its sidecar, if any."""
        return (self, self.index) if self.provenance is None else (self, self.index, self.provenance)


class SplitRecord(ManifestPart):
    """The shards of `train` or `valid`, in order, with totals."""

    shards: tuple[ShardRecord, ...]
    documents: Count
    sentences: Count
    tokens: Count
    unigram_entropy_nats: float | None = Field(
        description="entropy of the split's own token frequencies: the MLM loss of a model that knows no context"
    )

    @model_validator(mode="after")
    def _adds_up(self) -> SplitRecord:
        for field in ("documents", "sentences", "tokens"):
            total, held = getattr(self, field), sum(getattr(shard, field) for shard in self.shards)
            if total != held:
                raise ValueError(f"it counts {total} {field} and its shards hold {held}")
        return self


class TokenizerRecord(ManifestPart):
    """The tokenizer that made the ids."""

    fingerprint: Sha256
    vocab_size: Annotated[int, Field(gt=5, le=MAX_VOCAB_SIZE)]
    token_dtype: Literal["uint16", "uint32"]
    special_tokens: SpecialTokens = Field(OWN_SPECIAL_TOKENS)


class InputRecord(ManifestPart):
    """One input file at the time it was read: a line of a file of inputs, or in the manifest of an earlier release."""

    url: str
    source: str = Field(description="name of the source that it belongs to")
    bytes: Count
    fingerprint: str = Field(description="sha256 of the file, or of the sha256 of its parts")


class InputsFile(FileRecord):
    """A file with an `InputRecord` as JSON on each line: the inputs of one preparation."""

    inputs: Count = Field(description="number of its lines")


def inputs_file(inputs: Iterable[InputRecord], version: int) -> tuple[InputsFile, bytes]:
    """Return the content of the file with the inputs that made a version, and its record."""
    lines = [json.dumps(each.model_dump(), ensure_ascii=False, sort_keys=True) for each in inputs]
    data = "".join(f"{line}\n" for line in lines).encode()
    return InputsFile(**record_of(f"inputs-{version:06d}.jsonl", data).model_dump(), inputs=len(lines)), data


def read_inputs(folder: str, inputs: Iterable[InputRecord | InputsFile]) -> Iterator[InputRecord]:
    """Yield the inputs of a data set in `folder`, as its manifest names them.

    Raises:
        UserError: a file of them is missing or damaged.
    """
    for each in inputs:
        if isinstance(each, InputRecord):
            yield each
            continue
        lines = read_file(folder, each).splitlines()
        try:
            records = [InputRecord.model_validate_json(line) for line in lines]
        except ValidationError as error:
            problem = f"a line is no input ({first_problem(error)})"
        else:
            problem = "" if len(records) == each.inputs else f"has {len(records):,} lines, not {each.inputs:,}"
        if problem:
            where = storage.redact(storage.join(folder, each.name))
            raise UserError(f"{where} is damaged: {problem}", fix=REBUILD, code="damaged-inputs")
        yield from records


class SourceRecord(ManifestPart):
    """A named source of text; its number is its index in `Manifest.sources`."""

    name: str
    url: str | None = None
    license: str | None = None
    date: str | None = None
    language: str | None = None
    dropped: dict[str, Count] = Field(description="what was left out of it, by reason (`STEPS` names them)")
    documents: Count
    sentences: Count
    tokens: Count
    words: Count = Field(description="runs of characters between spaces; tokens / words is its fertility")
    text_bytes: Count = Field(description="UTF-8 bytes of normalized text")
    cut_words: Count = Field(0, description="words read that were so long that they were encoded in parts")

    weight: Annotated[float, Field(gt=0)] | None = Field(
        None, description="share of the source in the training samples, relative to the weights of the other sources"
    )
    max_tokens: PositiveInt | None = Field(None, description="tokens of it that a training run uses at most")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="how often a training run uses each of its documents"
    )


class StepRecord(ManifestPart):
    """Documents that a step of preparation read, dropped by reason, and passed on."""

    name: str
    documents_in: Count
    dropped: dict[str, Count]
    documents_out: Count


class RemovalRecord(ManifestPart):
    """A removal by the command `remove`: a whole source, or documents by id."""

    version: PositiveInt = Field(description="the first version without it")
    source: str | None = Field(None, description="name of the source")
    ids: FileRecord | None = Field(
        None,
        description="safetensors: document_ids, and maybe url_hashes and corpus_id_hashes (xxh3), (n,) uint64 each, "
        "ascending; additions leave them out too; not_present has those of them that no document had",
    )
    documents: Count = Field(description="documents taken out, each piece of one that was split counted")
    tokens: Count
    note: str | None = Field(None, description="what the user says of it, such as who asked for it and when")
    urls: Count = Field(0, description="listed URLs whose hashes the file holds")
    corpus_ids: Count = Field(0, description="listed corpus ids whose hashes the file holds")
    not_present: Count = Field(0, description="listed values that no document had; additions leave them out too")

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a count of 0, so that a manifest from before it was counted keeps its digest."""
        values: dict[str, Any] = handler(self)
        if not self.not_present:
            del values["not_present"]
        return values

    @property
    def kind(self) -> str:
        """How the removed documents were named: by source, URL, corpus id or document id."""
        if self.source is not None:
            return "source"
        return "URL" if self.urls else "corpus id" if self.corpus_ids else "document id"

    @model_validator(mode="after")
    def _of_one_kind(self) -> RemovalRecord:
        if (self.source is None) == (self.ids is None):
            raise ValueError("a removal names either a source or a file of ids")
        return self
