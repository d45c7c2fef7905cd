"""The commit of a run and the differences from it, by real repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from data_prep.storage import storage
from trainer.tracking import run_description
from trainer.tracking.run_description import git_revision, source_text


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    answer = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of the project's packages, committed."""
    folder = tmp_path / "project"
    for package in ("configs", "data_prep", "trainer", "launch"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "trainer" / "masking.py").write_text("RATE = 0.15\n")
    (folder / "notes.md").write_text("notes\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_clean_project_is_its_commit(project: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    assert source_text({}, project) == f"# commit {commit}\n"
    assert git_revision(project / "trainer") == commit


def test_changed_and_new_files_of_the_packages_are_in_the_text_and_others_are_not(project: Path) -> None:
    (project / "trainer" / "masking.py").write_text("RATE = 0.0\n")
    (project / "trainer" / "new.py").write_text("NEW = 1\n")
    (project / "notes.md").write_text("changed notes\n")
    text = source_text({}, project)
    assert text.startswith(f"# commit {git(project, 'rev-parse', 'HEAD')}-dirty\n")
    assert "-RATE = 0.15\n+RATE = 0.0\n" in text and "+++ b/trainer/new.py" in text and "+NEW = 1\n" in text
    assert "changed notes" not in text


def test_staged_changes_count_and_no_program_of_the_repository_is_run(project: Path, tmp_path: Path) -> None:
    (project / ".gitattributes").write_text("*.py diff=mine\n")
    for setting in ("diff.mine.textconv", "diff.external", "diff.mine.command"):
        git(project, "config", setting, f"touch {tmp_path}/ran; cat")
    (project / "trainer" / "masking.py").write_text("RATE = 0.0\n")
    git(project, "add", "-A")
    assert "+RATE = 0.0" in source_text({}, project) and not (tmp_path / "ran").exists()


def test_a_users_module_is_whole_unless_its_own_repository_tracks_it(project: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("MINE = 3\n")
    text = source_text(
        {"module alone": tmp_path / "alone.py", "module masking": project / "trainer/masking.py"}, project
    )
    assert f"# module alone: {tmp_path / 'alone.py'}\n" in text and "+MINE = 3\n" in text
    assert "RATE" not in text and text.count(git(project, "rev-parse", "HEAD")) == 2


def test_the_calls_of_git_do_not_grow_with_the_number_of_modules(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    git_answer = run_description._git
    monkeypatch.setattr(
        run_description, "_git", lambda folder, *words: asked.append(words) or git_answer(folder, *words)
    )
    counts = []
    for number in (1, 3):
        for folder in ("trainer", "launch"):
            for each in range(number):
                (project / folder / f"own_{each}.py").write_text(f"{folder.upper()} = {each}\n")
        git(project, "add", "-A")
        modules = {f"module {path.stem} of {path.parent.name}": path for path in project.rglob("own_*.py")}
        text = source_text(modules, project)
        assert all(f"# {name}: {path}, commit " in text for name, path in modules.items())
        counts.append(len(asked))
        asked.clear()
    assert counts[0] == counts[1] and "+LAUNCH = 2" in text
    (project / ".gitignore").write_text("ignored.py\n")
    (project / "trainer" / "ignored.py").write_text("IGNORED = 1\n")
    assert "+IGNORED = 1" in source_text({"module ignored": project / "trainer" / "ignored.py"}, project)


@pytest.mark.parametrize("way", ["outside of any repository", "in a repository that ignores it", "without git"])
def test_an_installed_package_has_no_commit(way: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = project / ".venv" / "lib"
    (installed / "trainer").mkdir(parents=True)
    (installed / "trainer" / "__init__.py").write_text("")
    if way == "outside of any repository":
        (project / ".git").rename(project / "git")
    if way == "without git":
        monkeypatch.setenv("PATH", str(installed))
    assert git_revision(installed / "trainer") is None
    text = source_text({}, installed)
    assert text.startswith("# clozeworks ") and "which no git repository tracks" in text
    (installed / "trainer" / "rates.py").write_text("RATE = 0.0\n")
    text = source_text({}, installed, changed=["trainer/rates.py", "trainer/gone.py"])
    assert "+++ b/trainer/rates.py" in text and "+RATE = 0.0" in text and "gone" not in text


@pytest.mark.parametrize(
    "line",
    [
        'password = "hunter2hunter2"',
        "  'api_key': 'abc123abc123',",
        'os.environ["AWS_SECRET_ACCESS_KEY"] = "abc123abc123"',
        "url = 'https://me:abc123abc123@example.org'",
        "login('hf_abc123abc123abc123abc123')",
    ],
)
def test_secrets_are_hidden(line: str, project: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(f"{line}\nmask_token = '[MASK] is kept'\n")
    text = storage.hide_secrets(source_text({"module alone": tmp_path / "alone.py"}, project))
    assert "abc123" not in text and "hunter2" not in text and ("(hidden)" in text or "https://example.org" in text)
    assert "mask_token = '[MASK] is kept'" in text


def test_a_long_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_description, "MAX_CHARACTERS", 1000)
    (tmp_path / "alone.py").write_text("x = 1\n" * 10_000)
    text = source_text({"module alone": tmp_path / "alone.py"})
    assert 1000 < len(text) < 1100 and "# cut here: the text has" in text
