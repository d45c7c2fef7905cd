from __future__ import annotations

import pytest

from trainer import load_config
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.preflight.memory_estimate import memory_in_stage


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
