"""Train one small encoder by a recipe, once per seed, in a folder of its own; `speedrun.py`, `proof.py` and
`ablations.py` compare such runs. `measure_missing` measures the rows that a result file lacks.

Sides: `ours` is `launch/pretrain.py` of a checkout; `run_mlm` is transformers' Trainer on grouped rows, as
`run_mlm.py` uses it, with RoBERTa's linear decay; `ltg_bert` is LTG-BERT's architecture on our rows (`ltg_bert.py`).
All sides have the tokenizer and the shards of their corpus in common.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reports
import torch
from contained_process import run_contained
from machine import REPOSITORY, commit_of
from pretraining_peer import Order
from pretraining_rows import Rows, grouped_rows, judge, valid_rows

from data_prep.base.errors import UserError
from data_prep.base.settings import to_yaml
from trainer import load_config
from trainer.data.shard_set import ShardSet, open_shard_set

EVALUATION = ("data.sequence_length=128", "data.mlm_probability=0.15", "data.final_mlm_probability=null")
LINEAR_ADAMW = ("optimizer.name=adamw", "schedule={name: linear, decay: linear, decay_ratio: 0}")
LIKE_ROBERTA = (
    *("data.mlm_probability=0.15", "data.final_mlm_probability=null"),
    *(*LINEAR_ADAMW, "schedule.warmup_ratio=0.06"),
)
"""What `run_mlm` trains with besides the preset's settings."""


@dataclass(frozen=True)
class Recipe:
    """How an encoder is trained; the settings come after those of the preset."""

    side: str
    steps: int
    settings: tuple[str, ...] = ()
    code: Path = REPOSITORY
    """Checkout that trains, for `ours`."""
    preset: str = "small_cpu"
    threads: int = 1
    average_last: int = 0
    """For `ours`: train with so many checkpoints in the last part of the run, and judge their mean."""

    def folder(self, work: Path, seed: int) -> Path:
        """Where the run of a seed is."""
        values = asdict(self) | {"code": commit_of(self.code)}
        digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
        return work / f"{self.side}-{self.steps}-{digest}" / f"seed-{seed}"


@dataclass
class Corpus:
    """Text with its tokenizer, its shards, and the rows on which every model is evaluated."""

    name: str
    files: list[str]
    work: Path
    max_valid_tokens: int | None = None
    """Tokens of the valid split that are evaluated; default: all."""
    vocab_size: int = 8192
    _rows: Rows | None = field(default=None, repr=False)

    @property
    def shard_set(self) -> ShardSet:
        return open_shard_set(str(self.shards(REPOSITORY)))

    def shards(self, code: Path) -> Path:
        """Shards as a checkout writes and reads them, prepared once.

        The tokenizer is passed on in Hugging Face's format, which every commit reads, so that all have the same tokens.
        """
        trained, fixed = self.work / "trained", self.work / "tokenizer"
        shards = self.work / ("shards" if code == REPOSITORY else f"shards-{commit_of(code)}")
        command, vocabulary = [sys.executable, "-m", "data_prep"], ["--vocab-size", str(self.vocab_size)]
        if not fixed.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            run([*command, "tokenizer", "--input", *self.files, "--output", str(trained), *vocabulary])
            fixed.mkdir()
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(trained / name, fixed / name)
        if not (shards / "manifest.json").exists():
            settings = ["--tokenizer", str(fixed), "--output", str(shards), "shards.valid_fraction=0.03"]
            run([*command, "shards", "--input", *self.files, *settings], code)
        return shards

    @property
    def unigram_entropy_nats(self) -> float:
        """Of the valid split."""
        return float(self.shard_set.manifest.valid.unigram_entropy_nats)

    def valid_loss(self, model: Path) -> float:
        """Loss (nats per prediction) in transformers, fp32, on the same rows and masks (15%) for every model."""
        if self._rows is None:
            shard_set = self.shard_set
            config = load_config("small_cpu", [f"data.shards={shard_set.url}", *EVALUATION])
            tokens = self.max_valid_tokens or shard_set.manifest.valid.tokens * 2
            self._rows = valid_rows(shard_set, config, tokens)
        return judge(model, self._rows, torch.device("cpu"))["mlm_loss"]

    def steps_of_epoch(self, batch_tokens: int) -> int:
        """Steps in which `run_mlm` reads the train split once."""
        return self.peer_rows(128)[1] * 128 // batch_tokens

    def peer_rows(self, length: int) -> tuple[Path, int]:
        """The file of `run_mlm`'s rows of `length` tokens, and their number."""
        path = self.work / "rows.npy"
        if not path.exists():
            np.save(path, grouped_rows(self.shard_set, "train", length))
        return path, len(np.load(path, mmap_mode="r"))


def missing_runs(
    planned: Iterable[Any], rows: Sequence[Mapping[str, Any]], settings: Callable[[Any], Mapping[str, Any]]
) -> list[Any]:
    """The planned runs (dataclasses, whose fields are the key of their row) that have no row.

    Raises:
        UserError: a row was measured with other `settings` of its run; one that lacks them is of an earlier version.
    """
    missing = []
    for each in planned:
        found = [row for row in rows if asdict(each).items() <= row.items()]
        for row in found:
            for name, value in settings(each).items():
                if row.get(name, value) != value:
                    raise UserError(
                        f"the row of {each} has {name}={row[name]}, and this command has {name}={value}",
                        fix="give another file for --results, or the arguments that its rows were measured with",
                        code="other-benchmark-settings",
                    )
        if not found:
            missing.append(each)
    return missing


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark whose rows `measure_missing` adds."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="add each row to this JSON file")
    parser.add_argument("--runs", type=int, default=10**6, metavar="N", help="new rows (default: all that are missing)")


def measure_missing(
    arguments: argparse.Namespace,
    plan: Callable[[Sequence[Mapping[str, Any]]], Sequence[Any]],
    settings: Callable[[Any], Mapping[str, Any]],
    measure: Callable[[Any, Sequence[Mapping[str, Any]]], tuple[Mapping[str, Any], Mapping[str, Any]]],
    **values: Any,
) -> None:
    """Add the planned rows that `arguments.results` lacks, one by one, at most `arguments.runs` of them.

    `plan` gives all runs as far as the rows so far decide them, and `settings` what else the row of a run must agree
    in. `measure` takes a run and the rows so far; it returns what it found, and the machine's description. `values`
    are kept with the file.
    """
    for _ in range(arguments.runs):
        rows = reports.runs_in(arguments.results)
        missing = missing_runs(plan(rows), rows, settings)
        if not missing:
            break
        found, described = measure(missing[0], rows)
        row = {**asdict(missing[0]), **settings(missing[0]), **found}
        planned = [asdict(each) for each in plan([*rows, row])]
        reports.add_run(arguments.results, described, row, planned=planned, **values)
        print(json.dumps(row), flush=True)


def train_once(recipe: Recipe, seed: int, corpus: Corpus) -> dict[str, Any]:
    """Train, unless the folder of the run has a result; CPU seconds are those of the whole command, from a cold start.

    Returns:
        seconds, cpu_seconds, peak_mb, load_before, tokens, model (a Hugging Face folder), loss (valid, in nats), and
        described (machine, versions, date and load average).
    """
    folder = recipe.folder(corpus.work, seed)
    if (folder / "run.json").exists():
        return dict(json.loads((folder / "run.json").read_text()))
    shards = corpus.shards(recipe.code)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = recipe.steps
    saved_every = max(1, steps // 50) if recipe.average_last else steps
    settings = [f"data.shards={shards}", f"output_dir={folder}/run", *recipe.settings, f"training.seed={seed}"]
    settings += [f"training.max_steps={steps}", f"evaluation.every_steps={steps}", "evaluation.max_tokens=4096"]
    settings += [f"checkpoint.every_steps={saved_every}", f"checkpoint.keep_last={recipe.average_last or 2}"]
    settings += [f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    described = machine.described("torch", "transformers", "deepspeed")
    found = (_train_ours if recipe.side == "ours" else _train_peer)(recipe, folder, settings, corpus)
    found |= {"loss": corpus.valid_loss(Path(found["model"])), "described": described}
    new = folder / "run.json.new"
    new.write_text(json.dumps(found))
    new.replace(folder / "run.json")
    return found


def _train_ours(recipe: Recipe, folder: Path, settings: list[str], corpus: Corpus) -> dict[str, Any]:
    """`launch/pretrain.py` on one rank, then its export."""
    launch = recipe.code / "launch"
    command = [sys.executable, str(launch / "pretrain.py"), "--config", recipe.preset, *settings]
    figures = _contained(command, recipe, folder)
    status = json.loads((folder / "run" / "status.json").read_text())
    export = [str(launch / "export.py"), "--checkpoint", str(folder / "run")]
    if recipe.average_last:
        export = [str(launch / "average.py"), str(folder / "run"), "--last", str(recipe.average_last)]
    run([sys.executable, *export, "--output", str(folder / "hf")], recipe.code)
    shutil.rmtree(folder / "run" / "checkpoints")
    return figures | {"tokens": status["tokens_seen"], "model": str(folder / "hf")}


def _train_peer(recipe: Recipe, folder: Path, settings: list[str], corpus: Corpus) -> dict[str, Any]:
    """transformers' Trainer on rows that were made before, or LTG-BERT on ours; one process."""
    own = LIKE_ROBERTA if recipe.side == "run_mlm" else ()
    config = load_config(recipe.preset, [*own, *settings])
    (folder / "config.yaml").write_text(to_yaml(config))
    (stage,) = config.stages
    special = corpus.shard_set.manifest.tokenizer.special_tokens
    order = Order(
        config=config.model_dump(mode="json"),
        tokenizer=corpus.shard_set.tokenizer_folder,
        rows=str(corpus.peer_rows(stage.sequence_length)[0]),
        special_ids=[special.cls, special.sep],
        output=str(folder / "hf"),
        batch_rows=stage.global_batch_tokens // stage.sequence_length,
    )
    (folder / "order.json").write_text(json.dumps(asdict(order)))
    script = {"run_mlm": "pretraining_peer.py", "ltg_bert": "ltg_bert.py"}[recipe.side]
    path = REPOSITORY / "tests" / "benchmarks" / script
    figures = _contained([sys.executable, str(path), str(folder / "order.json")], recipe, folder)
    model = folder / "hf"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(corpus.shard_set.tokenizer_folder, name), model / name)
    return figures | {"tokens": recipe.steps * stage.global_batch_tokens, "model": str(model)}


def _contained(command: list[str], recipe: Recipe, folder: Path) -> dict[str, float]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(recipe.threads),
        "PYTHONPATH": str(recipe.code),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    return run_contained(command, folder, sorted(os.sched_getaffinity(0))[:2], environment)


def run(command: list[str], code: Path = REPOSITORY) -> None:
    """Run a command of a checkout.

    Raises:
        UserError: it failed.
    """
    environment = os.environ | {"PYTHONPATH": str(code), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, cwd=code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(
            f"{' '.join(command[:6])} failed with status {done.returncode}: {done.stdout.decode()[-3000:]}",
            fix="correct what the output names",
            code="benchmark-command-failed",
        )
