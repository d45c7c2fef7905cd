"""Objectives by name: those of this project, and classes of users as `module:Class`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from data_prep.base.errors import UsageError
from trainer.config.custom_code import OBJECTIVE
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import (
    CAUSAL,
    DISTILLATION,
    MASKED_LM,
    OF_TEACHER,
    SENTENCE_PAIRS,
    Objectives,
    ObjectiveSettings,
)
from trainer.config.run_settings import BEST_METRICS, CheckpointSettings
from trainer.data.batch import Batch
from trainer.objectives.masked_lm import CausalLM, MaskedLM
from trainer.objectives.objective import Objective, Scores

_RESERVED = (
    *("own", "word", "minimal", "length", "source", "component", "mlm", "pair", "causal", "learning", "grad"),
    *("unreadable", "bound"),
)
"""First words of other metrics of training and evaluation."""


def class_of(name: str) -> type[Objective]:
    """Return the class of an objective, which has a metric and values that names of metrics can be made of.

    Raises:
        UserError: it cannot be imported, is not such a class, or its file changed after it was imported.
    """
    if name in (MASKED_LM, CAUSAL):
        return MaskedLM if name == MASKED_LM else CausalLM
    if name == SENTENCE_PAIRS:
        from trainer.objectives.sentence_pairs import SentencePairs

        return SentencePairs
    if name in OF_TEACHER:
        from trainer.objectives.distillation import Distillation, HiddenStates

        return Distillation if name == DISTILLATION else HiddenStates
    found = OBJECTIVE.find(name)
    if not (inspect.isclass(found) and issubclass(found, Objective)):
        raise OBJECTIVE.wrong(name, "is not a subclass of Objective", fix=f"name {OBJECTIVE.form}")
    for method in ("num_predictions", "scores"):
        if getattr(found, method) is getattr(Objective, method):
            raise OBJECTIVE.wrong(name, f"has no method {method}", fix="write it; trainer/README.md has an example")
    names = (found.metric, *found.values)
    wrong = next((each for each in names if not re.fullmatch(r"[a-z][a-z0-9_]*", each)), None)
    if wrong is not None or found.metric.partition("_")[0] in _RESERVED:
        raise OBJECTIVE.wrong(
            name,
            f"has metric={found.metric!r} and values={found.values!r}",
            fix=f"give it lower-case names such as metric = 'rtd', which do not begin with {', '.join(_RESERVED)}",
        )
    training_values = {*(found.training_values or found.values)}
    if [*found.values][:1] != ["loss"] or not {"loss"} <= training_values <= {*found.values}:
        raise OBJECTIVE.wrong(
            name,
            f"has values={found.values!r} and training_values={found.training_values!r}",
            fix='begin `values` with "loss", and choose "loss" and others among them as `training_values`',
        )
    return found


def check_best_metric(settings: CheckpointSettings, objectives: Objectives) -> None:
    """Check that a metric of a user's objective, by which checkpoints are kept, is measured.

    Raises:
        UsageError: no objective has it.
    """
    if not settings.best_metric.startswith("valid/") or settings.best_metric in BEST_METRICS:
        return
    own = [class_of(each.name) for each in objectives if each.is_own]
    names = [f"valid/{each.metric}_{value}" for each in own for value in each.values]
    if settings.best_metric not in names:
        raise UsageError(
            f"checkpoint.best_metric={settings.best_metric} is measured by no objective of the run",
            fix=f"set one of {', '.join([*BEST_METRICS, *names])}, or suite/NAME/TASK",
            code="best-metric-not-measured",
        )


def build_objectives(settings: Objectives, config: ModelSettings) -> dict[str, Objective]:
    """Return the objectives by name, with heads for the model; those that predict tokens have one head.

    Raises:
        UsageError: one of the user's cannot be built, or two have the same metric.
    """
    built = {each.name: _build(each, config) for each in settings}
    for name in (CAUSAL, DISTILLATION):
        if MASKED_LM in built and name in built:
            built[name].mlm_head = built[MASKED_LM].mlm_head
    owners: dict[str, str] = {}
    for name, objective in built.items():
        for metric in (f"{objective.metric}_{value}" for value in objective.values):
            other = owners.setdefault(metric, name)
            if other != name:
                raise UsageError(
                    f"the objectives {other} and {name} both have the metric {metric}",
                    fix="rename the `metric` of one class",
                    code="duplicate-metric",
                )
    return built


def _build(settings: ObjectiveSettings, config: ModelSettings) -> Objective:
    found = class_of(settings.name)
    arguments = settings.settings if settings.name != SENTENCE_PAIRS else {"task": settings.sentence_pairs}
    try:
        objective = found(config, **arguments)
    except Exception as error:
        if not settings.is_own:
            raise
        raise OBJECTIVE.failed(settings.name, error) from error
    objective.name = settings.name
    return objective


def check_scores(name: str, scores: Scores, num_predictions: int, batch: Batch) -> None:
    """Check the scores of a user's objective for a micro-batch; waits for the device.

    Raises:
        UserError: the objective counts other predictions than it scores, or one is about no position of the batch.
    """
    used = int(scores.used.sum())
    if used != num_predictions:
        raise OBJECTIVE.wrong(
            name,
            f"counts {num_predictions:,} predictions of a micro-batch and scores {used:,}: its mean would be wrong",
            fix="have num_predictions return how many entries of scores are used",
        )
    positions = scores.positions[scores.used]
    if used and not 0 <= int(positions.min()) <= int(positions.max()) < len(batch.input_ids):
        raise OBJECTIVE.wrong(
            name,
            f"scores positions {int(positions.min())} to {int(positions.max())} of {len(batch.input_ids):,}",
            fix="give indices into (T,)",
        )


def check_trained(objectives: Mapping[str, Objective]) -> None:
    """Check that all weights of objectives are trained: a checkpoint has no others.

    Raises:
        UserError: one is frozen.
    """
    for objective_name, objective in objectives.items():
        for name, parameter in objective.named_parameters():
            if not parameter.requires_grad:
                raise OBJECTIVE.wrong(
                    objective_name,
                    f"has {name}, which is not trained, so no checkpoint would have it",
                    fix="keep frozen modules out of `self`, such as in a list, and load them in `__init__`",
                )


def submodules_of(objectives: Mapping[str, Objective], taken: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of all objectives by name, one that several share once.

    Raises:
        UsageError: two different ones have one name, one has a name that is `taken`, or an objective has a weight
            beside them.
    """
    seen: dict[str, nn.Module | None] = dict.fromkeys(taken)
    for objective_name, objective in objectives.items():
        for name, _ in objective.named_parameters(recurse=False):
            raise UsageError(
                f"objective {objective_name} has the parameter {name} itself",
                fix="put it into a submodule, whose name it is stored under",
                code="weight-outside-submodules",
            )
        for name, _ in objective.named_buffers():
            raise UsageError(
                f"objective {objective_name} has the buffer {name}, which no checkpoint has",
                fix="keep a constant as a plain tensor and move it to the device in `scores`, or make it a parameter",
                code="buffer-of-objective",
            )
        for name, module in objective.named_children():
            if name in seen and seen[name] is module:
                continue
            if name in seen:
                raise UsageError(
                    f"objective {objective_name} has a submodule {name!r}, a name that the model has already",
                    fix="rename the submodule",
                    code="duplicate-submodule",
                )
            seen[name] = module
            yield name, module
