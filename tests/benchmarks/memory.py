"""The memory of preparation beside its peers': the largest process, for some text and for several times as much.

    python tests/benchmarks/memory.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--limit-mb 20] [--times 1 4] [--runs 2] [--results FILE]

The whole commands of `peers_preparation.py`, from jsonl.gz files of all the corpora together. More text is the same
files under other names, so exact deduplication is off. What a training process takes is in `training.py`.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import corpus_part
import peers_environment
import reports
from contestants import in_turns, median, repeat_files, train_tokenizer
from machine import described
from peer_contestants import write_peer_tokenizer
from peers_preparation import PACKAGES, PEERS, WHOLE_COMMANDS, run_contestant
from reports import Row


def main() -> None:
    """Run the contestants in turns, and print and write the memory of each."""
    parser = reports.parser(__doc__)
    corpus_part.add_arguments(parser)
    parser.set_defaults(limit_mb=20.0)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4], help="times the text (default 1 4)")
    parser.add_argument("--runs", type=int, default=2)
    peers_environment.add_argument(parser)
    arguments = parser.parse_args()
    python = peers_environment.make_environment(arguments.environment)
    machine = described(*PACKAGES, python=python)
    with tempfile.TemporaryDirectory(prefix="clozeworks-memory-", dir=arguments.work) as folder:
        details = {"runs": measure(arguments, python, Path(folder))}
    reports.save(arguments.results, machine, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """The largest process, by amount of text."""
    return [
        Row(
            f"memory of preparation, {megabytes} MB of text",
            *(median(runs[name], "peak_mb") for name in ("ours", form)),
            *(peer, "MB", "less", len(runs[form])),
        )
        for megabytes, runs in details["runs"].items()
        for peer, (form, *_) in PEERS.items()
        if form in runs
    ]


def measure(arguments: Namespace, python: str, folder: Path) -> dict[str, Any]:
    """By MB of text and contestant: every run's seconds and memory."""
    found = [path for files in corpus_part.corpora_of(arguments.corpora).values() for path in files]
    files = corpus_part.take_part(found, arguments.limit_mb, folder / "part")
    tokenizer = train_tokenizer(files, folder / "tokenizer", arguments.vocab_size)
    write_peer_tokenizer(tokenizer / "tokenizer.json", folder / "peer.json")
    runs = {}
    for times in arguments.times:
        copies, name = repeat_files(files, times, folder / f"times-{times}"), f"{arguments.limit_mb * times:g}"

        def run(contestant: str, number: int, copies: list[str] = copies) -> dict[str, Any]:
            return run_contestant(contestant, python, copies, folder, "deduplication.exact=false")

        runs[name] = in_turns(WHOLE_COMMANDS, arguments.runs, run, f"{name} MB, ")
    return runs


if __name__ == "__main__":
    main()
