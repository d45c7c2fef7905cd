"""The acceptance kit for GPUs, as far as a machine without one shows it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from launch.benchmark import parse_arguments, read_config
from trainer.data import batch as batches
from trainer.data import workers
from trainer.data.batch import Batch

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a script of the kit, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def kit(module: Callable[[str], Any], tmp_path: Path) -> Any:
    return module("kit").Kit("part1", tmp_path, tmp_path, tmp_path, dict(os.environ), time.time() + 100, toy=False)


def statuses(kit: Any) -> dict[str, str]:
    summary = json.loads((kit.out / "summary.json").read_text())
    return {row["name"]: row["status"] for row in summary["steps"]}


def test_a_step_that_fails_or_does_not_fit_stops_no_other(module: Callable[[str], Any], kit: Any) -> None:
    Step, StepFailed = module("kit").Step, module("kit").StepFailed
    seen = []

    def fails(kit: Any) -> dict[str, Any]:
        raise StepFailed("as it should")

    def breaks(kit: Any) -> dict[str, Any]:
        raise KeyError("a mistake of the kit's")

    def works(kit: Any) -> dict[str, Any]:
        seen.append(statuses(kit))
        return {"figure": 3}

    steps = [Step("a", 20, fails), Step("b", 20, breaks), Step("c", 1000, works), Step("d", 150, works)]
    module("kit").run_steps(kit, [*steps, Step("e", 20, lambda kit: {"status": "failed"})])
    assert statuses(kit) == {"a": "failed", "b": "failed", "c": "skipped", "d": "ok", "e": "failed"}
    assert seen == [{"a": "failed", "b": "failed", "c": "skipped"}], "the summary is written after each step"
    assert kit.rows[3]["figure"] == 3 and "s left of the 1000 s" in kit.rows[2]["why"]
    kit.rows.clear()
    module("kit").run_steps(kit, steps, only=["d"])
    assert statuses(kit) == {"d": "ok"}


def test_a_step_without_the_files_of_another_is_skipped_and_names_it(module: Callable[[str], Any], kit: Any) -> None:
    long_run, *others = module("steps").PART2
    fails = dataclasses.replace(long_run, run=lambda kit: {"status": "failed"}, seconds=1)
    others = [dataclasses.replace(step, run=lambda kit: {}, seconds=1) for step in others]
    module("kit").run_steps(kit, [fails, *others])
    assert statuses(kit) == {"long run": "failed", "export": "skipped", "fine-tuning": "skipped"}
    assert [row["why"].split("'")[1] for row in kit.rows[1:]] == ["long run", "export"]
    assert [module("accept").is_failure(kit.rows[1], toy) for toy in (True, False)] == [True, False]
    for name in ("bert_large/checkpoints/step-00000090/checkpoint.json", "exported/config.json"):
        (kit.work / name).parent.mkdir(parents=True)
        (kit.work / name).touch()
    kit.rows.clear()
    module("kit").run_steps(kit, others)
    assert statuses(kit) == {"export": "ok", "fine-tuning": "ok"}, "what an earlier call left serves too"


def test_without_a_gpu_the_budgets_leave_no_step_out(module: Callable[[str], Any], kit: Any) -> None:
    """They are those of a GPU machine; here a step takes as long as it takes."""
    kit.toy = True
    step = module("kit").Step("long", 150, lambda kit: {"left": kit.step_ends_at - time.time()})
    module("kit").run_steps(kit, [step])
    assert kit.rows[0]["status"] == "ok" and 90 < kit.rows[0]["left"] <= 100, "to the end of all steps"


def test_what_a_cut_command_has_written_is_in_the_summary(module: Callable[[str], Any], kit: Any) -> None:
    kit.ends_at = time.time() + 500
    row = {"name": "bert_large, real documents", "ours": 3.0, "peer": 2.0, "ratio": 1.5}

    def cut(command: list[Any]) -> None:
        if "compiled" in command:
            results = command[command.index("--results") + 1]
            results.write_text(json.dumps({"rows": [row]}))
        raise module("kit").StepFailed("still running at the end of its time")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "call", cut)
        module("kit").run_steps(kit, [step for step in module("steps").PART1 if step.name == "encoder"])
    assert kit.rows[0]["status"] == "failed" and kit.rows[0]["why"].startswith("still running")
    assert kit.rows[0]["comparisons"] == {"bert_large, real documents": [3.0, 2.0, 1.5]}


def test_a_difference_of_bits_on_the_device_is_in_the_summary_and_no_failure(
    module: Callable[[str], Any], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "XFAIL tests/test_one.py::test_bits[cuda] - bits differ, by 1.2e-07 at most"
    monkeypatch.setattr(kit, "call", lambda command: f"collected 2\n{told}\n1 passed, 1 xfailed in 3s\n")
    module("kit").run_steps(kit, [step for step in module("steps").PART1 if step.name == "cuda tests"])
    assert (kit.rows[0]["status"], kit.rows[0]["found"]) == ("ok", [told])


def test_the_most_valuable_steps_come_first_and_fit_into_a_call(module: Callable[[str], Any]) -> None:
    steps = module("steps")
    names = [step.name for step in steps.PART1]
    assert names[:4] == ["environment", "first figures", "resume bf16", "encoder"]
    assert sum(step.seconds for step in steps.PART1[:4]) <= 530
    assert sum(step.seconds for step in steps.PART2) <= 580 and steps.PART2[0].seconds == 420
    assert steps.LONG_STEPS == 360


def test_the_calls_of_the_page_fit_and_cover_every_step(module: Callable[[str], Any]) -> None:
    steps, page = {step.name: step for step in module("steps").PART1}, (FOLDER / "README.md").read_text()
    calls = [shlex.split(line.partition("--only ")[2]) for line in page.splitlines() if " --only " in line]
    assert [*list(steps)[:4], *(name for names in calls for name in names)] == list(steps)
    assert all(sum(steps[name].seconds for name in names) <= 530 for names in calls)


def test_without_a_device_every_other_step_is_skipped_with_that_reason(
    module: Callable[[str], Any], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"device": None, "versions": {}, "unmet": []})
    monkeypatch.setattr(kit, "call", lambda command: answer)
    environment, *others = module("steps").PART1
    module("kit").run_steps(kit, [environment, *others])
    assert kit.rows[0]["status"] == "failed"
    assert {row["status"] for row in kit.rows[1:]} == {"skipped"}
    assert {row["why"] for row in kit.rows} == {"torch sees no CUDA device"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["accept.py", "part1", "--out", "out", "--work", "work", "--kit", "nowhere"], "run tests/gpu/prepare.py"),
        (["accept.py", "part1", "--out", "out", "--work", "work", "--shards", "nowhere"], "holds no manifest.json"),
        (["accept.py", "part2", "--out", "out", "--work", "work", "--only", "probe"], "'probe' matches no step"),
        (["prepare.py", "--shards", "nowhere", "--there", "torch", "--output", "kit"], "holds no manifest.json"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    words: list[str],
    error: str,
    module: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="error: ") as refused:
        module(words[0].removesuffix(".py")).main()
    assert error in str(refused.value) and "Fix: " in str(refused.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "kit").exists()


@pytest.mark.parametrize(("output", "error"), [("mine", "is not a kit"), ("mine/shards", "which is rebuilt")])
def test_a_directory_that_is_not_a_kit_is_not_deleted(
    output: str, error: str, module: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "mine" / "shards", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    shards = tmp_path / ("elsewhere" if output == "mine" else output)
    words = ["--shards", str(shards), "--there", "torch", "--output", str(tmp_path / output)]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    with pytest.raises(SystemExit, match=error):
        module("prepare").main()
    assert (tmp_path / "mine" / "shards" / "manifest.json").exists()


def test_a_command_is_stopped_at_the_end_of_its_steps_time(module: Callable[[str], Any], kit: Any) -> None:
    sleep = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    module("kit").run_steps(kit, [module("kit").Step("sleeps", 3, lambda kit: {"output": kit.call(sleep)})])
    assert kit.rows[0]["status"] == "failed" and "still running" in kit.rows[0]["why"]
    assert kit.rows[0]["seconds"] < 100.0 and "begun" in (kit.out / "log.txt").read_text()


def test_a_command_that_is_to_be_killed_must_not_end_before(module: Callable[[str], Any], kit: Any) -> None:
    kit.step_ends_at = time.time() + 60
    marker = kit.work / "saved"
    saves = f"open({str(marker)!r}, 'w'); import time; time.sleep(600)"
    kit.call([sys.executable, "-c", saves], until=marker.is_file)
    with pytest.raises(module("kit").StepFailed, match="ended before it was to be killed"):
        kit.call([sys.executable, "-c", "pass"], until=(kit.work / "never").is_file)
    with pytest.raises(module("kit").StepFailed, match="status 3: the reason"):
        kit.call([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])


def test_the_wheels_are_those_that_pyproject_asks_for_and_the_machine_lacks(module: Callable[[str], Any]) -> None:
    wheels, prepare = module("wheels"), module("prepare")
    roots = {requirement.name for requirement in wheels.requirements()}
    assert {"deepspeed", "sentencepiece", "torch", "pytest"} <= roots and not roots & {"mlflow", "moto", "mypy"}
    pins = [
        line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line and line[0] != "#"
    ]
    lacking = ("sentencepiece", "zstandard", "webdataset")
    there = [pin for pin in pins if not pin.startswith(lacking)]
    is_met = prepare.judge([*there, "sentencepiece==0.2.2"])
    missing = wheels.unmet(wheels.requirements(), is_met, wheels.needs_of_installed, "3.12")
    assert sorted(missing) == sorted(lacking), "a version that does not fit is as good as none"
    pinned = dict(line.split("==") for line in prepare.pins(["zstandard", "pydantic-core"]))
    assert all(f"{name.replace('-', '_')}=={version}" in pins for name, version in pinned.items())


def test_what_is_met_is_followed_no_further_and_markers_are_of_the_target(module: Callable[[str], Any]) -> None:
    needs = {
        "a": [
            "b>=2",
            "c",
            "old; python_version < '3.12'",
            "new; python_version >= '3.12'",
            "win; sys_platform == 'win32'",
        ],
        "c": ["hidden", "more; extra == 'x'"],
        "b": ["a"],
    }
    found = module("wheels").unmet(
        [Requirement("A")],
        lambda requirement: requirement.name == "hidden",
        lambda name: [Requirement(line) for line in needs.get(name, [])],
        "3.12",
    )
    assert list(found) == ["a", "b", "c", "new"]


def test_of_the_kit_only_what_the_machine_lacks_is_installed(module: Callable[[str], Any], tmp_path: Path) -> None:
    def make(name: str, *needs: str) -> Path:
        path = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {n}" for n in needs)]
            archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        return path

    lacking = make("not_here_one", "not-here-two==1.0", "pytest", "nowhere>=2")
    second, unfit, _there = make("not_here_two"), make("packaging"), make("pytest")
    roots = [Requirement("not-here-one"), Requirement("packaging==1.0"), Requirement("pytest>=1")]
    chosen, missing = module("wheels").wheels_to_install(tmp_path, roots)
    assert set(chosen) == {lacking, second, unfit} and missing == ["nowhere>=2"]


def test_every_variant_is_a_configuration_and_is_measured_by_a_step(module: Callable[[str], Any]) -> None:
    variants, steps = module("variants"), (FOLDER / "steps.py").read_text()
    for name, variant in variants.VARIANTS.items():
        for toy in (False, True):
            config = read_config(parse_arguments(variants.arguments_of(variant, 6, toy)))
            assert (config.model.num_hidden_layers == 1) == toy
            assert config.training.global_batch_tokens in ((4096, 6144, 32768) if toy else (131072, 196608, 1048576))
            assert len(config.stages) == 1
        assert name.removeprefix("bert_large ") in steps
    toy_words = variants.arguments_of(variants.VARIANTS["bert_large 16384"], 6, toy=True)
    assert "training.micro_batch_tokens=512" in toy_words


def test_each_patch_brings_its_loss_back_and_takes_it_away_again(module: Callable[[str], Any]) -> None:
    variants = module("variants")
    config = read_config(parse_arguments(variants.arguments_of(variants.VARIANTS["bert_large"], 6, toy=False)))

    def seen_in(switch: Callable[..., AbstractContextManager[object]], look: Callable[[], Any]) -> list[Any]:
        found = [look()]
        with switch(config):
            found.append(look())
        return [*found, look()]

    near, far, again = seen_in(variants.full_capacity, lambda: batches.sequence_capacity(70))
    assert near == again < 200 and far == 171 * 128
    none = torch.zeros(0, dtype=torch.int64)
    row = torch.zeros(8, dtype=torch.int64)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    packed = Batch(row, row, row, offsets, none, none, 8, has_segment_b=False).pack()
    assert seen_in(variants.token_type_lookup, lambda: Batch.unpack(packed).has_segment_b) == [False, True, False]
    made = seen_in(
        variants.short_prefetch,
        lambda: (
            workers.DataLoader([1], num_workers=1, prefetch_factor=33, multiprocessing_context="fork").prefetch_factor
        ),
    )
    assert made == [33, 4, 33]
    with pytest.raises(variants.Unavailable), variants.flash_attention_3(config):
        pass


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.timeout(3600)
def test_the_kit_runs_without_a_gpu_from_start_to_end(small_shards: Path, tmp_path: Path) -> None:
    """Launcher, kill and resume, variants, two ranks, export and fine-tuning, at toy sizes and without MLflow."""
    command = [sys.executable, str(FOLDER / "accept.py"), "cpu-check", "--shards", str(small_shards)]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--kit", str(tmp_path / "no_kit")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        row
        for part in ("part1", "part2")
        for row in json.loads((tmp_path / "out" / part / "summary.json").read_text())["steps"]
    ]
    by_name = {row["name"]: row for row in rows}
    assert {name for name, row in by_name.items() if row["status"] != "ok"} == {"resume fp16"}
    assert by_name["resume bf16"]["same_bits"] and by_name["long run"]["steps_logged"] == 40
    assert len(by_name["encoder"]["comparisons"]) == 4
    assert all("gloo only" in row["note"] for row in by_name["two ranks"]["variants"].values())
    assert all(row["tokens_per_second"] > 0 for row in by_name["two ranks"]["variants"].values())
