"""Contract 5: one global batch gives one gradient, whatever ranks, accumulation, ZeRO stage and precision.

The project's own loader and step on 1, 2 and 3 ranks against plain single-process PyTorch on the same samples. A
global batch of 13 rows is 1 rank x 4 micro-batches, 2 x 2, and 3 x 2 (which 3 ranks do not divide).
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy_pretraining
from tests.support.toy_pretraining import STEPS, train_plainly
from tests.support.toy_processes import finish, start_ranks
from trainer.checkpoint.tensors import read_weights

pytestmark = pytest.mark.spawn

SCRIPT = Path(toy_pretraining.__file__)
SLOW = pytest.mark.slow

JOBS: dict[str, dict[str, Any]] = {
    "clipped": {"evaluate": True},
    "unclipped": {"gradient_clipping": 0.0},
    "checkpointed": {"activation_checkpointing": True},
    "warm-up": {"batch_warmup": True},
    "bound": {"bound": True},
    "offloaded": {"offload": True},
    "bf16": {"precision": "bf16"},
    "bf16 offloaded": {"precision": "bf16", "offload": True},
}
# DeepSpeed then reduces itself, in fp32 after the backward.
_REDUCED_AFTER = {"bf16": {"immediate_grad_update": False}}
# The toy's 30,000 numbers in a dozen buckets, which leave while the backward goes on.
_SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 3000}}
JOBS["bf16 reduced after"] = {"precision": "bf16", "gradient_clipping": 0.0, "deepspeed": _REDUCED_AFTER}
JOBS["bf16 exchanged in fp32"] = JOBS["bf16 reduced after"] | {
    "deepspeed": _SMALL_BUCKETS | {"communication_data_type": "fp32"}
}
JOBS["bf16 in buckets"] = {"precision": "bf16", "deepspeed": _SMALL_BUCKETS}
# Otherwise matrices as small as these stay whole at stage 3, as if they were biases, or are all fetched ahead.
_DIVIDE_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}}
JOBS["divided"] = {"deepspeed": _DIVIDE_ALL, "evaluate": True}
JOBS["divided checkpointed"] = {"deepspeed": _DIVIDE_ALL, "activation_checkpointing": True}
FIRST_STAGES = {name: 1 for name in JOBS if "bf16" in name} | {"offloaded": 1, "divided": 3, "divided checkpointed": 3}
"""ZeRO stages from which on there is such a job; others are of every stage."""
LAST_STAGES = {"bf16 reduced after": 1, "bf16 exchanged in fp32": 1, "bf16 in buckets": 2}
GROUPS = [(stage, world_size) for stage in range(4) for world_size in (1, 2, 3)]
DEFAULT_GROUPS = {
    (1, 2): JOBS.keys() - {"unclipped", "bf16 offloaded"},
    (3, 2): {"clipped", "bound", "bf16", "bf16 offloaded", "divided", "divided checkpointed"},
}
"""Groups of processes in continuous integration and their jobs: each setting at one stage at least.

Stages 0 and 2 train there in test_engine.py.
"""

# fp32 sums in another order: losses of about 7, norms of about 2, weights below 1 that have moved by 3e-3 a step.
FP32 = {"rtol": 5e-6, "atol": 2e-6}


def marked(groups, names):
    return [
        pytest.param(stage, world_size, name, marks=() if is_default(stage, world_size, name) else SLOW)
        for stage, world_size in groups
        for name in names
        if has_job(stage, name)
    ]


def has_job(stage, name):
    return FIRST_STAGES.get(name, 0) <= stage <= LAST_STAGES.get(name, 3)


def is_default(stage, world_size, name):
    """Of the jobs that are not in JOBS every default group has its own."""
    group = DEFAULT_GROUPS.get((stage, world_size))
    return group is not None and (name in group or name not in JOBS)


def trained(shards: str, stage: int, world_size: int, name: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder of runs with that of the job `name`, and their reports, at one ZeRO stage on so many ranks."""
    return trained_together(shards, stage, world_size, is_default(stage, world_size, name))


@functools.cache
def trained_together(shards: str, stage: int, world_size: int, default: bool) -> tuple[Path, dict[str, dict[str, Any]]]:
    """All jobs of continuous integration or all others, in one group of processes: a folder, and their reports."""
    folder = Path(tempfile.mkdtemp(prefix="toy-pretraining-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jobs = {
        name: job | {"stage": stage, "output_dir": str(folder / name)}
        for name, job in JOBS.items()
        if has_job(stage, name) and is_default(stage, world_size, name) is default
    }
    if is_default(stage, world_size, "whole") is not default:
        return folder, run_jobs(folder, shards, jobs, world_size)
    # Dropout and a batch warm-up, in one go and stopped in the middle of the warm-up.
    grown = {"stage": stage, "batch_warmup": True, "dropout": 0.1}
    jobs["whole"] = grown | {"output_dir": str(folder / "whole")}
    for name, steps in (("first half", 2), ("second half", STEPS - 2)):
        jobs[name] = grown | {"output_dir": str(folder / "halves"), "steps": steps}
    return folder, run_jobs(folder, shards, jobs, world_size)


def run_jobs(
    folder: Path,
    shards: str,
    jobs: dict[str, dict[str, Any]],
    world_size: int,
    local_ranks: tuple[int, ...] | None = None,
) -> dict[str, dict[str, Any]]:
    plan = folder / f"plan-{world_size}.json"
    plan.write_text(json.dumps({"shards": shards, "jobs": list(jobs.values())}))
    ranks = start_ranks([str(SCRIPT), str(plan)], world_size, local_ranks)
    for status, stdout, stderr in finish(ranks, timeout=1500):
        assert status == 0, f"exit status {status}\n{stdout}\n{stderr}"
    return dict(zip(jobs, json.loads(plan.with_suffix(".out").read_text()), strict=True))


@functools.cache
def reference(shards: str, name: str) -> dict[str, Any]:
    of_zero = ("offload", "activation_checkpointing", "deepspeed")
    job = {key: value for key, value in JOBS[name].items() if key not in of_zero}
    return train_plainly(shards, job | {"stage": 1})  # which it has none of; a configuration of bf16 must name one


def weights_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return read_weights(folder / name / "checkpoints" / f"step-{STEPS:08d}")


def test_the_reference_clips_where_it_should_and_learns(small_shards):
    clipped, free = reference(str(small_shards), "clipped"), reference(str(small_shards), "unclipped")
    assert min(clipped["norms"]) > 0.5, "clipping is never active"
    assert free["losses"][-1] < free["losses"][0] - 0.1
    differences = [(clipped["weights"][name] - free["weights"][name]).abs().max() for name in free["weights"]]
    assert max(differences) > 100 * FP32["atol"], "clipping changes nothing that could be seen"


@pytest.mark.long
@pytest.mark.parametrize(("stage", "world_size", "name"), marked(GROUPS, [n for n in JOBS if "bf16" not in n]))
def test_norms_and_weights_are_those_of_plain_pytorch(stage, world_size, name, small_shards):
    folder, reports = trained(str(small_shards), stage, world_size, name)
    report, expected = reports[name], reference(str(small_shards), name)
    assert report["rows"] == ([4, 8, 12, 13, 13] if name == "warm-up" else [13] * STEPS)
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(expected["losses"]), **FP32)
    torch.testing.assert_close(torch.tensor(report["norms"]), torch.tensor(expected["norms"]), **FP32)
    weights = weights_of(folder, name)
    assert weights.keys() == expected["weights"].keys()
    for parameter, weight in expected["weights"].items():
        torch.testing.assert_close(weights[parameter], weight, **FP32, msg=lambda text, at=parameter: f"{at}: {text}")


@pytest.mark.long
@pytest.mark.parametrize(("stage", "world_size", "name"), marked(GROUPS, [n for n in JOBS if "bf16" in n]))
def test_bf16_stays_with_plain_pytorch_in_bf16(stage, world_size, name, small_shards):
    """Gradients of bf16 forwards differ in the last of 8 bits, and Adam makes steps of such differences."""
    folder, reports = trained(str(small_shards), stage, world_size, name)
    report, expected = reports[name], reference(str(small_shards), name)
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(expected["losses"]), rtol=1e-3, atol=0)
    torch.testing.assert_close(torch.tensor(report["norms"]), torch.tensor(expected["norms"]), rtol=1e-2, atol=0)
    weights = weights_of(folder, name)
    moved = torch.cat([(weights[name] - weight).flatten() for name, weight in expected["weights"].items()])
    assert moved.square().mean().sqrt() < 3e-4, "root mean square; the weights move by about 3e-3 a step"


@pytest.mark.parametrize(("stage", "world_size", "name"), marked([(1, 1), (1, 2)], ["bf16 exchanged in fp32"]))
def test_gradients_averaged_during_backward_are_bitwise_those_of_deepspeed(stage, world_size, name, small_shards):
    """The same sums of two numbers in fp32, whenever they are done; norms are added up by ranks or by parameters."""
    folder, reports = trained(str(small_shards), stage, world_size, name)
    assert reports[name]["losses"] == reports["bf16 reduced after"]["losses"]
    assert reports[name]["norms"] == pytest.approx(reports["bf16 reduced after"]["norms"], rel=1e-6)
    mine, theirs = weights_of(folder, name), weights_of(folder, "bf16 reduced after")
    assert all(torch.equal(mine[parameter], theirs[parameter]) for parameter in mine | theirs)


@SLOW
def test_four_ranks_on_two_nodes_train_in_bf16_as_plain_pytorch_within_the_rounding_of_fp32(small_shards, tmp_path):
    """With one micro-batch per rank contributions are bf16 already, and nothing else is rounded."""
    job = JOBS["bf16 in buckets"] | {"stage": 1, "output_dir": str(tmp_path / "job")}
    report = run_jobs(tmp_path, str(small_shards), {"job": job}, world_size=4, local_ranks=(0, 1, 0, 1))["job"]
    expected = reference(str(small_shards), "bf16 in buckets")
    assert report["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert report["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    weights = weights_of(tmp_path, "job")
    moved = torch.cat([(weights[name] - weight).flatten() for name, weight in expected["weights"].items()])
    assert moved.square().mean().sqrt() < 1e-5, "root mean square; the weights move by about 3e-3 a step"


@pytest.mark.parametrize(("stage", "world_size", "name"), marked(GROUPS, ["whole"]))
def test_a_batch_warmup_resumes_bitwise(stage, world_size, name, small_shards):
    folder, reports = trained(str(small_shards), stage, world_size, name)
    whole, rest = reports["whole"], reports["second half"]
    assert rest["first"] == 2 and whole["rows"] == [4, 8, 12, 13, 13]
    for figure in ("losses", "norms", "rows"):
        assert reports["first half"][figure] + rest[figure] == whole[figure]
    mine, theirs = weights_of(folder, "whole"), weights_of(folder, "halves")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


@pytest.mark.parametrize(("stage", "world_size", "name"), marked(GROUPS, ["clipped", "divided"]))
def test_an_evaluation_reports_the_same_on_any_number_of_ranks(stage, world_size, name, small_shards):
    """The last batches of 2 and 3 ranks are filled up; fp32 sums of another process differ in their last bits."""
    _, reports = trained(str(small_shards), stage, world_size, name)
    expected = reference(str(small_shards), name)["evaluation"]
    assert reports[name]["evaluation"] == pytest.approx(expected, rel=1e-6)
    assert {"valid/mlm_accuracy_top5", "valid/pair_accuracy", "valid/length/16-31/mlm_loss"} <= expected.keys()
