"""What a published encoder gains on law, and forgets of general text, by the preset `continue_domain`.

    python tests/benchmarks/domain.py --general FILES --law FILES --work DIR --results FILE [--runs N]

For each seed an encoder (`small_cpu`) is trained on general text without law, and then continued by the preset
`continue_domain` at its sizes: on law alone, and with general text. `SHARES` divides the documents of law: the models
are continued on the first part, whose valid split gives the loss; the second part is labeled. Losses are those of
`encoder_runs.py` on the valid splits of both texts: rows of 128, 15% masked, in transformers, in fp32. Accuracy is that
of `launch/finetune.py` on the labeled texts. A label is the title of the code to which a section belongs, by the path
in `source`. A text is one of the first `PARTS` pieces of a section, of up to `CHARACTERS` each, without headings and
citations, since these contain the number of the title. No section is in both train and test. The texts stay in --work.

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
from encoder_runs import Corpus, Recipe, measure_missing, run, train_once
from machine import REPOSITORY, commit_of

from data_prep.base.errors import run_command

RATES = (3e-4, 1e-3, 3e-3)
RATE = 1e-3
"""Of all seeds: a third of the peak of `small_cpu`, as ModernBERT's last stages have of theirs."""
PART_SEED = 5
SHARES = {"continued": 0.6, "labeled": 1.0}
"""Upper ends of the parts of the documents of law, from 0 to 1."""
NUM_TITLES, CHARACTERS, PARTS = 10, 350, 3
TEST_SHARE = 0.6
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


def accuracy_of(model: Path, row: Run, arguments: argparse.Namespace) -> float | None:
    """Accuracy on the labeled texts of the test sections, in percent; the epoch is chosen on a part of the others.

    None if no document names a section.
    """
    work = arguments.work.absolute()
    if not (work / "train.jsonl").stat().st_size:
        return None
    output = work / "fits" / f"seed-{row.seed}-rate-{row.rate:g}-replay-{row.replay:g}"
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(REPOSITORY / "launch" / "finetune.py"), "--model", str(model)]
    command += ["--task", "classification", "--train", str(work / "train.jsonl"), "--test", str(work / "test.jsonl")]
    command += ["--text-column", "text", "--label-column", "label", "--max-length", "128", "--no-tracking"]
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

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = model_of(run, general, law, arguments)
        model = Path(found["model"])
        return {
            "commit": commit_of(REPOSITORY),
            "tokens": found["tokens"],
            "law_loss": round(law.valid_loss(model), 4),
            "general_loss": round(general.valid_loss(model), 4),
            "accuracy": accuracy_of(model, run, arguments),
            **json.loads((arguments.work / "law.json").read_text()),
        }, machine.described("torch", "transformers", "deepspeed")

    measure_missing(arguments, lambda rows: planned, lambda run: settings_of(run, arguments), measure)


def settings_of(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row must agree in with the others besides its key."""
    return {"base_steps": arguments.base_steps} | ({"steps": arguments.steps} if run.rate else {})


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
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="add each row to this JSON file")
    parser.add_argument("--runs", type=int, default=10**6, metavar="N", help="new rows (default: all that are missing)")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
