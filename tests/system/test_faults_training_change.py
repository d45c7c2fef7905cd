"""Rows 26, 36 and 63: runs resumed with a changed configuration or source, and configurations that are wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys

import pytest
import torch

from data_prep.base.errors import UsageError
from launch import pretrain
from tests.support.plain_ranks import losses, newest_checkpoint, run

pytestmark = pytest.mark.spawn

SETTINGS = ("training.max_steps=4", "schedule.warmup_steps=1", "checkpoint.every_steps=4")


@pytest.mark.fault(
    row="26",
    fault="the same output_dir with another seed, model size and batch; with other logging; with another torch",
    required="the first is refused with its differences, or goes on with --allow-change; the others go on, told",
)
@pytest.mark.slow
def test_row_26_a_dangerous_change_is_refused_or_allowed_and_a_harmless_one_goes_on(training):
    changed = training(*SETTINGS)
    run(changed, 1)
    pretend_another_torch(changed)
    before = newest_checkpoint(changed).stat().st_mtime_ns
    dangerous = ("training.seed=8", "model.intermediate_size=96", "training.global_batch_tokens=512")
    output = run(changed, 1, *dangerous, status=2)
    refusal = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(refusal) == 1 and "Traceback" not in output
    for part in (
        "[incompatible-change]",
        "training.seed was 7 and is 8",
        "model.intermediate_size was 64 and is 96",
        "stage 0 global_batch_tokens was 1024 and is 512",
    ):
        assert part in refusal[0]
    assert "--allow-change" not in refusal[0], "no weights of the checkpoint fit the other width"
    assert newest_checkpoint(changed).stat().st_mtime_ns == before

    output = run(changed, 1, "training.max_steps=6", "logging.every_steps=2", "data.num_workers=0")
    assert "changed since the checkpoint: logging.every_steps was 1 and is 2" in output
    assert "warning: changed since the checkpoint: version of torch was '1.0' and is" in output
    assert "resuming after step 4 of 6" in output

    output = run(changed, 1, "training.max_steps=8", "training.seed=8", "--allow-change")
    assert "changed since the checkpoint: training.seed was 7 and is 8" in output
    assert list(losses(changed)) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_a_run_resumes_after_its_preset_got_another_micro_batch_and_stays_the_same_run(training):
    """Beside the same run whose preset stays: the same batches, and losses within the rounding of fp32."""
    changed, kept = (training(*SETTINGS, "model.hidden_dropout_prob=0.0") for _ in range(2))
    run(changed, 1)
    shutil.copytree(changed.folder, kept.folder, dirs_exist_ok=True)
    preset = changed.folder / "tiny.yaml"
    values = preset.read_text(encoding="utf-8")
    assert values.count("micro_batch_tokens: 256") == 1
    preset.write_text(values.replace("micro_batch_tokens: 256", "micro_batch_tokens: 512"), encoding="utf-8")
    outputs = [run(each, 1, "training.max_steps=6") for each in (changed, kept)]
    line = "changed since the checkpoint: stage 0 micro_batch_tokens was 256 and is 512"
    assert [line in output for output in outputs] == [True, False]
    assert all("resuming after step 4 of 6" in output for output in outputs)
    assert list(losses(changed)) == [1, 2, 3, 4, 5, 6]
    assert losses(changed) == pytest.approx(losses(kept), rel=1e-5)


@pytest.mark.fault(
    row="63",
    fault="training code of the project, a user's optimizer and a command edited between start and resume",
    required="the first two are listed once, on rank 0; all with --verbose; the source is an artifact of the run",
)
def test_row_63_edited_source_is_listed_at_the_resume(training):
    changed = training(*SETTINGS, "optimizer.name=tests.support.toy_optimizers:lion")
    run(changed, 1)
    edited = ("trainer/data/masking.py", "module tests.support.toy_optimizers", "launch/options.py")
    pretend(changed, lambda state: state["sources"].update(dict.fromkeys(edited, "0" * 64)))
    output = run(changed, 2, "training.max_steps=6", "--verbose")
    (warning,) = [line for line in output.splitlines() if "the source of" in line]
    assert "warning: changed since the checkpoint: the source of module tests.support.toy_optimizers, " in warning
    assert "trainer/data/masking.py;" in warning
    assert output.count("other source files: launch/options.py") == 1
    for name in ("step-00000000.diff", "step-00000004.diff"):
        assert (changed.output_dir / "tracking" / "artifacts" / "source" / name).read_text().startswith("# ")
    assert "the source of" not in run(changed, 1, "training.max_steps=7")


def pretend_another_torch(changed) -> None:
    """Have the checkpoint say that another torch wrote it."""
    pretend(changed, lambda state: state["versions"].update(torch="1.0"))


def pretend(changed, change) -> None:
    """Change what the newest checkpoint says, and have its marker say that this is what was written."""
    folder = newest_checkpoint(changed)
    state = json.loads((folder / "state.json").read_text())
    change(state)
    data = json.dumps(state).encode()
    (folder / "state.json").write_bytes(data)
    marker = json.loads((folder / "checkpoint.json").read_text())
    (record,) = [file for file in marker["files"] if file["name"] == "state.json"]
    record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(marker))


WRONG = {
    "an unknown key": (["training.max_stepz=3"], "did you mean training.max_steps?"),
    "a wrong type": (["training.max_steps=many"], "training.max_steps"),
    "a negative learning rate": (["optimizer.learning_rate=-1e-4"], "optimizer.learning_rate"),
    "a learning rate that is no number": (["optimizer.learning_rate=.nan"], "optimizer.learning_rate"),
    "an infinite learning rate": (["optimizer.learning_rate=.inf"], "optimizer.learning_rate"),
    "negative clipping": (["training.gradient_clipping=-1"], "training.gradient_clipping"),
    "a warm-up longer than the run": (
        ["training.max_steps=10", "schedule.warmup_steps=11"],
        "schedule.warmup_steps=11 exceeds the 10 steps of the run",
    ),
    "rows longer than the positions": (["data.sequence_length=1024"], "exceeds model.max_position_embeddings=512"),
    "fp16 on the CPU": (["training.precision=fp16"], "training.precision=fp16 needs a CUDA device"),
}


@pytest.mark.fault(
    row="36",
    fault="unknown key, wrong type, negative, NaN or infinite numbers, a warm-up and rows too long, fp16 on the CPU",
    required="one paragraph that names the setting, status 2, before any process group starts",
)
@pytest.mark.parametrize(("overrides", "said"), WRONG.values(), ids=WRONG)
def test_row_36_a_wrong_configuration_is_refused_before_any_process_group(
    overrides, said, small_shards, tmp_path, monkeypatch
):
    import trainer.loop.train

    def start_no_group(*arguments: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(trainer.loop.train, "initialize_distributed", start_no_group)
    monkeypatch.setattr("trainer.distributed.exit.run_rank", lambda command: command())
    monkeypatch.setattr(pretrain, "StopSignal", lambda: None)  # the signals are this process's own
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    places = [f"data.shards={small_shards}", f"output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", "tiny_cpu", *places, *overrides])
    with pytest.raises(UsageError) as raised:
        pretrain.main()
    assert said in str(raised.value) and "\n" not in str(raised.value) and raised.value.exit_status == 2
    assert not torch.distributed.is_initialized() and not (tmp_path / "run").exists()
