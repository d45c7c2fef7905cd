"""The memory of preparation beside its peers': the largest process, for some text and for several times as much.

    python tests/benchmarks/memory.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--limit-mb 20] [--times 1 4] [--runs 2] [--results FILE]

`python -m data_prep shards` with one worker, datatrove's tokenizer pipeline and `datasets.map` with `tokenizers`, in
turns, on one core, from jsonl.gz files of all the corpora together; the peers live in an environment of their own. More
text is the same files under other names, so exact deduplication is off. What a training process takes is in
`training.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import corpus_part
import peers_environment
from contained_process import run_contained
from machine import described
from peer_contestants import REPOSITORY, write_peer_tokenizer

CONTESTANTS = ("ours", "datatrove", "datasets")
_PEER_SCRIPT = Path(__file__).with_name("peer_contestants.py")


def main() -> None:
    """Run the contestants in turns, and print and write what they took."""
    arguments = _parse()
    python = peers_environment.make_environment(arguments.environment)
    packages = ("sentencepiece", "numpy", "datatrove", "datasets", "tokenizers")
    report: dict[str, Any] = described(*packages, python=python)
    with tempfile.TemporaryDirectory(prefix="clozeworks-memory-", dir=arguments.work) as folder:
        report["runs"] = measure(arguments, python, Path(folder))
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
    else:
        print(json.dumps(report, indent=1))


def measure(arguments: argparse.Namespace, python: str, folder: Path) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By MB of text and contestant: every run's seconds and memory."""
    found = [path for files in corpus_part.corpora_of(arguments.corpora).values() for path in files]
    files = corpus_part.take_part(found, arguments.limit_mb, folder / "part")
    tokenizer = _train(files, folder, arguments.vocab_size)
    write_peer_tokenizer(tokenizer / "tokenizer.json", folder / "peer.json")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for times in arguments.times:
        copies = _repeat(files, times, folder / f"times-{times}")
        name = f"{arguments.limit_mb * times:g}"
        runs[name] = {contestant: [] for contestant in CONTESTANTS}
        for number in range(arguments.runs):
            for contestant in CONTESTANTS[:: -1 if number % 2 else 1]:
                run = _run(contestant, copies, tokenizer, python, folder)
                runs[name][contestant].append(run)
                print(f"{name} MB, {contestant}: {run['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
    return runs


def _run(contestant: str, files: list[str], tokenizer: Path, python: str, folder: Path) -> dict[str, float]:
    output = folder / "output"
    if contestant == "ours":
        command = [sys.executable, "-m", "data_prep", "shards", "--tokenizer", str(tokenizer), "--output", str(output)]
        command += ["--workers", "1", "deduplication.exact=false", "--input", *files]
    else:
        command = [python, str(_PEER_SCRIPT), contestant, str(folder / "peer.json")]
        command += [str(output), *files]
    named = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    figures = run_contained(command, REPOSITORY, sorted(os.sched_getaffinity(0))[:1], os.environ | named)
    shutil.rmtree(output, ignore_errors=True)
    return figures


def _repeat(files: list[str], times: int, folder: Path) -> list[str]:
    """Each file so many times under names of its own: links, for a file is named once only."""
    folder.mkdir()
    copies = []
    for file in files:
        for number in range(times):
            copies.append(str(folder / f"{number:03d}-{Path(file).name}"))
            if number:
                os.link(copies[-2], copies[-1])
            else:
                shutil.copyfile(file, copies[-1])
    return copies


def _train(files: list[str], folder: Path, vocab_size: int) -> Path:
    command = [sys.executable, "-m", "data_prep", "tokenizer", "--output", str(folder / "tokenizer")]
    command += ["--vocab-size", str(vocab_size), "--input", *files]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder / "tokenizer"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpus_part.add_argument(parser)
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--limit-mb", type=float, default=20.0, metavar="MB", help="about so much text (default 20)")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4], help="times the text (default 1 4)")
    parser.add_argument("--runs", type=int, default=2)
    peers_environment.add_argument(parser)
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
