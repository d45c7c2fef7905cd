"""What a training tells MLflow of itself once, at each of its starts: settings, data, source and machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from data_prep.base.settings import to_yaml
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.shard_set import ShardSet
from trainer.tracking.data_description import data_set_input, manifest_summary
from trainer.tracking.environment import describe_environment, git_revision, installed_packages
from trainer.tracking.journal import GIT_TAG, LINEAGE_TAG
from trainer.tracking.tracker import MetricLog


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
