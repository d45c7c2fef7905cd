"""Preparation side by side with what a user would pick instead: same text, vocabulary and core, in one run.

    python tests/benchmarks/peers_preparation.py --corpus 'corpus/*.jsonl.gz' --limit-mb 20 --results peers.json

Contestants, each a process of its own bound to one core, in turns (a b c d, d c b a, ...), median of --runs:

- ours: `python -m data_prep shards`, whole: from jsonl.gz to shards that `verify` accepts (which is tried once,
  untimed), with exact deduplication, sentence boundaries, global shuffle and checksums;
- sentencepiece: `encode` alone, over texts that are read and normalised beforehand, in batches, ids as lists;
- datatrove: JsonlReader and DocumentTokenizer, one worker, no shuffle, to its binary files;
- datasets: `load_dataset("json")` and `map(batched=True)` in one process with `tokenizers` (encode_batch_fast), from
  jsonl.gz to arrow files.

The peers read one tokenizer.json of ours. By default (`--normaliser none`) its normaliser is taken out and they read
text that was normalised beforehand, untimed: the same ids with the least work, their best case. With `--normaliser
ours` they read the raw text and tokenizer.json is whole. Theirs is the time of the work itself, without starting
Python and importing; ours is the whole process. Both are also given in CPU seconds, which other work on the machine
disturbs less. MB are those of the raw text for all. The peers live in an environment that this script makes.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from corpus_part import take_part
from machine import described
from peer_contestants import REPOSITORY, RESULT, read_texts

RESULTS = Path(__file__).parent / "results" / "peers_preparation.json"
PEER_PACKAGES = ("datatrove", "datasets", "tokenizers", "orjson")
CONTESTANTS = ("ours", "sentencepiece", "datatrove", "datasets")
_CONTESTANTS_SCRIPT = Path(__file__).with_name("peer_contestants.py")


def main() -> None:
    """Run the contestants, and write and print the table."""
    arguments = _parse()
    environment = make_environment(Path(arguments.environment))
    with tempfile.TemporaryDirectory(prefix="clozeworks-peers-", dir=arguments.work) as folder:
        report = compare(arguments, environment, Path(folder))
    text = table(report)
    arguments.results.parent.mkdir(exist_ok=True)
    arguments.results.write_text(json.dumps(report, indent=1) + "\n")
    arguments.results.with_suffix(".md").write_text(text)
    print(text)


def compare(arguments: argparse.Namespace, environment: Path, folder: Path) -> dict[str, Any]:
    """Prepare corpus and tokenizer, run every contestant `--runs` times, and gather what they answered."""
    files = take_part(sorted(glob.glob(arguments.corpus)), arguments.limit_mb, folder / "corpus")
    texts = [text for path in files for text in read_texts(path)]
    corpus = {
        "files": len(files),
        "documents": len(texts),
        "bytes": sum(len(text.encode(errors="replace")) for text in texts),
    }
    del texts
    tokenizer = folder / "tokenizer"
    _checked([*_ours("tokenizer"), "--input", *files, "--output", tokenizer, "--vocab-size", arguments.vocab_size])
    peer_tokenizer = folder / "tokenizer.json"
    write_peer_tokenizer(tokenizer / "tokenizer.json", peer_tokenizer, arguments.normaliser)
    peer_files = files
    if arguments.normaliser == "none":
        peer_files = write_normalised(files, tokenizer, folder / "normalised")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for number in range(arguments.runs):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            output = folder / name
            shutil.rmtree(output, ignore_errors=True)
            ours = name in ("ours", "sentencepiece")
            run = run_contestant(
                name,
                sys.executable if ours else str(environment / "bin" / "python"),
                files if ours else peer_files,
                tokenizer if ours else peer_tokenizer,
                output,
                arguments.core,
            )
            runs[name].append(run)
            print(f"{name} {number + 1} of {arguments.runs}: {run['seconds']:.2f} s", file=sys.stderr, flush=True)
    _checked([*_ours("verify"), folder / "ours"])
    _check_counts(runs, corpus["documents"])
    return {
        "machine": described(),
        "versions": versions(environment),
        "corpus": corpus,
        "vocab_size": arguments.vocab_size,
        "normaliser": arguments.normaliser,
        "runs": runs,
    }


def make_environment(folder: Path) -> Path:
    """The peers' own virtual environment at `folder`, made where it is missing."""
    if not (folder / "complete").exists():
        print(f"installing {', '.join(PEER_PACKAGES)} into {folder}", file=sys.stderr, flush=True)
        _checked([sys.executable, "-m", "venv", "--clear", folder])
        _checked([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PEER_PACKAGES])
        (folder / "complete").touch()
    return folder


def write_normalised(files: list[str], tokenizer: Path, folder: Path) -> list[str]:
    """Copies of the files with their text normalised as the tokenizer wants it."""
    sys.path.insert(0, str(REPOSITORY))
    from data_prep.text.cleaning import normalise
    from data_prep.tokenizing.tokenizer import Tokenizer

    rules = Tokenizer.load(tokenizer).normalisation
    folder.mkdir()
    copies = []
    for path in files:
        copies.append(str(folder / os.path.basename(path)))
        with gzip.open(copies[-1], "wt", encoding="utf-8") as target:
            for text in read_texts(path):
                target.write(json.dumps({"text": normalise(text, rules)}, ensure_ascii=False) + "\n")
    return copies


def write_peer_tokenizer(source: Path, target: Path, normaliser: str) -> None:
    """Our tokenizer.json as the peers read it: without special tokens around a text, and perhaps no normaliser."""
    values = json.loads(source.read_text(encoding="utf-8"))
    values["post_processor"] = None
    if normaliser == "none":
        values["normalizer"] = None
    target.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def run_contestant(
    name: str, python: str, files: list[str], tokenizer: Path, output: Path, core: int
) -> dict[str, Any]:
    """Run one contestant on one core; returns seconds, CPU seconds (of the whole process), tokens and documents."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": f"{output}-home",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    if name == "ours":
        options = ["--tokenizer", tokenizer, "--output", output, "--workers", "1", "--input", *files]
        command = [*_ours("shards"), *options]
    else:
        command = [python, _CONTESTANTS_SCRIPT, name, tokenizer, output, *files]
    before, started_at = os.times(), time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    whole_seconds, after = time.monotonic() - started_at, os.times()
    shutil.rmtree(f"{output}-home", ignore_errors=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    if name == "ours":
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
        splits = (manifest["train"], manifest["valid"])
        result = {key: sum(split[key] for split in splits) for key in ("documents", "tokens")}
        result["dropped"] = sum(sum(source["dropped"].values()) for source in manifest["sources"])
        result["seconds"] = whole_seconds
    else:
        line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(RESULT))
        result = json.loads(line.removeprefix(RESULT))
    return {**result, "whole_seconds": whole_seconds, "cpu_seconds": result.pop("cpu_seconds", cpu_seconds)}


def versions(environment: Path) -> dict[str, str]:
    """Versions of the contestants' packages."""
    code = "import importlib.metadata as m, sys; print('\\n'.join(p + ' ' + m.version(p) for p in sys.argv[1:]))"
    own = _checked([sys.executable, "-c", code, "sentencepiece", "numpy"])
    theirs = _checked([environment / "bin" / "python", "-c", code, *PEER_PACKAGES])
    return dict(line.split(" ") for line in (own + theirs).splitlines())  # type: ignore[misc]


def table(report: dict[str, Any]) -> str:
    """Medians in MB of raw text a second, and how many times faster ours is."""
    megabytes = report["corpus"]["bytes"] / 1e6
    all_versions = {"python": report["machine"]["python"], **report["versions"]}
    columns = ("", "process s", "work s", "MB/s", "ours is", "CPU s", "MB/CPU s", "ours is", "tokens")
    lines = [
        f"{megabytes:.1f} MB of raw text, {report['corpus']['documents']:,} documents, "
        f"{report['vocab_size']:,} pieces, one core of {report['machine']['cpu']}, median of "
        f"{len(report['runs']['ours'])} runs; the peers' normaliser: {report['normaliser']}; "
        + ", ".join(f"{name} {version}" for name, version in all_versions.items()),
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in report["runs"][name])

    for name in CONTESTANTS:
        wall, cpu = median(name, "seconds"), median(name, "cpu_seconds")
        cells = [
            name,
            f"{median(name, 'whole_seconds'):.2f}",
            f"{wall:.2f}",
            f"{megabytes / wall:.2f}",
            f"{wall / median('ours', 'seconds'):.2f}x",
            f"{cpu:.2f}",
            f"{megabytes / cpu:.2f}",
            f"{cpu / median('ours', 'cpu_seconds'):.2f}x",
            f"{median(name, 'tokens'):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _check_counts(runs: dict[str, list[dict[str, Any]]], documents: int) -> None:
    """Everyone saw every document and made the same tokens, but for the documents that ours drops."""
    sentencepiece = runs["sentencepiece"][0]["tokens"]
    for name, results in runs.items():
        for run in results:
            seen = run["documents"] + run.get("dropped", 0)
            if seen != documents:
                sys.exit(f"{name} saw {seen} of {documents} documents: the comparison is not fair")
            allowed = 0.05 if run.get("dropped") else 0.001
            if abs(run["tokens"] / sentencepiece - 1) > allowed:
                sys.exit(f"{name} made {run['tokens']} tokens and SentencePiece {sentencepiece}: not the same work")


def _ours(command: str) -> list[str]:
    return [sys.executable, "-m", "data_prep", command]


def _checked(command: list[Any]) -> str:
    done = subprocess.run([str(word) for word in command], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    corpora = os.environ.get("CLOZEWORKS_CORPORA", str(REPOSITORY.parent / "shared" / "corpora"))
    parser.add_argument("--corpus", default=f"{corpora}/pack_medium/*.jsonl.gz", help="pattern of jsonl.gz files")
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="take about so much text, from all files alike")
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--normaliser", choices=("none", "ours"), default="none", help="what the peers do to text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="number of the core to use")
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    parser.add_argument("--environment", default=f"{cache}/clozeworks-peers", help="where the peers are installed")
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="every run as JSON; the table beside it as .md"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
