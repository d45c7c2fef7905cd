"""Whether the working tree produces the same files and numbers as a commit: `python tests/sameness.py --before COMMIT`.

The commit's files are written to a temporary folder, and each tree runs the commands that users run with the libraries
of this environment, on a corpus made from a seed: a tokenizer, shards (plain, and with near-duplicate removal), and for
each configuration of `RUNS` 50 training steps on its own shards and an export. Compared are digests of the tokenizer,
of the shards with their indexes and token counts, of the losses, accuracies, learning rates and gradient norms of every
step as exact numbers, and of the exported weights, configuration and tokenizer. A part whose command fails in one of
the trees, such as over a setting that it does not have, is not comparable. The status is 1 if a part is different.
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
DOCUMENTS = 400
METRICS = ("loss", "accuracy", "learning_rate", "grad_norm")  # endings of the names that depend on no clock
CONFIG = """\
model: {vocab_size: 400, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
         max_position_embeddings: 64, hidden_dropout_prob: 0.1}
data: {shards: shards, sequence_length: 64, num_workers: 0}
training: {seed: 5, micro_batch_tokens: 256, global_batch_tokens: 512}
optimizer: {learning_rate: 3.0e-3}
checkpoint: {every_steps: 25}
evaluation: {every_steps: 25}
logging: {every_steps: 1}
tracking: {uri: "sqlite:///mlflow.db"}
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


class Failed(Exception):
    """A command of a tree failed; the last line of its output."""


def call(tree: Path, folder: Path, *command: str) -> None:
    """Run one of the tree's commands in `folder`.

    Raises:
        Failed: it ended with another status than 0.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    ours = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": "0"}
    environment = kept | ours | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Failed((done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1])


def digest(paths: list[Path]) -> str:
    """The sha256 over the names and the bytes of files."""
    result = hashlib.sha256()
    for path in sorted(paths):
        result.update(f"{path.name} {path.stat().st_size}\n".encode())
        result.update(path.read_bytes())
    return result.hexdigest()


def data_digests(tree: Path, folder: Path) -> dict[str, str]:
    """Prepare the corpus; digests of the tokenizer and of the two sets of shards."""
    write_corpus(folder / "corpus.jsonl")
    source = ["--input", "corpus.jsonl", "--workers", "1"]
    call(tree, folder, "-m", "data_prep", "tokenizer", *source, "--output", "tokenizer", "--vocab-size", "400")
    prepare = ["-m", "data_prep", "shards", *source, "--tokenizer", "tokenizer", "shards.valid_fraction=0.1"]
    call(tree, folder, *prepare, "--output", "shards")
    call(tree, folder, *prepare, "deduplication.near=true", "--output", "deduplicated")
    found = {"tokenizer": digest([folder / "tokenizer" / "tokenizer.json", folder / "tokenizer" / "tokenizer.model"])}
    for name in ("shards", "deduplicated"):
        kept = [path for path in (folder / name).rglob("*") if path.suffix in (".tar", ".safetensors", ".npy", ".idx")]
        assert any(path.suffix == ".tar" for path in kept), f"no shards in {folder / name}"
        found[name] = digest(kept)
    return found


def run_digests(tree: Path, folder: Path, run: Run, steps: int) -> dict[str, str]:
    """Train and export one configuration; digests of its metrics and of its export."""
    (folder / f"{run.name}.yaml").write_text(f"output_dir: {run.name}\n{CONFIG}", encoding="utf-8")
    settings = [f"zero.stage={run.stage}", f"training.precision={run.precision}", f"tracking.run_name={run.name}"]
    settings += [f"training.max_steps={steps}", f"data.sentence_pairs={run.sentence_pairs}"]
    call(tree, folder, str(tree / "launch" / "pretrain.py"), "--config", f"{run.name}.yaml", *settings)
    exported = folder / f"{run.name}_export"
    call(tree, folder, str(tree / "launch" / "export.py"), "--checkpoint", run.name, "--output", str(exported))
    names = ("model.safetensors", "config.json", "tokenizer.json")
    metrics = metrics_digest(folder, run.name, steps)
    return {f"{run.name} metrics": metrics, f"{run.name} export": digest([exported / name for name in names])}


def metrics_digest(folder: Path, name: str, steps: int) -> str:
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
    assert sum(line.startswith("train/loss ") for line in lines) == steps, sorted(found.data.metrics)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def collect(tree: Path, runs: list[Run], steps: int) -> dict[str, str]:
    """The digest of every part by name; instead of those of a command that fails, `failed: ` and the reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, str] = {}
        try:
            found |= data_digests(tree, folder)
            for run in runs:
                try:
                    found |= run_digests(tree, folder, run, steps)
                except Failed as error:
                    found |= {f"{run.name} {part}": f"failed: {error}" for part in ("metrics", "export")}
        except Failed as error:
            found["data"] = f"failed: {error}"
        return found


def compare(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The verdict on every part: same, different, or not comparable with the reason."""
    verdicts = {}
    for part in before | now:
        sides = {"before": before.get(part, "failed: no such part"), "now": now.get(part, "failed: no such part")}
        failures = [f"{side}: {text}" for side, text in sides.items() if text.startswith("failed: ")]
        same = "same" if sides["before"] == sides["now"] else "different"
        verdicts[part] = f"not comparable ({'; '.join(failures)})" if failures else same
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare the working tree with")
    parser.add_argument("--only", nargs="+", metavar="RUN", choices=[run.name for run in RUNS], help="these runs alone")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="training steps of a run (default: 50)")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if not arguments.only or run.name in arguments.only]
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", arguments.before], capture_output=True)
        if archive.returncode:
            parser.error(f"--before {arguments.before}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        before = collect(Path(tree), runs, arguments.steps)
    verdicts = compare(before, collect(ROOT, runs, arguments.steps))
    for part, verdict in verdicts.items():
        print(f"{part:40} {verdict}")
    return 1 if "different" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main())
