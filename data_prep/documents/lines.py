"""Lines of a byte stream and the blocks that blank lines separate, in bounded memory at any length.

A part of a file is a byte range of it. Its lines are those that begin in the range; its blocks those whose blank line
before begins in the range, and of the part at the file's beginning the file's first one too. So the parts of a file
hold every line and every block exactly once, wherever it is cut.
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
        number: number of its (first) line, counted from 1 where the reading began.
        num_bytes: its length without the ending newline.
        data: its bytes; none where `num_bytes` is over the limit.
    """

    start: int
    number: int
    num_bytes: int
    data: bytes


def skip_to_line(file: BinaryIO, position: int, stop: int) -> int:
    """Read on from byte `position` until a line begins, or `stop` is passed; returns the position then."""
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
        del data, last  # a generator that waits holds what it has names for
        yield Line(start, number, num_bytes, held.pop())


def blank_line_blocks(lines: Iterable[Line], limit: int, at_file_start: bool, stop: int | None) -> Iterator[Line]:
    """The blocks of a part of a file, from all lines that begin in the part and as many after them as it takes.

    A blank line holds nothing but ASCII white space. Of a block of more than `limit` bytes nothing is kept.
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
    """Number of the line of a file that begins at a byte position."""
    number = 1
    with storage.open_read(url) as file:
        while position > 0 and (piece := file.read(min(_PIECE_BYTES, position))):
            number += piece.count(b"\n")
            position -= len(piece)
    return number


def damaged_line(url: str, compression: str) -> int:
    """Number of the last line of which something can be decompressed, in a compressed file that is damaged."""
    with storage.open_read(url) as file:
        pieces = undamaged_pieces(HashingFile(file, storage.redact(url)), compression)
        return 1 + sum(piece.count(b"\n") for piece in pieces)
