"""The configuration of a training run: its schema and loading, and the check of its output directory.

The schema is the source of truth for DeepSpeed too (`trainer/engine/deepspeed_config.py` derives its dict from it).
Nothing is changed silently: a contradiction is an error with setting, value, rule and fix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import load_settings
from data_prep.base.settings import PathText, Settings
from data_prep.base.urls import redact
from data_prep.storage import storage
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import SENTENCE_PAIRS, Objectives, objectives_of, sentence_pairs_of, union
from trainer.config.registry_settings import RegistrySettings
from trainer.config.run_rules import check_run
from trainer.config.run_settings import (
    CheckpointSettings,
    EvaluationSettings,
    HealthSettings,
    LoggingSettings,
    TrackingSettings,
)
from trainer.config.schedule import tokens_of_stage
from trainer.config.stages import Stage, data_sets_of, epochs_of, resolve_stages, with_steps
from trainer.config.training_settings import (
    BranchSettings,
    DistributedSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainingSettings,
    ZeroSettings,
)

Adoptable = Literal["tokenizer", "size", "rope", "positions"]


class RunConfig(Settings):
    """A training run."""

    output_dir: PathText = Field(
        min_length=1, description="output directory (local or shared) for checkpoints, status and logs; rerun to resume"
    )
    init_from: PathText | None = Field(
        None,
        min_length=1,
        description="initial weights: a Hugging Face directory of the model's family, a Hub name, or "
        "models:/NAME@ALIAS; a resumed run uses its checkpoint",
    )
    adopt: tuple[Adoptable, ...] = Field(
        (),
        description="what may differ between init_from and the run: a list of tokenizer (rows of shared tokens are "
        "copied, others are means), size (layers are repeated, widths tiled), rope (another base), positions "
        "(learned ones are repeated)",
    )
    teacher: PathText | None = Field(
        None,
        min_length=1,
        description="trained model for the objectives distillation and hidden_states: a Hugging Face directory of a "
        "published family with the same tokenizer, a Hub name, or models:/NAME@ALIAS",
    )
    model: ModelSettings = ModelSettings()
    objectives: Objectives | None = Field(
        None,
        description="what the model is trained to predict: a list of {name, weight, task, settings}, masked_lm, "
        "sentence_pairs, causal (alone in its stage), distillation and hidden_states (with teacher, beside masked_lm) "
        "or module:Class of your own; by default masked_lm, and what data.sentence_pairs names",
    )
    data: DataSettings
    training: TrainingSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    branch: BranchSettings | None = None
    zero: ZeroSettings = ZeroSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tracking: TrackingSettings = TrackingSettings()
    registry: RegistrySettings = RegistrySettings()
    logging: LoggingSettings = LoggingSettings()
    health: HealthSettings = HealthSettings()
    distributed: DistributedSettings = DistributedSettings()
    storage_options: dict[str, dict[str, Any]] = Field(
        {}, description="options of remote storage by URL prefix, such as {'s3://shards': {profile: research}}"
    )
    deepspeed: dict[str, Any] | None = Field(
        None, description="DeepSpeed settings, merged over those that follow from this configuration"
    )

    @classmethod
    def explain_unknown(cls, name: str, value: object, values: Mapping[str, Any]) -> str | None:
        """Explain names of stages, and names from Hugging Face and Megatron (`synonyms.py`)."""
        from trainer.config.synonyms import explain_stage, explain_synonym

        training = values.get("training")
        stages = training.get("stages") if isinstance(training, Mapping) else None
        names = [str(each.get("name")) for each in stages or () if isinstance(each, Mapping)]
        return explain_stage(name, value, names) or explain_synonym(name, value, _sequence_length(values, name))

    @field_validator("adopt", mode="before")
    @classmethod
    def _read_mapping(cls, value: Any) -> Any:
        """Read `{tokenizer, size}`, which in YAML is a mapping of names to nothing, as the list of its names."""
        if isinstance(value, Mapping) and all(each is None or each is True for each in value.values()):
            return list(value)
        return value

    @model_validator(mode="after")
    def _check_between_settings(self) -> RunConfig:
        check_run(self)
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_sentence_pairs(cls, values: Any) -> Any:
        """Set `data.sentence_pairs` as `objectives` say, where it is not set."""
        if not isinstance(values, Mapping) or not isinstance(data := values.get("data"), Mapping):
            return values
        items = values.get("objectives") or ()
        pairs = [each for each in items if isinstance(each, Mapping) and each.get("name") == SENTENCE_PAIRS]
        if not pairs or "sentence_pairs" in data:
            return values
        return {**values, "data": {**data, "sentence_pairs": pairs[0].get("task") or "next_sentence"}}

    @property
    def run_objectives(self) -> Objectives:
        """Objectives of every stage that names no others."""
        return self.objectives or objectives_of(self.data.sentence_pairs)

    @cached_property
    def all_objectives(self) -> Objectives:
        """Objectives that the model has heads for: those of all stages, in a branch too."""
        return union(
            [stage.objectives or self.run_objectives for stage in self.training.stages] or [self.run_objectives]
        )

    @property
    def has_pair_head(self) -> bool:
        """Whether the model judges sentence pairs."""
        return sentence_pairs_of(self.all_objectives) != "none"

    @property
    def has_own_objectives(self) -> bool:
        """Whether a class of the user's is among the objectives."""
        return any(each.is_own for each in self.all_objectives)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the run, resolved; one without `training.stages`, and that of `branch` alone in a branch.

        Raises:
            UsageError: a length is set in epochs, and the data are not open yet to count them.
        """
        for length in epochs_of(self.training).values():
            raise UsageError(
                f"{length.setting} has no number of steps before the data are opened",
                fix="set it in steps or tokens",
                code="epochs-not-counted",
            )
        return resolve_stages(self)

    @cached_property
    def data_sets(self) -> tuple[str, ...]:
        """URLs of all data sets that the stages read, each once."""
        return data_sets_of(with_steps(self, dict.fromkeys(epochs_of(self.training), 1)).stages)

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a step, counted from 1; the first stage for step 0."""
        return next((stage for stage in self.stages if step <= stage.last_step), self.stages[-1])

    @property
    def longest_sequence(self) -> int:
        """Longest sequence length of the run in tokens; the model is not trained on positions beyond."""
        return max(stage.sequence_length for stage in self.stages if stage.taken_steps)

    def tokens_after(self, step: int = 0) -> int:
        """Return the tokens of the run after `step` completed steps."""
        return sum(
            tokens_of_stage(stage, min(max(step - stage.first_step, 0), stage.taken_steps), stage.taken_steps)
            for stage in self.stages
        )

    @property
    def first_step(self) -> int:
        """Number of completed steps where the run begins; not 0 in a branch."""
        return self.stages[0].first_step

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run, with those before a branch."""
        return self.stages[0].run_steps


def _sequence_length(values: Mapping[str, Any], name: str) -> int | None:
    """Return the sequence length that applies to the setting `name` in a configuration that is not validated.

    It may be set under a name of another project. The result is None if it is unclear, as with two lengths.
    """
    training = values.get("training")
    stages = training.get("stages") if isinstance(training, Mapping) else None
    if stages:
        parts = name.split(".")
        number = int(parts[2]) if parts[:2] == ["training", "stages"] and parts[2].isdecimal() else None
        if number is None or not isinstance(stages, list) or not isinstance(stages[number], Mapping):
            return None
        if own := _lengths(stages[number]):
            return own.pop() if len(own) == 1 else None
    sections = (values, *(values[each] for each in ("data", "training", "model") if each in values))
    lengths = set().union(*(_lengths(each) for each in sections if isinstance(each, Mapping)))
    length = lengths.pop() if lengths else DataSettings.model_fields["sequence_length"].default
    return length if type(length) is int and not lengths else None


def _lengths(section: Mapping[str, Any]) -> set[Any]:
    """Return the sequence lengths that a section sets, under any name."""
    from trainer.config.synonyms import length_names

    return {value for name, value in section.items() if str(name) in length_names() and isinstance(value, int | str)}


def without_secrets(config: RunConfig) -> RunConfig:
    """Return the configuration for files and logs: URLs without user, password and query, other secrets hidden."""
    values = _redacted(config.model_dump(mode="json"))
    values["storage_options"] = storage.redacted_options(config.storage_options)
    if config.deepspeed is not None:
        values["deepspeed"] = storage.redacted_settings(config.deepspeed)
    return RunConfig.model_validate(values)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return storage.redact(value) if isinstance(value, str) else value


def without_registry(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint without `registry`, which no weight depends on."""
    return {name: value for name, value in values.items() if name != "registry"}


Overrides = Sequence[str] | Mapping[str, object]


def load_config(path: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Read the configuration of a run from a YAML file, or the preset of that name.

    Args:
        overrides: settings that replace the file's: `["training.max_steps=100"]` or `{"training.max_steps": 100}`.

    Raises:
        UsageError: the file is missing, or a setting is unknown or violates a rule.
    """
    return load_settings(RunConfig, path, overrides)


def resolve_config(config: RunConfig | str | Path, overrides: Overrides = ()) -> RunConfig:
    """Return a loaded configuration, or load it; overrides need a file.

    Raises:
        UsageError: as `load_config`, or overrides are given with a loaded configuration.
    """
    if not isinstance(config, RunConfig):
        return load_config(config, overrides)
    if overrides:
        raise UsageError(
            "overrides are given with a loaded configuration",
            fix="give them to load_config, or pass the path of the file",
            code="overrides-of-loaded-config",
        )
    return config


def check_output_dir(output_dir: str, upload_to: str | None = None) -> None:
    """Check that the output directory is a local path that can be created, and the name of `checkpoint.upload_to`.

    The schema accepts a URL, because checkpoints of earlier releases may have one.

    Raises:
        UsageError: it is a URL, or a file or a dangling link is in its path; or `upload_to` cannot be written.
    """
    if upload_to is not None:
        storage.check_folder("checkpoint.upload_to", upload_to)
    fix = "set a path, and checkpoint.upload_to to the URL to upload checkpoints there"
    if "://" in output_dir:
        raise UsageError(f"output_dir={redact(output_dir)} is a URL", fix=fix, code="output-dir-is-url")
    path = Path(output_dir)
    link = next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)
    if link is not None:
        raise UsageError(
            f"output_dir={output_dir} contains {link}, a dangling link to {os.readlink(link)}",
            fix="create that directory, or choose another output_dir",
            code="output-dir-dangling-link",
        )
    file = next((each for each in (path, *path.parents) if each.is_file()), None)
    if file is not None:
        obstacle = "is a file" if file == path else f"is inside {file}, which is a file"
        raise UsageError(f"output_dir={output_dir} {obstacle}", fix="choose a directory", code="output-dir-is-file")
