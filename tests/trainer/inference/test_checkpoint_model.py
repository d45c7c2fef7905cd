"""Masks filled by our own model: as the export does, and where there can be no export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from launch.fill_mask import open_model
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.hf_export.export import export_model
from trainer.hf_export.export_source import ExportSource
from trainer.hf_export.model_card import TrainingFacts
from trainer.inference import checkpoint_model
from trainer.inference.fill_mask import FillMask
from trainer.objectives.pretraining import PretrainingModel

TEXT = "the old river [MASK] the narrow [MASK] at night."


def make_source(tokenizer_folder: Path, **model: Any) -> ExportSource:
    sizes = {"vocab_size": 800, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    config = tiny_config("runs/one", model={**sizes, **model})
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + float("norm.weight" in name)
        for name, parameter in PretrainingModel(config.model).named_parameters()
    }
    return ExportSource(config, weights, tokenizer_folder, TrainingFacts())


def open_run(source: ExportSource, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FillMask:
    (folder / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(checkpoint_model, "read_source", lambda checkpoint: source)
    return open_model(str(folder), None)


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert", "roberta", "xlm-roberta"])
def test_a_checkpoint_fills_masks_as_its_export_does(small_tokenizer, tmp_path, monkeypatch, family):
    source = make_source(small_tokenizer, family=family)
    ours_model = open_run(source, tmp_path / "run", monkeypatch)
    export_model(source.config, source.weights, small_tokenizer, tmp_path / "out")
    theirs_model = FillMask.load(tmp_path / "out")
    ours, theirs = ours_model.predict(TEXT), theirs_model.predict(TEXT)
    assert ours.filled == theirs.filled and len(ours.masks) == 2
    for mine, other in zip(ours.masks, theirs.masks, strict=True):
        assert [candidate.token_id for candidate in mine] == [candidate.token_id for candidate in other]
        assert [c.probability for c in mine] == pytest.approx([c.probability for c in other], rel=1e-4)
    generated = [model.generate(TEXT, 4, temperature=0, any_rate=True) for model in (ours_model, theirs_model)]
    assert generated[0].filled == generated[1].filled and len(generated[0].tokens) == 8


@pytest.mark.long
def test_a_checkpoint_whose_configuration_describes_more_than_the_memory_is_refused(
    small_tokenizer, tmp_path, monkeypatch
):
    source = make_source(small_tokenizer)
    sizes = {"hidden_size": 2**17, "vocab_size": 2**32, "intermediate_size": 2**20, "num_hidden_layers": 1_000}
    huge = source.config.model.model_copy(update=sizes)
    source = replace(source, config=source.config.model_copy(update={"model": huge}))
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        open_run(source, tmp_path / "run", monkeypatch)


def test_a_model_that_no_class_of_transformers_computes_fills_masks(small_tokenizer, tmp_path, monkeypatch):
    source = make_source(small_tokenizer, family="custom", norm="rmsnorm", position_embedding="sinusoidal")
    model = open_run(source, tmp_path / "run", monkeypatch)
    assert all(len(candidates) == 5 for candidates in model.predict(TEXT).masks)
    assert len(model.predict("a " * 60 + "[MASK]").masks) == 1  # longer than the model takes: a window of it
