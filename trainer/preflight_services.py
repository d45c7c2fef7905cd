"""Checks of what a run talks to: MLflow, the other hosts, the other ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed

from data_prep.errors import UsageError
from trainer.config import RunConfig
from trainer.mlflow_server import connect, redact, request_limits, resolve_tracking_uri
from trainer.preflight import LARGEST_SKEW_SECONDS, Finding

PACKAGES = ("torch", "deepspeed", "clozeworks")
PROBE = (
    "import importlib.metadata as m, json, sys, time; "
    f"print(json.dumps([sys.version.split()[0], [m.version(p) for p in {PACKAGES!r}], time.time()]))"
)
"""What is run on every host; it imports no package, so it takes as long as the connection."""

SSH_SECONDS = 20
REQUEST_SECONDS = 10
COLLECTIVE_BYTES = 64 << 20
_HOST_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def check_mlflow(config: RunConfig) -> Iterator[Finding]:
    """That the tracking server answers and that its registry takes and gives up a model's name."""
    uri = resolve_tracking_uri(config.tracking.uri)
    client = connect(uri)
    with request_limits(max_retries=0, timeout_seconds=REQUEST_SECONDS):
        try:
            client.search_experiments(max_results=1)
        except Exception as error:  # whatever a server, a database or a network does
            text = f"{redact(uri)} does not answer ({first_line(error)}); start it, or set tracking.uri"
            yield Finding("warn", "mlflow", f"{text}. Training would go on and send its points later")
            return
        yield Finding("ok", "mlflow", f"{redact(uri)} answers")
        name = f"clozeworks-doctor-{secrets.token_hex(4)}"
        try:
            client.create_registered_model(name)
            client.delete_registered_model(name)
        except Exception as error:  # as above
            yield Finding(
                "warn", "registry", f"cannot be written ({first_line(error)}); see to the rights of this user"
            )
        else:
            yield Finding("ok", "registry", "takes models")


def read_hostfile(path: str) -> dict[str, int]:
    """Slots by host of a DeepSpeed hostfile.

    Raises:
        UsageError: it is missing (the deepspeed launcher would only warn, and train on one node), or a line is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"hostfile {path} cannot be read ({error.strerror}); the launcher would use one node"
        ) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.fullmatch(text)
        if match is None or match[1] in hosts:
            raise UsageError(f"hostfile {path}, line {number}: {text!r} is not 'HOST slots=N', each host once; mend it")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UsageError(f"hostfile {path} names no host; write lines 'HOST slots=N'")
    return hosts


def check_hosts(hosts: dict[str, int]) -> Iterator[Finding]:
    """That each host lets us in by ssh and has the same versions of everything, and the same time."""
    here = [sys.version.split()[0], [importlib.metadata.version(package) for package in PACKAGES]]
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(ask_host, hosts)
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, str):
                text = f"{host}: {answer}; 'ssh {host} {sys.executable} --version' must work without a password"
                yield Finding("fail", "host", text)
                continue
            python, versions, skew = answer
            if [python, versions] != here:
                pairs = zip(("python", *PACKAGES), (python, *versions), (here[0], *here[1]), strict=True)
                other = ", ".join(f"{name} {there} (here {ours})" for name, there, ours in pairs if there != ours)
                yield Finding("fail", "host", f"{host} has {other}; install the same versions on every host")
            elif abs(skew) > LARGEST_SKEW_SECONDS:
                yield Finding(
                    "warn", "host", f"{host}: its clock is {skew:+.1f} s off; set the clocks by a time server"
                )
            else:
                yield Finding("ok", "host", f"{host}: same versions, clock {skew:+.1f} s")


def ask_host(host: str) -> tuple[str, list[str], float] | str:
    """(Python, versions, clock difference in seconds) of a host, or what went wrong."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS // 2}"]
    extra = os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()  # as the launcher's own connections
    command = ["ssh", *options, *extra, host, shlex.join([sys.executable, "-c", PROBE])]
    before = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SSH_SECONDS)
    except FileNotFoundError:
        return "there is no ssh on this machine"
    except subprocess.TimeoutExpired:
        return f"no answer in {SSH_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    try:
        python, versions, clock = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return f"an answer that is none: {done.stdout[:100]!r}"
    return python, versions, clock - (before + time.time()) / 2


def check_collective(world_size: int, device_type: str) -> Iterator[Finding]:
    """All-reduce between processes of this machine, and its bandwidth."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    if world_size < 2:
        yield Finding("ok", "collective", "one rank: nothing to reduce")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command += ["-m", "trainer.preflight_services", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding(
            "fail", "collective", f"{world_size} ranks over {backend} did not end in 120 s; see NCCL_DEBUG=INFO"
        )
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        yield Finding("fail", "collective", f"{world_size} ranks over {backend} failed: {said}; set NCCL_DEBUG=INFO")
        return
    yield Finding("ok", "collective", describe_bandwidth(json.loads(lines[-1])))


def describe_bandwidth(result: dict[str, float | int | str]) -> str:
    """`measure_all_reduce`'s figures in words."""
    return (
        f"{result['world_size']} ranks over {result['backend']}: all-reduce of {COLLECTIVE_BYTES >> 20} MiB in "
        f"{result['seconds']:.3f} s, {result['gigabytes_per_second']:.2f} GB/s a rank"
    )


def measure_all_reduce(backend: str) -> dict[str, float | int | str]:
    """The time of one all-reduce in the group that is there; bandwidth counts what each rank sends in a ring."""
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


def first_line(error: Exception) -> str:
    """What an error says first, without secrets."""
    return redact((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]


def _main() -> None:
    backend = sys.argv[1]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    result = measure_all_reduce(backend)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
