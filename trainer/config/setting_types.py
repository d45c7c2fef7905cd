"""Field types that several sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
MaskUnit = Literal["token", "word", "span"]
MaskingRate = Annotated[float, Field(gt=0.0, le=0.8)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""At most a year: clocks and timers of the libraries have limits."""
