"""Types of fields that every format checks alike, and what pydantic found wrong, in the words of an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from data_prep.base.terminal import printable

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_LONGEST_PLACE = 100  # characters: a damaged file may hold any name


def first_problem(error: ValidationError) -> str:
    """Where the first problem lies, and what it is: "model.hidden_size: Input should be a valid integer"."""
    first = error.errors()[0]
    where = printable(".".join(map(str, first["loc"])))[:_LONGEST_PLACE]
    return f"{where}: {first['msg']}" if where else first["msg"]
