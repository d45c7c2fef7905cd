from __future__ import annotations

import subprocess
import sys

import pytest

from data_prep.errors import UsageError
from data_prep.settings import load_settings
from trainer.config import RunConfig
from trainer.preflight.deepspeed_sections import check_sections


def config_with(deepspeed: dict) -> RunConfig:
    return load_settings(RunConfig, "tiny_cpu").model_copy(update={"deepspeed": deepspeed})


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        ({"zero_optimization": {"reduce_bucketsize": 3}}, "zero_optimization.reduce_bucketsize .*reduce_bucket_size"),
        ({"zero_optimization": {"reduce_bucket_size": "x"}}, "zero_optimization.reduce_bucket_size='x'"),
        ({"bf16": {"enabld": False}}, "bf16.enabld .*did you mean enabled"),
        ({"bfloat16": {"enabld": False}}, "bf16.enabld"),
        ({"tensorboard": {"outputpath": "x"}}, "tensorboard.outputpath .*output_path"),
    ],
)
def test_what_deepspeed_does_not_know_in_a_section_is_told_with_the_nearest_name(deepspeed, said):
    with pytest.raises(UsageError, match=said):
        check_sections(config_with(deepspeed), 2, "cpu")


def test_known_settings_and_auto_pass():
    sections = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": "auto"}, "fp16": {"hysteresis": 4}}
    check_sections(config_with(sections | {"wall_clock_breakdown": True}), 2, "cpu")
    check_sections(config_with({}), 2, "cpu")


@pytest.mark.spawn
def test_without_sections_deepspeed_is_not_imported_for_it():
    code = """
import sys
sys.modules["deepspeed"] = None
from data_prep.settings import load_settings
from trainer.config import RunConfig
from trainer.preflight.deepspeed_sections import check_sections
check_sections(load_settings(RunConfig, "tiny_cpu", ["deepspeed={steps_per_print: 10}"]), 1, "cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
