"""Work units of the inputs: the format of a file, and its division."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.formats.format_registry import format_named, format_of
from data_prep.documents.formats.input_format import Cut, Format
from data_prep.storage import storage

_COMPRESSED_GROWTH = 3.0  # text bytes of a compressed byte, about


@dataclass(frozen=True)
class InputUnit:
    """Work unit of the inputs: a whole file or a part of one.

    Attributes:
        start: first byte of a part, which holds the lines or blocks that begin in it; in a format with row groups, the
            number of the first one. Bytes of a compressed file count its content.
        stop: where the next part begins.
        whole: whether the unit is the whole file.
        bytes: the unit's share of the file's size, for progress.
        name: of the file, relative to the pattern that matched it; empty if it is no input of a preparation.
        format: that its source names, where it is another than that of the file's ending.
        stamp: of the file when the work was planned; empty if it does not matter.
    """

    url: str
    start: int
    stop: int
    whole: bool
    source: int
    bytes: int = 0
    name: str = ""
    format: str | None = None
    stamp: str = ""


def file_format(url: str, named: str | None = None) -> tuple[str, str]:
    """Return format and compression of a file by its name, such as (".jsonl", ".gz"), (".txt", "") or (".parquet", "").

    Here and below `named` is the format that the file's source names, if any.

    Raises:
        UsageError: the type of the file is unsupported.
    """
    _, ending, compression = format_of(url, named)
    return ending, compression


def growth_of(url: str, named: str | None = None) -> float:
    """Return the approximate number of text bytes per byte of a file, by its name."""
    item, _, compression = format_of(url, named)
    return _COMPRESSED_GROWTH if compression else item.growth


def has_fields(url: str, named: str | None = None) -> bool:
    """Return whether the documents of a file have fields besides the text."""
    return format_of(url, named)[0].has_fields


def is_one_document(ending: str, settings: DocumentSettings) -> bool:
    """Return whether every file with this ending is one document."""
    return format_named(ending)[0].is_one_document(settings)


def is_named_by_file(unit: InputUnit, settings: DocumentSettings) -> bool:
    """Return whether the documents of a unit that have neither id nor URL are named by their file.

    Those of text files are. Those of other formats are where a field for ids or URLs is configured, so that every
    document of such a preparation has a name; without one their origin is not kept.
    """
    return bool(settings.id_field or settings.url_field) or not has_fields(unit.url, unit.format)


def cannot_be_split(url: str, named: str | None = None) -> bool:
    """Return whether a file is one unit at any size, as a compressed file is, which is read from its beginning."""
    item, _, compression = format_of(url, named)
    return bool(compression) or type(item).cuts is Format.cuts


def split_into_units(
    url: str,
    file_bytes: int,
    unit_bytes: int,
    source: int,
    txt_documents: Literal["file", "blank_lines"] = "file",
    named: str | None = None,
) -> list[InputUnit]:
    """Return the units of a file: parts of about `unit_bytes` of plain text if it can be split.

    Raises:
        UserError: the file's own description, such as a Parquet footer, cannot be fetched.
    """
    item, _, compression = format_of(url, named)
    whole = [Cut(0, file_bytes, file_bytes)]
    may_be_cut = type(item).cuts is not Format.cuts and (item.needs_seeking or file_bytes > unit_bytes)
    is_whole = bool(compression) or (may_be_cut and not storage.gives_ranges(url))
    cuts = whole if is_whole else item.cuts(url, file_bytes, unit_bytes, txt_documents)
    return [InputUnit(url, cut.start, cut.stop, len(cuts) == 1, source, cut.bytes, format=named) for cut in cuts]
