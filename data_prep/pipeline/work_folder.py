"""The state of an output folder: empty, unfinished work or a finished result, of this plan or another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.base.terminal import counted
from data_prep.dataset.manifest import MANIFEST_NAME, TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import InputRecord, read_inputs
from data_prep.dataset.missing_data_set import PLAN_NAME
from data_prep.dataset.safeguards import NO_SETTINGS, check_source_names, config_of_source
from data_prep.dataset.shards import SHARD_NAME
from data_prep.dataset.versions import (
    OLD_REPAIR_WORK,
    REMOVAL_WORK,
    REMOVED_NAME,
    STAMPS_NAME,
    next_shard_number,
    owned_files,
    refuse_unfinished,
    stray_files,
)
from data_prep.pipeline.document_folders import remove_folders
from data_prep.pipeline.plan import BUDGETS, REREAD, Plan, changed_inputs, description, differences, stamps_of
from data_prep.storage import storage
from data_prep.storage.work_files import read_state, write_state

_RANGES_NAME = "ranges.json"
_SHOWN = 5


def finished_manifest(plan: Plan, output: str) -> Manifest | None:
    """Return the manifest if `output` holds the finished result of this plan; None if nothing is finished."""
    if not storage.exists(storage.join(output, MANIFEST_NAME)):
        return None
    manifest = read_manifest(output)
    taken = {source.name for source in plan.config.sources} & {source.name for source in manifest.sources}
    if plan.parent is not None and not taken:
        return None  # it is the data set to extend
    found = _differences_to(plan, manifest, output, sorted(taken))
    if found:
        fix = "restore them, or give what they hold now as a source of another name" if plan.parent is not None else ""
        raise _refusal(output, "holds the shards of another preparation", found, manifest.version > 1, fix)
    return manifest


def begin_work(plan: Plan, output: str, is_alone: bool = False) -> None:
    """Begin work in `output`, or check that the unfinished work there is of the same preparation.

    Inputs may be others now: units have names by the stamps of their files, so those of changed files are done again.
    Work that stopped at bad input resumes if bad input is skipped now: its finished units had none. It resumes with
    other budgets too, which only the manifest holds. Where `is_alone`, so that no other process works on ranges, it
    resumes with other filters or fields of a source too, and with other kept documents; all units are named by those.
    """
    url = storage.join(output, PLAN_NAME)
    mine = {
        **description(plan),
        "parent": None if plan.parent is None else plan.parent.digest,
        "keeps": list(plan.keeps),
    }
    if plan.parent is not None:
        refuse_unfinished(output, (REMOVAL_WORK,))
    begun: dict[str, Any] | None = read_state(url) if storage.exists(url) else None
    if begun is not None and not _is_over(begun, plan, output):
        theirs = _with_budgets_of(mine, _with_policy_of(mine, begun))
        kept = begun.get("keeps", [])
        found = differences(_with_readings_of(mine, theirs) if is_alone else theirs, mine)
        if not is_alone and kept != mine["keeps"]:
            found.append(f"its inputs were read {_options(kept)}, and now {_options(plan.keeps)}")
        if found:
            raise _refusal(output, "holds unfinished work of another preparation", found)
        if any(begun.get(name, []) != mine[name] for name in ("config", "inputs", "keeps")):
            remove_folders(plan, unfinished_preparation(output))
            write_state(url, {**begun, **mine})
        return
    if plan.parent is None and any(SHARD_NAME.fullmatch(name) for name in storage.list_names(output)):
        raise UserError(
            f"{storage.redact(output)} holds shards and neither {MANIFEST_NAME} nor unfinished work, so they cannot be "
            "completed",
            fix="choose another folder, or remove them with --fresh",
            code="shards-without-manifest",
        )
    first_shard = 0 if plan.parent is None else next_shard_number(output)
    write_state(url, {**mine, "work": plan.work_digest, "first_shard": first_shard})


def settle_work(plan: Plan, output: str) -> int:
    """Remove what was made of other units than those of the plan, and these.

    Returns the number of the first shard to write, of either split. No other process may be working. After a kill, the
    same call removes the rest.
    """
    url = storage.join(output, PLAN_NAME)
    begun = read_state(url)
    first_shard: int = begun["first_shard"]
    if begun.get("work") == plan.work_digest:
        return first_shard
    kept = {f"map-{unit.name}" for unit in plan.units}
    work_folder = plan.work_folder(output)
    stale = [name for name in storage.list_names(work_folder) if name.partition(".")[0] not in kept]
    if num_units := sum(name.startswith("map-") and name.endswith(".sections") for name in stale):
        what = "files, or settings of their sources, changed since they were read"
        logger(__name__).warning(f"{counted(num_units, 'finished unit')} cannot be used: {what}")
    for name in stale:
        if name != _RANGES_NAME:
            storage.remove(storage.join(work_folder, name))
    for name in owned_files(output) if plan.parent is None else stray_files(output):
        storage.remove(storage.join(output, name))
    write_state(url, {**begun, "work": plan.work_digest})
    return first_shard


def forget_empty_work(plan: Plan, output: str) -> None:
    """Discard work that stopped before its first unit was done, such as at bad input.

    No other process may be working. Work of an addition is kept, because its plan has the number of its first shard.
    """
    if has_begun(output) and plan.parent is None and not storage.list_names(plan.work_folder(output)):
        storage.remove(storage.join(output, PLAN_NAME))


def has_begun(output: str) -> bool:
    """Return whether `output` holds unfinished work."""
    return storage.exists(storage.join(output, PLAN_NAME))


def _with_policy_of(mine: dict[str, Any], begun: dict[str, Any]) -> dict[str, Any]:
    """Return the unfinished plan with the new policy for bad input, if it was `error` and is `skip` now."""
    policies = [values["config"]["documents"].get("on_bad_input") for values in (begun, mine)]
    if policies != ["error", "skip"]:
        return begun
    documents = {**begun["config"]["documents"], "on_bad_input": "skip"}
    return {**begun, "config": {**begun["config"], "documents": documents}}


def _with_budgets_of(mine: dict[str, Any], begun: dict[str, Any]) -> dict[str, Any]:
    """Return the unfinished plan with the new budgets, if it has the same sources, and both plans have budgets."""

    def without_budgets(config: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        plain = [{name: value for name, value in source.items() if name not in BUDGETS} for source in config["sources"]]
        return plain, "total_tokens" in config or plain != config["sources"]

    (theirs, they_have), (own, i_have) = without_budgets(begun["config"]), without_budgets(mine["config"])
    if theirs != own or not (they_have and i_have):
        return begun
    total = {name: value for name, value in mine["config"].items() if name == "total_tokens"}
    config = {name: value for name, value in begun["config"].items() if name != "total_tokens"}
    return {**begun, "config": {**config, **total, "sources": mine["config"]["sources"]}}


def _with_readings_of(mine: dict[str, Any], begun: dict[str, Any]) -> dict[str, Any]:
    """Return the unfinished plan with the new filters and fields of its sources."""
    theirs, own = begun["config"]["sources"], mine["config"]["sources"]
    if [each["name"] for each in theirs] != [each["name"] for each in own]:
        return begun
    sources = []
    for before, now in zip(theirs, own, strict=True):
        kept = {name: value for name, value in before.items() if name not in REREAD}
        sources.append(kept | {name: now[name] for name in REREAD if name in now})
    return {**begun, "config": {**begun["config"], "sources": sources}}


def _is_over(begun: dict[str, Any], plan: Plan, output: str) -> bool:
    """Return whether the plan is a remainder of the work that made the data set to extend."""
    is_earlier = plan.parent is not None and begun["parent"] != plan.parent.digest
    return is_earlier and not storage.exists(plan.work_folder(output))


def note_num_ranges(plan: Plan, output: str, num_ranges: int) -> None:
    """Record the number of ranges of the array, for the message about missing ranges."""
    write_state(storage.join(plan.work_folder(output), _RANGES_NAME), num_ranges)


def noted_num_ranges(plan: Plan, output: str) -> int | None:
    """Return the last recorded number of ranges; None if there is none."""
    url = storage.join(plan.work_folder(output), _RANGES_NAME)
    return read_state(url) if storage.exists(url) else None


def remove_unfinished(plan: Plan, output: str) -> None:
    """Remove half-written files of killed processes; no other process may be working."""
    for folder in (output, plan.work_folder(output)):
        storage.remove_unfinished(folder)


def remove_work(plan: Plan, output: str) -> None:
    """Remove unfinished work and files that only the work needed."""
    storage.remove(plan.work_folder(output))
    storage.remove(storage.join(output, PLAN_NAME))


def remove_outputs(plan: Plan, output: str, keep_tokenizer: bool) -> None:
    """Remove the files of preparations in `output`, the manifest first; other files stay.

    If the data set is being extended, only files of no version are removed.
    """
    if plan.parent is None:
        refuse_to_undo_changes(output)
        tokenizer = [] if keep_tokenizer else [TOKENIZER_FOLDER]
        names = [*owned_files(output), REMOVAL_WORK, *tokenizer]
    else:
        refuse_unfinished(output, (REMOVAL_WORK,))
        names = stray_files(output)
    for name in [*names, OLD_REPAIR_WORK]:
        storage.remove(storage.join(output, name))
    remove_work(plan, output)


def preparations_in(output: str) -> list[dict[str, Any]]:
    """Return the descriptions (`plan.description`) of the finished and of the unfinished work in `output`.

    What is damaged is left out.
    """
    found = []
    with suppress(UserError):
        if storage.exists(storage.join(output, MANIFEST_NAME)):
            manifest = read_manifest(output)
            first = manifest.preparations[0]
            found.append(_description_of(manifest, first, read_inputs(output, manifest.inputs)))
        found.extend(unfinished_preparation(output))
    return found


def unfinished_preparation(output: str) -> list[dict[str, Any]]:
    """Return the description of the unfinished work in `output`, if there is any.

    Raises:
        UserError: it is damaged.
    """
    if not has_begun(output):
        return []
    begun = read_state(storage.join(output, PLAN_NAME))
    return [{name: begun[name] for name in ("tokenizer", "config", "inputs")}]


def refuse_to_undo_changes(output: str) -> None:
    """Refuse to replace a data set that `remove` or `shards --add-to` changed."""
    where, fix = storage.redact(output), "choose another output folder, or delete this one first"
    try:
        manifest = read_manifest(output) if storage.exists(storage.join(output, MANIFEST_NAME)) else None
    except UserError:
        manifest = None  # a damaged manifest is replaced, unless other files prove removals
    if manifest is None:
        traces = [name for name in owned_files(output) if REMOVED_NAME.fullmatch(name)]
        if traces:
            raise UserError(
                f"{where} has no readable {MANIFEST_NAME}, but {traces[0]}: documents were removed from it, and "
                "--fresh would bring them back",
                fix=f"restore {MANIFEST_NAME}, or {fix}",
                code="fresh-would-undo-removals",
            )
        return
    if manifest.removals:
        numbers = ", ".join(str(removal.version) for removal in manifest.removals[:_SHOWN])
        more = f" and {len(manifest.removals) - _SHOWN:,} more" if manifest.removals[_SHOWN:] else ""
        documents = counted(sum(removal.documents for removal in manifest.removals), "document")
        versions = "version" if len(manifest.removals) == 1 else "versions"
        raise UserError(
            f"{where} is at version {manifest.version} with {counted(len(manifest.removals), 'removal')} "
            f"({documents}, {versions} {numbers}{more}), and --fresh would bring back what was removed",
            fix=f"{fix}, and repeat the removals on the new data set",
            code="fresh-would-undo-removals",
        )
    if manifest.version > 1:
        added = counted(len(manifest.preparations) - 1, "addition")
        raise UserError(
            f"{where} is at version {manifest.version} with {added}, and --fresh would discard them",
            fix=fix,
            code="fresh-would-undo-additions",
        )


def _differences_to(plan: Plan, manifest: Manifest, output: str, taken: list[str]) -> list[str]:
    """Return the differences to the preparation of the manifest, or to the part of it with the plan's sources."""
    removed = sorted(manifest.removed_sources.intersection(taken))
    config = manifest.preparations[0] if plan.parent is None else config_of_source(manifest, taken[0])
    if plan.parent is not None and (removed or config is None):
        check_source_names(manifest, taken)
    if removed:
        return [f"source {name} was removed from it" for name in removed]
    if config is None or "sources" not in config:
        return ["its manifest does not say with what settings it was made"]
    inputs = _inputs_of(manifest, config, output)
    theirs, mine = _description_of(manifest, config, inputs), description(plan)
    found = differences(theirs, mine)
    if plan.parent is not None and (found or theirs["inputs"].keys() != mine["inputs"].keys()):
        check_source_names(manifest, taken)  # raises: it is another addition
    return found or changed_inputs(plan, inputs, _read_stamps(output))


def _inputs_of(manifest: Manifest, config: dict[str, Any], output: str) -> list[InputRecord]:
    names = {source["name"] for source in config.get("sources", [])}
    return [file for file in read_inputs(output, manifest.inputs) if file.source in names]


def _description_of(manifest: Manifest, config: dict[str, Any], inputs: Iterable[InputRecord]) -> dict[str, Any]:
    return {
        "tokenizer": manifest.tokenizer.fingerprint,
        "config": {name: values for name, values in config.items() if name not in NO_SETTINGS},
        "inputs": {file.url: [file.source, file.bytes] for file in inputs},
    }


def _options(keeps: Sequence[str]) -> str:
    options = {"dropped": "--keep-dropped", "text": "--text-output"}
    return (
        f"with {' and '.join(options[each] for each in keeps)}"
        if keeps
        else f"without {' and '.join(options.values())}"
    )


def record_stamps(plan: Plan, output: str) -> None:
    """Record the stamps of the inputs beside the data set that was made of them, unless they are recorded."""
    recorded = _read_stamps(output)
    now = {**recorded, **stamps_of(plan)}
    if now != recorded:
        write_state(storage.join(output, STAMPS_NAME), now)


def _read_stamps(output: str) -> dict[str, dict[str, str]]:
    """Return the recorded stamps; none where an earlier release made the data set, or the file is damaged."""
    url = storage.join(output, STAMPS_NAME)
    found: Any = None
    with suppress(UserError):
        found = read_state(url) if storage.exists(url) else None
    return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}


def _refusal(output: str, what: str, found: list[str], has_changes: bool = False, fix: str = "") -> UserError:
    more = f" and {len(found) - _SHOWN:,} more" if found[_SHOWN:] else ""
    return UserError(
        f"{storage.redact(output)} {what}: {'; '.join(found[:_SHOWN])}{more}",
        fix=fix or "choose another output folder" + ("" if has_changes else ", or start again there with --fresh"),
        code="other-preparation",
    )
