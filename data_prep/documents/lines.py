"""Lines of a byte stream, and blocks separated by blank lines, in bounded memory at any length.

A part of a file is a byte range. It holds the lines that begin in the range, and the blocks whose preceding blank line
begins in the range; the first part also holds the file's first block. So the parts of a file hold every line and every
block exactly once, wherever the file is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from data_prep.storage import storage
from data_prep.storage.compression import undamaged_pieces
from data_prep.storage.hashing_files import HashingFile

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PIECE_BYTES = 1 << 20


class Line(NamedTuple):
    """A line, or a block of lines.

    Attributes:
        start: byte position in the file.
        number: number of the (first) line, counted from 1 at the start of reading.
        num_bytes: its length without the ending newline.
        data: the bytes; empty if `num_bytes` exceeds the limit.
    """

    start: int
    number: int
    num_bytes: int
    data: bytes


def skip_to_line(file: BinaryIO, position: int, stop: int) -> int:
    """Read from byte `position` until a line begins or `stop` is passed; return the new position."""
    while position < stop and (piece := file.readline(_PIECE_BYTES)):
        position += len(piece)
        if piece.endswith(b"\n"):
            break
    return position


def bounded_lines(file: BinaryIO, limit: int, position: int = 0, stop: int | None = None) -> Iterator[Line]:
    """Yield the lines of `file`, which is at byte `position`, that begin before `stop`.

    Bytes of a line beyond `limit` are read and counted, but not kept. A byte order mark at the beginning of the file
    is removed.
    """
    number = 0
    while (stop is None or position < stop) and (data := file.readline(limit + 1)):
        start, last = position, data
        number += 1
        position += len(data)
        while not last.endswith(b"\n") and (piece := file.readline(_PIECE_BYTES)):
            position += len(piece)
            last = piece
        num_bytes = position - start - last.endswith(b"\n")
        if start == 0:
            data = data.removeprefix(BYTE_ORDER_MARK)
        held = [data if num_bytes <= limit else b""]
        del data, last  # a suspended generator keeps its local variables alive
        yield Line(start, number, num_bytes, held.pop())


def blank_line_blocks(lines: Iterable[Line], limit: int, at_file_start: bool, stop: int | None) -> Iterator[Line]:
    """Yield the blocks of a part of a file, which read as many lines after the part as the last block needs.

    A blank line contains only ASCII white space. A block of more than `limit` bytes comes without its data.
    """
    block: Line | None = None
    pieces: list[bytes] = []
    begun = at_file_start
    for line in lines:
        is_outside = stop is not None and line.start >= stop
        if line.num_bytes <= limit and not line.data.strip():
            if block is not None:
                yield block._replace(data=b"".join(pieces))
            block, pieces, begun = None, [], True
        elif begun:
            first = block or line
            block = first._replace(num_bytes=line.start + line.num_bytes - first.start)
            if block.num_bytes <= limit:
                pieces.append(line.data)
            else:
                pieces.clear()
        if is_outside and block is None:
            return
    if block is not None:
        yield block._replace(data=b"".join(pieces))


def line_number_at(url: str, position: int) -> int:
    """Return the number of the line that begins at a byte position of a file."""
    number = 1
    with storage.open_read(url) as file:
        while position > 0 and (piece := file.read(min(_PIECE_BYTES, position))):
            number += piece.count(b"\n")
            position -= len(piece)
    return number


def damaged_line(url: str, compression: str) -> int:
    """Return the number of the last line that can be decompressed, at least in part, in a damaged file."""
    with storage.open_read(url) as file:
        pieces = undamaged_pieces(HashingFile(file, storage.redact(url)), compression)
        return 1 + sum(piece.count(b"\n") for piece in pieces)
