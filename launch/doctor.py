"""Check data, memory, disk, services and hosts before a run.

    clozeworks doctor --config FILE [--hostfile FILE] [section.field=value ...]

Each line begins with ok, warn or fail; a warning or failure ends with the remedy. The command needs no launcher. With
--hostfile it examines the other hosts by ssh. It writes nothing except a new MLflow database if tracking.uri names a
local file that does not exist. Exit status: 0 nothing failed, 1 a check failed, 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.errors import UsageError, run_command
from data_prep.base.load_settings import load_settings
from data_prep.base.terminal import counted, long_duration
from launch.options import add_config, command_parser
from trainer.config.run_config import RunConfig

if TYPE_CHECKING:
    import torch

    from trainer.preflight.finding import Finding

ASSUMED_MFU = 0.4
"""MFU assumed before the run has measured its own; BERT models reach it on GPUs that do not wait for data."""

MAX_SPAWNED_RANKS = 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("doctor.py", __doc__)
    add_config(parser)
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed JSON that is merged over the configuration, as pretrain.py does",
    )
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
    import torch

    from data_prep.storage import storage
    from trainer.checkpoint.data_version import with_epochs_counted
    from trainer.distributed.process_group import device_type
    from trainer.engine.deepspeed_config import with_deepspeed_file
    from trainer.model.numerics import with_own_precision
    from trainer.preflight.hostfile import read_hostfile

    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    config = with_deepspeed_file(config, arguments.deepspeed_config)
    storage.configure(config.storage_options)
    hosts = read_hostfile(arguments.hostfile) if arguments.hostfile else {}
    device = torch.device(device_type(), 0)
    config = with_epochs_counted(config)
    config = with_own_precision(config, device.type)
    world_size = arguments.ranks or sum(hosts.values()) or (torch.cuda.device_count() if device.type == "cuda" else 1)
    levels = set()
    for finding in examine(config, world_size, hosts, device, arguments.master_addr):
        print(finding, flush=True)
        levels.add(finding.level)
    sys.exit(1 if "fail" in levels else 0)


def examine(
    config: RunConfig, world_size: int, hosts: dict[str, int], device: torch.device, address: str | None = None
) -> Iterator[Finding]:
    """Run all checks, in the order in which a run would meet the problems."""
    import torch

    from trainer.api import EXTENSIONS
    from trainer.preflight import host_checks, service_checks
    from trainer.preflight.checks import CHECKS, PlannedRun
    from trainer.preflight.finding import Finding, guarded

    run = PlannedRun(config, world_size, device, EXTENSIONS)
    for check in CHECKS:
        yield from check.findings(run)
    host_findings: list[Finding] = []
    if hosts:
        host_findings = guarded("host", lambda: host_checks.check_hosts(list(hosts), config))
        yield from host_findings
        yield from guarded("forwarding", lambda: host_checks.check_forwarding(list(hosts), device.type))
    if any(finding.level == "fail" for finding in host_findings):
        yield Finding("warn", "collective", "skipped because a host check failed; fix the failures above")
    elif len(hosts) > 1:
        yield from guarded("collective", lambda: host_checks.check_collective_of_hosts(hosts, address, device.type))
    else:
        local = min(world_size, torch.cuda.device_count() if device.type == "cuda" else MAX_SPAWNED_RANKS)
        yield from guarded("collective", lambda: service_checks.check_collective(local, device.type))
    yield estimate(config, world_size, device)


def estimate(config: RunConfig, world_size: int, device: torch.device) -> Finding:
    """Estimate time and cost of the whole run, from its own measurements or else from the device's peak.

    The estimate counts operations, not steps: a batch-size ramp-up begins with small batches, and stages differ in
    length.
    """
    from trainer.metrics.throughput import flops_per_position, peak_flops
    from trainer.preflight.finding import Finding
    from trainer.tracking.status import read_status

    status, peak = read_status(Path(config.output_dir)), peak_flops(config, device)
    if status and status.flops_per_device and status.world_size:
        speed, basis = status.flops_per_device, f"from the speed of this run on {counted(status.world_size, 'rank')}"
    elif peak is not None:
        speed, basis = peak * ASSUMED_MFU, f"assuming an MFU of {ASSUMED_MFU:.0%}"
    else:
        return Finding(
            "ok", "estimate", "no estimate before the run has measured some steps; or set logging.peak_flops_per_device"
        )
    flops = sum(flops_per_position(config, stage) * stage.tokens for stage in config.stages)
    seconds = flops / (speed * world_size)
    hours, price = seconds * world_size / 3600, config.logging.gpu_hour_price
    cost = f", {hours * price:,.2f} at {price:g} per device-hour" if price is not None else ""
    return Finding("ok", "estimate", f"{long_duration(seconds)}, {hours:,.1f} device-hours{cost}, {basis}")


if __name__ == "__main__":
    run_command(main)
