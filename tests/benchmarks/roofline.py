"""What an H200 and an H100 should reach, predicted: the product's own model kernel by kernel, and DeepSpeed around it.

    python tests/benchmarks/roofline.py [--cases bert_large ...] [--shards DIR] [--results FILE]   (no GPU, minutes)

Nothing here is measured on a GPU. `kernel_trace.py` counts the kernels of one micro-batch on tensors without values;
each takes the longer of its operations over the rate that such kernels reach and its bytes over the bandwidth, and a
launch. Every case has two sides:

- before: commit a83ab877, its micro-batches, attention launched for whole rows, StableAdamW one operator at a time;
- now: the presets as they are.

A third figure (`now_slow`) is that of `now` with the lower ends of the rates. Left out are communication (it is one
GPU), the host (at these sizes it queues faster than the device works) and waiting for data. `--shards` counts the
sequences of micro-batches again instead of taking those of `SEQUENCES`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kernel_trace
import machine
import reports
import torch
from kernel_trace import Kernel
from reports import Row, alone
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer import load_config, open_loader
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.batch import sequence_capacity
from trainer.model.attention import attention_layout
from trainer.model.encoder import build_block
from trainer.model.positions import rotation
from trainer.model.sizes import flops_per_token


@dataclass(frozen=True)
class Case:
    """What is predicted: a preset at a sequence length."""

    preset: str
    length: int
    has_pairs: bool = False
    tokens_before: int | None = None
    """Of a micro-batch at commit a83ab877, where it was another."""
    published: float | None = None
    """Tokens/s of one H100, published for this model at this length."""

    @property
    def name(self) -> str:
        return f"{self.preset} at {self.length:,}{' with sentence pairs' if self.has_pairs else ''}"


CASES = (
    *(Case("bert_base", 512, has_pairs, tokens_before=65_536) for has_pairs in (False, True)),
    *(Case("bert_large", 512, has_pairs, tokens_before=32_768) for has_pairs in (False, True)),
    Case("modern_large", 1024),
    Case("modern_large", 8192),
    # Warner et al. 2024 (arXiv 2412.13663): 1.7T tokens in 194 hours on 8 H100.
    Case("modernbert_base", 1024, published=1.7e12 / (194 * 3600 * 8)),
    Case("modernbert_base", 8192),
)

SEQUENCES: Mapping[tuple[int, int], tuple[float, float]] = {
    (512, 64): (1.797, 512.0),
    (512, 128): (1.798, 512.0),
    (512, 256): (1.798, 512.0),
    (1024, 32): (2.593, 1024.0),
    (1024, 96): (2.581, 1024.0),
    (8192, 4): (13.625, 7239.8),
    (8192, 12): (13.625, 8192.0),
}
"""By length and rows of a micro-batch: sequences in a row, padding too, and the bound of the longest that attention
gets, means. Counted by `--shards` on the shards of pack_small."""
PAIR_SEQUENCES_PER_ROW = 3
"""With sentence pairs: one or two pairs and the padding that closes the row."""
SHORTEST_PAIR = 5
"""Positions: two segments of one token with three special tokens."""
PAIR_FILL = 0.97
"""Real tokens in a row of pairs, the least that packing promises; without pairs it is over 0.999."""

FLASH_ATTENTION_2 = (
    *((512, 282e12, 198e12), (1024, 306e12, 238e12), (2048, 318e12, 264e12)),
    *((4096, 321e12, 279e12), (8192, 322e12, 287e12), (16384, 324e12, 291e12)),
)
"""Keys, operations/s forward and backward on an H100 SXM5, heads of 64, no mask (Shah et al. 2024, arXiv 2407.08608,
figures 5 and 6). Fewer keys than 512 take the rate of 512, which is too much for a window."""


@dataclass(frozen=True)
class Device:
    """What kernels reach on one GPU; the sources stand beside the figures."""

    bandwidth: float
    """Bytes/s that elementwise kernels reach."""
    peak_flops: float = 989e12
    """bf16, dense, NVIDIA's data sheet of both."""
    matmul_flops: float = 700e12
    """Products of these sizes (thousands by thousands): 620 to 700; 790 of 8192^3."""
    attention: tuple[tuple[int, float, float], ...] = FLASH_ATTENTION_2
    launch_seconds: float = 2e-6
    """Between two kernels of a full queue."""
    empty_block_seconds: float = 1.2e-9
    """Of a block that finds no position and ends, all multiprocessors together; estimated, no source."""
    host_wait_seconds: float = 2e-3
    """The queue's bubble where the host waits for a norm; a review estimates 1 to 3 ms."""

    def slow(self, bandwidth: float) -> Device:
        """The lower ends: products at 620, attention a sixth slower, and this bandwidth."""
        attention = tuple((keys, *(5 / 6 * rate for rate in rates)) for keys, *rates in self.attention)
        return replace(self, bandwidth=bandwidth, matmul_flops=620e12, attention=attention)


H200, H100 = Device(bandwidth=3.8e12), Device(bandwidth=2.65e12)
"""79% of the data sheets' 4.8e12 and 3.35e12."""
DEVICES = {"H200": (H200, H200.slow(3.3e12)), "H100": (H100, H100.slow(2.4e12))}

ACCUMULATION = ((2 + 4) + (4 + 4 + 4), 2)
"""Bytes per parameter and kernels per tensor of a micro-batch in DeepSpeed's BF16_Optimizer: with
`bf16.immediate_grad_update` a gradient is copied to float32 and summed when it comes, then dropped."""
STEP_BYTES = 4 + (4 + 4) + (4 + 2) + 4
"""Per parameter and step, but for the optimizer: norm; clipping; bf16 copy; float32 gradient zeroed."""
OPTIMIZERS = {"adamw": (28, 0), "stable_adamw before": (120, 2319 / 154), "stable_adamw": (120, 392 / 154)}
"""Bytes per parameter and kernels per tensor of a step. AdamW's fused kernel reads 4 and writes 3 float32;
tests/trainer/engine/test_stable_adamw.py counts StableAdamW's for the 154 tensors of `bert_base`."""
STEP_HOST_WAITS = 2
"""At ZeRO stage 1, counted in real runs."""


def predict_case(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """`before`, `now` and `now_slow` of a case on each device; and the micro-batch of both sides."""
    found: dict[str, Any] = {name: {} for name in DEVICES}
    micro_batches = {}
    for side in ("before", "now"):
        config, stage = settings_of(case, side)
        kernels = kernels_of(case, side, config, stage)
        micro_batches[side] = micro_batch_of(case, side, stage, kernels)
        for name, (device, slow) in DEVICES.items():
            found[name][side] = predict(case, side, kernels, device)
            if side == "now":
                found[name]["now_slow"] = predict(case, side, kernels, slow)
    return found, micro_batches


def micro_batch_of(case: Case, side: str, stage: Stage, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """What the predictions of a side are computed from."""
    batch = batch_arithmetic(stage, 1)
    return {
        "tokens": batch.micro_batch_tokens,
        "micro_batches_per_step": batch.accumulation_steps,
        "sequences": sequences_of(case, side, batch.micro_batch_rows),
        "kernels": {kind: sum(kernel.kind == kind for kernel in kernels) for kind in _KINDS},
        "elementwise_gigabytes": sum(kernel.num_bytes for kernel in kernels if kernel.kind == "elementwise") / 1e9,
        "attention_scratch_gigabytes": max(kernel.scratch_bytes for kernel in kernels) / 1e9,
    }


def predict(case: Case, side: str, kernels: Sequence[Kernel], device: Device) -> dict[str, Any]:
    """Tokens/s, MFU, and milliseconds by part of one micro-batch and of one step."""
    config, stage = settings_of(case, side)
    batch = batch_arithmetic(stage, 1)
    tensors, parameters = parameters_of(config, case.has_pairs)
    parts = seconds_by_part(kernels, device)
    num_bytes, num_kernels = ACCUMULATION
    parts["gradient accumulation"] = num_bytes * parameters / device.bandwidth
    parts["gradient accumulation"] += num_kernels * tensors * device.launch_seconds
    optimizer = config.optimizer.name
    optimizer_bytes, optimizer_kernels = OPTIMIZERS.get(f"{optimizer} {side}", OPTIMIZERS[optimizer])
    step = (STEP_BYTES + optimizer_bytes) * parameters / device.bandwidth
    step += optimizer_kernels * tensors * device.launch_seconds + STEP_HOST_WAITS * device.host_wait_seconds
    speed = stage.global_batch_tokens / (batch.accumulation_steps * sum(parts.values()) + step)
    flops = flops_per_token(config.model, case.length, stage.data.max_mlm_probability, case.has_pairs)
    return {
        "tokens_per_second": speed * (PAIR_FILL if case.has_pairs else 1.0),
        "mfu": speed * flops / device.peak_flops,
        "milliseconds_per_micro_batch": {name: 1e3 * seconds for name, seconds in parts.items()},
        "milliseconds_per_step": 1e3 * step,
    }


_KINDS = ("matmul", "attention", "elementwise")


def settings_of(case: Case, side: str) -> tuple[RunConfig, Stage]:
    """The preset of a case, and its first stage of that length; a preset of one stage takes the length."""
    words = ["data.shards=none", f"data.sentence_pairs={'next_sentence' if case.has_pairs else 'none'}"]
    if not load_config(case.preset, words).training.stages:
        words.append(f"data.sequence_length={case.length}")
        if side == "before" and case.tokens_before is not None:
            words.append(f"training.micro_batch_tokens={case.tokens_before}")
    config = load_config(case.preset, words)
    return config, next(stage for stage in config.stages if stage.sequence_length == case.length)


def sequences_of(case: Case, side: str, num_rows: int) -> tuple[int, int]:
    """Room for sequences in a micro-batch, in the loader's steps, and what attention takes for the longest."""
    if case.has_pairs:
        return sequence_capacity(num_rows * PAIR_SEQUENCES_PER_ROW), case.length
    per_row, longest = SEQUENCES[case.length, num_rows]
    return sequence_capacity(math.ceil(num_rows * per_row)), case.length if side == "before" else round(longest)


def kernels_of(case: Case, side: str, config: RunConfig, stage: Stage) -> list[Kernel]:
    """The kernels of a micro-batch's forward and backward."""
    num_rows = batch_arithmetic(stage, 1).micro_batch_rows
    num_pairs = num_rows * math.ceil(case.length / SHORTEST_PAIR) if case.has_pairs else 0
    room, longest = sequences_of(case, side, num_rows)
    batch = kernel_trace.shapes(num_rows, case.length, room, stage.data.max_mlm_probability, num_pairs)
    return kernel_trace.trace(config.model, replace(batch, longest_sequence=longest), case.has_pairs, compiled=True)


def seconds_by_part(kernels: Sequence[Kernel], device: Device) -> dict[str, float]:
    """Of one micro-batch, forward and backward, with each kernel's launch."""
    seconds = dict.fromkeys((*_KINDS, "empty attention blocks"), 0.0)
    for kernel in kernels:
        computing = kernel.flops / rate(kernel, device) if kernel.flops else 0.0
        seconds[kernel.kind] += max(computing, kernel.num_bytes / device.bandwidth) + device.launch_seconds
        seconds["empty attention blocks"] += kernel.blocks * device.empty_block_seconds
    return seconds


def rate(kernel: Kernel, device: Device) -> float:
    """Operations/s: of attention those of the longest row in the device's table that is not longer than its keys."""
    if kernel.kind != "attention":
        return device.matmul_flops
    known = [rates for keys, *rates in device.attention if keys <= kernel.keys] or [device.attention[0][1:]]
    return known[-1]["backward" in kernel.name]


def parameters_of(config: RunConfig, has_pairs: bool) -> tuple[int, int]:
    """Tensors and numbers of the model's parameters."""
    with FakeTensorMode():
        model = kernel_trace.PretrainingModel(config.model, objectives_of("next_sentence" if has_pairs else "none"))
    return sum(1 for _ in model.parameters()), sum(parameter.numel() for parameter in model.parameters())


def fusion(preset: str, device: Device = H200) -> dict[str, dict[str, float]]:
    """Of one block in the preset's micro-batch, forward and backward: eager operators, and the fused kernels."""
    sides = {side: block_kernels(preset, compiled=side == "compiled") for side in ("eager", "compiled")}
    return {
        side: {
            "elementwise_kernels": sum(kernel.kind == "elementwise" for kernel in kernels),
            "elementwise_gigabytes": sum(k.num_bytes for k in kernels if k.kind == "elementwise") / 1e9,
            "elementwise_milliseconds": 1e3 * seconds_by_part(kernels, device)["elementwise"],
        }
        for side, kernels in sides.items()
    }


def block_kernels(preset: str, compiled: bool) -> list[Kernel]:
    """The kernels of the preset's second block."""
    config = load_config(preset, ["data.shards=none"])
    model, stage = config.model, config.stages[0]
    with kernel_trace.as_on_cuda(), FakeTensorMode():
        num_rows = stage.micro_batch_tokens // stage.sequence_length
        batch = kernel_trace.shapes(num_rows, stage.sequence_length, 192, 0.15)
        is_rotary = model.position_embedding == "rotary"
        angles = rotation(batch.position_ids, model.head_size, 1e4) if is_rotary else None
        layout = attention_layout(batch, torch.bfloat16, "varlen", rotation=angles)
        block = kernel_trace.in_bfloat16(lambda: build_block(model, 1)).train()
        hidden = torch.empty(batch.input_ids.numel(), model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty_like(hidden)
        return kernel_trace.count(block, lambda: block(hidden, layout).backward(gradient), compiled)


def count_sequences(shards: Path, length: int, num_rows: int, most: int = 100) -> tuple[float, float]:
    """As in `SEQUENCES`, over the micro-batches of one epoch, at most so many."""
    tokens = length * num_rows
    words = [f"data.shards={shards}", f"data.sequence_length={length}", "data.num_workers=0"]
    words += [f"training.{name}={tokens}" for name in ("micro_batch_tokens", "global_batch_tokens")]
    batches = itertools.islice(open_loader("modern_large", words), most)
    first_epoch = itertools.takewhile(lambda batch: batch.position.epoch == 0, batches)
    found = [
        (len(micro_batch.cu_seqlens.unique()) - 1, micro_batch.longest_sequence)
        for batch in first_epoch
        for micro_batch in batch.micro_batches
    ]
    numbers, bounds = zip(*found, strict=True)
    return sum(numbers) / len(found) / num_rows, sum(bounds) / len(found)


def main() -> None:
    """Predict, print and write."""
    global SEQUENCES
    parser = reports.parser(__doc__)
    names = list(dict.fromkeys(case.preset for case in CASES))
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="PRESET", help="by default all")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="count the sequences of micro-batches of these")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.preset in arguments.cases]
    if arguments.shards:
        shapes = {
            (case.length, batch_arithmetic(settings_of(case, side)[1], 1).micro_batch_rows)
            for case in cases
            for side in ("before", "now")
        }
        SEQUENCES = {shape: count_sequences(arguments.shards, *shape) for shape in sorted(shapes)}
    details: dict[str, Any] = {"kind": "prediction, not measured"}
    details["devices"] = {name: [asdict(device) for device in ends] for name, ends in DEVICES.items()}
    details["sequences"] = [[*shape, *means] for shape, means in SEQUENCES.items()]
    details["fusion"] = {preset: fusion(preset) for preset in arguments.cases}
    found = {case.name: predict_case(case) for case in cases}
    details["micro_batches"] = {name: micro_batches for name, (_, micro_batches) in found.items()}
    details["predictions"] = {name: devices for name, (devices, _) in found.items()}
    details["published"] = {case.name: case.published for case in cases if case.published}
    reports.save(arguments.results, machine.described("torch", "deepspeed"), details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Predicted tokens/s, now beside before and published; then the kernels of a block that are no products."""
    found = []
    for name, devices in details["predictions"].items():
        for device, sides in devices.items():
            now, before, slow = (
                (sides[side]["tokens_per_second"], f"MFU {sides[side]['mfu']:.0%}")
                for side in ("now", "before", "now_slow")
            )
            title = f"{name}, {device}"
            found.append(Row(f"{title}, {now[1]}", now[0], before[0], f"before, {before[1]}", "tokens/s", "more", 1))
            found.append(alone(f"{title} at the lower rates, {slow[1]}", slow[0], "tokens/s", "more"))
            if device == "H100" and name in details["published"]:
                published = details["published"][name]
                found.append(Row(title, now[0], published, "published, measured", "tokens/s", "more", 1))
    for preset, sides in details["fusion"].items():
        counts = (sides[side]["elementwise_kernels"] for side in ("compiled", "eager"))
        found.append(Row(f"elementwise kernels of a block of {preset}", *counts, "eager", "kernels", "less", 1))
    return found


if __name__ == "__main__":
    main()
