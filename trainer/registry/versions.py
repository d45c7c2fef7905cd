"""The versions of a registered model side by side: what each was trained on and reached, and which bears an alias."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from data_prep.errors import UsageError, UserError
from trainer.registry.names import check_names
from trainer.registry.promotion import Condition, Verdict, aliases_of, judge
from trainer.registry.promotion_lock import promotion_lock
from trainer.registry.pull import TAG_PREFIX
from trainer.registry.registry import point_alias
from trainer.tracking.mlflow_server import registry_client, resolve_tracking_uri

PREVIOUS = "previous"
SCORES_PREFIX = TAG_PREFIX + "scores."
LINEAGE_TAG = TAG_PREFIX + "data_lineage"
DIGESTS_TAG = TAG_PREFIX + "data_digests"
_MIN_DIGEST_DIGITS = 8
_DIGITS_SHOWN = 12
_SCORES_SHOWN = ("valid/mlm_loss", "valid/mlm_accuracy", "valid/pair_accuracy")
_MOST_OTHER_SCORES = 3


class NotPromoted(UserError):
    """The version did not pass the gate; the aliases are as they were."""

    exit_status = 3


@dataclass(frozen=True)
class ModelVersion:
    """A registered version and what its tags say of it."""

    name: str
    version: int
    aliases: tuple[str, ...]
    created_at: datetime
    run_id: str | None
    tags: dict[str, str]

    @property
    def scores(self) -> dict[str, float]:
        """Evaluation scores by metric."""
        found = {
            name.removeprefix(SCORES_PREFIX): text for name, text in self.tags.items() if name.startswith(SCORES_PREFIX)
        }
        return {name: value for name, text in found.items() if (value := _number(text)) is not None}

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of the data that it saw and of the versions which those grew from."""
        lineage = tuple(digest for digest in self.tags.get(LINEAGE_TAG, "").split(",") if digest)
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
        """A tag of ours; "-" where there is none."""
        return self.tags.get(TAG_PREFIX + name, "-")


def list_model_versions(name: str, tracking_uri: str | None = None) -> list[ModelVersion]:
    """All versions of a registered model, the oldest first.

    Raises:
        UserError: there is none of that name, or the server does not answer.
    """
    with registry_client(resolve_tracking_uri(tracking_uri), f"listing {name}") as client:
        return _versions(client, name)


def trained_on(versions: Sequence[ModelVersion], digest: str) -> list[ModelVersion]:
    """The versions that saw the data of this manifest digest (or its beginning), or data that grew from it.

    Raises:
        UsageError: the beginning is too short to mean one data set.
    """
    if len(digest) < _MIN_DIGEST_DIGITS:
        raise UsageError(f"--trained-on {digest!r} is too short; give at least {_MIN_DIGEST_DIGITS} digits of a digest")
    return [version for version in versions if any(each.startswith(digest.lower()) for each in version.data_lineage)]


def promote(
    name: str,
    version: str,
    alias: str,
    conditions: tuple[Condition, ...],
    tracking_uri: str | None = None,
) -> Verdict:
    """Let `alias` point to the version if the conditions hold; the version that bore it is kept as `previous`.

    Promotions at once are judged one after another, so that each is compared with what the one before left.

    Raises:
        NotPromoted: a condition does not hold; no alias was moved.
        UserError: there is no such version, or the server refuses.
    """
    check_names(name, alias)
    if alias == PREVIOUS:
        raise UsageError(f"--promote {PREVIOUS}: that alias is set by a promotion to the version before; take another")
    with (
        registry_client(resolve_tracking_uri(tracking_uri), f"promoting {name} version {version}") as client,
        promotion_lock(client, name, alias),
    ):
        versions = _versions(client, name)
        candidate = next((each for each in versions if str(each.version) == version), None)
        if candidate is None:
            known = ", ".join(str(each.version) for each in versions) or "none"
            raise UserError(f"{name} has no version {version}, only {known}; choose one of them by --version")
        holders = {bearer: each for each in versions for bearer in each.aliases}
        named = {each: holders[each].scores if each in holders else None for each in aliases_of(conditions)}
        verdict = judge(conditions, candidate.scores, named, alias)
        if not verdict.holds:
            raise NotPromoted(
                f"version {version} of {name} was not promoted to {alias}: {'; '.join(verdict.reasons)}. No alias was "
                "moved"
            )
        holder = holders.get(alias)
        if holder is not None and holder.version != candidate.version:
            point_alias(client, name, PREVIOUS, str(holder.version))
        point_alias(client, name, alias, version)
    return verdict


def version_lines(versions: Sequence[ModelVersion]) -> Iterator[str]:
    """A table of the versions, a line each, with the pretraining's scores, or those of fitted models."""
    there = sorted({name for each in versions for name in each.scores})
    metrics = [name for name in _SCORES_SHOWN if name in there] or there[:_MOST_OTHER_SCORES]  # of fitted models: test/
    rows = [["version", "aliases", "registered", "steps", "tokens seen", *metrics, "data", "tokenizer", "git", "run"]]
    for each in versions:
        scores = [f"{each.scores[name]:.4f}" if name in each.scores else "-" for name in metrics]
        data = ",".join(digest[:_DIGITS_SHOWN] for digest in each.data_digests) or "-"
        tokens = each.tag("tokens_seen")
        row = [str(each.version), ",".join(each.aliases) or "-", f"{each.created_at:%Y-%m-%d %H:%M}"]
        row += [each.tag("step"), f"{int(tokens):,}" if tokens.isdigit() else tokens, *scores, data]
        row += [each.tag("tokenizer_fingerprint")[:_DIGITS_SHOWN], _short_revision(each.tag("git_revision"))]
        rows.append([*row, (each.run_id or "-")[:_DIGITS_SHOWN]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _versions(client: Any, name: str) -> list[ModelVersion]:
    known = {each.name: each for each in client.search_registered_models(f"name='{name}'")}
    if name not in known:
        raise UserError(f"there is no registered model {name}; see the server's Models page, or register it first")
    aliases: dict[int, list[str]] = {}
    for alias, number in known[name].aliases.items():
        aliases.setdefault(int(number), []).append(alias)
    found: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name='{name}'", page_token=token)
        found += page
        token = page.token
        if not token:
            break
    versions = [
        ModelVersion(
            name,
            int(each.version),
            tuple(sorted(aliases.get(int(each.version), ()))),
            datetime.fromtimestamp(each.creation_timestamp / 1000, UTC),
            each.run_id or None,
            dict(each.tags),
        )
        for each in found
    ]
    return sorted(versions, key=lambda each: each.version)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _short_revision(revision: str) -> str:
    """A git revision of 10 digits, with what says that files differed."""
    commit, dash, dirty = revision.partition("-")
    return commit[:10] + dash + dirty if commit else "-"
