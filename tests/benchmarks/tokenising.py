"""Tokenising alone, on one core: ours beside SentencePiece's `encode` and `tokenizers`' `encode_batch_fast`.

    python tests/benchmarks/tokenising.py --corpus ../shared/corpora/pack_medium [--limit-mb 20] [--runs 3]
        [--tokenizer DIR] [--results FILE]

All three encode the same normalised texts, 1,000 documents a call, with one vocabulary; each turn is a process of its
own that finds the texts in memory, so that ours begins with an empty word cache. `tokenizers` reads our tokenizer.json
without its normaliser and without special tokens: the same ids with the least work. Ids must be the same for all, or
this stops; where only `tokenizers` differs, in how many documents is told.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from corpus_part import take_part
from machine import described, peak_memory_mb
from peer_contestants import REPOSITORY, read_texts
from peers_preparation import write_peer_tokenizer

CONTESTANTS = ("ours", "sentencepiece", "tokenizers")
_DOCUMENTS_A_CALL = 1000


def main() -> None:
    """Run the contestants in turns, and print and write what they answered."""
    arguments = _parse()
    if arguments.child:
        print(json.dumps(run_contestant(arguments.child, Path(arguments.corpus), Path(arguments.tokenizer))))
        return
    with tempfile.TemporaryDirectory(prefix="clozeworks-tokenising-", dir=arguments.work) as folder:
        report = compare(arguments, Path(folder))
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
    else:
        print(json.dumps(report, indent=1))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Normalise the part of the corpus once, and let every contestant encode it `--runs` times."""
    found = sorted(str(path) for path in Path(arguments.corpus).glob("*.jsonl.gz"))
    files = take_part(found, arguments.limit_mb, folder / "part")
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else _train(files, folder, arguments.vocab_size)
    texts = _normalised(files, tokenizer)
    (folder / "texts.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    write_peer_tokenizer(tokenizer / "tokenizer.json", folder / "peer.json", "none")
    text_mb = sum(len(text.encode()) for text in texts) / 1e6
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for number in range(arguments.runs):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            print(f"{name}, run {number + 1} of {arguments.runs}", file=sys.stderr, flush=True)
            runs[name].append(_child(name, folder, folder / "peer.json" if name == "tokenizers" else tokenizer))
    ids = {name: {run["sha256"] for run in found} for name, found in runs.items()}
    if ids["ours"] != ids["sentencepiece"] or len(ids["ours"]) != 1:
        sys.exit("ours and SentencePiece gave different ids: the comparison is not fair")
    return {
        **described("sentencepiece", "tokenizers", "numpy"),
        "text_mb": text_mb,
        "documents": len(texts),
        "tokenizers_gives_the_same_ids": ids["tokenizers"] == ids["ours"],
        "runs": runs,
    }


def run_contestant(name: str, texts: Path, tokenizer: Path) -> dict[str, Any]:
    """Encode the texts, timed, and hash the ids."""
    documents = json.loads(texts.read_text(encoding="utf-8"))
    encode = _ENCODERS[name](tokenizer)
    ids: list[Any] = []
    load, started_at, cpu_started_at = os.getloadavg()[0], time.perf_counter(), time.process_time()
    for first in range(0, len(documents), _DOCUMENTS_A_CALL):
        ids += encode(documents[first : first + _DOCUMENTS_A_CALL])
    seconds, cpu_seconds = time.perf_counter() - started_at, time.process_time() - cpu_started_at
    digest = hashlib.sha256()
    for document in ids:
        digest.update(np.asarray(document, np.uint32).tobytes() + b"end")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": sum(map(len, ids)),
        "sha256": digest.hexdigest(),
        "peak_mb": peak_memory_mb(),
        "load_before": load,
    }


def _ours(tokenizer: Path) -> Callable[[list[str]], list[Any]]:
    from data_prep.tokenizing.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer).encode_many


def _sentencepiece(tokenizer: Path) -> Callable[[list[str]], list[Any]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
    return lambda texts: processor.encode(texts, num_threads=1)


def _tokenizers(tokenizer: Path) -> Callable[[list[str]], list[Any]]:
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    return lambda texts: [found.ids for found in encoder.encode_batch_fast(texts, add_special_tokens=False)]


_ENCODERS = {"ours": _ours, "sentencepiece": _sentencepiece, "tokenizers": _tokenizers}


def _child(name: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--corpus", str(folder / "texts.json")]
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [*command, "--tokenizer", str(tokenizer)],
        env=os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        sys.exit(f"{name} failed with status {done.returncode}; what it said stands above")
    return json.loads(done.stdout.splitlines()[-1])


def _normalised(files: list[str], tokenizer: Path) -> list[str]:
    from data_prep.text.cleaning import normalise
    from data_prep.tokenizing.tokenizer import Tokenizer

    rules = Tokenizer.load(tokenizer).normalisation
    return [normalise(text, rules) for text in _all_texts(files)]


def _all_texts(files: list[str]) -> Iterator[str]:
    for path in files:
        yield from read_texts(path)


def _train(files: list[str], folder: Path, vocab_size: int) -> Path:
    command = [sys.executable, "-m", "data_prep", "tokenizer", "--output", str(folder / "tokenizer")]
    command += ["--vocab-size", str(vocab_size), "--input", *files]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder / "tokenizer"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", help="folder; by default one is trained first")
    parser.add_argument("--vocab-size", type=int, default=30_522, help="of the tokenizer that is trained")
    parser.add_argument("--limit-mb", type=float, default=20.0, metavar="MB", help="about so much text (default 20)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
