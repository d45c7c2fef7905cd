"""How fast preparation is beside SentencePiece's own `encode`, where its time goes, and what memory a worker takes.

    python tests/benchmarks/preparation.py --corpus ../shared/corpora/pack_medium [--tokenizer DIR] [--workers 1 2]
        [--runs 3] [--check-ids] [--scale 1 4 16] [--results FILE.json]

In turns, each in a process of its own on the same core: SentencePiece encodes the normalised documents, which it finds
in memory (100 a call, one thread), and `python -m data_prep shards` makes shards of the files, from starting Python to
the manifest. MB are those of the normalised text for both. More workers get as many cores. Then one run in this way's
process, with a stop-watch around each part, says where the time goes. `--scale` repeats the corpus, with
deduplication off, and gives time and the memory of the largest process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import described

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "preparation.json"
_DOCUMENTS_A_CALL = 100


def main() -> None:
    arguments = _parse()
    if arguments.child:
        print(json.dumps(_CHILDREN[arguments.child](arguments)))
        return
    files = sorted(arguments.corpus.glob("*.jsonl.gz"))
    if not files:
        sys.exit(f"{arguments.corpus} holds no *.jsonl.gz")
    with tempfile.TemporaryDirectory(prefix="preparation-", dir=arguments.work) as work:
        tokenizer = arguments.tokenizer or _train(files, Path(work))
        report = {
            "machine": described("sentencepiece", "sentencex", "numpy"),
            **_measure(arguments, files, tokenizer, Path(work)),
        }
    arguments.results.parent.mkdir(exist_ok=True)
    arguments.results.write_text(json.dumps(report, indent=1, default=str) + "\n")
    text = _table(report)
    arguments.results.with_suffix(".md").write_text(text)
    print(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--tokenizer", type=Path, help="folder; by default one of 30,522 pieces is trained first")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts")
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
        answer = subprocess.run(command, check=True, capture_output=True, text=True, preexec_fn=_on_cores(1))
        shutil.rmtree(work / "shards", ignore_errors=True)
        return json.loads(answer.stdout.splitlines()[-1])

    report: dict[str, Any] = {"sentencepiece": [], "shards": {str(number): [] for number in arguments.workers}}
    for _ in range(arguments.runs):
        report["sentencepiece"].append(child("sentencepiece"))
        for number in arguments.workers:
            report["shards"][str(number)].append(_make_shards(files, tokenizer, work / "shards", number))
    report["parts"] = child("parts")
    if arguments.check_ids:
        report["ids"] = child("check_ids")
    report["scale"] = {}
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
    """Seconds of the whole command and the memory of its largest process."""
    command = [sys.executable, "-m", "data_prep", "shards", "--input", *map(str, files), "--tokenizer", str(tokenizer)]
    command += ["--output", str(output), "--workers", str(num_workers), *(options or [])]
    load = os.getloadavg()[0]
    started_at = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_on_cores(num_workers)
    )
    _, status, usage = os.wait4(process.pid, 0)
    elapsed_seconds = time.perf_counter() - started_at
    if status:
        sys.exit(f"{' '.join(command)} failed with status {os.waitstatus_to_exitcode(status)}")
    shutil.rmtree(output)
    return {
        "seconds": elapsed_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
        "load_before": load,
    }


def _on_cores(number: int) -> Callable[[], None]:
    cores = sorted(os.sched_getaffinity(0))[:number]
    return lambda: os.sched_setaffinity(0, cores)


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
    from data_prep.cleaning import Normalisation, normalise

    for path in sorted(corpus.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield normalise(json.loads(line)["text"], Normalisation())


def _calls(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + _DOCUMENTS_A_CALL] for start in range(0, len(texts), _DOCUMENTS_A_CALL))


def sentencepiece_alone(arguments: argparse.Namespace) -> dict[str, float]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer / "tokenizer.model"))
    texts = list(_texts(arguments.corpus))
    load = os.getloadavg()[0]
    started_at, cpu_started_at = time.perf_counter(), time.process_time()
    num_tokens = sum(len(ids) for call in _calls(texts) for ids in processor.encode(call, num_threads=1))
    return {
        "seconds": time.perf_counter() - started_at,
        "cpu_seconds": time.process_time() - cpu_started_at,
        "text_mb": sum(len(text.encode()) for text in texts) / 1e6,
        "documents": len(texts),
        "tokens": num_tokens,
        "load_before": load,
    }


def check_ids(arguments: argparse.Namespace) -> dict[str, int]:
    """Compare the ids that preparation writes with SentencePiece's own over the whole corpus."""
    import sentencepiece

    from data_prep.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(arguments.tokenizer)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(arguments.tokenizer / "tokenizer.model"))
    documents = tokens = different = 0
    for texts in _calls(list(_texts(arguments.corpus))):
        for ours, theirs in zip(tokenizer.encode_many(texts), processor.encode(texts, num_threads=1), strict=True):
            documents += 1
            tokens += len(theirs)
            different += ours.tolist() != theirs
    return {"documents": documents, "tokens": tokens, "documents_that_differ": different}


class Stopwatch:
    """Adds up seconds by part; the seconds of a part within another are its own alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a function, or every step of the iterator that `__iter__` gives."""
        function = getattr(owner, name)

        def timed(*values: Any, **named: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*values, **named)
            finally:
                self._switch()
                self._running.pop()

        def timed_iterator(*values: Any) -> Iterator[Any]:
            iterator = function(*values)
            while True:
                self._switch()
                self._running.append(part)
                try:
                    item = next(iterator, self)
                finally:
                    self._switch()
                    self._running.pop()
                if item is self:
                    return
                yield item

        setattr(owner, name, timed_iterator if name == "__iter__" else timed)


def seconds_by_part(arguments: argparse.Namespace) -> dict[str, float]:
    """One run with one worker, in this process."""
    started_at = time.perf_counter()
    from data_prep import __main__, encoding, map_phase, mapping, reduce_phase, reducing
    from data_prep.documents import DocumentReader
    from data_prep.sections import SectionWriter
    from data_prep.tokenizer import Tokenizer

    stopwatch = Stopwatch()
    for owner, name, part in (
        (__main__, "main", "starting, planning, manifest"),
        (map_phase, "map_unit", "map: the rest"),
        (DocumentReader, "__iter__", "map: read, decompress, parse, hash input"),
        (encoding, "normalise_batch", "map: normalise"),
        (encoding, "batch_sentence_starts", "map: sentence ends (sentencex)"),
        (encoding, "_encode", "map: sentences to tokens, document hashes"),
        (Tokenizer, "encode_bytes", "map: look up words"),
        (Tokenizer, "_encode_directly", "map: SentencePiece on new words"),
        (SectionWriter, "_flush", "map: sort by shard and write"),
        (mapping, "cached_tokenizer", "map: load the tokenizer"),
        (reduce_phase, "reduce_shard", "reduce: deduplicate, order, count"),
        (reducing, "_load", "reduce: read"),
        (reducing, "write_shard", "reduce: records, tar, index, sha256"),
    ):
        stopwatch.watch(owner, name, part)
    files = [str(path) for path in sorted(arguments.corpus.glob("*.jsonl.gz"))]
    sys.argv[1:] = ["shards", "--input", *files, "--tokenizer", str(arguments.tokenizer)]
    sys.argv += ["--output", str(arguments.output), "--workers", "1"]
    stopwatch.seconds["importing"] = time.perf_counter() - started_at
    __main__.main()
    return stopwatch.seconds


_CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "sentencepiece": sentencepiece_alone,
    "parts": seconds_by_part,
    "check_ids": check_ids,
}


def _table(report: dict[str, Any]) -> str:
    def median(runs: list[dict[str, float]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    text_mb = report["sentencepiece"][0]["text_mb"]
    alone = median(report["sentencepiece"], "seconds")
    one = median(report["shards"]["1"], "seconds") if "1" in report["shards"] else None
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items() if not isinstance(value, dict))
    lines = [
        f"Preparation of {text_mb:.1f} MB of text, median of {len(report['sentencepiece'])} runs; {machine}",
        "",
        "| what | seconds | CPU seconds | MB/s | times SentencePiece | times one worker | peak MB of a process |",
        "|---|---|---|---|---|---|---|",
        f"| SentencePiece's encode alone | {alone:.2f} | {median(report['sentencepiece'], 'cpu_seconds'):.2f} | "
        f"{text_mb / alone:.2f} | 1.00 | | |",
    ]
    for number, runs in report["shards"].items():
        seconds = median(runs, "seconds")
        ratio = f"{one / seconds:.2f}" if one else ""
        lines.append(
            f"| shards, {number} worker{'s' * (number != '1')} | {seconds:.2f} | "
            f"{median(runs, 'cpu_seconds'):.2f} | {text_mb / seconds:.2f} | "
            f"{alone / seconds:.2f} | {ratio} | {max(run['peak_mb'] for run in runs):.0f} |"
        )
    total = sum(report["parts"].values())
    lines += ["", "| part, one worker | seconds | share |", "|---|---|---|"]
    for part, seconds in sorted(report["parts"].items(), key=lambda item: -item[1]):
        lines.append(f"| {part} | {seconds:.2f} | {seconds / total:.1%} |")
    if "ids" in report:
        ids = report["ids"]
        lines += ["", f"{ids['documents_that_differ']} of {ids['documents']:,} documents ({ids['tokens']:,} tokens) "]
        lines[-1] += "have other ids than SentencePiece gives them."
    if report["scale"]:
        lines += ["", "| times the corpus | seconds | MB/s | peak MB of a process |", "|---|---|---|---|"]
        for times, run in report["scale"].items():
            amount = text_mb * int(times)
            lines.append(f"| {times} | {run['seconds']:.1f} | {amount / run['seconds']:.2f} | {run['peak_mb']:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
