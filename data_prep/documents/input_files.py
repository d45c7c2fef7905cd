"""Input files of a preparation from paths, URLs, glob patterns and brace ranges, and their work units."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from braceexpand import braceexpand

from data_prep.base.errors import UsageError
from data_prep.base.logs import logger
from data_prep.base.urls import path_parts
from data_prep.base.validation import check_encodable
from data_prep.config.preparation_config import DocumentSettings, PreparationConfig, Source
from data_prep.documents.formats.format_registry import FileFormat, Formats
from data_prep.documents.formats.input_format import Cut
from data_prep.storage import storage
from data_prep.text.sentences import check_language

_MOST_NAMES, _MOST_BRACES = 100_000, 100  # of a brace pattern
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
_SHOWN_LINKS = 5
_INSTALLED = Formats()


@dataclass(frozen=True)
class InputFile:
    """Input file at the time of planning."""

    url: str
    source: int
    bytes: int
    stamp: str
    """see `storage.stamp`"""
    format: FileFormat
    name: str = ""
    """relative to its pattern, see `relative_name`"""


@dataclass(frozen=True)
class InputUnit:
    """Work unit of the inputs: a whole file or a part of one.

    Attributes:
        start: first byte of a part, which holds the lines or blocks that begin in it; in a format with row groups, the
            number of the first one. Bytes of a compressed file count its content.
        stop: where the next part begins.
        whole: whether the unit is the whole file.
        bytes: the unit's share of the file's size, for progress.
        name: of the file, relative to the pattern that matched it; empty if it is not an input of a preparation.
        stamp: of the file when the work was planned; empty if it does not matter.
    """

    url: str
    start: int
    stop: int
    whole: bool
    source: int
    format: FileFormat
    bytes: int = 0
    name: str = ""
    stamp: str = ""

    def is_named_by_file(self, settings: DocumentSettings) -> bool:
        """Return whether documents that have neither id nor URL are named by their file.

        Those of text files are. Those of other formats are where a field for ids or URLs is configured, so that every
        document of such a preparation has a name; without one their origin is not kept.
        """
        return bool(settings.id_field or settings.url_field) or not self.format.has_fields


def find_inputs(config: PreparationConfig, formats: Formats | None = None) -> tuple[InputFile, ...]:
    """Find the input files of all sources, by source and then by name.

    Args:
        formats: of work that has begun; by default those of the configuration, made of the code of now.
    """
    formats, found = formats or Formats.of(config), list[tuple[int, str, str, FileFormat]]()
    for number, source in enumerate(config.sources):
        settings = config.documents_of(source)
        check_language(settings.language)
        for field, value in source:
            if isinstance(value, str):
                check_encodable(value, f"a source's {field}")
        patterns = ((pattern, expand(pattern, formats, settings.format is not None)) for pattern in source.input)
        named = [(url, relative_name(pattern, url)) for pattern, urls in patterns for url in urls]
        for url, _ in named:
            check_encodable(url, "input")
        found.extend((number, url, name, formats.of_file(url, settings.format)) for url, name in sorted(named))
    _check_named_once([(number, url) for number, url, *_ in found], config.sources)
    return tuple(storage.map_at_once(lambda file: _described(*file), found))


def find_units(
    files: Sequence[InputFile], config: PreparationConfig, formats: Formats | None = None
) -> tuple[InputUnit, ...]:
    """Divide all files into units, in their order; read the footers of Parquet files.

    Args:
        formats: by default those of the configuration.
    """
    formats = formats or Formats.of(config)

    def units(file: InputFile) -> list[InputUnit]:
        return split_into_units(file, formats, config.shards.unit_bytes, config.documents.txt_documents)

    return tuple(unit for file_units in storage.map_at_once(units, files) for unit in file_units)


def split_into_units(
    file: InputFile, formats: Formats, unit_bytes: int, txt_documents: Literal["file", "blank_lines"]
) -> list[InputUnit]:
    """Return the units of a file: parts of about `unit_bytes` of plain text if it can be split."""
    item, is_whole = formats[file.format.ending], not file.format.can_be_split
    if not is_whole and (item.needs_seeking or file.bytes > unit_bytes):
        is_whole = not storage.gives_ranges(file.url)
    cuts = [Cut(0, file.bytes, file.bytes)]
    if not is_whole:
        cuts = item.cuts(file.url, file.bytes, unit_bytes, txt_documents)
    return [
        InputUnit(
            file.url, cut.start, cut.stop, len(cuts) == 1, file.source, file.format, cut.bytes, file.name, file.stamp
        )
        for cut in cuts
    ]


def expand(pattern: str, formats: Formats = _INSTALLED, is_format_named: bool = False) -> list[str]:
    """Return the files that match a path, URL or pattern, sorted; every name of a brace pattern must match.

    A folder that `datasets.Dataset.save_to_disk` wrote stands for its Arrow files. Where a format is named, any other
    folder stands for all files in it and in its folders, except hidden ones.

    Patterns are globs (`*`, `?`, `[...]`, `**` for folders in folders), and braces as in a shell: `{a,b}`, and
    `{000..011}` with as many digits as are written. A file whose name looks like a pattern is found by its name.
    """
    files: set[str] = set()
    for name in _without_braces(pattern):
        in_folder = is_format_named and storage.is_folder(name)
        matches = _saved_dataset(name, formats) or storage.matches(storage.join(name, "**") if in_folder else name)
        if not matches:
            of_what = f" (of {storage.redact(pattern)})" if name != pattern else ""
            raise UsageError(
                f"no input file matches {storage.redact(name)}{of_what}",
                fix="check the path, or quote a pattern such as 'corpus/*.jsonl.gz'",
                code="input-not-found",
            )
        files.update(matches)
    return sorted(files)


def relative_name(pattern: str, url: str) -> str:
    """Return the name of a file relative to its pattern: what follows the last folder before the first wildcard.

    It is the same wherever the files lie, in a local folder or in a store: of `corpus/*/*.txt` and `s3://b/corpus/*/*.txt`
    the names are such as `fr/a.txt`. A file that is given without wildcards and braces has its own name.
    """
    parts = path_parts(url)
    if (wanted := path_parts(pattern)) == parts:
        return parts[-1]
    plain = itertools.takewhile(lambda part: not glob.has_magic(part) and "{" not in part, wanted)
    return "/".join(parts[min(len(list(plain)), len(parts) - 1) :])


def _saved_dataset(folder: str, formats: Formats) -> list[str]:
    """Return the Arrow files of a folder that `datasets` saved; nothing for any other folder."""
    is_remote = storage.is_remote(folder)
    if folder.startswith(("http://", "https://")) or (is_remote and any(character in folder for character in "*?[")):
        return []
    if not is_remote and not os.path.isdir(storage.local_path(folder)):
        return []
    name = storage.redact(folder)
    if formats.supports(folder):
        return []  # a store is not asked for every file
    splits = list(_json_of(storage.join(folder, "dataset_dict.json")).get("splits") or ())
    if splits:
        raise UsageError(
            f"input {name} holds {len(splits)} splits of a data set: {', '.join(map(str, splits))}",
            fix=f"name those to read, such as {name.rstrip('/')}/{splits[0]}",
            code="dataset-of-splits",
        )
    state = _json_of(storage.join(folder, "state.json"))
    if state.get("_indices_files"):
        raise UsageError(
            f"input {name} is a data set whose rows are chosen by a table of indices",
            fix="save it again with flatten_indices().save_to_disk(...)",
            code="dataset-with-indices",
        )
    try:
        return [storage.join(folder, str(item["filename"])) for item in state.get("_data_files", [])]
    except (TypeError, KeyError):
        raise UsageError(
            f"{name.rstrip('/')}/state.json does not name the files of a data set",
            fix="save the data set again",
            code="damaged-dataset",
        ) from None


def _json_of(url: str) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file."""
    if not storage.exists(url):
        return {}
    try:
        values = json.loads(storage.read_bytes(url))
    except ValueError as error:
        raise UsageError(
            f"{storage.redact(url)} is not JSON ({error})", fix="save the data set again", code="damaged-dataset"
        ) from None
    return values if isinstance(values, dict) else {}


def _without_braces(pattern: str) -> list[str]:
    is_web = pattern.startswith(("http://", "https://"))
    if "{" not in pattern or (not is_web and storage.exists(pattern)):
        return [pattern]
    whole, literal = pattern, "" if is_web else _named_folder(pattern)
    pattern = pattern[len(literal) :]
    # Both are looked at first: braceexpand goes down a stack with every brace, and makes a list of every range.
    is_small = pattern.count("{") <= _MOST_BRACES
    names: list[str] = []
    try:
        if is_small and all(_length(*found) <= _MOST_NAMES for found in _RANGE.findall(pattern)):
            names = list(islice(braceexpand(pattern, escape=False), _MOST_NAMES + 1))
    except ValueError:  # unbalanced braces stand for themselves
        return [whole]
    if not 0 < len(names) <= _MOST_NAMES:
        limit = f"{_MOST_NAMES:,} files" if is_small else f"{_MOST_BRACES} sets of braces"
        raise UsageError(
            f"{storage.redact(whole)} expands to more than {limit}",
            fix="use several patterns, or one with *",
            code="pattern-too-large",
        )
    return [literal + name for name in names]


def _named_folder(pattern: str) -> str:
    """Return the longest beginning of a pattern that is the name of a folder with braces, with its slash."""
    ends = [found.end() for found in re.finditer("(?<=[^:/])/", pattern)]
    return next((pattern[:end] for end in reversed(ends) if "{" in pattern[:end] and storage.exists(pattern[:end])), "")


def _length(first: str, last: str, step: str) -> int:
    """Return the number of items of a range in braces."""
    return abs(int(last) - int(first)) // max(1, abs(int(step or 1))) + 1


def _check_named_once(found: Sequence[tuple[int, str]], sources: Sequence[Source]) -> None:
    """Refuse a file with two names (symbolic links count), and two files that the manifest cannot distinguish.

    Hard links are only reported: tools that save space make them of equal files, and deduplication finds the documents.
    """
    seen: dict[str, tuple[int, str]] = {}
    names: set[str] = set()
    linked: dict[tuple[int, int], str] = {}
    doubled: list[str] = []
    for number, url in found:
        display = storage.redact(url)
        file = _identity(url)
        if file in seen:
            other, name = seen[file]
            where = "twice" if other == number else f"in two sources, {sources[other].name} and {sources[number].name}"
            same = "" if name == display else f" (it is the same file as {name})"
            raise UsageError(
                f"input {display} is listed {where}{same}", fix="list every file once", code="input-named-twice"
            )
        if display in names:
            raise UsageError(
                f"two inputs have the same name {display} without credentials and query, so that the manifest cannot "
                "distinguish them",
                fix="read them under different names",
                code="inputs-indistinguishable",
            )
        seen[file] = number, display
        names.add(display)
        identity = _hard_link(url)
        if identity is not None and (first := linked.setdefault(identity, display)) != display:
            doubled.append(f"{display} is a hard link of {first}")
    for link in doubled[:_SHOWN_LINKS]:
        logger(__name__).warning(f"{link}, so its documents are read twice")
    if len(doubled) > _SHOWN_LINKS:
        logger(__name__).warning(f"{len(doubled) - _SHOWN_LINKS:,} more inputs are hard links of others")


def _identity(url: str) -> str:
    """Return what all names of one file share, except hard links."""
    scheme, _, rest = storage.canonical(url).rpartition("://")
    return f"{scheme}://{rest.lstrip('/')}"


def _hard_link(url: str) -> tuple[int, int] | None:
    """Return what the hard links of a local file share; None for a file with one name."""
    if storage.is_remote(url):
        return None
    with storage.explained(url, "read"):
        status = storage.local_path(url).stat()
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else None


def _described(source: int, url: str, name: str, file_format: FileFormat) -> InputFile:
    return InputFile(url, source, *storage.size_and_stamp(url), file_format, name)
