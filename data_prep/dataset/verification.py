"""Verification of a data set: bytes against the manifest, counts against the shards, and removed documents gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.packages import own_version
from data_prep.base.progress import Progress
from data_prep.base.terminal import counted, printable
from data_prep.dataset.counts import SOURCE_COLUMNS, read_token_counts, unigram_entropy_nats
from data_prep.dataset.data_card import card_problem
from data_prep.dataset.file_checks import CheckTask, Findings, SidecarTask, check_shard, check_sidecar
from data_prep.dataset.manifest import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    Manifest,
    list_versions,
    older_version_name,
    read_manifest,
)
from data_prep.dataset.manifest_records import REBUILD, read_inputs
from data_prep.dataset.removed_names import removed_ids
from data_prep.dataset.safeguards import read_filter_lists
from data_prep.dataset.versions import OLD_REPAIR_WORK, select_version, stray_files, unfinished_work
from data_prep.executors.executors import Executor, run_units
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import INFO_NAME, Tokenizer, TokenizerInfo

_SHOWN = 3
_COPY_TOKENIZER = "copy the whole folder again from the tokenizer that the shards were made with"


def verify_shards(folder: str, executor: Executor | int = 1, version: str | None = None) -> tuple[Manifest, list[str]]:
    """Check the data set at `folder`; return its manifest and one line for every problem.

    Args:
        version: number or digest of the version to check; by default the current one.
    """
    versions = list_versions(folder)
    manifest = versions[-1] if version is None else select_version(folder, version)
    foreign_tokenizer = list(_tokenizer_problems(folder, manifest))
    problems = [*foreign_tokenizer, *_edited_manifests(folder, manifest, versions), *_stray_problems(folder)]
    problems.extend(_arithmetic_problems(manifest))
    if not foreign_tokenizer:
        problems.extend(tokenizer_file_problems(folder))
        problems.extend(_card_problems(folder, versions[-1]))
    removed = np.empty(0, np.uint64)
    try:
        removed = removed_ids(folder, manifest)
    except UserError as error:
        problems.append(str(error))
    problems.extend(_list_problems(folder, manifest))
    findings = _check_shards(folder, manifest, executor, not foreign_tokenizer)
    damages = [finding.problem for finding in findings.values() if finding.problem is not None]
    problems.extend(damages)
    problems.extend(_removal_problems(folder, manifest, removed, findings))
    problems.extend(_provenance_problems(folder, manifest, executor, removed, findings))
    if not damages:
        problems.extend(_total_problems(folder, manifest, findings, 3 if foreign_tokenizer else len(SOURCE_COLUMNS)))
    return manifest, sorted(problems)


def tokenizer_problems(folder: str, manifest: Manifest) -> list[str]:
    """Return the problems of the tokenizer in `folder`; without one it is that of the shards."""
    return list(_tokenizer_problems(folder, manifest)) or list(tokenizer_file_problems(folder))


def is_rebuild_needed(folder: str, problems: Sequence[str], of_tokenizer: Sequence[str]) -> bool:
    """Return whether one of the problems is neither of the tokenizer nor of the data card nor about a stray file.

    Args:
        of_tokenizer: what `tokenizer_problems` returns.
    """
    others = {*of_tokenizer, *_stray_problems(folder)}
    if not of_tokenizer:
        others.update(_card_problems(folder, read_manifest(folder)))
    return not others.issuperset(problems)


class DamagedDataSet(UserError):
    """A data set has problems.

    Attributes:
        problems: one line each.
    """

    problems: tuple[str, ...] = ()


def raise_problems(folder: str, problems: Sequence[str]) -> None:
    """Raise the problems that `verify_shards` found, if any.

    Raises:
        DamagedDataSet: there are some.
    """
    if not problems:
        return
    problem, _, fix = problems[0].partition(" Fix: ")
    error = DamagedDataSet(
        printable(f"{storage.redact(folder)} has {counted(len(problems), 'problem')}; the first: {problem}"),
        fix=fix or REBUILD,
        code="damaged-data-set",
    )
    error.problems = tuple(problems)
    raise error


def _check_shards(folder: str, manifest: Manifest, executor: Executor | int, count_text: bool) -> dict[str, Findings]:
    """Return the findings of every shard by its name."""
    tokenizer_url = storage.join(folder, TOKENIZER_FOLDER) if count_text else None
    tasks = [
        CheckTask(folder, shard, len(manifest.sources), manifest.tokenizer, tokenizer_url) for shard in manifest.shards
    ]
    findings: dict[str, Findings] = {}
    with Progress("verifying", sum(shard.bytes for shard in manifest.shards), "MB", 1e6) as progress:
        for task, found in run_units(check_shard, tasks, executor):
            findings[task.shard.name] = found
            progress.add(task.shard.bytes)
    return findings


def _provenance_problems(
    folder: str, manifest: Manifest, executor: Executor | int, removed: np.ndarray, findings: Mapping[str, Findings]
) -> Iterator[str]:
    """Yield problems of the sidecars: files, rows that are missing or should be gone, documents that do not exist."""
    empty = np.empty(0, np.uint64)
    of_shards = {
        shard.provenance.name: findings[shard.name].document_ids for shard in manifest.shards if shard.provenance
    }
    tasks = [
        SidecarTask(
            folder,
            file,
            of_shards.get(file.name, empty),
            removed,
            tuple(sorted(manifest.removed_sources)),
            tuple(source.name for source in manifest.sources),
        )
        for file in manifest.provenance_files
    ]
    if not tasks:
        return
    held = np.unique(np.concatenate([empty, *(found.document_ids for found in findings.values())]))
    is_whole = all(found.problem is None for found in findings.values())
    with Progress("verifying provenance", sum(task.file.bytes for task in tasks), "MB", 1e6) as progress:
        for task, found in run_units(check_sidecar, tasks, executor):
            yield from found.problems
            unknown = np.setdiff1d(found.kept_ids, held, assume_unique=True)
            if len(unknown) and is_whole:
                where = storage.redact(storage.join(folder, task.file.name))
                yield (
                    f"{where} names {len(unknown)} documents that the data set does not hold, such as "
                    f"{unknown[0]:016x}. Fix: restore it, or rebuild the data set"
                )
            progress.add(task.file.bytes)


def _tokenizer_problems(folder: str, manifest: Manifest) -> Iterator[str]:
    tokenizer_folder = storage.join(folder, TOKENIZER_FOLDER)
    where, expected = storage.redact(tokenizer_folder), manifest.tokenizer
    try:
        tokenizer = Tokenizer.load(tokenizer_folder)
    except UserError as error:
        yield str(error)
        return
    if not tokenizer.is_named(expected.fingerprint):
        yield (
            f"{where} is another tokenizer: its fingerprint is {tokenizer.fingerprint}, but the shards have "
            f"{expected.fingerprint}. Fix: copy the right tokenizer there, or rebuild the shards"
        )
    elif (tokenizer.vocab_size, np.dtype(tokenizer.token_dtype).name) != (expected.vocab_size, expected.token_dtype):
        yield (
            f"{where} has {tokenizer.vocab_size} tokens ({np.dtype(tokenizer.token_dtype).name}), and the manifest "
            f"names {expected.vocab_size} ({expected.token_dtype}). Fix: rebuild the shards"
        )


def tokenizer_file_problems(folder: str) -> Iterator[str]:
    """Yield the files of the tokenizer that changed; those that training reads are checked elsewhere."""
    tokenizer_folder = storage.join(folder, TOKENIZER_FOLDER)
    try:
        info = TokenizerInfo.read(tokenizer_folder)
    except UserError:
        return
    for name, sha256 in sorted(info.files.items() if info is not None else ()):
        url = storage.join(tokenizer_folder, name)
        where = storage.redact(url)
        if not storage.exists(url):
            yield f"{where} is missing. Fix: {_COPY_TOKENIZER}"
        elif (found := storage.sha256_of(url)) != sha256:
            yield (f"{where} has sha256 {found}, and {INFO_NAME} names {sha256}. Fix: {_COPY_TOKENIZER}")


def _card_problems(folder: str, current: Manifest) -> list[str]:
    problem = card_problem(folder, current, own_version())
    return [problem] if problem else []


def _edited_manifests(folder: str, manifest: Manifest, versions: Sequence[Manifest]) -> Iterator[str]:
    where = storage.redact(folder)
    current = versions[-1]
    name = MANIFEST_NAME if manifest.version == current.version else older_version_name(manifest.version)
    if storage.read_bytes(storage.join(folder, name)) != manifest.to_json().encode():
        yield f"{storage.join(where, name)} was edited: it is not in canonical form. Fix: restore it"
    for before, after in zip(versions[:-1], versions[1:], strict=True):
        if after.version == before.version + 1 and after.parent != before.digest:
            yield (
                f"the manifest of version {before.version} in {where} is not the parent of version {after.version}: "
                "one of them was edited. Fix: restore it"
            )


def _stray_problems(folder: str) -> Iterator[str]:
    """Yield files that belong to no version, and what an interrupted repair of an earlier release left."""
    where = storage.redact(folder)
    if not unfinished_work(folder):
        for stray in stray_files(folder):
            yield f"{storage.join(where, stray)} is not in the manifest of any version. Fix: delete it"
    if OLD_REPAIR_WORK in storage.list_names(folder):
        yield (
            f"{storage.join(where, OLD_REPAIR_WORK)} is of an interrupted 'shards --repair' of an earlier release, "
            "and nothing uses it. Fix: delete it"
        )


def _list_problems(folder: str, manifest: Manifest) -> Iterator[str]:
    """Yield damaged lists of inputs and of filters."""
    for preparation in manifest.preparations:
        try:
            read_filter_lists(folder, preparation)
        except UserError as error:
            yield str(error)
    for file in manifest.input_files:
        try:
            list(read_inputs(folder, [file]))
        except UserError as error:
            yield str(error)


def _arithmetic_problems(manifest: Manifest) -> Iterator[str]:
    """Yield contradictions within the manifest."""
    given_out, held = manifest.steps[-1].documents_out, manifest.train.documents + manifest.valid.documents
    if not manifest.has_sentences and manifest.train.sentences + manifest.valid.sentences != held:
        yield "documents.sentences=none in the manifest, and its documents have several sentences"
    if given_out != held:
        yield f"the last step of the manifest gives out {given_out} documents, and its splits hold {held}"
    removed = sum(removal.documents for removal in manifest.removals)
    if removed != manifest.dropped.get("removed", 0):
        yield (
            f"the sources of the manifest count {manifest.dropped.get('removed', 0)} removed documents, and its "
            f"removals count {removed}"
        )


def _removal_problems(
    folder: str, manifest: Manifest, removed: np.ndarray, findings: Mapping[str, Findings]
) -> Iterator[str]:
    """Yield removed documents that are still there."""
    gone = [number for number, source in enumerate(manifest.sources) if source.name in manifest.removed_sources]
    for name, found in findings.items():
        where = storage.redact(storage.join(folder, name))
        present = np.intersect1d(found.document_ids, removed)
        if len(present):
            listed = ", ".join(f"{document:016x}" for document in present[:_SHOWN].tolist())
            yield f"{where} holds {len(present)} removed documents: {listed}{' ...' * (len(present) > _SHOWN)}"
        for number in gone:
            if found.source_counts[number, 0]:
                documents, source = found.source_counts[number, 0], manifest.sources[number].name
                yield f"{where} holds {documents} documents of the removed source {source!r}"


def _total_problems(
    folder: str, manifest: Manifest, findings: Mapping[str, Findings], num_counted: int
) -> Iterator[str]:
    """Compare the sums over sound shards with the totals of the manifest.

    Args:
        num_counted: how many of `SOURCE_COLUMNS` were counted.
    """
    found_counts = {}
    for name in ("train", "valid"):
        counts = [findings[shard.name].token_counts for shard in manifest.split(name).shards]
        found_counts[name] = np.sum([np.zeros(manifest.tokenizer.vocab_size, np.int64), *counts], axis=0)
    try:
        stored = read_token_counts(folder, manifest)
    except UserError as error:
        yield str(error)
    else:
        for name, counts in found_counts.items():
            if name not in stored or not np.array_equal(stored[name], counts):
                where = storage.redact(storage.join(folder, manifest.token_counts.name))
                yield f"{where} has other {name} token counts than the shards. Fix: {REBUILD}"
    for name, split in (("train", manifest.train), ("valid", manifest.valid)):
        if split.unigram_entropy_nats != unigram_entropy_nats(found_counts[name]):
            yield f"the unigram entropy of {name} in the manifest does not follow from its tokens"
    nothing = np.zeros((len(manifest.sources), len(SOURCE_COLUMNS)), np.int64)
    source_counts = np.sum([nothing, *(found.source_counts for found in findings.values())], axis=0)
    for source, counts in zip(manifest.sources, source_counts.tolist(), strict=True):
        # Words and bytes are counted only with the right tokenizer; a wrong one is a problem of its own.
        for column, count in zip(SOURCE_COLUMNS[:num_counted], counts, strict=False):
            if getattr(source, column) != count:
                yield f"source {source.name} has {count} {column}, and the manifest names {getattr(source, column)}"
    if all(config.get("deduplication", {}).get("exact", True) for config in manifest.preparations):
        yield from _duplicate_problems(folder, findings)


def _duplicate_problems(folder: str, findings: Mapping[str, Findings]) -> Iterator[str]:
    ids = np.concatenate([np.empty(0, np.uint64), *(found.document_ids for found in findings.values())])
    ids.sort()
    twice = int((ids[1:] == ids[:-1]).sum())
    if twice:
        yield f"{storage.redact(folder)} holds {twice} documents twice. Fix: rebuild the shards"
