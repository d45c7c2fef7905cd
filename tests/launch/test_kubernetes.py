from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "kubernetes" / "pytorch_job.py"
pytestmark = pytest.mark.spawn


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--name", "bert", "--image", "registry/clozeworks:1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)})


def test_the_manifest_holds_what_the_operator_asks_for():
    done = job("--nodes", "4", "--gpus", "2", "--claim", "data:/data", "--secret", "keys", "--env", "NCCL_DEBUG=WARN",
               "--", "--config", "bert_large", "output_dir=/data/it's here")  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert manifest["spec"]["nprocPerNode"] == "2" and manifest["spec"]["runPolicy"]["backoffLimit"] == 100
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    for replica in replicas.values():
        assert replica["restartPolicy"] == "OnFailure"
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"] == "registry/clozeworks:1"
        assert container["args"][-3:] == ["--config", "bert_large", "output_dir=/data/it's here"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert (
            pod["terminationGracePeriodSeconds"] == 600
            and "-USR1" in container["lifecycle"]["preStop"]["exec"]["command"][2]
        )
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} == {"shared-memory", "data"}


def test_one_node_is_a_master_alone():
    manifest = yaml.safe_load(job("--", "--config", "x").stdout)
    assert list(manifest["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_the_start_survives_the_signal_on_which_the_ranks_save():
    from launch.kubernetes.pytorch_job import START

    done = subprocess.run(
        ["sh", "-c", START, "sh", "sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True
    )
    assert done.stdout == "alive\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give them after --"),
        (["--nodes", "0", "--", "x"], "count from 1"),
        (["--claim", "x", "--", "y"], "NAME:VALUE"),
    ],
)
def test_mistakes_are_told(arguments, said):
    done = job(*arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_the_image_copies_every_package_and_what_the_templates_call():
    text = (REPOSITORY / "launch" / "Dockerfile").read_text()
    for package in ("configs", "data_prep", "trainer", "launch"):
        assert f"COPY {package} {package}" in text
    from launch.kubernetes.pytorch_job import PRETRAIN, PYTHON

    assert f"WORKDIR {Path(PRETRAIN).parents[1]}" in text and PYTHON.startswith(str(Path(PRETRAIN).parents[1]))
    assert "procps" in text and "environment.sh" in text
