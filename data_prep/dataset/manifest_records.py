"""The parts of a manifest: files, shards, tokenizer, inputs, sources, removals; each with its counts and checksums."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from data_prep.base.terminal import listed
from data_prep.base.validation import FileName, Sha256, first_problem
from data_prep.documents.drops import REMOVAL, Drop, by_step, by_summary, earlier_drop, step_order
from data_prep.storage import storage
from data_prep.tokenizer.special_tokens import MAX_VOCAB_SIZE, OWN_SPECIAL_TOKENS, SpecialTokens

REBUILD = (
    "restore it from a copy, or make the data set again in another folder, with the same bytes ('clozeworks verify' "
    "prints the command)"
)
"""The fix for a damaged shard, index, provenance sidecar or file of token counts."""

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
            problem = f"a line does not describe an input ({first_problem(error)})"
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
    dropped: dict[str, Count] = Field(description="what was left out of it, by reason; filters are named in theirs")
    dropped_by_step: dict[str, dict[str, Count]] | None = Field(
        None, description="the same by step and reason, with each filter of its chain; none of earlier releases"
    )
    documents: Count
    sentences: Count
    tokens: Count
    words: Count = Field(description="runs of characters between spaces; tokens / words is its fertility")
    text_bytes: Count = Field(description="UTF-8 bytes of normalized text")
    cut_words: Count = Field(0, description="words read that were so long that they were encoded in parts")

    weight: Annotated[float, Field(gt=0)] | None = Field(
        None, description="share of the source in the training samples, relative to the weights of the other sources"
    )
    max_tokens: PositiveInt | None = Field(None, description="maximum tokens of the source that a training run uses")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="how often a training run uses each of its documents"
    )

    @model_validator(mode="after")
    def _adds_up(self) -> SourceRecord:
        if self.dropped_by_step is not None:
            summed = by_summary(self.drops)
            if summed != {reason: count for reason, count in sorted(self.dropped.items()) if count}:
                raise ValueError("its drops by step differ from its drops by reason")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without drops by step if there are none, so that the manifest of an earlier release keeps its digest."""
        values: dict[str, Any] = handler(self)
        if self.dropped_by_step is None:
            del values["dropped_by_step"]
        return values

    @property
    def drops(self) -> dict[Drop, int]:
        """What was left out of it; of each reason that an earlier release recorded the step that had it."""
        if self.dropped_by_step is None:
            return {earlier_drop(reason): count for reason, count in self.dropped.items() if count}
        steps = self.dropped_by_step.items()
        return {Drop(step, reason): count for step, reasons in steps for reason, count in reasons.items() if count}

    @property
    def steps(self) -> dict[str, dict[str, int]]:
        """What each step left out of it, by reason, in order; with the filters that left nothing out."""
        without = dict.fromkeys(self.dropped_by_step or {})
        found = {step: dict[str, int]() for step in without} | by_step(self.drops)
        return dict(sorted(found.items(), key=lambda each: step_order(each[0])))

    def without(self, gone: Mapping[str, int]) -> SourceRecord:
        """Return the record after documents were removed, with `gone` of each count."""
        left: dict[str, Any] = {name: getattr(self, name) - count for name, count in gone.items()}
        if removed := gone["documents"]:
            drops = Counter(self.drops) + Counter({Drop(REMOVAL, "removed"): removed})
            left["dropped"] = by_summary(drops)
            if self.dropped_by_step is not None:
                left["dropped_by_step"] = self.dropped_by_step | by_step(drops)
        return self.model_copy(update=left)


def own_budget(max_tokens: int | None, epochs: float | None, train_tokens: float) -> float | None:
    """Return the tokens that `epochs` and `max_tokens` give a source of `train_tokens` tokens; None without both."""
    bounds = [float(max_tokens)] if max_tokens is not None else []
    bounds += [epochs * train_tokens] if epochs is not None else []
    return min(bounds, default=None)


class StepRecord(ManifestPart):
    """Documents that a step of preparation read, dropped by reason, and passed on.

    Attributes:
        sources: those whose documents pass a filter, where others have another chain; empty for all.
    """

    name: str
    sources: tuple[str, ...] = ()
    documents_in: Count
    dropped: dict[str, Count]
    documents_out: Count

    @property
    def title(self) -> str:
        """The name, with the sources where not all pass the step."""
        return f"{self.name} (of {listed(self.sources)})" if self.sources else self.name


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
