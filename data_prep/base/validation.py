"""Field types shared by all file formats, the text of a validation error, and texts that a manifest can hold."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, ValidationError

from data_prep.base.errors import UsageError
from data_prep.base.terminal import printable

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_LONGEST_PLACE = 100  # characters: a damaged file may hold any name


def first_problem(error: ValidationError) -> str:
    """Return the first problem with its location: "model.hidden_size: must be a valid integer"."""
    first = error.errors()[0]
    where = printable(".".join(map(str, first["loc"])))[:_LONGEST_PLACE]
    message = re.sub("^Input should ", "must ", first["msg"])
    return f"{where}: {message}" if where else message


def check_encodable(text: str, what: str) -> None:
    """Raise if a text cannot be written as UTF-8; `what` names it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{what} {text!r} is not UTF-8, which a manifest requires",
            fix="rename the file, or write it in UTF-8",
            code="not-utf8",
        ) from None
