"""What a run would need at other numbers of GPUs: memory and traffic of a rank in one step, for ZeRO 1 to 3, on paper.

With N parameters, T of them in the word matrix (the decoder's too), W ranks on M nodes of L, b bytes per weight and g
per gradient on the wire (trainer/config/gradient_sum.py) and A accumulation steps, a rank sends in one optimizer step
(rings send (W - 1) / W of a tensor for a gather or a reduction, twice that for an all-reduce):

- ZeRO 0: gradients all-reduced once: 2 g N (W - 1) / W.
- ZeRO 1 in bf16 (trainer/distributed/gradient_exchange.py): gradients exchanged within the node (g N (L - 1) / L), fp32
  sums among nodes (4 N (M - 1) / (M L)) and to their owners (at most 4 N (W - 1) / W^2), and the new weights gathered
  once (b N (W - 1) / W). Each rank receives as much.
- ZeRO 1 otherwise: gradients all-reduced once, and the new weights gathered once: (2 g + b) N (W - 1) / W.
- ZeRO 2: gradients all-reduced after every micro-batch, the new weights once: (2 g A + b) N (W - 1) / W.
- ZeRO 3: weights gathered in every forward and every backward, the word matrix twice in each, gradients reduced to
  their owners after every micro-batch: A (2 b (N + T) + g N) (W - 1) / W.

The paper (Rajbhandari et al. 2020, section 7) reduces to the owners in stage 2 as well, which is g N less each time;
deepspeed 0.19.8 all-reduces whole buckets there (its use_multi_rank_bucket_allreduce). Measured by
tests/trainer/preflight/test_traffic.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.gradient_sum import gradient_sum
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.model.sizes import flops_per_token, num_parameters
from trainer.preflight.disk_checks import CHECKPOINT_BYTES_PER_PARAMETER
from trainer.preflight.memory_estimate import memory_in_stage

GIB = 1 << 30
GPUS_PER_NODE = 8
SUM_BYTES = 4
"""Of a number on the wire in fp32."""
STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
_STATE = ("weights", "gradients", "master_weights", "optimizer")


@dataclass(frozen=True)
class Scaled:
    """One rank's share of a step."""

    world_size: int
    zero_stage: int
    micro_batch_rows: int
    accumulation_steps: int
    state_bytes: int
    """Weights, gradients, master weights and optimizer state."""
    work_bytes: int
    """Activations and logits of a micro-batch."""
    sent_bytes: int
    flops: float


def sent_bytes(
    num_numbers: int,
    num_tied: int,
    number_bytes: int,
    gradient_bytes: int,
    zero_stage: int,
    world_size: int,
    accumulation_steps: int,
    exchanged_on: int | None = None,
) -> int:
    """What a rank sends in one optimizer step, by the formulas above.

    Args:
        num_tied: numbers in the word matrix.
        number_bytes: of a weight on the wire.
        gradient_bytes: of a gradient.
        exchanged_on: ranks per node, where ranks exchange gradients (ZeRO 1 in bf16).
    """
    reduced, sums = gradient_bytes * num_numbers, SUM_BYTES * num_numbers
    if zero_stage == 3:
        total = accumulation_steps * (2 * number_bytes * (num_numbers + num_tied) + reduced)
    elif exchanged_on is None:
        total = 2 * reduced * (accumulation_steps if zero_stage == 2 else 1)
        total += number_bytes * num_numbers if zero_stage else 0
    else:
        nodes = max(1, world_size // exchanged_on) if exchanged_on > 1 else 1
        local = world_size // nodes
        exchanged = reduced * (local - 1) // local + sums * (nodes - 1) // world_size
        return exchanged + (sums // world_size + number_bytes * num_numbers) * (world_size - 1) // world_size
    return total * (world_size - 1) // world_size


def scaled(config: RunConfig, stage: Stage, world_size: int, zero_stage: Literal[1, 2, 3]) -> Scaled:
    """A rank's share of a step of `stage` on `world_size` ranks."""
    cut = batch_arithmetic(stage, world_size)
    parts = memory_in_stage(config, stage, zero_stage, world_size)
    flops = flops_per_token(
        config.model, stage.sequence_length, stage.data.max_mlm_probability, config.data.has_sentence_pairs
    )
    state, summed = sum(parts[name] for name in _STATE), gradient_sum(config, zero_stage)
    return Scaled(
        world_size=world_size,
        zero_stage=zero_stage,
        micro_batch_rows=cut.micro_batch_rows,
        accumulation_steps=cut.accumulation_steps,
        state_bytes=state,
        work_bytes=sum(parts.values()) - state,
        sent_bytes=sent_bytes(
            num_parameters(config.model, config.data.has_sentence_pairs),
            config.model.padded_vocab_size * config.model.hidden_size,
            4 if config.training.precision == "fp32" else 2,
            summed.sent_bytes,
            zero_stage,
            world_size,
            cut.accumulation_steps,
            GPUS_PER_NODE if summed.is_exchanged else None,
        ),
        flops=flops * cut.micro_batch_tokens * cut.accumulation_steps,
    )


def scale_lines(config: RunConfig, world_sizes: Sequence[int]) -> Iterator[str]:
    """The table for people: every number of GPUs, every ZeRO stage, the largest global batch."""
    stage = max(config.stages, key=lambda stage: stage.global_batch_tokens)
    checkpoint_bytes = CHECKPOINT_BYTES_PER_PARAMETER * num_parameters(config.model, config.data.has_sentence_pairs)
    yield (
        f"{stage.global_batch_tokens:,} tokens per step at length {stage.sequence_length}, "
        f"{config.training.precision}; memory in GiB, traffic in GiB that a rank sends per step"
    )
    yield "GPUs  ZeRO  micro_batch_tokens  accumulation  state  activations  total   sent  TFLOP    sent/PFLOP"
    for world_size in world_sizes:
        for zero_stage in STAGES:
            one = scaled(config, stage, world_size, zero_stage)
            tokens = one.micro_batch_rows * stage.sequence_length
            yield (
                f"{world_size:>4}  {zero_stage:>4}  {tokens:>18,}  {one.accumulation_steps:>12}  "
                f"{one.state_bytes / GIB:>5.2f}  {one.work_bytes / GIB:>11.2f}  "
                f"{(one.state_bytes + one.work_bytes) / GIB:>5.2f}  {one.sent_bytes / GIB:>5.2f}  "
                f"{one.flops / 1e12:>5.1f}  {one.sent_bytes / GIB / (one.flops / 1e15):>12.2f}"
            )
    yield (
        "A GPU that reaches F PFLOP/s hides its traffic where its network sends more than F times the last column in "
        "GiB/s (all of it overlapped); checkpoints: each rank writes 1 / GPUs of "
        f"{checkpoint_bytes / GIB:.2f} GiB at any stage from 1 on"
    )
