"""The source of a run by git: the commit, and the differences from it as a text, for MLflow.

A package that is installed without git, or in a repository that does not track it (an environment inside a project of
the user's), has no commit.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from data_prep.base.known_secrets import HIDDEN
from data_prep.base.packages import installed_version

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
