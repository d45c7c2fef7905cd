from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_processes import OPTIMIZERS, run_jobs, trained
from tests.support.toy_reference import train_plainly
from tests.support.toy_training import ToyModel, make_config
from trainer.checkpoint.format import CheckpointFolder, step_folder
from trainer.checkpoint.tensors import read_weights
from trainer.distributed import gradient_reduction
from trainer.distributed.gradient_reduction import Route
from trainer.distributed.process_group import Ranks
from trainer.engine import fragments
from trainer.engine.engine import Engine, build_engine, is_news, of_this_rank, overlapped_reduction
from trainer.engine.fragments import Fragment

SLOW = pytest.mark.slow

# fp32 sums in another order: the toy's norms of about 1 and weights below 2 agree to the last few bits.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
# Of the norm of the updates of three steps: 8 bits of a bf16 number count, and a gradient near 0 may change its sign,
# which Adam and Muon turn into a step of full length. Measured: up to 0.08.
BF16_BOUND = 0.12


def check_against_plain_pytorch(folder, report, steps: int, optimizer: str = "adamw") -> None:
    losses, norms, weights = train_plainly(steps, optimizer)
    first = report["first"]
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(losses[first:]), **TOLERANCE)
    torch.testing.assert_close(torch.tensor(report["norms"]), torch.tensor(norms[first:]), **TOLERANCE)
    saved = read_weights(folder / "checkpoints" / f"step-{steps:08d}")
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, **TOLERANCE)


def test_the_reference_clips_and_learns():
    losses, norms, _ = train_plainly(20)
    assert min(norms) > 0.3, "clipping is never active"
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.long
def test_deepspeed_starts_without_the_compiler_and_the_model_can_be_compiled_afterwards():
    code = (
        "import os, sys, torch\n"
        "from trainer.engine.engine import _without_compiler\n"
        "with _without_compiler():\n"
        "    import deepspeed.runtime.zero.muon.original_muon\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules and 'TORCHDYNAMO_DISABLE' not in os.environ\n"
        "seen = []\n"
        "backend = lambda graph, inputs: seen.append(graph) or graph.forward\n"
        "torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))\n"
        "assert seen\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_two_ranks_of_two_micro_batches_train_as_plain_pytorch(zero_stage, optimizer):
    """The norms are those of the raw gradient, and clipping by them is active."""
    folder, reports = trained(zero_stage)
    name = f"{optimizer}-plain"
    check_against_plain_pytorch(folder / name, reports[name], 2, optimizer)


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_one_rank_of_four_micro_batches_trains_as_plain_pytorch(zero_stage, tmp_path):
    """In fp32 to 1e-6 of the largest value; with a forward in bf16 losses, norms and updates to `BF16_BOUND`."""
    precisions = ("fp32", "bf16") if zero_stage else ("fp32",)
    jobs = [
        {"stage": zero_stage, "optimizer": optimizer, "precision": precision, "accumulation": 4, "steps": 3}
        | {"dropout": False, "output_dir": str(tmp_path / f"{optimizer}-{precision}")}
        for optimizer in ("adamw", "stable_adamw", "muon")
        for precision in precisions
    ]
    initial = dict(ToyModel().named_parameters())
    for job, report in zip(jobs, run_jobs(tmp_path, 1, jobs), strict=True):
        losses, norms, weights = train_plainly(3, job["optimizer"])
        saved = read_weights(step_folder(job["output_dir"], 3))
        for name, expected in {"losses": losses, "norms": norms, **weights}.items():
            found = torch.as_tensor(saved[name] if name in saved else report[name])
            expected = torch.as_tensor(expected)
            difference = found - expected
            if job["precision"] == "fp32":
                error, bound = float(difference.abs().max() / expected.abs().max()), 1e-6
            else:
                size = expected - initial[name].detach() if name in initial else expected
                error, bound = float(difference.norm() / size.norm()), BF16_BOUND
            assert error <= bound, (job["optimizer"], job["precision"], name)


@pytest.mark.spawn
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_with_nan_changes_nothing(zero_stage, optimizer):
    """The job itself checks that the step counts as skipped; here, that nothing of it reached the checkpoint."""
    folder, _ = trained(zero_stage)
    checkpoint = folder / f"{optimizer}-plain" / "checkpoints" / "step-00000002"
    assert CheckpointFolder(checkpoint).read_state().optimizer_steps == 2
    assert all(torch.isfinite(weight).all() for weight in read_weights(checkpoint).values())


@pytest.mark.spawn
@SLOW
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("zero_stage", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")])
def test_offload_trains_as_without(zero_stage, precision, optimizer, tmp_path):
    common = {"stage": zero_stage, "precision": precision, "accumulation": 2, "steps": 3, "dropout": False}
    common["optimizer"] = optimizer
    plain, offloaded = run_jobs(
        tmp_path,
        2,
        [
            common | {"output_dir": str(tmp_path / "plain")},
            common | {"output_dir": str(tmp_path / "offloaded"), "offload": True},
        ],
    )
    torch.testing.assert_close(torch.tensor(offloaded["losses"]), torch.tensor(plain["losses"]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(offloaded["norms"]), torch.tensor(plain["norms"]), rtol=1e-2, atol=1e-3)


def test_fp16_on_the_cpu_is_refused_before_an_engine_is_built():
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    with pytest.raises(UsageError, check=coded("fp16-without-cuda")):
        build_engine(ToyModel(), make_config("none", 1, precision="fp16"), ranks)


def zero_1_in_bf16(immediate_grad_update: bool) -> SimpleNamespace:
    """What `overlapped_reduction` asks of DeepSpeed's engine; gradients of 3 and 2 numbers, padded to 8."""
    module = torch.nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    flat = torch.tensor([3.0, 0.0, 4.0, 0.0, 9.0, 0.0, 0.0, 0.0])
    optimizer = SimpleNamespace(
        immediate_grad_update=immediate_grad_update,
        bf16_groups=[list(module)],
        fp32_groups_gradients_flat=[flat],
        fp32_groups_gradient_flat_partition=[flat[:4]],
        dp_process_group=None,
        get_grads_for_norm=lambda for_clipping=False: [],
    )
    return SimpleNamespace(
        optimizer=optimizer,
        module=module,
        enable_backward_allreduce=True,
        communication_data_type=torch.bfloat16,
        zero_reduce_bucket_size=lambda: 3,
    )


def test_the_reduction_is_taken_over_from_deepspeed_so_that_it_is_done_once(monkeypatch):
    found = []

    def average(flat: torch.Tensor, start: int, stop: int, route: Route, dtype: torch.dtype) -> Iterator[None]:
        found.append((start, stop, route.levels, dtype))
        yield

    monkeypatch.setattr(gradient_reduction, "gather_objects", lambda local_rank, ranks: [0, 1])
    monkeypatch.setattr(gradient_reduction, "all_reduce_sum", lambda squares, ranks: squares + 12.0**2)
    monkeypatch.setattr("trainer.distributed.gradient_reduction.average", average)
    engine = zero_1_in_bf16(immediate_grad_update=True)
    reduction = overlapped_reduction(engine, Ranks(0, 2, 0, torch.device("cpu")))
    assert reduction is not None and not engine.enable_backward_allreduce
    reduction.begin()
    reduction.finish()
    assert found == [(start, stop, ((None, 2),), torch.bfloat16) for start, stop in ((3, 5), (0, 3))]
    (norm,), _ = engine.optimizer.get_grads_for_norm()
    assert float(norm) == 13.0, "of the parts of all ranks"
    (clipped,) = engine.optimizer.get_grads_for_norm(for_clipping=True)
    assert clipped.tolist() == [3.0, 0.0, 4.0, 0.0], "what this rank owns"


@pytest.mark.parametrize(("world_size", "immediate_grad_update"), [(1, True), (2, False)])
def test_deepspeed_reduces_where_nothing_can_leave_early(world_size, immediate_grad_update):
    engine = zero_1_in_bf16(immediate_grad_update)
    assert overlapped_reduction(engine, Ranks(0, world_size, 0, torch.device("cpu"))) is None
    assert engine.enable_backward_allreduce


class ScaledDeepSpeed:
    """What `Engine.warmup_step` asks of DeepSpeed's engine at stage 1 in fp16; a step changes the loss scale."""

    def __init__(self) -> None:
        self.module = torch.nn.Module()
        self.calls: list[object] = []
        scaler = SimpleNamespace(cur_scale=65536.0, min_scale=1.0, cur_iter=0, dynamic=True)
        base = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.25}], state={})
        self.optimizer = SimpleNamespace(loss_scaler=scaler, optimizer=base, update_lp_params=lambda: None)

    def train(self) -> None:
        self.calls.append("train")

    def eval(self) -> None:
        self.calls.append("eval")

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self.calls.append(is_last)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        self.calls.append(
            (loss.item(), scale_wrt_gas, {group["lr"] for group in self.optimizer.optimizer.param_groups})
        )

    def step(self) -> None:
        self.calls.append("step")
        vars(self.optimizer.loss_scaler).update(cur_scale=32768.0, cur_iter=1)

    def get_global_grad_norm(self) -> float:
        return 0.0

    def was_step_applied(self) -> bool:
        return True


def scaled_engine(precision: str = "fp16") -> tuple[Engine, ScaledDeepSpeed]:
    deepspeed = ScaledDeepSpeed()
    config = make_config("none", 1, precision=precision)
    return Engine(deepspeed, config, Ranks(0, 1, 0, torch.device("cpu")), {}), deepspeed


def test_the_warmup_step_has_no_gradient_and_no_learning_rate_and_leaves_the_loss_scale_as_it_was():
    engine, deepspeed = scaled_engine()
    engine.eval()
    engine.warmup_step(lambda: torch.tensor(7.0))
    assert deepspeed.calls == ["eval", "train", True, (0.0, False, {0.0}), "step"]
    assert vars(deepspeed.optimizer.loss_scaler) == {
        "cur_scale": 65536.0,
        "min_scale": 1.0,
        "cur_iter": 0,
        "dynamic": True,
    }
    with pytest.raises(AssertionError, match="prepared already"):
        engine.warmup_step(lambda: torch.tensor(7.0))


def test_the_loss_scale_is_saved_and_set_in_fp16_alone():
    engine, deepspeed = scaled_engine()
    assert engine.loss_scaler_state() == {"cur_scale": 65536.0, "min_scale": 1.0, "cur_iter": 0}
    engine.set_loss_scaler_state({"cur_scale": 4.0, "cur_iter": 9})
    engine.set_loss_scaler_state(None)
    assert engine.loss_scaler_state() == {"cur_scale": 4.0, "min_scale": 1.0, "cur_iter": 9}
    other, deepspeed = scaled_engine("bf16")
    other.set_loss_scaler_state({"cur_scale": 4.0})
    assert other.loss_scaler_state() is None and deepspeed.optimizer.loss_scaler.cur_scale == 65536.0


def test_a_loss_scale_can_fall_in_fp16_while_it_is_dynamic_and_above_its_minimum():
    engine, deepspeed = scaled_engine()
    scaler = deepspeed.optimizer.loss_scaler
    assert engine.loss_scale_can_fall
    scaler.cur_scale = scaler.min_scale
    assert not engine.loss_scale_can_fall
    scaler.cur_scale, scaler.dynamic = 8.0, False
    assert not engine.loss_scale_can_fall
    assert not scaled_engine("bf16")[0].loss_scale_can_fall


def test_a_fresh_run_starts_with_the_exact_weights_and_without_moments_or_updates(monkeypatch):
    """In bf16 DeepSpeed's own fp32 weights are rounded ones."""
    engine, deepspeed = scaled_engine("bf16")
    count = torch.tensor(1.0)
    deepspeed.optimizer.optimizer.state = {0: {"step": count}}
    engine._initial = {"a": torch.arange(4.0, 10.0) + 0.001}
    weight = torch.full((8,), 9.0)
    moments = {kind: torch.full((8,), 9.0) for kind in ("exp_avg", "exp_avg_sq")}
    states = {weight: moments | {"step": count}}
    fragment = Fragment("a", 4, 10, owned_start=4, owned_stop=10, held_in=weight, offset=0, padding=2, states=states)
    monkeypatch.setattr(engine, "fragments", lambda: [fragment])
    engine.warmup_step(lambda: torch.tensor(7.0))
    assert torch.equal(weight[:6], torch.arange(4.0, 10.0) + 0.001) and not weight[6:].any()
    assert not any(moment.any() for moment in moments.values())
    assert count == 0


def test_only_the_initial_weights_of_this_rank_stay_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank would have all fp32 weights of the model beside its training state until the first step."""
    found = SimpleNamespace(name="a", start=4, stop=10)
    monkeypatch.setattr(fragments, "fragments", lambda *arguments: iter([found]))
    whole = {"a": torch.arange(12.0).view(3, 4), "b": torch.zeros(2)}
    deepspeed = SimpleNamespace(module=None, optimizer=None)
    own = of_this_rank(whole, deepspeed, 2, Ranks(0, 2, 0, torch.device("cpu")))
    assert list(own) == ["a"] and own["a"].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0] and not whole
    assert own["a"].untyped_storage().nbytes() == 6 * 4


@pytest.mark.parametrize(
    ("message", "is_shown"), [("**** You are using ZeRO with an untested optimizer", False), ("x", True)]
)
def test_the_warning_of_an_untested_optimizer_is_left_out_and_no_other(message: str, is_shown: bool) -> None:
    record = logging.LogRecord("DeepSpeed", logging.WARNING, __file__, 1, message, None, None)
    assert is_news(record) is is_shown
