"""The versions of a registered model side by side: what each was trained on and reached, and which has an alias."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.base.table import aligned
from trainer.config.comparability import FACTS_PREFIX, digest_of
from trainer.config.promotion import Condition, Decision, aliases_of, different_evaluations, judge
from trainer.config.registry_settings import PREVIOUS, check_promoted
from trainer.inference.pulled_model import TAG_PREFIX
from trainer.registry.promotion_lock import promotion_lock
from trainer.registry.registration import is_later_step, point_alias
from trainer.tracking.mlflow_server import describe_servers, registry_client, resolve_tracking_uri

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


class NotPromoted(UserError):
    """The version did not pass the gate; no alias was moved."""

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
        scores_by_name = {
            name.removeprefix(SCORES_PREFIX): text for name, text in self.tags.items() if name.startswith(SCORES_PREFIX)
        }
        return {name: value for name, text in scores_by_name.items() if (value := _number(text)) is not None}

    @property
    def facts(self) -> dict[str, str]:
        """How the scores were measured (`trainer/config/comparability.py`); empty for a version of earlier releases."""
        tags = self.tags.items()
        return {name.removeprefix(_FACTS_PREFIX): text for name, text in tags if name.startswith(_FACTS_PREFIX)}

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of the data that it saw and of the versions which those grew from."""
        parts = [text for name, text in self.tags.items() if regex.fullmatch(LINEAGE_TAGS, name)]
        lineage = (digest for part in parts for digest in part.split(",") if digest)
        return tuple(dict.fromkeys((*self.data_digests, *lineage)))

    @property
    def data_digests(self) -> tuple[str, ...]:
        """Manifest digests of the data that it was trained on."""
        try:
            values = json.loads(self.tags.get(DIGESTS_TAG, "{}"))
        except ValueError:
            return ()
        return tuple(str(digest) for digest in values.values()) if isinstance(values, dict) else ()

    def tag(self, name: str) -> str:
        """One of our tags; "-" if there is none."""
        return self.tags.get(TAG_PREFIX + name, "-")


def list_model_versions(name: str | None, tracking_uri: str | None = None) -> list[ModelVersion]:
    """Return all versions of a registered model, or of all models without a name, by name, oldest first.

    Raises:
        UserError: there is none of that name, or the server does not answer.
    """
    with registry_client(resolve_tracking_uri(tracking_uri), f"listing {name or 'all registered models'}") as client:
        return _versions(client, name)


def trained_on(versions: Sequence[ModelVersion], digest: str) -> list[ModelVersion]:
    """The versions that saw the data of this manifest digest (or its beginning), or data made from it.

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
    """Point `alias` to the version if the conditions hold; the version that held it becomes `previous`.

    Scores that were measured on other rows, masks, data or tokens say nothing about the models: versions whose
    evaluations differ for a metric of the conditions are not compared, unless `allow_different_evaluation`.

    Simultaneous promotions are evaluated one after another, so that each is compared with what the one before left. The
    registered model's description becomes the version's. With `forward` the alias stays on a version of a later step of
    the same run.

    Raises:
        NotPromoted: a condition does not hold, or compares different evaluations, or the alias would go back to an
            earlier step; no alias was moved.
        UserError: there is no such version, or the server refuses.
    """
    check_promoted(name, alias)
    with contextlib.ExitStack() as held:
        uri, doing = resolve_tracking_uri(tracking_uri), f"promoting {name} version {version}"
        client = held.enter_context(registry_client(uri, doing, moves_alias=True))
        _find(_versions(client, name), name, version)  # before the lock, which is a tag of the model
        held.enter_context(promotion_lock(client, name, alias))
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
        others = {name: each for name, each in holders.items() if each.version != candidate.version}
        compared = tuple(
            each
            for each in conditions
            if isinstance(each.operand, str)
            and each.operand in others
            and each.metric in candidate.scores.keys() & others[each.operand].scores.keys()
        )
        different = different_evaluations(
            compared, candidate.facts, {name: each.facts for name, each in others.items()}
        )
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
        # The aliases last, `alias` after `previous`: if the server is lost here, no alias that users read was moved.
        if card := client.get_model_version(name, version).description:
            client.update_registered_model(name, card)
        if holder is not None and holder.version != candidate.version:
            point_alias(client, name, PREVIOUS, str(holder.version))
        point_alias(client, name, alias, version)
    return replace(decision, reasons=(*decision.reasons, *(f"measured differently: {each}" for each in different)))


def version_lines(versions: Sequence[ModelVersion], with_names: bool = False) -> Iterator[str]:
    """A table of the versions, a line each, with the pretraining's scores, or those of fitted models.

    Scores compare between versions with the same digits under "evaluation".

    `with_names` adds the registered model's name, as the first column.
    """
    there = sorted({name for each in versions for name in each.scores})
    metrics = [name for name in _SCORES_SHOWN if name in there] or there[:_MOST_OTHER_SCORES]  # of fitted models: test/
    headings = [*metrics, "evaluation", "data", "tokenizer", "git", "run"]
    rows = [["version", "aliases", "registered", "steps", "tokens seen", *headings]]
    for each in versions:
        scores = [f"{each.scores[name]:.4f}" if name in each.scores else "-" for name in metrics]
        data = ",".join(digest[:_DIGITS_SHOWN] for digest in each.data_digests) or "-"
        tokens = each.tag("tokens_seen")
        row = [str(each.version), ",".join(each.aliases) or "-", f"{each.created_at:%Y-%m-%d %H:%M}"]
        row += [
            each.tag("step"),
            f"{int(tokens):,}" if tokens.isdigit() else tokens,
            *scores,
            digest_of(each.facts),
            data,
        ]
        row += [each.tag("tokenizer_fingerprint")[:_DIGITS_SHOWN], _short_revision(each.tag("git_revision"))]
        rows.append([*row, (each.run_id or "-")[:_DIGITS_SHOWN]])
    if with_names:
        rows = [[name, *row] for name, row in zip(["model", *(each.name for each in versions)], rows, strict=True)]
    yield from aligned(rows)


def _versions(client: Any, name: str | None) -> list[ModelVersion]:
    """Those of one registered model, or of all."""
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
    """Return a git revision of 10 digits, with the mark of modified files."""
    commit, dash, dirty = revision.partition("-")
    return commit[:10] + dash + dirty if commit else "-"
