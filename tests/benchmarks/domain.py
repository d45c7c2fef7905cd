"""What a published encoder gains on law, and forgets of general text, by the preset `continue_domain`.

    python tests/benchmarks/domain.py --general FILES --law FILES --work DIR --results FILE [--few] [--runs N]

For each seed an encoder (`small_cpu`) is trained on general text without law, and then continued by the preset
`continue_domain` at its sizes: on law alone, and with general text. `SHARES` divides the documents of law: the models
are continued on the first part, whose valid split gives the loss; the second part is labeled. Losses are those of
`encoder_runs.py` on the valid splits of both texts: rows of 128, 15% masked, in transformers, in fp32. Accuracy is that
of `launch/finetune.py` on the labeled texts. A label is the title of the code to which a section belongs, by the path
in `source`. A text is one of the first `PARTS` pieces of a section, of up to `CHARACTERS` each, without headings and
citations, since these contain the number of the title. No section is in both train and test. The texts stay in --work.

With --few the encoder of each seed, before and after it was continued on law alone, is scored with few labels: the
texts of `SHOTS` labels of each title are drawn `DRAWS` times from those of train, the same for both encoders. The score
of a draw is the accuracy on all of test of a logistic regression on the mean of the last hidden states (sklearn's, of
scaled features, as it is by default), and for `FULL_SHOTS` in `FULL_DRAWS` draws also that of `launch/finetune.py`.

A row that is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus_part
import machine
import numpy as np
from encoder_runs import Corpus, Recipe, add_run_options, measure_missing, run, train_once
from machine import REPOSITORY, commit_of
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from data_prep.base.errors import run_command
from trainer.inference.embedding import Embedder

RATES = (3e-4, 1e-3, 3e-3)
RATE = 1e-3
"""Of all seeds: a third of the peak of `small_cpu`, as ModernBERT's last stages have of theirs."""
PART_SEED = 5
SHARES = {"continued": 0.6, "labeled": 1.0}
"""Upper ends of the parts of the documents of law, from 0 to 1."""
NUM_TITLES, CHARACTERS, PARTS = 10, 350, 3
LENGTH = 128
"""Tokens of a labeled text."""
TEST_SHARE = 0.6
SHOTS, DRAWS = (4, 16, 64), 20
FULL_SHOTS, FULL_DRAWS = 16, 2
BATCH = ("training.global_batch_tokens=2048", "training.micro_batch_tokens=2048")
SIZES = (
    *("training.precision=auto", "model.vocab_size=8192", "model.hidden_size=128", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.intermediate_size=352", "model.max_position_embeddings=512"),
    *("model.initializer_range=0.05", "data.sequence_length=128", "data.num_workers=0"),
    "optimizer.weight_decay=0.01",
)
CITATION = re.compile(r"§+\s*[\d\w.:()-]+|\b\d+[A-Z]?[-:]\d[\w.:-]*|\btitles?\s+\d+\w*", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """One row: an encoder of a seed before (rate 0), or after it was continued."""

    seed: int
    rate: float
    replay: float


def plan(seeds: int) -> list[Run]:
    """Every seed before and after, then with general text; the other rates for the first seed."""
    main = [
        Run(seed, rate, replay) for seed in range(1, seeds + 1) for rate, replay in ((0, 0), (RATE, 0), (RATE, 0.05))
    ]
    return main + [Run(1, rate, 0) for rate in RATES if rate != RATE]


def section_of(document: dict[str, str]) -> str | None:
    """The title of the code that a section belongs to; None for what is no section."""
    found = re.search(r"/titles/([^/]+)/sections/", document.get("source", ""))
    return found[1] if found else None


def part_of(document: dict[str, str]) -> str:
    """`continued` or `labeled`, by a hash of the text."""
    digest = hashlib.sha256(f"{PART_SEED}:{document['text']}".encode()).digest()
    place = int.from_bytes(digest[:8], "little") / 2**64
    return next(name for name, end in SHARES.items() if place < end)


def is_test(document: dict[str, str]) -> bool:
    """Whether a labeled document is for scoring, by a hash of the text."""
    return hashlib.sha256(f"test:{document['text']}".encode()).digest()[0] < 256 * TEST_SHARE


def texts_of(document: dict[str, str]) -> Iterator[str]:
    """Pieces of a section without its heading and without citations."""
    paragraphs = document["text"].split("\n\n")[1:]
    text = " ".join(CITATION.sub(" ", " ".join(paragraphs)).split())
    for start in range(0, min(len(text), CHARACTERS * PARTS), CHARACTERS):
        piece = text[start : start + CHARACTERS]
        if len(piece) > CHARACTERS // 2:
            yield piece


def prepare_law(files: list[str], work: Path) -> None:
    """Write continued.jsonl.gz, train.jsonl and test.jsonl, once."""
    if (work / "law.json").exists():
        return
    documents = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            documents += [json.loads(line) for line in lines]
    work.mkdir(parents=True, exist_ok=True)
    labeled = [each for each in documents if part_of(each) == "labeled" and section_of(each)]
    titles = {name for name, _ in Counter(map(section_of, labeled)).most_common(NUM_TITLES)}
    titles &= {section_of(each) for each in labeled if not is_test(each)}
    counts: Counter[str] = Counter()
    with gzip.open(work / "continued.jsonl.gz", "wt", encoding="utf-8") as target:
        for each in documents:
            if part_of(each) == "continued":
                target.write(json.dumps({"text": each["text"]}) + "\n")
                counts["continued documents"] += 1
    with open(work / "train.jsonl", "w") as train, open(work / "test.jsonl", "w") as test:
        for each in labeled:
            title = section_of(each)
            if title not in titles:
                continue
            target, name = (test, "test texts") if is_test(each) else (train, "train texts")
            for text in texts_of(each):
                target.write(json.dumps({"text": text, "label": f"title {title}"}) + "\n")
                counts[name] += 1
    (work / "law.json").write_text(json.dumps(counts))


def corpora_of(arguments: argparse.Namespace) -> tuple[Corpus, Corpus]:
    """General text and law, both with the tokenizer of the first."""
    work = arguments.work.absolute()
    part = work / "general.jsonl.gz"
    if not part.exists():
        (found,) = corpus_part.corpora_of([f"general={arguments.general}"]).values()
        corpus_part.select_documents(found, arguments.words, PART_SEED, part)
    general = Corpus("general", [str(part)], work / "general", vocab_size=arguments.vocab_size)
    general.shards(REPOSITORY)
    (found,) = corpus_part.corpora_of([f"law={arguments.law}"]).values()
    prepare_law(found, work)
    law = Corpus("law", [str(work / "continued.jsonl.gz")], work / "law", vocab_size=arguments.vocab_size)
    if not (law.work / "tokenizer").exists():
        shutil.copytree(general.work / "tokenizer", law.work / "tokenizer")
    return general, law


def model_of(row: Run, general: Corpus, law: Corpus, arguments: argparse.Namespace) -> dict[str, Any]:
    """The trained encoder of a row."""
    vocab_size = f"model.vocab_size={general.shard_set.manifest.tokenizer.vocab_size}"
    base = train_once(Recipe("ours", arguments.base_steps, (*BATCH, vocab_size)), row.seed, general)
    if not row.rate:
        return base
    data = [{"url": str(law.shards(REPOSITORY)), "weight": 1 - row.replay}]
    if row.replay:
        data.append({"url": str(general.shards(REPOSITORY)), "weight": row.replay})
    settings = (
        *(*SIZES, vocab_size, *BATCH, f"init_from={base['model']}", f"optimizer.learning_rate={row.rate}"),
        *(f"data.shards={json.dumps(data)}", "training.duration=null"),
    )
    return train_once(Recipe("ours", arguments.steps, settings, preset="continue_domain"), row.seed, law)


def draw(labels: Sequence[str], shots: int, seed: int) -> list[int]:
    """Numbers of `shots` texts of each label, or of all that it has; the same for the same seed."""
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    taken: Counter[str] = Counter()
    drawn = []
    for number in order:
        if taken[labels[number]] < shots:
            taken[labels[number]] += 1
            drawn.append(number)
    return sorted(drawn)


def probe(train: np.ndarray, labels: Sequence[str], test: np.ndarray, answers: Sequence[str]) -> float:
    """Accuracy in percent on vectors (num_texts, size) of a logistic regression that was fitted on others."""
    fitted = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(train, labels)
    return 100.0 * float(fitted.score(test, answers))


def few_scores(model: Path, row: Run, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The accuracy of every draw, in percent, by the way of fitting and the number of labels of each title.

    Empty if no document names a section.
    """
    work = arguments.work.absolute()
    train, test = (read_labeled(work / f"{name}.jsonl") for name in ("train", "test"))
    if not train or not test:
        return {}
    labels, answers = ([each["label"] for each in texts] for texts in (train, test))
    embedder = Embedder(model)
    embedder.max_length = LENGTH
    vectors, questions = (embedder([each["text"] for each in texts], "mean") for texts in (train, test))
    found: dict[str, list[float]] = {}
    for shots in SHOTS:
        drawn = [draw(labels, shots, seed) for seed in range(arguments.draws)]
        found[f"frozen, {shots}"] = [
            round(probe(vectors[each], [labels[n] for n in each], questions, answers), 2) for each in drawn
        ]
    found[f"all weights, {FULL_SHOTS}"] = []
    for seed in range(min(arguments.draws, FULL_DRAWS)):
        part = work / f"train-{FULL_SHOTS}-{seed}.jsonl"
        chosen = draw(labels, FULL_SHOTS, seed)
        part.write_text("".join(json.dumps(train[number]) + "\n" for number in chosen))
        score = accuracy_of(model, row, arguments, part, f"-draw-{seed}")
        assert score is not None
        found[f"all weights, {FULL_SHOTS}"].append(score)
    return found


def read_labeled(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracy_of(
    model: Path, row: Run, arguments: argparse.Namespace, train: Path | None = None, name: str = ""
) -> float | None:
    """Accuracy on the labeled texts of the test sections, in percent; the epoch is chosen on a part of the others.

    `train` is another file than that of all others, and `name` the end of the folder's name. None if no document names
    a section.
    """
    work = arguments.work.absolute()
    train = train or work / "train.jsonl"
    if not train.stat().st_size:
        return None
    output = work / "fits" / f"seed-{row.seed}-rate-{row.rate:g}-replay-{row.replay:g}{name}"
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(REPOSITORY / "launch" / "finetune.py"), "--model", str(model)]
    command += ["--task", "classification", "--train", str(train), "--test", str(work / "test.jsonl")]
    command += ["--text-column", "text", "--label-column", "label", "--max-length", str(LENGTH)]
    command += ["--no-tracking"]
    command += ["--seeds", "1", "--split-seed", str(row.seed), "--epochs", str(arguments.epochs)]
    command += ["--learning-rates", *(f"{rate:g}" for rate in arguments.learning_rates), "--output", str(output)]
    run(command)
    scores = json.loads((output / "scores.json").read_text())
    (entry,) = scores["variants"].values()
    return round(100.0 * float(entry["fits"][0]["scores"]["accuracy"]), 2)


def main() -> None:
    arguments = _parse()
    general, law = corpora_of(arguments)
    planned = plan(arguments.seeds)
    if arguments.few:
        planned = [run for run in planned if run.rate in (0, RATE) and not run.replay]

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = model_of(run, general, law, arguments)
        model = Path(found["model"])
        if arguments.few:
            scores: dict[str, Any] = {"accuracies": few_scores(model, run, arguments)}
        else:
            scores = {
                "law_loss": round(law.valid_loss(model), 4),
                "general_loss": round(general.valid_loss(model), 4),
                "accuracy": accuracy_of(model, run, arguments),
            }
        counts = json.loads((arguments.work / "law.json").read_text())
        row = {"commit": commit_of(REPOSITORY), "tokens": found["tokens"], **scores, **counts}
        return row, machine.described("torch", "transformers", "deepspeed", "scikit-learn")

    measure_missing(arguments, lambda rows: planned, lambda run: settings_of(run, arguments), measure)


def settings_of(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row must agree in with the others besides its key."""
    few = {"draws": arguments.draws} if arguments.few else {}
    return {"base_steps": arguments.base_steps} | ({"steps": arguments.steps} if run.rate else {}) | few


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", required=True, metavar="PATTERN", help="text without law")
    parser.add_argument("--law", required=True, metavar="PATTERN", help="pack_medium's dc_law")
    parser.add_argument("--words", type=int, default=2_500_000, help="of general text (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--base-steps", type=int, default=1000, help="of the encoder (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of continuing (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of fine-tuning (default %(default)s)")
    rates = {"type": float, "nargs": "+", "default": [1e-3]}
    parser.add_argument("--learning-rates", **rates, help="of fine-tuning (default 0.001)")
    parser.add_argument("--few", action="store_true", help="score with few labels, in rows of another --results")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of few labels (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
