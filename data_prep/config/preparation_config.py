"""What a preparation is: its schema, read from YAML and the command line by `data_prep.base.load_settings`."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, PositiveInt, PrivateAttr, field_validator, model_validator

from data_prep.base.settings import PathText, SettingError, Settings, Weight, plain
from data_prep.tokenizer.tokenizer_info import TokenizerSettings

COMMAND_LINE_SOURCE = "corpus"
WITHOUT_EFFECT = frozenset({"tokenizer", "storage_options", "keep_dropped", "text_output", "num_workers"})
"""Sections and settings on which the shards do not depend; all others are part of a data set's identity."""

INHERITED_BY_SOURCES = ("text_field", "language", "language_field", "id_field", "url_field", "format", "filters")
"""Settings of a source whose default is that of `documents`."""

WORKER_BASE_BYTES, WORKER_DOCUMENT_COPIES = 256 << 20, 20


def _one_spelling(value: str) -> str:
    return value if ":" in value else value.lower().removeprefix(".")


FormatName = Annotated[str, Field(min_length=1), AfterValidator(_one_spelling)]


class FilterFunction(NamedTuple):
    """A function given to the Python API, as it travels to workers.

    Attributes:
        payload: what `cloudpickle` makes of it.
        source_sha256: digest of its source; None where that cannot be read.
        payload_sha256: of the payload, which may hold a list of many megabytes.
    """

    payload: bytes
    source_sha256: str | None
    payload_sha256: str

    def load(self) -> Any:
        """The function."""
        import cloudpickle

        return cloudpickle.loads(self.payload)


class FilterSettings(Settings):
    """A filter or transform; every other key of it is a parameter."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)] = Field(
        description="a built-in filter, an installed one (entry points clozeworks.filters), or module:function"
    )
    version: str | None = Field(None, description="version of a filter whose source cannot be read")
    _function: FilterFunction | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise SettingError(
                f"a list of filters holds {value!r}, not a mapping with the name of a filter",
                fix=f"write {{name: {value}}} and its parameters",
                code="invalid-setting",
            )
        return {name: _parameter(name, each) for name, each in value.items()} if isinstance(value, Mapping) else value

    @field_validator("version", mode="before")
    @classmethod
    def _version_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @property
    def function(self) -> FilterFunction | None:
        """What the Python API was given, where that is a function."""
        return self._function

    @property
    def function_digest(self) -> str | None:
        """Digest of the source of `function`."""
        return None if self._function is None else self._function.source_sha256

    def with_function(self, function: FilterFunction) -> FilterSettings:
        """These settings with a function that goes before the name."""
        settings = self.model_copy()
        settings._function = function
        return settings


def _parameter(name: str, value: Any) -> Any:
    value = plain(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise SettingError(
            f"the parameter {name}={value!r:.100} of a filter is not a text, number, list or mapping, so the "
            "manifest cannot state it",
            fix="give it as one of these, or give the filter itself as a function or an object",
            code="filter-parameters",
        ) from None
    return value


class DocumentSettings(Settings):
    """How documents are read from the inputs."""

    text_field: Annotated[str, Field(min_length=1)] = Field(
        "text", description="field or column that holds the text; text.body is the field body of the object text"
    )
    sentences: Literal["split", "none"] = Field(
        "split",
        description="split finds and stores where sentences begin, which training on sentence pairs needs; none is "
        "faster, and its shards serve every other training",
    )
    language: str = Field("en", description="language whose rules split sentences (ISO 639, two or three letters)")
    language_field: str | None = Field(
        None,
        description="field or column with the language of each document; where it is empty, the language of the "
        "source applies",
    )
    id_field: str | None = Field(None, description="field or column that holds each document's id, text or a number")
    url_field: str | None = Field(None, description="field or column that holds the URL of each document")
    metadata_fields: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="fields or columns that filters read, such as [score, date]"
    )
    format: FormatName | None = Field(
        None, description="format of all files, as sources[].format; by default from each file's extension"
    )
    formats: dict[str, str] = Field(
        {}, description="custom input formats by file extension, such as {.xml: mypackage.dumps:read}"
    )
    filters: tuple[FilterSettings, ...] = Field(
        (), description="filters and transforms, applied in this order, such as {name: metadata, keep: score >= 3}"
    )
    txt_documents: Literal["file", "blank_lines"] = Field(
        "file", description="document of a .txt file: the whole file, or each block between blank lines"
    )
    on_bad_input: Literal["error", "skip"] = Field(
        "error",
        description="error stops at unreadable input; skip drops it and counts it in the manifest",
    )
    min_document_characters: PositiveInt = Field(
        1, description="minimum length of a cleaned document in characters; shorter ones are dropped"
    )
    max_document_characters: PositiveInt | None = Field(
        None,
        description="maximum length of a cleaned document in characters; longer ones are dropped; null for no limit",
    )
    max_document_bytes: Annotated[int, Field(ge=1, le=1 << 40)] = Field(
        64 << 20,
        description="maximum length of a line or text in bytes, which bounds the memory of a worker; longer ones "
        "are dropped unread and counted",
    )

    @property
    def has_provenance_fields(self) -> bool:
        """Whether a field is configured whose values are stored beside the shards."""
        return bool(self.id_field or self.url_field or self.metadata_fields)

    @property
    def worker_memory_bytes(self) -> int:
        """Most memory that a worker takes, in bytes; the documents of a shard add about 100 each.

        Measured with documents of 60 MB: the wide string of a text with an emoji, its bytes, a token for every byte.
        """
        return WORKER_BASE_BYTES + WORKER_DOCUMENT_COPIES * self.max_document_bytes


class Source(Settings):
    """A named source of text and what its license asks to state."""

    name: Annotated[str, Field(min_length=1)] = Field(description="name in the manifest")
    input: tuple[PathText, ...] = Field(
        min_length=1, description="files, URLs or glob patterns such as corpus/*.jsonl.gz"
    )
    format: FormatName | None = Field(
        None,
        description="format of the source's files, regardless of their names, such as jsonl, jsonl.gz or "
        "module:function; by default documents.format",
    )
    url: str | None = Field(None, description="where the text comes from")
    license: str | None = Field(None, description="license of the text, such as CC-BY-SA-4.0")
    date: str | None = Field(None, description="date of the text, such as 2026-05-01")
    language: str | None = Field(None, description="language of its sentences; by default documents.language")
    text_field: str | None = Field(None, description="field or column of its text; by default documents.text_field")
    language_field: str | None = Field(None, description="as documents.language_field, which is the default")
    id_field: str | None = Field(None, description="as documents.id_field, which is the default")
    url_field: str | None = Field(None, description="as documents.url_field, which is the default")
    filters: tuple[FilterSettings, ...] | None = Field(
        None, description="filters and transforms of its documents instead of documents.filters; [] for none"
    )
    weight: Weight | None = Field(
        None,
        description="share of the training samples, relative to the weights of the other sources; by default "
        "the tokens of the source",
    )
    max_tokens: PositiveInt | None = Field(None, description="maximum tokens of the source that a training run uses")
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        None, description="how often a training run uses each of its documents"
    )

    @property
    def has_own_budget(self) -> bool:
        """Whether its tokens in a run are set; it takes no part of the rest of `total_tokens`."""
        return (self.max_tokens, self.epochs) != (None, None)

    @field_validator("input", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("date", mode="before")
    @classmethod
    def _date_as_text(cls, value: Any) -> Any:
        """YAML makes a date of 2026-05-01."""
        return value.isoformat() if isinstance(value, datetime.date) else value


class DeduplicationSettings(Settings):
    """Which documents count as the same."""

    exact: bool = Field(True, description="keep one of several equal normalized texts, over the whole corpus")
    near: bool = Field(False, description="also drop near-duplicates, found by MinHash and locality-sensitive hashing")
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8,
        description="share of common n-grams (Jaccard similarity) from which documents count as near-duplicates. "
        "Of 100 copies, 0.8 finds 99 with 1% of the words replaced (96 below 120 words) and 4 with 5%; 0.5 finds "
        "99 with 5% and 51 with 10%",
    )
    ngram_tokens: Annotated[int, Field(ge=1, le=10_000)] = Field(
        5,
        description="length of the compared n-grams, in tokens; shorter ones tolerate more edits, "
        "and separate similar documents less well",
    )
    num_hashes: Annotated[int, Field(ge=1, le=1024)] = Field(
        128,
        description="length of a document's MinHash signature; 64 is less exact at the threshold, 256 needs "
        "twice the disk for less than 1% more recall",
    )

    @model_validator(mode="after")
    def _near_is_more_than_exact(self) -> DeduplicationSettings:
        if self.near and not self.exact:
            raise ValueError(
                "deduplication.near=true needs exact=true, because equal texts are near-duplicates; set exact"
            )
        return self


class ShardSettings(Settings):
    """How the documents are laid out in shards."""

    shard_bytes: PositiveInt = Field(128_000_000, description="target size of a shard, in bytes")
    min_shards: Annotated[int, Field(ge=1, lt=1_000_000)] = Field(
        8, description="minimum number of train shards, even if the corpus fits in fewer"
    )
    valid_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.01, description="share of the documents in the valid split; with 0 training does not evaluate"
    )
    record_tokens: PositiveInt = Field(
        65_536, description="tokens per record; a longer document is a record of its own"
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the order of documents in a shard")
    unit_bytes: PositiveInt = Field(
        16 << 20,
        description="size of a work unit of uncompressed text or Parquet, in bytes before compression",
    )


MAX_SOURCES = 1 << 16
"""Shards store the number of a document's source in 16 bits."""


class PreparationConfig(Settings):
    """All settings of data preparation."""

    sources: tuple[Source, ...] = Field(
        (), description="named sources of text; --input on the command line replaces them"
    )
    total_tokens: PositiveInt | None = Field(
        None,
        description="maximum tokens that a training run uses of all sources together; sources with neither epochs "
        "nor max_tokens share the rest by weight, or by size if they have no weights",
    )
    tokenizer: TokenizerSettings = Field(TokenizerSettings(), description="training of the tokenizer")
    documents: DocumentSettings = Field(DocumentSettings(), description="reading of documents")
    deduplication: DeduplicationSettings = Field(DeduplicationSettings(), description="dropping of copies")
    shards: ShardSettings = Field(ShardSettings(), description="layout of the shards")
    storage_options: dict[str, dict[str, Any]] = Field(
        {}, description="options of remote stores by URL prefix, such as {'s3://corpus': {profile: research}}"
    )
    keep_dropped: PathText | None = Field(
        None, description="folder or URL for the documents that filters and length limits drop, with reasons"
    )
    text_output: PathText | None = Field(
        None, description="folder or URL for the texts of the documents in the shards, as JSON lines"
    )
    num_workers: PositiveInt | None = Field(
        None, description="processes; by default one per core (fewer for little text)"
    )

    @model_validator(mode="after")
    def _source_names_differ(self) -> PreparationConfig:
        if len(self.sources) > MAX_SOURCES:
            raise SettingError(
                f"sources has {len(self.sources):,} entries, and a data set holds at most {MAX_SOURCES:,}",
                fix="give one source several files or patterns",
                code="too-many-sources",
            )
        names = [source.name for source in self.sources]
        twice = {name for name, count in Counter(names).items() if count > 1}
        if twice:
            raise ValueError(f"two sources are named {min(twice)!r}; give each source another name")
        return self

    @model_validator(mode="after")
    def _total_can_be_shared(self) -> PreparationConfig:
        total, sharing = self.total_tokens, [source for source in self.sources if not source.has_own_budget]
        if total is None or not self.sources:
            return self
        if not sharing:
            raise SettingError(
                f"total_tokens={total} is set and every source has epochs or max_tokens, so no source takes the rest",
                fix="remove total_tokens, or remove epochs and max_tokens from one source",
                code="total-without-rest",
            )
        for source in self.sources:
            if source.has_own_budget and source.weight is not None:
                raise SettingError(
                    f"source {source.name!r} has weight={source.weight:g} beside epochs or max_tokens, and "
                    f"total_tokens={total} uses weights only to share the rest",
                    fix="remove the weight, or remove epochs and max_tokens",
                    code="weight-beside-budget",
                )
        without = [source.name for source in sharing if source.weight is None]
        if without and len(without) < len(sharing):
            raise SettingError(
                f"of the sources that share the rest of total_tokens={total}, {', '.join(map(repr, without))} "
                f"{'has' if len(without) == 1 else 'have'} no weight, and the others have one",
                fix="give each of them a weight, or none",
                code="some-weights",
            )
        own = sum(source.max_tokens or 0 for source in self.sources if source.epochs is None)
        if own >= total:
            raise SettingError(
                f"total_tokens={total} does not exceed the max_tokens of the sources, {own} together, so nothing is "
                f"left for source {sharing[0].name!r}",
                fix="raise total_tokens, or lower max_tokens",
                code="source-budgets-exceed-total",
            )
        return self

    def documents_of(self, source: Source) -> DocumentSettings:
        """How the documents of a source are read: as `documents` says where the source does not say otherwise."""
        own = {name: value for name in INHERITED_BY_SOURCES if (value := getattr(source, name)) not in (None, "")}
        return self.documents.model_copy(update=own) if own else self.documents

    @property
    def has_source_budgets(self) -> bool:
        """Whether training uses a source by a rule of its own; then every source has shards of its own."""
        return self.total_tokens is not None or any(
            source.has_own_budget or source.weight is not None for source in self.sources
        )
