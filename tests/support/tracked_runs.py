"""Tracking as tests use it: a tracker with steps to log, and what a server has of them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.run_settings import TrackingSettings
from trainer.tracking.mlflow_server import connect
from trainer.tracking.tracker import Tracker

KEYS = ("train/loss", "train/learning_rate")


class Warnings(list[str]):
    """Collects what a tracker tells."""

    def __call__(self, message: str) -> None:
        self.append(message)


def open_tracker(
    uri: str | None,
    output_dir: Path,
    warn: Callable[[str], None] | None = None,
    patience: float = 5.0,
    **more: Any,
) -> Tracker:
    """A tracker with these settings; where `warn` is not given, a warning fails the test."""
    settings = TrackingSettings(uri=uri, **more)
    return Tracker.open(settings, output_dir, pytest.fail if warn is None else warn, patience_seconds=patience)


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, dict.fromkeys(KEYS, step / 3))


def half_made_database(path: Path) -> str:
    """The URI of a database whose making was cut short, or goes on in another process."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE secrets (a INTEGER)")
    return f"sqlite:///{path}"


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    points = connect(uri).get_metric_history(run_id, key)
    return [(point.step, point.value) for point in points]


def assert_complete(uri: str, run_id: str, last_step: int) -> None:
    for key in KEYS:
        assert history(uri, run_id, key) == [(step, step / 3) for step in range(1, last_step + 1)]


def all_runs(uri: str) -> list[Any]:
    client = connect(uri)
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing came in time"
        time.sleep(0.05)
