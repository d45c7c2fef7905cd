"""A reader of the documents of a unit that all filters keep; filters run nowhere else.

Preparation, the tokenizer's sample and the estimate read through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from data_prep.base.errors import Stopped, UserError, failure
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document, is_json, numbered, wrong_values
from data_prep.documents.documents import DocumentReader
from data_prep.documents.input_units import InputUnit, file_format, is_named_by_file, is_one_document
from data_prep.documents.rejects import BadInput
from data_prep.filters.protocol import UNUSABLE, UnusableDocument, filter_reason
from data_prep.filters.registry import Step, configured_filters, planned_filters
from data_prep.storage import storage
from data_prep.text.cleaning import TOO_MANY_MARKS, has_too_many_marks

_MOST_REASONS = 1_000  # of one filter in one unit
_MOST_REASON_CHARACTERS = 100


class FilteredReader(DocumentReader):
    """A `DocumentReader` that applies `settings.filters`; `dropped` includes the documents that they drop.

    Args:
        source: name of the unit's source, which its documents carry.
        text_field: text field of the source; None for that of `settings`.
        fingerprint: `filters_fingerprint` of the plan; None makes the filters of the code and files of now.
        on_drop: called with each document that a filter drops, and its reason as counted.

    Raises:
        UserError: as `DocumentReader`; or a filter fails, returns something else than it may, or differs from that of
            the plan.
    """

    def __init__(
        self,
        unit: InputUnit,
        settings: DocumentSettings,
        source: str,
        text_field: str | None = None,
        fingerprint: str | None = None,
        on_drop: Callable[[Document, str], None] | None = None,
    ) -> None:
        super().__init__(unit, settings, text_field, source)
        self._steps = configured_filters(settings) if fingerprint is None else planned_filters(settings, fingerprint)
        self._filtered: Counter[str] = Counter()
        self._on_drop = on_drop
        self._skips = settings.on_bad_input == "skip"
        self._file_name = unit.name if is_named_by_file(unit, settings) else ""
        self._is_one_document = is_one_document(file_format(unit.url, unit.format)[0], settings)

    @property
    def dropped(self) -> Counter[str]:
        """Number of documents dropped by reading and by filters, by reason."""
        return super().dropped + self._filtered

    def __iter__(self) -> Iterator[Document]:
        documents = super().__iter__()
        return map(self._identified, self._kept(documents) if self._steps else documents)

    def _identified(self, document: Document) -> Document:
        """Return the document; one without id and URL gets the name of its file as its id, with its position there."""
        if not self._file_name or document.id is not None or document.url is not None:
            return document
        if self._is_one_document:
            return replace(document, id=self._file_name)
        return document if self.number is None else replace(document, id=numbered(self._file_name, self.number))

    def _kept(self, documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            original = document
            reason = None
            for step in self._steps:
                outcome = self._outcome(step, document)
                if isinstance(outcome, str):
                    reason = filter_reason(step.name, outcome)
                    break
                document = outcome
            if reason is None and document is not original and has_too_many_marks(document.text):
                reason = TOO_MANY_MARKS
            if reason is None:
                if document.metadata and not is_json(document.metadata):
                    raise self._wrong(
                        step, "put values into metadata that JSON does not have", "filter-result", original
                    )
                yield document
                continue
            self._filtered[reason] += 1
            if len(self._filtered) > _MOST_REASONS:
                raise self._wrong(step, f"gave more than {_MOST_REASONS:,} reasons", "filter-reasons")
            if self._on_drop is not None:
                self._on_drop(self._identified(document), reason)

    def _outcome(self, step: Step, document: Document) -> str | Document:
        """Return the document to keep, or the reason for dropping it."""
        try:
            outcome = step.apply(document)
        except UserError:
            raise
        except UnusableDocument as error:
            if self._skips:
                return UNUSABLE
            raise BadInput(
                f"{self._named(document)}: filter {step.name!r}: {error}",
                fix=f"{error.fix}, or skip such documents with documents.on_bad_input=skip",
            ) from None
        except (KeyboardInterrupt, Stopped):
            raise
        except BaseException as error:  # whatever else a user's function raises is the user's to fix
            fix = ""
            if isinstance(error, KeyError) and error.args and error.args[0] not in document.metadata:
                fix = "name the fields that filters see in documents.metadata_fields, or correct the filter"
            raise self._wrong(step, failure(error), "filter-failed", document, fix) from error
        if outcome is None:
            return document
        if isinstance(outcome, Document):
            if problem := _problem(outcome, document):
                raise self._wrong(step, problem, "filter-result", document)
            return outcome
        if not isinstance(outcome, str):
            what = f"returned {type(outcome).__name__}; a filter returns None or a reason, a transform a document"
            raise self._wrong(step, what, "filter-result", document)
        if not 0 < len(outcome) <= _MOST_REASON_CHARACTERS or not outcome.isprintable():
            what = f"gave a reason that is empty, not printable or longer than {_MOST_REASON_CHARACTERS} characters"
            raise self._wrong(step, what, "filter-reasons", document)
        return outcome

    def _wrong(self, step: Step, what: str, code: str, document: Document | None = None, fix: str = "") -> UserError:
        if not fix:
            is_reason = code == "filter-reasons"
            fix = "correct the filter or its parameters" + (
                "; its reasons must come from a small fixed set of texts" if is_reason else ""
            )
        return UserError(f"filter {step.name!r} {what}, in {self._named(document)}", fix=fix, code=code)

    def _named(self, document: Document | None) -> str:
        """Return the name of the document in messages: its file, line and id."""
        where = f" {self.place}" if document is not None and self.place else ""
        named = f" (document {document.id!r})" if document is not None and document.id is not None else ""
        return f"{storage.redact(self.unit.url)}{where}{named}"


def _problem(outcome: Document, document: Document) -> str:
    """Return what a transform did that it may not do; an empty text if nothing."""
    if outcome.source != document.source or (outcome.id != document.id and document.id is not None):
        return "changed the source or the id, by which a takedown finds the document"
    wrong = wrong_values(outcome)
    return wrong and f"made a document whose {wrong}"
