"""The proof table: does an encoder that is trained here learn language as well per token as the state of the art?

    python tests/benchmarks/proof.py --corpus FILES --minimal-pairs DIR --work DIR --results FILE [--runs N]
        [--contestants NAME ...]

Corpus: 10 million whitespace words of FILES, documents chosen by a seeded hash; the digest of the text is in the
results. One tokenizer of 8,192 tokens is trained there. All contestants have the same depth, width, tokens per step
(2,048), peak learning rate and number of tokens:

- ours: `launch/pretrain.py --config small_cpu`, StableAdamW, 1-sqrt decay, masking rate from 50% to 30%;
- run_mlm: transformers' Trainer on grouped rows with RoBERTa's AdamW, linear decay, masking (15%) and warmup (6%);
- ltg_bert: LTG-BERT's architecture and AdamW on our rows, masks and schedule (`ltg_bert.py` states the differences).

First a few shapes of about 1.5M parameters are trained for a quarter of an epoch; the one with the best accuracy on a
tenth of the minimal pairs (of those within its interval, the one with the lowest loss) is used by all. Then come the
runs of `plan`, the most informative first. Runs of an epoch or more are scored on all minimal pairs, shorter ones on
every tenth. A run whose row is in --results is skipped, so the same command resumes; started twice, it measures two
runs at once. --runs ends it after so many new rows, and --contestants chooses some. FILE.png shows the accuracies by
tokens.

Once ours and run_mlm have a row of one epoch, the results also have what both fill into masks (`fills.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus_part
import fills
import ltg_bert  # noqa: F401  (AutoModelForMaskedLM finds the architecture)
import reports
from encoder_runs import Corpus, Recipe, add_run_options, train_once
from machine import REPOSITORY, commit_of
from matplotlib.figure import Figure

from data_prep.base.errors import run_command
from data_prep.storage.locks import IsHeld, hold_lock
from trainer.data.minimal_pairs import MinimalPair, judge, read_minimal_pairs
from trainer.distributed.memory import keep_freed_memory
from trainer.evaluation.masked_scorers import score_pairs
from trainer.inference.fill_mask import FillMask

NUM_WORDS, WORDS_SEED = 10_000_000, 1
BATCH_TOKENS = 2048
SHAPES = {"2 x 128": (2, 128, 2, 352), "6 x 96": (6, 96, 3, 264), "12 x 64": (12, 64, 2, 320)}
"""Layers, hidden_size, heads and intermediate_size, each of about 1.5M parameters with 8,192 tokens."""
SHAPE_EPOCHS = 0.25
SUBSET = 10
"""Runs shorter than an epoch are scored on every tenth pair."""
PUBLISHED = {
    "ELC-BERT, 24M parameters (arXiv 2311.02265)": 75.8,
    "GPT-BERT, 31M parameters, scored as a masked model (BabyLM 2025)": 70.4,
    "RoBERTa-base (BabyLM 2023)": 69.5,
    "OPT-125M (BabyLM 2023)": 62.6,
    "T5-base (BabyLM 2023)": 58.8,
}
"""Accuracies in percent of models trained on 10 million words of other text."""
CHANCE = 50.0


@dataclass(frozen=True)
class Run:
    """One row of the table; runs of one shape, contestant, number of epochs and seed are the same row."""

    shape: str
    side: str
    epochs: float
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        return {"shape": self.shape, "side": self.side, "epochs": self.epochs, "seed": self.seed}


def plan(rows: Sequence[Mapping[str, Any]]) -> list[Run]:
    """All runs in their order; those after the search for a shape appear once it is decided."""
    search = [Run(shape, "ours", SHAPE_EPOCHS, 1) for shape in SHAPES]
    shape = best_shape(rows)
    if shape is None:
        return search
    curve = [Run(shape, side, epochs, 1) for epochs in (1, 0.1, SHAPE_EPOCHS) for side in reports.CONTESTANTS]
    seeds = [Run(shape, side, 1, seed) for seed in (2, 3) for side in reports.CONTESTANTS]
    long = [Run(shape, side, epochs, 1) for epochs in (2, 5, 10) for side in ("ours", "run_mlm")]
    return [*search, *(run for run in curve if run not in search), *seeds, *long]


def best_shape(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The shape with the best accuracy in the search; None while a row is missing.

    A shape within the bootstrap interval of the best is as good; of those the one with the lowest loss is taken.
    """
    search = ("ours", SHAPE_EPOCHS, 1)
    found = {row["shape"]: row for row in rows if (row["side"], row["epochs"], row["seed"]) == search}
    if not found.keys() >= SHAPES.keys():
        return None
    low, _ = max(found.values(), key=lambda row: row["overall"])["interval"]
    equals = [shape for shape, row in found.items() if row["overall"] >= low]
    return min(equals, key=lambda shape: found[shape]["loss"])


def model_settings(shape: str) -> tuple[str, ...]:
    """The architecture of all contestants."""
    layers, hidden, heads, intermediate = SHAPES[shape]
    return (
        *("model.family=modernbert", "model.vocab_size=8192", f"model.hidden_size={hidden}"),
        *(f"model.num_hidden_layers={layers}", f"model.num_attention_heads={heads}"),
        *(f"model.intermediate_size={intermediate}", "model.max_position_embeddings=512"),
    )


def main() -> None:
    arguments = _parse()
    keep_freed_memory()
    pairs = read_minimal_pairs(arguments.minimal_pairs)
    corpus, selection = prepared(arguments.corpus, arguments.work.absolute(), arguments.words, arguments.vocab_size)
    for _ in range(arguments.runs):
        with next_run(arguments.results, corpus.work, arguments.contestants) as run:
            if run is None:
                break
            row, described = measured(run, corpus, pairs)
            add_row(arguments.results, row, described, corpus, selection)
            print(f"{run}: valid loss {row['loss']}, minimal pairs {100 * row['overall']:.1f}%", flush=True)


@contextlib.contextmanager
def next_run(results: Path, work: Path, sides: Sequence[str]) -> Iterator[Run | None]:
    """The first run of these sides that has no row and that no other process measures; None if there is none.

    No other process gets it while the block runs.
    """
    for run in plan(reports.runs_in(results)):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_lock(work, "-".join(map(str, run.key.values()))))
            except IsHeld:
                continue
            has_row = any(run.key.items() <= row.items() for row in reports.runs_in(results))
            if run.side in sides and not has_row:
                yield run
                return
    yield None


def add_row(
    results: Path, row: Mapping[str, Any], described: Mapping[str, Any], corpus: Corpus, selection: Mapping[str, Any]
) -> None:
    """Add a row to the results, with what is planned and filled in then, and draw the picture."""
    new_fills = filled([*reports.runs_in(results), row], corpus)
    with hold_lock(corpus.work, "results"):
        before = reports.runs_in(results)
        rows = [*before, row]
        old_fills = reports.read_report(results)["details"]["fills"] if before else None
        values = {"corpus": selection, "planned": [run.key for run in plan(rows)], "published": PUBLISHED}
        reports.add_run(results, described, row, **values, fills=new_fills or old_fills)
        if shape := best_shape(rows):
            results.with_suffix(".png").write_bytes(draw(rows, shape))


def prepared(patterns: list[str], work: Path, words: int, vocab_size: int) -> tuple[Corpus, dict[str, Any]]:
    """The words that all are trained on, and what describes them."""
    files = corpus_part.corpora_of([f"corpus={','.join(patterns)}"])["corpus"]
    part, path = work / "words.jsonl.gz", work / "selection.json"
    if not path.exists():
        reports.write(path, corpus_part.select_documents(files, words, WORDS_SEED, part))
    return Corpus("words", [str(part)], work, 200_000, vocab_size), reports.read(path)


def measured(run: Run, corpus: Corpus, pairs: Sequence[MinimalPair]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and score one row."""
    steps = round(run.epochs * corpus.steps_of_epoch(BATCH_TOKENS))
    batch = (f"training.global_batch_tokens={BATCH_TOKENS}", f"training.micro_batch_tokens={BATCH_TOKENS}")
    recipe = Recipe(run.side, steps, (*model_settings(run.shape), *batch))
    found = train_once(recipe, run.seed, corpus)
    scores = score(Path(found["model"]), pairs[:: 1 if run.epochs >= 1 else SUBSET])
    row = run.key | {
        "commit": commit_of(REPOSITORY),
        "steps": steps,
        "tokens": found["tokens"],
        "cpu_seconds": round(found["cpu_seconds"], 1),
        "unigram_entropy_nats": round(corpus.unigram_entropy_nats, 4),
        "loss": round(found["loss"], 4),
        "model": str(Path(found["model"]).relative_to(corpus.work)),
    }
    return row | scores, found["described"]


def filled(rows: Sequence[Mapping[str, Any]], corpus: Corpus) -> dict[str, Any] | None:
    """What ours and run_mlm fill into masks after the largest number of epochs that both have with one seed.

    Of models that are still in the folder of the runs.
    """
    long = [row for row in rows if row["epochs"] >= 1 and (corpus.work / row["model"]).exists()]
    models = {(row["epochs"], row["seed"], row["side"]): corpus.work / row["model"] for row in long}
    both = [(epochs, seed) for epochs, seed, side in models if side == "ours" and (epochs, seed, "run_mlm") in models]
    if not both:
        return None
    epochs, seed = max(both)
    path = corpus.work / f"fills-{epochs}-{seed}.json"
    if not path.exists():
        ours, run_mlm = (models[epochs, seed, side] for side in ("ours", "run_mlm"))
        reports.write(path, {"epochs": epochs, "seed": seed, **fills.fill_masks(ours, run_mlm, corpus.shard_set.url)})
    return dict(reports.read(path))


def draw(rows: Sequence[Mapping[str, Any]], shape: str) -> bytes:
    """A PNG of the accuracy on minimal pairs by tokens, of one shape, with the published ones as lines.

    A band covers the bootstrap intervals of all seeds.
    """
    figure = Figure(figsize=(8.0, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    ticks: dict[float, float] = {}
    for side, name in reports.CONTESTANTS.items():
        groups: dict[float, list[Mapping[str, Any]]] = {}  # by epochs, since seeds differ by a few tokens
        for row in sorted(rows, key=lambda row: row["epochs"]):
            if (row["side"], row["shape"]) == (side, shape):
                groups.setdefault(row["epochs"], []).append(row)
        tokens = [statistics.mean(row["tokens"] for row in group) for group in groups.values()]
        means = [100.0 * statistics.mean(row["overall"] for row in group) for group in groups.values()]
        axes.plot(tokens, means, marker="o", label=name)
        low, high = (
            [100.0 * pick(row["interval"][end] for row in group) for group in groups.values()]
            for end, pick in enumerate((min, max))
        )
        axes.fill_between(tokens, low, high, alpha=0.12)
        ticks |= dict(zip(groups, tokens, strict=True))
    axes.set_xscale("log")
    axes.set_xticks(list(ticks.values()), [f"{tokens / 1e6:.1f}M" for tokens in ticks.values()])
    axes.minorticks_off()
    for name, accuracy in {**PUBLISHED, "chance": CHANCE}.items():
        axes.axhline(accuracy, color="#8a8f98", linestyle=":", linewidth=1.0)
        axes.text(0.01, accuracy + 0.2, name, transform=axes.get_yaxis_transform(), fontsize=7, color="#5b6470")
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("right minimal pairs (BLiMP), %")
    axes.legend(loc="center right", fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def score(model: Path, minimal_pairs: Sequence[MinimalPair]) -> dict[str, Any]:
    """Parameters of a Hugging Face folder; its accuracy on minimal pairs, overall with its interval and by field."""
    loaded = FillMask.load(model)
    pairs = [pair._replace(field=pair.field.replace("/", "_")) for pair in minimal_pairs]
    started_at = time.process_time()
    scores = score_pairs(loaded, pairs)  # as `clozeworks compare --minimal-pairs` does
    scoring_cpu_seconds = time.process_time() - started_at
    report = judge(pairs, scores)
    return {
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),  # type: ignore[attr-defined]
        "pairs": report.overall.num_pairs,
        "scoring_cpu_seconds": round(scoring_cpu_seconds, 1),
        "ties": report.overall.num_ties,
        "overall": round(report.overall.share, 5),
        "interval": [round(report.overall.low, 5), round(report.overall.high, 5)],
        "fields": {name: round(each.share, 5) for name, each in sorted(report.fields.items())},
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", required=True, metavar="PATTERN", help="jsonl.gz files")
    parser.add_argument("--minimal-pairs", type=Path, required=True, metavar="DIR", help="BLiMP's files")
    parser.add_argument("--words", type=int, default=NUM_WORDS, metavar="N", help="of the corpus (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    add_run_options(parser)
    parser.add_argument(
        "--contestants", nargs="+", choices=reports.CONTESTANTS, default=list(reports.CONTESTANTS), help="default: all"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
