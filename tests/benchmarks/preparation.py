"""How fast preparation is by number of workers, where its time goes, and what memory a worker takes.

    python tests/benchmarks/preparation.py --corpus ../shared/corpora/pack_medium [--limit-mb 20] [--tokenizer DIR]
        [--workers 1 2] [--runs 3] [--check-ids] [--scale 1 4 16] [--scale-workers 1] [--results FILE.json]

In turns, on as many cores as it has workers, `python -m data_prep shards` makes shards of the files, from starting
Python to the manifest. MB are those of the normalized text. Then one run in this way's process, with a stop-watch
around each part, says where the time goes; --check-ids compares every id with SentencePiece's. `--scale` repeats the
corpus, with deduplication off, and gives time and the memory of the largest process; `--runs 0` leaves it at that.
Beside its peers preparation stands in `peers_preparation.py`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contained_process import run_contained
from corpus_part import take_part
from machine import described
from stopwatch import Stopwatch

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "preparation.json"
_DOCUMENTS_A_CALL = 100


def main() -> None:
    arguments = _parse()
    if arguments.child:
        print(json.dumps(_CHILDREN[arguments.child](arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="preparation-", dir=arguments.work) as work:
        found = [str(path) for path in sorted(arguments.corpus.glob("*.jsonl.gz"))]
        files = [Path(path) for path in take_part(found, arguments.limit_mb, Path(work) / "part")]
        arguments.corpus = files[0].parent
        tokenizer = arguments.tokenizer or _train(files, Path(work))
        report = {
            "machine": described("sentencepiece", "sentencex", "numpy"),
            **_measure(arguments, files, tokenizer, Path(work)),
        }
    arguments.results.parent.mkdir(exist_ok=True)
    arguments.results.write_text(json.dumps(report, indent=1, default=str) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", type=Path, help="folder; by default one of 30,522 pieces is trained first")
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="take about so much text, from all files alike")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts; 0 for --scale alone")
    parser.add_argument("--check-ids", action="store_true", help="compare every id of the corpus with SentencePiece's")
    parser.add_argument("--scale", type=int, nargs="*", default=[], help="times the corpus, such as 1 4 16")
    parser.add_argument("--scale-workers", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, files: list[Path], tokenizer: Path, work: Path) -> dict[str, Any]:
    def child(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", name, "--corpus", str(arguments.corpus)]
        command += ["--tokenizer", str(tokenizer), "--output", str(work / "shards")]
        answer = subprocess.run(
            command, check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, _cores(1))
        )
        shutil.rmtree(work / "shards", ignore_errors=True)
        return json.loads(answer.stdout.splitlines()[-1])

    report: dict[str, Any] = {"text_mb": sum(len(text.encode()) for text in _texts(arguments.corpus)) / 1e6}
    report |= {"shards": {str(number): [] for number in arguments.workers}, "scale": {}}
    for run in range(arguments.runs):
        for number in arguments.workers[:: -1 if run % 2 else 1]:
            report["shards"][str(number)].append(_make_shards(files, tokenizer, work / "shards", number))
    if arguments.runs:
        report["parts"] = child("parts")
    if arguments.check_ids:
        report["ids"] = child("check_ids")
    for times in arguments.scale:
        folder = work / f"times-{times}"
        copies = list(_repeat(files, times, folder))
        options = ["deduplication.exact=false"]
        report["scale"][str(times)] = _make_shards(copies, tokenizer, work / "shards", arguments.scale_workers, options)
        shutil.rmtree(folder)
    return report


def _make_shards(
    files: list[Path], tokenizer: Path, output: Path, num_workers: int, options: list[str] | None = None
) -> dict[str, float]:
    """Seconds of the whole command, CPU seconds of all its processes, and the memory of the largest."""
    command = [sys.executable, "-m", "data_prep", "shards", "--input", *map(str, files), "--tokenizer", str(tokenizer)]
    command += ["--output", str(output), "--workers", str(num_workers), *(options or [])]
    figures = run_contained(command, REPOSITORY, _cores(num_workers))
    manifest = json.loads((output / "manifest.json").read_text())
    output_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    shutil.rmtree(output)
    tokens = manifest["train"]["tokens"] + manifest["valid"]["tokens"]
    return {**figures, "tokens": tokens, "output_mb": output_bytes / 1e6}


def _cores(number: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:number]


def _repeat(files: list[Path], times: int, folder: Path) -> Iterator[Path]:
    """Each file so many times, under names of their own; one copy and links to it, for a file is named once only."""
    folder.mkdir()
    for file in files:
        first = folder / f"000-{file.name}"
        shutil.copyfile(file, first)
        yield first
        for number in range(1, times):
            os.link(first, folder / f"{number:03d}-{file.name}")
            yield folder / f"{number:03d}-{file.name}"


def _train(files: list[Path], work: Path) -> Path:
    command = [sys.executable, "-m", "data_prep", "tokenizer", "--output", str(work / "tokenizer")]
    subprocess.run([*command, "--input", *map(str, files)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return work / "tokenizer"


def _texts(corpus: Path) -> Iterator[str]:
    from data_prep.text.cleaning import Normalization, normalize

    for path in sorted(corpus.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield normalize(json.loads(line)["text"], Normalization())


def _calls(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + _DOCUMENTS_A_CALL] for start in range(0, len(texts), _DOCUMENTS_A_CALL))


def check_ids(arguments: argparse.Namespace) -> dict[str, int]:
    """Compare the ids that preparation writes with SentencePiece's own over the whole corpus."""
    import sentencepiece

    from data_prep.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(arguments.tokenizer)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer / "tokenizer.model"))
    documents = tokens = different = 0
    for texts in _calls(list(_texts(arguments.corpus))):
        for ours, theirs in zip(tokenizer.encode_many(texts), processor.encode(texts, num_threads=1), strict=True):
            documents += 1
            tokens += len(theirs)
            different += ours.tolist() != theirs
    return {"documents": documents, "tokens": tokens, "documents_that_differ": different}


def seconds_by_part(arguments: argparse.Namespace) -> dict[str, float]:
    """One run with one worker, in this process."""
    started_at = time.perf_counter()
    from data_prep import __main__
    from data_prep.documents.documents import DocumentReader
    from data_prep.pipeline import encoding, map_phase, reduce_phase, reduce_task
    from data_prep.pipeline.sections import SectionWriter
    from data_prep.tokenizer import sentencepiece_tokenizer
    from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
    from data_prep.tokenizer.tokenizer import Tokenizer

    stopwatch = Stopwatch()
    for owner, name, part in (
        (__main__, "main", "starting, planning, manifest"),
        (map_phase, "map_unit", "map: the rest"),
        (DocumentReader, "__iter__", "map: read, decompress, parse, hash input"),
        (encoding, "normalize_batch", "map: normalize"),
        (encoding, "_document_ids", "map: document hashes"),
        (sentencepiece_tokenizer, "batch_sentence_starts", "map: sentence ends (sentencex)"),
        (SentencePieceTokenizer, "encode_batch", "map: sentences to tokens"),
        (SentencePieceTokenizer, "encode_bytes", "map: look up words"),
        (SentencePieceTokenizer, "_encode_directly", "map: SentencePiece on new words"),
        (SectionWriter, "_flush", "map: sort by shard and write"),
        (Tokenizer, "load", "loading the tokenizer"),
        (reduce_phase, "reduce_shard", "reduce: deduplicate, order, count"),
        (reduce_task, "_read", "reduce: read"),
        (reduce_task, "write_shard", "reduce: records, tar, index, sha256"),
    ):
        stopwatch.watch(owner, name, part)
    files = [str(path) for path in sorted(arguments.corpus.glob("*.jsonl.gz"))]
    sys.argv[1:] = ["shards", "--input", *files, "--tokenizer", str(arguments.tokenizer)]
    sys.argv += ["--output", str(arguments.output), "--workers", "1"]
    stopwatch.seconds["importing"] = time.perf_counter() - started_at
    __main__.main()
    return stopwatch.seconds


_CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "parts": seconds_by_part,
    "check_ids": check_ids,
}


if __name__ == "__main__":
    main()
