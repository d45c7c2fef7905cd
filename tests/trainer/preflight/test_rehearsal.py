"""The rehearsal of a run has its sizes and leaves nothing elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import load_config
from trainer.preflight.rehearsal import STEPS, rehearsal_of, report
from trainer.tracking.journal import JournalWriter


@pytest.mark.parametrize("preset", ["tiny_cpu", "bert_large", "bert_large_phased", "modernbert_large", "mmbert_small"])
def test_every_stage_takes_a_few_steps_at_its_sizes(preset: str) -> None:
    config = load_config(preset)
    rehearsal = rehearsal_of(config, "7")
    assert rehearsal.output_dir == f"{config.output_dir}-rehearsal-7"
    assert [stage.steps for stage in rehearsal.stages] == [STEPS] * len(config.stages)
    for planned, rehearsed in zip(config.stages, rehearsal.stages, strict=True):
        for name in ("sequence_length", "micro_batch_tokens", "global_batch_tokens", "data", "objectives", "model"):
            assert getattr(rehearsed, name) == getattr(planned, name), name
        assert rehearsed.batch_warmup is None
    for section in ("model", "optimizer", "zero", "distributed", "data"):
        assert getattr(rehearsal, section) == getattr(config, section), section


def test_it_uploads_and_registers_nothing_and_keeps_its_metrics() -> None:
    config = load_config(
        "tiny_cpu",
        ["checkpoint.upload_to=s3://bucket/run", "registry={name: n, when: kept}", "tracking.uri=http://server:5000"]
        + ["evaluation.suite=glue", "training.duration=3 epochs"],
    )
    rehearsal = rehearsal_of(config, "7")
    assert rehearsal.checkpoint.upload_to is None and rehearsal.registry.name is None
    assert rehearsal.evaluation.suite is None and rehearsal.max_steps == STEPS
    assert rehearsal.tracking.uri == f"sqlite:///{Path(rehearsal.output_dir).absolute()}/mlflow.db"


def test_the_report_has_the_median_of_later_steps_and_the_hours_of_the_whole_stage(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path}/run", "training.max_steps=null"]
    stages = "training.stages=[{name: a, steps: 7200, sequence_length: 32}, {name: b, steps: 3600}]"
    config = load_config("tiny_cpu", [*overrides, stages])
    rehearsal = rehearsal_of(config, "7")
    journal = JournalWriter(Path(rehearsal.output_dir) / "tracking", "experiment", "run")
    for step in range(1, 2 * STEPS + 1):
        seconds = 100.0 if (step - 1) % STEPS < 2 else 0.5 * (1 + (step > STEPS)) + 0.01 * step
        journal.append(step, {"train/seconds_per_step": seconds, "train/peak_memory_bytes": 2.0**30 * step})
    journal.close()
    first, second = report(config, rehearsal, world_size=1).rows
    assert first[:2] == ("0", "a") and first[5] == "0.540" and first[7] == "5.00" and first[8] == "1:04:48"
    assert second[5] == "1.090" and second[6] == f"{2048 / 1.09:,.0f}" and second[8] == "1:05:24"
    in_epochs = load_config("tiny_cpu", [*overrides, stages.replace("steps: 3600", "duration: 2 epochs")])
    assert [row[8] for row in report(in_epochs, rehearsal, world_size=1).rows] == ["-", "-"]
