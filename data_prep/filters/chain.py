"""How documents are read: the settings of each source, and the chain of filters behind a reader.

Preparation, the tokenizer's sample, the estimate and the files of dropped documents read through it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from data_prep.base.errors import Stopped, UserError, failure
from data_prep.config.preparation_config import DocumentSettings, PreparationConfig
from data_prep.documents.document import Document, is_json, numbered, wrong_values
from data_prep.documents.documents import DocumentReader, unit_sha256
from data_prep.documents.drops import FILTERED_TEXT, Drop, filter_step
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputUnit
from data_prep.documents.rejects import BadInput, Fault
from data_prep.filters.protocol import UNUSABLE
from data_prep.filters.registry import Step, configured_filters, described_filters, fingerprint_of, planned_filters
from data_prep.storage import storage
from data_prep.text.cleaning import TOO_MANY_MARKS, has_too_many_marks

_MOST_REASONS = 1_000  # of one filter in one unit
_MOST_REASON_CHARACTERS = 100


Identities = Mapping[int | None, Sequence[Mapping[str, Any]]]
"""The identities of the filters of each source that has its own, by its number, and under None those of the others."""


def filter_identities(config: PreparationConfig) -> Identities:
    """Return the identities of all filters, which are made of the code and the files of now."""
    found: dict[int | None, Sequence[Mapping[str, Any]]] = {None: described_filters(config.documents.filters)}
    checked = set[tuple[str | None, ...]]()
    for number, source in enumerate(config.sources):
        settings = config.documents_of(source)
        fields = (settings.id_field, settings.url_field, settings.language_field)
        if source.filters is None and fields in checked:
            continue
        try:
            steps = configured_filters(settings)
        except UserError as error:
            if source.filters is None:
                raise
            raise type(error)(f"source {source.name}: {error.problem}", fix=error.fix, code=error.code) from error
        if source.filters is None:
            checked.add(fields)
        else:
            found[number] = [step.identity for step in steps]
    return found


@dataclass(frozen=True)
class SourceReading:
    """How the documents of each source are read and filtered; the lists go by the number of the source.

    Attributes:
        settings: of its documents.
        fingerprints: of its filters when the work began; a process whose filters have others is refused.
    """

    names: tuple[str, ...]
    settings: tuple[DocumentSettings, ...]
    fingerprints: tuple[str, ...]
    formats: Formats = field(default_factory=Formats)
    _chains: dict[int, FilterChain] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: PreparationConfig, identities: Identities, formats: Formats) -> SourceReading:
        names = tuple(source.name for source in config.sources)
        fingerprints = {number: fingerprint_of(each) for number, each in identities.items()}
        of_source = tuple(fingerprints.get(number, fingerprints[None]) for number in range(len(names)))
        return cls(names, tuple(map(config.documents_of, config.sources)), of_source, formats)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chains": {}}

    def identity(self, source: int) -> str:
        """Return the sha256 of what a document depends on besides its file, the format of that, and the tokenizer."""
        without = {"filters", "format", "formats", "on_bad_input"}
        if self.settings[source].sentences == "split":
            without.add("sentences")  # so that units of earlier releases are equal
        settings = self.settings[source].model_dump(mode="json", exclude=without)
        formats = {ending: dict(each) for ending, each in self.formats.identities.items()}
        values = [settings, self.fingerprints[source], formats]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def reader(self, part: InputUnit) -> DocumentReader:
        """Return a reader of a part of the source's files, without filters."""
        return DocumentReader(part, self.settings[part.source], self.formats, self.names[part.source])

    def sha256(self, part: InputUnit) -> str:
        """Return the `unit_sha256` of a part of the source's files."""
        return unit_sha256(part, self.settings[part.source], self.formats)

    def filters(self, source: int) -> FilterChain:
        """Return the filters of a source, which this process makes once."""
        if source not in self._chains:
            settings, fingerprint = self.settings[source], self.fingerprints[source]
            self._chains[source] = FilterChain(settings, planned_filters(settings, fingerprint))
        return self._chains[source]


@dataclass
class StepCost:
    """What a step took of one core.

    Attributes:
        text_bytes: of the documents that came to it, before cleaning.
    """

    text_bytes: int = 0
    seconds: float = 0.0

    def add(self, text: str, seconds: float) -> None:
        self.text_bytes += len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        self.seconds += seconds


class FilterChain:
    """The filters and transforms of a source in order; the settings are those of its documents."""

    def __init__(self, settings: DocumentSettings, steps: Sequence[Step]) -> None:
        self._settings, self._steps = settings, steps

    def apply(
        self,
        reader: DocumentReader,
        on_drop: Callable[[Document, Drop], None] | None = None,
        costs: Sequence[StepCost] | None = None,
    ) -> Iterator[Document]:
        """Yield the documents that all filters keep; count the others in `reader.filtered`.

        A document without id and URL gets the name of its file as its id, with its position there.

        Args:
            on_drop: called with each document that is dropped, and why.
            costs: one for each filter, to which is added what it takes.

        Raises:
            BadInput: as `DocumentReader`; or a filter cannot judge a document, and the policy is `error`.
            UserError: a filter fails, or returns something else than it may.
        """
        unit, is_alone = reader.unit, reader.is_one_document
        take = on_drop or (lambda document, drop: None)
        if not unit.name or not unit.is_named_by_file(self._settings):
            yield from self._kept(reader, take, costs)
            return

        def identified(document: Document) -> Document:
            if document.id is not None or document.url is not None or (reader.rejects.number is None and not is_alone):
                return document
            return replace(
                document, id=unit.name if is_alone else numbered(unit.name, cast(int, reader.rejects.number))
            )

        for document in self._kept(reader, lambda document, drop: take(identified(document), drop), costs):
            yield identified(document)

    def _kept(
        self, reader: DocumentReader, on_drop: Callable[[Document, Drop], None], costs: Sequence[StepCost] | None
    ) -> Iterator[Document]:
        if not self._steps:
            yield from reader
            return
        for original in reader:
            document, drop = self.judge(original, reader, costs)
            if drop is None:
                yield document
            else:
                on_drop(document, drop)

    def judge(
        self, original: Document, reader: DocumentReader, costs: Sequence[StepCost] | None = None
    ) -> tuple[Document, Drop | None]:
        """Return the document that the filters make of a document of the reader, and why they drop it, if they do."""
        document, drop = original, None
        for number, step in enumerate(self._steps):
            started_at = time.perf_counter() if costs else 0.0
            outcome = self._outcome(step, document, reader)
            if costs:
                costs[number].add(document.text, time.perf_counter() - started_at)
            if isinstance(outcome, str):
                drop = Drop(filter_step(number + 1, step.name), outcome)
                break
            document = outcome
        if drop is None and document is not original and has_too_many_marks(document.text):
            drop = Drop(FILTERED_TEXT, TOO_MANY_MARKS)
        if drop is None:
            if document.metadata and not is_json(document.metadata):
                what = "put values into metadata that JSON does not have"
                raise _wrong(step, what, "filter-result", reader, original)
            return document, None
        if drop not in reader.filtered and sum(each.step == drop.step for each in reader.filtered) >= _MOST_REASONS:
            raise _wrong(step, f"gave more than {_MOST_REASONS:,} reasons", "filter-reasons", reader)
        reader.filtered[drop] += 1
        return document, drop

    def _outcome(self, step: Step, document: Document, reader: DocumentReader) -> str | Document:
        """Return the document to keep, or the reason for dropping it."""
        try:
            outcome = step.apply(document)
        except UserError:
            raise
        except Fault as fault:
            if self._settings.on_bad_input == "skip":
                return UNUSABLE
            raise BadInput(
                f"{_named(reader, document)}: filter {step.name!r}: {fault}",
                fix=f"{fault.remedy}, or skip such documents with documents.on_bad_input=skip",
            ) from None
        except (KeyboardInterrupt, Stopped):
            raise
        except BaseException as error:  # whatever else a user's function raises is the user's to fix
            fix = ""
            if isinstance(error, KeyError) and error.args and error.args[0] not in document.metadata:
                fix = "name the fields that filters see in documents.metadata_fields, or correct the filter"
            raise _wrong(step, failure(error), "filter-failed", reader, document, fix) from error
        if outcome is None:
            return document
        if isinstance(outcome, Document):
            if problem := _problem(outcome, document):
                raise _wrong(step, problem, "filter-result", reader, document)
            return outcome
        if not isinstance(outcome, str):
            what = f"returned {type(outcome).__name__}; a filter returns None or a reason, a transform a document"
            raise _wrong(step, what, "filter-result", reader, document)
        if not 0 < len(outcome) <= _MOST_REASON_CHARACTERS or not outcome.isprintable():
            what = f"gave a reason that is empty, not printable or longer than {_MOST_REASON_CHARACTERS} characters"
            raise _wrong(step, what, "filter-reasons", reader, document)
        return outcome


def _wrong(
    step: Step, what: str, code: str, reader: DocumentReader, document: Document | None = None, fix: str = ""
) -> UserError:
    if not fix:
        is_reason = code == "filter-reasons"
        fix = "correct the filter or its parameters" + (
            "; its reasons must come from a small fixed set of texts" if is_reason else ""
        )
    return UserError(f"filter {step.name!r} {what}, in {_named(reader, document)}", fix=fix, code=code)


def _named(reader: DocumentReader, document: Document | None) -> str:
    """Return the name of the document in messages: its file, line and id."""
    where = f" {reader.rejects.place}" if document is not None and reader.rejects.place else ""
    named = f" (document {document.id!r})" if document is not None and document.id is not None else ""
    return f"{storage.redact(reader.unit.url)}{where}{named}"


def _problem(outcome: Document, document: Document) -> str:
    """Return what a transform did that it may not do; an empty text if nothing."""
    if outcome.source != document.source or (outcome.id != document.id and document.id is not None):
        return "changed the source or the id, by which a takedown finds the document"
    wrong = wrong_values(outcome)
    return wrong and f"made a document whose {wrong}"
