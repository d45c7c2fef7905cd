"""Checks of a run's data: missing files, damage in a sample of the shards, tokenizer, vocabulary and amount."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from data_prep.base.urls import WEB_SCHEMES, scheme
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.storage import storage
from trainer.config.run_config import RunConfig
from trainer.data.samples import check_enough_data, check_has_sentences, row_settings
from trainer.data.shard_set import ShardSet, check_own_tokenizer, check_pairs, check_tokenizer, has_valid_split
from trainer.preflight.finding import Finding
from trainer.preflight.plan import PlannedRun

SAMPLED_TRAIN_SHARDS = 3
SAMPLED_VALID_SHARDS = 1
HASHED_BYTES = 256 << 20
SHOWN_FILES = 3
MANY_EPOCHS = 100
USUAL_PADDING = 128
"""A vocabulary that is rounded up to a multiple of this is not a mistake."""
EVALUATION_IS_OFF = "evaluation is off: the data set has no valid split"


def check_data(config: RunConfig, shard_sets: list[ShardSet]) -> None:
    """Check manifests against tokenizer and model, and that there are enough samples for a global batch.

    Raises:
        UserError: the first of them that does not fit.
    """
    check_tokenizer(shard_sets, config.data.tokenizer, config.model.vocab_size)
    check_own_tokenizer(shard_sets[0])
    if config.has_pair_head:
        check_pairs(shard_sets[0], config.data.tokenizer)
    check_enough_data(shard_sets, config.stages, config.training.seed)
    if not has_valid_split(shard_sets):
        check_needs_no_evaluation(config)


def check_needs_no_evaluation(config: RunConfig) -> None:
    """Refuse settings that need scores of the valid split, of a run without one.

    Raises:
        UsageError: names the first one.
    """
    checkpoint, registry = config.checkpoint, config.registry
    settings = [("checkpoint.keep_best", checkpoint.best_metric)] if checkpoint.keep_best else []
    if registry.only_if:
        from trainer.config.promotion import parse_conditions

        settings += [("registry.only_if", condition.metric) for condition in parse_conditions(registry.only_if)]
    wanted = [(setting, f"compares {metric}") for setting, metric in settings if _is_of_valid_split(metric)]
    if checkpoint.average_last is not None:
        wanted.append(("checkpoint.average_last", "evaluates the mean of checkpoints"))
    if wanted:
        raise UsageError(
            f"{wanted[0][0]} {wanted[0][1]}, and {EVALUATION_IS_OFF}",
            fix=f"leave {wanted[0][0]} out, or prepare the data with shards.valid_fraction above 0",
            code="nothing-to-evaluate",
        )


def _is_of_valid_split(metric: str) -> bool:
    return metric.startswith(("valid/", "average/")) and not metric.startswith("valid/minimal_pairs")


def look_at_data(run: PlannedRun) -> Iterator[Finding]:
    """Check the tokenizers, the files of the manifests and a sample of the shards; report what the run reads."""
    for shard_set in run.shard_sets[1:]:
        check_own_tokenizer(shard_set)
    yield from _check_tokenizer_files(run.shard_sets)
    for shard_set in run.shard_sets:
        yield from _check_shards(shard_set)
    yield from describe_data(run, [shard_set.manifest for shard_set in run.shard_sets])


def describe_data(run: PlannedRun, manifests: Sequence[Manifest | None]) -> Iterator[Finding]:
    """Report what the run reads of each data set; a manifest is None if the data set cannot be read yet.

    Raises:
        UsageError: the model has fewer token ids than a data set, or the settings need sentences or a valid split and
            none are there.
    """
    config, known = run.config, [each for each in manifests if each is not None]
    is_evaluated = len(known) < len(manifests) or any(each.valid.documents for each in known)
    tokens_read = tokens_by_data_set(config, [0 if each is None else each.train.tokens for each in manifests])
    for url, manifest, tokens in zip(config.data_sets, manifests, tokens_read, strict=True):
        if manifest is not None:
            yield from _describe_data_set(storage.redact(url), manifest, run, round(tokens))
            if is_evaluated and not manifest.valid.documents:
                text = f"{storage.redact(url)} has no valid documents, so it is not evaluated"
                yield Finding("warn", "shards", text)
    for stage in config.stages:
        for number in stage.data_sets:
            if (manifest := manifests[number]) is not None:
                check_has_sentences(config.data_sets[number], manifest, row_settings(stage.data, stage).pair_task)
    if not is_evaluated:
        check_needs_no_evaluation(config)
        yield Finding("warn", "shards", EVALUATION_IS_OFF)


def _describe_data_set(url: str, manifest: Manifest, run: PlannedRun, tokens_read: int) -> Iterator[Finding]:
    train, vocab_size, of_model = manifest.train, manifest.tokenizer.vocab_size, run.config.model
    if vocab_size > of_model.vocab_size:
        raise UsageError(
            f"the shards at {url} have ids up to {vocab_size - 1:,}, and model.vocab_size is {of_model.vocab_size:,}",
            fix=f"set model.vocab_size={vocab_size}",
            code="vocabulary-too-small",
        )
    text = (
        f"{url}: {counted(len(train.shards), 'train shard')} for {counted(run.world_size, 'rank')} (any number of "
        f"ranks reads any number of shards), {train.tokens:,} train tokens, {manifest.valid.tokens:,} valid tokens"
    )
    yield Finding("ok", "shards", text)
    epochs = tokens_read / max(train.tokens, 1)
    # An epoch of sentence pairs has fewer: pairs that are longer than a row are truncated.
    has_pairs = any(stage.data.sentence_pairs != "none" for stage in run.config.stages)
    times = f"{epochs:,.2f} times the train tokens" if has_pairs else f"{format_epochs(epochs)} of the train tokens"
    text = f"the run reads {tokens_read:,} tokens, about {times}"
    is_much = epochs > MANY_EPOCHS
    advice = "; lower training.max_steps or add data" if is_much else ""
    yield Finding("warn" if is_much else "ok", "tokens", text + advice)
    multiple = max(of_model.pad_vocab_size_to_multiple_of, USUAL_PADDING)
    if of_model.vocab_size > -(-vocab_size // multiple) * multiple:
        text = (
            f"model.vocab_size={of_model.vocab_size:,} exceeds the {vocab_size:,} tokens of the shards' tokenizer; the "
            f"other embeddings are never trained. Fix: set model.vocab_size={vocab_size}"
        )
        yield Finding("warn", "vocabulary", text)


def tokens_by_data_set(config: RunConfig, train_tokens: Sequence[int]) -> list[float]:
    """Return the tokens that the run reads of each of its data sets, given the train tokens of each."""
    tokens_read = [0.0] * len(train_tokens)
    for stage in config.stages:
        weights = [
            component.weight if component.weight is not None else train_tokens[number] ** stage.data.sampling_alpha
            for number, component in zip(stage.data_sets, stage.data.components, strict=True)
        ]
        for number, weight in zip(stage.data_sets, weights, strict=True):
            tokens_read[number] += stage.tokens * weight / (sum(weights) or 1)
    return tokens_read


def format_epochs(epochs: float) -> str:
    """Format a number of epochs: "3.25 epochs", "42,003 epochs"."""
    return f"{epochs:,.{2 if epochs < 100 else 0}f} epochs"


def _check_tokenizer_files(sets: list[ShardSet]) -> Iterator[Finding]:
    """Check the tokenizer files that training does not read and that an export copies."""
    from data_prep.dataset.verification import tokenizer_file_problems

    problems = [problem for shard_set in sets for problem in tokenizer_file_problems(shard_set.url)]
    for problem in problems:
        yield Finding("fail", "tokenizer", problem)
    if not problems:
        fingerprint = sets[0].manifest.tokenizer.fingerprint[:16]
        yield Finding("ok", "tokenizer", f"{fingerprint}, the tokenizer of the shards; its ids fit the model")


def _check_shards(shard_set: ShardSet) -> Iterator[Finding]:
    """Check that all files exist, and size and sha256 of a few shards (sha256 of small local ones only)."""
    address, manifest = storage.redact(shard_set.url), shard_set.manifest
    missing = _missing_files(shard_set)
    problems = []
    if missing:
        missing_names = ", ".join(missing[:SHOWN_FILES]) + (", ..." if len(missing) > SHOWN_FILES else "")
        problems.append(f"{address} lacks {len(missing)} of the files in its manifest: {missing_names}")
    chosen = _sample(manifest)
    there = [record for record in chosen if record.name not in missing]
    problems += [problem for record in there if (problem := _shard_problem(shard_set, record))]
    for problem in problems:
        yield Finding("fail", "shards", f"{problem}; restore it, or rebuild the shards")
    if not problems:
        yield Finding("ok", "shards", f"{len(chosen)} of {len(manifest.shards)} checked in {address}")


def _missing_files(shard_set: ShardSet) -> list[str]:
    """Return the files of the manifest that the folder lacks; none for a web server, which lists no folder."""
    if scheme(shard_set.url) in WEB_SCHEMES:
        return []
    manifest, there = shard_set.manifest, set(storage.list_names(shard_set.url))
    names = [name for record in manifest.shards for name in (record.name, record.index.name)]
    return [name for name in (*names, manifest.token_counts.name) if name not in there]


def _sample(manifest: Manifest) -> list[ShardRecord]:
    """Return a few train shards, evenly spaced, and a valid one."""
    train, valid = manifest.train.shards, manifest.valid.shards
    apart = max(1, len(train) // SAMPLED_TRAIN_SHARDS)
    return [*train[::apart][:SAMPLED_TRAIN_SHARDS], *valid[:SAMPLED_VALID_SHARDS]]


def _shard_problem(shard_set: ShardSet, record: ShardRecord) -> str | None:
    url = storage.join(shard_set.url, record.name)
    address = storage.redact(url)
    if not storage.exists(url):
        return f"{address} is missing"
    if (size := storage.size(url)) != record.bytes:
        return f"{address} has {size:,} bytes instead of {record.bytes:,}"
    if not storage.is_remote(url) and size <= HASHED_BYTES and storage.sha256_of(url) != record.sha256:
        return f"{address} has another sha256 than in the manifest"
    return None
