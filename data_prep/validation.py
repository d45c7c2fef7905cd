"""What pydantic found wrong, in the words of an error."""

from __future__ import annotations

from pydantic import ValidationError

from data_prep.terminal import printable

_LONGEST_PLACE = 100  # characters: a damaged file may hold any name


def first_problem(error: ValidationError) -> str:
    """Where the first problem lies, and what it is: "model.hidden_size: Input should be a valid integer"."""
    first = error.errors()[0]
    where = printable(".".join(map(str, first["loc"])))[:_LONGEST_PLACE]
    return f"{where}: {first['msg']}" if where else first["msg"]
