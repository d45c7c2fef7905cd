"""How fast preparation is by number of workers, and what time and memory it takes for larger corpora.

    python tests/benchmarks/preparation.py --corpus ../shared/corpora/pack_medium [--limit-mb 20] [--tokenizer DIR]
        [--workers 1 2] [--runs 3] [--scale 1 4 16] [--scale-workers 1] [--results FILE.json]

In turns, on as many cores as it has workers, `python -m data_prep shards` makes shards of the files and `verify` checks
them, from starting Python to the end. MB are those of the normalized text. `--scale` repeats the corpus, with
deduplication off and without `verify`; `--runs 0` leaves it at that. `peers_preparation.py` compares preparation with
its peers and states where its time goes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus_part
import reports
from contained_process import run_contained
from contestants import REPOSITORY, in_turns, median, repeat_files, train_tokenizer
from machine import described
from reports import Row, alone


def main() -> None:
    """Prepare in turns, and print and write the figures."""
    arguments = _parse()
    machine = described("sentencepiece", "sentencex", "numpy")
    with tempfile.TemporaryDirectory(prefix="preparation-", dir=arguments.work) as work:
        found = [str(path) for path in sorted(arguments.corpus.glob("*.jsonl.gz"))]
        files = corpus_part.take_part(found, arguments.limit_mb, Path(work) / "part")
        tokenizer = arguments.tokenizer or train_tokenizer(files, Path(work) / "tokenizer", 30_522)
        details = measure(arguments, files, tokenizer, Path(work))
    reports.save(arguments.results, machine, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Throughput (wall time) by number of workers; then seconds and the largest process by size of the corpus."""
    found = []
    for number, runs in details["shards"].items():
        if runs:
            verified = "verified " * ("verify_seconds" in runs[0])  # which earlier measurements did not include
            name = f"text to {verified}shards, {number} worker{'s' * (number != '1')}"
            found.append(alone(name, details["text_mb"] / median(runs, "seconds"), "MB/s", "more", len(runs)))
            found.append(
                alone(f"{name}, largest process", max(run["peak_mb"] for run in runs), "MB", "less", len(runs))
            )
    for times, run in details["scale"].items():
        name = f"{details['text_mb'] * int(times):,.0f} MB of text to shards"
        found.append(alone(f"{name} ({run['tokens'] / 1e6:,.0f} million tokens)", run["seconds"], "s", "less"))
        found.append(alone(f"{name}, largest process", run["peak_mb"], "MB", "less"))
    return found


def measure(arguments: argparse.Namespace, files: list[str], tokenizer: Path, work: Path) -> dict[str, Any]:
    """Every run's seconds, CPU seconds and memory, by number of workers and by size of the corpus."""
    from data_prep.text.cleaning import Normalization, normalize

    texts = (normalize(text, Normalization()) for path in files for text in corpus_part.read_texts(path))
    details: dict[str, Any] = {"text_mb": sum(len(text.encode()) for text in texts) / 1e6, "scale": {}}

    def run(num_workers: str, number: int) -> dict[str, float]:
        return make_shards(files, tokenizer, work / "shards", int(num_workers), verifies=True)

    details["shards"] = in_turns([str(number) for number in arguments.workers], arguments.runs, run, "workers ")
    for times in arguments.scale:
        folder = work / f"times-{times}"
        copies, option = repeat_files(files, times, folder), "deduplication.exact=false"
        details["scale"][str(times)] = make_shards(
            copies, tokenizer, work / "shards", arguments.scale_workers, [option]
        )
        shutil.rmtree(folder)
    return details


def make_shards(
    files: list[str],
    tokenizer: Path,
    output: Path,
    num_workers: int,
    overrides: Sequence[str] = (),
    verifies: bool = False,
) -> dict[str, float]:
    """Seconds of the whole commands, CPU seconds of all their processes, and the memory of the largest."""

    def run(*words: str) -> dict[str, float]:
        command = [sys.executable, "-m", "data_prep", *words, "--workers", str(num_workers)]
        return run_contained(command, REPOSITORY, sorted(os.sched_getaffinity(0))[:num_workers])

    figures = run("shards", *overrides, "--tokenizer", str(tokenizer), "--output", str(output), "--input", *files)
    if verifies:
        verified = run("verify", str(output))
        figures |= {name: figures[name] + verified[name] for name in ("seconds", "cpu_seconds")}
        figures |= {"verify_seconds": verified["seconds"], "peak_mb": max(figures["peak_mb"], verified["peak_mb"])}
    manifest = reports.read(output / "manifest.json")
    output_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    shutil.rmtree(output)
    tokens = manifest["train"]["tokens"] + manifest["valid"]["tokens"]
    return {**figures, "tokens": tokens, "output_mb": output_bytes / 1e6}


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", type=Path, help="folder; by default one of 30,522 pieces is trained first")
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="take about so much text, from all files alike")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts; 0 for --scale alone")
    parser.add_argument("--scale", type=int, nargs="*", default=[], help="times the corpus, such as 1 4 16")
    parser.add_argument("--scale-workers", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
