"""Print a Kubeflow TrainJob with its runtime, for `kubectl apply -f -`.

    clozeworks train-job --name bert-large --image registry.example.org/clozeworks:0.2 \\
        --nodes 4 --gpus 8 --claim training-data:/data -- \\
        --config bert_large data.shards=/data/shards output_dir=/data/runs/bert_large | kubectl apply -f -

The arguments after -- are those of launch/pretrain.py. The cluster needs Kubeflow Trainer 2 (API version
trainer.kubeflow.org/v1alpha1) with JobSet; launch/Dockerfile builds the image. The ranks save before a pod is moved.
All pods restart and resume from the newest checkpoint after exit status 75 (stopped after saving), 76 (a rank was
lost), 134, 135, 137 and 139 (a rank crashed or was killed), and after an eviction or the loss of a host. After any
other status the TrainJob fails, because the next attempt would end in the same way. A TrainJob cannot be changed:
delete it before you apply another one with the same name.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from data_prep.base.arguments import CommandParser, at_least
from data_prep.base.errors import UsageError, run_command
from data_prep.base.known_secrets import secrets_of
from data_prep.base.load_settings import find_config
from data_prep.base.urls import has_password
from data_prep.base.yaml_values import to_text
from launch.options import command_parser
from trainer.config.run_config import RunConfig

PYTHON = "/srv/clozeworks/.venv/bin/python"
PRETRAIN = "/srv/clozeworks/launch/pretrain.py"
RANKS = "/srv/clozeworks/launch/ranks.py"

RESTARTED = (75, 76, 134, 135, 137, 139)
"""Exit statuses after which a run resumes, as in launch/slurm/pretrain.sh; ascending, as Kubernetes requires."""

# The signal that makes the ranks save would kill torchrun; children inherit the signals that a shell ignores.
START = "trap '' USR1; exec \"$@\""
# Because of the brackets the pattern does not match the command line of its own shell.
SAVE = "pkill -USR1 -f '[l]aunch/pretrain.py'; while pgrep -f '[l]aunch/pretrain.py' >/dev/null; do sleep 1; done"

# Trainer finds the container by its name and the job by its label (pkg/constants of kubeflow/trainer); pods are
# called NAME-node-0-INDEX-abcde, in at most 63 characters (pkg/webhooks/jobset_webhook.go of kubernetes-sigs/jobset).
_NODE = "node"
_TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,43}[a-z0-9])?")
_MAX_NODES = 10_000
_MAX_ARGUMENTS = 128  # limit of a TrainJob's command line
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]|e[0-9]+)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_MOUNT_PATH = re.compile(r"/[^:]*")


def main() -> None:
    parser = command_parser("train_job.py", __doc__)
    parser.add_argument(
        "--name", required=True, help="name of the job: at most 45 lowercase letters, digits and hyphens"
    )
    parser.add_argument("--image", required=True, help="image built from launch/Dockerfile, with its registry")
    parser.add_argument("--nodes", type=at_least(1), default=1, metavar="N", help="pods (default %(default)s)")
    parser.add_argument("--gpus", type=at_least(1), default=8, metavar="N", help="GPUs per pod (default %(default)s)")
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="volume claim to mount; repeat it for several",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="secret with variables such as AWS_..., MLFLOW_...; repeat it for several",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable; repeat it for several"
    )
    parser.add_argument("--namespace", default="default", help="namespace (default %(default)s)")
    parser.add_argument("--memory", default="64Gi", help="memory per pod (default %(default)s)")
    parser.add_argument("--cpus", type=at_least(1), metavar="N", help="CPUs per pod (default: 8 per GPU)")
    parser.add_argument(
        "--grace",
        type=at_least(1),
        default=600,
        metavar="SECONDS",
        help="time to save before a pod is killed (default %(default)s)",
    )
    parser.add_argument(
        "--restarts",
        type=at_least(0),
        default=100,
        metavar="N",
        help="maximum number of restarts (default %(default)s)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and the arguments of pretrain.py")
    options = parser.parse_args()
    print(to_text(*manifests(options), width=120), end="")


def manifests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the TrainingRuntime (how pods run and when they restart), then the TrainJob (what they run).

    Raises:
        UsageError: an option is invalid.
    """
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    _check_options(options, arguments)
    claims = dict(_pair(claim, ":", "--claim") for claim in options.claim)
    runtime_ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name}
    specs = {
        "TrainingRuntime": _runtime(options, claims),
        "TrainJob": {"runtimeRef": runtime_ref, "trainer": _trainer(options, arguments)},
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": kind,
            "metadata": {"name": options.name, "namespace": options.namespace},
            "spec": spec,
        }
        for kind, spec in specs.items()
    ]


def _runtime(options: argparse.Namespace, claims: dict[str, str]) -> dict[str, Any]:
    job = {
        "backoffLimit": 0,  # the first failed pod ends the attempt: the other ranks cannot continue without it
        "podFailurePolicy": {
            "rules": [
                # The first matching rule decides, so an evicted pod counts as a failure whatever its status.
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _NODE, "operator": "NotIn", "values": list(RESTARTED)},
                },
            ]
        },
        "template": {"spec": _pod(options, claims)},
    }
    failure_policy = {
        "maxRestarts": options.restarts,
        # FailJob above has this reason; a pod that counts as a failure has another, after which all pods restart.
        "rules": [{"name": "notResumable", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    replicated_job = {"name": _NODE, "template": {"metadata": {"labels": _TRAINER_LABEL}, "spec": job}}
    return {
        # torch: every container gets the PET_ variables, from which torchrun takes nodes, ranks and the first host.
        "mlPolicy": {"numNodes": options.nodes, "torch": {}},
        "template": {"spec": {"failurePolicy": failure_policy, "replicatedJobs": [replicated_job]}},
    }


def _pod(options: argparse.Namespace, claims: dict[str, str]) -> dict[str, Any]:
    container = {
        "name": _NODE,
        "envFrom": [{"secretRef": {"name": name}} for name in options.secret],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", SAVE]}}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": claim, "mountPath": path} for claim, path in claims.items()),
        ],
    }
    volumes = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # the loader's workers pass batches in it
        *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims),
    ]
    return {
        "restartPolicy": "Never",  # required by podFailurePolicy
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
        "volumes": volumes,
    }


def _trainer(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    environment = [_pair(env, "=", "--env") for env in options.env]
    resources = {
        "nvidia.com/gpu": options.gpus,
        "memory": options.memory,
        "cpu": options.cpus or 8 * options.gpus,
    }
    return {
        "image": options.image,
        "command": ["sh", "-c", START, "sh"],
        "args": [PYTHON, RANKS, PRETRAIN, *map(_literal, arguments)],  # torchrun itself always ends with status 1
        "env": [{"name": name, "value": _literal(value)} for name, value in environment],
        "numNodes": options.nodes,
        "numProcPerNode": options.gpus,
        "resourcesPerNode": {"limits": resources, "requests": dict(resources)},
    }


def _literal(text: str) -> str:
    """Return a text as Kubernetes takes it without change: it replaces `$(NAME)` and `$$` in arguments and values."""
    return text.replace("$", "$$")


def _check_options(options: argparse.Namespace, arguments: list[str]) -> None:
    """Check what the API server would refuse only when the manifests are applied, and that no secret is visible.

    Raises:
        UsageError: an option is invalid.
    """
    _check("--name", options.name, _NAME, "at most 45 lowercase letters, digits and hyphens, a letter first")
    _check("--namespace", options.namespace, _LABEL, "at most 63 lowercase letters, digits and hyphens")
    _check("--memory", options.memory, _QUANTITY, "a number of bytes such as 64Gi or 500G")
    if options.nodes > _MAX_NODES:
        raise UsageError(
            f"--nodes {options.nodes} exceeds the {_MAX_NODES} nodes that pod names allow",
            fix=f"give at most {_MAX_NODES}",
            code="too-many-nodes",
        )
    for secret in options.secret:
        _check("--secret", secret, _SUBDOMAIN, "lowercase letters, digits, hyphens and dots")
    if not arguments:
        raise UsageError("no arguments for pretrain.py", fix="give them after --", code="missing-arguments")
    if len(arguments) > _MAX_ARGUMENTS - 3:
        raise UsageError(
            f"a TrainJob takes at most {_MAX_ARGUMENTS - 3} arguments of pretrain.py, got {len(arguments)}",
            fix="write settings into the configuration file of the run",
            code="too-many-arguments",
        )
    _check_config(arguments)
    for claim, path in (_pair(claim, ":", "--claim") for claim in options.claim):
        _check("--claim", claim, _LABEL, "at most 63 lowercase letters, digits and hyphens before the colon")
        _check("--claim", path, _MOUNT_PATH, "an absolute path after the colon, without a second colon")
    names = [claim.partition(":")[0] for claim in options.claim]
    if len(set(names)) < len(names):
        raise UsageError(
            f"--claim names {max(names, key=names.count)} twice", fix="mount a claim once", code="claim-mounted-twice"
        )
    environment = dict(_pair(env, "=", "--env") for env in options.env)
    if len(environment) < len(options.env):
        names = [env.partition("=")[0] for env in options.env]
        raise UsageError(
            f"--env sets {max(names, key=names.count)} twice", fix="give a variable once", code="variable-set-twice"
        )
    for name in environment:
        _check("--env", name, _VARIABLE, "letters, digits and _ as the variable's name")
        if name.startswith("PET_"):
            raise UsageError(
                f"--env {name} is set by Kubeflow Trainer",
                fix="remove it, and give --nodes and --gpus",
                code="variable-of-kubeflow",
            )
    visible = [*secrets_of(environment), *(word.partition("=")[0] for word in arguments if has_password(word))]
    if visible:
        raise UsageError(
            f"{', '.join(visible)} contains a secret that everyone who may read the job would see",
            fix="put it into a Secret, and name the Secret with --secret",
            code="secret-in-arguments",
        )


def _check(option: str, value: str, pattern: re.Pattern[str], rule: str) -> None:
    """Check a value against the API server's rule for it."""
    if not pattern.fullmatch(value):
        raise UsageError(
            f"Kubernetes does not accept {option} {value!r}", fix=f"give {rule}", code="invalid-for-kubernetes"
        )


def _check_config(arguments: list[str]) -> None:
    """Check that a --config without a folder is a preset or a file of the checkout, which the image contains too."""
    parser = CommandParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?", default="")
    config = parser.parse_known_args(arguments)[0].config
    if config and "/" not in config:
        find_config(config, RunConfig)


def _pair(text: str, separator: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name or not value:
        raise UsageError(f"{option} {text!r} is not a pair", fix=f"give NAME{separator}VALUE", code="invalid-pair")
    return name, value


if __name__ == "__main__":
    run_command(main)
