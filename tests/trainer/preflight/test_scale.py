from __future__ import annotations

import pytest

from trainer import load_config
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.preflight.memory_estimate import memory_in_stage
from trainer.preflight.scale import scale_lines, scaled, sent_bytes


def test_traffic_by_hand():
    """A thousand numbers of 2 bytes, 100 of them tied, on 4 ranks: rings send three quarters of a tensor."""
    sizes = {"num_numbers": 1000, "num_tied": 100, "number_bytes": 2, "gradient_bytes": 4, "accumulation_steps": 8}
    assert sent_bytes(**sizes, zero_stage=1, world_size=4) == (2 * 4 + 2) * 750
    assert sent_bytes(**sizes, zero_stage=2, world_size=4) == (8 * 2 * 4 + 2) * 750
    assert sent_bytes(**sizes, zero_stage=3, world_size=4) == 8 * (2 * 2 + 4) * 750 + 8 * 2 * 2 * 75
    assert sent_bytes(**sizes, zero_stage=3, world_size=1) == 0
    sizes["gradient_bytes"] = 2
    assert sent_bytes(**sizes, zero_stage=2, world_size=4) == (4 * 2 * 4 + 2) * 750, "where the user wants bf16"
    # Exchanged: of what a rank computed three quarters; of its quarter of the sums three quarters; then its weights.
    for node in (1, 4):
        assert sent_bytes(**sizes, zero_stage=1, world_size=4, exchanged_on=node) == 2 * 750 + 4 * 187.5 + 2 * 750
    # On nodes of two half goes to the neighbor, and half of half the sums to the other node.
    assert sent_bytes(**sizes, zero_stage=1, world_size=4, exchanged_on=2) == 2 * 500 + 4 * 250 + 4 * 187.5 + 2 * 750
    assert sent_bytes(**sizes, zero_stage=1, world_size=1, exchanged_on=8) == 0


def test_the_global_batch_stays_whole_and_the_work_is_divided():
    config = load_config("bert_large", [])
    (stage,) = config.stages
    eight, many = scaled(config, stage, 8, 1), scaled(config, stage, 512, 1)
    assert (eight.micro_batch_rows, eight.accumulation_steps) == (128, 2)
    assert (many.micro_batch_rows, many.accumulation_steps) == (4, 1), "2,048 rows on 512 ranks"
    assert eight.flops * 8 == pytest.approx(many.flops * 512)
    assert many.state_bytes < eight.state_bytes and many.work_bytes < eight.work_bytes


def test_more_ranks_than_rows_leave_one_row_each():
    config = load_config("bert_large", ["training.global_batch_tokens=16384", "training.micro_batch_tokens=16384"])
    one = scaled(config, config.stages[0], 64, 2)
    assert (one.micro_batch_rows, one.accumulation_steps) == (1, 1)


def test_the_table_has_a_line_for_every_number_and_stage():
    config = load_config("bert_large", [])
    lines = list(scale_lines(config, [8, 64, 512]))
    assert [tuple(map(int, line.split()[:2])) for line in lines[2:-1]] == [
        (gpus, stage) for gpus in (8, 64, 512) for stage in (1, 2, 3)
    ]
    assert [line.split()[2] for line in lines[2:-1:3]] == ["65,536", "16,384", "2,048"], "training.micro_batch_tokens"


@pytest.mark.parametrize(
    ("preset", "pairs"),
    [
        *(("bert_base", "next_sentence"), ("bert_large", "none"), ("bert_large", "next_sentence")),
        *(("bert_large_64gpu", "none"), ("modern_large", "none"), ("bert_large_phased", "next_sentence")),
    ],
)
def test_the_micro_batches_of_presets_fill_a_card_of_80_gb(preset: str, pairs: str) -> None:
    """On one rank, where nothing is divided, with room for buffers and the allocator."""
    config = load_config(preset, [f"data.sentence_pairs={pairs}"])
    for stage in config.stages:
        parts = memory_in_stage(config, stage, config.zero.stage, world_size=1)
        assert {"optimizer", "logits", "activations"} <= parts.keys() and min(parts.values()) > 0
        sequences = 2 * SEQUENCES_PER_ROW * stage.micro_batch_tokens // stage.sequence_length
        scratch = 4 * (stage.micro_batch_tokens + 128 * sequences) * config.model.hidden_size
        assert sum(parts.values()) + scratch <= 0.85 * 80e9
        # Twice as many rows do not fit, or the global batch is one micro-batch.
        doubled = sum(parts.values()) + parts["activations"] + parts["logits"]
        assert doubled > 0.85 * 80e9 or batch_arithmetic(stage, 1).accumulation_steps == 1


SEQUENCES_PER_ROW = 7
"""More than rows hold on average (2 to 3). Flash attention's backward has fp32 scratch for the tokens of a micro-batch
and 128 for each sequence that there is room for, up to twice as many as there are."""
