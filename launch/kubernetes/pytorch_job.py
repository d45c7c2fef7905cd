"""Print a Kubeflow PyTorchJob that trains: `python launch/kubernetes/pytorch_job.py ... | kubectl apply -f -`.

    python launch/kubernetes/pytorch_job.py --name bert-large --image registry.example.org/clozeworks:0.1 \\
        --nodes 4 --gpus 8 --claim training-data:/data -- \\
        --config bert_large data.shards=/data/shards output_dir=/data/runs/bert_large

What comes after -- are the arguments of launch/pretrain.py. A pod that ends for whatever reason is started again and
goes on from the newest checkpoint; before a pod is moved it saves. The image is made by launch/Dockerfile.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import yaml

from data_prep.arguments import at_least
from data_prep.errors import UsageError, run_command
from data_prep.files.known_secrets import secrets_of
from data_prep.files.urls import has_password
from data_prep.settings import find_config
from trainer.config import RunConfig

PYTHON = "/srv/clozeworks/.venv/bin/python"
PRETRAIN = "/srv/clozeworks/launch/pretrain.py"

# torchrun would die of the signal on which the ranks save; what a shell ignores, its children ignore too.
START = "trap '' USR1; exec \"$@\""
# The brackets keep the pattern from finding the shell that has it on its own command line.
SAVE = "pkill -USR1 -f '[l]aunch/pretrain.py'; while pgrep -f '[l]aunch/pretrain.py' >/dev/null; do sleep 1; done"

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]|e[0-9]+)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_MOUNT_PATH = re.compile(r"/[^:]*")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pytorch_job.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="name of the job: small letters, digits and hyphens")
    parser.add_argument("--image", required=True, help="image made by launch/Dockerfile, with its registry")
    parser.add_argument("--nodes", type=at_least(1), default=1, metavar="N", help="pods (default %(default)s)")
    parser.add_argument(
        "--gpus", type=at_least(1), default=8, metavar="N", help="GPUs of each pod (default %(default)s)"
    )
    parser.add_argument(
        "--claim", action="append", default=[], metavar="CLAIM:PATH", help="a volume claim, mounted; as often as needed"
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="secret with AWS_, MLFLOW_ ...; as often as needed",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable; as often as needed"
    )
    parser.add_argument("--namespace", default="default", help="namespace (default %(default)s)")
    parser.add_argument("--memory", default="64Gi", help="memory of each pod (default %(default)s)")
    parser.add_argument("--cpus", type=at_least(1), metavar="N", help="CPUs of each pod (default: 8 for each GPU)")
    parser.add_argument(
        "--grace", type=at_least(1), default=600, metavar="SECONDS", help="time to save (default %(default)s)"
    )
    parser.add_argument(
        "--restarts", type=at_least(0), default=100, metavar="N", help="restarts at most (default %(default)s)"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and the arguments of pretrain.py")
    options = parser.parse_args()
    print(yaml.safe_dump(pytorch_job(options), sort_keys=False, width=120), end="")


def pytorch_job(options: argparse.Namespace) -> dict[str, Any]:
    """The manifest.

    Raises:
        UsageError: an option does not fit.
    """
    _check("--name", options.name, _NAME, "at most 52 small letters, digits and hyphens")
    _check("--namespace", options.namespace, _LABEL, "at most 63 small letters, digits and hyphens")
    _check("--memory", options.memory, _QUANTITY, "a number of bytes such as 64Gi or 500G")
    for secret in options.secret:
        _check("--secret", secret, _SUBDOMAIN, "small letters, digits, hyphens and dots")
    replicas = {"Master": _replica(options, 1)}
    if options.nodes > 1:
        replicas["Worker"] = _replica(options, options.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": options.name, "namespace": options.namespace},
        "spec": {
            # The operator tells torchrun by PET_ variables how many nodes and ranks there are, and where the first is.
            "nprocPerNode": str(options.gpus),
            "runPolicy": {"backoffLimit": options.restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _replica(options: argparse.Namespace, count: int) -> dict[str, Any]:
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if not arguments:
        raise UsageError("no arguments for pretrain.py; give them after --")
    _check_config(arguments)
    claims = [_pair(claim, ":", "--claim") for claim in options.claim]
    for claim, path in claims:
        _check("--claim", claim, _LABEL, "at most 63 small letters, digits and hyphens before the colon")
        _check("--claim", path, _MOUNT_PATH, "an absolute path after the colon, without another one")
    environment = [_pair(env, "=", "--env") for env in options.env]
    for name, _ in environment:
        _check("--env", name, _VARIABLE, "letters, digits and _ for the variable's name")
    shown = [*secrets_of(dict(environment)), *(word.partition("=")[0] for word in arguments if has_password(word))]
    if shown:
        raise UsageError(
            f"{', '.join(shown)} holds a secret, which whoever may read the job would see; put it into a Secret and "
            "name that with --secret"
        )
    resources = {
        "nvidia.com/gpu": options.gpus,
        "memory": options.memory,
        "cpu": options.cpus or 8 * options.gpus,
    }
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": options.image,
        "command": ["sh", "-c", START, "sh"],
        "args": [PYTHON, "-m", "torch.distributed.run", PRETRAIN, *arguments],
        "env": [{"name": name, "value": value} for name, value in environment],
        "envFrom": [{"secretRef": {"name": name}} for name in options.secret],
        "resources": {"limits": resources, "requests": resources},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", SAVE]}}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": claim, "mountPath": path} for claim, path in claims),
        ],
    }
    volumes = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # the loader's workers hand batches on in it
        *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim, _ in claims),
    ]
    spec = {"terminationGracePeriodSeconds": options.grace, "containers": [container], "volumes": volumes}
    # Not ExitCode: it takes every status under 128, also that of a run that saved and asks to go on, for the end. (No
    # test tells when that is mended: it takes a cluster with the operator.)
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": spec}}


def _check(option: str, value: str, pattern: re.Pattern[str], rule: str) -> None:
    """That the API server takes the value; it would refuse the job only when that is applied."""
    if not pattern.fullmatch(value):
        raise UsageError(f"{option} {value!r} is not what Kubernetes takes there; give {rule}")


def _check_config(arguments: list[str]) -> None:
    """That a --config without a folder in it is a preset or a file of the checkout, which the image holds too."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?", default="")
    config = parser.parse_known_args(arguments)[0].config
    if config and "/" not in config:
        find_config(config, RunConfig)


def _pair(text: str, separator: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name or not value:
        raise UsageError(f"{option} {text}: give NAME{separator}VALUE")
    return name, value


if __name__ == "__main__":
    run_command(main)
