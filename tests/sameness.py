"""Digests of what the commands produce, to prove that a change of the code's structure changes no result.

Run `python tests/sameness.py --output before.json` on one commit and `python tests/sameness.py --compare before.json`
on the other, on the same machine. Each runs the commands that users run, on a corpus made from a seed: a tokenizer,
shards (plain, and with near-duplicate removal), and for each configuration of `RUNS` 50 training steps and an export.
The digests cover the shards with their indexes and token counts, the losses, accuracies, learning rates and gradient
norms of every step, and the exported weights, configuration and tokenizer. It takes about 4 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STEPS = 50
DOCUMENTS = 400
METRICS = ("loss", "accuracy", "learning_rate", "grad_norm")  # endings of the names that depend on no clock
CONFIG = f"""\
model: {{vocab_size: 400, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
         max_position_embeddings: 64, hidden_dropout_prob: 0.1}}
data: {{shards: shards, sequence_length: 64, num_workers: 0}}
training: {{max_steps: {STEPS}, seed: 5, micro_batch_tokens: 256, global_batch_tokens: 512}}
optimizer: {{learning_rate: 3.0e-3}}
checkpoint: {{every_steps: 25}}
evaluation: {{every_steps: 25}}
logging: {{every_steps: 1}}
tracking: {{uri: "sqlite:///mlflow.db"}}
"""


class Run(NamedTuple):
    """One training run."""

    stage: int
    precision: str
    sentence_pairs: str

    @property
    def name(self) -> str:
        return f"stage{self.stage}_{self.precision}_{self.sentence_pairs}"


# DeepSpeed trains in bf16 at the stages 1 to 3 alone.
RUNS = [
    Run(stage, precision, pairs)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
    for pairs in ("none", "next_sentence")
    if stage or precision == "fp32"
]


def write_corpus(path: Path) -> None:
    """Write `DOCUMENTS` documents of made-up words; some are alike, and one is a single word."""
    random_state = random.Random(7)
    words = ["".join(random_state.choices("abcdefghijklmnoprstu", k=random_state.randint(1, 9))) for _ in range(600)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    texts: list[str] = ["word"]
    while len(texts) < DOCUMENTS:
        sentences = [
            " ".join(random_state.choices(words, weights, k=random_state.randint(3, 14))).capitalize() + "."
            for _ in range(random_state.randint(1, 12))
        ]
        texts.append(" ".join(sentences))
        if len(texts) % 40 == 0:
            texts.append(texts[-1] + " More.")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def call(folder: Path, *command: str) -> None:
    """Run one of the project's commands in `folder`; exit with its output where it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment = kept | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "SOURCE_DATE_EPOCH": "0",
    }
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def digest(paths: list[Path]) -> str:
    """The sha256 over the names and the bytes of files."""
    result = hashlib.sha256()
    for path in sorted(paths):
        result.update(f"{path.name} {path.stat().st_size}\n".encode())
        result.update(path.read_bytes())
    return result.hexdigest()


def shard_digests(folder: Path) -> dict[str, str]:
    """Prepare the corpus; digests of the tokenizer and of the two sets of shards."""
    write_corpus(folder / "corpus.jsonl")
    source = ["--input", "corpus.jsonl", "--workers", "1"]
    call(folder, "-m", "data_prep", "tokenizer", *source, "--output", "tokenizer", "--vocab-size", "400")
    prepare = ["-m", "data_prep", "shards", *source, "--tokenizer", "tokenizer", "--config", "shards.yaml"]
    (folder / "shards.yaml").write_text("shards: {valid_fraction: 0.1}\n", encoding="utf-8")
    call(folder, *prepare, "--output", "shards")
    (folder / "shards.yaml").write_text(
        "shards: {valid_fraction: 0.1}\ndeduplication: {near: true}\n", encoding="utf-8"
    )
    call(folder, *prepare, "--output", "deduplicated")
    found = {"tokenizer": digest([folder / "tokenizer" / "tokenizer.json", folder / "tokenizer" / "tokenizer.model"])}
    for name in ("shards", "deduplicated"):
        kept = [path for path in (folder / name).rglob("*") if path.suffix in (".tar", ".safetensors", ".npy", ".idx")]
        assert any(path.suffix == ".tar" for path in kept), f"no shards in {folder / name}"
        found[name] = digest(kept)
    return found


def run_digests(folder: Path, run: Run) -> dict[str, str]:
    """Train and export one configuration; digests of its metrics and of its export."""
    (folder / f"{run.name}.yaml").write_text(f"output_dir: {run.name}\n{CONFIG}", encoding="utf-8")
    settings = [f"zero.stage={run.stage}", f"training.precision={run.precision}", f"tracking.run_name={run.name}"]
    if run.sentence_pairs != "none":
        settings.append(f"data.sentence_pairs={run.sentence_pairs}")
    call(folder, str(ROOT / "launch" / "pretrain.py"), "--config", f"{run.name}.yaml", *settings)
    exported = folder / f"{run.name}_export"
    call(folder, str(ROOT / "launch" / "export.py"), "--checkpoint", run.name, "--output", str(exported))
    weights = [exported / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
    return {"metrics": metrics_digest(folder, run.name), "export": digest(weights)}


def metrics_digest(folder: Path, name: str) -> str:
    """The sha256 over the metrics of a run in MLflow, as exact numbers; timings are left out."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (found,) = client.search_runs(experiments, filter_string=f"attributes.run_name = '{name}'")
    lines = []
    for metric in sorted(found.data.metrics):
        if metric.endswith(METRICS):
            history = client.get_metric_history(found.info.run_id, metric)
            lines += [f"{metric} {point.step} {point.value.hex()}" for point in sorted(history, key=lambda p: p.step)]
    assert sum(line.startswith("train/loss ") for line in lines) == STEPS, sorted(found.data.metrics)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def collect() -> dict[str, object]:
    """All digests, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, object] = {"data": shard_digests(folder)}
        for run in RUNS:
            found[run.name] = run_digests(folder, run)
            print(run.name, found[run.name], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the digests")
    parser.add_argument("--compare", type=Path, help="digests of another commit, which must be equal")
    arguments = parser.parse_args()
    if arguments.compare and not arguments.compare.is_file():
        parser.error(f"--compare {arguments.compare} does not exist. Fix: write it with --output on the other commit")
    found = collect()
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.compare:
        before = json.loads(arguments.compare.read_text(encoding="utf-8"))
        differing = [name for name in sorted({*before, *found}) if before.get(name) != found.get(name)]
        print(f"different: {', '.join(differing)}" if differing else f"all {len(found)} groups of digests are equal")
        return 1 if differing else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
