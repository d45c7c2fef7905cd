"""The walks of the pages run as they stand, and show what their commands print."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.free_ports import free_port
from tests.support.hub_server import ModelHub
from tests.support.two_nodes import missing, two_nodes
from tests.support.walks import TWO_HOSTS, Command, File, first_missing, steps_of, walk

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_LINES = 200
MOST_CHARACTERS = 11_000
WALKS = ("data_prep/TUTORIAL.md", "launch/OPERATIONS.md", "launch/TUTORIAL.md")
ON_TWO_HOSTS = "launch/TUTORIAL.md"
LESSON = "trainer/LESSON.md"
RESEARCH = "trainer/RESEARCH.md"
DOWNSTREAM = "launch/DOWNSTREAM.md"

# What both need of launch/demo.sh, with a model that has hardly learned.
SHORT_DEMO = """
```text
$ python -m launch.demo.collect_docstrings --output corpus/docstrings.jsonl --max-bytes 15000000
...
$ clozeworks tokenizer --input corpus/docstrings.jsonl --output tokenizer --vocab-size 8192
...
$ clozeworks shards --input corpus/docstrings.jsonl --tokenizer tokenizer --output shards shards.valid_fraction=0.03
...
$ clozeworks pretrain --config small_cpu data.shards=shards output_dir=run training.max_steps=4
...
```
"""

EXPORT = """
```text
$ clozeworks export --checkpoint run --output export
...
```
"""


def test_a_page_is_files_and_commands_with_what_they_print() -> None:
    page = "Text.\n```yaml\n# a.yaml\nx: 1\n```\n```bash\necho not run\n```\n"
    page += "```text\n$ echo a \\\n    b\na b\n$ true\n```\n"
    assert list(steps_of(page)) == [File("a.yaml", "x: 1\n"), Command("echo a b", ("a b",)), Command("true", ())]


def test_commands_that_need_two_hosts_are_only_taken_there() -> None:
    page = "```console\n$ ssh b true\n```\n```text\n# hosts.txt\na slots=1\n```\n```text\n$ true\n```\n"
    hostfile = File("hosts.txt", "a slots=1\n")
    assert list(steps_of(page)) == [hostfile, Command("true", ())]
    assert list(steps_of(page, TWO_HOSTS)) == [Command("ssh b true", ()), hostfile, Command("true", ())]


@pytest.mark.parametrize(
    ("shown", "printed", "absent"),
    [
        (["a 1"], ["a 2,500"], None),
        (["a", "..."], ["a", "b"], None),
        (["...", "c"], ["a", "b", "c"], None),
        (["version 1 (..."], ["version 2 (91beb8492be1de82)"], None),
        (["x      1"], ["x 12"], None),
        (["x +0.1  worse"], ["x -0.2  not clear"], None),
        (["x 1 worse"], ["x 1 much"], "x 1 worse"),
        (["x  1, 2, 3"], ["x  4"], None),
        (["x  1, 2, 3"], ["x  4, y"], "x  1, 2, 3"),
        (["a"], ["b"], "a"),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["...", "c", "a"], ["a", "c"], "a"),
        (["a"], ["a", "b"], "nothing after this, but came 'b'"),
        (["a"], [], "a"),
        ([], ["a"], "nothing after this, but came 'a'"),
        (["...", "c", "a"], ["c", "x", "c", "a"], None),
        (["a", "...", "c"], ["a", "c", "x"], "nothing after this, but came 'x'"),
        (["a 1", "...", "a 3"], ["a 1", "a 2", "b", "a 3"], None),
    ],
)
def test_the_output_of_a_page_is_compared_by_its_shape(
    shown: list[str], printed: list[str], absent: str | None
) -> None:
    assert first_missing(shown, printed) == absent


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ('  "exception"  0.570', '  "a"      0.020', True),
        ("layer 2, head 1", "layer 1, head 2", True),
        ("0.1 .", "0.2 word", True),
        ('  "."  0.1  (no space before it)', '  "a"  0.1', True),
        ("a b", "a", False),
        ("a 1", "a b", False),
        ("1 2", "1", False),
        ("MODEL: a...", "MODEL: b c", True),
        ("MODEL: a b", "MODEL: c", True),
        ("MODEL: a", "mask 1:", False),
    ],
)
def test_the_words_of_a_model_are_compared_by_their_layout(shown: str, printed: str, same: bool) -> None:
    assert first_missing([shown], [printed], any_words=True) == (None if same else shown)


@pytest.mark.parametrize("name", [*WALKS, LESSON, RESEARCH, DOWNSTREAM])
def test_a_walk_is_short(name: str) -> None:
    assert page_of(name).count("\n") <= MOST_LINES


@pytest.mark.parametrize("name", [LESSON, RESEARCH])
def test_a_walk_after_the_demo_is_short(name: str) -> None:
    assert len(page_of(name)) <= MOST_CHARACTERS


@pytest.mark.parametrize("name", [LESSON, RESEARCH])
def test_every_section_has_a_command_with_its_output(name: str) -> None:
    for section in page_of(name).split("\n## ")[1:]:
        shown = [step.shown for step in steps_of(section) if isinstance(step, Command)]
        assert any(line != "..." for lines in shown for line in lines), section


def test_an_exported_variable_reaches_the_commands_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    walk("```text\n$ export A='1 2' B=3\n$ echo $A; echo b$B\n1 2\nb3\n```\n", folder)


def test_a_walk_fails_where_a_command_prints_something_else(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text("```text\n$ echo 1 > one; cat one\n2\n$ echo three\nfour\n```\n")
    with pytest.raises(AssertionError, match="the page shows: four"):
        walk(page.read_text(), folder)
    assert (folder / "one").read_text() == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    walk(page_of(name), folder)


@pytest.mark.slow
def test_the_lesson_runs_after_a_demo_of_few_steps(tmp_path: Path) -> None:
    """The models have learned nothing, so the words of the page are not theirs; every command ends with 0."""
    (tmp_path / "demo").mkdir()
    few = "training.max_steps=4 evaluation.max_tokens=4096"
    page, num_runs = re.subn(r"training\.max_steps=\d+", few, SHORT_DEMO + page_of(LESSON))
    assert num_runs == 3
    walk(page, tmp_path / "demo", any_words=True)


@pytest.fixture
def demo(small_shards: Path, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `demo/mlflow.db` and an encoder in it, as the demo registers it; its servers end with the test."""
    from trainer import export, load_config, register, train

    folder = tmp_path / "walk"
    (folder / "demo").mkdir(parents=True)
    shutil.copy(empty_database, folder / "demo" / "mlflow.db")
    monkeypatch.chdir(folder / "demo")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/demo/mlflow.db")
    settings = {
        "data.shards": str(small_shards),
        "output_dir": "run",
        "model.vocab_size": 800,
        "training.max_steps": 4,
        "training.precision": "fp32",
        "evaluation.max_tokens": 4096,
    }
    train(load_config("small_cpu", settings))
    export("run", "export")
    register("export", "clozeworks-demo", "demo")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    yield folder
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
@pytest.mark.spawn
def test_the_walk_of_a_downstream_engineer_runs_with_its_own_registry_and_hub(demo: Path) -> None:
    """The encoder has learned nothing, so its int8 graph may predict otherwise."""
    page, hub = page_of(DOWNSTREAM), ModelHub("hf_token")
    assert "--min-agreement 0.98" in page
    page = page.replace("--min-agreement 0.98", "--min-agreement 0")
    for port in ("5000", "5001"):
        page = re.sub(rf"(?<=[ :]){port}\b", str(free_port()), page)
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    try:
        walk(page, demo, variables | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, any_words=True)
    finally:
        hub.stop()
    assert hub.repositories.keys() == {"owner/docstrings"} and hub.repositories["owner/docstrings"].private


@pytest.mark.slow
def test_the_walk_of_a_researcher_runs_after_a_demo_of_few_steps(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    page = page_of(RESEARCH)
    for setting, few in (("max_steps: 250", 4), ("every_steps: 250", 4), ("max_tokens: 30_000", 4096)):
        assert setting in page
        page = page.replace(setting, f"{setting.split()[0]} {few}")
    walk(SHORT_DEMO + EXPORT + page, tmp_path / "demo", any_words=True)


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.spawn
def test_a_walk_of_two_hosts_runs_as_it_stands(tmp_path: Path) -> None:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    keys, folder = tmp_path / "keys", tmp_path / "walk"
    keys.mkdir()
    folder.mkdir()
    with two_nodes(keys) as nodes:
        walk(page_of(ON_TWO_HOSTS), folder, nodes=nodes)


def page_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")
