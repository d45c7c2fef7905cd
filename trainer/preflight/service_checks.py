"""Checks of services: MLflow, the checkpoint store, and the other ranks of this machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted
from data_prep.storage import storage
from data_prep.storage.store_errors import RESUME
from trainer.config.run_config import RunConfig
from trainer.distributed.rendezvous import interface_towards
from trainer.preflight.finding import Finding, Level
from trainer.tracking.experiments import experiments_elsewhere
from trainer.tracking.mlflow_server import (
    MlflowNotInstalled,
    artifact_root,
    connect,
    database_file,
    registry_of,
    request_limits,
    resolve_tracking_uri,
    short,
)

REQUEST_SECONDS = 10
MAX_EXPERIMENTS = 5
COLLECTIVE_BYTES = 64 << 20
COLLECTIVE_SECONDS = 120
MAX_SPAWNED_RANKS = 8
MAX_MESSAGE_LENGTH = 200


def check_mlflow(config: RunConfig) -> Iterator[Finding]:
    """Check that the tracking server answers and that its registry accepts and deletes a model.

    A problem is a failure if the run registers its model, because it would end with status 1; else a warning.
    """
    registered = config.registry.name
    level: Level = "warn" if registered is None else "fail"
    loss = "" if registered is None else f", but end with status 1: {registered} would not be registered"
    uri = resolve_tracking_uri(config.tracking.uri)
    path = database_file(uri)
    if path is not None and not path.exists() and path.parent.is_dir() and os.access(path.parent, os.W_OK):
        yield Finding("ok", "mlflow", f"{uri} does not exist yet; the run creates it")
        return
    with request_limits(max_retries=0, timeout_seconds=REQUEST_SECONDS):
        try:
            client = connect(uri)
            client.search_experiments(max_results=1)
            elsewhere = list(experiments_elsewhere(client, uri))
        except MlflowNotInstalled as error:
            kept = "Training would continue and keep its metrics for `clozeworks sync-tracking`"
            yield Finding(level, "mlflow", f"{str(error).rstrip('.')}. {kept}{loss}")
            return
        except Exception as error:  # noqa: BLE001 - whatever a server, a database or a network does
            text = f"{storage.hide_secrets(uri)} does not answer ({short(error)}); start it, or set tracking.uri"
            yield Finding(level, "mlflow", f"{text}. Training would continue and send its metrics later{loss}")
            return
        yield Finding("ok", "mlflow", f"{storage.hide_secrets(uri)} answers")
        if elsewhere:
            yield Finding("warn", "artifacts", describe_elsewhere(elsewhere, uri))
        registry = registry_of(uri)
        registry_name = "" if registry == uri else f"{storage.hide_secrets(registry)} (MLFLOW_REGISTRY_URI) "
        name = f"clozeworks-doctor-{secrets.token_hex(4)}"
        try:
            client.create_registered_model(name)
            client.delete_registered_model(name)
        except Exception as error:  # noqa: BLE001 - as above
            problem = f"cannot be written ({short(error)}); check the permissions of this user"
            yield Finding(level, "registry", f"{registry_name}{problem}")
        else:
            yield Finding("ok", "registry", f"{registry_name}accepts models")


def describe_elsewhere(experiments: Sequence[tuple[str, Path]], uri: str) -> str:
    """Name the experiments of an sqlite database whose files are not beside it, and what follows from that."""
    named = ", ".join(f"{name} in {folder}" for name, folder in experiments[:MAX_EXPERIMENTS])
    more = f" and {len(experiments) - MAX_EXPERIMENTS} more" if len(experiments) > MAX_EXPERIMENTS else ""
    return (
        f"the files of runs and registered models of these experiments are not beside their database: {named}{more}. "
        f"Keep these directories as long as the models are used. A new experiment has its files in {artifact_root(uri)}"
    )


def check_store(config: RunConfig) -> Iterator[Finding]:
    """Check that a small file can be written to the checkpoint store, read back and removed."""
    url = config.checkpoint.upload_to
    if url is None:
        yield Finding("ok", "store", "not configured (checkpoint.upload_to)")
        return
    probe, data = storage.join(url, f"doctor-{secrets.token_hex(4)}"), b"probe"
    try:
        storage.write_bytes(probe, data)
        read = storage.read_bytes(probe)
        storage.remove(probe)
    except UserError as error:
        text = str(error).replace(RESUME, "fix the store, or set checkpoint.upload_to to another folder or bucket")
        yield Finding("fail", "store", text)
        return
    if read != data:
        yield Finding(
            "fail", "store", f"{storage.redact(url)} returned other bytes than were written; use another store"
        )
    else:
        yield Finding("ok", "store", f"{storage.redact(url)} can be written, read and cleared")


def check_collective(world_size: int, device_type: str) -> Iterator[Finding]:
    """Measure an all-reduce between processes of this machine, at most one for each of its GPUs."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    world_size = min(world_size, torch.cuda.device_count() if device_type == "cuda" else MAX_SPAWNED_RANKS)
    if world_size < 2:
        yield Finding("ok", "collective", "one rank: no collective needed")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command += ["-m", "trainer.preflight.service_checks", backend]
    ranks = f"{counted(world_size, 'rank')} over {backend}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COLLECTIVE_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding("fail", "collective", f"{ranks} did not end in {COLLECTIVE_SECONDS} s; see NCCL_DEBUG=INFO")
        return
    yield judge_collective([done], ranks)


def judge_collective(done: Sequence[subprocess.CompletedProcess[str]], who: str, prefix: str = "") -> Finding:
    """Report the measurement that rank 0 printed, or the error of the first launcher that failed."""
    results = [line for one in done for line in one.stdout.splitlines() if line.startswith("{")]
    if results and all(one.returncode == 0 for one in done):
        return Finding("ok", "collective", prefix + describe_bandwidth(json.loads(results[-1])))
    errors = (one.stderr.strip().splitlines() for one in done if one.returncode != 0)
    message = next((lines[-1] for lines in errors if lines), "no message")
    text = f"{who} failed: {message[:MAX_MESSAGE_LENGTH]}; set NCCL_DEBUG=INFO, check firewalls and interfaces"
    return Finding("fail", "collective", text)


def describe_bandwidth(result: dict[str, float | int | str]) -> str:
    """Return the figures of `measure_all_reduce` in words."""
    ranks = f"{counted(int(result['world_size']), 'rank')} over {result['backend']}"
    speed = f"{result['seconds']:.3f} s, {result['gigabytes_per_second']:.2f} GB/s per rank"
    return f"{ranks}: all-reduce of {COLLECTIVE_BYTES >> 20} MiB in {speed}"


def measure_all_reduce(backend: str) -> dict[str, float | int | str]:
    """Measure one all-reduce in the current group; the bandwidth counts what each rank sends in a ring."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    values = torch.full((COLLECTIVE_BYTES // 4,), float(rank), device=device)
    torch.distributed.all_reduce(values)
    assert float(values[0]) == world_size * (world_size - 1) / 2, "the sum is wrong"
    if backend == "nccl":
        torch.cuda.synchronize(device)
    started_at = time.perf_counter()
    torch.distributed.all_reduce(values)
    if backend == "nccl":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started_at
    sent = 2 * (world_size - 1) / world_size * COLLECTIVE_BYTES
    speed = sent / seconds / 1e9
    return {"world_size": world_size, "backend": backend, "seconds": seconds, "gigabytes_per_second": speed}


def _main() -> None:
    backend = sys.argv[1]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    launcher = os.environ["MASTER_ADDR"]
    if (interface := interface_towards(launcher, launcher)) is not None:  # as a run's ranks find it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.distributed.init_process_group(backend)
    result = measure_all_reduce(backend)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
