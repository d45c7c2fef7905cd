"""Additions pass what the data set passed: they inherit its filters, deduplication and fields for names.

A list that has grown (blocklist, evaluation set) is taken. Any other difference is refused unless the user allows it;
then the manifest and the data card state what the addition did not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.base.terminal import counted, printable
from data_prep.config.preparation_config import (
    MAX_SOURCES,
    DeduplicationSettings,
    DocumentSettings,
    FilterSettings,
    PreparationConfig,
)
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.safeguards import (
    ADDITION,
    SAFEGUARDS,
    config_differences,
    filter_differences,
    read_filter_lists,
)
from data_prep.dataset.versions import next_version
from data_prep.filters.registry import MISSING_FILE, described_filters, load_filters, without_logins
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_INHERITED = (
    "sentences",
    "id_field",
    "url_field",
    "language_field",
    "metadata_fields",
    "min_document_characters",
    "max_document_characters",
)
"""Settings of documents that an addition inherits besides the filters, where it does not set them."""
_NAMES = ("id_field", "url_field")
_SHOWN = 8
_LEAVE_OUT = "leave documents.filters and deduplication out, so that the addition inherits them"
_RESTORE = "restore the code and the lists that the addition inherits"
_ALLOW = "allow the differences with --allow-other-filters (in Python: allow_other_filters=True)"


class Inherited(NamedTuple):
    """The configuration of an addition with what it inherits.

    Attributes:
        not_passed: its differences to the filters and the deduplication of the data set.
        grown: lists of filters that have grown since.
    """

    config: PreparationConfig
    not_passed: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()


def inherit(config: PreparationConfig, parent: Manifest, folder: str, allow_other_filters: bool) -> Inherited:
    """Return the configuration of an addition to the data set `parent` in `folder`, with what it inherits.

    Raises:
        UsageError: it differs from the data set in filters or deduplication (`addition-differs`, with the list), or
            lacks a filter that cannot be inherited.
    """
    earlier, settings = _preparations_before(config, parent), config.documents
    theirs = next((each for each in reversed(earlier[1:]) if _passed(each)), earlier[0])
    documents = _documents_of(earlier)
    updates = {
        name: documents[name] for name in _INHERITED if name in documents and name not in settings.model_fields_set
    }
    entries: Sequence[FilterSettings] = settings.filters
    if not allow_other_filters or "filters" not in settings.model_fields_set:
        entries = _inherited_filters(settings, theirs)
    is_inherited = entries is not settings.filters and not config.deduplication.model_fields_set
    validated = DocumentSettings.model_validate(updates) if updates else None
    changes = {name: getattr(validated, name) for name in updates}
    deduplication = {
        **{name: value for name, value in theirs.get("deduplication", {}).items() if name in _DEDUPLICATION},
        **config.deduplication.model_dump(exclude_unset=True),
    }
    config = config.model_copy(
        update={
            "documents": settings.model_copy(update={**changes, "filters": tuple(entries)}),
            "deduplication": DeduplicationSettings.model_validate(deduplication),
        }
    )
    try:
        compared = list(_compared(config, theirs, folder))
    except UsageError as error:
        if entries is settings.filters or error.code not in MISSING_FILE:
            raise
        fix = f"{error.fix}; or give the filters again in documents.filters, with the places of their lists"
        raise UsageError(f"{error.problem}, which the addition inherits", fix=fix, code=error.code) from None
    not_passed = tuple(text for text, is_growth in compared if not is_growth)
    grown = tuple(text for text, is_growth in compared if is_growth)
    if not_passed and not allow_other_filters:
        more = f" and {len(not_passed) - _SHOWN} more" if not_passed[_SHOWN:] else ""
        listed = f"{'; '.join(not_passed[:_SHOWN])}{more}"
        raise UsageError(
            printable(f"the addition differs from the data set {storage.redact(folder)}: {listed}"),
            fix=f"{_RESTORE if is_inherited else _LEAVE_OUT}, or {_ALLOW}",
            code="addition-differs",
        )
    for what, found in (
        ("the addition does not pass all filters of the data set", not_passed),
        ("the documents of the data set did not pass the new entries of a list", grown),
    ):
        if found:
            logger(__name__).warning(printable(f"{what}: {'; '.join(found)}"))
    return Inherited(config, not_passed, grown)


_DEDUPLICATION = frozenset(DeduplicationSettings.model_fields)


def check_fits(config: PreparationConfig, tokenizer: Tokenizer, parent: Manifest) -> None:
    """Refuse an addition whose tokenizer, budgets, sentences or split do not fit the data set."""
    settings = config.shards
    if not parent.sources or not parent.train.shards:
        raise UserError(
            f"the manifest of the existing data set names no {'train shard' if parent.sources else 'source'}",
            fix="restore it if it was edited by hand, or rebuild the data set",
            code="nothing-to-add-to",
        )
    if len(parent.sources) + len(config.sources) > MAX_SOURCES:
        raise UsageError(
            f"the existing data set has {len(parent.sources):,} sources and {len(config.sources):,} are added, and a "
            f"data set holds at most {MAX_SOURCES:,}",
            fix="give one source several files or patterns",
            code="too-many-sources",
        )
    next_version(parent)  # raises if there is none, before work begins
    if tokenizer.fingerprint != parent.tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer has the fingerprint {tokenizer.fingerprint}, and the existing data set was made with "
            f"{parent.tokenizer.fingerprint}",
            fix="leave the tokenizer out: an addition uses the tokenizer of the data set",
            code="other-tokenizer",
        )
    if config.total_tokens is not None:
        raise UsageError(
            f"total_tokens={config.total_tokens} is set, and an addition cannot change the budgets of existing sources",
            fix="remove total_tokens and give the added sources max_tokens or epochs, or make the data set again",
            code="total-in-addition",
        )
    if config.has_source_budgets and not parent.has_source_budgets:
        raise UsageError(
            "a source has a weight, max_tokens or epochs, and the shards of the existing data set hold several sources "
            "each",
            fix="remove the setting, or make the data set again with it",
            code="budget-in-addition",
        )
    theirs = "split" if parent.has_sentences else "none"
    if config.documents.sentences != theirs:
        raise UsageError(
            f"documents.sentences={config.documents.sentences} and the existing data set was prepared with {theirs}",
            fix="leave documents.sentences out: an addition inherits it; or prepare the whole text "
            f"again with documents.sentences={config.documents.sentences}",
            code="other-sentences",
        )
    fraction = parent.config.get("shards", {}).get("valid_fraction", settings.valid_fraction)
    if fraction != settings.valid_fraction:
        raise UsageError(
            f"shards.valid_fraction={settings.valid_fraction:g} and the existing data set has {fraction:g}, so a "
            "text could be held out in one and trained on in the other",
            fix=f"set shards.valid_fraction={fraction:g}",
            code="other-valid-fraction",
        )


def given_filters(entries: Sequence[FilterSettings]) -> list[dict[str, Any]]:
    """Return filters as the user gave them, for the manifest, without secrets; of a Python function only the name."""
    return [
        {"name": entry.name, "function": True}
        if entry.function is not None
        else without_logins(entry.model_dump(mode="json", exclude_none=True))
        for entry in entries
    ]


def filter_lists(entries: Sequence[FilterSettings]) -> list[dict[str, np.ndarray]]:
    """Return the lists of each filter that has some, see `data_prep.filters.protocol.hashes_of`."""
    found: list[dict[str, np.ndarray]] = []
    for step in load_filters(entries):
        lists: Callable[[], Mapping[str, np.ndarray]] | None = getattr(step.apply, "lists", None)
        found.append({} if lists is None else dict(lists()))
    return found


def _preparations_before(config: PreparationConfig, parent: Manifest) -> list[Mapping[str, Any]]:
    """Return the settings of the preparations of the data set before the one of the same sources.

    A finished addition is compared as it was when it began.
    """
    names = {source.name for source in config.sources}
    earlier: list[Mapping[str, Any]] = []
    for settings in parent.preparations:
        if earlier and names & {source["name"] for source in settings.get("sources", [])}:
            break
        earlier.append(settings)
    return earlier


def _documents_of(preparations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of documents that the first preparation had; what an addition sets holds for it alone.

    A field for ids or URLs that the first one lacked is that of the first addition with one, so that takedowns hold.
    """
    first, *additions = (each.get("documents", {}) for each in preparations)
    found = dict(first)
    for each in additions:
        found.update({name: each[name] for name in _NAMES if found.get(name) is None and name in each})
    return found


def _passed(settings: Mapping[str, Any]) -> bool:
    """Whether an addition is known to have passed everything; earlier releases did not compare."""
    return ADDITION in settings and not settings[ADDITION].get("not_passed")


def _inherited_filters(settings: DocumentSettings, theirs: Mapping[str, Any]) -> Sequence[FilterSettings]:
    """Return the filters of an addition: its own, or those of the data set.

    Python functions that are given again take their places among the inherited ones.
    """
    identities: Sequence[Mapping[str, Any]] = theirs.get("documents", {}).get("filters") or []
    entries = theirs.get(SAFEGUARDS, {}).get("filters") or [_as_entry(each) for each in identities]
    functions = {entry["name"] for entry in entries if entry.get("function") is True}
    again = {entry.name: entry for entry in settings.filters if entry.function is not None}
    is_functions_only = len(again) == len(settings.filters) and again.keys() <= functions
    if "filters" in settings.model_fields_set and not (again and is_functions_only):
        return settings.filters
    missing = sorted(functions - again.keys())
    if missing:
        raise UsageError(
            f"the data set was prepared with {counted(len(missing), 'Python function')} as filter, which the addition "
            f"does not pass: {', '.join(missing)}",
            fix=f"give them again in prepare(..., add_to=..., filters=[...]), or set documents.filters and {_ALLOW}",
            code="addition-differs",
        )
    return [again[entry["name"]] if entry["name"] in again else _entry(entry) for entry in entries]


def _as_entry(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a filter whose manifest has its identity alone, as earlier releases wrote it."""
    entry = {"name": identity.get("name"), **identity.get("parameters", {})}
    return {**entry, "version": identity["version"]} if "source_sha256" in identity and "version" in identity else entry


def _entry(values: Mapping[str, Any]) -> FilterSettings:
    if any(map(_is_digest, values.values())):
        raise UsageError(
            f"the data set was prepared by an earlier release, whose manifest does not name the files of the filter "
            f"{values['name']}",
            fix="give the filters again in documents.filters, with the files that they read",
            code="addition-differs",
        )
    return FilterSettings.model_validate(values)


def _is_digest(value: Any) -> bool:
    """Whether a value is the description of a list instead of the list, or contains one."""
    return isinstance(value, dict) and ("sha256" in value or any(map(_is_digest, value.values())))


def _compared(config: PreparationConfig, theirs: Mapping[str, Any], folder: str) -> Iterator[tuple[str, bool]]:
    """Yield what differs between the addition and the data set, and whether it is only a list that has grown."""
    deduplication = config.deduplication.model_dump(mode="json")
    before = {name: value for name, value in theirs.get("deduplication", {}).items() if name in deduplication}
    now = {name: deduplication[name] for name in before}
    yield from ((text, False) for text in config_differences(before, now, "deduplication"))
    identities = theirs.get("documents", {}).get("filters") or []
    mine = described_filters(config.documents.filters)
    for source in config.sources:
        own = described_filters(source.filters or ())
        lacking = [] if source.filters is None else [each["name"] for each in mine if each not in own]
        if lacking:
            yield f"source {source.name} has filters of its own, without {', '.join(lacking)}", False
    if [each.get("name") for each in identities] != [each["name"] for each in mine]:
        yield from ((text, False) for text in filter_differences(identities, mine))
        return
    stored = read_filter_lists(folder, theirs) or [{} for _ in mine]
    for old, new, lists, found in zip(identities, mine, stored, filter_lists(config.documents.filters), strict=True):
        if old == new:
            continue
        if not lists:
            yield from ((text, False) for text in filter_differences([old], [new]))
            continue
        yield from ((text, False) for text in filter_differences([_without_lists(old)], [_without_lists(new)]))
        yield from _list_changes(new["name"], lists, found)


def _list_changes(
    name: str, before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, bool]]:
    for of in sorted(before.keys() | now.keys()):
        old, new = before.get(of, np.empty(0, np.uint64)), now.get(of, np.empty(0, np.uint64))
        lost, added = len(np.setdiff1d(old, new)), len(np.setdiff1d(new, old))
        if lost:
            yield f"the list {of} of filter {name} lacks {lost:,} of its {len(old):,} entries", False
        elif added:
            yield f"the list {of} of filter {name} grew from {len(old):,} to {len(new):,} entries", True


def _without_lists(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a filter without the descriptions of its lists, which are compared by their entries."""

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in values.items() if not (isinstance(value, dict) and "sha256" in value)}
        return {name: plain(value) if isinstance(value, dict) else value for name, value in kept.items()}

    return plain(identity)
