"""The stages of a run with every setting resolved: an item of `training.stages` inherits what it does not set."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from data_prep.base.setting_errors import within_item
from data_prep.base.settings import SettingError
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings, WeightedShards
from trainer.config.duration import Duration
from trainer.config.masking_law import MaskingLaw
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import (
    MASKED_LM,
    OF_TOKENS,
    Objectives,
    check_objectives,
    is_causal,
    sentence_pairs_of,
)
from trainer.config.run_settings import EvaluationSettings
from trainer.config.schedule import (
    learning_rate,
    masking_rate,
    steps_for_tokens,
    tokens_of_stage,
    with_ramp_steps,
    with_schedule_steps,
)
from trainer.config.training_settings import ScheduleSettings, StageSettings, TrainingSettings

if TYPE_CHECKING:
    from trainer.config.run_config import RunConfig

T = TypeVar("T")
OF_MASKING = ("mlm_probability", "masking_law", "loss_weight", "mask_unit", "masking")
"""Settings of `data` that a stage has beside it, final_mlm_probability excepted."""
ROPE_BASES = ("global_rope_theta", "local_rope_theta")


@dataclass(frozen=True)
class Clock:
    """Steps over which a schedule runs: those of the run, or of one stage."""

    first_step: int
    """Completed steps of the run where it begins."""
    steps: int

    def elapsed(self, step: int) -> int:
        """Return the completed steps of the schedule after `step` of the run; at the end, those before the last."""
        return min(max(step - self.first_step, 0), self.steps - 1)


@dataclass(frozen=True, kw_only=True)
class Stage(StageShape):
    """One stage of a run; every part of the project reads it instead of the settings that it follows from."""

    number: int
    """Index among the stages of the run."""
    name: str | None
    prefix: str | None
    """Prefix of the stage's settings, such as `training.stages.1.`; None for a run without that list."""
    first_step: int
    """Completed steps of the run where it begins."""
    taken_steps: int
    """Steps of it that the run takes; `training.duration` may end the run earlier."""
    run_steps: int
    """Steps of the whole run, with those before a branch."""
    data: DataSettings
    """Data and masking of the stage."""
    objectives: Objectives
    """Objectives that the stage trains."""
    objectives_of_run: Objectives
    """Objectives that the model has heads for and every evaluation measures."""
    data_sets: tuple[int, ...]
    """Data sets of the stage: indices into `RunConfig.data_sets`, in the order of `data.components`."""
    evaluation_data: DataSettings
    """Data of valid/own_mlm_loss, with the masking of the last stage that has one, so that all values compare."""
    measures_rates: bool
    """Whether evaluations measure the loss at several masking rates and the bound; the same in all stages."""
    evaluation: EvaluationSettings
    model: ModelSettings
    """The model with the RoPE bases of this stage."""
    peak_learning_rate: float
    weight_decay: float
    schedule: ScheduleSettings
    """Schedule with warmup and decay in steps of `rate_clock`."""
    has_own_schedule: bool
    rate_clock: Clock
    """Clock of the stage if it has a schedule of its own, else that of the run."""
    masking_clock: Clock
    gradient_clipping: float

    @property
    def predicted_share(self) -> float:
        """Share of the positions of a row whose hidden states the head over the vocabulary gets."""
        return self.room_for_labels if any(each.name in OF_TOKENS for each in self.objectives) else 0.0

    @property
    def room_for_labels(self) -> float:
        """Share of the positions of a row that have room for a label, whether or not the stage trains on labels."""
        if self.is_causal or not self.data.has_capacity_of_law:
            return 1.0 if self.is_causal else self.data.max_mlm_probability
        return self.room_in(self.micro_batch_tokens) / self.micro_batch_tokens

    def room_in(self, micro_batch_tokens: int) -> int:
        """Return how many labels a micro-batch of that many positions has room for."""
        rows = micro_batch_tokens // self.sequence_length
        return rows * self.sequence_length if self.is_causal else self.data.room_for_labels(rows, self.sequence_length)

    @property
    def label(self) -> str:
        """The stage in messages: `stage 1 (decay)`."""
        return f"stage {self.number}" + (f" ({self.name})" if self.name else "")

    @property
    def last_step(self) -> int:
        """Completed steps of the run where the stage ends."""
        return self.first_step + self.steps

    @property
    def tokens(self) -> int:
        """Tokens of the steps that the run takes."""
        return tokens_of_stage(self, 0, self.taken_steps)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after `step` completed ones of the run."""
        clock = self.rate_clock
        return learning_rate(clock.elapsed(step), clock.steps, self.peak_learning_rate, self.schedule)

    def masking_rate(self, step: int) -> float:
        """Return the masking rate of the step after `step` completed ones of the run."""
        return masking_rate(self.masking_clock.elapsed(step), self.masking_clock.steps, self.data)

    def select(self, of_run: Sequence[T]) -> list[T]:
        """Return the entries of its data sets, given one for every data set of the run."""
        return [of_run[number] for number in self.data_sets]

    def continues(self, earlier: Stage) -> bool:
        """Return whether this stage has the samples of `earlier`, and so continues where that stage ended."""
        return _samples_of(self) == _samples_of(earlier)


def _samples_of(stage: Stage) -> tuple[Any, ...]:
    """Return what determines the order of a stage's samples, besides the seed."""
    data = stage.data
    return (
        stage.sequence_length,
        [(component.url, component.weight) for component in data.components],
        data.sampling_alpha,
        data.sentence_pairs,
        data.short_seq_probability,
    )


def resolve_stages(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a run; one without `training.stages`.

    Raises:
        SettingError: a required setting is missing, or a stage contradicts itself or the run.
    """
    training = config.training
    if not training.stages and training.duration is None:
        raise SettingError(
            "training.duration is required and not set",
            fix='set training.duration, such as "1000 steps" or "5e9 tokens"',
            code="missing-setting",
        )
    settings = training.stages or (StageSettings(duration=training.duration),)
    shapes = [_shape(config, item, number) for number, item in enumerate(settings)]
    history: list[StageShape] = []
    numbers = [*range(len(settings))]
    if config.branch is not None:
        number = _branch_number(config, settings)
        history = _cut(shapes, config.branch.step)
        settings, shapes, numbers = (settings[number],), [shapes[number]], [number]
    begin = sum(shape.steps for shape in history)
    planned = [*history, *shapes]
    max_steps = begin + sum(shape.steps for shape in shapes)
    if training.stages and training.duration is not None:
        max_steps = training.duration.in_steps(max_steps, lambda tokens: steps_for_tokens(tokens, planned))
    run_clock = Clock(0, max_steps)
    run_schedule = with_schedule_steps(config.schedule, _cut(planned, max_steps), planned)
    stages, first_step = [], begin
    for number, (item, shape) in enumerate(zip(settings, shapes, strict=True)):
        own_clock = Clock(first_step, shape.steps)
        stage_name = f"training.stages.{numbers[number]}" + (f" ({item.name})" if item.name else "")
        objectives = _objectives(config, item)
        if item.objectives is not None:
            check_objectives(item.objectives, f"{stage_name}.objectives")
        changed = _masks(config.data, item, shape, stage_name)
        changed |= {"sequence_length": shape.sequence_length, "sentence_pairs": sentence_pairs_of(objectives)}
        stages.append(
            Stage(
                **{field.name: getattr(shape, field.name) for field in fields(StageShape)},
                number=number,
                name=item.name,
                prefix=f"training.stages.{numbers[number]}." if config.training.stages else None,
                first_step=first_step,
                taken_steps=min(max(max_steps - first_step, 0), shape.steps),
                run_steps=max_steps,
                data=_data(config.data, item, changed, stage_name),
                objectives=objectives,
                objectives_of_run=config.all_objectives,
                data_sets=(),
                evaluation_data=config.data,
                measures_rates=False,
                evaluation=_evaluation(config.evaluation, item, stage_name),
                model=_model(config.model, item, stage_name),
                peak_learning_rate=item.learning_rate or config.optimizer.learning_rate,
                weight_decay=config.optimizer.weight_decay if item.weight_decay is None else item.weight_decay,
                schedule=run_schedule if item.schedule is None else with_schedule_steps(item.schedule, [shape]),
                has_own_schedule=item.schedule is not None,
                rate_clock=run_clock if item.schedule is None else own_clock,
                masking_clock=own_clock if item.has_own_rate else run_clock,
                gradient_clipping=config.training.gradient_clipping
                if item.gradient_clipping is None
                else item.gradient_clipping,
            )
        )
        first_step += shape.steps
    members = iter(_data_sets([stage.data.components for stage in stages])[0])
    last = next((stage.data for stage in reversed(stages) if not stage.is_causal), stages[-1].data)
    rates, has_head = config.evaluation.masking_rates, any(each.name == MASKED_LM for each in config.all_objectives)
    draws = any(stage.data.law.is_drawn and not stage.is_causal for stage in stages)
    measures_rates = has_head and (draws if rates == "auto" else rates)
    return tuple(
        replace(stage, data_sets=next(members), evaluation_data=last, measures_rates=measures_rates) for stage in stages
    )


def _masks(data: DataSettings, item: StageSettings, shape: StageShape, stage_name: str) -> dict[str, Any]:
    """Return the settings of `data` with which a stage masks, as far as it has its own."""
    masks: dict[str, Any] = {name: getattr(item, name) for name in OF_MASKING if getattr(item, name)}
    if masks and shape.is_causal:
        name, value = next((name, getattr(value, "name", value)) for name, value in masks.items())
        raise SettingError(
            f"{stage_name}: {name}={value} has no effect: the stage trains causal, whose rows are not masked",
            fix=f"remove {name} from the stage",
            code="setting-without-effect",
        )
    if item.has_own_rate:
        masks |= {name: getattr(item, name) for name in ("masking_law", "final_mlm_probability")}
    if item.mlm_probability is None and item.masking_law is not None:
        masks["mlm_probability"] = _mean_of(item.masking_law, data, stage_name)
    return masks


def rates_of(config: RunConfig, step: int | None = None) -> tuple[float, float] | None:
    """Return the lowest and the highest masking rate of any row that a run trains on; None if no stage masks tokens.

    With `step` only the stages count that have begun after so many steps. A custom masking gets these rates, whatever
    it makes of them.
    """
    laws = [
        stage.data.law
        for stage in config.stages
        if stage.taken_steps and (step is None or step > stage.first_step)
        if any(each.name == MASKED_LM for each in stage.objectives)
    ]
    supports = [law.support for law in laws]
    return (min(low for low, _ in supports), max(high for _, high in supports)) if supports else None


def epochs_of(training: TrainingSettings) -> dict[int, Duration]:
    """Return the lengths in epochs, with the whole names of their settings, by the number of the stage.

    The only stage of a run without `training.stages` has the number 0.
    """
    lengths: list[tuple[str, Duration | None]] = [("training.", training.duration)]
    if training.stages:
        lengths = [(f"training.stages.{number}.", item.duration) for number, item in enumerate(training.stages)]
    return {
        number: replace(length, setting=f"{section}{length.setting}")
        for number, (section, length) in enumerate(lengths)
        if length is not None and length.unit == "epochs"
    }


def with_steps(config: RunConfig, steps: Mapping[int, int]) -> RunConfig:
    """Return the unchecked configuration with steps in place of epochs; `steps` are by number of the stage."""
    training = config.training
    if not steps:
        return config
    if training.stages:
        items = [
            item.model_copy(update={"duration": replace(item.duration, number=steps[number], unit="steps")})
            if number in steps
            else item
            for number, item in enumerate(training.stages)
        ]
        changed = training.model_copy(update={"stages": tuple(items)})
    else:
        assert training.duration is not None, "it is in epochs"
        changed = training.model_copy(update={"duration": replace(training.duration, number=steps[0], unit="steps")})
    return config.model_copy(update={"training": changed})


def data_sets_of(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the URLs of all data sets of a run, in the order in which its stages first use them."""
    return _data_sets([stage.data.components for stage in stages])[1]


def _data_sets(
    components: Sequence[Sequence[WeightedShards]],
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Return each stage's indices into the run's data sets, and their URLs; a mixture may name one URL twice."""
    urls: list[str] = []
    members = []
    for mixture in components:
        numbers: list[int] = []
        for component in mixture:
            free = [n for n, url in enumerate(urls) if url == component.url and n not in numbers]
            if not free:
                urls.append(component.url)
                free = [len(urls) - 1]
            numbers.append(free[0])
        members.append(tuple(numbers))
    return members, tuple(urls)


def _shape(config: RunConfig, item: StageSettings, number: int) -> StageShape:
    training = config.training
    sizes: dict[str, int] = {}
    for name in ("micro_batch_tokens", "global_batch_tokens"):
        value = getattr(item, name) or getattr(training, name)
        if value is None:
            in_stage = f"training.stages.{number}.{name} is not set, nor is " if training.stages else ""
            raise SettingError(
                f"{in_stage}training.{name}" + ("" if in_stage else " is required and not set"),
                fix=f"set training.{name}" + (f", or {name} in the stage" if in_stage else ""),
                code="missing-setting",
            )
        sizes[name] = value
    warmup = item.batch_warmup or (training.batch_warmup if number == 0 else None)
    shape = StageShape(
        steps=1,
        sequence_length=item.sequence_length or config.data.sequence_length,
        batch_warmup=warmup and with_ramp_steps(warmup, sizes["global_batch_tokens"]),
        is_causal=is_causal(_objectives(config, item)),
        **sizes,
    )
    of_tokens = lambda tokens: steps_for_tokens(tokens, [replace(shape, steps=tokens)])  # noqa: E731
    return replace(shape, steps=item.duration.in_steps(1, of_tokens))


def _objectives(config: RunConfig, item: StageSettings) -> Objectives:
    return item.objectives or config.run_objectives


def _cut(shapes: Sequence[StageShape], steps: int) -> list[StageShape]:
    """Return the stages of the first `steps` steps; the last stage is lengthened where they are fewer."""
    stages, left = [], steps
    for shape in shapes:
        if left > 0:
            stages.append(replace(shape, steps=min(shape.steps, left)))
            left -= stages[-1].steps
    return [*stages[:-1], replace(stages[-1], steps=stages[-1].steps + left)]


def _branch_number(config: RunConfig, settings: Sequence[StageSettings]) -> int:
    assert config.branch is not None
    names = [item.name for item in settings]
    if config.branch.stage not in names:
        known = ", ".join(name for name in names if name) or "none has a name"
        raise SettingError(
            f"branch.stage={config.branch.stage} is not a stage of training.stages (names: {known})",
            fix="name one of them, or add the stage",
            code="unknown-stage",
        )
    return names.index(config.branch.stage)


def _data(data: DataSettings, item: StageSettings, changes: dict[str, Any], stage_name: str) -> DataSettings:
    if item.data is not None:
        changes |= dict(item.data)
    with _named(stage_name, "data"):
        return DataSettings.model_validate({**dict(data), **changes})


def _mean_of(law: MaskingLaw, data: DataSettings, stage_name: str) -> float:
    """Return the mean rate of a stage that sets a law alone: of its ends, else that of the run."""
    if law.mean is not None:
        return law.mean
    if data.final_mlm_probability is not None:
        raise SettingError(
            f"{stage_name}: masking_law={law.name} has no mean: data.mlm_probability={data.mlm_probability:g} is only "
            "the rate at the first step",
            fix="set mlm_probability in the stage, or from and to of its masking_law",
            code="masking-law-without-mean",
        )
    return data.mlm_probability


def _evaluation(evaluation: EvaluationSettings, item: StageSettings, stage_name: str) -> EvaluationSettings:
    changes = item.evaluation.model_dump(exclude_none=True) if item.evaluation is not None else {}
    with _named(stage_name, "evaluation"):
        return EvaluationSettings.model_validate({**dict(evaluation), **changes})


@contextlib.contextmanager
def _named(stage_name: str, section: str) -> Iterator[None]:
    """Name the stage in the error of settings that contradict each other; single values were validated before."""
    try:
        yield
    except ValidationError as error:
        setting_error: SettingError = error.errors()[0]["ctx"]["error"]
        item = stage_name.partition(" ")[0]
        # A stage sets a part of `data` itself; mask_share and others are those of the run.
        fix = re.sub(
            rf"(?<![\w.])data\.(?=({'|'.join(OF_MASKING)}|final_mlm_probability)\b)", f"{item}.", setting_error.fix
        )
        is_of_run = section == "data" and re.search(r"(?<![\w.])data\.(mask_share|random_share)", fix)
        fix = fix if is_of_run else within_item(fix, item, section)
        raise SettingError(f"{stage_name}: {setting_error}", fix=fix, code=setting_error.code) from None


def _model(model: ModelSettings, item: StageSettings, stage_name: str) -> ModelSettings:
    bases = {name: getattr(item, name) for name in ROPE_BASES}
    changes = {name: value for name, value in bases.items() if value is not None}
    for name, value in changes.items():
        if model.position_embedding != "rotary":
            why = f"model.position_embedding={model.position_embedding}"
        elif name == "local_rope_theta" and "local" not in model.attention_kinds:
            why = "no layer is local"
        else:
            continue
        raise SettingError(
            f"{stage_name}: {name}={value:g} has no effect: {why}",
            fix=f"remove {name} from the stage",
            code="setting-without-effect",
        )
    return model.model_copy(update=changes)
