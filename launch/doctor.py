"""Look a run over before it burns any GPU: `doctor.py --config FILE [--hostfile FILE] [section.field=value ...]`.

Each line begins with ok, warn or fail and, where it is not ok, ends with the remedy. Exit status: 0 where nothing
failed, 1 where something did, 2 wrong usage or configuration. It needs neither a launcher nor the other hosts; with
--hostfile it asks them by ssh. Nothing is left behind but MLflow's database, where that is a file and was not there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from data_prep.base.errors import UsageError, run_command
from data_prep.base.settings import load_settings
from data_prep.base.terminal import counted
from data_prep.storage import storage
from launch.status import long_duration
from trainer.config.run_config import RunConfig
from trainer.config.schedule import tokens_of_stage
from trainer.distributed.process_group import device_type
from trainer.engine.deepspeed_file import with_deepspeed_file
from trainer.metrics.status import read_status
from trainer.metrics.throughput import flops_per_place, peak_flops
from trainer.model.numerics import with_own_precision
from trainer.preflight import data_checks, disk_checks, host_checks, model_checks, preflight, service_checks
from trainer.preflight.finding import Finding, guarded
from trainer.preflight.hostfile import read_hostfile

ASSUMED_MFU = 0.4
"""Where the run has not been measured yet; this model's class reaches it on well-fed GPUs."""

MAX_SPAWNED_RANKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of the run (default: all slots, or all GPUs here)"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="the deepspeed launcher's: lines HOST slots=N")
    parser.add_argument("--master-addr", metavar="ADDRESS", help="of the first host (default: it is asked by ssh)")
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed JSON merged over what the YAML gives, as pretrain.py takes it",
    )
    arguments = parser.parse_intermixed_args()
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks} is not a number of ranks; give 1 or more")
    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    config = with_deepspeed_file(config, arguments.deepspeed_config)
    storage.configure(config.storage_options)
    hosts = read_hostfile(arguments.hostfile) if arguments.hostfile else {}
    device = torch.device(device_type(), 0)
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
    """All checks, in the order in which a run would meet what they look at."""
    yield from guarded("batch", lambda: preflight.check_batches(config, world_size))
    yield from guarded("deepspeed", lambda: model_checks.check_device(config, world_size, device))
    yield from guarded("init_from", lambda: model_checks.check_initial_weights(config))
    yield from guarded("data", lambda: data_checks.check_data(config, world_size))
    yield from guarded("memory", lambda: preflight.check_memory(config, world_size, device))
    yield from guarded("disk", lambda: disk_checks.check_disk(config))
    yield from guarded("store", lambda: preflight.check_store(config, world_size))
    yield from guarded("clock", lambda: disk_checks.check_clock(config))
    yield from guarded("compiler", lambda: preflight.check_compiler(config))
    yield from guarded("precision", lambda: preflight.check_speed_of_precision(config, device))
    yield from guarded("op cache", preflight.check_op_cache)
    yield from guarded("mlflow", lambda: service_checks.check_mlflow(config))
    yield from guarded("secrets", lambda: preflight.check_secrets(sys.argv))
    found: list[Finding] = []
    if hosts:
        found = guarded("host", lambda: host_checks.check_hosts(list(hosts), config))
        yield from found
        yield from guarded("forwarding", lambda: host_checks.check_forwarding(list(hosts), device.type))
    if any(finding.level == "fail" for finding in found):
        yield Finding("warn", "collective", "not tried until every host is well; fix what failed above")
    elif len(hosts) > 1:
        check = host_checks.check_collective_of_hosts
        yield from guarded("collective", lambda: check(hosts, address, device.type))
    else:
        local = min(world_size, torch.cuda.device_count() if device.type == "cuda" else MAX_SPAWNED_RANKS)
        yield from guarded("collective", lambda: service_checks.check_collective(local, device.type))
    yield estimate(config, world_size, device)


def estimate(config: RunConfig, world_size: int, device: torch.device) -> Finding:
    """Time and cost of the whole run, from what it measured itself or else from the device's peak.

    By operations and not by steps: a batch warm-up begins with small batches, and stages differ in length.
    """
    status = read_status(Path(config.output_dir)) or {}
    measured, peak = status.get("flops_per_device"), peak_flops(config, device)
    if measured and "world_size" in status:
        speed, basis = measured, f"by the speed of this run on {counted(status['world_size'], 'rank')}"
    elif peak is not None:
        speed, basis = peak * ASSUMED_MFU, f"if it reaches an MFU of {ASSUMED_MFU:.0%}"
    else:
        return Finding("ok", "estimate", "time unknown until some steps are measured (logging.peak_flops_per_device)")
    stages = zip(config.stages, config.steps_by_stage, strict=True)
    flops = sum(flops_per_place(config, stage) * tokens_of_stage(stage, 0, steps) for stage, steps in stages)
    seconds = flops / (speed * world_size)
    hours, price = seconds * world_size / 3600, config.logging.gpu_hour_price
    cost = f", {hours * price:,.2f} at {price:g} an hour" if price is not None else ""
    return Finding("ok", "estimate", f"{long_duration(seconds)}, {hours:,.1f} device-hours{cost}, {basis}")


if __name__ == "__main__":
    run_command(main)
