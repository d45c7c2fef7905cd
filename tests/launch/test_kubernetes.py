from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

from data_prep.base.errors import UsageError
from launch.kubernetes.train_job import main
from tests.support.error_codes import coded
from tests.support.free_ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "kubernetes" / "train_job.py"


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--name", "bert", "--image", "registry/clozeworks:1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)})


def manifests(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The runtime and the job that are printed."""
    done = job(*arguments)
    assert done.returncode == 0, done.stderr
    runtime, train_job = yaml.safe_load_all(done.stdout)
    return runtime, train_job


def parts(runtime: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of a runtime: the specifications of its JobSet, its job and its pods."""
    job_set = runtime["spec"]["template"]["spec"]
    (replicated,) = job_set["replicatedJobs"]
    return job_set, replicated["template"]["spec"], replicated["template"]["spec"]["template"]["spec"]


ALL_OPTIONS = ("--nodes", "4", "--gpus", "2", "--claim", "data:/data", "--secret", "keys", "--env", "NCCL_DEBUG=WARN",
               "--memory", "1.5Ti", "--", "--config", "bert_large", "output_dir=/data/it's here")  # fmt: skip


@pytest.mark.long
def test_the_runtime_and_the_job_hold_what_trainer_looks_for():
    """Names and labels are those of pkg/constants of kubeflow/trainer."""
    runtime, train_job = manifests(*ALL_OPTIONS)
    for manifest, kind in ((runtime, "TrainingRuntime"), (train_job, "TrainJob")):
        assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", kind)
        assert manifest["metadata"] == {"name": "bert", "namespace": "default"}
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "bert"}  # fmt: skip
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4, "torch": {}}
    job_set, _, pod = parts(runtime)
    replicated = job_set["replicatedJobs"][0]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in pod["containers"]] == ["node"]


@pytest.mark.long
def test_the_job_runs_the_ranks_on_the_gpus_of_every_node():
    trainer = manifests(*ALL_OPTIONS)[1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (4, 2, "registry/clozeworks:1")
    assert trainer["args"][1:] == [
        "/srv/clozeworks/launch/ranks.py", "/srv/clozeworks/launch/pretrain.py",
        "--config", "bert_large", "output_dir=/data/it's here"]  # fmt: skip
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 2, "memory": "1.5Ti", "cpu": 16}
    assert trainer["env"] == [{"name": "NCCL_DEBUG", "value": "WARN"}]


@pytest.mark.long
@pytest.mark.fault(
    row="68",
    fault="arguments and values that Kubernetes or a reader of YAML would change",
    required="the pod gets them as typed",
)
def test_row_68_arguments_arrive_in_the_pod_as_typed() -> None:
    typed = ["output_dir=$(HOME)/$x$$y", "tracking.run_name=0o17", "1e3", "y", "3:30", "~/a #b"]
    _, train_job = manifests("--env", "A=1e3$(B)", "--", *typed)
    trainer = train_job["spec"]["trainer"]
    # Kubernetes replaces $(NAME), and writes $$ as $.
    assert [word.replace("$$", "$") for word in trainer["args"][3:]] == typed
    assert all("$(" not in word.replace("$$", "") for word in trainer["args"])
    assert trainer["env"] == [{"name": "A", "value": "1e3$$(B)"}]
    printed = job("--env", "A=1e3", "--", "1e3", "y", "0o17").stdout
    assert all(f"'{word}'" in printed for word in ("1e3", "y", "0o17")), "other readers of YAML take them for texts"


@pytest.mark.long
def test_the_pods_save_before_they_end_and_see_volumes_and_secrets():
    pod = parts(manifests(*ALL_OPTIONS)[0])[2]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert "-USR1" in container["lifecycle"]["preStop"]["exec"]["command"][2]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} == {"shared-memory", "data"}


def outcome(runtime: dict[str, Any], status: int, disrupted: bool = False) -> str:
    """What Kubernetes does after a pod that ended with `status`.

    By the documentation of Job's podFailurePolicy (the first rule that fits decides) and JobSet's failurePolicy (the
    first rule with the reason of the failed job decides, else it restarts all jobs).
    """
    job_set, job, _ = parts(runtime)
    action = "Count"
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        fits_code = codes is not None and (status in codes["values"]) is (codes["operator"] == "In")
        fits_condition = disrupted and {"type": "DisruptionTarget", "status": "True"} in rule.get("onPodConditions", [])
        if fits_code or fits_condition:
            action = rule["action"]
            break
    assert job["backoffLimit"] == 0  # so that a pod that counts fails the job
    reason = {"Count": "BackoffLimitExceeded", "FailJob": "PodFailurePolicy"}[action]
    for rule in job_set["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.long
def test_a_run_that_can_resume_is_restarted_and_no_other():
    runtime = manifests("--restarts", "7", "--", "--config", "bert_large")[0]
    job_set, job, pod = parts(runtime)
    assert job_set["failurePolicy"]["maxRestarts"] == 7
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses podFailurePolicy with any other
    resumable = {75, 76, 134, 135, 137, 139}
    found = {status: outcome(runtime, status) for status in range(1, 256)}
    assert {status for status, action in found.items() if action == "RestartJobSet"} == resumable
    assert set(found.values()) == {"RestartJobSet", "FailJobSet"}
    assert outcome(runtime, 143, disrupted=True) == "RestartJobSet"
    values = job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert values == sorted(set(values))  # Kubernetes refuses any other order


def test_slurm_and_kubernetes_resume_after_the_same_statuses():
    from launch.kubernetes.train_job import RESTARTED

    text = (REPOSITORY / "launch" / "slurm" / "pretrain.sh").read_text()
    assert f"case $status in {' | '.join(map(str, RESTARTED))}) ;;" in text


@pytest.mark.long
@pytest.mark.spawn
def test_the_variables_of_trainer_tell_torchrun_nodes_ranks_and_the_first_host(tmp_path, forking_python):
    """The PET_ variables are those that pkg/runtime/framework/plugins/torch of kubeflow/trainer sets."""
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, sys, time\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR'\n"
        "path = pathlib.Path('new-rank-' + os.environ['RANK'])\n"
        "path.write_text(' '.join(os.environ[name] for name in names))\n"
        "path.rename(path.name.removeprefix('new-'))\n"
        "while len(list(pathlib.Path().glob('rank-*'))) < 4:  # torchrun kills the others once a rank has ended\n"
        "    time.sleep(0.02)\n"
        "sys.exit(75)\n"
    )
    trainer = manifests("--nodes", "2", "--gpus", "2", "--", "--config", "bert_large")[1]["spec"]["trainer"]
    replaced = {"/srv/clozeworks/.venv/bin/python": forking_python,
                "/srv/clozeworks/launch/ranks.py": str(REPOSITORY / "launch" / "ranks.py"),
                "/srv/clozeworks/launch/pretrain.py": "rank.py"}  # fmt: skip
    command = [*trainer["command"], *(replaced.get(word, word) for word in trainer["args"])]
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1",
                 "PET_MASTER_PORT": str(free_port())}  # fmt: skip
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables, "PET_NODE_RANK": str(node)},
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for node in range(2)
    ]  # fmt: skip
    try:
        assert [node.wait(120) for node in nodes] == [75, 75]
    finally:
        for node in nodes:
            node.kill()
    found = [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)]
    assert found == [f"{rank} 4 {rank % 2} 127.0.0.1" for rank in range(4)]


def test_the_start_survives_the_signal_on_which_the_ranks_save():
    from launch.kubernetes.train_job import START

    done = subprocess.run(
        ["sh", "-c", START, "sh", "sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True
    )
    assert done.stdout == "alive\n"


def test_the_hook_that_has_the_ranks_save_does_not_find_its_own_shell():
    """A hook that signals itself ends at once, and the pod is asked to end while its ranks still save."""
    from launch.kubernetes.train_job import PRETRAIN, SAVE

    patterns = re.findall(r"-f '([^']+)'", SAVE)
    assert len(patterns) == 2 and SAVE.count("-f ") == 2
    for pattern in patterns:
        assert re.search(pattern, f"python {PRETRAIN} --config x") and not re.search(pattern, f"sh -c {SAVE}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give them after --"),
        (["--nodes", "0", "--", "x"], "must be a whole number of 1 or more"),
        (["--claim", "x", "--", "y"], "NAME:VALUE"),
        (["--claim", "x:/a", "--claim", "x:/b", "--", "y"], "--claim names x twice"),
        (["--env", "A=1", "--env", "A=2", "--", "y"], "--env sets A twice"),
        (["--memory", "1Gi", "--memory", "2Gi", "--", "y"], "--memory is given twice, 1Gi and 2Gi"),
        (["--", "--config", "bert_base", "--config", "bert_large"], "[option-given-twice]"),
        (["--env", "PET_NNODES=2", "--", "y"], "PET_NNODES is set by Kubeflow Trainer"),
        (["--nodes", "10001", "--", "y"], "give at most 10000"),
        (["--", *(f"a.b={number}" for number in range(126))], "[too-many-arguments]"),
        (["--env", "AWS_SECRET_ACCESS_KEY=correct-horse", "--", "y"], "AWS_SECRET_ACCESS_KEY contains a secret"),
        (["--", "tracking.uri=https://me:word@host"], "tracking.uri contains a secret"),
        (["--", "--config", "bert_larg"], "[missing-config]"),
    ],
)
def test_mistakes_are_reported(arguments, message):
    done = job(*arguments)
    assert done.returncode == 2 and message in done.stderr and not done.stdout
    assert "horse" not in done.stderr and "word@" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--name", "Bert"),
        ("--name", "4bert"),
        ("--name", "b" * 46),
        ("--namespace", "A b"),
        ("--memory", "lots"),
        ("--memory", "64GiB"),
        ("--secret", "my keys"),
        ("--claim", "X Y:/data"),
        ("--claim", "data:rel"),
        ("--env", "1 A=b"),
    ],
)
def test_what_the_api_server_would_refuse_is_reported(option, value, monkeypatch, capsys):
    name = [] if option == "--name" else ["--name", "bert"]
    monkeypatch.setattr(sys, "argv", ["train_job.py", *name, "--image", "i", option, value, "--", "y"])
    with pytest.raises(UsageError, match=option, check=coded("invalid-for-kubernetes")):
        main()
    assert not capsys.readouterr().out


def refusals(runtime: dict[str, Any], train_job: dict[str, Any]) -> list[str]:
    """What the schema of kubeflow_trainer_api, made from the CustomResourceDefinitions, says against two manifests.

    Its classes check the types of fields, of pods and JobSets too, and pass over unknown names: these are missing in
    what they write.
    """
    found = []
    for model, manifest in ((TrainerV1alpha1TrainingRuntime, runtime), (TrainerV1alpha1TrainJob, train_job)):
        try:
            read = model.from_dict(manifest)
        except ValueError as error:
            found.append(str(error))
            continue
        if read is None or read.to_dict() != manifest:
            found.append(f"{manifest['kind']} has a field that the schema lacks")
    return found


@pytest.mark.long
@pytest.mark.parametrize("options", [ALL_OPTIONS, ("--", "--config", "bert_large")])
def test_every_field_is_one_of_the_schema_and_of_its_type(options):
    assert refusals(*manifests(*options)) == []


@pytest.mark.long
def test_the_schema_refuses_other_fields_and_types():
    for change in (
        lambda runtime, train_job: runtime["spec"].update(mlPolicies={}),
        lambda runtime, train_job: parts(runtime)[0]["failurePolicy"].update(maxRestarts="7"),
        lambda runtime, train_job: parts(runtime)[1]["podFailurePolicy"]["rules"][1]["onExitCodes"].pop("operator"),
        lambda runtime, train_job: parts(runtime)[2].update(restartpolicy="Never"),
        lambda runtime, train_job: train_job["spec"].pop("runtimeRef"),
        lambda runtime, train_job: train_job["spec"]["trainer"].update(numProcPerNode="2"),
        lambda runtime, train_job: train_job["spec"]["trainer"].update(gpus=2),
    ):
        changed = manifests(*ALL_OPTIONS)
        change(*changed)
        assert len(refusals(*changed)) == 1


def test_the_image_copies_every_package_and_what_the_templates_call():
    text = (REPOSITORY / "launch" / "Dockerfile").read_text()
    for package in ("configs", "data_prep", "trainer", "launch"):
        assert f"COPY {package} {package}" in text
    from launch.kubernetes.train_job import PRETRAIN, PYTHON

    assert f"WORKDIR {Path(PRETRAIN).parents[1]}" in text and PYTHON.startswith(str(Path(PRETRAIN).parents[1]))
    assert "procps" in text and "environment.sh" in text
