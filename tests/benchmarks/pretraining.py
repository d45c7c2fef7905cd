"""The same pretraining by us and by transformers' Trainer in the style of `run_mlm.py`: figures, not tests.

    python tests/benchmarks/pretraining.py --config tiny_cpu --shards DIR --tokens 2000000 --work DIR --results FILE \\
        [section.field=value ...]

Both sides have the same architecture (the peer as transformers makes and initializes it), tokenizer and documents (all
of the split `train`, see `pretraining_rows.py`), the same tokens and steps of the same global batch, peak learning
rate, schedule, warm-up, betas, weight decay, clipping, dropout and precision, and all cores of the machine: ours a rank
a core (a GPU), as `launch/pretrain.py` is used; for the peer a few ways are tried for some steps, and the fastest is
taken. Both draw their rows from the whole split in random order: of a few documents, each of them whole, a short run
learns fewer words, and those more often. What differs is what is compared: rows and attention over documents, masks,
initial weights, the training step. Where our rate of masking falls, the peer, which has one rate, predicts at the last
one, which both are judged at.

Models are saved on the way and judged afterwards by the same code in transformers, on the same rows with the same
masks, in fp32: `documents` are our kind of rows, `grouped` the peer's. Seconds are those of training; saving and
judging are counted for neither. All of it is done with --seeds seeds, in turns, for one seed tells little: where a
small model begins to use the context is a matter of luck, and moves a short curve by a tenth of a nat. Figures are
medians of the seeds, with the lowest and the highest loss.

Everything lies in --work; a run whose file is there (`place.json`, `seed-N/ours.json`, `seed-N/peer.json`) is not done
again, so that a command that was stopped goes on, and can be given more seeds. FILE.png has the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from pretraining_budget import Budget, budgeted
from pretraining_peer import Order, new_model
from pretraining_rows import FORMS, grouped_rows, judge, valid_rows
from pretraining_sides import Place, choose_place, run_ours, run_peer
from pretraining_table import draw, median_points, reached, table_lines
from transformers import AutoTokenizer

from data_prep.base.errors import UserError
from data_prep.base.settings import load_settings, to_yaml
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.distributed.process_group import device_type
from trainer.model.numerics import with_own_precision

SMOKE = [
    *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.intermediate_size=64"),
    *("data.sequence_length=32", "training.global_batch_tokens=256", "training.micro_batch_tokens=128"),
    *("training.stages=[]", "training.max_steps=8", "model.max_position_embeddings=64", "data.num_workers=0"),
]


def main() -> None:
    arguments = _parse()
    work = Path(arguments.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    processes = arguments.processes or torch.cuda.device_count() or cores
    overrides = [*(SMOKE if arguments.smoke else ()), *arguments.overrides]
    shards = str(Path(arguments.shards).absolute())
    named = load_settings(RunConfig, arguments.config, [f"data.shards={shards}", "output_dir=run", *overrides])
    named = with_own_precision(named, device_type())  # the same for both sides
    shard_set = open_shard_set(shards)
    budget = Budget(arguments.tokens, arguments.points, processes, shard_set.manifest.tokenizer.vocab_size)
    config = budgeted(named, budget, shards, str(work))
    check_same_settings(work, config)

    uses_cuda = torch.cuda.is_available()
    found = stage(work, "place", lambda: _chosen(peer_order(config, shard_set, work), work, cores, uses_cuda))
    seeds = [with_seed(config, config.training.seed + number, work) for number in range(arguments.seeds)]
    runs = [both_sides(seeded, shard_set, work, Place(**found["place"]), processes, cores) for seeded in seeds]
    report = machine.described("torch", "transformers", "deepspeed", "numpy")
    report |= described(config, arguments, processes) | {"peer_tried": found["tried"], "peer": found["place"]}
    report["sides"] = judged(runs, config, shard_set, arguments.valid_tokens)
    report["reached"] = {form: reached(report["sides"], form) for form in FORMS}
    print("\n".join(table_lines(report)))
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
        Path(arguments.results).with_suffix(".png").write_bytes(draw(report))


def with_seed(config: RunConfig, seed: int, work: Path) -> RunConfig:
    """The same training with another seed, in a folder of its own under `work`."""
    folder = work / f"seed-{seed}"
    folder.mkdir(exist_ok=True)
    training = config.training.model_copy(update={"seed": seed})
    tracking = config.tracking.model_copy(update={"uri": f"sqlite:///{folder}/mlflow.db"})
    changed = {"training": training, "tracking": tracking, "output_dir": str(folder / "ours")}
    return config.model_copy(update=changed)


def both_sides(
    config: RunConfig, shard_set: ShardSet, work: Path, place: Place, processes: int, cores: int
) -> dict[str, Any]:
    """One seed's runs, as `{"ours": ..., "transformers": ...}`; the folders of their points are whole paths."""
    folder = Path(config.output_dir).parent
    order = peer_order(config, shard_set, work)
    sides = {
        "ours": stage(folder, "ours", lambda: run_ours(config, folder, processes, cores)),
        "transformers": stage(folder, "peer", lambda: run_peer(order, place, folder / "peer")),
    }
    for side in sides.values():
        side["seed"] = config.training.seed
        for point in side["points"]:
            point["folder"] = str(folder / point["folder"])
    return sides


def check_same_settings(work: Path, config: RunConfig) -> None:
    """The stages of a folder belong together.

    Raises:
        UserError: --work holds stages of other settings.
    """
    path, text = work / "settings.yaml", to_yaml(config)
    if path.exists() and path.read_text() != text:
        raise UserError(f"{work} holds stages of other settings; give the same ones, or another --work")
    path.write_text(text)


def stage(work: Path, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a stage found, done once in a folder."""
    path = work / f"{name}.json"
    if not path.exists():
        print(f"{path.relative_to(path.parents[1]).with_suffix('')} ...", flush=True)
        found = do()
        path.write_text(json.dumps(found, indent=1))
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def peer_order(config: RunConfig, shard_set: ShardSet, work: Path) -> Order:
    """What the peer is to train; its rows are written to `work`."""
    (stage,) = config.stages
    rows = stage.global_batch_tokens // stage.sequence_length
    path = work / "rows.npy"
    if not path.exists():
        np.save(path, grouped_rows(shard_set, "train", stage.sequence_length))
    special = shard_set.manifest.tokenizer.special_tokens
    return Order(
        config=config.model_dump(mode="json"),
        tokenizer=shard_set.tokenizer_folder,
        rows=str(path),
        special_ids=[special.cls, special.sep],
        output="",
        steps=config.max_steps,
        point_steps=config.checkpoint.every_steps,
        batch_rows=rows,
        accumulation_steps=1,
    )


def judged(
    runs: list[dict[str, Any]], config: RunConfig, shard_set: ShardSet, tokens: int
) -> dict[str, dict[str, Any]]:
    """The sides with the scores of every seed at every point, and their medians."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = valid_rows(shard_set, config, AutoTokenizer.from_pretrained(shard_set.tokenizer_folder), tokens)
    (stage,) = config.stages
    report = {}
    for name in runs[0]:
        seeds = []
        for side in (run[name] for run in runs):
            points = []
            for point in side["points"]:
                scores = judge(Path(point["folder"]), rows, device)
                entry = {"step": point["step"], "tokens": point["step"] * stage.global_batch_tokens}
                points.append(entry | {"seconds": round(point["seconds"], 2)} | scores)
            last = points[-1][FORMS[0]]["mlm_loss"]
            print(f"  {name}, seed {side['seed']}, after {points[-1]['tokens']:,} tokens: {last:.4f}", flush=True)
            seeds.append({"seed": side["seed"], "whole_seconds": round(side["whole_seconds"], 1), "points": points})
        points = median_points([seed["points"] for seed in seeds])
        report[name] = {
            "tokens_per_second": points[-1]["tokens"] / points[-1]["seconds"],
            "training_seconds": points[-1]["seconds"],
            "whole_command_seconds": statistics.median(seed["whole_seconds"] for seed in seeds),
            "points": points,
            "seeds": seeds,
        }
    return report


def described(config: RunConfig, arguments: argparse.Namespace, processes: int) -> dict[str, Any]:
    """What both sides were given."""
    sections = ("model", "training", "optimizer", "schedule", "zero")
    values = config.model_dump(mode="json", include=set(sections))
    named = {"sequence_length", "mlm_probability", "final_mlm_probability"}
    values["data"] = config.data.model_dump(mode="json", include=named)
    return {
        "preset": Path(arguments.config).stem,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "parameters": sum(parameter.numel() for parameter in new_model(config).parameters()),
        "our_ranks": processes,
        "settings": values,
    }


def _chosen(order: Order, work: Path, cores: int, uses_cuda: bool) -> dict[str, Any]:
    place, tried = choose_place(order, work, cores, uses_cuda)
    return {"place": vars(place), "tried": tried}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny_cpu", metavar="FILE", help="YAML file or preset (default tiny_cpu)")
    parser.add_argument("--shards", required=True, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="places that each side trains on (default 2M)")
    parser.add_argument("--points", type=int, default=8, help="models of each side that are judged (default 8)")
    parser.add_argument(
        "--valid-tokens", type=int, default=131_072, help="places judged of each form (default 131,072)"
    )
    parser.add_argument("--processes", type=int, help="our ranks (default: the GPUs, else the cores)")
    parser.add_argument("--work", required=True, metavar="DIR", help="where both train, and what is found again")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON, and the curves beside it as PNG")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: figures that mean nothing")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="settings that replace the config's"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
