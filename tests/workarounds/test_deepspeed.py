"""What DeepSpeed's engine does that `trainer` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.workarounds.new_process import run_python


def test_deepspeed_ignores_an_unknown_setting_in_silence() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 3}}
    found = DeepSpeedConfig(settings)
    assert found.zero_config.stage == 0, "_unknown of trainer/engine/deepspeed_config.py may be left to DeepSpeed"


@pytest.mark.slow  # a new process that imports DeepSpeed
def test_deepspeed_imports_mlflow() -> None:
    told = run_python("import deepspeed, sys; print('with' if 'mlflow' in sys.modules else 'without', 'mlflow')")
    assert told.stdout.splitlines()[-1] == "with mlflow", "initialize_distributed may leave MLflow's telemetry alone"


def test_deepspeed_makes_groups_without_a_timeout() -> None:
    import deepspeed.comm

    assert "timeout" not in inspect.signature(deepspeed.comm.new_group).parameters, (
        "set_timeout_on_all_groups of distributed/process_group.py may give it to DeepSpeed"
    )


def test_deepspeed_would_compile_its_shared_memory_op_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.ops
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    built: list[str] = []
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self, *_: built.append(self.NAME))
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    assert built == ["deepspeed_shm_comm"], "initialize_distributed need not turn it off in __compatible_ops__"


def test_deepspeed_sets_a_whole_parameter_past_its_end_at_stage_3() -> None:
    """It takes equal parts of what does not divide: the last rank raises, and the others wait for it."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    part = torch.zeros(2)
    last_of_two = SimpleNamespace(
        _get_fp32_opt_state_partition=lambda *_, **__: (part, 0),
        _get_param_partition_rank=lambda *_: 1,
        _swappable_optimizer_subgroup=lambda *_: False,
    )
    parameter = SimpleNamespace(requires_grad=True, ds_numel=3)
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        DeepSpeedZeroOptimizer_Stage3.set_full_hp_param(last_of_two, torch.ones(3), parameter)
        pytest.fail("engine/fragments.py may use safe_set_full_fp32_param and safe_set_full_optimizer_state")


def test_deepspeed_keeps_gathered_weights_of_all_but_the_largest_models() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig(stage=3).max_reuse_distance >= 1_000_000_000, (
        "_own_settings of trainer/engine/deepspeed_config.py need not set stage3_max_reuse_distance"
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_deepspeed_adds_gradients_up_in_the_precision_of_the_model(precision: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = SimpleNamespace(
        fp16_enabled=lambda: precision == "fp16",
        bfloat16_enabled=lambda: precision == "bf16",
        _config=SimpleNamespace(grad_accum_dtype=None),
    )
    assert DeepSpeedEngine.get_data_types(engine)[1] != torch.float32, (
        "_own_settings of trainer/engine/deepspeed_config.py need not set grad_accum_dtype"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deepspeed_adds_no_gradients_up_in_fp32_at_stage_0(dtype: torch.dtype) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = SimpleNamespace(get_data_types=lambda: (dtype, torch.float32), zero_optimization=lambda: False)
    with pytest.raises(NotImplementedError, match="unsupported mix"):
        DeepSpeedEngine._do_optimizer_sanity_check(engine, None)
        pytest.fail(
            "_own_settings of trainer/engine/deepspeed_config.py may set grad_accum_dtype at stage 0 too: the check of "
            "precision in _check_zero of trainer/config/run_rules.py may be taken out"
        )


def test_deepspeed_takes_the_standard_error_away_while_it_tries_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """From all threads of the process: what they say meanwhile is lost."""
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    def standard_error() -> tuple[int, int]:
        status = os.fstat(sys.stderr.fileno())
        return status.st_dev, status.st_ino

    def compile_nothing(*_: object, **__: object) -> list[str]:
        seen.append(standard_error())
        return []

    seen = [standard_error()]
    compiler = Mock(compile=compile_nothing)
    monkeypatch.setattr(importlib.import_module("distutils.ccompiler"), "new_compiler", lambda **_: compiler)
    assert ShareMemCommBuilder().has_function("any", ())
    assert seen[1] != seen[0], "StopSignal of distributed/stop_signal.py may write to descriptor 2 itself"
    assert standard_error() == seen[0]


_ENGINE = """
import json, os, sys, warnings, contextlib, io
import torch
warnings.filterwarnings("ignore")
sys.path.insert(0, os.getcwd())
from trainer.distributed.process_group import initialize_distributed
from trainer.config.training_settings import DistributedSettings
initialize_distributed(DistributedSettings())
import deepspeed
from deepspeed.utils import safe_set_full_optimizer_state

def engine_of(stage, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "steps_per_print": None, **more}
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()], lr=0.1)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine, model, optimizer, told.getvalue()

found = {}
engine, model, optimizer, _ = engine_of(0)
engine.backward(engine(torch.full((1, 4), float("nan"))).sum())
engine.step()
found["norm at stage 0"] = engine.get_global_grad_norm() is None
moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
found["nan in moments"] = any(bool(moment.isnan().any()) for moment in moments)

engine, model, *_ , told = engine_of(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
found["prints its memory"] = bool(told.strip())
weight = next(model.parameters())
try:
    safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    found["state before the first step"] = True
except Exception as error:
    found["state before the first step"] = False

engine, model, *_ = engine_of(1)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
found["all groups are linked"] = all(p._hp_mapping.optim_fragment for p in model.parameters())
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def engine_findings() -> dict[str, bool]:
    answer = run_python(_ENGINE, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert answer.returncode == 0, answer.stderr[-3000:]
    findings: dict[str, bool] = json.loads(answer.stdout.strip().splitlines()[-1])
    return findings


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("name", "as_known", "remedy"),
    [
        ("norm at stage 0", True, "Engine.step of trainer/engine/engine.py need not compute the norm at stage 0"),
        (
            "nan in moments",
            True,
            "Engine.step of trainer/engine/engine.py need not keep NaN from the moments at stage 0",
        ),
        ("prints its memory", True, "build_engine of trainer/engine/engine.py need not catch what is printed"),
        (
            "state before the first step",
            False,
            "Engine.warmup_step of trainer/engine/engine.py is not needed for the state",
        ),
        ("all groups are linked", False, "_flattened_fragment of engine/fragments.py may use optim_fragment"),
    ],
)
def test_what_the_engine_of_deepspeed_does(
    engine_findings: dict[str, bool], name: str, as_known: bool, remedy: str
) -> None:
    assert engine_findings[name] is as_known, remedy
