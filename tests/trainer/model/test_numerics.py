from __future__ import annotations

import importlib
import shutil
import subprocess
import sysconfig
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from data_prep.base.processor import Processor
from tests.support.toy_run import preset_config
from trainer.config.training_settings import StageSettings
from trainer.distributed.process_group import Ranks
from trainer.model import numerics
from trainer.model.numerics import (
    SUM_OVER_RANKS,
    describe_numerics,
    fast_precision,
    missing_for_compilation,
    with_compilation_decided,
    with_own_precision,
    with_precision_decided,
)
from trainer.model.sizes import Precision

GPU_RANKS = Ranks(0, 2, 0, torch.device("cuda", 0))
CPU_RANKS = Ranks(0, 2, 0, torch.device("cpu"))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What each of two ranks lacks; nothing, until a test says otherwise."""
    lacking: list[str | None] = [None, None]
    monkeypatch.setattr(numerics, "gather_objects", lambda value, ranks: list(lacking))
    return lacking


def test_ranks_that_lack_nothing_compile(found: list[str | None]) -> None:
    config, warning = with_compilation_decided(preset_config(), GPU_RANKS)
    assert config.training.compile is True and warning is None


def test_no_rank_compiles_if_one_lacks_something_and_the_warning_names_it(found: list[str | None]) -> None:
    found[1] = "a C compiler"
    config, warning = with_compilation_decided(preset_config(), GPU_RANKS)
    assert config.training.compile is False
    assert warning is not None and "rank 1 lacks a C compiler" in warning


def test_the_cpu_and_zero_3_do_not_compile_by_themselves(found: list[str | None]) -> None:
    staged, warning = with_compilation_decided(preset_config("zero.stage=3"), GPU_RANKS)
    assert staged.training.compile is False
    assert warning is not None and "zero.stage=3" in warning and "lacks" not in warning
    found[:] = ["a CUDA device"] * 2
    config, warning = with_compilation_decided(preset_config(), CPU_RANKS)
    assert config.training.compile is False and warning is None


@pytest.mark.parametrize("wanted", [True, False])
def test_an_explicit_setting_is_kept_and_no_rank_is_asked(wanted: bool) -> None:
    given = preset_config(f"training.compile={wanted}")
    assert with_compilation_decided(given, GPU_RANKS) == (given, None)


TRITONS_DRIVER = SimpleNamespace(libcuda_dirs=lambda: ["/usr/lib"])


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host that has all that Triton needs, its only compiler clang; returns the folder of Python's headers."""
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: TRITONS_DRIVER)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return tmp_path


def test_a_host_with_all_that_triton_needs_compiles(gpu_host: Path) -> None:
    assert missing_for_compilation("cuda") is None
    assert missing_for_compilation("cpu") == "a CUDA device"


def test_a_host_without_triton_does_not_compile(gpu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert missing_for_compilation("cuda") == "the package triton"


def test_a_compiler_that_triton_does_not_look_for_is_none(gpu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "cc" else None)
    assert missing_for_compilation("cuda") == "a C compiler: gcc or clang"
    monkeypatch.setenv("CC", "cc")
    assert missing_for_compilation("cuda") is None


@pytest.mark.parametrize("named", ["icc", "", "clang -m64"])
def test_a_compiler_that_cc_names_wrongly_hides_the_others(
    named: str, gpu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", named)
    assert f"{named!r} that CC names" in str(missing_for_compilation("cuda"))


def test_headers_of_python_are_needed_where_the_compiler_finds_them(
    gpu_host: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (gpu_host / "Python.h").unlink()
    assert f"{gpu_host}/Python.h" in str(missing_for_compilation("cuda"))
    elsewhere = tmp_path_factory.mktemp("headers")
    (elsewhere / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{elsewhere}")
    assert missing_for_compilation("cuda") is None


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"),
        FileNotFoundError(2, "No such file", "/sbin/ldconfig"),
        subprocess.CalledProcessError(1, "ldconfig"),
    ],
)
def test_a_driver_that_triton_does_not_find_is_named(
    error: Exception, gpu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(libcuda_dirs=fail))
    missing = missing_for_compilation("cuda")
    assert missing is not None and str(error).split()[0] in missing and "\n" not in missing


AVX2 = ("avx", "avx2")
BF16 = (*AVX2, "avx512_bf16", "avx512f")
XEON, AMX_XEON = Processor("Xeon", "GenuineIntel", BF16), Processor("Xeon", "GenuineIntel", ("amx_bf16", *BF16))
EPYC, OLD_EPYC = Processor("EPYC", "AuthenticAMD", BF16), Processor("EPYC", "AuthenticAMD", AVX2)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (AMX_XEON, "bf16"),
        (XEON, "fp32"),
        (EPYC, "bf16"),
        (OLD_EPYC, "fp32"),
        (Processor("Neoverse", "", ("asimd", "bf16")), "fp32"),
        (Processor("unknown", "", ()), "fp32"),
    ],
)
def test_the_precision_follows_from_the_instruction_sets(processor: Processor, expected: str) -> None:
    assert fast_precision("cpu", processor) == expected
    assert fast_precision("cuda", processor) == "bf16"


def test_one_host_chooses_a_precision_for_its_own_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = preset_config("training.precision=auto")
    for processor, expected in ((XEON, "fp32"), (EPYC, "bf16")):
        monkeypatch.setattr(numerics, "this_processor", lambda processor=processor: processor)
        assert with_own_precision(asks, "cpu").training.precision == expected
        assert with_own_precision(asks, "cuda").training.precision == "bf16"
        assert with_own_precision(preset_config("training.precision=bf16"), "cpu").training.precision == "bf16"
        staged = preset_config("training.precision=auto", "zero.stage=0")
        assert with_own_precision(staged, "cuda").training.precision == "fp32", "DeepSpeed has no bf16 there"


def test_ranks_take_bf16_where_all_of_them_are_fast_in_it(found: list[str | None]) -> None:
    asks = preset_config("training.precision=auto")
    for of_ranks, expected in ((["bf16", "bf16"], "bf16"), (["bf16", "fp32"], "fp32"), (["fp32", "fp32"], "fp32")):
        found[:] = of_ranks
        config, warning = with_precision_decided(asks, CPU_RANKS)
        assert config == preset_config(f"training.precision={expected}") and warning is None


@pytest.mark.parametrize("fast", ["fp32", "bf16"])
@pytest.mark.parametrize("saved", ["fp32", "bf16"])
def test_a_run_that_moved_to_another_processor_keeps_its_precision(
    found: list[str | None], saved: Precision, fast: str
) -> None:
    found[:] = [fast, fast]
    config, warning = with_precision_decided(preset_config("training.precision=auto"), CPU_RANKS, saved)
    assert config.training.precision == saved
    if saved == fast:
        assert warning is None
    else:
        assert warning is not None and f"stays in {saved}" in warning and f"a new run would take {fast}" in warning


def test_a_precision_that_was_set_is_kept_and_no_rank_is_asked() -> None:
    for precision in ("fp32", "bf16"):
        given = preset_config(f"training.precision={precision}")
        assert with_precision_decided(given, CPU_RANKS, "bf16") == (given, None)


def test_a_checkpoint_names_the_attention_kernels_of_all_stages_and_torchs_build() -> None:
    sizes = {"steps": 5, "micro_batch_tokens": 512, "global_batch_tokens": 1024}
    stages = tuple(StageSettings(sequence_length=length, **sizes) for length in (64, 256))
    config = preset_config()
    training = config.training.model_copy(update={"stages": stages})
    staged = config.model_copy(update={"training": training})
    assert describe_numerics(staged, CPU_RANKS) == {
        "attention kernel": "masked, by_sequence",
        "torch build": torch.__version__,
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.micro_batch_tokens=6144", "training.global_batch_tokens=12_288"], None),
        (["training.micro_batch_tokens=16_384", "training.global_batch_tokens=32_768"], "in chunks"),
        (["training.micro_batch_tokens=16_384", "training.global_batch_tokens=16_384"], None),  # half for each rank
        (
            ["training.micro_batch_tokens=16_384", "training.global_batch_tokens=32_768", "training.precision=fp16"],
            None,
        ),
    ],
)
def test_a_checkpoint_tells_of_a_loss_in_chunks(overrides: list[str], expected: str | None) -> None:
    config = preset_config("training.precision=fp32", "model.vocab_size=8192", *overrides)
    assert describe_numerics(config, CPU_RANKS).get("loss over the vocabulary") == expected


@pytest.mark.parametrize(
    ("optimizer", "ranks", "expected"),
    [("stable_adamw", GPU_RANKS, "foreach"), ("stable_adamw", CPU_RANKS, None), ("adamw", GPU_RANKS, None)],
)
def test_a_checkpoint_of_a_gpu_names_the_kernels_of_stable_adamw(optimizer, ranks, expected) -> None:
    config = preset_config("training.precision=fp32", f"optimizer.name={optimizer}")
    assert describe_numerics(config, ranks).get("kernels of StableAdamW") == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "contributions in bf16, sums in fp32"),
        (["deepspeed={communication_data_type: fp32}"], "contributions in fp32, sums in fp32"),
        (["deepspeed={bf16: {immediate_grad_update: false}}"], "DeepSpeed in fp32"),
        (["deepspeed={bfloat16: {immediate_grad_update: auto}}"], "contributions in bf16, sums in fp32"),
        (["zero.stage=2"], "DeepSpeed in fp32"),
        (["zero.stage=2", "deepspeed={communication_data_type: bf16}"], "DeepSpeed in bf16"),
        (["zero.offload_optimizer=true"], "DeepSpeed in fp32"),
        (["training.precision=fp16"], "DeepSpeed in fp32"),
        (["training.precision=fp32"], None),
    ],
)
def test_a_checkpoint_says_how_gradients_of_16_bits_are_summed_over_ranks(overrides, expected, monkeypatch) -> None:
    monkeypatch.setattr(numerics, "ranks_per_node", lambda ranks: 1)
    config = preset_config("training.precision=bf16", *overrides)
    assert describe_numerics(config, CPU_RANKS).get(SUM_OVER_RANKS) == expected
    monkeypatch.setattr(numerics, "ranks_per_node", lambda ranks: 8)
    of_nodes = f"{expected}, first in nodes of 8 ranks" if "contributions" in str(expected) else expected
    assert describe_numerics(config, CPU_RANKS).get(SUM_OVER_RANKS) == of_nodes
