from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from data_prep.errors import UsageError
from launch.kubernetes.pytorch_job import main

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "kubernetes" / "pytorch_job.py"


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
    manifest = yaml.safe_load(job("--", "--config", "bert_large").stdout)
    assert list(manifest["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_the_start_survives_the_signal_on_which_the_ranks_save():
    from launch.kubernetes.pytorch_job import START

    done = subprocess.run(
        ["sh", "-c", START, "sh", "sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True
    )
    assert done.stdout == "alive\n"


def test_the_hook_that_has_the_ranks_save_does_not_find_its_own_shell():
    """A hook that signals itself ends at once, and the pod is told to end while its ranks still save."""
    from launch.kubernetes.pytorch_job import PRETRAIN, SAVE

    patterns = re.findall(r"-f '([^']+)'", SAVE)
    assert len(patterns) == 2 and SAVE.count("-f ") == 2
    for pattern in patterns:
        assert re.search(pattern, f"python {PRETRAIN} --config x") and not re.search(pattern, f"sh -c {SAVE}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give them after --"),
        (["--nodes", "0", "--", "x"], "no whole number of 1 or more"),
        (["--claim", "x", "--", "y"], "NAME:VALUE"),
        (["--env", "AWS_SECRET_ACCESS_KEY=correct-horse", "--", "y"], "AWS_SECRET_ACCESS_KEY holds a secret"),
        (["--", "tracking.uri=https://me:word@host"], "tracking.uri holds a secret"),
        (["--", "--config", "bert_larg"], "configuration bert_larg does not exist; give a YAML file or one of the"),
    ],
)
def test_mistakes_are_told(arguments, said):
    done = job(*arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout
    assert "horse" not in done.stderr and "word@" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--name", "Bert"),
        ("--namespace", "A b"),
        ("--memory", "lots"),
        ("--memory", "64GiB"),
        ("--secret", "my keys"),
        ("--claim", "X Y:/data"),
        ("--claim", "data:rel"),
        ("--env", "1 A=b"),
    ],
)
def test_what_the_api_server_would_refuse_is_told(option, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pytorch_job.py", "--name", "bert", "--image", "i", option, value, "--", "y"])
    with pytest.raises(UsageError, match=f"{option} .* is not what Kubernetes takes there; give "):
        main()
    assert not capsys.readouterr().out


class Strict(BaseModel):
    """A part of the schema: no other fields, and no type that only looks like the right one."""

    model_config = ConfigDict(extra="forbid", strict=True)


Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]*)?([KMGTPE]i|[numkMGTPE])?$")] | int
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class Variable(Strict):
    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: str


class Resources(Strict):
    limits: dict[str, Quantity]
    requests: dict[str, Quantity]


class Mount(Strict):
    name: DnsLabel
    mountPath: Annotated[str, Field(pattern="^/[^:]*$")]


class Container(Strict):
    name: Literal["pytorch"]
    image: str
    command: list[str]
    args: list[str]
    env: list[Variable]
    envFrom: list[dict[Literal["secretRef"], dict[Literal["name"], str]]]
    resources: Resources
    lifecycle: dict[Literal["preStop"], dict[Literal["exec"], dict[Literal["command"], list[str]]]]
    volumeMounts: list[Mount]


class Volume(Strict):
    name: DnsLabel
    emptyDir: dict[Literal["medium"], Literal["Memory"]] | None = None
    persistentVolumeClaim: dict[Literal["claimName"], str] | None = None


class PodSpec(Strict):
    terminationGracePeriodSeconds: int
    containers: Annotated[list[Container], Field(min_length=1, max_length=1)]
    volumes: list[Volume]


class Replica(Strict):
    replicas: int
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: dict[Literal["spec"], PodSpec]


class RunPolicy(Strict):
    backoffLimit: int
    cleanPodPolicy: Literal["", "All", "Running", "None"]


class Spec(Strict):
    nprocPerNode: str
    runPolicy: RunPolicy
    pytorchReplicaSpecs: dict[Literal["Master", "Worker"], Replica]


class Metadata(Strict):
    name: DnsLabel
    namespace: DnsLabel


class PyTorchJob(Strict):
    """What the operator's CustomResourceDefinition (kubeflow.org/v1) and the API of pods say of the fields in use."""

    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: Spec


def test_every_field_is_one_of_the_schema_and_of_its_type():
    done = job("--nodes", "2", "--claim", "data:/data", "--secret", "keys", "--env", "A=b", "--memory", "1.5Ti",
               "--", "--config", "bert_large")  # fmt: skip
    PyTorchJob.model_validate(yaml.safe_load(done.stdout))
    wrong = yaml.safe_load(done.stdout)
    wrong["spec"]["nprocPerNode"] = 8
    with pytest.raises(ValueError, match="nprocPerNode"):
        PyTorchJob.model_validate(wrong)


def test_the_image_copies_every_package_and_what_the_templates_call():
    text = (REPOSITORY / "launch" / "Dockerfile").read_text()
    for package in ("configs", "data_prep", "trainer", "launch"):
        assert f"COPY {package} {package}" in text
    from launch.kubernetes.pytorch_job import PRETRAIN, PYTHON

    assert f"WORKDIR {Path(PRETRAIN).parents[1]}" in text and PYTHON.startswith(str(Path(PRETRAIN).parents[1]))
    assert "procps" in text and "environment.sh" in text
