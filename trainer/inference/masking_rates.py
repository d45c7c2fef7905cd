"""The masking rates that a model was trained at, and whether it can generate text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import validate_settings
from data_prep.base.yaml_values import read_yaml
from trainer.checkpoint.format import STATE_NAME, CheckpointFolder
from trainer.config.run_config import RunConfig, without_registry
from trainer.config.stages import rates_of
from trainer.inference.next_sentence import CONFIG_FILE
from trainer.model.model_folder import read_provenance

HIGH_RATE, LOW_RATE = 0.5, 0.3
"""A model generates if its masking rates reach from at most the lower to at least the higher one."""
_ROUNDING = 1e-9
_FORCED = "--any-rate (in Python any_rate=True) generates with any model, and the text may be poor"


class MaskingRates(NamedTuple):
    """The lowest and the highest masking rate of a training run."""

    lowest: float
    highest: float


def check_rates(found: MaskingRates | str) -> MaskingRates:
    """Return the masking rates if they are wide enough to generate text; a string says why they are unknown.

    Raises:
        UsageError: they are unknown, a single one, or too narrow.
    """
    if isinstance(found, str):
        raise UsageError(
            f"the masking rates that the model was trained at are unknown: {found}; the text of a model that was "
            "trained at one rate is poor",
            fix=f"give a run or an export of this project; {_FORCED}",
            code="unknown-masking-rates",
        )
    if found.lowest <= LOW_RATE + _ROUNDING and found.highest >= HIGH_RATE - _ROUNDING:
        return found
    rates = f"rates from {found.lowest:.4g} to {found.highest:.4g}" if found.lowest < found.highest else ""
    raise UsageError(
        f"the model was trained at {rates or f'one masking rate, {found.highest:.4g}'}; generation begins with nearly "
        f"all tokens masked and ends with few, which takes rates from at most {LOW_RATE} to at least {HIGH_RATE}",
        fix=f"train with data.masking_law.name=uniform data.mlm_probability=0.4; {_FORCED}",
        code="narrow-masking-rates" if rates else "one-masking-rate",
    )


def rates_of_checkpoint(folder: Path) -> MaskingRates | str:
    """Return the masking rates that a checkpoint has been trained at, or the reason why they are unknown.

    Raises:
        UserError: it is damaged, or no checkpoint.
    """
    saved = CheckpointFolder(folder).read_state()
    config = validate_settings(RunConfig, without_registry(saved.config), str(folder / STATE_NAME))
    return rates_until(config, saved.state.step)


def rates_of_export(folder: Path) -> MaskingRates | str:
    """Return the masking rates that an export has been trained at, or the reason why they are unknown.

    Raises:
        UserError: its configuration or its provenance is damaged.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return f"it has no {CONFIG_FILE}, which an export has"
    config = validate_settings(RunConfig, without_registry(read_yaml(path)), str(path))
    return rates_until(config, read_provenance(folder).get("step"))


def rates_until(config: RunConfig, step: int | None) -> MaskingRates | str:
    """Return the masking rates of the stages that have begun after `step` steps, or why they are unknown."""
    begun = [each for each in config.stages if step is None or step > each.first_step]
    masking = next((each.data.masking for each in begun if each.data.masking is not None and not each.is_causal), None)
    if masking is not None:
        return f"its masks came from {masking}"
    rates = rates_of(config, step)
    return MaskingRates(*rates) if rates is not None else "no stage has trained on masks"
