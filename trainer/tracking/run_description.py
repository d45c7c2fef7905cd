"""Description of a run for MLflow, logged at each start: settings, data, machine and source.

The source is described by git: the commit, and the differences from it as a text. A package that is installed without
git, or in a repository that does not track it (an environment inside a project of the user's), has no commit.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from data_prep.base.errors import UserError
from data_prep.base.known_secrets import HIDDEN
from data_prep.base.packages import installed_version, name_and_version
from data_prep.base.settings import to_yaml
from data_prep.dataset.manifest import Manifest, list_versions
from data_prep.storage import storage
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.shard_set import ShardSet
from trainer.tracking.journal import ADOPTED_TAG, ENTROPY_PARAM, GIT_TAG, LINEAGE_TAG, TEACHERS_TAG, DataSetInput
from trainer.tracking.tracker import MetricLog

LIBRARIES = ("clozeworks", "torch", "deepspeed", "mlflow", "transformers", "tokenizers", "sentencepiece", "numpy")
IN_TAGS = ("clozeworks", "python", "torch", "deepspeed", "gpu", "gpus", "cuda")
"""What of the environment is also a tag: MLflow's page shows all tags of a run."""
PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "data_prep", "trainer", "launch")
MAX_CHARACTERS = 1 << 20
_TIMEOUT_SECONDS = 10
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")

# What a developer writes into a source: a literal under a secret's name, and tokens with a known form.
_SECRET_LITERAL = re.compile(
    r"(?i)(\b\w*(?:passw(?:or)?d|passphrase|secret|api_?key|access_?key|private_?key|auth_?token|access_?token)\w*"
    r"[\"']?\]?\s*[=:]\s*[rbf]?)([\"'])[^\"'\n]{4,}\2"
)
_SECRET_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16})\b"
)


def describe_run(
    tracker: MetricLog,
    config: RunConfig,
    shard_sets: Sequence[ShardSet],
    data_lineage: Sequence[str],
    adopted: Sequence[str] = (),
    teachers: Sequence[str] = (),
) -> None:
    """Log parameters, the resolved configuration, the manifests, the environment and the git revision.

    `data_lineage` are the digests of all data that the weights saw, earlier data and that of `init_from` included;
    `adopted` says how the initial weights were made of those of `init_from`; `teachers` are the sha256 of all teachers.
    """
    config = without_secrets(config)
    settings = config.model_dump(mode="json")
    settings["training"]["max_steps"] = config.max_steps
    tracker.log_params(settings)
    if len(shard_sets) == 1 and (entropy := shard_sets[0].manifest.valid.unigram_entropy_nats) is not None:
        tracker.log_params({ENTROPY_PARAM: entropy})
    tracker.log_artifact_text("config.yaml", to_yaml(config))
    digests = [shard_set.manifest.digest for shard_set in shard_sets]
    for number, shard_set in enumerate(shard_sets):
        summary = json.dumps(manifest_summary(shard_set.url, shard_set.manifest), indent=1, ensure_ascii=False)
        tracker.log_artifact_text(f"data/manifest-{number}.json", summary + "\n")
        tracker.log_data_set(data_set_input(shard_set.url, shard_set.manifest))
    environment = describe_environment()
    tracker.log_artifact_text("environment/packages.txt", installed_packages())
    tracker.log_artifact_text("environment/machine.json", json.dumps(environment, indent=1) + "\n")
    tags = {"clozeworks.manifest_digest": ",".join(digests), LINEAGE_TAG: ",".join(data_lineage)}
    tags |= {f"clozeworks.environment.{name}": version for name, version in environment.items() if name in IN_TAGS}
    tags |= {ADOPTED_TAG: "; ".join(adopted)} if adopted else {}
    tags |= {TEACHERS_TAG: ",".join(teachers)} if teachers else {}
    revision = git_revision()
    tags |= {GIT_TAG: revision, "mlflow.source.git.commit": revision.partition("-")[0]} if revision else {}
    tracker.log_tags(tags | shown_by_mlflow(config, shard_sets))


def shown_by_mlflow(config: RunConfig, shard_sets: Sequence[ShardSet]) -> dict[str, str]:
    """Return the tags that MLflow's own pages show as description, user and source of a run; no local paths."""
    tokens = sum(shard_set.manifest.train.tokens for shard_set in shard_sets)
    names = ", ".join(f"`{data_set_input(each.url, each.manifest).name}`" for each in shard_sets)
    model, objectives = config.model, ", ".join(f"`{each.name}`" for each in config.all_objectives)
    description = (
        f"A {model.family} encoder, {model.num_hidden_layers} layers of {model.hidden_size}, trained by {objectives} "
        f"for {config.max_steps:,} steps on {names} ({tokens:,} train tokens).\n\n"
        "Look at `valid/*` first: scores on held-out documents. Without context, `valid/mlm_loss` (in nats) cannot "
        f"fall below the parameter `{ENTROPY_PARAM}`. `train/*` is of the batches, with dropout and changing masks."
    )
    return origin_tags("launch/pretrain.py", description)


def origin_tags(script: str, description: str | None = None) -> dict[str, str]:
    """Return the tags that MLflow's own pages show as source, user and description of a run."""
    tags = {"mlflow.source.name": script, "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags if description is None else tags | {"mlflow.note.content": description}


def manifest_summary(url: str, manifest: Manifest) -> dict[str, Any]:
    """Return a manifest without lists of files: counts, sources with licenses, drops, tokenizer and parent."""
    values = manifest.model_dump(mode="json", exclude={"inputs", "config", "token_counts", "removals"})
    for split in ("train", "valid"):
        values[split]["shards"] = len(manifest.split(split).shards)
    return {
        "url": storage.redact(url),
        "digest": manifest.digest,
        **values,
        "inputs": manifest.num_inputs,
        "dropped": manifest.dropped,
        "removals": len(manifest.removals),
    }


def data_set_input(url: str, manifest: Manifest) -> DataSetInput:
    """Return the shard set as an input of an MLflow run."""
    redacted = storage.redact(url)
    profile: dict[str, int | str] = {
        "version": manifest.version,
        "train_tokens": manifest.train.tokens,
        "train_documents": manifest.train.documents,
        "valid_tokens": manifest.valid.tokens,
        "tokenizer_fingerprint": manifest.tokenizer.fingerprint,
    }
    name = redacted.rstrip("/").rpartition("/")[2] or redacted
    return DataSetInput(name=name, digest=manifest.digest, source=redacted, profile=profile)


def lineage(url: str, digest: str) -> tuple[str, ...]:
    """Return the digests of a version and of the versions it grew from, newest first, as far back as they are known."""
    try:
        parents = {version.digest: version.parent for version in list_versions(url)}
    except (UserError, OSError):
        return (digest,)
    chain = [digest]
    while (parent := parents.get(chain[-1])) is not None and parent not in chain:
        chain.append(parent)
    return tuple(chain)


def all_lineages(urls: Sequence[str], digests: Sequence[str], earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lineages of several shard sets, then of the data that the weights saw `earlier`, each digest once."""
    current = (each for url, digest in zip(urls, digests, strict=True) for each in lineage(url, digest))
    return tuple(dict.fromkeys((*current, *earlier)))


def describe_environment() -> dict[str, str]:
    """Machine, interpreter and library versions."""
    versions = {name: version for name in LIBRARIES if (version := installed_version(name)) is not None}
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    machine = {"cpus": str(os.cpu_count()), "memory_gib": f"{memory_gib:.1f}"}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "gpus": str(torch.cuda.device_count())}
        machine |= {"cuda": str(torch.version.cuda)}
    return {"python": platform.python_version(), "platform": platform.platform(), **machine, **versions}


def installed_packages() -> str:
    """Return all installed distributions as `pip freeze` lists them, one `name==version` per line."""
    described = map(name_and_version, metadata.distributions())
    packages = {name.lower(): f"{name}=={version}" for name, version in described if name}
    return "\n".join(line for _, line in sorted(packages.items())) + "\n"


def git_revision(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of `folder`, with "-dirty" where files differ from it; None where git does not track it."""
    if not _git(folder, "ls-files", "--", "."):
        return None
    return _commit(folder)


def source_text(modules: Mapping[str, Path], project: Path = PROJECT, changed: Iterable[str] = ()) -> str:
    """Return a diff without secrets: the commit of the project, what differs from it, and the user's own modules.

    New files, and changed files and modules that no repository tracks, are whole. A text of more than `MAX_CHARACTERS`
    is cut.

    Args:
        modules: the files of the user's own modules by name.
        project: the directory of the packages of this project.
        changed: files of the project that differ from those of the checkpoint, such as trainer/loop/step.py.
    """
    parts = [_of_project(project, changed), *_of_modules(modules)]
    text = _SECRET_TOKEN.sub(HIDDEN, _SECRET_LITERAL.sub(rf"\1\2{HIDDEN}\2", "".join(parts)))
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}\n# cut here: the text has {len(text):,} characters\n"
    return text


def _of_project(project: Path, changed: Iterable[str]) -> str:
    folders = [name for name in PACKAGES if (project / name).is_dir()]
    revision = git_revision(project / "trainer")
    if revision is None:
        title = f"# clozeworks {installed_version('clozeworks') or '(not installed)'}, which no git repository tracks\n"
        return title + "".join(_whole(project / name, Path(name)) for name in changed if (project / name).is_file())
    diff = _git(project, *_DIFF, "--", *folders)
    new = _git(project, "ls-files", "--others", "--exclude-standard", "-z", "--", *folders) or ""
    files = [project / name for name in new.split("\0") if name.endswith((".py", ".yaml"))]
    return f"# commit {revision}\n{diff or ''}" + "".join(_whole(path, path.relative_to(project)) for path in files)


def _of_modules(modules: Mapping[str, Path]) -> Iterator[str]:
    """Return tracked modules as the commit and one diff, by three calls of git, and other modules whole."""
    by_repository: dict[Path | None, dict[str, Path]] = {}
    for name, path in modules.items():
        real_path = path.parent.resolve() / path.name
        repository = next((folder for folder in real_path.parents if (folder / ".git").exists()), None)
        by_repository.setdefault(repository, {})[name] = real_path
    for repository, files in by_repository.items():
        paths = {} if repository is None else {name: str(path.relative_to(repository)) for name, path in files.items()}
        listed = _git(repository, "ls-files", "-z", "--", *paths.values()) if repository else None
        tracked = {*(listed or "").split("\0")} & {*paths.values()}
        for name in files:
            if paths.get(name) not in tracked:
                yield f"# {name}: {modules[name]}\n{_whole(modules[name], Path(modules[name].name))}"
        if repository and tracked:
            commit = _commit(repository)
            yield from (f"# {name}: {modules[name]}, commit {commit}\n" for name in files if paths[name] in tracked)
            yield _git(repository, *_DIFF, "--", *sorted(tracked)) or ""


def _commit(folder: Path) -> str | None:
    answer = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return answer.strip() or None if answer else None


def _whole(path: Path, name: Path) -> str:
    """Return a file as a diff from nothing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"# {name} cannot be read ({error.strerror})\n"
    return "\n".join([f"--- /dev/null\n+++ b/{name.as_posix()}\n@@ -0,0 +1,{len(lines)} @@", *_added(lines)]) + "\n"


def _added(lines: Iterable[str]) -> Iterator[str]:
    return (f"+{line}" for line in lines)


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None where git is missing, refuses, or finds no repository."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace")
