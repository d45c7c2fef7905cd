"""Names of Hugging Face (TrainingArguments, run_mlm.py), Megatron and fairseq, and the settings that they mean here.

A wrong guess is worse than none, so the answer for each name is a setting, its unit and the conversion of the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from shlex import quote
from typing import NamedTuple

ROWS_TO_TOKENS = "{value} rows are {value} x data.sequence_length tokens"


class Synonym(NamedTuple):
    """Names that mean one setting.

    `advice` says what to do, with `{value}` for the value that was typed; an empty one takes the value as it is.
    """

    names: tuple[str, ...]
    setting: str
    unit: str = ""
    advice: str = ""


@cache
def synonyms() -> tuple[Synonym, ...]:
    """Read the table, `synonyms.yaml`."""
    import yaml  # here, as in `data_prep/base/settings.py`: for an error alone

    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return tuple(Synonym(**{**entry, "names": tuple(entry["names"])}) for entry in yaml.safe_load(text))


@cache
def _by_name() -> dict[str, Synonym]:
    """Return the synonyms by name without underscores."""
    return {name.replace("_", ""): synonym for synonym in synonyms() for name in synonym.names}


@cache
def length_names() -> tuple[str, ...]:
    """Return the names of data.sequence_length."""
    return ("sequence_length", *_by_name()["seqlength"].names)


_IN_STAGE = {
    "training.max_steps": "steps",
    "training.duration": "duration",
    "data.shards": "data.shards",
    "data.sequence_length": "sequence_length",
    "training.micro_batch_tokens": "micro_batch_tokens",
    "training.global_batch_tokens": "global_batch_tokens",
    "training.batch_warmup": "batch_warmup",
    "data.mlm_probability": "mlm_probability",
    "data.mask_unit": "mask_unit",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    **{f"schedule.{name}": f"schedule.{name}" for name in ("name", "warmup", "warmup_steps", "warmup_ratio")},
    **{f"schedule.{name}": f"schedule.{name}" for name in ("decay_duration", "decay_steps", "final_ratio")},
    "model.global_rope_theta": "global_rope_theta",
    "training.gradient_clipping": "gradient_clipping",
    "evaluation.every_steps": "evaluation.every_steps",
    "evaluation.max_tokens": "evaluation.max_tokens",
}
"""Settings of the run, and those of a stage that replace them."""


def explain_synonym(name: str, value: object, sequence_length: int | None = None) -> str | None:
    """Say as an imperative which setting of this project is meant by the last part of `name`; None if it is unknown.

    Args:
        name: dotted; inside `training.stages.N`, the settings of that stage are named.
        value: what was typed for it; anything but a scalar is shown as N.
        sequence_length: tokens of a sequence, if known: a number of sequences is then converted.
    """
    stage = re.match(r"training\.stages\.\d+\.", name)
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str | int | float) or not text:
        text = "N"
    if stage is not None and last == "shards":
        return f"write {stage[0]}data.shards={text} (in YAML: `data: {{shards: {text}}}` in the stage)"
    is_common = last in ("steps", "tokens") and name.count(".") - name.startswith("training.") > 0
    synonym = None if is_common else _by_name().get(last.replace("_", ""))
    if synonym is None:
        return None
    answer = _answer(synonym, text, sequence_length)
    if stage is None:
        return answer
    return re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda mention: _of_stage(mention[0], stage[0]), answer)


def explain_stage(name: str, value: object, stages: Sequence[str]) -> str | None:
    """Explain how to write a setting of one stage if an unknown section has the name of a stage, `stage` or `stages`.

    Args:
        name: dotted name of the section.
        value: what was written in it.
        stages: names of the stages of the run.
    """
    last = name.rpartition(".")[2]
    if not isinstance(value, Mapping) or not value:
        return None
    if last in ("stage", "stages"):
        last, value = next(iter(value.items()))
    elif last not in stages:
        return None
    path = f"training.stages.{last}"
    while isinstance(value, Mapping) and len(value) == 1:
        part, value = next(iter(value.items()))
        path += f".{part}"
    return "write " + (f"{path}.SETTING=VALUE" if isinstance(value, Mapping) else quote(f"{path}={value}"))


_OFF = {
    "training.precision": "set training.precision to auto, fp32, bf16 or fp16",
    "data.mask_unit": "write data.mask_unit=token",
}
"""Answers to a switch of another project that is off, where the setting is not a switch."""


def _answer(synonym: Synonym, text: str, sequence_length: int | None) -> str:
    if synonym.advice.endswith(ROWS_TO_TOKENS) and "," not in synonym.setting and sequence_length and text.isdecimal():
        tokens = int(text) * sequence_length
        return f"write {synonym.setting}={tokens} ({text} rows x data.sequence_length={sequence_length} tokens)"
    if synonym.advice.startswith("write ") and text.lower() in ("false", "no", "off", "0"):
        return _OFF.get(synonym.setting) or f"write {synonym.setting}=false"
    if synonym.advice:
        return synonym.advice.format(value=text)
    unit = f" ({synonym.unit})" if synonym.unit else ""
    return f"write {synonym.setting}{' ' if synonym.setting.startswith('--') else '='}{text}{unit}"


def _of_stage(setting: str, prefix: str) -> str:
    """Return the setting of a stage that replaces one of the run; the same one if a stage has none."""
    return prefix + _IN_STAGE[setting] if setting in _IN_STAGE else setting
