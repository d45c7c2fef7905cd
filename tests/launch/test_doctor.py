from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.processor import Processor
from launch import doctor
from tests.support.doctor import findings_of, planned
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config
from trainer import load_config
from trainer.api import EXTENSIONS
from trainer.config.run_config import RunConfig
from trainer.preflight import checks, machine_checks, service_checks
from trainer.preflight.finding import Finding
from trainer.preflight.plan import PlannedRun, plan_run


def tracked(shards: Path | str, folder: Path, *overrides: str) -> RunConfig:
    tracking = f"tracking.uri=sqlite:///{folder}/mlflow.db"
    return preset_config(tracking, *overrides, shards=shards, output_dir=folder / "run")


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


@pytest.mark.long
def test_a_sound_run_on_this_machine_is_ok_in_every_line(small_shards, empty_database, tmp_path, monkeypatch):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(service_checks, "MAX_SPAWNED_RANKS", 1)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    monkeypatch.setattr(machine_checks, "device_memory_bytes", lambda *_: 64 << 30)
    config = tracked(small_shards, tmp_path, "training.max_steps=100", "model.vocab_size=800")
    findings = list(doctor.examine(planned(config), {}))
    assert {finding.level for finding in findings} == {"ok"}, "\n".join(map(str, findings))
    names = {finding.name for finding in findings}
    wanted = (
        "batch deepspeed tokenizer shards tokens memory disk store clock compiler mlflow registry secrets collective "
        "estimate"
    )
    assert {*wanted.split(), "op cache"} <= names
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_memory_goes_by_the_zero_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "device_memory_bytes", lambda device, world_size: 6 * machine_checks.GIB)
    base = ["training.micro_batch_tokens=512", "zero.stage=0", "training.precision=fp32", "model.hidden_dropout_prob=0"]
    zero = load_config("bert_large", base)
    (replicated,) = machine_checks.check_memory(planned(zero, 8))
    (divided,) = machine_checks.check_memory(planned(load_config("bert_large", [*base, "zero.stage=3"]), 8))
    assert replicated.level in ("warn", "fail") and "set zero.stage=1, with which it fits" in replicated.text
    assert divided.level == "ok"


def test_a_batch_that_is_mostly_filling_is_warned_of(tmp_path):
    config = tracked("none", tmp_path, "training.global_batch_tokens=1088", "training.micro_batch_tokens=1024")
    assert levels(list(machine_checks.check_batches(planned(config, 1)))) == ["warn"]


@pytest.mark.parametrize(("hard", "level"), [(4095, "fail"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_a_hard_limit_of_open_files_below_the_need_of_the_ranks_fails(hard, level, monkeypatch):
    monkeypatch.setattr(machine_checks, "raise_descriptor_limit", lambda: hard)
    (found,) = machine_checks.check_descriptors(512)
    assert found.level == level and ("512 ranks need 4,096 open files" in found.text) is (level == "fail")


@pytest.mark.parametrize(("wanted", "level"), [("auto", "warn"), ("true", "fail"), ("false", "ok")])
def test_a_gpu_host_on_which_triton_cannot_start_is_found(wanted, level, small_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "missing_for_compilation", lambda device_type: "/usr/include/Python.h")
    run = planned(tracked(small_shards, tmp_path, f"training.compile={wanted}"), 8, "cuda")
    (check,) = (check for check in checks.CHECKS if check.name == "compiler")
    found = check.findings(run)
    assert found[0].level == level and ("Python.h" in found[0].text) is (level != "ok")
    if level == "fail":
        with pytest.raises(UserError, match=r"needs /usr/include/Python.h.*training.compile=auto"):
            check.refuse(run)


@pytest.mark.parametrize(
    ("override", "device", "there", "level"),
    [
        ("zero.offload_optimizer=true", "cpu", [], "ok"),
        ("training.compile=auto", "cuda", [], "ok"),
        ("training.compile=true", "cpu", ["c++", "clang++"], "fail"),
        ("training.compile=true", "cpu", ["g++"], "ok"),
    ],
)
def test_only_compiled_blocks_on_the_cpu_need_a_cpp_compiler(override, device, there, level, tmp_path, monkeypatch):
    """That is g++, unless CXX names another: torch looks for no other."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(machine_checks, "missing_for_compilation", lambda device_type: None)
    config = tracked("none", tmp_path, override)
    (found,) = machine_checks.check_compiler(planned(config, 2, device))
    assert found.level == level


def test_a_batch_warmup_that_the_ranks_cannot_share_is_warned_of_if_it_costs_much_of_its_stage(tmp_path):
    def found(steps: int, ranks: int) -> list[Finding]:
        sizes = ["training.global_batch_tokens=4096", "training.micro_batch_tokens=512", "training.max_steps=1000"]
        config = tracked("none", tmp_path, *sizes, f"training.batch_warmup={{initial_tokens: 1024, steps: {steps}}}")
        return list(machine_checks.check_batches(planned(config, ranks)))

    assert levels(found(300, 2)) == ["ok", "ok"]
    fits, warmup = found(300, 8)
    assert (fits.level, warmup.level) == ("ok", "warn")
    assert "4 sizes from 1,024 to 4,096 tokens, with 37.5% padding rows, 17.6% of the stage" in warmup.text
    assert "a multiple of the 4,096 that the ranks take at once" in warmup.text
    _, short = found(9, 8)
    assert short.level == "ok" and "37.5% padding rows, 0.5% of the stage" in short.text


def test_a_stage_that_the_run_ends_before_has_no_batch_warmup_to_judge(tmp_path):
    stages = "training.stages=[{steps: 10}, {steps: 10, batch_warmup: {initial_tokens: 1024, steps: 5}}]"
    sizes = ["training.global_batch_tokens=4096", "training.micro_batch_tokens=512", "training.max_steps=5"]
    run = planned(tracked("none", tmp_path, *sizes, stages), 8)
    assert levels(list(machine_checks.check_batches(run))) == ["ok", "ok"]


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.fault(
    row="35",
    fault="a build into the op cache is killed and leaves its lock",
    required="the doctor names the lock and what to do, and fails once it is old; a build that runs is left alone",
)
def test_the_lock_of_a_killed_build_is_named_and_that_of_a_running_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    lock = tmp_path / "op" / "lock"
    build = (
        "import sys, time; from torch.utils.file_baton import FileBaton; "
        "assert FileBaton(sys.argv[1]).try_acquire(); print('building', flush=True); time.sleep(600)"
    )
    builder = subprocess.Popen([sys.executable, "-c", build, str(lock)], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    os.utime(lock, (time.time() - 3600,) * 2)
    assert levels(list(machine_checks.check_op_cache())) == ["ok"], "it is building"
    builder.kill()
    builder.wait()
    (finding,) = machine_checks.check_op_cache()
    assert finding.level == "fail" and str(lock) in finding.text and "60 minutes old" in finding.text
    os.utime(lock)
    (finding,) = machine_checks.check_op_cache()
    assert finding.level == "warn" and "open in no process" in finding.text


def test_a_store_that_cannot_be_written_fails_and_one_that_can_is_left_empty(tmp_path):
    good = tracked("none", tmp_path, f"checkpoint.upload_to={tmp_path}/store")
    assert levels(findings_of(good, "store")) == ["ok"]
    assert not list((tmp_path / "store").iterdir())
    (tmp_path / "file").touch()
    bad = tracked("none", tmp_path, f"checkpoint.upload_to={tmp_path}/file/store")
    (finding,) = findings_of(bad, "store")
    assert finding.level == "fail" and "Not a directory" in finding.text
    assert "set checkpoint.upload_to to another" in finding.text and "goes on from there" not in finding.text
    long = tracked("none", tmp_path, f"checkpoint.upload_to={tmp_path}/store", "checkpoint.upload_wait_seconds=1800")
    assert levels(findings_of(long, "store")) == ["fail"]


def test_bf16_is_warned_of_on_a_processor_that_is_slow_in_it(tmp_path, monkeypatch):
    slow = Processor("Xeon", "GenuineIntel", ("avx2", "avx512_bf16"))
    fast = Processor("Xeon", "GenuineIntel", ("amx_bf16", "avx2", "avx512_bf16"))
    bf16, fp32 = (tracked("none", tmp_path, f"training.precision={each}") for each in ("bf16", "fp32"))
    texts = {}
    for processor, config, level in ((slow, bf16, "warn"), (slow, fp32, "ok"), (fast, bf16, "ok"), (fast, fp32, "ok")):
        monkeypatch.setattr(machine_checks, "this_processor", lambda processor=processor: processor)
        (finding,) = machine_checks.check_speed_of_precision(config, "cpu")
        assert finding.level == level
        texts[processor, config.training.precision] = finding.text
    assert "bf16 on Xeon (instruction sets: avx2, avx512_bf16) is slower than fp32. Fix: set" in texts[slow, "bf16"]
    assert "bf16 is faster on it" in texts[fast, "fp32"]
    assert "faster" not in texts[fast, "bf16"] + texts[slow, "fp32"]
    (finding,) = machine_checks.check_speed_of_precision(bf16, "cuda")
    assert finding.level == "ok"


def test_a_password_on_the_command_line_fails_and_is_not_repeated():
    (finding,) = machine_checks.check_secrets(["doctor.py", "tracking.uri=https://me:hush-hush@mlflow.example.org"])
    assert finding.level == "fail" and "tracking.uri" in finding.text and "hush" not in finding.text
    assert levels(list(machine_checks.check_secrets(["tracking.uri=https://mlflow.example.org"]))) == ["ok"]


@pytest.mark.long
@pytest.mark.spawn
def test_ranks_of_this_machine_reduce_together_and_report_their_bandwidth(monkeypatch, forking_python):
    monkeypatch.setattr(sys, "executable", forking_python)
    monkeypatch.setattr(service_checks, "COLLECTIVE_SECONDS", 500)
    (finding,) = service_checks.check_collective(2, "cpu")
    assert finding.level == "ok" and "2 ranks over gloo: all-reduce of 64 MiB" in finding.text, finding


REFUSED = {
    "output_dir": (["output_dir=s3://bucket/run"], "is a URL"),
    "fp16": (["training.precision=fp16"], "training.precision=fp16 needs a CUDA device"),
    "section": (
        ["deepspeed={zero_optimization: {contiguous_gradient: true}}"],
        "did you mean contiguous_gradients",
    ),
    "optimizer": (["optimizer.name=nowhere:lion"], "nowhere"),
    "objective": (
        [
            "objectives=[{name: masked_lm}, {name: 'tests.support.toy_objectives:MetricIsReserved'}]",
            "data.sentence_pairs=none",
        ],
        "has metric='own_toy'",
    ),
    "shards": (["data.shards=nowhere"], "data.shards=nowhere does not exist"),
    "vocabulary": (["model.vocab_size=100"], "set model.vocab_size=800"),
    "rows": (["training.global_batch_tokens=67108864"], "fewer than the 1048576 of one global batch"),
    "minimal pairs": (["evaluation.minimal_pairs=nowhere"], "nowhere does not exist"),
    "suite": (["evaluation.suite=nowhere"], "nowhere"),
    "suite of another machine": (["evaluation.suite=nowhere", "checkpoint.follow=false"], "nowhere"),
    "upload": (
        ["checkpoint.upload_to=store", "checkpoint.upload_wait_seconds=1800"],
        "checkpoint.upload_wait_seconds=1800 is not less",
    ),
    "tracking": (["tracking.uri=ftp://nowhere"], "ftp://nowhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_doctor_fails_with_the_message_of_the_refused_start(name, small_shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides, said = REFUSED[name]
    run = planned(tracked(small_shards, tmp_path, *overrides))
    with pytest.raises(UserError, match=said) as raised:
        checks.refuse(run)
    slow = ("memory", "disk", "clock", "precision", "op cache", "compiler")
    findings = [each for check in checks.CHECKS if check.name not in slow for each in check.findings(run)]
    assert [each.text for each in findings if each.level == "fail"] == [str(raised.value)]


def test_epochs_of_missing_data_are_one_finding_among_the_others(tmp_path):
    length = ("training.max_steps=null", "training.duration=3 epochs")
    run = plan_run(tracked(tmp_path / "none", tmp_path, *length), EXTENSIONS, world_size=2)
    levels_by_name = {each.name: each.level for check in checks.CHECKS for each in check.findings(run)}
    assert levels_by_name["length"] == "fail"
    assert levels_by_name["batch"] == "ok" and "memory" in levels_by_name and "mlflow" in levels_by_name
    assert not {"estimate", "disk", "shards"} & levels_by_name.keys(), "they need the number of steps"


def test_settings_of_the_first_rank_alone_refuse_no_other_rank(small_shards, tmp_path):
    config = tracked(small_shards, tmp_path, "evaluation.suite=nowhere")
    checks.refuse(PlannedRun(config, 2, torch.device("cpu"), EXTENSIONS, is_first=False))


def test_the_files_of_a_suite_are_those_of_the_machine_that_evaluates(small_shards, tmp_path):
    suite = tmp_path / "suite.yaml"
    suite.write_text("{name: own, tasks: {a: {files: {train: gone.tsv}, metrics: [accuracy]}}}")
    settings = [f"evaluation.suite={suite}", "evaluation.suite_overrides=[data=nowhere]"]
    refused, read = (tracked(small_shards, tmp_path, *settings, f"checkpoint.follow={on}") for on in ("true", "false"))
    with pytest.raises(UserError, check=coded("missing-task-file")):
        checks.refuse(planned(refused))
    checks.refuse(planned(read))


def test_a_start_warns_of_what_is_cheap_to_find(small_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "device_memory_bytes", lambda *_: 1)
    config = tracked(small_shards, tmp_path, "checkpoint.keep_last=1")
    run = planned(config)
    found = {finding.name: finding.level for finding in checks.warnings(run)}
    assert found["memory"] == "fail" and "ok" not in found.values()


def test_missing_initial_weights_fail(small_shards, tmp_path):
    config = tracked(small_shards, tmp_path, f"init_from={tmp_path}/nothing", "model.output_bias=zeros")
    (weights,) = findings_of(config, "init_from")
    assert weights.level == "fail" and "nothing" in weights.text


def test_a_deepspeed_file_is_looked_at_as_pretrain_would(tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text('{"wall_clock_breakdown": true, "zero_optimization": {"overlap_comm": true}}')
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--config", "tiny_cpu", "--deepspeed_config", str(path)])
    looked_at = []
    monkeypatch.setattr(doctor, "examine", lambda run, *others: looked_at.append(run.config.deepspeed) or iter(()))
    with pytest.raises(SystemExit, match="0"):
        doctor.main()
    assert looked_at == [{"wall_clock_breakdown": True, "zero_optimization": {"overlap_comm": True}}]


def test_a_number_of_ranks_below_one_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--config", "tiny_cpu", "--ranks", "-1"])
    with pytest.raises(UsageError, match="--ranks -1", check=coded("invalid-ranks")):
        doctor.main()


def test_an_unknown_gpu_is_refused_before_any_check(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--config", "tiny_cpu", "--gpu", "h100"])
    with pytest.raises(UsageError, match="h100-80, h200-141, a100-80", check=coded("unknown-gpu")):
        doctor.main()


def test_time_and_cost_follow_from_a_measured_speed_alone(tmp_path):
    from trainer.metrics.throughput import flops_per_position
    from trainer.tracking.status import write_status

    def estimate(config: RunConfig) -> str:
        (finding,) = machine_checks.estimate_time(plan_run(config, EXTENSIONS, world_size=4))
        return finding.text

    config = tracked("none", tmp_path, "logging.gpu_hour_price=2", "training.max_steps=7200")
    assert "no speed was measured" in estimate(config)
    peaked = tracked("none", tmp_path, "logging.peak_flops_per_device=1e12")
    assert "no speed was measured" in estimate(peaked), "a peak is no measurement"
    (stage,) = config.stages
    step_flops = flops_per_position(config, stage) * stage.global_batch_tokens
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", "stopped", {"flops_per_device": step_flops / 4})  # by another hand
    assert "no speed was measured" in estimate(config)
    # Two ranks took 2 s a step.
    write_status(tmp_path / "run", "stopped", {"flops_per_device": step_flops / 4, "world_size": 2})
    assert "2:00:00, 8.0 device-hours, 16.00 at 2 per device-hour" in estimate(config)
    half = f"training.batch_warmup={{initial_tokens: {stage.global_batch_tokens // 2}, steps: 3600}}"
    growing = tracked("none", tmp_path, "training.max_steps=7200", half)
    assert "1:30:00, 6.0 device-hours, from the speed of this run on 2 ranks" in estimate(growing)
