"""Whether a checkpoint may be resumed with a configuration: what changed, and whether that makes it another run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from data_prep.base.errors import UsageError, UserError
from data_prep.base.packages import installed_version
from data_prep.base.settings import flatten
from data_prep.base.urls import redact
from data_prep.base.validation import first_problem
from trainer.checkpoint.format import DataIdentity, SavedState
from trainer.config.batch_arithmetic import StageShape
from trainer.config.custom_code import OBJECTIVE, OPTIMIZER, is_custom, is_version_of_code, versions_of
from trainer.config.data_settings import DataSettings
from trainer.config.gradient_sum import BY_NODES, SUM_OVER_RANKS
from trainer.config.objective_settings import (
    DISTILLATION,
    MASKED_LM,
    OF_TEACHER,
    OF_TOKENS,
    SENTENCE_PAIRS,
    DistillationSettings,
    Objectives,
    ObjectiveSettings,
    objectives_of,
)
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.stages import OF_MASKING, ROPE_BASES, Stage

VERSION = "version of "
NUMERICS = "numerics: "
CHANGES_NUMERICS = (VERSION, NUMERICS, "training.compile", "training.deterministic")
"""Opening of a line that reports a change after which losses agree within rounding and not bitwise."""
EVALUATION = "evaluation of valid/*: "
CHANGES_SCORES = (
    EVALUATION,
    *(f"evaluation.{name} " for name in ("mlm_probability", "mask_unit", "seed", "sequence_length", "max_tokens")),
)
"""Opening of a line that reports a change after which scores of the valid split do not compare with earlier ones."""
TEACHER = "sha256 of the teacher"
PACKAGES = ("clozeworks", "torch", "deepspeed")
"""Packages on which a run's numbers depend: a resume compares their versions, the doctor compares those of hosts."""

_HARMLESS_SECTIONS = (
    *("output_dir", "checkpoint", "evaluation", "tracking", "logging", "health", "distributed", "storage_options"),
    "deepspeed",
)
_HARMLESS = (
    *("world_size", "zero.stage", "zero.offload_optimizer"),
    *("data.num_workers", "data.cache_dir", "data.cache_bytes", "data.on_corrupt_shard", "data.tokenizer"),
    *("training.activation_checkpointing", "training.deterministic", "training.compile"),
    "teacher",  # an address: its sha256 is compared
    "training.max_steps",  # a run may be lengthened or cut short; its schedule stretches to the new end from here on
)

_OF_STAGE_DATA = (*OF_MASKING, "final_mlm_probability", "sampling_alpha")
"""Settings of `data` that a stage has of its own."""
_SHAPES = (
    *("family", "vocab_size", "pad_vocab_size_to_multiple_of", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("type_vocab_size", "position_embedding", "norm", "norm_position", "embedding_norm", "hidden_act", "bias"),
    *("num_key_value_heads", "mlm_head", "tie_word_embeddings", "decoder_bias"),
)
"""Settings of the model on which the shapes of parameters depend: no checkpoint fits after a change."""


def check_compatible(
    saved: SavedState,
    config: RunConfig,
    data: DataIdentity,
    world_size: int,
    numerics: dict[str, str],
    allow_change: bool = False,
) -> list[str]:
    """Return the harmless differences (logging, ranks, ZeRO stage, micro-batch, versions), as lines.

    Where `numerics` (`trainer.model.numerics.describe_numerics`) differ, losses agree within rounding from here on.
    Data is compared by the digests of manifests, not by the path of the folder. Stages are compared by their values,
    not by how the configuration writes them.

    Raises:
        UsageError: a difference makes it another run (model, data, seed, batch, schedule ...), unless `allow_change`,
            which lists it among the others; or the optimizer is another one, whose states the checkpoint lacks; or
            one is a branch and the other is not.
    """
    # An earlier release hid less, and wrote URLs otherwise.
    before, after = (_comparable(without_secrets(each)) for each in (_saved_config(saved), config))
    before |= {f"{NUMERICS}{name}": value for name, value in saved.numerics.items()}
    after |= {f"{NUMERICS}{name}": value for name, value in numerics.items() if saved.numerics}
    for described in (before, after) if saved.world_size != world_size or world_size == 1 else ():
        how = described.pop(f"{NUMERICS}{SUM_OVER_RANKS}", None)
        if how is not None and 1 not in (saved.world_size, world_size):  # there was and is a sum
            described[f"{NUMERICS}{SUM_OVER_RANKS}"] = how.partition(BY_NODES)[0]
    before |= {f"{VERSION}{name}": value for name, value in saved.versions.items()}
    versions = current_versions() | versions_of(config)
    after |= {f"{VERSION}{name}": value for name, value in versions.items()}
    before |= {"world_size": saved.world_size, "data.manifest_digests": list(saved.data.manifest_digests)}
    after |= {"world_size": world_size, "data.manifest_digests": list(data.manifest_digests)}
    before["tokenizer_fingerprint"] = saved.data.tokenizer_fingerprint
    after["tokenizer_fingerprint"] = data.tokenizer_fingerprint
    before[TEACHER], after[TEACHER] = saved.data.teacher, data.teacher
    if before["optimizer.name"] != after["optimizer.name"]:
        raise UsageError(
            f"the checkpoint of step {saved.state.step} has the optimizer states of "
            f"optimizer.name={before['optimizer.name']}, and this run has optimizer.name={after['optimizer.name']}",
            fix="set it back, or start a new run in another output_dir (init_from takes an export of this one)",
            code="another-optimizer",
        )
    _check_same_branch(_saved_config(saved), config)
    changes_shapes = (
        _heads(_saved_config(saved)) != _heads(config)
        or any(before[f"model.{name}"] != after[f"model.{name}"] for name in _SHAPES)
        or (
            config.model.position_embedding == "learned"
            and before["model.max_position_embeddings"] != after["model.max_position_embeddings"]
        )
    )
    harmless: list[str] = []
    dangerous: list[str] = []
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            line = f"{name} was {before.get(name)!r} and is {after.get(name)!r}"
            (harmless if _is_harmless(name) else dangerous).append(line)
    if "mlm_probability" not in saved.config.get("evaluation", {}):  # of an earlier release
        harmless.append(
            f"{EVALUATION}measured with the rows and masks of training before, and with those of `evaluation` now"
        )
    if dangerous and not allow_change:
        raise UsageError(
            f"cannot resume from the checkpoint of step {saved.state.step}: {'; '.join(dangerous)}",
            fix="set these back, or give another output_dir for a new run"
            + ("" if changes_shapes else ", or add --allow-change to resume with the change"),
            code="incompatible-change",
        )
    return harmless + dangerous


def _check_same_branch(before: RunConfig, config: RunConfig) -> None:
    branch = before.branch
    if (branch is None) == (config.branch is None):
        return
    if branch is None:
        problem, fix = (
            "holds a run that did not begin as a branch, but --branch-from is given",
            "give another output_dir",
        )
    else:
        source = f"{redact(branch.run)}:{branch.step}"
        problem = f"has a branch (stage {branch.stage} from {source}), and --branch-from is not given"
        fix = f"add --branch-from {source} --stage {branch.stage}, or give another output_dir"
    raise UsageError(f"output_dir={redact(config.output_dir)} {problem}", fix=fix, code="another-branch")


def check_branch(saved: SavedState, config: RunConfig, data: DataIdentity) -> None:
    """Check that a run may branch from the checkpoint of another one.

    Raises:
        UsageError: the model, the tokenizer, the optimizer (its source too) or the seed differs.
    """
    before = RunConfig.model_validate(without_registry(saved.config))
    optimizer = config.optimizer.name
    pairs = {
        "data.sentence_pairs": (before.data.sentence_pairs, config.data.sentence_pairs),
        "what objectives have heads": (_heads(before), _heads(config)),
        **{
            f"optimizer.{name}": (getattr(before.optimizer, name), getattr(config.optimizer, name))
            for name in ("name", "beta1", "beta2", "eps", "momentum")
        },
        "the optimizer's source": (
            saved.versions.get(OPTIMIZER.kind),
            OPTIMIZER.version(optimizer) if is_custom(optimizer) else None,
        ),
        **{
            f"the source of {each.name}": (saved.versions.get(OBJECTIVE.key(each.name)), OBJECTIVE.version(each.name))
            for each in config.all_objectives
            if each.is_own
        },
        "training.seed": (before.training.seed, config.training.seed),
        "the tokenizer's fingerprint": (saved.data.tokenizer_fingerprint, data.tokenizer_fingerprint),
    }
    own, other = _of_model(config), _of_model(before)
    pairs |= {f"model.{name}": (other[name], own[name]) for name in own if name not in ROPE_BASES}
    differences = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
    if differences:
        assert config.branch is not None
        raise UsageError(
            f"cannot branch from step {saved.state.step} of {redact(config.branch.run)}: {'; '.join(differences)}",
            fix="set these as in that run; a branch may change data, masking, learning rate, weight decay, schedule, "
            "lengths and batch sizes",
            code="incompatible-branch",
        )


def current_versions() -> dict[str, str]:
    """Return the versions of everything on which a resumed run's numbers depend."""
    versions = {package: installed_version(package) or "not installed" for package in PACKAGES}
    return {"python": sys.version.split()[0], **versions}


def _saved_config(saved: SavedState) -> RunConfig:
    try:
        return RunConfig.model_validate(without_registry(saved.config))
    except ValidationError as error:
        raise UserError(
            f"this release does not accept a setting of the checkpoint of step {saved.state.step} "
            f"({first_problem(error)})",
            fix="resume it with the release that wrote it",
            code="checkpoint-of-another-release",
        ) from None


def _comparable(config: RunConfig) -> dict[str, Any]:
    """Return settings by dotted name, with batch sizes and lengths by stage, and without paths of data."""
    by_stage = {"stages", "micro_batch_tokens", "global_batch_tokens", "batch_warmup", "duration"}
    left_out: Any = {"deepspeed": True, "registry": True, "objectives": True, "training": by_stage}
    dumped = config.model_dump(mode="json", exclude=left_out) | {"data": _masking_in_short(config.data)}
    values = {name: value for name, value in flatten(dumped) if value != {}}
    for name in ("data.sequence_length", "data.shards"):
        values.pop(name)
    values.pop("branch.run", None)
    for number, stage in enumerate(config.stages):
        values |= {f"stage {number} {name}": value for name, value in _stage_values(config, stage).items()}
    short_form = _objectives(objectives_of(config.data.sentence_pairs))
    pairs = short_form.pop("objective sentence_pairs", None)  # data.sentence_pairs is compared itself
    values |= {name: text for name, text in _objectives(config.run_objectives).items() if text != pairs}
    # How long the last stage is follows from the length of the run.
    values.pop(f"stage {len(config.stages) - 1} steps")
    values["training.max_steps"] = config.max_steps
    values["model.num_key_value_heads"] = _of_model(config)["num_key_value_heads"]
    values["deepspeed"] = config.deepspeed
    values["weights of the mixture"] = [component.weight for component in config.data.components]
    return values


def _masking_in_short(data: DataSettings) -> dict[str, Any]:
    """Return settings of `data` in which a masking rate that depends on the step alone has one spelling."""
    return data.in_short_form.model_dump(mode="json")


def _of_model(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the model; as many key heads as query heads are the default, however that is written."""
    values = dict(config.model)
    if config.model.key_value_heads == config.model.num_attention_heads:
        values["num_key_value_heads"] = None
    return values


def _stage_values(config: RunConfig, stage: Stage) -> dict[str, Any]:
    """Return lengths and batch sizes of a stage, and its settings that differ from those of the run."""
    values: dict[str, Any] = {field.name: getattr(stage, field.name) for field in dataclasses.fields(StageShape)}
    values["batch_warmup"] = stage.batch_warmup and stage.batch_warmup.model_dump()
    own = {
        "learning_rate": (stage.peak_learning_rate, config.optimizer.learning_rate),
        "weight_decay": (stage.weight_decay, config.optimizer.weight_decay),
        "gradient_clipping": (stage.gradient_clipping, config.training.gradient_clipping),
        "schedule": (stage.schedule.model_dump() if stage.has_own_schedule else None, None),
        **{f"model.{name}": (getattr(stage.model, name), getattr(config.model, name)) for name in ROPE_BASES},
        **{
            f"data.{name}": tuple(_masking_in_short(data)[name] for data in (stage.data, config.data))
            for name in _OF_STAGE_DATA
        },
        "objectives": (_objectives(stage.objectives), _objectives(config.run_objectives)),
        "data sets": (stage.data_sets, tuple(range(len(config.data.components)))),
        "weights of the mixture": tuple(
            [part.weight for part in data.components] for data in (stage.data, config.data)
        ),
    }
    return values | {name: value for name, (value, of_run) in own.items() if value != of_run}


def _objectives(objectives: Objectives) -> dict[str, str]:
    """Return objectives by name, with all of their settings."""
    return {f"objective {each.name}": f"weight {each.weight!r}{_set_up(each)}" for each in objectives}


def _set_up(objective: ObjectiveSettings) -> str:
    """Return the settings on which the head or the predictions of an objective depend."""
    settings: Mapping[str, object] = objective.settings
    if objective.name == SENTENCE_PAIRS:
        settings = {"task": objective.sentence_pairs}
    elif objective.name == DISTILLATION:  # as they are without being written
        settings = dict(DistillationSettings.model_validate(objective.settings))
    return "".join(f", {name}={value!r}" for name, value in sorted(settings.items()))


def _heads(config: RunConfig) -> list[str]:
    """Return the objectives with heads, with the settings on which the shapes of heads may depend."""
    has_head = (
        each
        for each in config.all_objectives
        if each.name not in OF_TEACHER  # they train that of masked_lm, or matrices between two widths
        or each.settings.get("teacher_hidden_size", config.model.hidden_size) != config.model.hidden_size
    )
    heads = ((MASKED_LM if each.name in OF_TOKENS else each.name, each) for each in has_head)
    return sorted({f"{name}{_set_up(each)}" for name, each in heads})


def _is_harmless(name: str) -> bool:
    if name.startswith(VERSION) and is_version_of_code(name.removeprefix(VERSION)):
        return False
    return (
        name in _HARMLESS
        or name.split(".")[0] in _HARMLESS_SECTIONS
        or name.endswith(" micro_batch_tokens")
        or name.startswith(CHANGES_NUMERICS)
    )
