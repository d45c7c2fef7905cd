"""Damage that a format's own seal does not show: tar headers with a right checksum, another header or footer alone."""

from __future__ import annotations

import io
import json
import tarfile

from hypothesis import strategies as st

from tests.fuzzing.mutations import mutated_bytes, mutated_document

_BLOCK = tarfile.BLOCKSIZE
_CHECKSUM = slice(148, 156)
_FIELDS = {
    "name": slice(0, 100),
    "mode": slice(100, 108),
    "size": slice(124, 136),
    "time": slice(136, 148),
    "type": slice(156, 157),
    "link": slice(157, 257),
    "magic": slice(257, 265),
    "prefix": slice(345, 500),
}
_NUMBERS = (
    *(b"", b"-1", b"0", b"777", b"77777777777", b"8", b"99", b"1_0", b" 1", b"1 2", b"0x1", b"\xff" * 12),
    *(b"\x80" + number.to_bytes(11, "big") for number in (1, 1 << 33, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 80)),
    *(b"\xff" + (256**11 - number).to_bytes(11, "big") for number in (1, 512, 1 << 40)),
)
_TYPES = [bytes([number]) for number in b"\x00\x0101234567DKLMNSVXgx"]
_NAMES = (
    *(b"", b".", b"/", b"../x", b"9" * 100, b"\xff", b"\n"),
    *(b"000000-00000.tokens.npy", b"000000-00000.documents.npy"),
)
_PAX_KEYS = (
    *(b"path", b"linkpath", b"size", b"mtime", b"uid", b"hdrcharset", b"comment"),
    *(b"GNU.sparse.map", b"GNU.sparse.size", b"GNU.sparse.major", b"GNU.sparse.minor", b"GNU.sparse.name"),
    *(b"GNU.sparse.realsize", b"GNU.sparse.numblocks", b"GNU.sparse.offset"),
)
_PAX_VALUES = (
    *(b"", b"0", b"1", b"-1", b"1e999", b"nan", b"9" * 5_000, b"a,b", b"0,1"),
    *(b"BINARY", b"../x", b"\xff", b"x"),
)


@st.composite
def sealed_tar(draw: st.DrawFn, data: bytes) -> bytes:
    """The tar with one or two of its headers changed, or other members put before them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        starts = [member.offset for member in tar]
    for start in sorted(draw(st.lists(st.sampled_from(starts), min_size=1, max_size=2, unique=True)), reverse=True):
        stop = start + _BLOCK
        new = draw(_members()) + data[start:stop] if draw(st.booleans()) else draw(_damaged(data[start:stop]))
        data = data[:start] + new + data[stop:]
    return data


def sealed_tensors(data: bytes) -> st.SearchStrategy[bytes]:
    """A tensor file with another header, whose length is right."""
    start = 8 + int.from_bytes(data[:8], "little")

    def joined(header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header + data[start:]

    return mutated_document(json.loads(data[8:start])).map(joined)


def damaged_tensors(data: bytes) -> st.SearchStrategy[bytes]:
    """Either kind of damage to a tensor file."""
    return sealed_tensors(data) | mutated_bytes(data)


@st.composite
def sealed_parquet(draw: st.DrawFn, data: bytes) -> bytes:
    """A Parquet file with another footer, whose length is right."""
    stop = len(data) - 8
    start = stop - int.from_bytes(data[stop : stop + 4], "little")
    footer = draw(mutated_bytes(data[start:stop]))
    return data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@st.composite
def _damaged(draw: st.DrawFn, header: bytes) -> bytes:
    block = bytearray(header)
    name = draw(st.sampled_from(sorted(_FIELDS)))
    field = _FIELDS[name]
    width = field.stop - field.start
    values = {"type": _TYPES, "name": _NAMES, "link": _NAMES, "prefix": _NAMES}.get(name, _NUMBERS)
    value = draw(st.sampled_from(values) | st.binary(max_size=width))
    block[field] = value[:width].ljust(width, b"\0")
    return _seal(block)


@st.composite
def _members(draw: st.DrawFn) -> bytes:
    """A member of any type, mostly pax headers, with as many bytes as it says or with fewer."""
    header = tarfile.TarInfo("x")
    header.type = draw(st.sampled_from([tarfile.XHDTYPE, tarfile.XGLTYPE]) | st.sampled_from(_TYPES))
    content = b"".join(draw(st.lists(_pax_line(), max_size=3))) if draw(st.booleans()) else draw(st.binary(max_size=60))
    header.size = len(content)
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    if draw(st.booleans()):
        block[_FIELDS["size"]] = draw(st.sampled_from(_NUMBERS))[:12].ljust(12, b"\0")
    return _seal(block) + content + bytes(-len(content) % _BLOCK)


@st.composite
def _pax_line(draw: st.DrawFn) -> bytes:
    line = b" " + draw(st.sampled_from(_PAX_KEYS)) + b"=" + draw(st.sampled_from(_PAX_VALUES)) + b"\n"
    length = len(line) + len(str(len(line) + 2))
    told = draw(st.sampled_from([length, length, length, 0, 3, 1 << 40, 1 << 70]))
    return str(told).encode() + line


def _seal(block: bytearray) -> bytes:
    """The header with the checksum that its bytes have."""
    block[_CHECKSUM] = b" " * 8
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)
