"""Which tokens to mask, and what a teacher adds: on the speed run, and on the words of the proof table.

    python tests/benchmarks/masking.py --small FILE --corpus FILES --minimal-pairs DIR --labeled DIR
        --work DIR --results FILE [--runs N]

The architecture is that of the speed run (2 layers of 128), the recipe that of `small_cpu` in steps of 2,048 tokens.
Each of `VARIANTS` is trained with three seeds for `SPEED_RUN_STEPS` on the text of the speed run, and for a quarter of
an epoch on the text of `proof.py`; then the default and the two others with the lowest mean loss for a whole epoch. The
teacher of `TAUGHT` has twice the width and was trained on the same text by the default, for a whole epoch or twice the
steps of the speed run. Each row has the loss of `encoder_runs.py`: the valid split in rows of 128, 15% masked, in
transformers, in fp32. Those of the proof table's text also have

- the accuracy on minimal pairs: all of them after a whole epoch, else every tenth;
- the accuracy of one fine-tuning by `launch/finetune.py` on SST-2: the first `TRAIN` rows of train.tsv in --labeled,
  of which a tenth chooses the epoch; the test examples are the `TEST` rows after them.

A row that is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import proof
from encoder_runs import Corpus, Recipe, add_run_options, measure_missing, run, train_once
from machine import REPOSITORY, commit_of
from speedrun import MODEL, corpus_of

from data_prep.base.errors import run_command
from trainer.checkpoint.teacher import digest_of
from trainer.data.minimal_pairs import read_minimal_pairs

DEFAULT, TAUGHT = "from 50 to 30% (default)", "default, with a teacher of twice the width"
CONSTANT = "data.final_mlm_probability=null"
TEACHER = ("model.hidden_size=256", "model.num_attention_heads=4", "model.intermediate_size=704")
OBJECTIVES = [{"name": "masked_lm", "weight": 0.5}, {"name": "distillation", "weight": 0.5}]
VARIANTS: Mapping[str, tuple[str, ...]] = {
    DEFAULT: (),
    "15%": ("data.mlm_probability=0.15", CONSTANT),
    "30%": ("data.mlm_probability=0.3", CONSTANT),
    "drawn by the cosine law from 0 to 80%": (
        *("data.masking_law.name=cosine", "data.mlm_probability=0.29"),
        CONSTANT,
    ),
    "around 12% and 57% (bimodal)": ("data.masking_law.name=bimodal", "data.mlm_probability=0.3", CONSTANT),
    TAUGHT: (f"objectives={json.dumps(OBJECTIVES)}",),
}
SPEED_RUN, QUARTER, EPOCH = "speed run", "a quarter of an epoch", "one epoch"
SEEDS, CHOSEN, SPEED_RUN_STEPS = (1, 2, 3), 2, 600
TRAIN, TEST, FIT_EPOCHS, FIT_RATE = 8_000, 5_000, 3, 1e-3


@dataclass(frozen=True)
class Run:
    """One row; `length` is one of `SPEED_RUN`, `QUARTER` and `EPOCH`."""

    length: str
    variant: str
    seed: int


def plan(rows: Sequence[Mapping[str, Any]]) -> list[Run]:
    """All runs in their order; those of a whole epoch appear once all quarters have rows."""
    short = [Run(length, name, seed) for seed in SEEDS for length in (SPEED_RUN, QUARTER) for name in VARIANTS]
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for row in rows:
        if row["length"] == QUARTER:
            losses[row["variant"]].append(row["loss"])
    if any(len(found) < len(SEEDS) for found in losses.values()):
        return short
    others = sorted((name for name in VARIANTS if name != DEFAULT), key=lambda name: statistics.mean(losses[name]))
    return short + [Run(EPOCH, name, seed) for seed in SEEDS for name in (DEFAULT, *others[:CHOSEN])]


def settings_of(variant: str, teacher: Path | None) -> tuple[str, ...]:
    """The settings of a variant; `teacher` is the folder for `TAUGHT`."""
    batch = (f"training.global_batch_tokens={proof.BATCH_TOKENS}", f"training.micro_batch_tokens={proof.BATCH_TOKENS}")
    return (*MODEL, *batch, *VARIANTS[variant], *(() if teacher is None else (f"teacher={teacher}",)))


def divide_labeled(labeled: Path, work: Path) -> tuple[Path, Path]:
    """The files of fine-tuning: rows of train.tsv, none in both."""
    train, test = work / "train.tsv", work / "test.tsv"
    with open(labeled / "sst2" / "train.tsv", encoding="utf-8") as lines:
        header, rows = next(lines), [*islice(lines, TRAIN + TEST)]
    for path, part in ((train, rows[:TRAIN]), (test, rows[TRAIN:])):
        path.write_text(header + "".join(part), encoding="utf-8")
    return train, test


def accuracy_of(model: Path, seed: int, labeled: Path, work: Path) -> float:
    """Accuracy on the test examples after one fine-tuning, from 0 to 1."""
    train, test = divide_labeled(labeled, work)
    output = work / "fit"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(REPOSITORY / "launch" / "finetune.py"), "--model", str(model)]
    command += ["--task", "classification", "--train", str(train), "--test", str(test), "--no-tracking"]
    command += ["--text-column", "sentence", "--label-column", "label", "--max-length", "128", "--seeds", "1"]
    command += ["--split-seed", str(seed), "--epochs", str(FIT_EPOCHS), "--learning-rates", f"{FIT_RATE:g}"]
    run([*command, "--output", str(output)])
    (entry,) = json.loads((output / "scores.json").read_text())["variants"].values()
    return float(entry["fits"][0]["scores"]["accuracy"])


def trained(planned: Run, corpus: Corpus, speed_run_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trained encoder of a row, and what its row says of the training."""
    epoch = corpus.steps_of_epoch(proof.BATCH_TOKENS)
    is_short = planned.length == SPEED_RUN
    steps = speed_run_steps if is_short else round(epoch * (1 if planned.length == EPOCH else 0.25))
    teacher, row = None, {"commit": commit_of(REPOSITORY), "steps": steps}
    if planned.variant == TAUGHT:
        of_teacher = Recipe("ours", 2 * steps if is_short else epoch, (*settings_of(DEFAULT, None), *TEACHER))
        taught = train_once(of_teacher, 1, corpus)
        teacher = Path(taught["model"])
        row |= {"teacher_sha256": digest_of(teacher), "teacher_loss": round(taught["loss"], 4)}
    found = train_once(Recipe("ours", steps, settings_of(planned.variant, teacher)), planned.seed, corpus)
    row |= {
        "tokens": found["tokens"],
        "cpu_seconds": round(found["cpu_seconds"], 1),
        "unigram_entropy": round(corpus.unigram_entropy_nats, 4),
        "loss": round(found["loss"], 4),
    }
    return row, found


def main() -> None:
    arguments = _parse()
    work = arguments.work.absolute()
    small = corpus_of(f"small={arguments.small}", None, work, arguments.vocab_size)
    words, selection = proof.prepared(arguments.corpus, work / "words", arguments.words, arguments.vocab_size)

    def measure(planned: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        corpus = small if planned.length == SPEED_RUN else words
        row, found = trained(planned, corpus, arguments.steps)
        if corpus is words:
            pairs = read_minimal_pairs(arguments.minimal_pairs)
            scores = proof.score(Path(found["model"]), pairs[:: 1 if planned.length == EPOCH else proof.SUBSET])
            row |= {name: scores[name] for name in ("pairs", "overall", "interval")}
            accuracy = accuracy_of(Path(found["model"]), planned.seed, arguments.labeled, work)
            row |= {"accuracy": round(accuracy, 4)}
        return row, found["described"]

    def given(planned: Run) -> dict[str, int]:
        return {"steps": arguments.steps} if planned.length == SPEED_RUN else {"words": arguments.words}

    measure_missing(arguments, plan, given, measure, corpus=selection, variants=list(VARIANTS))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", required=True, metavar="PATTERN", help="text of the speed run: pack_small")
    parser.add_argument("--steps", type=int, default=SPEED_RUN_STEPS, help="of a run on --small (default %(default)s)")
    parser.add_argument("--corpus", nargs="+", required=True, metavar="PATTERN", help="jsonl.gz files")
    parser.add_argument("--minimal-pairs", type=Path, required=True, metavar="DIR", help="BLiMP's files")
    parser.add_argument("--labeled", type=Path, required=True, metavar="DIR", help="folder with sst2/train.tsv")
    parser.add_argument(
        "--words", type=int, default=proof.NUM_WORDS, metavar="N", help="of the corpus (default %(default)s)"
    )
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
