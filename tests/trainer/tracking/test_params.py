"""Settings as MLflow parameters, on a real store."""

from __future__ import annotations

from pathlib import Path

from tests.tracked_runs import all_runs, open_tracker
from trainer.tracking.params import MAX_NAME_LENGTH, flatten


def test_parameters_are_flat_text() -> None:
    values = {"a": {"b": [1, 2], "c": {}}, "d": 1e-4, "e": "x" * 7000, "f": True}
    flat = flatten(values)
    assert {name: flat[name] for name in ("a.b", "a.c", "d", "f")} == {
        "a.b": "[1, 2]",
        "a.c": "{}",
        "d": "0.0001",
        "f": "true",
    }
    assert len(flat["e"]) == 6000


def test_names_that_mlflow_refuses_keep_nothing_from_it(database: str, tmp_path: Path) -> None:
    long = "s3://bucket/" + "x" * 300
    tracker = open_tracker(database, tmp_path / "run")
    tracker.log_params({"storage_options": {f"{long}/a": {"anon": True}, f"{long}/b": {"anon": False}}, "seed": 1})
    tracker.log(1, {"train/loss": 2.0})
    tracker.close("FINISHED")
    (run,) = all_runs(database)
    assert run.data.params["seed"] == "1" and run.data.metrics["train/loss"] == 2.0
    cut = {name: value for name, value in run.data.params.items() if name != "seed"}
    assert sorted(cut.values()) == ["false", "true"]
    assert all(len(name) == MAX_NAME_LENGTH and name.startswith("storage_options.s3_") for name in cut)
