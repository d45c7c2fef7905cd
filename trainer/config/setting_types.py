"""Field types that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""At most a year: clocks and timers of the libraries have limits."""
