"""Custom formats: a function from a stream to objects, or a class like those of this folder."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from data_prep.base.errors import UserError
from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import Format, Reading, document_of
from data_prep.documents.rejects import BadInput, Fault


class CustomFormat(Format):
    """Objects that a function yields from a stream of bytes; their fields are those that the settings name.

    The function raises ValueError where the file is none of its format; nothing of the file is used then.
    """

    def __init__(self, ending: str, read: Callable[[BinaryIO], Iterable[Mapping[str, Any]]]) -> None:
        self.endings = (ending,)
        self._read = read

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        rejects, number = reading.rejects, 0
        objects = iter(self._read(stream))
        while True:
            number += 1
            try:
                values = next(objects, None)
            except (UserError, OSError, EOFError):
                raise
            except ValueError as error:
                raise BadInput(
                    f"{rejects.where} is damaged at document {number} ({error})",
                    "damaged file",
                    spoils_file=True,
                    fix="fetch it again, or leave it out with documents.on_bad_input=skip",
                ) from None
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                raise UserError(
                    f"the format {self.endings[0]} failed at {frame.filename}:{frame.lineno} on {rejects.where}, "
                    f"document {number} ({type(error).__name__}: {error})",
                    fix="correct the function of the format; it raises ValueError where a file is damaged",
                    code="format-failed",
                ) from error
            if values is None:
                return
            try:
                if not isinstance(values, Mapping):
                    raise Fault(f"is {type(values).__name__}, not an object with fields", "no object")
                document = document_of(values, reading.fields)
                num_bytes = len(document.text.encode(errors="surrogatepass"))
            except Fault as fault:
                rejects.bad(f"document {number}", fault)
                continue
            if num_bytes > reading.limit:
                rejects.too_long(num_bytes)
                continue
            rejects.place = f"document {number}"
            yield document
