"""Pieces of work on the inputs: which formats are read, and how a file is cut into units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Literal

from data_prep.base.errors import UsageError
from data_prep.storage import storage
from data_prep.storage.compression import COMPRESSIONS
from data_prep.storage.parquet import DamagedParquet, ParquetRows

_FORMATS = (".txt", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class InputUnit:
    """A piece of work on the inputs: a whole file or a part of one.

    Attributes:
        start: first byte of a text file's part, which takes the lines or blocks that begin in it; of a Parquet file,
            the number of the first row group. Bytes of a compressed file are those of its content.
        stop: where the next part begins.
        whole: it is all of the file.
        bytes: its share of the file's size, to show progress.
    """

    url: str
    start: int
    stop: int
    whole: bool
    source: int
    bytes: int = 0


def file_format(url: str) -> tuple[str, str]:
    """Format and compression of a file by its name, such as (".jsonl", ".gz"), (".txt", "") or (".parquet", "").

    Raises:
        UsageError: its ending is none that is read here.
    """
    name = (storage.redact(url) if url.startswith(("http://", "https://")) else url).lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    for ending in _FORMATS:
        if name.removesuffix(compression).endswith(ending):
            return ending, compression
    raise UsageError(
        f"input {storage.redact(url)} has an ending that is not read here; inputs end in {' '.join(_FORMATS)}, each of "
        f"these also with {' '.join(COMPRESSIONS)} after it"
    )


def cannot_be_split(url: str) -> bool:
    """Whether a file is one unit whatever its size: a compressed one can only be read from its beginning."""
    return bool(file_format(url)[1])


def split_into_units(
    url: str,
    file_bytes: int,
    unit_bytes: int,
    source: int,
    txt_documents: Literal["file", "blank_lines"] = "file",
) -> list[InputUnit]:
    """The units of a file: parts of about `unit_bytes` of plain text where it can be split.

    Raises:
        UserError: a Parquet file's footer cannot be fetched.
    """
    ending, compression = file_format(url)
    if ending == ".parquet" and not compression:
        return _split_parquet(url, file_bytes, unit_bytes, source)
    is_one = bool(compression) or (ending == ".txt" and txt_documents == "file")
    parts = 1 if is_one else max(1, file_bytes // unit_bytes)
    cuts = [file_bytes * part // parts for part in range(parts + 1)]
    return [
        InputUnit(url, start, stop, parts == 1, source, stop - start)
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def rows_of(file: BinaryIO, unit: InputUnit) -> ParquetRows:
    """The unit's rows; `file` is the Parquet file, or the content of a compressed one.

    Raises:
        DamagedParquet: its footer cannot be read.
    """
    return ParquetRows(file, storage.redact(unit.url), unit.start, None if unit.whole else unit.stop)


def _split_parquet(url: str, file_bytes: int, unit_bytes: int, source: int) -> list[InputUnit]:
    """Ranges of row groups; a file that is no Parquet is one unit, so that its reader refuses it or counts it."""
    whole = InputUnit(url, 0, 0, True, source, file_bytes)
    if not file_bytes:
        return [whole]
    try:
        with storage.open_read(url) as file:
            groups = rows_of(file, whole).row_groups()
    except DamagedParquet:
        return [whole]
    cuts, plain_bytes = [0], 0
    for number, group in enumerate(groups):
        if plain_bytes and plain_bytes + group.plain_bytes > unit_bytes:
            cuts.append(number)
            plain_bytes = 0
        plain_bytes += group.plain_bytes
    cuts.append(len(groups))
    stored = sum(group.stored_bytes for group in groups)
    shares = [sum(group.stored_bytes for group in groups[:cut]) * file_bytes // max(stored, 1) for cut in cuts]
    shares[-1] = file_bytes
    return [
        InputUnit(url, cuts[i], cuts[i + 1], len(cuts) == 2, source, shares[i + 1] - shares[i])
        for i in range(len(cuts) - 1)
    ]
