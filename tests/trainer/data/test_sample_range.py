"""The sample numbers that a log names are those that `launch/show_batch.py` shows: the very rows, bit by bit."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_prep.base.errors import UsageError
from launch import show_batch
from tests.support.error_codes import coded
from trainer import load_config
from trainer.checkpoint import data_version
from trainer.checkpoint.data_version import open_data
from trainer.checkpoint.format import TrainState
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.data.loader import Loader, Position
from trainer.loop.global_batches import batches_from

COMPARED = ("input_ids", "position_ids", "token_type_ids", "masked_positions", "labels")
MIXTURE = "data.shards=[{{url: {shards}, weight: 0.3}}, {{url: {shards}, weight: 0.7}}]"
CASES = {
    "plain": ["data.shards={shards}", "data.sentence_pairs=none"],
    "pairs": ["data.shards={shards}", "data.sentence_pairs=next_sentence"],
    "a mixture": [MIXTURE, "data.sentence_pairs=none"],
    "a mixture of pairs": [MIXTURE, "data.sentence_pairs=sentence_order"],
    "a masking rate that changes": [
        "data.shards={shards}",
        "data.mlm_probability=0.3",
        "data.final_mlm_probability=0.1",
    ],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_rows_of_a_step_are_shown_exactly(case: list[str], small_shards: Path, tmp_path: Path) -> None:
    overrides = [
        *(text.format(shards=small_shards) for text in case),
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=20",
        "training.global_batch_tokens=640",
        "training.micro_batch_tokens=640",
        "data.num_workers=0",
    ]
    config = load_config("tiny_cpu", overrides)
    stage, start, step = config.stages[0], Position(0, 0, 30), 3
    loader = Loader(open_data(config), stage, start, config.training.seed, step=step)
    for number, batch in enumerate(itertools.islice(loader, 3), start=step + 1):  # completed steps, as in the log
        assert batch_arithmetic(stage, 1).accumulation_steps == 1
        (trained,) = batch.micro_batches
        options = shlex.split(batch.samples.as_options(number))
        arguments = show_batch.parse_arguments(["--config", "tiny_cpu", *overrides, *options])
        show_batch.choose_rows(arguments)
        shown, _ = show_batch.read_batch(config, arguments)
        assert (trained.labels != -100).any()
        for name in COMPARED:
            assert torch.equal(getattr(shown, name), getattr(trained, name)), name


@pytest.mark.parametrize(
    "saved", [None, {"first_epoch": 4}, {"first_epoch": 0}], ids=["new", "saved", "earlier release"]
)
def test_the_rows_of_a_later_stage_are_shown_by_the_epochs_that_its_log_counts(
    saved: dict[str, int] | None, small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "global_batch_tokens: 8192, micro_batch_tokens: 8192"
    stages = f"[{{steps: 4, {sizes}, sequence_length: 32}}, {{steps: 2, {sizes}}}, {{steps: 6, {sizes}}}]"
    own = [f"data.shards={small_shards}", f"output_dir={tmp_path / 'run'}", f"training.stages={stages}"]
    overrides = [*own, "training.max_steps=null", "data.num_workers=0", "data.sentence_pairs=none"]
    config = load_config("tiny_cpu", overrides)
    sets = open_data(config)
    batches = [*batches_from(config, sets, 4, (0, 1))]
    if saved is not None:  # the run of this checkpoint read other epochs than these settings plan
        position = Position(1, 7, 0, **saved)
        batches = [*itertools.islice(Loader(sets, config.stages[1], position, config.training.seed, step=4), 6)]
        state = TrainState(step=4, stage=1, epoch=7, **saved)
        found = SimpleNamespace(state=state, data=SimpleNamespace(manifest_digests=(sets[0].manifest.digest,)))
        monkeypatch.setattr(data_version, "newest_saved", lambda *_: found)
    shown = [batch.samples.shown_epoch for batch in batches]
    assert max(shown) > min(shown) and max(batch.samples.epoch for batch in batches) > max(shown) * (saved is None)
    for number, batch in enumerate(batches, start=5):
        arguments = show_batch.parse_arguments(
            ["--config", "tiny_cpu", *overrides, *shlex.split(batch.samples.as_options(number))]
        )
        show_batch.choose_rows(arguments)
        rows, _ = show_batch.read_batch(config, arguments)
        for name in COMPARED:
            assert torch.equal(getattr(rows, name), getattr(batch.micro_batches[0], name)), (number, name)


def test_several_ranges_are_shown_one_at_a_time() -> None:
    arguments = show_batch.parse_arguments(["--config", "tiny_cpu", "--samples", "1:3,5:7"])
    with pytest.raises(UsageError, check=coded("several-ranges")):
        show_batch.choose_rows(arguments)
