"""The memory of preparation beside its peers': the largest process, for some text and for several times as much.

    python tests/benchmarks/memory.py --corpus ../shared/corpora/pack_medium [--limit-mb 20] [--times 1 4] [--runs 2]
        [--tokenizer DIR] [--results FILE]

`python -m data_prep shards` with one worker, datatrove's tokenizer pipeline and `datasets.map` with `tokenizers`, in
turns, on one core, from jsonl.gz files; the peers live in the environment that `peers_preparation.py` makes. More text
is the same files under other names, so exact deduplication is off. What a training process takes is in `training.py`.
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

from contained_process import run_contained
from corpus_part import take_part
from machine import described
from peer_contestants import REPOSITORY
from peers_preparation import make_environment, versions, write_peer_tokenizer

CONTESTANTS = ("ours", "datatrove", "datasets")
_PEER_SCRIPT = Path(__file__).with_name("peer_contestants.py")


def main() -> None:
    """Run the contestants in turns, and print and write what they took."""
    arguments = _parse()
    environment = make_environment(Path(arguments.environment))
    report: dict[str, Any] = described("sentencepiece", "numpy")
    report["versions"] |= versions(environment)
    with tempfile.TemporaryDirectory(prefix="clozeworks-memory-", dir=arguments.work) as folder:
        report["runs"] = measure(arguments, environment, Path(folder))
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
    else:
        print(json.dumps(report, indent=1))


def measure(
    arguments: argparse.Namespace, environment: Path, folder: Path
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By MB of text and contestant: every run's seconds and memory."""
    found = sorted(str(path) for path in Path(arguments.corpus).glob("*.jsonl.gz"))
    files = take_part(found, arguments.limit_mb, folder / "part")
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else _train(files, folder)
    write_peer_tokenizer(tokenizer / "tokenizer.json", folder / "peer.json", "none")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for times in arguments.times:
        copies = _repeat(files, times, folder / f"times-{times}")
        name = f"{arguments.limit_mb * times:g}"
        runs[name] = {contestant: [] for contestant in CONTESTANTS}
        for number in range(arguments.runs):
            for contestant in CONTESTANTS[:: -1 if number % 2 else 1]:
                run = _run(contestant, copies, tokenizer, environment, folder)
                runs[name][contestant].append(run)
                print(f"{name} MB, {contestant}: {run['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
    return runs


def _run(contestant: str, files: list[str], tokenizer: Path, environment: Path, folder: Path) -> dict[str, float]:
    output = folder / "output"
    if contestant == "ours":
        command = [sys.executable, "-m", "data_prep", "shards", "--tokenizer", str(tokenizer), "--output", str(output)]
        command += ["--workers", "1", "deduplication.exact=false", "--input", *files]
    else:
        command = [str(environment / "bin" / "python"), str(_PEER_SCRIPT), contestant, str(folder / "peer.json")]
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


def _train(files: list[str], folder: Path) -> Path:
    command = [sys.executable, "-m", "data_prep", "tokenizer", "--output", str(folder / "tokenizer"), "--input", *files]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder / "tokenizer"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", help="folder; by default one is trained first")
    parser.add_argument("--limit-mb", type=float, default=20.0, metavar="MB", help="about so much text (default 20)")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4], help="times the text (default 1 4)")
    parser.add_argument("--runs", type=int, default=2)
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    parser.add_argument("--environment", default=f"{cache}/clozeworks-peers", help="where the peers are installed")
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
