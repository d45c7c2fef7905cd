from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

from data_prep.base.errors import UsageError
from launch.pretrain import check_volumes
from tests.support.error_codes import coded
from tests.support.free_ports import free_port
from tests.support.toy_run import CONFIG as RUN_CONFIG

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = "/srv/clozeworks"


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    """The runtime and the job of the template."""
    text = (REPOSITORY / "launch" / "kubernetes" / "train_job.yaml").read_text(encoding="utf-8")
    runtime, train_job = yaml.safe_load_all(text)
    return runtime, train_job


def parts(runtime: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of a runtime: the specifications of its JobSet, its job and its pods."""
    job_set = runtime["spec"]["template"]["spec"]
    (replicated,) = job_set["replicatedJobs"]
    return job_set, replicated["template"]["spec"], replicated["template"]["spec"]["template"]["spec"]


def test_runtime_and_job_have_the_fields_that_the_trainer_reads():
    """Names and labels are those of pkg/constants of kubeflow/trainer."""
    runtime, train_job = manifests()
    for manifest, kind in ((runtime, "TrainingRuntime"), (train_job, "TrainJob")):
        assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", kind)
        assert manifest["metadata"] == {"name": "bert-large", "namespace": "default"}
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "bert-large"}  # fmt: skip
    assert runtime["spec"]["mlPolicy"] == {"torch": {}}
    job_set, _, pod = parts(runtime)
    replicated = job_set["replicatedJobs"][0]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in pod["containers"]] == ["node"]


def test_the_job_runs_the_ranks_on_the_gpus_of_every_node():
    trainer = manifests()[1]["spec"]["trainer"]
    assert trainer["args"][:4] == [
        f"{IMAGE}/.venv/bin/python", f"{IMAGE}/launch/ranks.py", f"{IMAGE}/launch/pretrain.py", "--config"]  # fmt: skip
    resources = trainer["resourcesPerNode"]
    assert (
        resources["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
        and resources["requests"] == (resources["limits"])
    )


def test_the_pods_save_before_they_end_and_see_volumes_and_secrets():
    pod = parts(manifests()[0])[2]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["envFrom"] == [{"secretRef": {"name": "training-keys"}}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} == {"shared-memory", "data"}
    # A hook that finds its own shell signals itself and ends at once, while the ranks still save.
    _, _, save = container["lifecycle"]["preStop"]["exec"]["command"]
    patterns = re.findall(r"-f '([^']+)'", save)
    assert len(patterns) == 2 and save.startswith("pkill -USR1 ") and "\n" not in save
    for pattern in patterns:
        assert re.search(pattern, f"python {IMAGE}/launch/pretrain.py --config x")
        assert not re.search(pattern, f"sh -c {save}")


def test_the_probe_checks_the_run_whose_output_dir_is_in_a_volume():
    runtime, train_job = manifests()
    (container,) = parts(runtime)[2]["containers"]
    command = container["readinessProbe"]["exec"]["command"]
    settings = train_job["spec"]["trainer"]["args"][2:]
    output_dir = next(word for word in settings if word.startswith("output_dir=")).removeprefix("output_dir=")
    assert command == [f"{IMAGE}/.venv/bin/python", f"{IMAGE}/launch/status.py", "--check", output_dir]
    check_volumes(RUN_CONFIG.model_copy(update={"output_dir": output_dir}), mounts(container))
    with pytest.raises(UsageError, check=coded("output-dir-outside-volumes")):
        check_volumes(RUN_CONFIG.model_copy(update={"output_dir": "/srv/runs"}), mounts(container))


def mounts(container: dict[str, Any]) -> list[Path]:
    return [Path(mount["mountPath"]) for mount in container["volumeMounts"]]


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


def test_a_run_that_can_resume_is_restarted_and_no_other():
    runtime = manifests()[0]
    _, job, pod = parts(runtime)
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses podFailurePolicy with any other
    resumable = {75, 76, 134, 135, 137, 139}
    found = {status: outcome(runtime, status) for status in range(1, 256)}
    assert {status for status, action in found.items() if action == "RestartJobSet"} == resumable
    assert set(found.values()) == {"RestartJobSet", "FailJobSet"}
    assert outcome(runtime, 143, disrupted=True) == "RestartJobSet"
    values = job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert values == sorted(set(values))  # Kubernetes refuses any other order
    text = (REPOSITORY / "launch" / "slurm" / "pretrain.sh").read_text()
    assert f"case $status in {' | '.join(map(str, values))}) ;;" in text


@pytest.mark.long
@pytest.mark.spawn
def test_the_variables_of_trainer_report_torchrun_nodes_ranks_and_the_first_host(tmp_path, forking_python):
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
    trainer = manifests()[1]["spec"]["trainer"]
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
    command = manifests()[1]["spec"]["trainer"]["command"]
    done = subprocess.run([*command, "sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True)
    assert done.stdout == "alive\n"


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
def test_every_field_is_one_of_the_schema_and_of_its_type():
    assert refusals(*manifests()) == []


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
        changed = manifests()
        change(*changed)
        assert len(refusals(*changed)) == 1


def test_the_image_copies_every_package_and_what_the_templates_call():
    text = (REPOSITORY / "launch" / "Dockerfile").read_text()
    for package in ("configs", "data_prep", "trainer", "launch"):
        assert f"COPY {package} {package}" in text
    assert f"WORKDIR {IMAGE}\n" in text
    assert "procps" in text and "environment.sh" in text
