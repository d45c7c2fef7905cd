"""What the device can do at best: matrix products, copies, and attention by the number of empty sequences.

Writes JSON, after each figure: TFLOP/s of the products of a layer, TB/s of a copy, and milliseconds of one layer's
attention where `cu_seqlens` has room for more sequences than the rows hold. Without CUDA the sizes are small and the
figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.model.attention import AttentionLayout, attend, choose_kernel

EMPTY_PER_ROW = (0, 1, 9, 25, 50, 100, 168)
"""168: the capacity on a corpus with a one-token document, before it followed the micro-batch; 100: with pairs."""


@dataclass(frozen=True)
class Layer:
    """The sizes of an encoder layer and of its micro-batch."""

    hidden: int
    heads: int
    rows: int
    length: int = 512

    @property
    def positions(self) -> int:
        return self.rows * self.length


BERT_LARGE, BERT_BASE, TOY = Layer(1024, 16, 32), Layer(768, 12, 64), Layer(64, 2, 2, 64)


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of one call, after three that do not count."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            started_at = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - started_at))
    return statistics.median(times)


def copy_speed(numbers: int, device: torch.device, repeats: int) -> float:
    """TB/s of a copy of that many fp32 numbers, read and written bytes counted."""
    source = torch.empty(numbers, device=device)
    target = torch.empty_like(source)
    return 8 * numbers / milliseconds(lambda: target.copy_(source), device, repeats) / 1e9


def products(layer: Layer, device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of the layer's linear maps in bf16: forward, and the two products of the backward."""
    found = {}
    for name, width in (("qkv", 3 * layer.hidden), ("output", layer.hidden), ("feed forward", 4 * layer.hidden)):
        inputs, weight, upstream = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((layer.positions, layer.hidden), (width, layer.hidden), (layer.positions, width))
        )
        works: dict[str, Callable[[], object]] = {
            "forward": lambda a=inputs, b=weight: a @ b.T,
            "input gradient": lambda a=upstream, b=weight: a @ b,
            "weight gradient": lambda a=upstream, b=inputs: a.T @ b,
        }
        operations = 2 * layer.positions * layer.hidden * width
        found[name] = {kind: operations / milliseconds(work, device, repeats) / 1e9 for kind, work in works.items()}
    return found


def attention(layer: Layer, empty_per_row: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """One layer's attention over two sequences per row, and that many empty ones per row after them."""
    total, size = layer.positions, layer.hidden // layer.heads
    starts = torch.arange(0, total, layer.length // 2, dtype=torch.int32)
    ends = torch.full((1 + layer.rows * empty_per_row,), total, dtype=torch.int32)
    kernel = choose_kernel(device, torch.bfloat16, size, 0.0, layer.length)
    offsets = torch.cat([starts, ends]).to(device)
    longest = offsets.new_empty((layer.length, 0))
    layout = AttentionLayout(kernel, offsets, layer.length, layer.rows, None, None, None, longest)
    qkv = torch.randn(total, 3, layer.heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(total, layer.heads, size, device=device, dtype=torch.bfloat16)

    def both() -> None:
        qkv.grad = None
        attend(*qkv.unbind(1), layout).backward(upstream)

    with torch.no_grad():
        forward = milliseconds(lambda: attend(*qkv.unbind(1), layout), device, repeats)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"empty_per_row": empty_per_row, "kernel": kernel, "forward_ms": forward}
    found["forward_backward_ms"] = milliseconds(both, device, repeats)
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def figures(found: dict[str, Any], device: torch.device, repeats: int) -> Iterator[None]:
    """Put them into `found`, one after another."""
    on_gpu = device.type == "cuda"
    found["copy_terabytes_per_second"] = copy_speed((1 << 30) if on_gpu else (1 << 16), device, repeats)
    yield
    for name, layer in (("bert_large", BERT_LARGE), ("bert_base", BERT_BASE)) if on_gpu else (("toy", TOY),):
        found[f"{name}_teraflops"] = products(layer, device, repeats)
        yield
        for empty in EMPTY_PER_ROW:
            found.setdefault(f"{name}_attention", []).append(attention(layer, empty, device, repeats))
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": name}
    for _ in figures(found, device, arguments.repeats):
        arguments.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
