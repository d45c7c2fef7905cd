"""What pretraining is worth downstream: three labeled tasks from scratch, frozen and full. Figures, not tests.

    python tests/benchmarks/downstream.py --labeled DIR --english HF --french HF --work DIR --results FILE
    python tests/benchmarks/downstream.py --labeled DIR --shards DIR --work DIR --results FILE     (pretrains first)

Each task is one run of `launch/finetune.py --compare scratch,frozen,full --seeds 3`: the first seed tries the learning
rates, the epoch is chosen by the valid score, and scores are computed on the test examples. Means and standard
deviations are over the seeds. --labeled holds `sst2` (tsv), `mrpc` (tsv, no quoting) and `fr_allocine_films` (csv).
Train files are cut to their first --rows rows, one experiment for each number, of which a tenth is the valid split;
scores are of SST-2's and MRPC's `dev.tsv` and the reviews' `test.csv`. Texts are cut at --max-length tokens, as long as
the encoder was trained on. A fit is of 3 epochs of SST-2 or 4 of the others; of few rows, of some 200 steps.

Without --english an encoder is pretrained on --shards by --config first. A task without an encoder of its language is
left out, and one whose file is in --work is not done again, so that --tasks can cut the whole in several commands.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import machine
import reports
from contestants import REPOSITORY
from reports import Row

from data_prep import open_dataset
from data_prep.base.errors import UserError

VARIANTS = ("scratch", "frozen", "full")
BATCH_SIZE = 32
MIN_STEPS = 200


@dataclass(frozen=True)
class LabeledTask:
    """A task with the arguments of `finetune.py`; files lie in the folder `name`."""

    name: str
    language: str
    task: str
    train: str
    test: str
    columns: tuple[str, ...]
    epochs: int


TASKS = (
    LabeledTask(
        "sst2",
        "english",
        "classification",
        "train.tsv",
        "dev.tsv",
        ("--text-column", "sentence", "--label-column", "label"),
        3,
    ),
    LabeledTask(
        "fr_allocine_films",
        "french",
        "classification",
        "train.csv",
        "test.csv",
        ("--text-column", "text", "--label-column", "label"),
        4,
    ),
    LabeledTask(
        "mrpc",
        "english",
        "pair_classification",
        "train.tsv",
        "dev.tsv",
        ("--text-column", "#1 String", "--pair-column", "#2 String", "--label-column", "Quality", "--no-quoting"),
        4,
    ),
)


def main() -> None:
    arguments = _parse()
    is_given = {"english": arguments.english or arguments.shards, "french": arguments.french}
    check_labeled(Path(arguments.labeled), [t for t in TASKS if t.name in arguments.tasks and is_given[t.language]])
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    english = arguments.english or (pretrained(work, arguments) if arguments.shards else None)
    models = {"english": english, "french": arguments.french}
    described = machine.described("torch", "transformers", "numpy")
    named = ("max_length", "seeds", "threads")
    details: dict[str, Any] = {name: getattr(arguments, name) for name in named} | {"tasks": {}}
    for task in TASKS:
        if task.name not in arguments.tasks:
            continue
        if models[task.language] is None:
            print(f"{task.name}: left out, for there is no --{task.language}", flush=True)
            continue
        for number in arguments.rows:
            found = fitted(task, number, Path(models[task.language]).absolute(), work, arguments)
            details["tasks"][f"{task.name}, {number:,} rows"] = found
            reports.save(arguments.results, described, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Accuracy of a pretrained encoder, trained in full or frozen, beside one from scratch; the ratio of each seed."""
    made = []
    for task, found in details["tasks"].items():
        scores = {
            variant: [100.0 * fit["scores"]["accuracy"] for fit in entry["fits"]]
            for variant, entry in found["variants"].items()
        }
        for variant in ("full", "frozen"):
            pairs = enumerate(zip(scores[variant], scores["scratch"], strict=True), start=1)
            ratios = {f"seed {seed}": ours / theirs for seed, (ours, theirs) in pairs}
            means = (statistics.mean(scores[each]) for each in (variant, "scratch"))
            name = f"{task}, {variant}: accuracy"
            made.append(Row(name, *means, "from scratch", "%", "more", len(ratios), ratios))
    return made


def check_labeled(folder: Path, tasks: Sequence[LabeledTask]) -> None:
    """All files are looked for before anything is trained.

    Raises:
        UserError: a task's file is missing.
    """
    for task in tasks:
        for name in (task.train, task.test):
            if not (folder / task.name / name).is_file():
                raise UserError(f"--labeled {folder} has no {task.name}/{name}; name its folder, or other --tasks")


def fitted(task: LabeledTask, rows: int, model: Path, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The scores of a task with so many rows to train on, and the seconds of its whole command."""
    output = work / f"{task.name}-{rows}"
    path = output.with_suffix(".json")
    if not path.exists():
        print(f"{output.name} ...", flush=True)
        folder = Path(arguments.labeled).absolute() / task.name
        train = first_rows(folder / task.train, rows, work)
        epochs = arguments.epochs or max(task.epochs, math.ceil(MIN_STEPS * BATCH_SIZE / rows))
        command = [sys.executable, str(REPOSITORY / "launch" / "finetune.py"), "--model", str(model)]
        command += ["--task", task.task, "--train", str(train), "--test", str(folder / task.test), *task.columns]
        command += ["--compare", ",".join(VARIANTS), "--seeds", str(arguments.seeds), "--no-tracking"]
        command += ["--epochs", str(epochs), "--batch-size", str(BATCH_SIZE)]
        command += ["--max-length", str(arguments.max_length)]
        command += ["--output", str(output), *_rates(arguments.learning_rates)]
        seconds = _run(command, output.with_suffix(".log"), arguments.threads)
        scores = json.loads((output / "scores.json").read_text())
        path.write_text(json.dumps({"model": facts_of(model), "seconds": round(seconds, 1)} | scores, indent=1))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def facts_of(model: Path) -> dict[str, Any]:
    """What an exported folder says of its origin."""
    path = model / "provenance.json"
    origin = json.loads(path.read_text()) if path.exists() else {}
    config = json.loads((model / "config.json").read_text())
    named = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    facts = {name: config[name] for name in named}
    return facts | {name: origin[name] for name in ("tokens_seen", "scores") if name in origin}


def pretrained(work: Path, arguments: argparse.Namespace) -> Path:
    """The export of a pretraining on --shards, made where it is not there yet."""
    run, folder = work / "pretraining", work / "english"
    if not folder.exists():
        print("pretraining ...", flush=True)
        ranks = len(os.sched_getaffinity(0))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        launch += [str(REPOSITORY / "launch" / "pretrain.py"), "--config", arguments.config, f"output_dir={run}"]
        shards = str(Path(arguments.shards).absolute())
        launch += [f"data.shards={shards}", f"model.vocab_size={open_dataset(shards).manifest.tokenizer.vocab_size}"]
        launch += [f"tracking.uri=sqlite:///{work}/mlflow.db"]
        _run([*launch, *arguments.overrides], work / "pretraining.log", 1)
        export = [sys.executable, str(REPOSITORY / "launch" / "export.py"), "--checkpoint", str(run)]
        _run([*export, "--output", str(folder)], work / "export.log", ranks)
    return folder


def first_rows(path: Path, rows: int, work: Path) -> Path:
    """A copy of the header and the first rows; a cell of a csv may have several lines."""
    part = work / f"{path.parent.name}-{rows}{path.suffix}"
    with open(path, encoding="utf-8", newline="") as source, open(part, "w", encoding="utf-8", newline="") as target:
        if path.suffix == ".csv":
            csv.writer(target).writerows(islice(csv.reader(source), rows + 1))
        else:
            target.writelines(islice(source, rows + 1))
    return part


def _rates(rates: Sequence[float] | None) -> list[str]:
    return ["--learning-rates", *(f"{rate:g}" for rate in rates)] if rates else []


def _run(command: list[str], log: Path, threads: int) -> float:
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    started_at = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(f"{log.stem} ended with status {done.returncode}; {log} ends:\n{log.read_text()[-3000:]}")
    return time.perf_counter() - started_at


def _parse() -> argparse.Namespace:
    names = [task.name for task in TASKS]
    parser = reports.parser(__doc__)
    parser.add_argument("--labeled", required=True, metavar="DIR", help="folder of the labeled data")
    parser.add_argument("--english", metavar="FOLDER", help="exported encoder")
    parser.add_argument("--french", metavar="FOLDER", help="exported encoder")
    parser.add_argument("--shards", metavar="DIR", help="without --english: pretrain on these")
    parser.add_argument("--config", default="small_cpu", metavar="FILE", help="of that (default small_cpu)")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, help="default: all")
    rows = {"type": int, "nargs": "+", "default": [500, 2000]}
    parser.add_argument("--rows", **rows, help="of a train file, at most; several make several experiments (500 2000)")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--epochs", type=int, help="default: as told above")
    parser.add_argument("--max-length", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--learning-rates", nargs="+", type=float, help="default: those of finetune.py")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="of the pretraining")
    arguments = parser.parse_intermixed_args()
    if min(arguments.rows) < 1 or arguments.work is None:
        parser.error("--rows needs numbers above 0, and the fitted models need a --work")
    return arguments


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
