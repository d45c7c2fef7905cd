"""Print what the demo learned: sizes, times, scores beside the unigram baseline, and the next commands."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from data_prep.base.errors import UserError, run_command
from data_prep.base.terminal import duration
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.storage import storage
from launch.options import command_parser

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 8192
"""That of demo.sh without --vocab-size."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("demo_summary.py", __doc__)
    parser.add_argument("--demo", required=True, type=Path, metavar="DIR", help="output directory of the demo")
    parser.add_argument("--run", default="run", metavar="NAME", help="folder of the run in it (default %(default)s)")
    parser.add_argument("--model", required=True, metavar="URI", help="the registered model")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the run (default %(default)s)")
    options = parser.parse_args(arguments)
    demo = options.demo
    status = read_json(demo / options.run / "status.json", "valid/mlm_loss")
    results = read_json(demo / f"results-{options.run}.json")
    manifest = read_manifest(str(demo / "shards"))
    print(format_table([*sizes(manifest, status), *times(demo / "timings.tsv", options.run)]))
    print()
    print(format_scores(status["metrics"], manifest, results))
    print(f"loss curves: {relative(demo / f'curves-{options.run}.png')}")
    print()
    corpus = storage.redact((demo / "corpus.txt").read_text(encoding="utf-8").strip())
    print(what_it_read(corpus))
    print()
    full = whole_recipe(demo, corpus, manifest.tokenizer.vocab_size)
    print(next_commands(options.model, results["view_hint"], example(corpus, results), full))


def read_json(path: Path, metric: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a file of the demo.

    Raises:
        UserError: it cannot be read, is not a JSON object, or its `metrics` lack `metric`.
    """
    fix = "run bash launch/demo.sh again"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", fix=fix, code="unreadable-demo") from None
    if not isinstance(values, dict) or (metric is not None and metric not in values.get("metrics", {})):
        raise UserError(f"{path} has no scores: the run is not finished", fix=fix, code="unfinished-demo")
    return values


def sizes(manifest: Manifest, status: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows on the data and the model."""
    per_token = status["tokens_seen"] / manifest.train.tokens
    return [
        ("documents, train + valid", f"{manifest.train.documents:,} + {manifest.valid.documents:,}"),
        ("tokens, train + valid", f"{manifest.train.tokens:,} + {manifest.valid.tokens:,}"),
        ("vocabulary", f"{manifest.tokenizer.vocab_size:,} tokens"),
        ("parameters", f"{status['parameters']:,}"),
        ("optimizer steps", f"{status['step']:,} of {status['max_steps']:,}"),
        ("tokens seen", f"{status['tokens_seen']:,} ({per_token:.1f} epochs)"),
    ]


def times(path: Path, run: str) -> list[tuple[str, str]]:
    """Rows on the time of each step of a run, and on the sum without the installation."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [line.split("\t") for line in text.splitlines()]
    names = {f"pretraining-{run}": "pretraining", f"results-{run}": "results"}
    seconds = {names.get(name, name): round(float(value)) for name, value in rows if "-" not in name or name in names}
    table = [(f"time, {name}", duration(value)) for name, value in seconds.items()]
    after = sum(value for name, value in seconds.items() if name != "environment")
    return [*table, ("time, all after the environment", duration(after))]


def format_scores(metrics: dict[str, float], manifest: Manifest, results: dict[str, float]) -> str:
    """Return the scores on the valid split beside those of the token frequencies alone."""
    loss, entropy = metrics["valid/mlm_loss"], manifest.valid.unigram_entropy_nats
    masks = f"{results['masks']:,.0f} masked words"
    rows = [
        ("", "this model", "unigram baseline"),
        ("valid MLM loss (nats)", f"{loss:.3f}", "-" if entropy is None else f"{entropy:.3f}"),
        (
            "valid MLM perplexity",
            f"{metrics['valid/mlm_perplexity']:,.1f}",
            "-" if entropy is None else f"{math.exp(entropy):,.1f}",
        ),
        ("valid MLM accuracy", f"{metrics['valid/mlm_accuracy']:.1%}", "-"),
    ]
    if results["masks"]:
        rows += [
            (f"{masks}: top {k}", f"{results[f'top_{k}']:.1%}", f"{results[f'unigram_top_{k}']:.1%}") for k in (1, 5)
        ]
    lines = [f"{name:<32}{ours:>14}{baseline:>20}" for name, ours, baseline in rows]
    if entropy is not None:
        side = "below" if loss < entropy else "above"
        lines.append(f"The loss is {abs(entropy - loss):.2f} nats {side} that of token frequencies alone.")
        if loss >= entropy or (results["masks"] and results["top_5"] <= results["unigram_top_5"]):
            lines.append("The model does not use context yet: train longer.")
    return "\n".join(lines)


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of name and value, values to the right."""
    width = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<32}  {value:>{width}}" for name, value in rows)


def what_it_read(corpus: str) -> str:
    """Return what the model can know; `corpus` is what demo.sh was given, or "docstrings"."""
    text = corpus
    if corpus == "docstrings":
        text = "the docstrings of installed Python packages: what programmers write about functions and classes"
    return f"The model has read only {text}.\nIt fills sentences of that kind; of others it knows nothing."


def example(corpus: str, results: dict[str, Any]) -> str:
    """Return a text with a mask, of the kind that the model has read."""
    if corpus == "docstrings":
        return "The function returns a [MASK] of strings."
    return str(results.get("example", "A text of yours with a [MASK]."))


def whole_recipe(demo: Path, corpus: str, vocab_size: int) -> str:
    """Return the command that trains the whole recipe on the shards of this demo."""
    words = ["bash", "launch/demo.sh", "--full"]
    if demo.resolve() != REPOSITORY / "demo":
        words += ["--output", str(demo)]
    if corpus != "docstrings":
        words += ["--corpus", corpus]
    if vocab_size != VOCAB_SIZE:
        words += ["--vocab-size", str(vocab_size)]
    return shlex.join(words)


def next_commands(model: str, view_hint: str, text: str, full: str) -> str:
    """Return three commands that go on from here, to be typed in the repository root."""
    environment = Path(os.environ.get("VIRTUAL_ENV", REPOSITORY / ".venv"))
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    tracked = f"  export MLFLOW_TRACKING_URI={quote(uri)}\n" if uri.startswith("sqlite:") else ""
    view, _, url = view_hint.partition(", then open ")
    return (
        "Next, in the repository root:\n"
        f"  source {quote(relative(environment / 'bin' / 'activate'))}\n"
        f"{tracked}"
        f"  {f'{view}    # then open {url}' if url else f'open {view}'}\n"
        f"  clozeworks fill-mask --model {quote(model)} {quote(text)}\n"
        f"  {full}    # half an hour of training on the same shards"
    )


def relative(path: Path) -> str:
    """Return a path below the repository as seen from its root."""
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


if __name__ == "__main__":
    run_command(main)
