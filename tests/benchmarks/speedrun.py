"""The speed run: CPU seconds and tokens until an encoder of fixed size predicts masked tokens well enough.

    python tests/benchmarks/speedrun.py --corpus FILE ... --work DIR --side ours --steps 500 [--seeds 3]
        [--code CHECKOUT] [--ranks 1] [--threads 2] [--results FILE] [section.field=value ...]

Fixed are the tokenizer (8,192 pieces, trained on the corpus), the shards, the architecture (`MODEL`: ModernBERT, 2
layers of 128), the evaluation (all of the valid split in rows of 128, 15% masked once, judged by transformers in fp32)
and the goal: `TARGET_NATS` below the unigram entropy of the valid split. Free is everything else: a recipe is a side,
a number of steps and settings. A recipe has reached the goal when the mean loss of its seeds has.

CPU seconds are those of the whole command with all its processes, from a cold start to the saved model; preparing the
corpus, exporting and judging are not part of it. Sides: `ours` is `launch/pretrain.py --config small_cpu` (of --code,
another checkout, for a commit of the past), `run_mlm` is transformers' Trainer on grouped rows, as `run_mlm.py` does,
with the same schedule.

Each run lies in --work and is not done again; each recipe is a row that is appended to --results, whether or not it
reached the goal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import torch
from contained_process import run_contained
from pretraining import peer_order
from pretraining_rows import FORMS, judge, valid_rows
from transformers import AutoTokenizer

from data_prep.base.errors import UserError
from data_prep.base.settings import load_settings, to_yaml
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import ShardSet, open_shard_set

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET_NATS = 0.80
MODEL = (
    *("model.family=modernbert", "model.vocab_size=8192", "model.hidden_size=128", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.intermediate_size=352", "model.max_position_embeddings=512"),
)
EVALUATION = ("data.sequence_length=128", "data.mlm_probability=0.15", "data.final_mlm_probability=null")
SIDES = ("ours", "run_mlm")
ROBERTA = ("data.mlm_probability=0.15", "data.final_mlm_probability=null", "schedule.warmup_ratio=0.06")
"""What `run_mlm` trains with besides small_cpu's settings."""


def main() -> None:
    arguments = _parse()
    arguments.code = arguments.code.absolute()
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    shard_set = open_shard_set(str(prepared(arguments.corpus, work, REPOSITORY)))
    target = shard_set.manifest.valid.unigram_entropy_nats - TARGET_NATS
    rows = evaluation_rows(shard_set)
    runs = []
    for seed in range(1, arguments.seeds + 1):
        run = once(work, arguments, seed, shard_set)
        run["loss"] = judge(Path(run["model"]), rows, torch.device("cpu"))[FORMS[0]]["mlm_loss"]
        print(f"seed {seed}: {run['loss']:.4f} nats (goal {target:.4f}), {run['cpu_seconds']:.1f} CPU s", flush=True)
        runs.append(run)
    report = machine.described("torch", "transformers", "deepspeed") | row_of(arguments, runs, target)
    print(json.dumps({name: report[name] for name in ("side", "commit", "steps", "tokens", "cpu_seconds", "reached")}))
    if arguments.results:
        history = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
        arguments.results.write_text(json.dumps([*history, report], indent=1) + "\n")


def row_of(arguments: argparse.Namespace, runs: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """The row of one recipe: medians over its seeds, and each seed's loss."""
    losses = [run["loss"] for run in runs]
    return {
        "corpus": arguments.name or Path(arguments.corpus[0]).name.partition(".")[0],
        "side": arguments.side,
        "commit": _commit(arguments.code),
        "steps": arguments.steps,
        "tokens": runs[0]["tokens"],
        "ranks": arguments.ranks,
        "threads": arguments.threads,
        "settings": arguments.overrides,
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 1),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 1),
        "goal_nats": round(target, 4),
        "mean_loss": round(statistics.mean(losses), 4),
        "losses": [round(loss, 4) for loss in losses],
        "reached": statistics.mean(losses) <= target,
    }


def prepared(corpus: list[str], work: Path, code: Path) -> Path:
    """Shards of the corpus as a checkout writes and reads them, made once.

    The tokenizer is given in Hugging Face's format, which every commit reads, so that all have the same tokens.
    """
    corpus = [str(Path(path).absolute()) for path in corpus]
    tokenizer, fixed = work / "trained", work / "tokenizer"
    shards = work / ("shards" if code == REPOSITORY else f"shards-{_commit(code)}")
    command = [sys.executable, "-m", "data_prep"]
    if not fixed.exists():
        _run([*command, "tokenizer", "--input", *corpus, "--output", str(tokenizer), "--vocab-size", "8192"])
        fixed.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, fixed / name)
    if not (shards / "manifest.json").exists():
        settings = ["--tokenizer", str(fixed), "--output", str(shards), "shards.valid_fraction=0.03"]
        _run([*command, "shards", "--input", *corpus, *settings], code)
    return shards


def evaluation_rows(shard_set: ShardSet) -> Any:
    """The same rows and masks for every side and commit."""
    settings = [f"data.shards={shard_set.url}", *MODEL, *EVALUATION, "training.seed=1"]
    config = load_settings(RunConfig, "small_cpu", settings)
    tokenizer = AutoTokenizer.from_pretrained(shard_set.tokenizer_folder)
    return valid_rows(shard_set, config, tokenizer, shard_set.manifest.valid.tokens * 2)


def once(work: Path, arguments: argparse.Namespace, seed: int, shard_set: ShardSet) -> dict[str, Any]:
    """One training, or what its folder has of it."""
    recipe = [arguments.side, _commit(arguments.code), arguments.steps, arguments.ranks, arguments.threads]
    digest = hashlib.sha256(json.dumps([*recipe, arguments.overrides]).encode()).hexdigest()[:8]
    folder = work / f"{arguments.side}-{arguments.steps}-{digest}" / f"seed-{seed}"
    if (folder / "run.json").exists():
        return dict(json.loads((folder / "run.json").read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = arguments.steps
    shards = prepared(arguments.corpus, work, arguments.code)
    settings = [f"data.shards={shards}", f"output_dir={folder}/run", *MODEL, f"training.seed={seed}"]
    settings += [f"training.max_steps={steps}", f"checkpoint.every_steps={steps}", f"evaluation.every_steps={steps}"]
    settings += ["evaluation.max_tokens=4096", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    train = train_ours if arguments.side == "ours" else train_peer
    run = train(folder, settings, arguments, shard_set)
    (folder / "run.json").write_text(json.dumps(run))
    return run


def train_ours(folder: Path, settings: list[str], arguments: argparse.Namespace, shard_set: ShardSet) -> dict[str, Any]:
    """`launch/pretrain.py`, under DeepSpeed's launcher where it has several ranks, then its export."""
    code = arguments.code
    script = [str(code / "launch" / "pretrain.py"), "--config", arguments.config, *settings, *arguments.overrides]
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(arguments.ranks), "--master_port", "29617"]
    command = [sys.executable, *(launcher if arguments.ranks > 1 else []), *script]
    figures = _contained(command, folder, arguments)
    status = json.loads((folder / "run" / "status.json").read_text())
    export = [str(code / "launch" / "export.py"), "--checkpoint", str(folder / "run"), "--output", str(folder / "hf")]
    _run([sys.executable, *export], code)
    shutil.rmtree(folder / "run" / "checkpoints")
    return figures | {"tokens": status["tokens_seen"], "model": str(folder / "hf")}


def train_peer(folder: Path, settings: list[str], arguments: argparse.Namespace, shard_set: ShardSet) -> dict[str, Any]:
    """transformers' Trainer in one process, on rows that are made before."""
    config = load_settings(RunConfig, "small_cpu", [*settings, *ROBERTA, *arguments.overrides])
    order = asdict(peer_order(config, shard_set, folder.parent)) | {"output": str(folder)}
    (folder / "order.json").write_text(json.dumps(order))
    (folder / "config.yaml").write_text(to_yaml(config))
    script = str(REPOSITORY / "tests" / "benchmarks" / "pretraining_peer.py")
    figures = _contained([sys.executable, script, str(folder / "order.json")], folder, arguments)
    tokens = arguments.steps * config.stages[0].global_batch_tokens
    return figures | {"tokens": tokens, "model": str(folder / f"model-{arguments.steps:08}")}


def _contained(command: list[str], folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": str(arguments.code),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    return run_contained(command, folder, sorted(os.sched_getaffinity(0))[:2], environment)


def _run(command: list[str], code: Path = REPOSITORY) -> None:
    environment = os.environ | {"PYTHONPATH": str(code), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, cwd=code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(
            f"{' '.join(command[:6])} failed with status {done.returncode}:\n{done.stdout.decode()[-3000:]}"
        )


def _commit(code: Path) -> str:
    done = subprocess.run(["git", "-C", str(code), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", required=True, metavar="FILE", help="text, as data_prep reads it")
    parser.add_argument("--name", help="what the corpus is called (default: the first file's name)")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="a folder for each corpus")
    parser.add_argument("--side", choices=SIDES, default="ours")
    parser.add_argument("--config", default="small_cpu", help="preset of our side (default small_cpu)")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--code", type=lambda path: Path(path).absolute(), default=REPOSITORY, metavar="CHECKOUT", help="of our side"
    )
    parser.add_argument("--ranks", type=int, default=1, help="of our side (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default 2)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append the row to this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="the recipe's settings")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
