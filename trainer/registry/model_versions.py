"""Versions of registered models: the list with data, scores and aliases, and the promotion of a version to an alias."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.base.table import aligned
from trainer.config.comparability import FACTS_PREFIX, digest_of
from trainer.config.promotion import Condition, Decision, aliases_of, different_evaluations, judge
from trainer.config.registry_settings import PREVIOUS, check_promoted
from trainer.inference.pulled_model import TAG_PREFIX
from trainer.registry.registered_card import with_alias
from trainer.registry.registration import is_later_step, point_alias
from trainer.tracking.mlflow_server import describe_servers, registry_client, resolve_tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

SCORES_PREFIX = TAG_PREFIX + "scores."
LINEAGE_TAGS = regex.escape(TAG_PREFIX + "data_lineage") + r"(\.\d+)?"
DIGESTS_TAG = TAG_PREFIX + "data_digests"
_FACTS_PREFIX = TAG_PREFIX + FACTS_PREFIX
_MIN_DIGEST_DIGITS = 8
_DIGITS_SHOWN = 12
_SCORES_SHOWN = (
    *("valid/mlm_loss", "valid/mlm_accuracy", "valid/word_bits_per_byte", "valid/pair_accuracy"),
    "valid/minimal_pairs_accuracy",
)
_MOST_OTHER_SCORES = 3

STALE_SECONDS = 60.0
"""A promotion takes a handful of requests; one that takes longer than this counts as killed."""
POLL_SECONDS = 0.2


class NotPromoted(UserError):
    """No alias was moved, because the version does not meet the conditions, or is of an earlier step."""

    exit_status = 3


@dataclass(frozen=True)
class ModelVersion:
    """A registered version and its tags."""

    name: str
    version: int
    aliases: tuple[str, ...]
    created_at: datetime
    run_id: str | None
    tags: dict[str, str]

    @property
    def scores(self) -> dict[str, float]:
        """Evaluation scores by metric."""
        texts = self._tags_below(SCORES_PREFIX)
        return {name: value for name, text in texts.items() if (value := _number(text)) is not None}

    @property
    def facts(self) -> dict[str, str]:
        """How the scores were measured (`trainer/config/comparability.py`); empty for a version of earlier releases."""
        return self._tags_below(_FACTS_PREFIX)

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of the data that the model saw, and of the earlier versions of this data."""
        parts = [text for name, text in self.tags.items() if regex.fullmatch(LINEAGE_TAGS, name)]
        lineage = (digest for part in parts for digest in part.split(",") if digest)
        return tuple(dict.fromkeys((*self.data_digests, *lineage)))

    @property
    def data_digests(self) -> tuple[str, ...]:
        """Manifest digests of the data that the model was trained on."""
        try:
            values = json.loads(self.tags.get(DIGESTS_TAG, "{}"))
        except ValueError:
            return ()
        return tuple(str(digest) for digest in values.values()) if isinstance(values, dict) else ()

    def tag(self, name: str) -> str:
        """Return a tag that this project set; "-" if there is none."""
        return self.tags.get(TAG_PREFIX + name, "-")

    def _tags_below(self, prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): text for name, text in self.tags.items() if name.startswith(prefix)}


def list_model_versions(name: str | None, tracking_uri: str | None = None) -> list[ModelVersion]:
    """Return all versions of a registered model, or without `name` of all models, by name and oldest first.

    Raises:
        UserError: there is no model of that name, or the server does not answer.
    """
    with registry_client(resolve_tracking_uri(tracking_uri), f"listing {name or 'all registered models'}") as client:
        return _versions(client, name)


def trained_on(versions: Sequence[ModelVersion], digest: str) -> list[ModelVersion]:
    """Return the versions whose models saw the data with this manifest digest, or data made from it.

    `digest` may be the beginning of a digest.

    Raises:
        UsageError: the beginning is too short to mean one data set.
    """
    if len(digest) < _MIN_DIGEST_DIGITS:
        raise UsageError(
            f"--trained-on {digest!r} is shorter than {_MIN_DIGEST_DIGITS} digits",
            fix=f"give at least {_MIN_DIGEST_DIGITS} digits of a digest",
            code="digest-too-short",
        )
    return [version for version in versions if any(each.startswith(digest.lower()) for each in version.data_lineage)]


def promote(
    name: str,
    version: str,
    alias: str,
    conditions: tuple[Condition, ...],
    tracking_uri: str | None = None,
    allow_different_evaluation: bool = False,
    forward: bool = False,
) -> Decision:
    """Point `alias` to the version if it meets the conditions; the version that had the alias becomes `previous`.

    Scores that were measured on other rows, masks, data or tokens do not compare: versions whose evaluations differ for
    a metric of the conditions are refused, unless `allow_different_evaluation`. Simultaneous promotions to an alias are
    judged one after another, so that each is compared with the result of the one before. The description of the
    registered model becomes that of the version. With `forward` the alias stays on a version of a later step of the
    same run.

    Raises:
        NotPromoted: the version does not meet a condition, or a condition compares different evaluations, or the alias
            would go back to an earlier step; no alias was moved.
        UserError: there is no such version, or the server refuses.
    """
    check_promoted(name, alias)
    with contextlib.ExitStack() as stack:
        uri, doing = resolve_tracking_uri(tracking_uri), f"promoting {name} version {version}"
        client = stack.enter_context(registry_client(uri, doing, moves_alias=True))
        _find(_versions(client, name), name, version)  # before the lock, which is a tag of the model
        stack.enter_context(promotion_lock(client, name, alias))
        versions = _versions(client, name)
        candidate = _find(versions, name, version)
        holders = {alias_name: each for each in versions for alias_name in each.aliases}
        holder = holders.get(alias)
        if forward and holder is not None and is_later_step(holder.tags, candidate.tags):
            raise NotPromoted(
                f"version {version} of {name} was not promoted to {alias}, which version {holder.version} of a later "
                "step of the same run has. No alias was moved",
                fix="promote it with `clozeworks register` if it is to go back",
                code="later-step-promoted",
            )
        named = {each: holders[each].scores if each in holders else None for each in aliases_of(conditions)}
        decision = judge(conditions, candidate.scores, named, alias)
        different = _different_evaluations(conditions, candidate, holders)
        if different and not allow_different_evaluation:
            raise NotPromoted(
                f"version {version} of {name} was not promoted to {alias}: it was evaluated differently, so its scores "
                f"do not compare ({'; '.join(different)}). No alias was moved",
                fix="evaluate both versions in the same way (valid/word_bits_per_byte compares across tokenizers), or "
                "add --allow-different-evaluation",
                code="evaluations-differ",
            )
        if not decision.is_met:
            raise NotPromoted(
                f"version {version} of {name} was not promoted to {alias}: {'; '.join(decision.reasons)}. "
                "No alias was moved",
                fix="evaluate or train the model further, or change the condition",
                code="condition-not-met",
            )
        # Aliases are moved last, and `alias` after `previous`: if the server is lost here, users see the old version.
        if card := client.get_model_version(name, version).description:
            client.update_registered_model(name, with_alias(card, name, version, alias))
        if holder is not None and holder.version != candidate.version:
            point_alias(client, name, PREVIOUS, str(holder.version))
        point_alias(client, name, alias, version)
    return replace(decision, reasons=(*decision.reasons, *(f"measured differently: {each}" for each in different)))


def _different_evaluations(
    conditions: Sequence[Condition], candidate: ModelVersion, holders: Mapping[str, ModelVersion]
) -> list[str]:
    """Describe the conditions that compare the candidate with a version which was evaluated differently."""
    others = {alias: each for alias, each in holders.items() if each.version != candidate.version}
    compared = tuple(
        each
        for each in conditions
        if isinstance(each.operand, str)
        and each.operand in others
        and each.metric in candidate.scores.keys() & others[each.operand].scores.keys()
    )
    return different_evaluations(compared, candidate.facts, {alias: each.facts for alias, each in others.items()})


def version_lines(versions: Sequence[ModelVersion], with_names: bool = False) -> Iterator[str]:
    """Yield the lines of a table of versions, with the scores of pretraining, or of the test data of fitted models.

    Scores compare between versions with the same digits under "evaluation". `with_names` adds a first column with the
    names of the registered models.
    """
    there = sorted({name for each in versions for name in each.scores})
    metrics = [name for name in _SCORES_SHOWN if name in there] or there[:_MOST_OTHER_SCORES]  # test/* of fitted models
    headings = [*metrics, "evaluation", "data", "tokenizer", "git", "run"]
    rows = [["version", "aliases", "registered", "steps", "tokens seen", *headings]]
    for each in versions:
        scores = [f"{each.scores[name]:.4f}" if name in each.scores else "-" for name in metrics]
        data = ",".join(digest[:_DIGITS_SHOWN] for digest in each.data_digests) or "-"
        tokens = each.tag("tokens_seen")
        row = [str(each.version), ",".join(each.aliases) or "-", f"{each.created_at:%Y-%m-%d %H:%M}"]
        row += [each.tag("step"), f"{int(tokens):,}" if tokens.isdigit() else tokens]
        row += [*scores, digest_of(each.facts), data]
        row += [each.tag("tokenizer_fingerprint")[:_DIGITS_SHOWN], _short_revision(each.tag("git_revision"))]
        rows.append([*row, (each.run_id or "-")[:_DIGITS_SHOWN]])
    if with_names:
        rows = [[name, *row] for name, row in zip(["model", *(each.name for each in versions)], rows, strict=True)]
    yield from aligned(rows)


def _versions(client: Any, name: str | None) -> list[ModelVersion]:
    wanted = f"name='{name}'" if name is not None else None
    models = list(_all_pages(client.search_registered_models, wanted))
    if name is not None and name not in {each.name for each in models}:
        raise UsageError(
            f"there is no registered model {name} at {describe_servers(client.tracking_uri)}",
            fix="see the Models page of the server for the names, or register the model first",
            code="unknown-model",
        )
    aliases: dict[tuple[str, int], list[str]] = {}
    for model in models:
        for alias, number in model.aliases.items():
            aliases.setdefault((model.name, int(number)), []).append(alias)
    versions = [
        ModelVersion(
            each.name,
            int(each.version),
            tuple(sorted(aliases.get((each.name, int(each.version)), ()))),
            datetime.fromtimestamp(each.creation_timestamp / 1000, UTC),
            each.run_id or None,
            dict(each.tags),
        )
        for each in _all_pages(client.search_model_versions, wanted)
    ]
    return sorted(versions, key=lambda each: (each.name, each.version))


def _find(versions: Sequence[ModelVersion], name: str, version: str) -> ModelVersion:
    for each in versions:
        if str(each.version) == version:
            return each
    known = ", ".join(str(each.version) for each in versions) or "none"
    raise UsageError(
        f"{name} has no version {version}, only {known}",
        fix="give one of them with --version",
        code="unknown-model-version",
    )


def _all_pages(search: Callable[..., Any], wanted: str | None) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = search(wanted, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _short_revision(revision: str) -> str:
    """Return the first 10 digits of a git revision, and the mark of modified files."""
    commit, dash, dirty = revision.partition("-")
    return commit[:10] + dash + dirty if commit else "-"


def lock_prefix(alias: str) -> str:
    """Return the beginning of the tags that exist while `alias` is moved; a digest, because aliases may be long."""
    return f"clozeworks.promotion.{hashlib.sha256(alias.encode()).hexdigest()[:12]}."


@contextlib.contextmanager
def promotion_lock(client: MlflowClient, name: str, alias: str) -> Iterator[None]:
    """Allow one promotion at a time to this alias of the registered model `name`, whatever store keeps the registry.

    MLflow moves an alias without asking where it points, so two promotions that are judged at once would both be
    compared with the same old version, and the worse of them could end under the alias. A promotion therefore sets a
    tag of its own on the registered model, and begins if it then reads no other tag of this kind; else it takes its tag
    back and waits. Of two promotions, the one that sets its tag later reads both tags, so that never both begin. A
    promotion that was killed leaves its tag behind; another one removes it after `STALE_SECONDS`.

    Raises:
        MlflowException: the store refuses the tag.
    """
    own = lock_prefix(alias) + uuid.uuid4().hex
    _acquire(client, name, alias, own)
    try:
        yield
    finally:
        client.delete_registered_model_tag(name, own)


def _acquire(client: MlflowClient, name: str, alias: str, own: str) -> None:
    seen_since: dict[str, float] = {}
    while True:
        client.set_registered_model_tag(name, own, f"{alias} is being moved")
        others = _others(client, name, own)
        if not others:
            return
        client.delete_registered_model_tag(name, own)
        _wait(client, name, {tag: seen_since.setdefault(tag, time.monotonic()) for tag in others})


def _others(client: MlflowClient, name: str, own: str) -> list[str]:
    prefix = own.rpartition(".")[0] + "."
    return [tag for tag in client.get_registered_model(name).tags if tag.startswith(prefix) and tag != own]


def _wait(client: MlflowClient, name: str, others: dict[str, float]) -> None:
    """Wait a little for other promotions, which are known since these times by tag; remove the tags of killed ones."""
    for tag, since in others.items():
        if time.monotonic() - since > STALE_SECONDS:
            client.delete_registered_model_tag(name, tag)
    time.sleep(
        POLL_SECONDS * random.uniform(0.5, 1.5)
    )  # so that two promotions do not set their tags at once again and again
