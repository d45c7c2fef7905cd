from __future__ import annotations

import subprocess
import sys

import pytest

from data_prep.base.errors import UsageError
from tests.support.doctor import findings_of
from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.preflight.deepspeed_sections import check_output_file, check_values


def config_with(deepspeed: dict) -> RunConfig:
    return load_config("tiny_cpu").model_copy(update={"deepspeed": deepspeed})


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        ({"zero_optimization": {"reduce_bucketsize": 3}}, "zero_optimization.reduce_bucketsize .*reduce_bucket_size"),
        ({"zero_optimization": {"reduce_bucket_size": "x"}}, "zero_optimization.reduce_bucket_size='x'"),
        ({"bf16": {"enabld": False}}, "bf16.enabld .*did you mean enabled"),
        ({"bfloat16": {"enabld": False}}, "bf16.enabld"),
        ({"flops_profiler": {"profile_stepp": 2}}, "flops_profiler.profile_stepp .*did you mean profile_step"),
    ],
)
def test_unknown_deepspeed_settings_are_reported_with_the_nearest_name(deepspeed, said):
    with pytest.raises(UsageError, match=said):
        check_values(config_with(deepspeed), 2, "cpu")


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        ({"wall_clock_breakdown": "no"}, "wall_clock_breakdown='no' must be true or false"),
        ({"steps_per_print": "x"}, "steps_per_print='x' must be an integer"),
        ({"log_level": "loud"}, "log_level='loud' must be one of debug, info"),
        ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan must be a number above 0"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0 must be a number above 0"),
        ({"communication_data_type": "bfloat16"}, "communication_data_type='bfloat16' contradicts .* 'fp32'"),
        ({"comms_logger": 3}, "comms_logger=3 must be a mapping"),
        ({"flops_profiler": {"enabled": "maybe"}}, "flops_profiler.enabled='maybe'"),
        ({"timers": {"throughput": {"enabled": "x"}}}, "enabled Input should be a valid boolean"),
    ],
)
def test_values_of_a_wrong_type_are_reported_before_the_ranks_meet(deepspeed, said):
    with pytest.raises(UsageError, match=said):
        check_values(config_with(deepspeed), 2, "cpu")


def test_output_that_cannot_be_written_is_refused_and_nothing_is_left_of_the_attempt(tmp_path):
    (tmp_path / "file").touch()
    for name in (tmp_path, tmp_path / "file" / "profile.txt", "/proc/logs/profile.txt"):
        config = config_with({"flops_profiler": {"enabled": True, "output_file": str(name)}})
        check_values(config, 2, "cpu")
        with pytest.raises(UsageError, match="output_file=.* cannot be written .*: name another"):
            check_output_file(config)
    check_output_file(config_with({"flops_profiler": {"enabled": True, "output_file": str(tmp_path / "new" / "a")}}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_there_is_asked_itself_and_not_its_folder(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: pytest.fail(f"tries {dir}"))
    profile = {"flops_profiler": {"enabled": True, "output_file": "/dev/null"}}
    check_output_file(config_with(profile))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match="permission denied"):
        check_output_file(config_with(profile))


def test_the_doctor_only_warns_of_what_the_hosts_of_the_run_may_have():
    found = findings_of(config_with({"flops_profiler": {"enabled": True, "output_file": "/proc/logs"}}), "deepspeed")
    assert [finding.level for finding in found] == ["ok", "warn"] and "cannot be written" in found[1].text
    assert "ignore this if the run starts on hosts that have it" in found[1].text


def test_known_settings_and_auto_pass():
    sections = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": "auto"}, "fp16": {"hysteresis": 4}}
    check_values(config_with(sections | {"wall_clock_breakdown": True}), 2, "cpu")
    check_values(config_with({"wall_clock_breakdown": "auto", "log_level": "info", "steps_per_print": None}), 2, "cpu")
    profiler = {"enabled": True, "profile_step": 3, "output_file": "profile.txt"}
    check_values(config_with({"flops_profiler": profiler, "timers": {"throughput": {"enabled": True}}}), 2, "cpu")
    check_values(config_with({}), 2, "cpu")


@pytest.mark.spawn
def test_without_sections_deepspeed_is_not_imported_for_it():
    code = """
import sys
sys.modules["deepspeed"] = None
from trainer import load_config
from trainer.preflight.deepspeed_sections import check_values
check_values(load_config("tiny_cpu", ["deepspeed={steps_per_print: 10}"]), 1, "cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
