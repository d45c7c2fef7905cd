"""How long a run that was stopped waits for its data: our loader beside Trainer, which skips what it has seen.

    python tests/benchmarks/resuming.py [--streamed-tokens 100000000] [--indexed-tokens 10000000000] [--runs 3]
        [--results FILE]

Seconds from opening the data to the batch that training goes on with, each turn in a process of its own. Trainer
resumes from a checkpoint of its own whose step says how much was seen (`ignore_data_skip=False`, its default: both go
on at the same sample). What it trains computes nothing here, so that the wait is for data alone. Two cases:

- streamed: an IterableDataset, which Trainer reads and collates again up to the position, batch by batch;
- indexed: a data set by row number, whose shuffled order alone is gone through, stopped in the middle of an epoch.

Ours makes no such difference; it also resumes in the middle of 100 billion tokens in 20,000 shards. Batches hold
65,536 places in rows of 512. First it is tried that both give, after a resume, what they give without a stop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from loader import MICRO_BATCH_TOKENS, loader_of, make_data_set, make_long_data_set

from trainer.data.loader import Position

LENGTH = 512
ROWS = MICRO_BATCH_TOKENS // LENGTH
LONG_TOKENS = 100_000_000_000
_CHECKED_STEPS = 6


def main() -> None:
    """Make the data, check that both resume at the right sample, and measure in turns."""
    arguments = _parse()
    torch.set_num_threads(1)
    if arguments.child:
        print(json.dumps(_CHILDREN[arguments.child](*arguments.values)))
        return
    report: dict[str, Any] = machine.described("torch", "transformers", "accelerate", "numpy")
    with tempfile.TemporaryDirectory(prefix="clozeworks-resuming-", dir=arguments.work) as folder:
        report |= measure(Path(folder), arguments)
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
    else:
        print(json.dumps(report, indent=1))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The checks, and the runs of every case and contestant."""
    small = make_data_set(folder / "small", 10_000_000)
    sizes = {"streamed": 2 * arguments.streamed_tokens, "indexed": arguments.indexed_tokens, "long": LONG_TOKENS}
    checkpoint = _trainer_checkpoint(folder / "trainer")
    report: dict[str, Any] = {
        "batch_tokens": MICRO_BATCH_TOKENS,
        "tokens_in_the_data": sizes,
        "tokens_before_the_stop": {name: size // 2 for name, size in sizes.items()},
        "ours_resumed_as_if_never_stopped": _child("check_ours", small),
        "trainer_resumed_as_if_never_stopped": _child("check_trainer", str(folder / "check")),
        "runs": {},
    }
    for case, size in sizes.items():
        make_long_data_set(small, folder / case, size)
        turns: dict[str, Callable[[], Any]] = {"ours": lambda case=case: _child("ours", str(folder / case))}
        if case != "long":
            turns["trainer"] = lambda case=case, size=size: _child("trainer", checkpoint, case, str(size))
        found: dict[str, list[Any]] = {name: [] for name in turns}
        for number in range(arguments.runs):
            for name, turn in list(turns.items())[:: -1 if number % 2 else 1]:
                found[name].append(turn())
                print(f"{case}, {name}, run {number + 1}: {found[name][-1]}", file=sys.stderr, flush=True)
        report["runs"][case] = found
    return report


def resume_ours(folder: str) -> dict[str, float]:
    """Seconds from the manifest to the first batch in the middle of the epoch."""
    rows = loader_of(folder, LENGTH, "none").num_samples(0)
    assert rows is not None
    position = Position(0, 0, rows // 2 // ROWS * ROWS)
    started_at = time.perf_counter()
    next(iter(loader_of(folder, LENGTH, "none", position)))
    return {"seconds": time.perf_counter() - started_at, "peak_mb": machine.peak_memory_mb()}


def check_ours(folder: str) -> bool:
    """Whether a batch after a resume is the one of a loader that never stopped: ids, masks and all."""
    straight = [step.micro_batches[0] for step in itertools.islice(loader_of(folder, LENGTH, "none"), _CHECKED_STEPS)]
    resumed = next(iter(loader_of(folder, LENGTH, "none", Position(0, 0, (_CHECKED_STEPS - 1) * ROWS))))
    (batch,) = resumed.micro_batches
    return _same_tensors(vars(straight[-1]), vars(batch))


def resume_trainer(checkpoint: str, case: str, num_tokens: str) -> dict[str, float]:
    """Seconds from the data set to the batch that Trainer goes on with."""
    from resuming_trainer import Rows, StreamedRows, make_trainer

    rows = int(num_tokens) // LENGTH
    state_file = Path(checkpoint) / "trainer_state.json"
    seen_steps = rows // 2 // ROWS
    state = json.loads(state_file.read_text()) | {"global_step": seen_steps, "max_steps": rows // ROWS}
    state_file.write_text(json.dumps(state))
    started_at = time.perf_counter()
    data_set = StreamedRows(rows) if case == "streamed" else Rows(rows)
    trainer = make_trainer(Path(checkpoint).parent, data_set, max_steps=rows // ROWS, stop_at=seen_steps)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {"seconds": trainer.reached_at - started_at, "peak_mb": machine.peak_memory_mb()}


def check_trainer(folder: str) -> dict[str, bool]:
    """Whether Trainer goes on at the samples where it stopped, and with the same masks."""
    from resuming_trainer import Rows, StreamedRows, make_trainer, unmasked

    found = {}
    for case, make in (("streamed", StreamedRows), ("indexed", Rows)):
        place, rows = Path(folder) / case, 2 * _CHECKED_STEPS * ROWS
        straight = make_trainer(place, make(rows), max_steps=_CHECKED_STEPS, save_at=_CHECKED_STEPS - 1)
        straight.train()
        resumed = make_trainer(place, make(rows), max_steps=_CHECKED_STEPS, stop_at=_CHECKED_STEPS - 1)
        resumed.train(resume_from_checkpoint=str(place / f"checkpoint-{_CHECKED_STEPS - 1}"))
        last, first = straight.batches[-1], resumed.batches[0]
        found[f"{case}, same samples"] = torch.equal(unmasked(last), unmasked(first))
        found[f"{case}, same masks"] = _same_tensors(last, first)
    return found


def _trainer_checkpoint(folder: Path) -> str:
    return _child("checkpoint", str(folder))


def make_checkpoint(folder: str) -> str:
    """A checkpoint of Trainer after one step; returns its folder."""
    from resuming_trainer import Rows, make_trainer

    make_trainer(Path(folder), Rows(4 * ROWS), max_steps=1, save_at=1).train()
    return str(Path(folder) / "checkpoint-1")


def _same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor)]
    assert tensors
    return all(torch.equal(one[name], other[name]) for name in tensors)


_CHILDREN: dict[str, Callable[..., Any]] = {
    "ours": resume_ours,
    "trainer": resume_trainer,
    "check_ours": check_ours,
    "check_trainer": check_trainer,
    "checkpoint": make_checkpoint,
}


def _child(name: str, *values: str) -> Any:
    command = [sys.executable, __file__, "--child", name, *values]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{name} failed with status {done.returncode}; what it said stands above")
    return json.loads(done.stdout.splitlines()[-1])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("values", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--streamed-tokens", type=int, default=100_000_000, help="before the stop (default 100M)")
    parser.add_argument("--indexed-tokens", type=int, default=10_000_000_000, help="in the data (default 10G)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", help="folder for the data (default: the system's temporary folder)")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--child", choices=_CHILDREN, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
