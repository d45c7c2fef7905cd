"""How long a run that was stopped waits for its data: ours beside peers that save their position, and Trainer.

    python tests/benchmarks/resuming.py [--streamed-tokens 100000000] [--indexed-tokens 10000000000] [--runs 3]
        [--peers datasets torchdata torchdata_indexed streaming] [--results FILE]

Seconds and CPU seconds from opening the data to the batch that training goes on with, each turn in a process of its
own, importing left out. Two cases:

- streamed: `datasets` and torchdata's StatefulDataLoader over it, which load a saved state (`resuming_peers.py`), and
  Trainer on an IterableDataset, which reads and collates again up to the position, batch by batch;
- indexed: in the middle of a shuffled epoch, StatefulDataLoader over rows by number, mosaicml-streaming over MDS
  shards, and Trainer over rows by number.

Trainer resumes from a checkpoint of its own whose step says how much was seen (`ignore_data_skip=False`, its default:
all go on at the same sample). What it trains computes nothing here, so that the wait is for data alone. Ours is the
same in both cases; it also resumes in the middle of 100 billion tokens in 20,000 shards. Batches hold 65,536 tokens in
rows of 512. First it is tried that everyone gives, after a resume, what it gives without a stop. --peers without names
leaves out the peers that need an environment of their own (--environment).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import peers_environment
import reports
import torch
from contestants import answer_of, in_turns, median
from loader import MICRO_BATCH_TOKENS, loader_of, make_data_set, make_long_data_set
from reports import Row

from trainer.data.loader import Position

LENGTH = 512
ROWS = MICRO_BATCH_TOKENS // LENGTH
LONG_TOKENS = 100_000_000_000
_CHECKED_STEPS = 6
PEERS = {"streamed": ("datasets", "torchdata"), "indexed": ("torchdata_indexed", "streaming")}
_ALL_PEERS = [name for names in PEERS.values() for name in names]


def main() -> None:
    """Make the data, check that both resume at the right sample, and measure in turns."""
    arguments = _parse()
    torch.set_num_threads(1)
    if arguments.child:
        print(json.dumps(_CHILDREN[arguments.child](*arguments.values)))
        return
    arguments.python, packages = sys.executable, ("torch", "transformers", "accelerate", "numpy")
    if arguments.peers:
        arguments.python = peers_environment.make_environment(arguments.environment)
        packages += ("datasets", "torchdata", "mosaicml-streaming")
    described = machine.described(*packages, python=arguments.python)
    with tempfile.TemporaryDirectory(prefix="clozeworks-resuming-", dir=arguments.work) as folder:
        details = measure(Path(folder), arguments)
    reports.save(arguments.results, described, details, rows(details))


_NAMES = {
    "datasets": "datasets' state_dict",
    "torchdata": "StatefulDataLoader over datasets",
    "torchdata_indexed": "StatefulDataLoader",
    "streaming": "mosaicml-streaming",
    "trainer": "Trainer, which skips",
}


def rows(details: dict[str, Any]) -> list[Row]:
    """CPU seconds until the batch that training goes on with, and the process's memory then."""
    found = []
    for key, what, unit in (("cpu_seconds", "resume", "CPU s"), ("peak_mb", "memory of a resume", "MB")):
        for case, runs in details["runs"].items():
            tokens = details["tokens_before_the_stop"][case]
            size = f"{tokens / 1e9:,.0f}G" if tokens >= 1e9 else f"{tokens / 1e6:,.0f}M"
            kind = {"streamed": "a stream", "indexed": "an indexed set", "long": "100G planned"}[case]
            name, ours = f"{what} after {size} tokens of {kind}", median(runs["ours"], key)
            peers = [(median(runs[peer], key), title) for peer, title in _NAMES.items() if peer in runs]
            found += [Row(name, ours, *peer, unit, "less", len(runs["ours"])) for peer in peers or [(None, None)]]
    return found


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The checks, and the runs of every case and contestant."""
    small = make_data_set(folder / "small", 10_000_000)
    sizes = {"streamed": 2 * arguments.streamed_tokens, "indexed": arguments.indexed_tokens, "long": LONG_TOKENS}
    checkpoint = _child("checkpoint", str(folder / "trainer"))
    peers = {case: [name for name in names if name in arguments.peers] for case, names in PEERS.items()}
    found = {"ours": _child("check_ours", small), **_child("check_trainer", str(folder / "check"))}
    found |= {name: _peer("check", name, folder / f"check-{name}", 20_000_000, arguments) for name in arguments.peers}
    if not all(same for name, same in found.items() if not name.endswith("masks")):
        sys.exit(f"a resume does not go on at the right sample: {found}")
    details: dict[str, Any] = {
        "batch_tokens": MICRO_BATCH_TOKENS,
        "tokens_in_the_data": sizes,
        "tokens_before_the_stop": {name: size // 2 for name, size in sizes.items()},
        "resumed_as_if_never_stopped": found,
        "runs": {},
    }
    for case, size in sizes.items():
        make_long_data_set(small, folder / case, size)
        turns: dict[str, Callable[[], Any]] = {"ours": lambda case=case: _child("ours", str(folder / case))}
        if case != "long":
            turns["trainer"] = lambda case=case, size=size: _child("trainer", checkpoint, case, str(size))
        for name in peers.get(case, ()):
            place = folder / f"{case}-{name}"
            _peer("prepare", name, place, size, arguments)
            turns[name] = lambda name=name, place=place, size=size: _peer("resume", name, place, size, arguments)
        details["runs"][case] = in_turns(
            list(turns), arguments.runs, lambda name, number, turns=turns: turns[name](), f"{case}, "
        )
    return details


def _peer(action: str, name: str, folder: Path, num_tokens: int, arguments: argparse.Namespace) -> Any:
    script = Path(__file__).with_name("resuming_peers.py")
    return answer_of([arguments.python, str(script), action, name, str(folder), str(num_tokens)])


def resume_ours(folder: str) -> dict[str, float]:
    """Seconds and CPU seconds from the manifest to the first batch in the middle of the epoch."""
    rows = loader_of(folder, LENGTH, "none").num_samples(0)
    assert rows is not None
    position = Position(0, 0, rows // 2 // ROWS * ROWS)
    cpu_started_at, started_at = time.process_time(), time.perf_counter()
    next(iter(loader_of(folder, LENGTH, "none", position)))
    return {
        "cpu_seconds": time.process_time() - cpu_started_at,
        "seconds": time.perf_counter() - started_at,
        "peak_mb": machine.peak_memory_mb(),
    }


def check_ours(folder: str) -> bool:
    """Whether a batch after a resume is the one of a loader that never stopped: ids, masks and all."""
    straight = [step.micro_batches[0] for step in itertools.islice(loader_of(folder, LENGTH, "none"), _CHECKED_STEPS)]
    resumed = next(iter(loader_of(folder, LENGTH, "none", Position(0, 0, (_CHECKED_STEPS - 1) * ROWS))))
    (batch,) = resumed.micro_batches
    return _same_tensors(vars(straight[-1]), vars(batch))


def resume_trainer(checkpoint: str, case: str, num_tokens: str) -> dict[str, float]:
    """Seconds and CPU seconds from the data set to the batch that Trainer goes on with."""
    from resuming_trainer import Rows, StreamedRows, make_trainer

    rows = int(num_tokens) // LENGTH
    state_file = Path(checkpoint) / "trainer_state.json"
    seen_steps = rows // 2 // ROWS
    state = json.loads(state_file.read_text()) | {"global_step": seen_steps, "max_steps": rows // ROWS}
    state_file.write_text(json.dumps(state))
    cpu_started_at, started_at = time.process_time(), time.perf_counter()
    data_set = StreamedRows(rows) if case == "streamed" else Rows(rows)
    trainer = make_trainer(Path(checkpoint).parent, data_set, max_steps=rows // ROWS, stop_at=seen_steps)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "cpu_seconds": trainer.reached_at_cpu - cpu_started_at,
        "seconds": trainer.reached_at - started_at,
        "peak_mb": machine.peak_memory_mb(),
    }


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
    return answer_of([sys.executable, __file__, "--child", name, *values])


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("values", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--streamed-tokens", type=int, default=100_000_000, help="before the stop (default 100M)")
    parser.add_argument("--indexed-tokens", type=int, default=10_000_000_000, help="in the data (default 10G)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=_ALL_PEERS, default=_ALL_PEERS, help="default: all")
    peers_environment.add_argument(parser)
    parser.add_argument("--child", choices=_CHILDREN, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
