from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from trainer import load_config
from trainer.benchmark.measurement import RESOLUTION, StepClock, Training, largest_that_fits, with_micro_batch
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import open_shard_set
from trainer.distributed.process_group import Ranks

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU_RANK = Ranks(0, 1, 0, torch.device("cpu"))
OVERRIDES = [
    *("model.vocab_size=300", "model.hidden_size=32", "model.num_attention_heads=2", "model.intermediate_size=64"),
    *("data.sentence_pairs=none", "model.output_bias=zeros"),
]


def tiny_config(*overrides: str) -> RunConfig:
    return load_config("tiny_cpu", [*OVERRIDES, *overrides])


def test_a_micro_batch_replaces_the_configured_one_and_the_global_batch_grows_with_it() -> None:
    config = tiny_config()
    smaller = with_micro_batch(config, 0, 512, world_size=2)
    assert (smaller.training.micro_batch_tokens, smaller.training.global_batch_tokens) == (512, 2048)
    assert batch_arithmetic(smaller.stages[0], 2).accumulation_steps == 2
    larger = with_micro_batch(config, 0, 4096, world_size=2)
    assert larger.training.global_batch_tokens == 8192
    assert batch_arithmetic(larger.stages[0], 2).accumulation_steps == 1
    assert RunConfig.model_validate(larger.model_dump()) == larger, "what is measured is a valid configuration"


def test_a_stage_becomes_the_only_one() -> None:
    config = load_config("bert_large_phased", [])
    stage = config.stages[1]
    alone = with_micro_batch(config, 1, stage.micro_batch_tokens, 1)
    assert len(alone.stages) == 1
    assert alone.stages[0].sequence_length == alone.data.sequence_length == stage.sequence_length
    assert alone.stages[0].global_batch_tokens == stage.global_batch_tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_the_clock_gives_the_time_between_marks(device: str) -> None:
    clock = StepClock(torch.device(device))
    clock.mark()
    for _ in range(2):
        if device == "cpu":
            time.sleep(0.02)
        else:
            torch.cuda._sleep(50_000_000)
        clock.mark()
    seconds = clock.seconds()
    assert len(seconds) == 2 and min(seconds) >= 0.015


@pytest.mark.long
def test_steps_are_measured_with_the_plain_engine(tmp_path: Path) -> None:
    config = with_micro_batch(tiny_config("logging.peak_flops_per_device=1e12"), 0, 1024, 1)
    write_synthetic_shards(tmp_path, 300, 50_000, DocumentLengths(30, 0.5))
    training = Training(config, [open_shard_set(str(tmp_path))], CPU_RANK, use_deepspeed=False)
    point = training.measure(num_steps=4, num_warmup_steps=1)
    training.close()
    assert training.num_steps == 5 and point.num_steps == 4
    assert (point.micro_batch_tokens, point.global_batch_tokens, point.accumulation_steps) == (1024, 2048, 2)
    times = point.step_milliseconds
    assert 0.0 < times["p10"] <= times["median"] <= times["p90"]
    assert 0.95 < point.filled_share <= 1.0
    tokens_a_step = point.filled_share * 2048
    assert tokens_a_step / times["p90"] * 900 < point.tokens_per_second < tokens_a_step / times["p10"] * 1100
    assert 0.0 <= point.data_wait_share < 1.0
    assert point.mfu is not None and 0.0 < point.mfu < 1.0
    assert point.peak_memory_bytes["resident"] > 1 << 20


@pytest.mark.parametrize("first", [1, 3, 64, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 33, 100, 1000])
def test_the_largest_is_found_to_within_the_resolution_and_nothing_is_tried_twice(first: int, capacity: int) -> None:
    limit, asked = 100, []

    def fits(rows: int) -> bool:
        asked.append(rows)
        return rows <= capacity

    found = largest_that_fits(fits, first, limit)
    best = min(capacity, limit)
    assert best - max(1, best * RESOLUTION) <= found <= best
    assert found == 0 or found in asked
    assert len(asked) == len(set(asked)) and all(1 <= rows <= limit for rows in asked)
