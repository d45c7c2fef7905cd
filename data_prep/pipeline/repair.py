"""Repair of a finished data set: rebuilds damaged files, whose bytes its inputs and settings determine.

The damaged shards are made again in OUTPUT/.repair. They replace the damaged files only after all of them match the
manifest. A stopped repair resumes from its finished units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.packages import own_version
from data_prep.base.progress import Progress
from data_prep.dataset.counts import token_counts_file
from data_prep.dataset.data_card import CARD_NAME, card_problem, write_data_card
from data_prep.dataset.file_checks import CheckTask, FileTask, check_shard, content_problem, file_tasks
from data_prep.dataset.manifest import MANIFEST_NAME, TOKENIZER_FOLDER, Manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.safeguards import filter_lists_name, write_filter_lists
from data_prep.dataset.verification import tokenizer_problems
from data_prep.dataset.versions import REPAIR_WORK
from data_prep.executors.executors import Executor, run_units
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.exclusion_phase import run_exclusions
from data_prep.pipeline.inheritance import filter_lists
from data_prep.pipeline.map_phase import map_tasks, run_map, summarize
from data_prep.pipeline.map_task import keep_tokenizer
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.plan_changes import check_inputs_unchanged, file_fingerprint
from data_prep.pipeline.publication import is_own_tokenizer
from data_prep.pipeline.reduce_phase import gather, make_shards
from data_prep.pipeline.work_folder import begin_work, check_finished_units, finished_manifest
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_SHOWN = 5


def find_damage(plan: Plan, output: str, executor: Executor | int) -> tuple[Manifest, list[str]]:
    """Read every file of a finished data set; return the problems, a line each.

    Raises:
        UserError: `output` holds no finished data set, or one of another preparation.
    """
    manifest = _manifest(plan, output)
    problems = list(_damaged_files(manifest, output, executor).values())
    problems += tokenizer_problems(output, manifest)
    card = card_problem(output, manifest, own_version())
    return manifest, [*problems, card] if card else problems


def repair(plan: Plan, tokenizer: Tokenizer, output: str, executor: Executor | int) -> tuple[Manifest, list[str]]:
    """Rebuild damaged files; return the unchanged manifest and the names of the replaced files.

    Raises:
        UserError: as `find_damage`; or a file cannot be made again, because its input changed or another command wrote
            it. A file that differs from the manifest replaces nothing.
    """
    with storage.hold_lock(output) as lock:
        manifest = _manifest(plan, output)
        damaged = _damaged_files(manifest, output, executor)
        shards = [shard for shard in manifest.shards if {file.name for file in shard.files} & damaged.keys()]
        replaced, others = [], []
        if shards:
            built = _rebuild(plan, tokenizer, output, manifest, shards, PhaseRunner(executor, lock))
            lock.check()
            for file in (file for shard in built for file in shard.files if file.name in damaged):
                storage.copy(_url(output, file.name, REPAIR_WORK), _url(output, file.name))
                replaced.append(file.name)
            others = [shard.name for shard in shards if shard not in built]
        others += [file.name for file in manifest.detached_provenance if file.name in damaged]
        storage.remove(storage.join(output, REPAIR_WORK))
        if others:
            raise UserError(
                f"{storage.redact(output)}: {_listed(others)} cannot be rebuilt by this command, since "
                f"'shards --add-to' or 'remove' wrote it (rebuilt: {_listed(replaced) or 'nothing'})",
                fix="restore it from a copy, or make the data set again",
                code="not-rebuildable",
            )
        if filter_lists_name(1) in damaged:
            write_filter_lists(output, filter_lists(plan.config.documents.filters), 1)
            replaced.append(filter_lists_name(1))
        if manifest.token_counts.name in damaged:
            _rewrite_token_counts(output, manifest, executor)
            replaced.append(manifest.token_counts.name)
        if not is_own_tokenizer(tokenizer, output) and list(tokenizer_problems(output, manifest)):
            tokenizer.copy_files(_url(output, TOKENIZER_FOLDER))
            replaced.append(f"{TOKENIZER_FOLDER}/")
        if not list(tokenizer_problems(output, manifest)) and card_problem(output, manifest, own_version()):
            write_data_card(output, manifest)  # which names the settings of the tokenizer
            replaced.append(CARD_NAME)
    return manifest, replaced


def _manifest(plan: Plan, output: str) -> Manifest:
    if plan.parent is not None:
        raise UsageError(
            "--repair and --add-to contradict each other",
            fix="repair with the command that made the data set and its --output; restore the shards of an addition "
            "from a copy",
            code="contradicting-arguments",
        )
    manifest = finished_manifest(plan, output)
    if manifest is None:
        raise UsageError(
            f"{storage.redact(output)} holds no {MANIFEST_NAME}, so there is nothing to repair",
            fix="run the same command without --repair, which makes the data set or resumes it",
            code="missing-manifest",
        )
    return manifest


def _damaged_files(manifest: Manifest, output: str, executor: Executor | int) -> dict[str, str]:
    """Return the problems by file name."""
    tasks = file_tasks(storage.absolute(output), manifest)
    found = {}
    with Progress("checking", sum(task.file.bytes for task in tasks), "MB", 1e6) as progress:
        for task, problem in run_units(content_problem, tasks, executor):
            if problem is not None:
                found[task.file.name] = problem
            progress.add(task.file.bytes)
    return dict(sorted(found.items()))


def _rebuild(
    plan: Plan,
    tokenizer: Tokenizer,
    output: str,
    manifest: Manifest,
    wanted: Sequence[ShardRecord],
    runner: PhaseRunner,
) -> list[ShardRecord]:
    """Make the shards of this plan again in the work folder; return them.

    Raises:
        UserError: an input or a shard differs from the manifest.
    """
    work = storage.join(output, REPAIR_WORK)
    keep_tokenizer(tokenizer, storage.absolute(tokenizer.url))
    tasks = map_tasks(plan, tokenizer, work)
    try:
        first_shard = begin_work(plan, work)
        check_finished_units(plan, work, tasks, runner.executor)
    except UserError:  # of an earlier repair, maybe with other settings or inputs; it is not needed
        storage.remove(work)
        first_shard = begin_work(plan, work)
    run_map(tasks, runner)
    summary = summarize(plan, tasks, runner)
    check_inputs_unchanged(plan, summary.digests)
    _check_inputs(plan, manifest, summary.digests)
    run_exclusions(plan, tasks, work, runner)
    names = frozenset(shard.name for shard in wanted)
    summary = gather(plan, tokenizer, work, summary, runner)
    # Only after all shards are made it is known whether a valid shard holds the single held-out document.
    is_held_out = any(shard.documents == 1 for shard in manifest.valid.shards)
    totals = make_shards(plan, tokenizer, work, summary, first_shard, runner, None if is_held_out else names)
    made = {shard.name for shard in totals.shards}
    built = [shard for shard in wanted if shard.name in made]
    for file in (file for shard in built for file in shard.files):
        if content_problem(FileTask(work, file)) is not None:
            raise UserError(
                f"{storage.redact(output)}: the rebuilt {file.name} differs from the one in {MANIFEST_NAME}, so "
                f"nothing was replaced (the data set was made with clozeworks {manifest.clozeworks_version})",
                fix="restore it from a copy, or make the data set again with --fresh",
                code="rebuilt-differently",
            )
    return built


def _check_inputs(plan: Plan, manifest: Manifest, digests: Sequence[str]) -> None:
    """Check that the inputs still have the content of the data set.

    Raises:
        UserError: an input changed; names the first one.
    """
    fingerprints = {file.url: file.fingerprint for file in manifest.inputs}
    for file in plan.inputs:
        url = storage.redact(file.url)
        if file_fingerprint([digests[number] for number in plan.parts_of[file.url]]) != fingerprints[url]:
            raise UserError(
                f"input {url} has other content than when the data set was made, so nothing was replaced",
                fix="restore the input, or make the data set again with --fresh",
                code="input-changed",
            )


def _rewrite_token_counts(output: str, manifest: Manifest, executor: Executor | int) -> None:
    """Count the tokens of all shards, which are sound by now, and write the counts."""
    tasks = [
        CheckTask(storage.absolute(output), shard, len(manifest.sources), manifest.tokenizer, None)
        for shard in manifest.shards
    ]
    counts = {name: np.zeros(manifest.tokenizer.vocab_size, np.int64) for name in ("train", "valid")}
    for task, found in run_units(check_shard, tasks, executor):
        counts[task.shard.name.partition("-")[0]] += found.token_counts
    record, data = token_counts_file(counts, manifest.version)
    if record != manifest.token_counts:
        raise UserError(
            f"{storage.redact(output)}: {record.name} cannot be rebuilt: the tokens of the shards differ from "
            f"{MANIFEST_NAME}",
            fix="restore it from a copy, or make the data set again with --fresh",
            code="rebuilt-differently",
        )
    storage.write_bytes(_url(output, record.name), data)


def _url(output: str, name: str, folder: str = "") -> str:
    return storage.join(storage.join(output, folder) if folder else output, name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
