"""Folders of published models that a run cannot adopt: what the command says of them, and that nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

from tests.support import plain_ranks
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import read_texts

pytestmark = pytest.mark.spawn
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
POSITIONS = 50
LARGER = (
    *("model.hidden_size=64", "model.num_hidden_layers=3", "model.num_attention_heads=4"),
    *("model.intermediate_size=100", "model.output_bias=zeros", "model.hidden_dropout_prob=0"),
    "adopt=[tokenizer,size,positions]",
)
SETTINGS = (
    *LARGER,
    *("training.max_steps=12", "checkpoint.every_steps=6", "training.deterministic=true"),
    "health.heartbeat_timeout_seconds=12",
)
ROBERTA = ("model.family=roberta", "data.sentence_pairs=none")


def published(folder: Path, texts: Sequence[str]) -> Path:
    """The folder of a RoBERTa of random weights with a tokenizer of its kind, as transformers saves both."""
    vocab_size = len(AutoTokenizer.from_pretrained(WRITERS["roberta"](folder, texts, vocab_size=900)))
    torch.manual_seed(3)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": POSITIONS + 2}
    sizes |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    RobertaForMaskedLM(RobertaConfig(**sizes)).save_pretrained(folder)
    return folder


TENSOR = "roberta.encoder.layer.1.output.dense.weight"


def _with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})

    return damage


def _without_mask_token(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8").replace("<mask>", "<hide>")
        (folder / name).write_text(text.replace("mask_token", "hide_token"), encoding="utf-8")


def _with_index(file: str) -> Callable[[Path], None]:
    """Weights in shards, of which the index takes one tensor from this file."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        names = load_file(folder / "model-00001-of-00002.safetensors")
        files = {**dict.fromkeys(names, "model-00001-of-00002.safetensors"), TENSOR: file}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    return damage


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _leave(folder: Path) -> None:
    """The settings alone are at fault."""


NOT_TILED = ("model.hidden_size=48", "model.num_attention_heads=2")
DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing tensor": (_with_tensors(lambda weights: weights.pop(TENSOR)), ()),
    "odd tensor": (_with_tensors(lambda weights: weights.update({TENSOR: weights[TENSOR][:7].contiguous()})), ()),
    "no mask token": (_without_mask_token, ()),
    "width that cannot be tiled": (_leave, NOT_TILED),
    "pickles alone": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), ()),
    "truncated": (_cut, ()),
    "missing shard": (_with_index("model-00002-of-00002.safetensors"), ()),
    "shard elsewhere": (_with_index("../model-00002-of-00002.safetensors"), ()),
    "config of no JSON": (lambda folder: (folder / "config.json").write_text("{"), ()),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), ()),
}
SAID = {
    "missing tensor": ("missing-weights", TENSOR),
    "odd tensor": ("model-not-loadable", "(7, 48)"),
    "no mask token": ("missing-special-tokens", "mask_token"),
    "width that cannot be tiled": ("size-not-tileable", "heads have 24 numbers and there 16"),
    "pickles alone": ("weights-not-safetensors", "pytorch_model.bin"),
    "truncated": ("model-not-loadable", "deserializing header"),
    "missing shard": ("damaged-model", "model-00002-of-00002.safetensors"),
    "shard elsewhere": ("damaged-model", "../model-00002-of-00002.safetensors"),
    "config of no JSON": ("damaged-model", "config.json"),
    "empty": ("not-a-model-folder", "has no config.json"),
}


@pytest.mark.parametrize(
    "damage", ["missing tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in [*DAMAGES][1:])]
)
def test_a_folder_that_cannot_be_adopted_is_refused_in_one_paragraph_and_nothing_is_written(
    damage, training, small_corpus, tmp_path
):
    """By `--dry-run` and by two ranks alike; the name of the folder is no plain word."""
    folder = published(tmp_path / "Größe 'ä' 模型", read_texts(small_corpus))
    change, settings = DAMAGES[damage]
    change(folder)
    run = training(*SETTINGS, *ROBERTA, f"init_from={folder}", *settings)
    database = Path(run.folder, "mlflow.db").read_bytes()
    code, words = SAID[damage]
    paragraphs = []
    for ranks, more in ((1, ["--dry-run"]), (2, [])):
        started = plain_ranks.start(run, ranks, *more)
        statuses = plain_ranks.finish(started)
        text = "".join(rank.output for rank in started)
        assert set(statuses) <= {1, 2} and "Traceback" not in text, text
        (line,) = {line[line.index("error: ") :] for line in text.splitlines() if "error: " in line}
        paragraphs.append(line)
    assert paragraphs[0] == paragraphs[1]
    assert words in paragraphs[0] and "Fix: " in paragraphs[0] and f"[{code}]" in paragraphs[0]
    assert not run.output_dir.exists() and Path(run.folder, "mlflow.db").read_bytes() == database
