"""Description of a run for MLflow, logged at each start: settings, data, source revision and machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import psutil
import torch

from data_prep.base.errors import UserError
from data_prep.base.packages import installed_version, name_and_version
from data_prep.base.settings import to_yaml
from data_prep.dataset.manifest import Manifest, list_versions
from data_prep.storage import storage
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.shard_set import ShardSet
from trainer.tracking.journal import ENTROPY_PARAM, GIT_TAG, LINEAGE_TAG, DataSetInput
from trainer.tracking.source_code import git_revision
from trainer.tracking.tracker import MetricLog

LIBRARIES = ("clozeworks", "torch", "deepspeed", "mlflow", "transformers", "tokenizers", "sentencepiece", "numpy")


def describe_run(
    tracker: MetricLog, config: RunConfig, shard_sets: Sequence[ShardSet], data_lineage: Sequence[str]
) -> None:
    """Log parameters, the resolved configuration, the manifests, the environment and the git revision.

    `data_lineage` are the digests of all data that the weights saw, earlier data and that of `init_from` included.
    """
    config = without_secrets(config)
    settings = config.model_dump(mode="json")
    settings["training"]["max_steps"] = config.max_steps
    tracker.log_params(settings)
    if len(shard_sets) == 1 and (entropy := shard_sets[0].manifest.valid.unigram_entropy_nats) is not None:
        tracker.log_params({ENTROPY_PARAM: entropy})
    tracker.log_artifact_text("config.yaml", to_yaml(config))
    digests = [shard_set.manifest.digest for shard_set in shard_sets]
    for number, shard_set in enumerate(shard_sets):
        summary = json.dumps(manifest_summary(shard_set.url, shard_set.manifest), indent=1, ensure_ascii=False)
        tracker.log_artifact_text(f"data/manifest-{number}.json", summary + "\n")
        tracker.log_data_set(data_set_input(shard_set.url, shard_set.manifest))
    environment = describe_environment()
    tracker.log_artifact_text("environment/packages.txt", installed_packages())
    tracker.log_artifact_text("environment/machine.json", json.dumps(environment, indent=1) + "\n")
    tags = {"clozeworks.manifest_digest": ",".join(digests), LINEAGE_TAG: ",".join(data_lineage)}
    tags |= {f"clozeworks.environment.{name}": version for name, version in environment.items()}
    revision = git_revision()
    tracker.log_tags(tags | ({GIT_TAG: revision} if revision else {}))


def manifest_summary(url: str, manifest: Manifest) -> dict[str, Any]:
    """Return a manifest without lists of files: counts, sources with licenses, drops, tokenizer and parent."""
    values = manifest.model_dump(mode="json", exclude={"inputs", "config", "token_counts", "removals"})
    for split in ("train", "valid"):
        values[split]["shards"] = len(manifest.split(split).shards)
    return {
        "url": storage.redact(url),
        "digest": manifest.digest,
        **values,
        "inputs": manifest.num_inputs,
        "dropped": manifest.dropped,
        "removals": len(manifest.removals),
    }


def data_set_input(url: str, manifest: Manifest) -> DataSetInput:
    """Return the shard set as an input of an MLflow run."""
    redacted = storage.redact(url)
    profile: dict[str, int | str] = {
        "version": manifest.version,
        "train_tokens": manifest.train.tokens,
        "train_documents": manifest.train.documents,
        "valid_tokens": manifest.valid.tokens,
        "tokenizer_fingerprint": manifest.tokenizer.fingerprint,
    }
    name = redacted.rstrip("/").rpartition("/")[2] or redacted
    return DataSetInput(name=name, digest=manifest.digest, source=redacted, profile=profile)


def lineage(url: str, digest: str) -> tuple[str, ...]:
    """Return the digests of a version and of the versions it grew from, newest first, as far back as they are known."""
    try:
        parents = {version.digest: version.parent for version in list_versions(url)}
    except (UserError, OSError):
        return (digest,)
    chain = [digest]
    while (parent := parents.get(chain[-1])) is not None and parent not in chain:
        chain.append(parent)
    return tuple(chain)


def all_lineages(urls: Sequence[str], digests: Sequence[str], earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lineages of several shard sets, then of the data that the weights saw `earlier`, each digest once."""
    current = (each for url, digest in zip(urls, digests, strict=True) for each in lineage(url, digest))
    return tuple(dict.fromkeys((*current, *earlier)))


def describe_environment() -> dict[str, str]:
    """Machine, interpreter and library versions."""
    versions = {name: version for name in LIBRARIES if (version := installed_version(name)) is not None}
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    machine = {"cpus": str(os.cpu_count()), "memory_gib": f"{memory_gib:.1f}"}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "gpus": str(torch.cuda.device_count())}
        machine |= {"cuda": str(torch.version.cuda)}
    return {"python": platform.python_version(), "platform": platform.platform(), **machine, **versions}


def installed_packages() -> str:
    """Return all installed distributions as `pip freeze` lists them, one `name==version` per line."""
    described = map(name_and_version, metadata.distributions())
    packages = {name.lower(): f"{name}=={version}" for name, version in described if name}
    return "\n".join(line for _, line in sorted(packages.items())) + "\n"
