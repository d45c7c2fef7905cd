"""Field types shared by all file formats, and the text of a validation error."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, ValidationError

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
