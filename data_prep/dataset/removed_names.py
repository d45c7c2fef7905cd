"""Names of takedowns: the lists that users give, and the hashes that a data set keeps for additions to exclude.

A list is text, CSV or TSV with URLs, corpus ids or document ids. The data set keeps 64-bit hashes of URLs and corpus
ids beside the removed document ids, also of names that no document of it had when they were listed.
"""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.dataset.counts import read_tensors
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord, RemovalRecord
from data_prep.documents.document import Document
from data_prep.storage import storage
from data_prep.text.cleaning import replace_surrogates

REMOVED_IDS = "document_ids"
REMOVED_EARLIER = "removed earlier"
"""Why an addition leaves a document out that was removed from the data set."""
NOT_PRESENT = "not_present"
"""Tensor of a removal: the hashes of its names, or its document ids, that no document had."""

_URLS, _CORPUS_IDS = "url_hashes", "corpus_id_hashes"
DOCUMENT_ID_NAMES = ("document_id", "document")
ID_NAMES = ("id", "ids", "doc_id", "docid", "uid")
URL_NAMES = ("url", "urls", "uri", "link")

_ID = re.compile("[0-9a-fA-F]{16}")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


class RemovedNames(NamedTuple):
    """Hashes of exact values, (n,) uint64 each, ascending and unique."""

    urls: np.ndarray
    corpus_ids: np.ndarray

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the non-empty arrays, as the file of a removal stores them."""
        named = {_URLS: self.urls, _CORPUS_IDS: self.corpus_ids}
        return {name: hashes for name, hashes in named.items() if len(hashes)}

    def without(self, others: RemovedNames) -> RemovedNames:
        """Return the hashes that `others` does not contain."""
        return RemovedNames(*(np.setdiff1d(mine, theirs) for mine, theirs in zip(self, others, strict=True)))


def name_hash(value: str) -> int:
    """Return the xxh3_64 of a URL or corpus id as the provenance holds it: as written, without lone surrogates."""
    return xxhash.xxh3_64_intdigest(replace_surrogates(value).encode())


def hash_names(urls: Iterable[str] = (), corpus_ids: Iterable[str] = ()) -> RemovedNames:
    """Hash URLs and corpus ids."""
    return RemovedNames(*(np.unique(np.array([*map(name_hash, values)], np.uint64)) for values in (urls, corpus_ids)))


def files_of_removed_names(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Return the files with removed URLs or corpus ids."""
    return tuple(item.ids for item in manifest.removals if item.ids is not None and item.urls + item.corpus_ids)


def not_present(folder: str, manifest: Manifest, kind: str) -> np.ndarray:
    """Return the names, or document ids, of this `RemovalRecord.kind` that no document had when they were listed, (n,)
    uint64, ascending and unique.
    """

    def of_kind(item: RemovalRecord) -> bool:
        return item.ids is not None and item.not_present > 0 and item.kind == kind

    files = [item.ids for item in manifest.removals if of_kind(item)]
    parts = [_hashes(folder, file, read_tensors(folder, file), NOT_PRESENT) for file in files if file is not None]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def removed_ids(folder: str, manifest: Manifest) -> np.ndarray:
    """Return the ids of the documents that were removed by id, (n,) uint64, ascending and unique.

    Raises:
        UserError: a file of them is missing or damaged.
    """
    files = [removal.ids for removal in manifest.removals if removal.ids is not None]
    parts = [_removed_ids_in(folder, file) for file in files]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def _removed_ids_in(folder: str, file: FileRecord) -> np.ndarray:
    found = read_tensors(folder, file).get(REMOVED_IDS)
    if found is None or found.ndim != 1 or found.dtype != np.uint64:
        where = storage.redact(storage.join(folder, file.name))
        raise UserError(
            f"{where} holds no ids of documents", fix="restore it, or make the shards again", code="damaged-removed-ids"
        )
    return found


class ExcludedNames:
    """The names that an addition leaves out, for many look-ups.

    Attributes:
        dropped: number of documents that `excludes` found.
    """

    def __init__(self, names: RemovedNames) -> None:
        self._urls, self._corpus_ids = set(names.urls.tolist()), set(names.corpus_ids.tolist())
        self.dropped = 0

    def excludes(self, document: Document, file_name: str) -> bool:
        """Return whether a takedown has the URL or corpus id of the document, or names its file; count it."""
        names = [] if document.id is None else [document.id]
        if document.id is not None and document.id.startswith(f"{file_name}#"):
            names.append(file_name)  # one of several documents of the file
        found = (document.url is not None and name_hash(document.url) in self._urls) or any(
            name_hash(name) in self._corpus_ids for name in names
        )
        self.dropped += found
        return found


@functools.lru_cache(maxsize=1)
def removed_names(folder: str, files: tuple[FileRecord, ...]) -> RemovedNames:
    """Read the removed URLs and corpus ids of a data set, once in each process.

    Args:
        files: as `files_of_removed_names` returns them.
    """
    tensors = [(file, read_tensors(folder, file)) for file in files]

    def all_of(name: str) -> np.ndarray:
        return np.unique(np.concatenate([np.empty(0, np.uint64), *(_hashes(folder, *each, name) for each in tensors)]))

    return RemovedNames(all_of(_URLS), all_of(_CORPUS_IDS))


def _hashes(folder: str, file: FileRecord, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    found = tensors.get(name, np.empty(0, np.uint64))
    if found.ndim != 1 or found.dtype != np.uint64:
        where = storage.redact(storage.join(folder, file.name))
        raise UserError(f"{where} has no usable {name}", fix="restore it from a copy", code="damaged-removed-ids")
    return found


def read_list(url: str, names: Sequence[str]) -> list[tuple[int, str]]:
    """Read a list: one value per line (lines that begin with # are comments, white space at both ends does not count),
    or a CSV or TSV file with a header, whose cells count as they are.

    Args:
        names: lower-case names of the column with the values; the column of a table of one may have any name.

    Returns (line number, value) pairs.
    """
    where = storage.redact(url)
    if not storage.exists(url):
        raise UsageError(f"{where} does not exist", fix="give the path or URL of a list", code="missing-path")
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text (byte {error.start})", fix="give a text, CSV or TSV file", code="invalid-list"
        ) from None
    delimiter = next((sign for ending, sign in _DELIMITERS.items() if url.lower().endswith(ending)), None)
    found = list(_plain_values(text) if delimiter is None else _table_values(text, delimiter, names, where))
    if not found:
        raise UserError(f"{where} lists nothing", fix="give one value per line", code="empty-list")
    return found


def read_document_ids(url: str) -> np.ndarray:
    """Read a list of document ids: 16 hexadecimal digits each, as `inspect` shows them; # begins a comment.

    Returns (n,) uint64, ascending and unique.
    """
    ids: list[int] = []
    for number, value in read_list(url, DOCUMENT_ID_NAMES):
        word = value.partition("#")[0].strip()
        if not _ID.fullmatch(word):
            raise UsageError(
                f"{storage.redact(url)} line {number} is not a document id: {word[:40]!r}",
                fix="give the 16 hexadecimal digits that 'inspect' shows, such as 00f3a9c2d4e5b617; for the ids of "
                "your corpus use --ids, for URLs --urls",
                code="malformed-document-id",
            )
        ids.append(int(word, 16))
    return np.unique(np.array(ids, np.uint64))


def _plain_values(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if (value := line.strip()) and not value.startswith("#"):
            yield number, value


def _table_values(text: str, delimiter: str, names: Sequence[str], where: str) -> Iterator[tuple[int, str]]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        head = [name.strip().lower() for name in next(rows, [])]
        columns = [number for number, name in enumerate(head) if name in names] or ([0] if len(head) == 1 else [])
        if not columns:
            raise UsageError(
                f"{where} line 1 has no column {' or '.join(names)}; its columns are {', '.join(head) or 'none'}",
                fix="name the column with the values in the header",
                code="missing-column",
            )
        if head[columns[0]] not in names and "://" in head[0]:
            raise UsageError(
                f"{where} line 1 is a value, not the name of a column",
                fix=f"begin the file with a line that names the column, such as {names[0]}",
                code="missing-column",
            )
        if head[columns[0]] not in names:
            logger(__name__).warning(f"{where} line 1 is taken as the name of the column: {head[0]!r}")
        for row in rows:
            if row and len(row) != len(head):
                raise UserError(
                    f"{where} line {rows.line_num} has {len(row)} cells, and the header has {len(head)}",
                    fix=f"put quotation marks around a value that holds {delimiter!r}, or give the list as a text file "
                    "with one value per line",
                    code="invalid-list",
                )
            if row and row[columns[0]].strip():
                yield rows.line_num, row[columns[0]]
    except csv.Error as error:
        raise UserError(
            f"{where} line {rows.line_num} is not valid CSV ({error})", fix="correct the line", code="invalid-list"
        ) from None
