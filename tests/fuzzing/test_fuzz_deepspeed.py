"""A user's DeepSpeed file after damage: its settings beside the run's own, or a refusal before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.mutations import fuzz, mutated_document, says_the_same
from tests.fuzzing.watching import read_or_refuse, temporary_folder
from trainer import load_config
from trainer.engine.deepspeed_config import deepspeed_config, with_deepspeed_file
from trainer.preflight.deepspeed_sections import check_values

RUN = load_config("tiny_cpu", ["zero.stage=1"])
GIVEN = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000, "overlap_comm": False},
    "bf16": {"enabled": "auto"},
    "steps_per_print": 7,
    "gradient_predivide_factor": 2.0,
    "wall_clock_breakdown": True,
    "log_level": "info",
    "flops_profiler": {"enabled": False, "profile_step": 3},
    "comms_logger": {"enabled": False, "prof_ops": ["all_reduce"]},
}
OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_RENAMED = {"bfloat16": "bf16"}


@pytest.fixture(scope="module", autouse=True)
def _deepspeed() -> None:
    """Import it outside the watch: it looks for compilers and devices."""
    check_values(RUN.model_copy(update={"deepspeed": GIVEN}), 2, "cpu")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says, and what DeepSpeed will be given."""
    config = with_deepspeed_file(RUN, str(path))
    check_values(config, 2, "cpu")
    assert config.deepspeed is not None
    json.dumps(config.deepspeed, allow_nan=False).encode()
    return config.deepspeed, deepspeed_config(config, 2)


def without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {_RENAMED.get(name, name): without_auto(item) for name, item in value.items() if item != "auto"}


def check(found: tuple[dict[str, Any], dict[str, Any]], content: bytes) -> None:
    """Whether what is owned is the run's, and all else what the file says."""
    said, settings = found
    own = deepspeed_config(RUN, 2)
    assert says_the_same(said, json.loads(content))
    assert all(settings[name] == own[name] for name in OWNED)
    assert settings["zero_optimization"]["stage"] == 1
    free = {name: value for name, value in without_auto(said).items() if name not in (*OWNED, "optimizer")}
    assert says_the_same(settings, free)


@fuzz(150)
@given(content=mutated_document(GIVEN))
def test_a_damaged_file_is_refused_or_merged_as_it_stands(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("deepspeed") / "ds.json"
    path.write_bytes(content)
    found = read_or_refuse(lambda: read(path), path.parent, temporary_folder())
    if found is not None:
        check(found, content)


@fuzz(50)
@given(data=st.data())
def test_a_section_that_is_damaged_alone_is_refused_or_merged_as_it_stands(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(name for name, value in GIVEN.items() if isinstance(value, dict))))
    path = tmp_path_factory.mktemp("deepspeed") / "ds.json"
    section = data.draw(mutated_document({name: GIVEN[name]}))
    path.write_bytes(section)
    found = read_or_refuse(lambda: read(path), path.parent, temporary_folder())
    if found is not None:
        check(found, section)


def test_a_whole_file_is_merged(tmp_path: Path) -> None:
    content = json.dumps(GIVEN).encode()
    (tmp_path / "ds.json").write_bytes(content)
    found = read_or_refuse(lambda: read(tmp_path / "ds.json"), tmp_path, temporary_folder())
    assert found is not None and found[1]["zero_optimization"]["reduce_bucket_size"] == 1_000
    check(found, content)
