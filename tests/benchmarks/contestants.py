"""What the comparisons share: turns, children on one core, and the tokenizers and copies of text they are given."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONPATH": str(REPOSITORY),
}
"""Of every contestant: one thread, and nothing from the network."""
Found = TypeVar("Found")


def in_turns(
    names: Sequence[str], runs: int, run: Callable[[str, int], Found], title: str = ""
) -> dict[str, list[Found]]:
    """Let each contestant run so many times, in turns, every second round backwards.

    `run` gets the contestant and the number of the round, from 0; returns what each of its calls returned.
    """
    found: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(runs):
        for name in names[:: -1 if number % 2 else 1]:
            found[name].append(run(name, number))
            print(f"{title}{name}, run {number + 1}: {found[name][-1]}"[:200], file=sys.stderr, flush=True)
    return found


def median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    """The median of one figure of the runs."""
    return statistics.median(run[name] for run in runs)


def one_core() -> list[int]:
    """The core that contestants are bound to."""
    return sorted(os.sched_getaffinity(0))[:1]


def answer_of(command: Sequence[str], cores: Sequence[int] | None = None) -> Any:
    """Run a child and return the JSON in its last line; a failure ends this process."""
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores or os.sched_getaffinity(0)),
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)[:300]} failed with status {done.returncode}; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def data_prep(*words: str) -> None:
    """Run a command of data_prep; a failure ends this process."""
    done = subprocess.run([sys.executable, "-m", "data_prep", *words], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"data_prep {' '.join(words)[:300]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def train_tokenizer(files: Sequence[str], folder: Path, vocab_size: int) -> Path:
    """Train a tokenizer on the files; returns the folder."""
    data_prep("tokenizer", "--output", str(folder), "--vocab-size", str(vocab_size), "--input", *files)
    return folder


def repeat_files(files: Sequence[str], times: int, folder: Path) -> list[str]:
    """Each file so many times, under names of their own; one copy and links to it, for a file is named once only."""
    folder.mkdir()
    copies: list[str] = []
    for file in files:
        first = folder / f"000-{Path(file).name}"
        shutil.copyfile(file, first)
        copies.append(str(first))
        for number in range(1, times):
            copies.append(str(folder / f"{number:03d}-{Path(file).name}"))
            os.link(first, copies[-1])
    return copies


def masking_collator(vocab_size: int, mlm_probability: float = 0.15, **options: Any) -> Any:
    """transformers' collator of a vocabulary of any words."""
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    from data_prep.tokenizer.special_tokens import SPECIAL_TOKENS

    words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(vocab_size - len(SPECIAL_TOKENS)))]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability, **options)
