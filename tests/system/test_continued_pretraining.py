"""Training goes on from a checkpoint made elsewhere, with the tokenizer it came with, from shards to an export."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    EuroBertConfig,
    EuroBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    pipeline,
)

from data_prep import Tokenizer
from tests.benchmarks.padded_batches import to_padded
from tests.support import fork_server
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import prepared, read_texts
from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set
from trainer.hf_export.export import export_checkpoint
from trainer.inference.checkpoint_model import load_checkpoint
from trainer.inference.fill_mask import FillMask
from trainer.registry.registration import register

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN = str(REPOSITORY / "launch" / "pretrain.py")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
ROBERTAS = {
    "roberta": (RobertaConfig, RobertaForMaskedLM),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaForMaskedLM),
}
pytestmark = pytest.mark.spawn


@dataclass(frozen=True)
class Continued:
    """A checkpoint from elsewhere, and a run that went on from it."""

    kind: str
    folder: Path
    theirs: PreTrainedModel
    shards: Path
    config: RunConfig
    output: str
    """What the run said."""


def make_theirs(kind: str, tokenizer: Tokenizer) -> PreTrainedModel:
    torch.manual_seed(3)
    special = tokenizer.special_tokens
    common: dict[str, Any] = {**SIZES, "vocab_size": tokenizer.vocab_size, "pad_token_id": special.pad}
    if kind == "eurobert":
        ids = {"bos_token_id": special.cls, "eos_token_id": special.sep, "mask_token_id": special.mask}
        rope = {"rope_type": "default", "rope_theta": 250_000.0}
        model: PreTrainedModel = EuroBertForMaskedLM(
            EuroBertConfig(**common, **ids, num_key_value_heads=1, rope_parameters=rope)
        )
    elif kind == "modernbert":
        ids = {"bos_token_id": special.cls, "eos_token_id": special.sep}
        ids |= {"cls_token_id": special.cls, "sep_token_id": special.sep}
        model = ModernBertForMaskedLM(ModernBertConfig(**common, **ids, local_attention=8))
    elif kind in ROBERTAS:
        common |= {"max_position_embeddings": 64 + special.pad + 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        common |= {"bos_token_id": special.cls, "eos_token_id": special.sep, "attention_probs_dropout_prob": 0.0}
        config_class, model_class = ROBERTAS[kind]
        model = model_class(config_class(**common, hidden_dropout_prob=0.0))
    else:
        config = BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = BertForPreTraining(config) if kind == "bert" else BertForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.get_input_embeddings().weight[special.pad] = 0.0
    return model.eval()


def command(*arguments: str, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = fork_server.run(arguments, cwd, environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def write_config(folder: Path, shards: Path, init_from: str, kind: str, vocab_size: int) -> RunConfig:
    """The configuration of three steps, as run.yaml."""
    model: dict[str, Any] = {**SIZES, "family": "bert", "vocab_size": vocab_size, "hidden_dropout_prob": 0.0}
    if kind == "modernbert":
        model |= {"family": "modernbert", "local_attention": 8}
    if kind == "eurobert":  # whose decoder has no bias to shut rows that only pad with
        model |= {"family": "eurobert", "num_key_value_heads": 1, "pad_vocab_size_to_multiple_of": 1}
    if kind in ROBERTAS:
        model |= {"family": kind}
    values = {
        "output_dir": "run",
        "init_from": init_from,
        "model": model,
        "data": {
            "shards": str(shards),
            "sequence_length": 64,
            "sentence_pairs": "next_sentence" if kind == "bert" else "none",
            "mask_unit": "word",
            "num_workers": 0,
        },
        "training": {"max_steps": 3, "global_batch_tokens": 512, "micro_batch_tokens": 512, "precision": "fp32"},
        "optimizer": {"learning_rate": 1.0e-3},
        "schedule": {"warmup_steps": 0},
        "logging": {"every_steps": 1},
        "evaluation": {"max_tokens": 2112},
        "tracking": {"uri": "sqlite:///mlflow.db"},
    }
    (folder / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    return load_config(folder / "run.yaml", [])


@pytest.fixture(
    scope="module",
    params=[
        *("bert", "roberta"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("modernbert", "bert without pairs", "eurobert", "xlm-roberta")
        ),
    ],
)
def continued(request, small_corpus: Path, empty_database: Path, tmp_path_factory) -> Continued:
    kind, work = request.param, tmp_path_factory.mktemp("continued")
    shutil.copy(empty_database, work / "mlflow.db")
    texts = read_texts(small_corpus)
    writer = "byte level" if kind == "modernbert" else kind if kind in ROBERTAS else "wordpiece"
    folder = WRITERS[writer](work / "checkpoint", texts, vocab_size=1_001)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size % 64
    theirs = make_theirs(kind, tokenizer)
    theirs.save_pretrained(folder)
    shards = work / "shards"
    prepared(small_corpus, tokenizer, shards, "shards.valid_fraction=0.1")
    config = write_config(work, shards, str(folder), kind, tokenizer.vocab_size)
    output = command(PRETRAIN, "--config", "run.yaml", cwd=work)
    return Continued(kind, work, theirs, shards, config, output)


@pytest.fixture(scope="module")
def exported(continued: Continued, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exported") / "model"
    assert "tokenized alike" in str(export_checkpoint(continued.folder / "run", output).parity)
    return output


def losses(run: Path) -> list[float]:
    points = [json.loads(line) for line in (run / "tracking" / "points.jsonl").read_text().splitlines()]
    found = {point["s"]: point["m"]["train/loss"] for point in points if "train/loss" in point["m"]}
    return [found[step] for step in sorted(found)]


def first_batch(continued: Continued) -> dict[str, torch.Tensor]:
    """The first global batch of the run, padded as transformers takes it."""
    config = continued.config
    (stage,) = config.stages
    shard_sets = [open_shard_set(str(continued.shards))]
    seed, position = config.training.seed, Position(0, 0, 0)
    loader = Loader(shard_sets, stage, position, seed)
    (batch,) = next(iter(loader)).micro_batches
    return to_padded(batch)


def test_the_first_loss_is_the_checkpoints_on_the_same_batch(continued):
    inputs = first_batch(continued)
    special = Tokenizer.load(continued.shards / "tokenizer").special_tokens
    assert (inputs["input_ids"][:, 0] == special.cls).all()
    assert (inputs["input_ids"] == special.mask).any()
    assert not torch.isin(inputs["labels"], torch.tensor(special.ids)).any()
    if not isinstance(continued.theirs, BertForPreTraining):
        del inputs["next_sentence_label"]
    if continued.kind in ("modernbert", "eurobert"):
        del inputs["token_type_ids"]
    with torch.no_grad():
        expected = continued.theirs(**inputs).loss.item()
    assert losses(continued.folder / "run")[0] == pytest.approx(expected, rel=1e-5)


def test_the_run_says_what_it_began_with(continued):
    assert f"initializing from {continued.folder / 'checkpoint'}" in continued.output
    adds_rows = f"mlm_head.bias from row {continued.theirs.config.vocab_size:,} of" in continued.output
    assert adds_rows == (continued.kind != "eurobert")
    assert "not checked" not in continued.output


def test_the_export_is_a_checkpoint_of_the_same_kind_with_the_same_tokenizer(continued, exported):
    before, after = (AutoTokenizer.from_pretrained(path) for path in (continued.folder / "checkpoint", exported))
    text = f"The old  river: naïve {before.mask_token} crossed the bridge.\n\nToday!"
    assert before(text)["input_ids"] == after(text)["input_ids"]
    model = AutoModelForMaskedLM.from_pretrained(exported)
    assert model.config.pad_token_id == continued.theirs.config.pad_token_id == after.pad_token_id
    with torch.no_grad():
        ids = {name: tensor for name, tensor in after(text, return_tensors="pt").items() if name != "token_type_ids"}
        logits = model(**ids).logits
    assert not (logits.argmax(-1) >= len(after)).any()
    found = pipeline("fill-mask", model=str(exported))(f"The {after.mask_token} crossed the bridge.", top_k=len(after))
    assert {guess["token"] for guess in found} == set(range(len(after)))


def test_masks_are_filled_from_checkpoint_and_export_alike(continued, exported):
    models = load_checkpoint(continued.folder / "run"), FillMask.load(exported)
    first, second = (model.predict("The [MASK] crossed the bridge.").masks[0] for model in models)
    assert [guess.token_id for guess in first] == [guess.token_id for guess in second]
    tokenizer = Tokenizer.load(exported)
    assert not {guess.token_id for guess in first} & set(tokenizer.special_tokens.ids)
    for guess in first:
        assert guess.begins_word == tokenizer.pieces[guess.token_id].startswith("\u2581")


@pytest.mark.slow
def test_the_export_begins_another_run_with_the_same_shards_from_the_registry_too(continued, exported, tmp_path):
    register(exported, "continued", alias="champion", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    vocab_size = continued.config.model.vocab_size
    write_config(tmp_path, continued.shards, "models:/continued@champion", continued.kind, vocab_size)
    command(PRETRAIN, "--config", "run.yaml", cwd=tmp_path)
    assert losses(tmp_path / "run")[0] < losses(continued.folder / "run")[0]
