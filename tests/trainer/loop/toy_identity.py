"""What the ranks of `test_identity.py` do: `python toy_identity.py CASES`, a JSON file of cases by name.

The ranks but the first run with what the case says otherwise: {"overrides", "flags", "versions", "environment"}. Each
writes what became of every case, [error's class, message, exit status, warnings], beside the file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from data_prep.base.errors import UserError
from trainer import load_config
from trainer.api import EXTENSIONS
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import DistributedSettings
from trainer.data.sample_range import Branch
from trainer.distributed.agreement import agree
from trainer.distributed.process_group import Ranks, initialize_distributed, shut_down
from trainer.loop import identity
from trainer.loop.identity import facts_of
from trainer.loop.train import open_or_explain


def outcome(config: RunConfig, flags: dict[str, Any], ranks: Ranks) -> list[Any]:
    """Compare for real what a rank runs with this configuration."""
    warnings: list[str] = []
    branch = (
        Branch(flags["step"], tuple(map(tuple, flags.get("skip", ()))), flags.get("epoch")) if "step" in flags else None
    )
    allow_change = flags.get("allow_change", False)
    try:
        config, opened = open_or_explain(config, EXTENSIONS, allow_change)
        agree(facts_of(config, allow_change, branch, opened), ranks, warnings.append)
    except UserError as error:
        return [type(error).__name__, str(error), error.exit_status, warnings]
    return ["", "", 0, warnings]


def main() -> None:
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    ranks = initialize_distributed(DistributedSettings(timeout_seconds=300))
    versions = identity.installed_version
    outcomes = {}
    for name, case in plan["cases"].items():
        other = {} if ranks.is_first else case
        config = load_config(plan["config"], [*case.get("all", ()), *other.get("overrides", ())])
        asked = other.get("versions", {})
        with (
            mock.patch.object(identity, "installed_version", lambda each, asked=asked: asked.get(each, versions(each))),
            mock.patch.dict(os.environ, other.get("environment", {})),
        ):
            outcomes[name] = outcome(config, other.get("flags", {}), ranks)
    path.with_name(f"outcomes-{ranks.rank}.json").write_text(json.dumps(outcomes))
    shut_down(ranks)


if __name__ == "__main__":
    main()
