"""What runs and models say of their data, their machine and their source.

The commit of a run and the differences from it, by real repositories.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from data_prep import open_dataset
from data_prep.dataset.manifest import list_versions
from data_prep.dataset.versions import publish
from data_prep.storage import storage
from trainer.config.run_config import load_config
from trainer.data.shard_set import open_shard_set
from trainer.tracking import run_description
from trainer.tracking.run_description import (
    all_lineages,
    data_set_input,
    describe_environment,
    describe_run,
    git_revision,
    installed_packages,
    lineage,
    manifest_summary,
    shown_by_mlflow,
    source_text,
)
from trainer.tracking.tracker import NullTracker


def test_the_summary_has_counts_and_sources_and_no_list_of_files(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    summary = manifest_summary(f"s3://me:pass1word@{small_shards}", manifest)
    assert summary["digest"] == manifest.digest and summary["train"]["tokens"] == manifest.train.tokens
    assert summary["train"]["shards"] == 4 and summary["sources"][0]["tokens"] > 0
    text = json.dumps(summary)
    assert ".tar" not in text and "pass1word" not in text


def test_the_input_is_named_by_its_folder_and_the_manifests_digest(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    found = data_set_input("s3://me:pass1word@bucket/birds/", manifest)
    assert (found.name, found.digest) == ("birds", manifest.digest)
    assert "pass1word" not in found.model_dump_json()


def test_mlflow_shows_what_the_run_is_who_began_it_and_from_which_source(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("tiny_cpu", [f"data.shards={small_shards}", "training.max_steps=1200"])
    monkeypatch.setenv("LOGNAME", "robin")
    tags = shown_by_mlflow(config, [open_shard_set(str(small_shards))])
    description = tags["mlflow.note.content"]
    assert tags["mlflow.user"] == "robin" and tags["mlflow.source.name"] == "launch/pretrain.py"
    assert "1,200 steps" in description and "`masked_lm`" in description and "`valid/mlm_loss`" in description
    assert f"on `{small_shards.name}`" in description and str(small_shards.parent) not in str(tags)
    monkeypatch.setattr(run_description.getpass, "getuser", lambda: {}["a user without a name"])
    assert "mlflow.user" not in shown_by_mlflow(config, [])


def test_few_tags_name_versions_and_a_file_has_the_whole_environment(small_shards: Path) -> None:
    class KeepingTracker(NullTracker):
        def __init__(self) -> None:
            self.tags: dict[str, str] = {}
            self.texts: dict[str, str] = {}

        def log_tags(self, tags: Mapping[str, str]) -> None:
            self.tags.update(tags)

        def log_artifact_text(self, name: str, text: str) -> None:
            self.texts[name] = text

    kept, config = KeepingTracker(), load_config("tiny_cpu", [f"data.shards={small_shards}", "training.max_steps=9"])
    describe_run(kept, config, [open_shard_set(str(small_shards))], ["d" * 64])
    machine = json.loads(kept.texts["environment/machine.json"])
    assert {"platform", "memory_gib", "numpy", "torch"} <= machine.keys()
    named = {name.removeprefix("clozeworks.environment.") for name in kept.tags if "environment" in name}
    assert {"python", "torch"} <= named <= {"clozeworks", "python", "torch", "deepspeed", "gpu", "gpus", "cuda"}
    assert kept.tags["clozeworks.environment.torch"] == machine["torch"]
    assert {"mlflow.note.content", "mlflow.source.name"} <= kept.tags.keys()


def test_a_version_descends_from_those_before_it(small_shards: Path, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = open_dataset(small_shards).manifest
    shutil.copy(small_shards / "manifest.json", folder)
    second = first.model_copy(update={"version": 2, "parent": first.digest})
    publish(folder, second)
    third = second.model_copy(update={"version": 3, "parent": second.digest})
    publish(folder, third)
    assert [each.version for each in list_versions(folder)] == [1, 2, 3]
    assert lineage(folder, third.digest) == (third.digest, second.digest, first.digest)
    assert lineage(folder, first.digest) == (first.digest,)
    assert all_lineages([folder, folder], [second.digest, first.digest]) == (second.digest, first.digest)
    assert all_lineages([folder], [second.digest], ("e" * 64, first.digest)) == (second.digest, first.digest, "e" * 64)
    assert lineage(str(tmp_path / "gone"), "d" * 64) == ("d" * 64,)


def test_the_environment_is_versions_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "open-sesame")
    environment = describe_environment()
    assert environment["python"].startswith("3.") and "torch" in environment
    assert "open-sesame" not in str(environment)


@pytest.mark.long
def test_the_packages_are_those_that_their_metadata_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {
        "plain-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: Plain\nVersion: 1.0\n\nName: no field\n",
        "old-2.0.egg-info/PKG-INFO": "Name: old\nVersion: 2.0\n",
        "windows-5.0.dist-info/METADATA": "Name: windows\r\nVersion: 5.0\r\n\r\nVersion: no field\r\n",
        "broken-3.0.dist-info/METADATA": "",
    }
    (tmp_path / "file-4.0.egg-info").write_text("Name: file\nVersion: 4.0\n", encoding="utf-8")
    for name, text in described.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(text.encode())
    monkeypatch.syspath_prepend(tmp_path)
    lines = installed_packages().splitlines()
    assert {"Plain==1.0", "old==2.0", "file==4.0", "windows==5.0"} <= {*lines} and not [
        line for line in lines if "broken" in line.lower()
    ]
    monkeypatch.setattr(sys, "path", sys.path[1:])
    parsed = {each.name.lower(): f"{each.name}=={each.version}" for each in metadata.distributions()}
    assert installed_packages().splitlines() == [line for _, line in sorted(parsed.items())]


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
