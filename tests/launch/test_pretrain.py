"""`launch/pretrain.py` as its user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import yaml

from data_prep.base.errors import UsageError, UserError
from launch import pretrain as launched
from launch.pretrain import finished_text, main
from tests.support import fork_server, launch_command
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config
from trainer import load_config
from trainer.config.run_config import RunConfig, check_output_dir
from trainer.distributed import exit
from trainer.loop.result import RunResult
from trainer.preflight import rehearsal

REPOSITORY = Path(__file__).resolve().parents[2]


def pretrain(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"} | env
    return fork_server.run([str(REPOSITORY / "launch" / "pretrain.py"), *arguments], cwd, environment)


def assert_refused(result: subprocess.CompletedProcess[str], status: int, *said: str) -> None:
    paragraphs = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == status, result.stderr
    assert len(paragraphs) == 1 and paragraphs[0].startswith("error: "), result.stderr
    for part in said:
        assert part in result.stderr


def test_a_file_as_output_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for output_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        arguments = ["pretrain.py", "--config", "tiny_cpu", "data.shards=shards", f"output_dir={output_dir}"]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(UsageError, check=coded("output-dir-is-file"), match=f"output_dir={output_dir} is"):
            main()
    check_output_dir(str(tmp_path / "folder" / "run"))


@pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/run", "file:///runs/one"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_output_dir_that_is_a_url_is_refused(monkeypatch, url, more):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", "tiny_cpu", f"output_dir={url}", *more])
    with pytest.raises(UsageError, check=coded("output-dir-is-url"), match=r"checkpoint\.upload_to") as refused:
        main()
    assert "hunter2" not in str(refused.value)


def test_a_broken_link_as_output_folder_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for output_dir in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(UsageError, check=coded("output-dir-dangling-link"), match=f"{tmp_path}/link,.*nothing"):
            check_output_dir(str(output_dir))
    (tmp_path / "nothing").mkdir()
    check_output_dir(str(tmp_path / "link" / "run"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.max_stepz=3"], "did you mean training.max_steps?"),
        (["data.sequence_length=1024"], "exceeds model.max_position_embeddings=512"),
        (["data.sequence_length=1024"], "[sequence-too-long]"),
        (["training.seed"], "[invalid-override]"),
        (["--learning_rate", "1e-4"], "unknown option --learning_rate. Fix: write optimizer.learning_rate=1e-4"),
        (["--learning_rate=1e-4"], "write optimizer.learning_rate=1e-4"),
        (["--bf16", "training.seed=3"], "write training.precision=bf16"),
        (["--training.seed", "3"], "write training.seed=3: settings have no dashes. [unknown-option]"),
        (["--dry-run", "--gpus", "8,64"], "Fix: add --ranks N to --dry-run"),
        (["--deepspeed", "ds.json"], "Fix: write --deepspeed_config ds.json (DeepSpeed JSON). [unknown-option]"),
        (["--nonsense"], "unknown option --nonsense"),
        (["per_device_train_batch_size=8"], "Fix: write training.micro_batch_tokens=512 (8 rows"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_starts(tmp_path, overrides, said):
    assert_refused(pretrain("--config", "tiny_cpu", *overrides, cwd=tmp_path), 2, said)
    assert not any(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(("local_rank", "speaks"), [("0", True), ("1", False)])
def test_a_wrong_configuration_is_reported_by_the_first_rank_of_each_host(tmp_path, local_rank, speaks):
    """The file of another host may be wrong where rank 0's is not."""
    env = {"RANK": "9", "LOCAL_RANK": local_rank, "WORLD_SIZE": "16"}
    result = pretrain("--config", "tiny_cpu", "training.seed=ten", cwd=tmp_path, **env)
    assert result.returncode == 2 and result.stderr.startswith("error: ") is speaks and bool(result.stderr) is speaks


def test_a_folder_without_manifest_is_no_shard_set(tmp_path):
    (tmp_path / "shards").mkdir()
    result = pretrain("--config", "tiny_cpu", "data.shards=shards", cwd=tmp_path)
    assert_refused(result, 2, "shards holds no manifest.json", "clozeworks shards")


@pytest.mark.long
def test_a_password_in_a_url_is_in_no_output(tmp_path):
    url = "data.shards=http://user:hunter2@127.0.0.1:9/shards?sig=hunter2"
    at_once = {"CLOZEWORKS_RETRY_SECONDS": "0"}
    refused = pretrain("--config", "tiny_cpu", url, cwd=tmp_path, **at_once)
    explained = pretrain("--config", "tiny_cpu", url, "--dry-run", cwd=tmp_path, **at_once)
    assert_refused(refused, 1, "http://127.0.0.1:9/shards")
    assert explained.returncode == 0 and "http://127.0.0.1:9/shards" in explained.stdout
    assert "hunter2" not in refused.stderr + refused.stdout + explained.stdout + explained.stderr


@pytest.mark.long
def test_a_tokenizer_that_is_not_the_shards_own_is_refused_with_both_fingerprints(tmp_path, small_corpus, small_shards):
    other = tmp_path / "other"
    subprocess.run(
        [sys.executable, "-m", "data_prep", "tokenizer", "--input", str(small_corpus), "--output", str(other)]
        + ["--vocab-size", "700"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    result = pretrain("--config", "tiny_cpu", f"data.shards={small_shards}", f"data.tokenizer={other}", cwd=tmp_path)
    assert_refused(result, 2, "has fingerprint", "were made with")


@pytest.mark.long
def test_a_run_refused_for_its_initial_weights_leaves_no_folder_and_its_dry_run_says_so(tmp_path, small_shards):
    begins = ["init_from=nowhere", "model.output_bias=zeros", "output_dir=run", f"data.shards={small_shards}"]
    for more in [], ["--dry-run"]:
        result = pretrain("--config", "tiny_cpu", *begins, *more, cwd=tmp_path)
        assert_refused(result, 2, "nowhere is not a directory, and the Hugging Face Hub cannot be reached")
        assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_print_config_gives_yaml_that_is_the_same_configuration(tmp_path):
    result = pretrain("--config", "tiny_cpu", "training.seed=5", "--print-config", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "printed.yaml").write_text(result.stdout)
    assert load_config(tmp_path / "printed.yaml") == load_config("tiny_cpu", ["training.seed=5"])
    assert yaml.safe_load(result.stdout)["training"]["seed"] == 5


@pytest.mark.long
def test_dry_run_explains_a_run_without_shards(tmp_path):
    result = pretrain("--config", "configs/bert_large.yaml", "--dry-run", "--ranks", "8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for part in (
        "hidden_size: 1024",
        "total                    335,180,608\n",
        "global batch 1,048,576 tokens = ",
        "1.992 GFLOP per token",
        "<- this run",
        "skipped: data.shards=data/shards does not exist",
    ):
        assert part in result.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_dry_run_reports_the_shards_there_are(tmp_path, small_shards):
    result = pretrain("--config", "tiny_cpu", f"data.shards={small_shards}", "--dry-run", cwd=tmp_path, WORLD_SIZE="2")
    assert "4 train shards for 2 ranks" in result.stdout, result.stderr


@pytest.mark.long
def test_a_deepspeed_file_beside_a_deepspeed_block_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    result = pretrain(
        "--config", "tiny_cpu", "--deepspeed_config", "ds.json", "deepspeed={wall_clock_breakdown: true}", cwd=tmp_path
    )
    assert_refused(result, 2, "keep one of them")


@pytest.mark.long
def test_a_deepspeed_setting_that_contradicts_the_yaml_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 5}')
    result = pretrain("--config", "tiny_cpu", "--deepspeed_config", "ds.json", cwd=tmp_path)
    assert_refused(result, 2, "zero_optimization.stage", "gradient_clipping")


@pytest.mark.long
def test_a_deepspeed_block_is_checked_against_the_number_of_ranks(tmp_path):
    sizes = ["training.global_batch_tokens=4096", "training.micro_batch_tokens=1024"]
    block = "deepspeed={gradient_accumulation_steps: 2}"
    arguments = ("--config", "tiny_cpu", *sizes, block, "--dry-run")
    assert pretrain(*arguments, "--ranks", "2", cwd=tmp_path).returncode == 0
    assert pretrain(*arguments, cwd=tmp_path, WORLD_SIZE="2").returncode == 0
    assert_refused(pretrain(*arguments, "--ranks", "1", cwd=tmp_path), 2, "gradient_accumulation_steps=2 contradicts")


@pytest.mark.long
def test_help_names_every_setting(tmp_path):
    result = pretrain("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "training.global_batch_tokens" in result.stdout and "zero.stage" in result.stdout


@pytest.mark.parametrize("option", ["--ranks=8", "--tokens-per-second=9000", "--gpu=h100-80", "--benchmark=speed.json"])
def test_options_of_dry_runs_start_no_run(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", "tiny_cpu", option])
    with pytest.raises(UsageError, check=coded("option-needs-dry-run"), match=option.replace("=", " ")):
        main()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--branch-from", "runs/stable:5"], "branch-without-stage"),
        (["--stage", "decay"], "branch-without-stage"),
        (["--branch-from", "runs/stable", "--stage", "decay"], "invalid-branch"),
        (["--branch-from", "runs/stable:5", "--stage", "decay"], "unknown-stage"),
        (["--branch-from", "run:5", "--stage", "decay", "output_dir=run"], "branch-into-its-own-run"),
    ],
)
def test_a_branch_that_is_not_clear_is_refused(tmp_path, monkeypatch, options, code):
    stages = "training.stages=[{name: decay, steps: 3}]" if code == "branch-into-its-own-run" else "training.seed=1"
    steps = ["training.max_steps=null"] if "stages" in stages else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", "tiny_cpu", stages, *steps, *options])
    with pytest.raises(UsageError, check=coded(code)):
        main()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("volumes", "settings", "is_refused"),
    [
        ("", ["output_dir=/dev/shm/run"], True),
        ("", ["output_dir=/shared/run"], False),
        ("", ["output_dir=/dev/shm/run", "checkpoint.upload_to=s3://bucket/run"], False),
        ("/data,/scratch", ["output_dir=/scratch/run"], False),
        ("/data,/scratch", ["output_dir=/database/run"], True),
        ("/dev/shm", ["output_dir=/dev/shm/run"], False),
    ],
)
def test_an_output_dir_that_ends_with_the_job_is_refused(volumes, settings, is_refused, monkeypatch, capsys):
    words = ["pretrain.py", "--config", "tiny_cpu", "data.shards=s", *settings, "--check-volumes", volumes]
    monkeypatch.setattr(sys, "argv", words)
    if is_refused:
        with pytest.raises(UsageError, check=coded("output-dir-outside-volumes")):
            main()
        return
    main()
    output_dir = settings[0].partition("=")[2]
    lines = [f"log file: {output_dir}/logs/rank-0.log", f"status: clozeworks status {output_dir}"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_rehearsal_that_fails_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, is_left = [], []

    def fail(on_forced_end: Callable[[], None], **_: object) -> NoReturn:
        made[0].mkdir()
        on_forced_end()  # as the watchdog does before it ends the process
        is_left.append(made[0].exists())
        made[0].mkdir()
        raise UserError("out of memory", fix="lower it", code="out-of-memory")

    def start(config: RunConfig, allow_change: bool, branch: object, begin: Callable[[object], NoReturn]) -> NoReturn:
        made.append(Path(config.output_dir))
        begin(fail)

    monkeypatch.setattr(launched, "start", start)
    monkeypatch.setattr(exit, "run_rank", lambda command: command())
    for name in ("check_launch", "show_times", "StopSignal"):
        monkeypatch.setattr(launched, name, lambda: None)
    given = (f"output_dir={tmp_path}/run", "data.shards=x", "data.tokenizer=x")
    with pytest.raises(UserError, check=coded("out-of-memory")):
        launch_command.run(monkeypatch, launched, "--config", "tiny_cpu", "--rehearse", *given)
    assert made[0].parent == tmp_path and is_left == [False] and not [*tmp_path.iterdir()]


def test_a_rehearsal_reports_the_hours_of_a_run_in_epochs(tmp_path, monkeypatch, small_shards) -> None:
    lengths = []

    def note(whole: RunConfig, *_: object) -> SimpleNamespace:
        lengths.append(whole.max_steps)
        return SimpleNamespace(text=str)

    def start(config: RunConfig, allow_change: bool, branch: object, begin: Callable[[object], NoReturn]) -> NoReturn:
        begin(lambda **_: RunResult(tmp_path, "finished", 5, {}, tmp_path, None, "mlflow ui"))

    monkeypatch.setattr(rehearsal, "report", note)
    monkeypatch.setattr(launched, "start", start)
    monkeypatch.setattr(exit, "run_rank", lambda command: sys.exit(command()))
    for name in ("check_launch", "show_times", "StopSignal"):
        monkeypatch.setattr(launched, name, lambda: None)
    for epochs in (1, 3):
        given = (f"output_dir={tmp_path}/run", f"data.shards={small_shards}", f"training.duration={epochs} epochs")
        with pytest.raises(SystemExit, match="0"):
            launch_command.run(monkeypatch, launched, "--config", "tiny_cpu", "--rehearse", *given)
    assert lengths[0] > 0 and lengths[1] == 3 * lengths[0]


@pytest.mark.parametrize(
    ("length", "remedy"),
    [
        (["training.max_steps=8"], "raise training.max_steps"),
        (["training.max_steps=null", "training.duration=8 steps"], "raise training.duration"),
        (["training.max_steps=null", "training.duration=2 epochs"], "raise training.duration"),
        (["training.max_steps=null", "training.stages=[{steps: 8}]"], "lengthen a stage of training.stages"),
    ],
)
def test_a_finished_run_names_the_setting_that_has_its_length(length: list[str], remedy: str, tmp_path: Path) -> None:
    config = preset_config(*length, shards="s", output_dir=tmp_path)
    result = RunResult(tmp_path, "finished", 8, {}, tmp_path, None, "mlflow ui")
    assert f"to train longer, {remedy};" in finished_text(result, config)


def test_a_dry_run_in_epochs_without_data_explains_the_rest(tmp_path, monkeypatch, capsys):
    """The number of steps is unknown; memory and batches do not depend on it, and a warmup in steps may be longer."""
    length = ("training.duration=3 epochs", "schedule.warmup=2000", f"data.shards={tmp_path}/none")
    with pytest.raises(UserError, check=coded("missing-path")):
        launch_command.run(monkeypatch, launched, "--config", "tiny_cpu", "--dry-run", *length)
    printed = capsys.readouterr().out
    titles = ["Parameters", "Batches", "Memory per rank", "Shards", "Configuration"]
    assert [title for title in titles if f"\n{title}" in f"\n{printed}"] == titles
    assert "the number of steps is unknown" in printed and "steps =" not in printed and "FLOP" not in printed

    assert "\n  duration: 3 epochs" in printed


def test_a_dry_run_whose_warmup_exceeds_its_epochs_says_so(small_shards: Path, tmp_path, monkeypatch, capsys):
    settings = (f"data.shards={small_shards}", "training.duration=1 epoch", "schedule.warmup=100000")
    with pytest.raises(UserError, check=coded("schedule-longer-than-run")):
        launch_command.run(monkeypatch, launched, "--config", "tiny_cpu", "--dry-run", *settings)
    assert "the number of steps is unknown" in capsys.readouterr().out
