from __future__ import annotations

import shutil
from importlib import util

import pytest
import torch

from data_prep.settings import load_settings
from trainer import numerics
from trainer.config import RunConfig
from trainer.numerics import describe_numerics, missing_for_compilation, with_compilation_decided
from trainer.ranks.distributed import Ranks
from trainer.settings.training import Phase

GPU_RANKS = Ranks(0, 2, 0, torch.device("cuda", 0))
CPU_RANKS = Ranks(0, 2, 0, torch.device("cpu"))


def config_of(*overrides: str) -> RunConfig:
    return load_settings(RunConfig, "tiny_cpu", ["data.shards=x", *overrides])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What each of two ranks lacks; nothing, until a test says otherwise."""
    lacking: list[str | None] = [None, None]
    monkeypatch.setattr(numerics, "gather_objects", lambda value, ranks: list(lacking))
    return lacking


def test_ranks_that_lack_nothing_compile(found: list[str | None]) -> None:
    config, warning = with_compilation_decided(config_of(), GPU_RANKS)
    assert config.training.compile is True and warning is None


def test_where_one_rank_lacks_something_none_compiles_and_the_warning_names_it(found: list[str | None]) -> None:
    found[1] = "a C compiler"
    config, warning = with_compilation_decided(config_of(), GPU_RANKS)
    assert config.training.compile is False
    assert warning is not None and "rank 1 lacks a C compiler" in warning


def test_the_cpu_and_zero_3_do_not_compile_by_themselves(found: list[str | None]) -> None:
    staged, warning = with_compilation_decided(config_of("zero.stage=3"), GPU_RANKS)
    assert staged.training.compile is False and warning is not None
    found[:] = ["a CUDA device"] * 2
    config, warning = with_compilation_decided(config_of(), CPU_RANKS)
    assert config.training.compile is False and warning is None


@pytest.mark.parametrize("wanted", [True, False])
def test_an_explicit_setting_is_kept_and_no_rank_is_asked(wanted: bool) -> None:
    given = config_of(f"training.compile={wanted}")
    assert with_compilation_decided(given, GPU_RANKS) == (given, None)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_for_compilation("cpu") == "a CUDA device"
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert missing_for_compilation("cuda") == "the package triton"
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C compiler" in str(missing_for_compilation("cuda"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    assert missing_for_compilation("cuda") is None


def test_a_checkpoint_names_the_attention_kernels_of_all_phases_and_torchs_build() -> None:
    sizes = {"steps": 5, "micro_batch_tokens": 512, "global_batch_tokens": 1024}
    phases = tuple(Phase(sequence_length=length, **sizes) for length in (64, 256))
    config = config_of()
    training = config.training.model_copy(update={"phases": phases})
    staged = config.model_copy(update={"training": training})
    assert describe_numerics(staged, torch.device("cpu")) == {
        "attention kernel": "masked, by_sequence",
        "torch build": torch.__version__,
    }
