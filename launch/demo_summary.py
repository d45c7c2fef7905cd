"""Print what the demo did: a table of sizes, times and scores, then the commands to go on."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from data_prep.base.errors import UserError, run_command
from data_prep.base.settings import find_config, read_yaml
from data_prep.base.terminal import duration
from data_prep.dataset.manifest import Manifest, read_manifest

REPOSITORY = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", required=True, type=Path, metavar="DIR", help="what the demo wrote")
    parser.add_argument("--model", required=True, metavar="URI", help="the registered model")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the training (default %(default)s)")
    options = parser.parse_args(arguments)
    status = read_status(options.demo / "run" / "status.json")
    manifest = read_manifest(str(options.demo / "shards"))
    print(format_table([*sizes(manifest, status), *times(options.demo / "timings.tsv")]))
    print()
    print(format_scores(status["metrics"], manifest))
    print()
    print(next_commands(options.demo, options.model, options.ranks, status, manifest.tokenizer.vocab_size))


def read_status(path: Path) -> dict[str, Any]:
    """The status file of a training.

    Raises:
        UserError: it cannot be read, is no JSON object, or is without the scores of an evaluation.
    """
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Fix: run the demo again") from None
    if not isinstance(status, dict) or "valid/mlm_loss" not in status.get("metrics", {}):
        raise UserError(f"{path} has no scores: the training is not finished. Fix: run the demo again")
    return status


def sizes(manifest: Manifest, status: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows on the data and the model."""
    per_token = status["tokens_seen"] / manifest.train.tokens
    return [
        ("documents, train + valid", f"{manifest.train.documents:,} + {manifest.valid.documents:,}"),
        ("tokens, train + valid", f"{manifest.train.tokens:,} + {manifest.valid.tokens:,}"),
        ("vocabulary", f"{manifest.tokenizer.vocab_size:,} pieces"),
        ("parameters", f"{status['parameters']:,}"),
        ("optimizer steps", f"{status['step']:,} of {status['max_steps']:,}"),
        ("tokens seen", f"{status['tokens_seen']:,} ({per_token:.1f} epochs)"),
    ]


def times(path: Path) -> list[tuple[str, str]]:
    """Rows on the time of each step, when it was done, and on the sum without the installation."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [line.split("\t") for line in text.splitlines()]
    seconds = {name: round(float(value)) for name, value in rows}
    table = [(f"time, {name}", duration(value)) for name, value in seconds.items()]
    after = sum(value for name, value in seconds.items() if name != "environment")
    return [*table, ("time, all after the environment", duration(after))]


def format_scores(metrics: dict[str, float], manifest: Manifest) -> str:
    """The scores on the valid split beside those of a model that knows only how frequent each piece is."""
    loss, entropy = metrics["valid/mlm_loss"], manifest.valid.unigram_entropy_nats
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
    if "valid/pair_accuracy" in metrics:
        accuracy = f"{metrics['valid/pair_accuracy']:.1%}"
        rows.append(("valid next-sentence accuracy", accuracy, "50.0% (chance)"))
    lines = [f"{name:<32}{ours:>14}{baseline:>20}" for name, ours, baseline in rows]
    if entropy is not None:
        verb, side = ("uses context", "below") if loss < entropy else ("does not use context yet", "above")
        nats = abs(entropy - loss)
        lines.append(f"The model {verb}: its loss is {nats:.2f} nats {side} that of frequencies alone.")
    return "\n".join(lines)


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of name and value, values to the right."""
    width = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<32}  {value:>{width}}" for name, value in rows)


def next_commands(demo: Path, model: str, ranks: int, status: dict[str, Any], vocab_size: int) -> str:
    """The commands that go on from here, as they can be typed in the repository root."""
    environment = Path(os.environ.get("VIRTUAL_ENV", REPOSITORY / ".venv"))
    uri = os.environ.get("MLFLOW_TRACKING_URI") or status["tracking_uri"]
    exports, see_curves = [], f"open {uri}" if "@" not in uri else "open your MLflow server"
    if uri.startswith("sqlite:"):
        exports = [f"  export MLFLOW_TRACKING_URI={quote(uri)}"]
        see_curves = f"mlflow ui --backend-store-uri {quote(uri)}"
    is_presets = vocab_size == read_yaml(find_config("tiny_cpu"))["model"]["vocab_size"]
    longer = ("" if is_presets else f"model.vocab_size={vocab_size} ") + f"training.max_steps={2 * status['max_steps']}"
    cpu = "DS_ACCELERATOR=cpu " if os.environ.get("DS_ACCELERATOR") == "cpu" else ""
    return "\n".join(
        [
            "Go on (in the repository root):",
            f"  source {quote(str(environment / 'bin' / 'activate'))}",
            *exports,
            f"  {see_curves}    # loss curves, model versions",
            f'  python launch/fill_mask.py --model {quote(model)} "The function returns a [MASK] of strings."',
            "  # train for longer: the same output_dir resumes where it stopped",
            f"  {cpu}deepspeed --num_gpus {ranks} launch/pretrain.py --config configs/tiny_cpu.yaml \\",
            f"      {quote(f'output_dir={demo}/run')} {quote(f'data.shards={demo}/shards')} {longer}",
            f"  # remove all of it: rm -rf {quote(str(demo))} {quote(str(environment))}",
        ]
    )


if __name__ == "__main__":
    run_command(main)
