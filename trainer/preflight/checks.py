"""The checks of a run before its first step, in one list.

`clozeworks doctor` prints what all of them find. A start of the run raises the first error of those that refuse it,
and warns of what the cheap ones find. The rest of a start's refusals need all ranks (`trainer/loop/train.py`): they
agree, no other run works in `output_dir`, all see that directory, and its checkpoint fits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from trainer.config.custom_code import check_code
from trainer.config.run_config import check_output_dir
from trainer.config.stages import OF_MASKING
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.shard_set import Split, has_valid_split
from trainer.objectives.build import check_best_metric
from trainer.preflight.data_checks import check_data, look_at_data
from trainer.preflight.deepspeed_sections import check_output_file
from trainer.preflight.finding import Finding, guarded
from trainer.preflight.launch_checks import check_starters
from trainer.preflight.machine_checks import (
    check_batches,
    check_clock,
    check_compiler,
    check_descriptors,
    check_device,
    check_disk,
    check_initial_weights,
    check_memory,
    check_op_cache,
    check_secrets,
    check_speed_of_precision,
    check_teacher,
    describe_device,
    estimate_time,
    refuse_compilation,
)
from trainer.preflight.plan import PlannedRun
from trainer.tracking.mlflow_server import resolve_tracking_uri


def _nothing(run: PlannedRun) -> Iterable[Finding]:
    return ()


def _here(run: PlannedRun) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """One thing to check, under a short name."""

    name: str
    refuse: Callable[[PlannedRun], object] = _nothing
    """Raises the `UserError` that ends a start of the run."""
    look: Callable[[PlannedRun], Iterable[Finding]] = _nothing
    """Yields further findings; called if `refuse` raises nothing."""
    warns: bool = False
    """Whether a start of the run logs the warnings of `look`, which then takes well under a second."""
    of_first_rank: bool = False
    """Whether only rank 0 does what is checked."""
    needs_length: bool = False
    """Whether the check reads the number of steps; it is skipped if the epochs cannot be counted."""
    elsewhere: Callable[[PlannedRun], str | None] = _here
    """Returns advice if another host may have what this one lacks: the doctor then only warns."""

    def findings(self, run: PlannedRun) -> list[Finding]:
        """Return what the doctor prints."""
        if self.needs_length and run.uncounted is not None:
            return []
        findings = guarded(self.name, lambda: self._refuse_and_look(run))
        if (advice := self.elsewhere(run)) is None:
            return findings
        return [
            each if each.level == "ok" else replace(each, level="warn", text=f"{each.text}; {advice}")
            for each in findings
        ]

    def _refuse_and_look(self, run: PlannedRun) -> Iterator[Finding]:
        self.refuse(run)
        yield from self.look(run)


def _read_minimal_pairs(run: PlannedRun) -> None:
    if run.config.evaluation.minimal_pairs is not None:
        from trainer.data.minimal_pairs import read_minimal_pairs

        read_minimal_pairs(run.config.evaluation.minimal_pairs)


def _encode_minimal_pairs(run: PlannedRun) -> Iterable[Finding]:
    if run.config.evaluation.minimal_pairs is not None:
        from trainer.validation.minimal_pairs import minimal_pairs_of

        minimal_pairs_of(run.config, run.shard_sets[0])  # in a start, set-up does
    return ()


def _check_length(run: PlannedRun) -> None:
    if run.uncounted is not None:
        raise run.uncounted


def _build_own_objectives(run: PlannedRun) -> None:
    """Build the model without memory: objectives of the user's may have names or weights that it cannot have."""
    if run.config.has_own_objectives:
        _ = run.parameters


def _check_upload(run: PlannedRun) -> None:
    if run.config.checkpoint.upload_to is not None:
        from trainer.checkpoint.upload import check_upload_wait

        check_upload_wait(run.config, run.world_size)


def _look_at_store(run: PlannedRun) -> Iterable[Finding]:
    from trainer.preflight.service_checks import check_store

    return check_store(run.config)


def _look_at_mlflow(run: PlannedRun) -> Iterable[Finding]:
    from trainer.preflight.service_checks import check_mlflow

    return check_mlflow(run.config)


def _try_maskings(run: PlannedRun) -> Iterable[Finding]:
    """Mask a micro-batch by each function of the user's own, as a start does in its set-up."""
    for stage in run.config.stages:
        if stage.data.masking is not None and not stage.is_causal:
            shard_sets = stage.select(run.shard_sets)
            split: Split = "valid" if has_valid_split(shard_sets) else "train"
            next(evaluation_batches(shard_sets, stage.data, stage, 0, 0, 1, stage.micro_batch_tokens, split))
    return ()


def _look_at_unused_masks(run: PlannedRun) -> Iterable[Finding]:
    """Warn of masking that is set for a run without masks; a stage of its own that sets it is refused."""
    if not all(stage.is_causal for stage in run.config.stages):
        return
    data = run.config.data
    for name in ("final_mlm_probability", *OF_MASKING):
        value, default = getattr(data, name), type(data).model_fields[name].default
        if value != default:
            text = f"data.{name}={value} has no effect: every stage trains causal, whose rows are not masked. Remove it"
            yield Finding("warn", "unused masks", text)


def _on_hosts_that_have_it(run: PlannedRun) -> str | None:
    return "ignore this if the run starts on hosts that have it"


def _on_gpus(run: PlannedRun) -> str | None:
    is_judged = run.gpu is not None or run.device.type != "cpu"
    return None if is_judged else "this host has no GPU: give --gpu NAME if the run has one"


def _check_suite(run: PlannedRun) -> None:
    # Without a follower another machine evaluates, which may have other files; the run reads the suite all the same.
    run.outside.check_suite(run.config.evaluation, evaluates=run.config.checkpoint.follow)


CHECKS = (
    Check("output_dir", lambda run: check_output_dir(run.config.output_dir, run.config.checkpoint.upload_to)),
    Check("batch", look=check_batches, warns=True),
    Check("deepspeed", check_device, describe_device),
    Check(
        "deepspeed",
        lambda run: check_output_file(run.config),
        elsewhere=_on_hosts_that_have_it,
        of_first_rank=True,
    ),
    Check("custom code", lambda run: check_code(run.config)),
    Check("objectives", _build_own_objectives),
    Check("best_metric", lambda run: check_best_metric(run.config.checkpoint, run.config.all_objectives)),
    # A start reads them once, on rank 0.
    Check("init_from", look=check_initial_weights),
    Check("teacher", look=check_teacher),
    Check("length", _check_length),
    Check("data", lambda run: check_data(run.config, run.shard_sets), look_at_data, needs_length=True),
    Check("masking", look=_try_maskings),
    Check("unused masks", look=_look_at_unused_masks, warns=True),
    Check("minimal pairs", _read_minimal_pairs, _encode_minimal_pairs),
    Check("suite", _check_suite, of_first_rank=True),
    Check("memory", look=check_memory, warns=True, elsewhere=_on_gpus),
    Check("disk", look=check_disk, warns=True, needs_length=True),
    Check("store", _check_upload, _look_at_store),
    Check("clock", look=lambda run: check_clock(run.config)),
    Check("compiler", lambda run: refuse_compilation(run.config, run.device), check_compiler),
    Check("open files", look=lambda run: check_descriptors(run.world_size), warns=True),
    Check("precision", look=lambda run: check_speed_of_precision(run.config, run.device_type), warns=True),
    Check("op cache", look=lambda run: check_op_cache(), warns=True),
    Check("mlflow", lambda run: resolve_tracking_uri(run.config.tracking.uri), _look_at_mlflow),
    Check("secrets", lambda run: check_starters(), lambda run: check_secrets(sys.argv), warns=True),
    Check("estimate", look=estimate_time, needs_length=True),
)
"""In the order in which a run would meet the problems."""


def refuse(run: PlannedRun) -> None:
    """Raise the first error with which a start of the run ends on this rank.

    Raises:
        UserError: data, tokenizer, DeepSpeed's settings or other settings contradict each other, or are unusable here.
    """
    for check in CHECKS:
        if run.is_first or not check.of_first_rank:
            check.refuse(run)


def warnings(run: PlannedRun) -> list[Finding]:
    """Return the findings that a start of the run logs as warnings."""
    cheap = (check for check in CHECKS if check.warns)
    return [each for check in cheap for each in guarded(check.name, partial(check.look, run)) if each.level != "ok"]
