"""The chain of filters behind a reader of documents; filters run nowhere else.

Preparation, the tokenizer's sample, the estimate and the files of dropped documents read through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from data_prep.base.errors import Stopped, UserError, failure
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document, is_json, numbered, wrong_values
from data_prep.documents.documents import DocumentReader
from data_prep.documents.input_units import file_format, is_named_by_file, is_one_document
from data_prep.documents.rejects import BadInput
from data_prep.filters.protocol import UNUSABLE, UnusableDocument, filter_reason
from data_prep.filters.registry import Step, configured_filters, planned_filters
from data_prep.storage import storage
from data_prep.text.cleaning import TOO_MANY_MARKS, has_too_many_marks

_MOST_REASONS = 1_000  # of one filter in one unit
_MOST_REASON_CHARACTERS = 100


class FilterChain:
    """The filters and transforms of `settings.filters` in order, ready to run in this process.

    Args:
        fingerprint: `filters_fingerprint` of the plan; None makes the filters of the code and files of now.

    Raises:
        UserError: a filter cannot be made, or differs from that of the plan.
    """

    def __init__(self, settings: DocumentSettings, fingerprint: str | None = None) -> None:
        self._settings = settings
        self._steps = configured_filters(settings) if fingerprint is None else planned_filters(settings, fingerprint)

    def apply(
        self, reader: DocumentReader, on_drop: Callable[[Document, str], None] = lambda document, reason: None
    ) -> Iterator[Document]:
        """Yield the documents that all filters keep; count the others in `reader.filtered`.

        A document without id and URL gets the name of its file as its id, with its position there.

        Args:
            on_drop: called with each document that a filter drops, and its reason as counted.

        Raises:
            BadInput: as `DocumentReader`; or a filter cannot judge a document, and the policy is `error`.
            UserError: a filter fails, or returns something else than it may.
        """
        unit, settings = reader.unit, self._settings
        if not unit.name or not is_named_by_file(unit, settings):
            yield from self._kept(reader, on_drop)
            return
        is_alone = is_one_document(file_format(unit.url, unit.format)[0], settings)

        def identified(document: Document) -> Document:
            if document.id is not None or document.url is not None or (reader.number is None and not is_alone):
                return document
            return replace(document, id=unit.name if is_alone else numbered(unit.name, cast(int, reader.number)))

        for document in self._kept(reader, lambda document, reason: on_drop(identified(document), reason)):
            yield identified(document)

    def _kept(self, reader: DocumentReader, on_drop: Callable[[Document, str], None]) -> Iterator[Document]:
        if not self._steps:
            yield from reader
            return
        for original in reader:
            document, reason = original, None
            for step in self._steps:
                outcome = self._outcome(step, document, reader)
                if isinstance(outcome, str):
                    reason = filter_reason(step.name, outcome)
                    break
                document = outcome
            if reason is None and document is not original and has_too_many_marks(document.text):
                reason = TOO_MANY_MARKS
            if reason is None:
                if document.metadata and not is_json(document.metadata):
                    what = "put values into metadata that JSON does not have"
                    raise _wrong(step, what, "filter-result", reader, original)
                yield document
                continue
            reader.filtered[reason] += 1
            if len(reader.filtered) > _MOST_REASONS:
                raise _wrong(step, f"gave more than {_MOST_REASONS:,} reasons", "filter-reasons", reader)
            on_drop(document, reason)

    def _outcome(self, step: Step, document: Document, reader: DocumentReader) -> str | Document:
        """Return the document to keep, or the reason for dropping it."""
        try:
            outcome = step.apply(document)
        except UserError:
            raise
        except UnusableDocument as error:
            if self._settings.on_bad_input == "skip":
                return UNUSABLE
            raise BadInput(
                f"{_named(reader, document)}: filter {step.name!r}: {error}",
                fix=f"{error.fix}, or skip such documents with documents.on_bad_input=skip",
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
    where = f" {reader.place}" if document is not None and reader.place else ""
    named = f" (document {document.id!r})" if document is not None and document.id is not None else ""
    return f"{storage.redact(reader.unit.url)}{where}{named}"


def _problem(outcome: Document, document: Document) -> str:
    """Return what a transform did that it may not do; an empty text if nothing."""
    if outcome.source != document.source or (outcome.id != document.id and document.id is not None):
        return "changed the source or the id, by which a takedown finds the document"
    wrong = wrong_values(outcome)
    return wrong and f"made a document whose {wrong}"
