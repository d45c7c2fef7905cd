"""What `encoder.py` refuses; its figures are no tests."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from data_prep.base.errors import UserError


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("encoder")


def test_a_model_of_another_family_than_the_peer_is_refused_before_it_is_made(
    encoder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["encoder.py", "--config", "modern_large"])
    monkeypatch.setattr(encoder, "make_contestants", None)
    with pytest.raises(UserError, match="--config modern_large is of family modernbert, and the peer is BERT"):
        encoder.main()


def test_models_that_do_not_fit_into_memory_are_an_error_of_one_paragraph(
    encoder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes")

    arguments = argparse.Namespace(length=64, smoke=True, overrides=[], modes=["eager", "compiled"])
    config = encoder.settings_of("bert_base", "fp32", 512, arguments)
    monkeypatch.setattr(encoder, "make_contestants", fail)
    with pytest.raises(UserError, match="4 models of .* parameters with their optimizers do not fit"):
        encoder.contestants_of(config, torch.device("cpu"), arguments)


def test_documents_have_a_length_where_none_is_given(encoder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["encoder.py"])
    arguments = encoder.parse(None)
    config = encoder.settings_of("bert_base", "fp32", 512, arguments)
    assert "mean 600 tokens" in str(encoder.DocumentLengths(arguments.document_tokens, arguments.document_sigma))
    assert config.data.sequence_length == 512


def test_a_comparison_that_is_stopped_has_left_the_workloads_before(
    encoder: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = {"tokens_per_second": 2.0, "runs_tokens_per_second": [2.0]}
    race = Mock(side_effect=[{"ours eager": figures, "transformers eager": figures}, KeyboardInterrupt])
    monkeypatch.setattr(encoder, "contestants_of", lambda *arguments: [])
    monkeypatch.setattr(encoder, "our_steps", lambda *arguments: [])
    monkeypatch.setattr(encoder.Peer, "steps", lambda *arguments: [])
    monkeypatch.setattr(encoder, "race", race)
    words = ["--smoke", "--modes", "eager", "--precision", "fp32", "--results", str(tmp_path / "results.json")]
    monkeypatch.setattr("sys.argv", ["encoder.py", *words])
    with pytest.raises(KeyboardInterrupt):
        encoder.main()
    report = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["training step, bert_base fp32, real documents"]
