"""A Hugging Face folder after damage to one of its files: the model that its files tell of, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

from tests.fuzzing.mutations import damage, fuzz, says_the_same
from tests.fuzzing.sealed import damaged_tensors
from tests.fuzzing.watching import read_or_refuse, temporary_folder
from tests.support.tiny_hugging_face import build
from trainer.finetuning.examples import Examples
from trainer.finetuning.fitted_card import FitFacts
from trainer.finetuning.fitted_model import FittedModel, read_facts
from trainer.inference.embedding import Embedder
from trainer.inference.fill_mask import FillMask
from trainer.inference.next_sentence import NextSentence
from trainer.inference.pulled_model import pull
from trainer.model.model_folder import FINETUNE_FILE, PROVENANCE_FILE, data_lineage, read_provenance

WEIGHTS, CONFIG, TOKENIZER, TOKENIZER_CONFIG = (
    *("model.safetensors", "config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
TEXTS = ["the cat sat on a mat .", "it was [MASK] day"]
PROVENANCE = {"data_digests": {"shards": "0" * 64}, "data_lineage": ["1" * 64], "scores": {"valid/f1": 0.5}}
FACTS = FitFacts(
    task="classification",
    base_model="models:/toy@one",
    variant="full",
    text_column="text",
    pair_column=None,
    label_column="label",
    max_length=16,
    learning_rate=1e-3,
    seed=0,
    best_epoch=1,
    num_examples={"train": 8},
    valid_scores={"accuracy": 0.5},
    scores={"accuracy": 0.5},
    scored_on="test",
    train_sha256="0" * 64,
)


class Found(NamedTuple):
    """A loaded model, what it was loaded with, and numbers that it gave."""

    model: Any
    numbers: np.ndarray
    said: dict[str, Any]


def fill_masks(folder: Path) -> Found:
    model = FillMask.load(folder)
    found = model.predict("the [MASK] sat on a mat .", top_k=3)
    return Found(model.model, np.array([one.probability for one in found.masks[0]]), {})


def embed(folder: Path) -> Found:
    model = Embedder.load(folder)
    return Found(model.model, model.embed(TEXTS).vectors, {})


def judge_pairs(folder: Path) -> Found:
    model = NextSentence.load(folder)
    return Found(model.model, np.array([model.predict(*TEXTS).probability]), {})


def classify(folder: Path) -> Found:
    model = FittedModel.load(folder)
    found, _ = model.predict(Examples(list(TEXTS), None, None))
    facts = read_facts(folder)
    assert facts is not None
    said = {"task": model.task.name, "text_column": facts.text_column, "label_column": facts.label_column}
    return Found(model.model, np.array([one.probability for one in found]), said)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build(tmp_path_factory.mktemp("pretrained") / "model")
    (folder / "training_config.yaml").write_text("data:\n  sentence_pairs: sentence_order\n")
    (folder / PROVENANCE_FILE).write_text(json.dumps(PROVENANCE))
    return folder


@pytest.fixture(scope="module")
def fitted(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(pretrained, tmp_path_factory.mktemp("fitted") / "model"))
    config = BertConfig.from_pretrained(pretrained, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / FINETUNE_FILE).write_text(json.dumps(asdict(FACTS)))
    return folder


USES: dict[str, tuple[Callable[[Path], Found], str]] = {
    "fill": (fill_masks, "pretrained"),
    "embed": (embed, "pretrained"),
    "pairs": (judge_pairs, "pretrained"),
    "classify": (classify, "fitted"),
}
_OF_THE_ENCODER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def check(found: Found, folder: Path) -> None:
    """Whether the model is the one that the files tell of, and its numbers are numbers."""
    assert np.isfinite(found.numbers).all()
    config = json.loads((folder / CONFIG).read_bytes())
    for name in _OF_THE_ENCODER:
        assert name not in config or says_the_same(getattr(found.model.config, name), config[name]), name
    stored = safetensors.torch.load((folder / WEIGHTS).read_bytes())
    loaded = found.model.state_dict()
    named = {name: stored[key] for name in loaded for key in (name, f"bert.{name}") if key in stored}
    assert len(named) > 10
    for name, weight in named.items():
        assert torch.equal(weight.float(), loaded[name]), name


@pytest.mark.parametrize("use", USES)
@fuzz(12, slow=True)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_gives_the_model_that_it_describes(
    data: st.DataObject, use: str, pretrained: Path, fitted: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load, source = USES[use]
    whole = {"pretrained": pretrained, "fitted": fitted}[source]
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "model"))
    names = [CONFIG, CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, WEIGHTS]
    names += ["training_config.yaml"] if use == "pairs" else [FINETUNE_FILE] if use == "classify" else []
    name = data.draw(st.sampled_from(names))
    if name == WEIGHTS:
        (folder / name).write_bytes(data.draw(damaged_tensors((folder / name).read_bytes())))
    else:
        damage(data, folder / name)
    found = read_or_refuse(lambda: load(pull(str(folder))), folder, temporary_folder())
    if found is not None:
        check(found, folder)
        if name == FINETUNE_FILE:
            facts = json.loads((folder / name).read_bytes())
            assert all(says_the_same(value, facts[key]) for key, value in found.said.items())


@fuzz(100)
@given(data=st.data())
def test_damaged_provenance_is_refused_or_read_as_it_stands(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("provenance")
    path = folder / PROVENANCE_FILE
    path.write_text(json.dumps(PROVENANCE))
    damage(data, path)
    found = read_or_refuse(lambda: (read_provenance(folder), data_lineage(read_provenance(folder))), folder)
    if found is not None:
        said = json.loads(path.read_bytes())
        assert found[0] == (said if isinstance(said, dict) else {})
        assert all(isinstance(digest, str) for digest in found[1])


def test_whole_folders_are_loaded(pretrained: Path, fitted: Path) -> None:
    for load, source in USES.values():
        folder = {"pretrained": pretrained, "fitted": fitted}[source]
        found = read_or_refuse(lambda load=load, folder=folder: load(pull(str(folder))), folder, temporary_folder())
        assert found is not None
        check(found, folder)
