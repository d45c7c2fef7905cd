"""How well a run would scale: the share of the GPUs' speed that is left after communication; predicted, not measured.

    python tests/benchmarks/predictions.py --config bert_large_64gpu [--gpus 8,64,256] [section.field=value ...]

Efficiency is tokens/s over what as many GPUs would reach that sent nothing. With N parameters, T of them in the word
matrix (the decoder's too), W ranks on M nodes of L, b bytes per weight and g per gradient on the wire
(trainer/config/gradient_sum.py) and A accumulation steps, a rank sends in one optimizer step (rings send (W - 1) / W of
a tensor for a gather or a reduction, twice that for an all-reduce):

- ZeRO 0: gradients all-reduced once: 2 g N (W - 1) / W.
- ZeRO 1 in bf16 (trainer/distributed/gradient_reduction.py): gradients exchanged within the node (g N (L - 1) / L),
  fp32 sums among nodes (4 N (M - 1) / (M L)) and to their owners (at most 4 N (W - 1) / W^2), and the new weights
  gathered once (b N (W - 1) / W). Each rank receives as much.
- ZeRO 1 otherwise: gradients all-reduced once, and the new weights gathered once: (2 g + b) N (W - 1) / W.
- ZeRO 2: gradients all-reduced after every micro-batch, the new weights once: (2 g A + b) N (W - 1) / W.
- ZeRO 3: weights gathered in every forward and every backward, the word matrix twice in each, gradients reduced to
  their owners after every micro-batch: A (2 b (N + T) + g N) (W - 1) / W.

The paper (Rajbhandari et al. 2020, section 7) reduces to the owners in stage 2 as well, which is g N less each time;
deepspeed 0.19.8 all-reduces whole buckets there (its use_multi_rank_bucket_allreduce). Measured by
tests/benchmarks/test_predictions.py. Between nodes the link is a node's network, within a node a GPU's share of
NVLink. ZeRO decides what the computation hides:

- 1 in bf16: the exchange of gradients (trainer/distributed/gradient_reduction.py), by the last backward of a step; not
  its last bucket, which holds the word embeddings, whose gradient comes last; and not the gather of the new weights.
  Each of M nodes sends fp32 sums of its ranks, then sums of all to their owners: 4 N (M - 1) / M (1 + 1 / M) bytes
- 2 with DeepSpeed's `overlap_comm`: the all-reduce of each micro-batch, by its backward, likewise
- 3: DeepSpeed gathers ahead in the forward and reduces during the backward
- otherwise nothing

Not counted: latency, the optimizer, other traffic on the network, steps of unequal length.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer import load_config
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.gradient_sum import gradient_sum
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.engine.deepspeed_keys import BATCH_KEYS
from trainer.model.sizes import flops_per_token
from trainer.objectives.pretraining import num_parameters

GPUS_PER_NODE = 8
SUM_BYTES = 4
"""Of a number on the wire in fp32."""
ACHIEVED_FLOPS = 450e12
"""Operations per second that one H100 or H200 is assumed to reach in bf16: 45% of its data sheet's 989e12."""
NVLINK_BYTES_PER_SECOND = 400e9
"""That a GPU sends within its node; the data sheet of the H100 and H200 says 450e9 in each direction."""
NETWORKS_GBITS = (100.0, 400.0, 3200.0)
"""Gb/s of a node: one slow card, one fast card, one fast card per GPU."""
WORLD_SIZES = (1, 8, 64, 256)
_BACKWARD_SHARE = 2 / 3


def main() -> None:
    """Print the table of a configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--gpus", default=",".join(map(str, WORLD_SIZES)), metavar="N[,N]")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    print(*efficiency_lines(config, [int(word) for word in arguments.gpus.split(",")], GPUS_PER_NODE), sep="\n")


@dataclass(frozen=True)
class StepTraffic:
    """One rank's optimizer step: what it computes, and what passes through its slowest link."""

    useful_seconds: float
    """Computation of the global batch's rows."""
    compute_seconds: float
    """That and computation of rows that only fill up."""
    hiding_seconds: float
    """Computation during which `hidden_bytes` are sent."""
    hidden_bytes: float
    last_bytes: float
    """Part of `hidden_bytes` that is ready only when that computation is over."""
    exposed_bytes: float
    """What is sent while nothing is computed."""

    def seconds(self, bytes_per_second: float) -> float:
        """Seconds of the step on a link of this speed."""
        over = self.hidden_bytes / bytes_per_second - self.hiding_seconds
        waited = max(over, self.last_bytes / bytes_per_second)
        return self.compute_seconds + waited + self.exposed_bytes / bytes_per_second

    def efficiency(self, bytes_per_second: float) -> float:
        """Share of the speed of ranks that send nothing and fill nothing up, from 0 to 1."""
        return self.useful_seconds / self.seconds(bytes_per_second)


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


def step_traffic(
    config: RunConfig, stage: Stage, world_size: int, achieved_flops: float, node_gpus: int = GPUS_PER_NODE
) -> StepTraffic:
    """A step of `stage` on `world_size` ranks that each reach `achieved_flops` operations per second."""
    cut = batch_arithmetic(stage, world_size)
    flops = flops_per_token(
        config.model, stage.sequence_length, stage.data.max_mlm_probability, config.data.has_sentence_pairs
    )
    row_seconds = flops * stage.sequence_length / achieved_flops
    compute_seconds = cut.micro_batch_rows * cut.accumulation_steps * row_seconds
    number_bytes = 4 if config.training.precision == "fp32" else 2
    parameters = num_parameters(config.model, config.all_objectives)
    tied = config.model.padded_vocab_size * config.model.hidden_size
    of_ring = (world_size - 1) / world_size
    hiding, hidden, last = 0.0, 0.0, 0.0
    zero_stage, gradient_bytes = config.zero.stage, 4 if gradient_sum(config).sent == "fp32" else 2
    sizes = parameters, tied, number_bytes, gradient_bytes
    total: float = sent_bytes(*sizes, zero_stage, world_size, cut.accumulation_steps)
    if zero_stage == 3:
        hiding, hidden = compute_seconds, total
    elif num_overlapped := _overlapped_reductions(config, cut):
        hiding = _BACKWARD_SHARE * compute_seconds * num_overlapped / cut.accumulation_steps
        per_number = 2 * gradient_bytes * of_ring * num_overlapped
        if zero_stage == 1:
            per_number = exchanged_per_number(gradient_bytes, world_size, node_gpus)
            total = per_number * parameters + number_bytes * parameters * of_ring
        hidden, last = per_number * parameters, per_number * tied
    return StepTraffic(
        useful_seconds=cut.global_rows / world_size * row_seconds,
        compute_seconds=compute_seconds,
        hiding_seconds=hiding,
        hidden_bytes=hidden,
        last_bytes=last,
        exposed_bytes=max(0.0, total - hidden),
    )


def exchanged_per_number(gradient_bytes: int, world_size: int, node_gpus: int) -> float:
    """Bytes per gradient through the slowest link where ranks exchange them: a node's network, if there are several."""
    if node_gpus > 1 and world_size > node_gpus:
        nodes = world_size / node_gpus
        return SUM_BYTES * (nodes - 1) / nodes * (1 + 1 / nodes)
    return (gradient_bytes + SUM_BYTES / world_size) * (world_size - 1) / world_size


def _overlapped_reductions(config: RunConfig, cut: BatchArithmetic) -> int:
    """Reductions of gradients in a step that a backward hides, at the ZeRO stages below 3."""
    if config.zero.stage != 2:
        return int(gradient_sum(config).is_exchanged)
    # The user's batch sizes are those of the run's own number of ranks, and would contradict the YAML at any other.
    user = {key: value for key, value in (config.deepspeed or {}).items() if key not in BATCH_KEYS}
    settings = deepspeed_config(config, cut.world_size, user)
    return cut.accumulation_steps if settings["zero_optimization"].get("overlap_comm") else 0


def link_bytes_per_second(world_size: int, gpus_per_node: int, network_gbits: float) -> float:
    """The slowest link of a ring over all GPUs; within one node there is no network in it."""
    if world_size <= gpus_per_node:
        return NVLINK_BYTES_PER_SECOND
    return min(NVLINK_BYTES_PER_SECOND, network_gbits * 1e9 / 8)


def efficiency_lines(config: RunConfig, world_sizes: Sequence[int], node_gpus: int) -> Iterator[str]:
    """Yield the table of the stage with the largest global batch; a sentence instead for fp32."""
    if config.training.precision == "fp32":
        yield f"No prediction for fp32: the assumed {ACHIEVED_FLOPS / 1e12:.0f} TFLOP/s per GPU are those of bf16."
        return
    stage = max(config.stages, key=lambda stage: stage.global_batch_tokens)
    names = "  ".join(f"{f'{gbits:,.0f} Gb/s':>10}" for gbits in NETWORKS_GBITS)
    yield f"{'GPUs':>5}  {'nodes':>5}  {'micro_batch_tokens':>18}  {'accumulation':>12}  {names}"
    for world_size in world_sizes:
        cut = batch_arithmetic(stage, world_size)
        traffic = step_traffic(config, stage, world_size, ACHIEVED_FLOPS, node_gpus)
        shares = "  ".join(
            f"{traffic.efficiency(link_bytes_per_second(world_size, node_gpus, gbits)):>10.1%}"
            for gbits in NETWORKS_GBITS
        )
        yield (
            f"{world_size:>5}  {-(-world_size // node_gpus):>5}  {cut.micro_batch_tokens:>18,}  "
            f"{cut.accumulation_steps:>12}  {shares}"
        )
    yield (
        f"Predicted, not measured: {ACHIEVED_FLOPS / 1e12:.0f} TFLOP/s per GPU (45% of an H100 or H200 in bf16), "
        f"{node_gpus} GPUs per node with {NVLINK_BYTES_PER_SECOND / 1e9:.0f} GB/s between them, "
        f"{stage.global_batch_tokens:,} tokens per step at ZeRO {config.zero.stage} in {config.training.precision}; "
        "without latency and the optimizer's time"
    )


if __name__ == "__main__":
    main()
