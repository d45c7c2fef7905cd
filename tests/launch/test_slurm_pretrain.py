"""launch/slurm/pretrain.sh against stand-ins for sbatch, srun and scontrol that run the job at once, on two "nodes"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "slurm" / "pretrain.sh"

_STUBS = {
    "sbatch": 'printf "%s\\n" "$@" >"$STATE/sbatch"; while [[ $1 == --* ]]; do shift; done\n'
    'cp "$1" "$STATE/slurm_script"; shift\n'
    "export SLURM_CPUS_PER_TASK=$(sed -n s/--cpus-per-task=//p $STATE/sbatch)\n"
    "export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2\n"
    'bash "$STATE/slurm_script" "$@" >"$STATE/log" 2>&1; echo $? >"$STATE/status"; echo "4711;cluster"\n',
    "scontrol": 'if [[ $1 == show ]]; then printf "node1\\nnode2\\n"; else echo "$@" >"$STATE/requeued"; fi\n',
    "srun": 'printf "%s\\n" "$@" >"$STATE/srun"\n'
    "while [[ $1 == --* ]]; do shift; done\n"
    'status=0; for node in 0 1; do SLURM_NODEID=$node "$@" || status=$?; done; exit $status\n',
}
_PYTHON = (
    'if [[ -z ${SLURM_NODEID:-} ]]; then printf "%s\\n" "$@" >>"$CHECKED"; exit $CHECK_STATUS; fi\n'
    'printf "%s\\n" "$MASTER_ADDR" "$@" >"$STATE/node-$SLURM_NODEID"; kill -USR1 $$; exit $RANKS_STATUS\n'
)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    for name, text in {**{f"bin/{name}": text for name, text in _STUBS.items()}, "venv/bin/python": _PYTHON}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)
    (tmp_path / "state").mkdir()
    return {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "STATE": str(tmp_path / "state"),
        "CLOZEWORKS_VENV": str(tmp_path / "venv"),
        "RANKS_STATUS": "0",
        "CHECK_STATUS": "0",
        "CHECKED": str(tmp_path / "checked"),
    }


def pretrain(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def read(environment: dict[str, str], name: str) -> list[str]:
    return Path(environment["STATE"], name).read_text().splitlines()


def test_the_job_asks_for_a_signal_and_starts_torchrun_on_every_node(slurm):
    submitted = pretrain(slurm, "--nodes", "3-4", "--gpus", "4", "--sbatch", "--time=1:00:00", "--",
                         "--config", "a b.yaml", "output_dir=it's here")  # fmt: skip
    assert submitted.returncode == 0 and "job 4711;" in submitted.stdout, submitted.stderr
    options = read(slurm, "sbatch")
    for option in ("--nodes=3-4", "--requeue", "--signal=USR1@300", "--gpus-per-node=4", "--time=1:00:00"):
        assert option in options
    for node in (0, 1):
        words = read(slurm, f"node-{node}")
        assert words[0] == "node1" and words[1] == str(REPOSITORY / "launch" / "ranks.py")
        assert words[words.index("--node_rank") + 1] == str(node) and words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc_per_node") + 1] == "4"
        assert words[-4:] == [
            str(REPOSITORY / "launch" / "pretrain.py"),
            "--config",
            "a b.yaml",
            "output_dir=it's here",
        ]
    assert read(slurm, "status") == ["0"], "SIGUSR1 must not end torchrun"
    assert "--cpus-per-task=32" in read(slurm, "srun"), "which srun takes from nobody else"
    assert not Path(slurm["STATE"], "requeued").exists()


@pytest.mark.parametrize(
    ("status", "requeued"), [("75", True), ("76", True), ("137", True), ("1", False), ("143", False)]
)
def test_a_run_that_can_continue_is_requeued_and_a_failed_or_ended_one_is_not(status, requeued, slurm):
    pretrain(slurm | {"RANKS_STATUS": status}, "--", "--config", "x")
    assert Path(slurm["STATE"], "requeued").exists() is requeued
    assert read(slurm, "status") == ["0" if requeued else status]


def test_after_so_many_requeues_it_ends(slurm):
    pretrain(slurm | {"RANKS_STATUS": "75", "SLURM_RESTART_COUNT": "3"}, "--requeues", "3", "--", "--config", "x")
    assert not Path(slurm["STATE"], "requeued").exists() and read(slurm, "status") == ["75"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "4-", "--", "x"], "--nodes must be N or N-M"),
        (["--nodes", "4-3", "--", "x"], "--nodes 4-3 is not a range"),
        (["--gpus", "none", "--", "x"], "--gpus must be a number from 1"),
        (["--nodes", "4", "--nodes", "5", "--", "x"], "--nodes is given twice"),
        (["--volume", "/nowhere", "--", "x"], "--volume /nowhere is no directory of this host"),
        (["--volume", "/a,/b", "--", "x"], "--volume must be a directory without a comma"),
        (["--grace", "60", "--gpus", "8", "--grace", "60", "--", "x"], "--grace is given twice"),
        (["--config", "x"], "unknown option '--config'"),
        ([], "give them after --"),
    ],
)
def test_mistakes_are_reported_before_anything_is_submitted(slurm, arguments, message):
    result = pretrain(slurm, *arguments)
    assert result.returncode == 2 and message in result.stderr and not list(Path(slurm["STATE"]).iterdir())


def test_settings_are_checked_before_the_job_is_submitted(slurm, tmp_path):
    done = pretrain(slurm, "--nodes", "2-3", "--gpus", "4", "--volume", str(tmp_path), "--", "--config", "x")
    assert done.returncode == 0, done.stderr
    words = Path(slurm["CHECKED"]).read_text().splitlines()
    assert words[1:] == ["--ranks", "8", "--config", "x", "--check-volumes", str(tmp_path)]
    Path(slurm["STATE"], "sbatch").unlink()
    assert pretrain(slurm | {"CHECK_STATUS": "2"}, "--", "--config", "x").returncode == 2
    assert not Path(slurm["STATE"], "sbatch").exists()


@pytest.mark.long
def test_help_and_dry_run_submit_nothing(slurm):
    assert "--nodes 3-4" in pretrain(slurm, "--help").stdout
    slurm = slurm | {"CLOZEWORKS_VENV": sys.prefix}
    planned = pretrain(slurm, "--nodes", "2-3", "--gpus", "1", "--dry-run", "--", "--config", "tiny_cpu",
                       "output_dir=a b", "deepspeed={gradient_accumulation_steps: 1}")  # fmt: skip
    assert (
        r"output_dir=a\ b" in planned.stdout
        and "status: clozeworks status 'a b'" in planned.stdout
        and planned.returncode == 0
    ), planned.stderr
    refused = pretrain(slurm, "--dry-run", "--", "--config", "bert_largee")
    assert refused.returncode == 2 and "configuration bert_largee does not exist" in refused.stderr
    assert not list(Path(slurm["STATE"]).iterdir())
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
