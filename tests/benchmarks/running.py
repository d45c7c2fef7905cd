"""One benchmark in a process of its own, with the corpus, tokenizer and shards that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.errors import UserError
from tests.benchmarks.catalog import Benchmark

SCRIPTS = Path(__file__).parent
REPOSITORY = SCRIPTS.parents[1]
_VOCAB_SIZE, _QUICK_VOCAB_SIZE = 30_522, 512


@dataclass
class Inputs:
    """What the benchmarks read; tokenizer and shards are made of the corpus when the first of them asks."""

    work: Path
    corpus: Path | None
    corpora: Sequence[str]
    """NAME=PATTERN of each; by default the files of `corpus` as one."""
    tokenizer: Path | None
    shards: Path | None
    quick: bool

    def arguments(self, benchmark: Benchmark) -> list[str]:
        """The benchmark's arguments with every {name} in them filled in."""
        words: list[str] = []
        for word in benchmark.arguments(self.quick):
            words += self._corpora() if word == "{corpora}" else [self._filled(word)]
        return words

    def _filled(self, word: str) -> str:
        for name, find in (
            ("{corpus}", self._corpus),
            ("{corpus_file}", lambda: self._files()[0]),
            ("{tokenizer}", self._tokenizer),
            ("{shards}", self._shards),
            ("{work}", lambda: self.work),
        ):
            if name in word:
                return word.replace(name, str(find()))
        return word

    def _corpora(self) -> list[str]:
        return list(self.corpora) or [f"corpus={self._corpus()}/*.jsonl.gz"]

    def _corpus(self) -> Path:
        if self.corpus is None or not any(self.corpus.glob("*.jsonl.gz")):
            problem = "no --corpus is given" if self.corpus is None else f"--corpus {self.corpus} holds no *.jsonl.gz"
            raise UserError(
                f"{problem}; name a folder of jsonl.gz files with the field text, or set CLOZEWORKS_CORPORA"
            )
        return self.corpus.absolute()

    def _files(self) -> list[str]:
        return sorted(map(str, self._corpus().glob("*.jsonl.gz")))

    def _tokenizer(self) -> Path:
        if self.tokenizer is None:
            size = str(_QUICK_VOCAB_SIZE if self.quick else _VOCAB_SIZE)
            self.tokenizer = self._prepared("tokenizer", ["--input", *self._files(), "--vocab-size", size])
        return self.tokenizer.absolute()

    def _shards(self) -> Path:
        if self.shards is None:
            self.shards = self._prepared("shards", ["--tokenizer", str(self._tokenizer()), "--input", *self._files()])
        return self.shards.absolute()

    def _prepared(self, what: str, arguments: Sequence[str]) -> Path:
        print(f"making the {what} first", flush=True)
        command = [sys.executable, "-m", "data_prep", what, "--output", str(self.work / what), *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"the {what} of the corpus could not be made: {done.stderr.strip()[-2000:]}")
        return self.work / what


def measure(benchmark: Benchmark, inputs: Inputs, results: Path) -> None:
    """Run it; its results are then in the folder `results`.

    Raises:
        UserError: an input is missing, or its script failed.
    """
    new = inputs.work / f"{benchmark.name}.json"
    script = SCRIPTS.relative_to(REPOSITORY) / benchmark.file  # as it is to stand in the report
    command = [sys.executable, str(script), *inputs.arguments(benchmark), "--results", str(new)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    started_at = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, env=environment)
    minutes = (time.monotonic() - started_at) / 60.0
    if done.returncode or not new.exists():
        raise UserError(
            f"{benchmark.name} ended with status {done.returncode} after {minutes:.1f} minutes; its output is above, "
            f"and 'python tests/benchmarks/{benchmark.file} --help' describes how to run it alone"
        )
    print(f"done in {minutes:.1f} minutes", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    shutil.move(new, results / new.name)
