"""Whether the working tree produces the same files and numbers as a commit: `python tests/sameness.py --before COMMIT`.

The commit's files are written to a temporary folder, and each tree runs the commands that users run with the libraries
of this environment, on a corpus made from a seed: a tokenizer, shards (plain, and with near-duplicate removal), and for
each configuration of `RUNS` 50 training steps, an export and its scores on minimal pairs. Compared are digests of the
parts in `DATA_PARTS` and `RUN_PARTS`. Three configurations run by default, before each commit; `--all` runs every one,
before the branch lands, and compares fine-tuned models too: their mean score must lie within the spread of three seeds.

A part whose command fails for the commit, such as over a setting that it does not have, is not comparable; one whose
command fails in the working tree is failed. The status is 1 if a part is different or failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tests.support import fork_server  # noqa: E402

ROOT = fork_server.ROOT
DOCUMENTS, LABELED = 400, 300
LEARNED = 0.6  # of fine-tuned models' predictions are correct at least; a constant label is correct in a half
METRICS = ("loss", "accuracy", "learning_rate", "grad_norm")  # endings of the names that depend on no clock
OF_ONE_RUN = re.compile(r"_at$|seconds|flops|host|boot_id|pid|ticks|_uri$|run_id$|^doing$")
"""Names of times, processes and what they do, hosts and addresses in status.json."""
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
DATA_PARTS = {
    "tokenizer": "tokenizer.json and tokenizer.model",
    "shards": "the shards with their indexes and token counts",
    "deduplicated": "the same with near-duplicate removal",
    "manifests": "manifest.json of both",
}
SCORES = "scores: "
RUN_PARTS = {
    "metrics": "losses, accuracies, learning rates and gradient norms of every step, as exact numbers",
    "names": "the names of all metrics in points.jsonl",
    "status": "status.json without times, processes, hosts and addresses",
    "files": "the names of the files of all checkpoints",
    "export": "weights, configuration and tokenizer",
    "scores": "what `evaluate` gives for every sentence of the minimal pairs",
}


class Run(NamedTuple):
    """One training run: its settings, and the number of ranks of each of its starts, which have equal shares of it."""

    name: str
    settings: tuple[str, ...]
    starts: tuple[int, ...] = (1,)
    has_stages: bool = False


# DeepSpeed trains in bf16 at the stages 1 to 3 alone.
GRID = [
    Run(
        f"stage{stage}_{precision}_{pairs}",
        (f"zero.stage={stage}", f"training.precision={precision}", f"data.sentence_pairs={pairs}"),
    )
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
    for pairs in ("none", "next_sentence")
    if stage or precision == "fp32"
]
FP32 = ("training.precision=fp32",)
MIXTURE = "{shards: [{url: shards, weight: 3}, {url: deduplicated, weight: 1}]}"
RUNS = [
    *GRID,
    # A run is only extended in a schedule whose rates do not depend on its length.
    Run("ranks_2_1_2", (*FP32, "zero.stage=2", "schedule.name=warmup_stable_decay"), (2, 1, 2)),
    Run(
        "two_stages_mixture",
        (
            *FP32,
            "training.stages=[{name: first, steps: %(half)d},"
            "{name: second, steps: %(rest)d, mlm_probability: 0.3, data: " + MIXTURE + "}]",
        ),
        has_stages=True,
    ),
    Run(
        "durations",
        (
            *FP32,
            "schedule={name: warmup_stable_decay, warmup_tokens: 700, decay_ratio: 0.1}",
            "training.batch_warmup={initial_tokens: 256, tokens: 768}",
        ),
    ),
    Run("span_masking", (*FP32, "data.mask_unit=span")),
    Run("sentence_order", (*FP32, "data.sentence_pairs=sentence_order")),
    Run("modernbert", (*FP32, "model.family=modernbert", "model.local_attention=8", "data.sentence_pairs=none")),
    Run(
        "eurobert",
        (
            *(*FP32, "model.family=eurobert", "model.num_key_value_heads=1", "data.sentence_pairs=none"),
            *("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0.1"),
        ),
    ),
    Run("muon", (*FP32, "optimizer.name=muon")),
    Run("stable_adamw", (*FP32, "optimizer.name=stable_adamw")),
    Run("compiled", (*FP32, "training.compile=true")),  # on the CPU; needs a C++ compiler
]
QUICK = ("stage2_bf16_next_sentence", "ranks_2_1_2", "two_stages_mixture")


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


def write_tables(folder: Path) -> None:
    """Write minimal pairs of the corpus, whose words are in their order or not, and sentences labeled by length.

    A small encoder learns lengths within seconds, to 70 to 90% correct by the seed. It does not learn the order.
    """
    texts = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    sentences = [text.partition(".")[0] for text in texts]
    # Of at most 64 tokens, the model's length.
    pairs = [{"sentence_good": each, "sentence_bad": " ".join(reversed(each.split()))} for each in sentences]
    pairs = [pair | {"field": "order"} for pair in pairs if 1 < pair["sentence_good"].count(" ") < 6]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs[:40])), encoding="utf-8")
    by_length: dict[str, list[str]] = {"short": [], "long": []}
    for sentence in (each.strip(". ") for text in texts for each in text.split(". ")):
        by_length["long" if sentence.count(" ") > 7 else "short"].append(sentence)
    rows = [f"{each}\t{label}" for label, texts in by_length.items() for each in texts[: LABELED // 2]]
    (folder / "labeled.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")


class Failed(Exception):
    """A command of a tree failed; the last line of its output."""


def call(tree: Path, folder: Path, *command: str, num_ranks: int = 1) -> None:
    """Run one of the tree's commands in `folder`, or as many ranks of it.

    Raises:
        Failed: one of them ended with another status than 0.
    """
    environment = os.environ | fork_server.FIXED | {"SOURCE_DATE_EPOCH": "0", "PYTHONPATH": str(tree)}
    if num_ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in map(str, range(num_ranks)):
        own = environment | ({"RANK": rank, "LOCAL_RANK": rank} if num_ranks > 1 else {})
        with open(folder / f"output-{rank}.log", "w", encoding="utf-8") as log:
            processes.append(fork_server.start(command, folder, own, log.fileno(), tree))
    statuses = [process.wait() for process in processes]
    for rank, status in enumerate(statuses):
        if status:
            output = (folder / f"output-{rank}.log").read_text(encoding="utf-8", errors="replace").strip()
            raise Failed((output or f"status {status}").splitlines()[-1])


def digest(paths: list[Path]) -> str:
    """The sha256 over the names and the bytes of files."""
    result = hashlib.sha256()
    for path in sorted(paths):
        result.update(f"{path.name} {path.stat().st_size}\n".encode())
        result.update(path.read_bytes())
    return result.hexdigest()


def digest_of(values: object) -> str:
    """The sha256 over values that JSON has."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def data_digests(tree: Path, folder: Path) -> dict[str, str]:
    """Prepare the corpus; the digest of each of `DATA_PARTS`."""
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
    return found | {"manifests": digest([folder / name / "manifest.json" for name in ("shards", "deduplicated")])}


def run_digests(tree: Path, folder: Path, run: Run, steps: int) -> dict[str, str]:
    """Train, export and evaluate one configuration; the digest of each of `RUN_PARTS`."""
    (folder / f"{run.name}.yaml").write_text(f"output_dir: {run.name}\n{CONFIG}", encoding="utf-8")
    lengths = {"half": steps // 2, "rest": steps - steps // 2}
    settings = [setting % lengths for setting in (*run.settings, f"tracking.run_name={run.name}")]
    for number, num_ranks in enumerate(run.starts, 1):
        own = [] if run.has_stages else [f"training.max_steps={steps * number // len(run.starts)}"]
        script = str(tree / "launch" / "pretrain.py")
        call(tree, folder, script, "--config", f"{run.name}.yaml", *settings, *own, num_ranks=num_ranks)
    exported, scores = f"{run.name}_export", f"{run.name}_scores.json"
    call(tree, folder, str(tree / "launch" / "export.py"), "--checkpoint", run.name, "--output", exported)
    evaluate = [str(tree / "launch" / "evaluate.py"), "--model", exported, "--minimal-pairs", "pairs.jsonl"]
    call(tree, folder, *evaluate, "--output", scores)
    points = (folder / run.name / "tracking" / "points.jsonl").read_text(encoding="utf-8").splitlines()
    status = json.loads((folder / run.name / "status.json").read_text(encoding="utf-8"))
    status = {name: value for name, value in status.items() if not OF_ONE_RUN.search(name)}
    status["metrics"] = {name: value for name, value in status["metrics"].items() if name.endswith(METRICS)}
    checkpoints = folder / run.name / "checkpoints"
    files = [path.relative_to(checkpoints).as_posix() for path in checkpoints.rglob("*") if path.is_file()]
    assert any(name.endswith(".safetensors") for name in files), files
    names = ("model.safetensors", "config.json", "tokenizer.json")
    found = {
        "metrics": metrics_digest(folder, run.name, steps),
        "names": digest_of(sorted({name for point in points for name in json.loads(point)["m"]})),
        "status": digest_of(status),
        "files": digest_of(sorted(files)),
        "export": digest([folder / exported / name for name in names]),
        "scores": digest_of(json.loads((folder / scores).read_text(encoding="utf-8"))),
    }
    return {f"{run.name} {part}": value for part, value in found.items()}


def finetuned_scores(tree: Path, folder: Path, model: str) -> dict[str, str]:
    """Fine-tune an export with three seeds; their scores, which are compared by their mean and spread.

    Raises:
        Failed: fine-tuning failed, or learned nothing: then equal scores would prove nothing.
    """
    script = [str(tree / "launch" / "finetune.py"), "--model", model, "--no-tracking", "--output", "fitted"]
    columns = ["--train", "labeled.tsv", "--text-column", "text", "--label-column", "label"]
    how = ["--task", "classification", "--seeds", "3", "--epochs", "4", "--learning-rates", "3e-3"]
    call(tree, folder, *script, *columns, *how)
    scores = json.loads((folder / "fitted" / "scores.json").read_text(encoding="utf-8"))
    found = [fit["scores"]["accuracy"] for fit in scores["variants"]["full"]["fits"]]
    if sum(found) / len(found) < LEARNED or len(set(found)) == 1:
        raise Failed(f"fine-tuning learned nothing, or has no spread: accuracies {found}")
    return {"fine-tuning": SCORES + json.dumps(found)}


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


def collect(tree: Path, runs: list[Run], steps: int, finetunes: bool = False) -> dict[str, str]:
    """The digest of every part by name; instead of those of a command that fails, `failed: ` and the reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, str] = {}
        try:
            found |= data_digests(tree, folder)
        except Failed as error:
            return {"data": f"failed: {error}"}
        write_tables(folder)
        for run in runs:
            try:
                found |= run_digests(tree, folder, run, steps)
            except Failed as error:
                found |= {f"{run.name} {part}": f"failed: {error}" for part in RUN_PARTS}
        if finetunes:
            try:
                found |= finetuned_scores(tree, folder, f"{runs[0].name}_export")
            except Failed as error:
                found["fine-tuning"] = f"failed: {error}"
        return found


def compare(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The verdict on every part: same, different, failed or not comparable; with the reason where a command failed."""
    verdicts = {}
    for part in before | now:
        sides = {"before": before.get(part, "failed: no such part"), "now": now.get(part, "failed: no such part")}
        failures = {side: text for side, text in sides.items() if text.startswith("failed: ")}
        is_same = sides["before"] == sides["now"] or within_spread(*sides.values())
        verdict = (
            "failed" if "now" in failures else "not comparable" if failures else "same" if is_same else "different"
        )
        reasons = "; ".join(f"{side}: {text}" for side, text in failures.items())
        verdicts[part] = f"{verdict} ({reasons})" if reasons else verdict
    return verdicts


def within_spread(before: str, now: str) -> bool:
    """Whether the means of two lists of scores differ by at most the range of the first."""
    if not (before.startswith(SCORES) and now.startswith(SCORES)):
        return False
    old, new = (json.loads(text.removeprefix(SCORES)) for text in (before, now))
    return abs(sum(old) / len(old) - sum(new) / len(new)) <= max(old) - min(old)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare the working tree with")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="every configuration, and fine-tuning")
    names = [run.name for run in RUNS]
    chosen.add_argument("--only", nargs="+", metavar="RUN", choices=names, default=QUICK, help="these runs alone")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="training steps of a run (default: 50)")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if arguments.all or run.name in arguments.only]
    for name in [name for name in os.environ if name.startswith(("PYTHON", "MLFLOW_", "HF_", "TRANSFORMERS_"))]:
        del os.environ[name]  # the caller's own settings
    os.environ |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", arguments.before], capture_output=True)
        if archive.returncode:
            parser.error(f"--before {arguments.before}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        before = collect(Path(tree), runs, arguments.steps, arguments.all)
    verdicts = compare(before, collect(ROOT, runs, arguments.steps, arguments.all))
    for part, verdict in verdicts.items():
        print(f"{part:40} {verdict}")
    return 1 if any(verdict.startswith(("different", "failed")) for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
