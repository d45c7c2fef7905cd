"""How long a part of a run lasts, in one type: steps, tokens, epochs of its data, or a share of the steps around it.

`DurationSettings` is the base of the sections that have such settings. It also reads the names of earlier releases,
in which the ending is the unit: `warmup_ratio: 0.06` is `warmup: "6%"`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from data_prep.base.settings import LARGEST_INTEGER, SettingError, Settings, display

Unit = Literal["steps", "tokens", "epochs", "share"]
_TEXT = re.compile(r"(-?\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?) ?(step|token|epoch|%)s?", re.ASCII)
_UNITS: dict[str, Unit] = {"step": "steps", "token": "tokens", "epoch": "epochs", "%": "share"}
_MOST_EPOCHS = 1_000_000
_EXAMPLES = {"steps": '"1000 steps"', "tokens": '"5e9 tokens"', "epochs": '"3 epochs"', "share": '"6%"'}


@dataclass(frozen=True)
class Duration:
    """A length of a run, a stage, a warmup, a decay or a ramp-up; equal if number and unit are."""

    number: int | float
    """Whole for steps and tokens; less than 1 for a share."""
    unit: Unit = "steps"
    setting: str = field(default="", compare=False)
    """What the user wrote, such as `warmup_ratio=0.06`."""

    def __repr__(self) -> str:
        return f'"{self}"'

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{Decimal(repr(self.number)).scaleb(2).normalize():f}%"
        return f"{Decimal(repr(self.number)):f} {self.unit if self.number != 1 else self.unit[:-1]}"

    @property
    def steps(self) -> int:
        """The optimizer steps of a duration that is resolved (`in_steps`)."""
        assert self.unit == "steps", f"{self} is not resolved"
        return int(self.number)

    def in_steps(self, num_steps: int, steps_of_tokens: Callable[[int], int] | None = None) -> int:
        """Return the optimizer steps of the duration.

        Args:
            num_steps: steps of what a share is a share of.
            steps_of_tokens: how many steps a number of tokens takes there.
        """
        if self.unit == "share":
            return round(self.number * num_steps)
        if self.unit == "tokens":
            assert steps_of_tokens is not None, f"{self} needs the tokens of each step"
            return steps_of_tokens(int(self.number))
        return self.steps  # epochs become steps once the data are opened (`trainer/checkpoint/data_version.py`)

    def resolved(self, num_steps: int, steps_of_tokens: Callable[[int], int] | None = None) -> Duration:
        """Return the duration in steps with the same `setting`; the arguments are those of `in_steps`."""
        return replace(self, number=self.in_steps(num_steps, steps_of_tokens), unit="steps")

    @classmethod
    def of(cls, value: object) -> Duration:
        """Read `1000`, `"1000 steps"`, `"5e9 tokens"`, `"3 epochs"` or `"6%"`.

        Raises:
            ValueError: it is none of them.
        """
        if isinstance(value, Duration):
            return value
        is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        text = f"{value} steps" if is_whole else value
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError("must be a number of steps, or a number with a unit")
        unit, number = _UNITS[match[2]], Decimal(match[1])
        if unit == "share":
            return cls(float(number.scaleb(-2)), unit) if number else cls(0)
        is_whole = number == number.to_integral_value()
        if unit == "epochs" and not is_whole:
            return cls(float(number), unit)
        if not is_whole:
            raise ValueError(f"must be a whole number of {unit}")
        if number > LARGEST_INTEGER:
            raise ValueError(f"must be at most {LARGEST_INTEGER:,}, the largest 64-bit integer")
        return cls(int(number), unit if number else "steps")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_text = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(cls.of, serialization=as_text)


class DurationSettings(Settings):
    """A section with durations, each of which is set once: under its name, or under one of an earlier release."""

    section: ClassVar[str]
    """Prefix of the settings in messages, such as `schedule.`."""
    units: ClassVar[tuple[Unit, ...]] = ("steps", "tokens")
    """Units of its durations; a duration that may be a share is a part of a run or a stage, and may be 0."""

    @classmethod
    def type_of(cls, name: str, section: Mapping[str, Any]) -> Any:
        """Return the type of the setting `name`, an earlier one too; Any where it is unknown."""
        if name in cls.earlier_names:
            return float if name.endswith("_ratio") else int
        return super().type_of(name, section)

    @classmethod
    def unsets(cls, name: str, value: object) -> bool:
        """Return whether a value of an earlier name sets nothing: earlier releases stored a 0 for no decay."""
        return value is None or (value == 0 and name != "warmup_steps" and not name.endswith("_ratio"))

    @model_validator(mode="before")
    @classmethod
    def _read_durations(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        read = {name: value for name, value in values.items() if name not in cls.earlier_names}
        for today in dict.fromkeys(cls.earlier_names.values()):
            given = cls._given(today, values)
            if len(given) > 1:
                both = " and ".join(f"{cls.section}{each}={display(value)}" for each, value in given.items())
                raise SettingError(f"{both} are both set", fix="remove one of them", code="steps-or-tokens")
            for name, value in given.items():
                read[today] = cls._read(name, value)
        return read

    @classmethod
    def _given(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that set the duration, by the name in the configuration."""
        names = [name, *(earlier for earlier, today in cls.earlier_names.items() if today == name)]
        given = {each: values[each] for each in names if values.get(each) is not None}
        for each in names[1:]:
            if len(given) > 1 and each in given:
                # Earlier releases stored a share beside the steps or tokens that replaced it.
                is_replaced = each.endswith("_ratio") and (name not in given or given[each] == 0)
                if is_replaced or cls.unsets(each, given[each]):
                    del given[each]
        return given

    @classmethod
    def _read(cls, name: str, value: Any) -> Duration:
        """Return the duration that `name` sets.

        Raises:
            SettingError: the value is not a duration, or outside the limits of the section.
        """
        try:
            duration = Duration.of(_with_unit(name, value) if name in cls.earlier_names else value)
            if duration.number < 0 or not (duration.number or "share" in cls.units):
                raise ValueError(f"must be {'at least' if 'share' in cls.units else 'greater than'} 0")
            if duration.unit not in cls.units:
                raise ValueError(f"must be in {' or '.join(cls.units).replace('share', '%')}")
            if duration.unit == "epochs" and duration.number > _MOST_EPOCHS:
                raise ValueError(f"must be at most {_MOST_EPOCHS:,} epochs")
            if duration.unit == "share" and duration.number >= 1:
                raise ValueError("must be less than the whole")
        except ValueError as error:
            problem = f"{cls.section}{name}={display(value)} {error}"
            examples = ", ".join(_EXAMPLES[unit] for unit in cls.units)
            fix = "write a number such as 1000" if name in cls.earlier_names else f"write it as in {examples}"
            raise SettingError(problem, fix=fix, code="invalid-setting") from None
        return replace(duration, setting=duration.setting or f"{name}={value}")


def _with_unit(name: str, value: object) -> str:
    """Return the value of a setting of an earlier release as the text of a duration."""
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    if name.endswith("_ratio"):
        return f"{Decimal(repr(value)).scaleb(2):f}%"
    return f"{value} {name.rpartition('_')[2]}"
