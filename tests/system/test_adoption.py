"""Runs that begin with the weights of published models of other tokenizers and sizes: ranks, ZeRO stages, kills, and
folders that cannot be adopted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from tests.support import plain_ranks
from tests.support.foreign_tokenizers import WRITERS, write_decoder
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
GROUPED = ("model.family=eurobert", "model.num_key_value_heads=2", "data.sentence_pairs=none")
OURS: dict[str, tuple[str, ...]] = {
    "bert": (),
    "roberta": ("model.family=roberta", "data.sentence_pairs=none"),
    "xlm-roberta": ("model.family=xlm-roberta", "data.sentence_pairs=none"),
    "eurobert": GROUPED,
    "llama": (*GROUPED, "model.global_rope_theta=10000"),
}
"""The settings of the model that the weights of each kind become."""
WRITER_OF = {"bert": "wordpiece", "eurobert": "byte level"}
LEARNED = "positions: 50 rows are copied, and rows 50 to 63 repeat them"
ROTARY = "positions: model.max_position_embeddings from 50 to 64; rotary ones have no weights"


def published(kind: str, folder: Path, texts: Sequence[str]) -> Path:
    """The folder of a model of random weights with a tokenizer of its kind, as transformers saves both."""
    writer = write_decoder if kind == "llama" else WRITERS[WRITER_OF.get(kind, kind)]
    tokenizer = AutoTokenizer.from_pretrained(writer(folder, texts, vocab_size=900))
    torch.manual_seed(3)
    model_of(kind, len(tokenizer), tokenizer).save_pretrained(folder)
    return folder


def model_of(kind: str, vocab_size: int, tokenizer: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": POSITIONS}
    grouped = {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    if kind == "bert":
        return BertForPreTraining(BertConfig(**sizes))
    if kind == "eurobert":
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "mask")}
        ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        rope = {"rope_type": "default", "rope_theta": 250_000.0}
        return EuroBertForMaskedLM(EuroBertConfig(**sizes, **grouped, **ids, rope_parameters=rope))
    if kind == "llama":
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        return LlamaForCausalLM(LlamaConfig(**sizes, **grouped, rope_parameters=rope))
    sizes |= {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    sizes |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    if kind == "roberta":
        return RobertaForMaskedLM(RobertaConfig(**sizes))
    return XLMRobertaForMaskedLM(XLMRobertaConfig(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "zero"), [("bert", 3), ("roberta", 0), ("xlm-roberta", 1), ("eurobert", 2), ("llama", 3)]
)
def test_adopted_weights_are_the_same_at_any_stage_and_number_of_ranks_and_resume_bitwise(
    kind, zero, training, small_corpus, tmp_path
):
    """A smaller model of another tokenizer, fewer layers and shorter positions; one run goes from 1 rank to 2 to 1.

    The folder may go once the run has begun.
    """
    folder = published(kind, tmp_path / "base", read_texts(small_corpus))
    settings = (*SETTINGS, *OURS[kind], f"init_from={folder}")
    straight, killed, one, moved = (training(*settings) for _ in range(4))
    said = plain_ranks.run(straight, 2, f"zero.stage={zero}")
    positions = ROTARY if kind in ("eurobert", "llama") else LEARNED
    for line in ("tokenizer: ", "size: layers 0, 1, 1 of 2 become 0 to 2; tiled", positions):
        assert f"adopting {line}" in said
    plain_ranks.finish(plain_ranks.start(killed, 2, f"zero.stage={zero}", trouble={"kill": {"step": 9}}))
    plain_ranks.run(one, 1, f"zero.stage={3 - zero}")
    expected = plain_ranks.losses(straight)
    assert len(expected) == 12 and plain_ranks.losses(one) == pytest.approx(expected, rel=2e-5)
    for ranks, stage, step in ((1, 1, 7), (2, 2, 11)):
        changes, trouble = (f"zero.stage={stage}", "checkpoint.every_steps=3"), {"kill": {"rank": 0, "step": step}}
        plain_ranks.finish(plain_ranks.start(moved, ranks, *changes, trouble=trouble))
    shutil.rmtree(folder)
    assert "resuming after step 9" in plain_ranks.run(moved, 1, f"zero.stage={zero}")
    assert plain_ranks.losses(moved) == pytest.approx(expected, rel=2e-5)
    resumed = plain_ranks.run(killed, 2, f"zero.stage={zero}")
    assert "resuming after step 6" in resumed and "adopting" not in resumed
    assert plain_ranks.losses(killed) == expected
    assert plain_ranks.final_tensors(killed) == plain_ranks.final_tensors(straight)


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
    "truncated": ("damaged-model", "model.safetensors is not a whole file of weights"),
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
    folder = published("roberta", tmp_path / "Größe 'ä' 模型", read_texts(small_corpus))
    change, settings = DAMAGES[damage]
    change(folder)
    run = training(*SETTINGS, *OURS["roberta"], f"init_from={folder}", *settings)
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
