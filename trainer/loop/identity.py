"""Facts about what a rank runs, which all ranks compare before the first step (`trainer/distributed/agreement.py`).

Weights of `init_from` are not among them: rank 0 reads them and broadcasts them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.packages import installed_version
from data_prep.base.settings import flatten
from data_prep.storage import storage
from trainer.config.custom_code import code_of
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.minimal_pairs import digest_of_pairs, read_minimal_pairs
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet
from trainer.distributed.agreement import Fact, Facts
from trainer.loop.sources import source_digests

PER_HOST = {
    "data.shards.url": "the manifests are compared instead",
    "training.stages.data.shards.url": "the manifests are compared instead",
    "data.tokenizer": "its fingerprint is compared with the shards' instead",
    "evaluation.minimal_pairs": "their content is compared instead",
    "data.num_workers": "batches do not depend on it, and hosts may have other numbers of cores",
    "data.cache_dir": "hosts may have other disks",
    "data.cache_bytes": "hosts may have other disks",
    "storage_options": "hosts may reach a store by other endpoints and logins; what is read is compared instead",
    "logging.peak_flops_per_device": "hosts may have other devices; rank 0's counts",
    "logging.gpu_hour_price": "hosts may have other prices; rank 0's counts",
}
"""Settings and sections that may differ between hosts, and why; names have no list indices."""

LIBRARIES = ("torch", "deepspeed", "numpy")
"""Libraries that must have one version on all ranks."""

_MAX_DISPLAY = 80


def facts_of(
    config: RunConfig, allow_change: bool, branch: Branch | None, opened: Sequence[ShardSet] | UserError
) -> Facts:
    """Collect the facts of this rank; `opened` is the run's data, or why this rank cannot read it."""
    equal, per_host = _facts_of_settings(config)
    equal |= {name: _fact(value) for name, value in _flags(allow_change, branch).items()}
    if not isinstance(opened, UserError):
        equal |= _facts_of_data(opened)
        if (pairs := config.evaluation.minimal_pairs) is not None:
            equal["evaluation.minimal_pairs (content)"] = _fact(digest_of_pairs(read_minimal_pairs(pairs))[:12])
    equal |= {f"version of {name}": _fact(installed_version(name)) for name in LIBRARIES}
    if not isinstance(opened, UserError):
        equal |= {f"version of {kind.key(name)}": _fact(kind.version(name)) for kind, name in code_of(config)}
    equal |= {f"sha256 of {name}": Fact(digest, digest[:12]) for name, digest in source_digests()}
    per_host["version of python"] = _fact(sys.version.split()[0])
    return Facts(equal, per_host, opened if isinstance(opened, UserError) else None)


def may_differ(name: str) -> bool:
    """Return whether a setting (dotted name, with list indices) may differ between hosts."""
    plain = re.sub(r"\.\d+(?=\.|$)", "", name)
    return any(plain == each or plain.startswith(f"{each}.") for each in PER_HOST)


def _facts_of_settings(config: RunConfig) -> tuple[dict[str, Fact], dict[str, Fact]]:
    """Return the resolved settings that must be equal, and those that may differ; without secrets."""
    public = without_secrets(config)
    values = public.model_dump(mode="json")
    # A single component may be written as a URL or as a list.
    values["data"]["shards"] = _as_list(values["data"]["shards"])
    for stage in values["training"]["stages"]:
        if stage["data"] is not None:
            stage["data"]["shards"] = _as_list(stage["data"]["shards"])
    facts = {name: _fact(value) for name, value in flatten(values, with_items=True)}
    per_host = {name: fact for name, fact in facts.items() if may_differ(name)}
    return {name: fact for name, fact in facts.items() if name not in per_host}, per_host


def _as_list(shards: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"url": shards, "weight": None}] if isinstance(shards, str) else shards


def _flags(allow_change: bool, branch: Branch | None) -> dict[str, Any]:
    """Return the options of the command line that change a run."""
    return {
        "--allow-change": allow_change,
        "--resume-from": branch and branch.step,
        "--skip-samples": [f"{first}:{stop}" for first, stop in branch.skip] if branch else [],
        "--skip-epoch": branch and branch.epoch,
    }


def _facts_of_data(shard_sets: Sequence[ShardSet]) -> dict[str, Fact]:
    """Return the digests of all data, and of the tokenizer that all components share."""
    facts = {
        f"the manifest of data.shards.{number}": Fact(
            each.manifest.digest, f"{each.manifest.digest[:12]} ({storage.redact(each.url)})"
        )
        for number, each in enumerate(shard_sets)
    }
    return facts | {"the tokenizer's fingerprint": _fact(shard_sets[0].manifest.tokenizer.fingerprint)}


def _fact(value: Any) -> Fact:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    display = storage.hide_secrets(text)
    if len(display) > _MAX_DISPLAY:
        display = f"{display[:_MAX_DISPLAY]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return Fact(text, display)
