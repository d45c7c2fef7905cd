"""The sample numbers that a log names are those that `launch/show_batch.py` shows: the very rows, bit by bit."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UsageError
from launch import show_batch
from tests.support.error_codes import coded
from trainer import load_config
from trainer.checkpoint.data_version import open_data
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.data.loader import Loader, Position

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


def test_several_ranges_are_shown_one_at_a_time() -> None:
    arguments = show_batch.parse_arguments(["--config", "tiny_cpu", "--samples", "1:3,5:7"])
    with pytest.raises(UsageError, check=coded("several-ranges")):
        show_batch.choose_rows(arguments)
