"""Check data, memory, disk, services and hosts before a run.

    clozeworks doctor --config FILE [--hostfile FILE] [section.field=value ...]

Each line begins with ok, warn or fail; a warning or failure ends with the remedy. The command needs no launcher. With
--hostfile it examines the other hosts by ssh. On a host without a GPU, --gpu names the GPU of the run. The command
writes nothing except a new MLflow database if tracking.uri names a local file that does not exist. Exit status: 0
nothing failed, 1 a check failed, 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data_prep.base.errors import UsageError, run_command
from data_prep.base.load_settings import load_settings
from launch.options import add_config, add_plan, command_parser
from trainer.config.run_config import RunConfig

if TYPE_CHECKING:
    from trainer.preflight.finding import Finding
    from trainer.preflight.plan import PlannedRun


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("doctor.py", __doc__)
    add_config(parser)
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed JSON that is merged over the configuration, as pretrain.py does",
    )
    add_plan(parser.add_argument_group("plan"))
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the run (default: all slots of the hostfile, or all local GPUs)",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="hostfile of the deepspeed launcher: lines HOST slots=N")
    hosts.add_argument(
        "--master-addr", metavar="ADDRESS", help="address of the first host (default: its answer to hostname -I)"
    )
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks} is out of range", fix="give 1 or more", code="invalid-ranks")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    from data_prep.storage import storage
    from trainer.api import EXTENSIONS
    from trainer.engine.deepspeed_config import with_deepspeed_file
    from trainer.preflight.hosts import read_hostfile
    from trainer.preflight.plan import plan_run

    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    config = with_deepspeed_file(config, arguments.deepspeed_config)
    storage.configure(config.storage_options)
    hosts = read_hostfile(arguments.hostfile) if arguments.hostfile else {}
    run = plan_run(
        config,
        EXTENSIONS,
        world_size=arguments.ranks or sum(hosts.values()) or None,
        gpu=arguments.gpu,
        tokens_per_second=arguments.tokens_per_second,
        benchmark=arguments.benchmark,
    )
    levels = set()
    for finding in examine(run, hosts, arguments.master_addr):
        print(finding, flush=True)
        levels.add(finding.level)
    sys.exit(1 if "fail" in levels else 0)


def examine(run: PlannedRun, hosts: dict[str, int], address: str | None = None) -> Iterator[Finding]:
    """Run all checks, in the order in which a run would meet the problems."""
    from trainer.preflight.checks import CHECKS
    from trainer.preflight.finding import Finding, guarded
    from trainer.preflight.hosts import check_collective_of_hosts, check_forwarding, check_hosts
    from trainer.preflight.service_checks import check_collective

    device_type = run.device.type
    for check in CHECKS:
        yield from check.findings(run)
    host_findings: list[Finding] = []
    if hosts:
        host_findings = guarded("host", lambda: check_hosts(list(hosts), run.config))
        yield from host_findings
        yield from guarded("forwarding", lambda: check_forwarding(list(hosts), device_type))
    if any(finding.level == "fail" for finding in host_findings):
        yield Finding("warn", "collective", "skipped because a host check failed; fix the failures above")
    elif len(hosts) > 1:
        yield from guarded("collective", lambda: check_collective_of_hosts(hosts, address, device_type))
    else:
        yield from guarded("collective", lambda: check_collective(run.world_size, device_type))


if __name__ == "__main__":
    run_command(main)
