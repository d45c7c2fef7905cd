"""One benchmark in a process of its own: what it needs is made, its report is brought into the common shape."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.base.errors import UserError
from tests.benchmarks import reports
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
    _device: str = field(default="", repr=False)

    def arguments(self, benchmark: Benchmark) -> list[str]:
        """The benchmark's arguments with every {name} in them filled in."""
        words = benchmark.quick if self.quick else benchmark.arguments
        return [
            filled for word in words for filled in (self._corpora() if word == "{corpora}" else [self._filled(word)])
        ]

    def file_name(self, benchmark: Benchmark) -> str:
        """Where its results go; on a GPU machine some have a name of their own."""
        if "{device}" not in benchmark.file_name:
            return benchmark.file_name
        return benchmark.file_name.format(device=self.device)

    @property
    def device(self) -> str:
        """cuda or cpu."""
        if not self._device:
            import torch

            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        return self._device

    def _filled(self, word: str) -> str:
        for name, find in (
            ("{corpus}", lambda: self._corpus()),
            ("{corpus_file}", lambda: min(self._corpus().glob("*.jsonl.gz"))),
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
            told = "no --corpus is given" if self.corpus is None else f"--corpus {self.corpus} holds no *.jsonl.gz"
            raise UserError(f"{told}; name a folder of jsonl.gz files with the field text, or set CLOZEWORKS_CORPORA")
        return self.corpus.absolute()

    def _tokenizer(self) -> Path:
        if self.tokenizer is None:
            files = sorted(map(str, self._corpus().glob("*.jsonl.gz")))
            size = str(_QUICK_VOCAB_SIZE if self.quick else _VOCAB_SIZE)
            self._prepare("tokenizer", ["--input", *files, "--vocab-size", size])
            self.tokenizer = self.work / "tokenizer"
        return self.tokenizer.absolute()

    def _shards(self) -> Path:
        if self.shards is None:
            files = sorted(map(str, self._corpus().glob("*.jsonl.gz")))
            self._prepare("shards", ["--tokenizer", str(self._tokenizer()), "--input", *files])
            self.shards = self.work / "shards"
        return self.shards.absolute()

    def _prepare(self, what: str, arguments: Sequence[str]) -> None:
        print(f"making the {what} first", flush=True)
        command = [sys.executable, "-m", "data_prep", what, "--output", str(self.work / what), *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"the {what} of the corpus could not be made: {done.stderr.strip()[-2000:]}")


def missing_packages(benchmark: Benchmark) -> list[str]:
    """What it needs and this Python cannot import."""
    return [name for name in benchmark.packages if importlib.util.find_spec(name) is None]


def measure(benchmark: Benchmark, inputs: Inputs) -> reports.Report:
    """Run it and return its report in the common shape.

    Raises:
        UserError: a package or an input is missing, or its script failed; the message says which and what to do.
    """
    if missing := missing_packages(benchmark):
        raise UserError(
            f"{benchmark.name} needs {', '.join(missing)}, which this Python lacks; install them with "
            f"'{Path(sys.executable).name} -m pip install {' '.join(missing)}' and run it again"
        )
    raw_file = inputs.work / f"{benchmark.name}-raw.json"
    script = SCRIPTS.relative_to(REPOSITORY) / benchmark.script  # as it is to stand in the report
    command = [sys.executable, str(script), *inputs.arguments(benchmark), benchmark.results_option, str(raw_file)]
    threads = benchmark.threads or len(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    if benchmark.peers_environment:
        print("its peers are installed into an environment of their own where that is missing", flush=True)
    started_at = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, env=environment)
    minutes = (time.monotonic() - started_at) / 60.0
    if done.returncode or not raw_file.exists():
        hint = "; it installs its peers with pip, which needs a package index" if benchmark.peers_environment else ""
        raise UserError(
            f"{benchmark.name} ended with status {done.returncode} after {minutes:.1f} minutes{hint}; what it said "
            f"stands above, and 'python tests/benchmarks/{benchmark.script} --help' tells how to run it alone"
        )
    print(f"done in {minutes:.1f} minutes", flush=True)
    return reports.in_common_shape(benchmark.name, json.loads(raw_file.read_text()), benchmark.rows)
