"""What `init_from` with `adopt` is worth: the loss at the start, and tokens until the loss of training from nothing.

    python tests/benchmarks/adoption.py --corpus FILES --other FILES --work DIR --results FILE [--runs N]

For each seed an encoder (`small_cpu`, ModernBERT, 2 layers of 128) is trained on the corpus. It is adopted by
models of `ADOPTIONS`: with a larger tokenizer of the same text, with the tokenizer of another text, half of whose
tokens the encoder has, and with more layers and a larger width. `start` rows have the valid loss before any step, as a
difference from that of the encoder on its own tokens. `reach` rows have the loss of training from nothing for `--steps`
steps, and that of the adopted model after a share of these steps, each with a schedule of its own length.

All losses are those of `encoder_runs.py`: the valid split in rows of 128, 15% masked, in transformers, in fp32. A row
that is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import corpus_part
import machine
import reports
import torch
from encoder_runs import Corpus, Recipe, missing_runs, train_once
from machine import REPOSITORY, commit_of
from safetensors.torch import save_file

from data_prep import Tokenizer
from data_prep.base.errors import run_command
from trainer import load_config
from trainer.checkpoint.adoption import WORDS, token_map
from trainer.checkpoint.initial_weights import load_initial_weights, wanted_of
from trainer.checkpoint.writer import ALONE
from trainer.metrics.unigram import counts_of_first_stage
from trainer.model.hugging_face import family_in_transformers, hugging_face_config, to_hugging_face
from trainer.objectives.pretraining import PretrainingModel

BATCH = ("training.global_batch_tokens=2048", "training.micro_batch_tokens=2048")
OTHER_WORDS, OTHER_SEED = 2_000_000, 7
RANDOM = "all rows random"


@dataclass(frozen=True)
class Adopted:
    """A model that the encoder becomes."""

    items: str
    corpus: str = "own tokenizer"
    settings: tuple[str, ...] = ()
    share: float | None = None
    """Share of the steps of training from nothing after which the loss is compared; None: at the start alone."""
    goal: float | None = None
    """The difference at the start that was aimed at, within 0.15."""


ADOPTIONS = {
    "larger tokenizer": Adopted("tokenizer", "larger tokenizer", goal=0.35),
    "other tokenizer": Adopted("tokenizer", "other tokenizer", share=0.6, goal=1.35),
    "3 layers": Adopted("size", settings=("model.num_hidden_layers=3",), goal=0.2),
    "4 layers": Adopted("size", settings=("model.num_hidden_layers=4",), goal=0.5),
    "4 x 256": Adopted(
        "size",
        settings=(
            *("model.num_hidden_layers=4", "model.hidden_size=256", "model.num_attention_heads=4"),
            "model.intermediate_size=704",
        ),
        share=0.7,
    ),
    RANDOM: Adopted(""),
}


@dataclass(frozen=True)
class Run:
    """One row."""

    kind: str
    name: str
    seed: int


def plan(seeds: int) -> list[Run]:
    """All rows, the shortest first."""
    starts = [Run("start", name, seed) for seed in range(1, seeds + 1) for name in ADOPTIONS]
    reached = [name for name, adopted in ADOPTIONS.items() if adopted.share]
    return starts + [Run("reach", name, seed) for name in reached for seed in range(1, seeds + 1)]


def corpora_of(arguments: argparse.Namespace) -> dict[str, Corpus]:
    """The corpus with its own tokenizer, a larger one, and the one of the other text."""
    work, sizes = arguments.work.absolute(), arguments.vocab_sizes
    (found,) = corpus_part.corpora_of([f"own={arguments.corpus}"]).values()
    files = [str(Path(file).absolute()) for file in found]
    part = work / "other.jsonl.gz"
    if not part.exists():
        work.mkdir(parents=True, exist_ok=True)
        (found,) = corpus_part.corpora_of([f"other={arguments.other}"]).values()
        corpus_part.select_documents(found, OTHER_WORDS, OTHER_SEED, part)
    elsewhere = Corpus("other text", [str(part)], work / "other-text", vocab_size=sizes[0])
    elsewhere.shards(REPOSITORY)
    other = work / "other" / "tokenizer"
    if not other.exists():
        shutil.copytree(elsewhere.work / "tokenizer", other)
    return {
        "own tokenizer": Corpus("own tokenizer", files, work / "own", vocab_size=sizes[0]),
        "larger tokenizer": Corpus("larger tokenizer", files, work / "larger", vocab_size=sizes[1]),
        "other tokenizer": Corpus("other tokenizer", files, work / "other", vocab_size=sizes[0]),
    }


def settings_of(corpus: Corpus, adopted: Adopted, folder: str | None = None) -> tuple[str, ...]:
    """The settings of a model on a corpus; `folder` is that of the encoder that it adopts."""
    vocab_size = corpus.shard_set.manifest.tokenizer.vocab_size
    settings = (*BATCH, f"model.vocab_size={vocab_size}", *adopted.settings)
    if folder is None:
        return settings
    return (*settings, "model.output_bias=zeros", f"init_from={folder}", f"adopt=[{adopted.items}]")


def shared_of(old: Corpus, new: Corpus) -> float:
    """The share of a tokenizer's tokens that another one has."""
    copied = token_map(*(Tokenizer.load(each.shard_set.tokenizer_folder) for each in (old, new))).copied
    return float((copied >= 0).mean())


def start_loss(run: Run, corpus: Corpus, folder: str, work: Path) -> tuple[float, list[str]]:
    """The valid loss of the adopted model before any step, and what its run says of it."""
    adopted = ADOPTIONS[run.name]
    settings = (*settings_of(corpus, adopted, folder), f"data.shards={corpus.shards(REPOSITORY)}")
    config = load_config("small_cpu", [*settings, f"training.seed={run.seed}"])
    model = PretrainingModel(config.model)
    model.initialize(run.seed)
    fresh = model.state_dict()[WORDS].clone()
    tokenizer = Tokenizer.load(corpus.shard_set.tokenizer_folder)
    count = partial(counts_of_first_stage, config, [corpus.shard_set])
    wanted = wanted_of(config, tokenizer.fingerprint, lambda: tokenizer, count)
    lines = load_initial_weights(model, folder, lambda: Path(folder), ALONE, wanted).adopted
    if run.name == RANDOM:
        with torch.no_grad():
            model.get_parameter(WORDS).copy_(fresh)
    written = work / "start"
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    family = family_in_transformers(config.model, next_sentence=False)
    save_file(to_hugging_face(weights, config.model, family), written / "model.safetensors", metadata={"format": "pt"})
    values = hugging_face_config(config.model, False, tokenizer.special_tokens)
    (written / "config.json").write_text(json.dumps(values))
    return corpus.valid_loss(written), list(lines)


def settings_of_row(run: Run, arguments: argparse.Namespace) -> dict[str, int]:
    """What a row must agree in with the others besides its key."""
    return {"base_steps": arguments.base_steps} | ({"steps": arguments.steps} if run.kind == "reach" else {})


def rows_of(arguments: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measure the rows that are missing."""
    corpora = corpora_of(arguments)
    own = corpora["own tokenizer"]
    for run in missing_runs(plan(arguments.seeds), done, lambda run: settings_of_row(run, arguments)):
        adopted, corpus = ADOPTIONS[run.name], corpora[ADOPTIONS[run.name].corpus]
        base = train_once(Recipe("ours", arguments.base_steps, settings_of(own, Adopted(""))), run.seed, own)
        row = {
            **asdict(run),
            **settings_of_row(run, arguments),
            "commit": commit_of(REPOSITORY),
            "base_loss": round(base["loss"], 4),
        }
        if run.kind == "start":
            loss, lines = start_loss(run, corpus, base["model"], arguments.work.absolute())
            row |= {"loss": round(loss, 4), "difference": round(loss - base["loss"], 4), "adopted": lines}
            row |= {} if corpus is own else {"shared": round(shared_of(own, corpus), 3)}
        else:
            assert adopted.share is not None
            steps = round(adopted.share * arguments.steps)
            nothing = train_once(Recipe("ours", arguments.steps, settings_of(corpus, adopted)), run.seed, corpus)
            recipe = Recipe("ours", steps, settings_of(corpus, adopted, base["model"]))
            found = train_once(recipe, run.seed, corpus)
            row |= {"tokens_of_nothing": nothing["tokens"], "loss_of_nothing": round(nothing["loss"], 4)}
            row |= {"tokens": found["tokens"], "loss": round(found["loss"], 4)}
            row["reached"] = found["loss"] <= nothing["loss"]
        yield row


def main() -> None:
    arguments = _parse()
    done = reports.runs_in(arguments.results) if arguments.results else []
    for number, row in enumerate(rows_of(arguments, done), start=1):
        print(json.dumps(row), flush=True)
        if arguments.results:
            described = machine.described("torch", "transformers", "deepspeed")
            planned = [asdict(run) for run in plan(arguments.seeds)]
            goals = {name: adopted.goal for name, adopted in ADOPTIONS.items() if adopted.goal is not None}
            reports.add_run(arguments.results, described, row, planned=planned, variants=list(ADOPTIONS), goals=goals)
        if number == arguments.runs:
            break


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--other", required=True, metavar="PATTERN", help="text of the other tokenizer")
    parser.add_argument(
        "--vocab-sizes", type=int, nargs=2, default=(8192, 12288), metavar="N", help="default 8192 12288"
    )
    parser.add_argument("--base-steps", type=int, default=1500, help="of the encoder (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="of training from nothing (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add each row to this JSON file")
    parser.add_argument("--runs", type=int, default=10**6, metavar="N", help="new rows (default: all that are missing)")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
