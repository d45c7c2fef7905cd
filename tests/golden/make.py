"""Writes the golden files of a release, which every later release must read: `python tests/golden/make.py FOLDER`.

Run once when a format is new, never again for the same folder. When the order of samples changes on purpose,
`make.py --order FOLDER` writes what depends on it to expected.json, and every other file stays as it was released.
FOLDER then holds

    corpus.jsonl     docstrings of this project
    run.yaml         the settings of the run
    shards/          a data set of them, with its tokenizer
    run/             a run of that data: tokenizer, configuration, the checkpoint after RESUMED_STEP of MAX_STEPS steps
    export/          the model after MAX_STEPS steps as a Hugging Face folder
    expected.json    what all of that gave when it was written

Everything is made in FOLDER with relative paths, by the commands that users run. The tokenizer is stored once: its
copies in run/ and export/ are links.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "launch" / "pretrain.py"
RESUMED_STEP, MAX_STEPS = 3, 6
TEXTS = (
    "The tokenizer of the shards, and what it was made with.",
    "  Spaces,\ttabs\n\nand a [MASK] stay what they are; \u00e9 and e\u0301 too, \u6f22\u5b57 become bytes.",
)
INVISIBLE_TEXTS = (
    "one\u200btwo \u200b three\u200b",
    "\u061cfour\u2061five\u206asix\U0001d173seven\U0001bca0 \U000e0001eight",
    "\u200enine\u2060ten\u00ad\ufeff \u180e\u200c\u200d \u0600 \U0001f3f4\U000e0067\U000e007f",
)
"""Characters that the versions of normalization treat differently, and their relatives."""
MASKED_TEXT = "The [MASK] of the shards."
CONFIG = f"""\
output_dir: run
model:
  vocab_size: 400
  hidden_size: 16
  num_hidden_layers: 2
  num_attention_heads: 2
  intermediate_size: 32
  max_position_embeddings: 64
  hidden_dropout_prob: 0.1
data:
  shards: shards
  sequence_length: 64
  sentence_pairs: next_sentence
  num_workers: 0
training:
  max_steps: {MAX_STEPS}
  seed: 5
  micro_batch_tokens: 256
  global_batch_tokens: 512
  precision: fp32
optimizer:
  learning_rate: 3.0e-3
zero:
  stage: 1
checkpoint:
  every_steps: {RESUMED_STEP}
  keep_last: 9
logging:
  every_steps: 1
tracking:
  uri: sqlite:///mlflow.db
"""


def environment() -> dict[str, str]:
    """That of the commands: one thread, and nothing of the caller's tracking."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return kept | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, *command: str) -> None:
    """A command of this project in `folder`."""
    answer = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert answer.returncode == 0, f"{command}: {answer.stdout[-2000:]}{answer.stderr[-4000:]}"


def train(folder: Path) -> None:
    """Train in `folder`, or go on with the run that is there, to MAX_STEPS."""
    run(folder, str(PRETRAIN), "--config", "run.yaml")


def losses(folder: Path) -> dict[str, float]:
    """The training loss of every step, by the run's own record."""
    found = {}
    for line in (folder / "run" / "tracking" / "points.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if "train/loss" in values["m"]:
            found[str(values["s"])] = values["m"]["train/loss"]
    return found


def machine() -> dict[str, Any]:
    """What the last bits of a loss depend on: torch's version, and the processor, by which its kernels are chosen."""
    import torch

    known = dict(
        re.findall(r"^(model name|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    )
    return {"torch": torch.__version__, "processor": known or platform.machine()}


def store_once(folder: Path) -> None:
    """Replace each file that equals another one byte for byte by a link to it; the first is that of the shards."""
    originals: dict[bytes, Path] = {}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and not path.is_symlink():
            original = originals.setdefault(path.read_bytes(), path)
            if original != path:
                path.unlink()
                path.symlink_to(os.path.relpath(original, path.parent))


def digest_of_tensors(tensors: dict[str, Any]) -> str:
    """sha256 over names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name].numpy()).tobytes())
    return digest.hexdigest()


def first_rows(folder: Path) -> dict[str, Any]:
    """The first rows that training sees: ids, and what of them is predicted."""
    from trainer import load_config
    from trainer.data.loader import Loader, Position
    from trainer.data.shard_set import open_shard_set

    config = load_config(folder / "run.yaml")
    shard_sets = [open_shard_set(str(folder / "shards"))]
    seed = config.training.seed
    loader = Loader(shard_sets, config.stages[0], Position(0, 0, 0), seed)
    micro = next(iter(loader)).micro_batches[0]
    return {
        "input_ids": micro.input_ids[:64].tolist(),
        "labels": [label for label in micro.labels.tolist() if label >= 0][:20],
    }


def logits(folder: Path) -> list[float]:
    """Of the export, the first logits of the masked place of MASKED_TEXT."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "export", local_files_only=True)
    model = AutoModelForMaskedLM.from_pretrained(folder / "export", local_files_only=True).eval()
    inputs = tokenizer(MASKED_TEXT, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs).logits[0]
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    return [round(value, 6) for value in found[place, :40].tolist()]


def write_corpus(path: Path) -> None:
    """Docstrings of this project, a module a document, until 30 kB are together."""
    lines, num_bytes = [], 0
    for module in sorted((ROOT / "data_prep").rglob("*.py")):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        text = "\n\n".join(text for node in documented if (text := ast.get_docstring(node)))
        if len(text) > 200 and num_bytes < 30_000:
            lines.append(json.dumps({"text": text}))
            num_bytes += len(text)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def expected(folder: Path) -> dict[str, Any]:
    """What the files of `folder` give."""
    from data_prep import open_dataset
    from data_prep.tokenizer.tokenizer import Tokenizer
    from trainer.checkpoint.format import CheckpointFolder, step_folder
    from trainer.checkpoint.tensors import read_weights

    manifest = open_dataset(folder / "shards").manifest
    tokenizer = Tokenizer.load(folder / "shards" / "tokenizer")
    checkpoint = step_folder(folder / "run", RESUMED_STEP)
    return {
        "manifest_digest": manifest.digest,
        "tokens": [manifest.train.tokens, manifest.valid.tokens],
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "ids": [tokenizer.encode_text(text).tolist() for text in TEXTS],
        "invisible_ids": [tokenizer.encode_text(text).tolist() for text in INVISIBLE_TEXTS],
        "first_rows": first_rows(folder),
        "weights_sha256": digest_of_tensors(read_weights(checkpoint)),
        "state": CheckpointFolder(checkpoint).read_state().state.model_dump(mode="json"),
        "logits": logits(folder),
    }


def write_order(folder: Path) -> None:
    """Write the first rows, and the losses of the steps after RESUMED_STEP, as this version of the project has them."""
    path = folder / "expected.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary) / folder.name))
        values["first_rows"] = first_rows(copy)
        train(copy)
        values |= {"losses": values["losses"] | losses(copy), "losses_computed_on": machine()}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden files of a release into a new folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument("--order", action="store_true", help="FOLDER exists: write what the order of samples gives")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.order:
        write_order(folder)
        return
    if folder.exists():
        parser.error(f"{folder} is there; golden files are written once, so name the folder of a new format")
    folder.mkdir(parents=True)
    write_corpus(folder / "corpus.jsonl")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    shards = ("shards.min_shards=1", "shards.valid_fraction=0.2", "shards.record_tokens=2000", "num_workers=1")
    tokenizer = ("--output", "tokenizer", "tokenizer.vocab_size=400", "num_workers=1")
    run(folder, "-m", "data_prep", "tokenizer", "--input", "corpus.jsonl", *tokenizer)
    run(
        folder,
        *("-m", "data_prep", "shards", "--input", "corpus.jsonl", "--tokenizer", "tokenizer", "--output", "shards"),
        *shards,
    )
    train(folder)
    run(folder, str(ROOT / "launch" / "export.py"), "--checkpoint", "run", "--output", "export")
    values = expected(folder) | {"losses": losses(folder), "losses_computed_on": machine()}
    (folder / "expected.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer", "mlruns", "mlflow.db", f"run/checkpoints/step-{MAX_STEPS:08d}"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept = {"checkpoints", "tokenizer", "config.yaml"}
    for path in (folder / "run").iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    store_once(folder)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
