from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from trainer import load_config
from trainer.data.batch import IGNORED
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.sample_range import SampleRange
from trainer.data.shard_set import open_shard_set
from trainer.loop import global_batches
from trainer.loop.global_batches import without_skipped
from trainer.loop.step import poisoned_unless_finite


def batches(shards: Path, rank: int, world_size: int, micro_rows: int, steps: int = 3) -> list[GlobalBatch]:
    sizes = ["training.global_batch_tokens=832", f"training.micro_batch_tokens={micro_rows * 64}"]  # 13 rows a step
    config = load_config("tiny_cpu", [f"data.shards={shards}", *sizes])
    stage = config.stages[0]
    loader = Loader([open_shard_set(str(shards))], stage, Position(0, 0, 0), 1, (rank, world_size))
    skipped = [
        SampleRange(stage=0, epoch=0, first=5, stop=16),
        SampleRange(stage=0, epoch=0, first=26, stop=39),
        SampleRange(stage=0, epoch=1, first=0, stop=5),
        SampleRange(stage=1, epoch=0, first=0, stop=5),
    ]
    return [without_skipped(batch, skipped) for batch in itertools.islice(loader, steps)]


def labeled_rows(shards: Path, world_size: int, micro_rows: int) -> list[dict[int, tuple[int, int]]]:
    """By step: the samples with predictions, each with its number of labels and of pairs, over all ranks."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in range(3)]
    for rank in range(world_size):
        for step, batch in enumerate(batches(shards, rank, world_size, micro_rows)):
            slices = world_size * len(batch.micro_batches)
            for number, micro in enumerate(batch.micro_batches):
                first = batch.first_sample + (batch.first_slice + number) * 13 // slices
                rows = micro.masked_positions[micro.labels != IGNORED] // 64
                pairs = micro.cls_positions[micro.next_sentence_labels != IGNORED] // 64
                for row in set(rows.tolist()) | set(pairs.tolist()):
                    found[step][first + row] = (int((rows == row).sum()), int((pairs == row).sum()))
    return found


def test_the_skipped_samples_and_no_others_lose_their_predictions_on_any_number_of_ranks(small_shards):
    steps = labeled_rows(small_shards, world_size=1, micro_rows=13)
    assert [set(rows) for rows in steps] == [{*range(5)}, {*range(16, 26)}, set()]
    assert all(labels > 0 and pairs > 0 for rows in steps for labels, pairs in rows.values())
    for world_size, micro_rows in ((2, 3), (3, 2), (4, 1)):
        assert labeled_rows(small_shards, world_size, micro_rows) == steps


def test_no_loader_is_opened_for_a_stage_without_steps(small_shards, monkeypatch):
    stage = "{steps: 2, sequence_length: 64, micro_batch_tokens: 256, global_batch_tokens: 512}"
    sizes = ["training.max_steps=4", "data.num_workers=0", f"training.stages=[{stage}, {stage}, {stage}]"]
    config = load_config("tiny_cpu", [f"data.shards={small_shards}", *sizes])
    opened = []

    def noted(shard_sets, stage, position, seed, ranks, start):
        opened.append((config.stages.index(stage), start))
        return Loader(shard_sets, stage, position, seed, ranks, start)

    monkeypatch.setattr(global_batches, "Loader", noted)
    shard_sets = [open_shard_set(str(small_shards))]
    every = [batch.first_sample for batch in global_batches.batches_from(config, shard_sets, 0, (0, 1))]
    assert len(every) == 4 and opened == [(0, 0), (1, 2)]
    opened.clear()
    last = [batch.first_sample for batch in global_batches.batches_from(config, shard_sets, 3, (0, 1))]
    assert last == every[3:] and opened == [(0, 0), (1, 2), (1, 3)]


def test_rows_that_are_not_skipped_stay_the_same(small_shards):
    (batch, *_) = batches(small_shards, 0, 1, 13)
    skipped = [SampleRange(stage=0, epoch=0, first=13, stop=20)]
    assert without_skipped(batch, skipped) is batch


def test_rows_of_another_epoch_are_not_skipped(small_shards):
    (batch, *_) = batches(small_shards, 0, 1, 13)
    assert without_skipped(batch, [SampleRange(stage=0, epoch=2, first=0, stop=13)]) is batch


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_loss_that_is_not_finite_poisons_its_gradient_and_a_finite_one_is_bitwise_itself(value):
    weight = torch.tensor([1.5, 2.5], requires_grad=True)
    poisoned_unless_finite(weight.sum() + value).backward()
    assert weight.grad.isnan().all()
    loss = (weight * 0.3).sum()
    assert torch.equal(poisoned_unless_finite(loss), loss)
