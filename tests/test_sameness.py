"""tests/sameness.py: what it calls the same, and the smallest comparison of the working tree with its own commit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import sameness
from tests.sameness import CONFIG, DATA_PARTS, OF_ONE_RUN, QUICK, RUN_PARTS, RUNS, SCORES, compare
from trainer import load_config
from trainer.tracking.process_identity import ProcessIdentity
from trainer.tracking.status import Status

SCRIPT = Path(__file__).with_name("sameness.py")


def test_a_part_is_the_same_different_or_not_comparable_with_the_reason() -> None:
    before = {"tokenizer": "a", "shards": "b", "run metrics": "failed: unknown setting", "gone": "f", "scores": "g"}
    now = {"tokenizer": "a", "shards": "c", "run metrics": "d", "new": "e", "scores": "failed: a bug"}
    verdicts = compare(before, now)
    assert (verdicts["tokenizer"], verdicts["shards"]) == ("same", "different")
    assert verdicts["run metrics"] == "not comparable (before: failed: unknown setting)"
    assert verdicts["new"].startswith("not comparable (before: ")
    assert verdicts["scores"] == "failed (now: failed: a bug)" and verdicts["gone"].startswith("failed (now: ")
    in_both = compare({"scores": "failed: a bug"}, {"scores": "failed: a bug"})
    assert in_both["scores"].startswith("failed (before: "), "which proves nothing"


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([0.5, 0.6, 0.7], [0.6, 0.8, 0.8], "same"),
        ([0.5, 0.6, 0.7], [0.4, 0.4, 0.4], "same"),
        ([0.5, 0.6, 0.7], [0.9, 0.9, 0.7], "different"),
        ([0.6, 0.6, 0.6], [0.6, 0.6, 0.6], "same"),
        ([0.6, 0.6, 0.6], [0.6, 0.6, 0.61], "different"),
    ],
)
def test_fine_tuned_models_are_the_same_within_the_spread_of_the_seeds(
    before: list[float], now: list[float], verdict: str
) -> None:
    assert compare({"fit": SCORES + json.dumps(before)}, {"fit": SCORES + json.dumps(now)}) == {"fit": verdict}


@pytest.mark.parametrize("accuracies", [[0.5, 0.5, 0.53], [0.8, 0.8, 0.8]])
def test_fine_tuning_that_learns_nothing_or_has_no_spread_proves_nothing_and_fails(
    accuracies: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fitted").mkdir()
    fits = [{"scores": {"accuracy": accuracy}} for accuracy in accuracies]
    (tmp_path / "fitted" / "scores.json").write_text(json.dumps({"variants": {"full": {"fits": fits}}}))
    monkeypatch.setattr(sameness, "call", lambda *words: None)
    with pytest.raises(sameness.Failed, match="learned nothing"):
        sameness.finetuned_scores(tmp_path, tmp_path, "model")


def test_half_of_the_labeled_sentences_have_either_label(tmp_path: Path) -> None:
    sameness.write_corpus(tmp_path / "corpus.jsonl")
    sameness.write_tables(tmp_path)
    labels = [line.rpartition("\t")[2] for line in (tmp_path / "labeled.tsv").read_text().splitlines()[1:]]
    assert Counter(labels) == {"long": sameness.LABELED // 2, "short": sameness.LABELED // 2}
    assert (tmp_path / "pairs.jsonl").read_text().count("\n") == 39


def test_three_runs_are_compared_for_a_commit_and_all_have_valid_settings(tmp_path: Path) -> None:
    names = [run.name for run in RUNS]
    assert len(set(QUICK) & set(names)) == 3 and len(set(names)) == len(names)
    (tmp_path / "run.yaml").write_text(f"output_dir: run\n{CONFIG}")
    for run in RUNS:
        settings = [setting % {"half": 1, "rest": 2} for setting in run.settings]
        load_config(str(tmp_path / "run.yaml"), [*settings, *([] if run.has_stages else ["training.max_steps=3"])])


def test_no_figure_of_one_process_or_hour_is_compared() -> None:
    fields = {*Status.model_fields, "started_at", "mlflow_run_id", "tracking_uri"}
    compared = {name for name in fields if not OF_ONE_RUN.search(name)}
    assert {"state", "step", "stage", "branch", "tokens_seen", "world_size", "metrics", "cause"} <= compared
    assert not compared & {*ProcessIdentity.model_fields, "written_at", "heartbeat_at", "train_seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("run", QUICK)
def test_a_tree_is_the_same_as_its_own_commit(run: str) -> None:
    command = [sys.executable, str(SCRIPT), "--before", "HEAD", "--only", run, "--steps", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = len(DATA_PARTS) + len(RUN_PARTS)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["same"] * parts
