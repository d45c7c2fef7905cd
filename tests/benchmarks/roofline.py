"""What an H200 should reach, predicted: the product's own model kernel by kernel, and DeepSpeed's work around it.

    python tests/benchmarks/roofline.py [--presets bert_large modern_large] [--results FILE]        (no GPU, a minute)

Nothing here is measured. `kernel_trace.py` counts the kernels of one micro-batch on tensors without values; each takes
the longer of its operations over the rate that such kernels reach and its bytes over the bandwidth, and a launch. Two
sides of every preset:

- before: eager blocks, micro-batches and waits as of commit c025165, room for as many sequences as a row could hold
  where the corpus has a document of one token;
- now: the presets as they are, blocks compiled, room for the sequences that are really there.

A third figure (`now_slow`) is that of `now` with the lower ends of the rates. Left out are communication (it is one
GPU), the host (at these sizes it queues faster than the device works) and waiting for data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from unittest import mock

import kernel_trace
import machine
import reports
import torch
from kernel_trace import Kernel
from reports import Row, alone
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer import load_config
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.data.assembly import sequence_capacity
from trainer.model import encoder, layers
from trainer.model.attention import attention_layout
from trainer.model.encoder import build_block
from trainer.model.positions import Rotation, rotation
from trainer.model.sizes import flops_per_token

PRESETS = ("bert_base", "bert_large", "modern_large")
MICRO_BATCH_TOKENS_BEFORE = {"bert_base": 32_768, "bert_large": 16_384, "modern_large": 16_384}
"""At commit c025165."""

SEQUENCES_PER_512 = 2.63
"""Really in a row of 512 positions of the demo's shards, mean (a review's count; the 99th percentile is 5)."""
PAIR_SEQUENCES_PER_ROW = 3
"""With sentence pairs: one or two pairs and the padding that closes the row."""
SHORTEST_SEQUENCE, SHORTEST_PAIR = 3, 5
"""Positions: a document of one token in [CLS] and [SEP]; two segments of one token with three of these."""
PAIR_FILL = 0.97
"""Real tokens in a row of pairs, the least that packing promises; without pairs it is over 0.999."""


@dataclass(frozen=True)
class Device:
    """What kernels reach on one H200 SXM; the sources stand beside the figures."""

    peak_flops: float = 989e12
    """bf16, dense, NVIDIA's data sheet."""
    matmul_flops: float = 700e12
    """Products of these sizes (thousands by thousands): 620 to 700; 790 of 8192^3."""
    attention_forward_flops: float = 350e12
    """FlashAttention 2 on an H100, heads of 64, no mask (Shah et al. 2024, figures 5 and 6)."""
    attention_backward_flops: float = 300e12
    """Likewise."""
    bandwidth: float = 3.8e12
    """Bytes/s that elementwise kernels reach of the data sheet's 4.8e12."""
    launch_seconds: float = 2e-6
    """Between two kernels of a full queue."""
    empty_block_seconds: float = 1.2e-9
    """Of a block that finds no position and ends, all multiprocessors together; estimated, no source."""
    host_wait_seconds: float = 2e-3
    """The queue's bubble where the host waits for a norm; a review estimates 1 to 3 ms."""
    timer_seconds: float = 0.45e-3
    """Likewise for each synchronization of DeepSpeed's throughput timer; 0.3 to 0.6 ms."""


SLOW = Device(matmul_flops=620e12, attention_forward_flops=300e12, attention_backward_flops=250e12, bandwidth=3.3e12)
"""The lower ends: products at 620, attention a sixth slower, 3.3e12 bytes/s."""

ACCUMULATION = {"before": (2 + 6 + (2 + 4) + (4 + 4 + 4), 3), "now": ((2 + 4) + (4 + 4 + 4), 2)}
"""Bytes per parameter and kernels per tensor of a micro-batch in DeepSpeed's BF16_Optimizer: zeroed; added into; copied
to float32; summed. With `bf16.immediate_grad_update` a gradient is copied and summed when it comes, then dropped."""
STEP_BYTES = 4 + (4 + 4) + 28 + (4 + 2) + 4
"""Per parameter and step: norm; clipping; AdamW reads 4 and writes 3 float32; bf16 copy; float32 gradient zeroed."""
STEP_HOST_WAITS = 2
"""At ZeRO stage 1, counted in real runs."""


@dataclass(frozen=True)
class Case:
    """One prediction: a preset on one of the two sides."""

    preset: str
    has_pairs: bool
    side: Literal["before", "now"]


def predict_sides(preset: str, has_pairs: bool) -> dict[str, dict[str, Any]]:
    """`before`, `now` and `now_slow` of a preset."""
    before, now = Case(preset, has_pairs, "before"), Case(preset, has_pairs, "now")
    config = settings_of(now)
    kernels = kernels_of(now, config)
    return {
        "before": predict(before, settings_of(before), kernels_of(before, settings_of(before)), Device()),
        "now": predict(now, config, kernels, Device()),
        "now_slow": predict(now, config, kernels, SLOW),
    }


def predict(case: Case, config: RunConfig, kernels: Sequence[Kernel], device: Device) -> dict[str, Any]:
    """Tokens/s, MFU, seconds by part of one micro-batch and one step, and what they were computed from."""
    (stage,) = config.stages
    batch = batch_arithmetic(stage, 1)
    rows, accumulations = batch.micro_batch_rows, batch.accumulation_steps
    tensors, parameters = parameters_of(config, case.has_pairs)
    parts = seconds_by_part(kernels, device)
    num_bytes, num_kernels = ACCUMULATION[case.side]
    parts["gradient accumulation"] = num_bytes * parameters / device.bandwidth
    parts["gradient accumulation"] += num_kernels * tensors * device.launch_seconds
    is_before = case.side == "before"
    step = STEP_BYTES * parameters / device.bandwidth + STEP_HOST_WAITS * device.host_wait_seconds
    step += (accumulations + 1) * device.timer_seconds if is_before else 0.0
    positions = accumulations * rows * stage.sequence_length
    speed = positions / (accumulations * sum(parts.values()) + step)
    flops = flops_per_token(config.model, stage.sequence_length, config.data.mlm_probability, case.has_pairs)
    return {
        "tokens_per_second": speed * (PAIR_FILL if case.has_pairs else 1.0),
        "mfu": speed * flops / device.peak_flops,
        "micro_batch_tokens": rows * stage.sequence_length,
        "micro_batches_per_step": accumulations,
        "sequence_capacity": capacity(case, rows, stage.sequence_length),
        "milliseconds_per_micro_batch": {name: 1e3 * seconds for name, seconds in parts.items()},
        "milliseconds_per_step": 1e3 * step,
        "kernels": {kind: sum(kernel.kind == kind for kernel in kernels) for kind in _KINDS},
        "elementwise_gigabytes": sum(kernel.num_bytes for kernel in kernels if kernel.kind == "elementwise") / 1e9,
        "attention_scratch_gigabytes": max(kernel.scratch_bytes for kernel in kernels) / 1e9,
        "largest_elementwise": largest(kernels),
    }


_KINDS = ("matmul", "attention", "elementwise")


def settings_of(case: Case) -> RunConfig:
    """The preset of a case."""
    words = ["data.shards=none", f"data.sentence_pairs={'next_sentence' if case.has_pairs else 'none'}"]
    if case.side == "before":
        words.append(f"training.micro_batch_tokens={MICRO_BATCH_TOKENS_BEFORE[case.preset]}")
    return load_config(case.preset, words)


def capacity(case: Case, num_rows: int, sequence_length: int) -> int:
    """Room for sequences in a micro-batch: before, what a row could hold; now, what is there, in the loader's steps."""
    if case.side == "before":
        return num_rows * math.ceil(sequence_length / (SHORTEST_PAIR if case.has_pairs else SHORTEST_SEQUENCE))
    per_row = PAIR_SEQUENCES_PER_ROW if case.has_pairs else SEQUENCES_PER_512 * sequence_length / 512
    return sequence_capacity(math.ceil(num_rows * per_row))


def kernels_of(case: Case, config: RunConfig) -> list[Kernel]:
    """The kernels of a micro-batch's forward and backward."""
    length, num_rows = config.stages[0].sequence_length, batch_arithmetic(config.stages[0], 1).micro_batch_rows
    num_pairs = num_rows * math.ceil(length / SHORTEST_PAIR) if case.has_pairs else 0
    room, probability = capacity(case, num_rows, length), config.data.mlm_probability
    batch = kernel_trace.shapes(num_rows, length, room, probability, num_pairs)
    if case.side == "now":
        return kernel_trace.trace(config.model, batch, case.has_pairs, compiled=True)
    with mock.patch.object(layers, "rotate", _rotate_before), mock.patch.object(encoder, "rotation", _rotation_before):
        return kernel_trace.trace(config.model, replace(batch, has_segment_b=True), case.has_pairs, compiled=False)


def seconds_by_part(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """Of one micro-batch, forward and backward, with each kernel's launch."""
    seconds = dict.fromkeys((*_KINDS, "empty attention blocks"), 0.0)
    for kernel in kernels:
        computing = kernel.flops / _rate(kernel, device) if kernel.flops else 0.0
        seconds[kernel.kind] += max(computing, kernel.num_bytes / device.bandwidth) + device.launch_seconds
        seconds["empty attention blocks"] += kernel.blocks * device.empty_block_seconds
    return seconds


def _rate(kernel: Kernel, device: Device) -> float:
    if kernel.kind == "attention":
        return device.attention_backward_flops if "backward" in kernel.name else device.attention_forward_flops
    return device.matmul_flops


def largest(kernels: Sequence[Kernel], number: int = 12) -> dict[str, dict[str, float]]:
    """The elementwise kernels that move the most, by name."""
    found: dict[str, dict[str, float]] = {}
    for kernel in kernels:
        if kernel.kind == "elementwise":
            entry = found.setdefault(kernel.name, {"kernels": 0, "gigabytes": 0.0})
            entry["kernels"] += 1
            entry["gigabytes"] += kernel.num_bytes / 1e9
    return dict(sorted(found.items(), key=lambda item: -item[1]["gigabytes"])[:number])


def parameters_of(config: RunConfig, has_pairs: bool) -> tuple[int, int]:
    """Tensors and numbers of the model's parameters."""
    with FakeTensorMode():
        model = kernel_trace.PretrainingModel(config.model, has_pairs)
    return sum(1 for _ in model.parameters()), sum(parameter.numel() for parameter in model.parameters())


def fusion(preset: str, device: Device = Device()) -> dict[str, dict[str, float]]:
    """Of one block in the preset's micro-batch, forward and backward: eager operators before, fused kernels now."""
    before, now = (block_kernels(preset, compiled) for compiled in (False, True))
    return {
        side: {
            "elementwise_kernels": sum(kernel.kind == "elementwise" for kernel in kernels),
            "elementwise_gigabytes": sum(k.num_bytes for k in kernels if k.kind == "elementwise") / 1e9,
            "elementwise_milliseconds": 1e3 * seconds_by_part(kernels, device)["elementwise"],
        }
        for side, kernels in (("before", before), ("now", now))
    }


def block_kernels(preset: str, compiled: bool) -> list[Kernel]:
    """The kernels of the preset's second block; eager with the rotation of commit c025165, for comparison."""
    config = load_config(preset, ["data.shards=none"])
    model, length = config.model, config.data.sequence_length
    rotates = mock.patch.object(layers, "rotate", layers.rotate if compiled else _rotate_before)
    with kernel_trace.as_on_cuda(), FakeTensorMode(), rotates:
        batch = kernel_trace.shapes(config.training.micro_batch_tokens // length, length, 192, 0.15)
        turning = rotation if compiled else _rotation_before
        angles = turning(batch.position_ids, model.head_size, 1e4) if model.position_embedding == "rotary" else None
        layout = attention_layout(batch, torch.bfloat16, "varlen", rotation=angles)
        block = kernel_trace.in_bfloat16(lambda: build_block(model, 1)).train()
        hidden = torch.empty(batch.input_ids.numel(), model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty_like(hidden)
        return kernel_trace.count(block, lambda: block(hidden, layout).backward(gradient), compiled)


def _rotation_before(position_ids: torch.Tensor, head_size: int, theta: float) -> Rotation:
    """As of commit c025165: the angles of both halves."""
    cosine, sine = rotation(position_ids, head_size, theta)
    return Rotation(torch.cat([cosine, cosine], dim=-1), torch.cat([sine, sine], dim=-1))


def _rotate_before(heads: torch.Tensor, turning: Rotation) -> torch.Tensor:
    """As of commit c025165: the halves are joined before they are rounded."""
    numbers = heads.float()
    first, second = numbers.chunk(2, dim=-1)
    turned = numbers * turning.cosine + torch.cat([-second, first], dim=-1) * turning.sine
    return turned.to(heads.dtype)


def main() -> None:
    """Predict, print and write."""
    parser = reports.parser(__doc__)
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME", help="by default all three")
    arguments = parser.parse_args()
    details: dict[str, Any] = {"kind": "prediction, not measured", "device": asdict(Device())}
    details |= {"device_slow": asdict(SLOW), "predictions": {}}
    details["fusion"] = {preset: fusion(preset) for preset in arguments.presets}
    for preset in arguments.presets:
        for has_pairs in (False, True) if preset.startswith("bert") else (False,):
            name = f"{preset} with sentence pairs" if has_pairs else preset
            details["predictions"][name] = predict_sides(preset, has_pairs)
    reports.save(arguments.results, machine.described("torch", "deepspeed"), details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Predicted tokens/s, now beside before; then the kernels of a block that are neither products nor attention."""
    found = []
    for name, sides in details["predictions"].items():
        now, before, slow = (
            (sides[side]["tokens_per_second"], f"MFU {sides[side]['mfu']:.0%}")
            for side in ("now", "before", "now_slow")
        )
        found.append(Row(f"{name}, {now[1]}", now[0], before[0], f"before, {before[1]}", "tokens/s", "more", 1))
        found.append(alone(f"{name} at the lower rates, {slow[1]}", slow[0], "tokens/s", "more"))
    for preset, sides in details["fusion"].items():
        counts = (sides[side]["elementwise_kernels"] for side in ("now", "before"))
        found.append(Row(f"elementwise kernels of a block of {preset}", *counts, "before", "kernels", "less", 1))
    return found


if __name__ == "__main__":
    main()
