"""Training from Python: it returns, may be called again, and knows a finished run before it imports torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch.pretrain import finished_text
from tests.support import fork_server
from tests.support.error_codes import coded
from trainer.api import open_loader, train
from trainer.checkpoint.data_version import open_data
from trainer.checkpoint.late_scores import is_pending
from trainer.config.run_config import load_config, resolve_config
from trainer.loop.result import find_finished_run
from trainer.tracking.status import HISTORY_NAME

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = {
    "data.sequence_length": 32,
    "data.num_workers": 0,
    "training.max_steps": 4,
    "training.micro_batch_tokens": 128,
    "training.global_batch_tokens": 256,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 32,
    "evaluation.max_tokens": 512,
    "logging.every_steps": 2,
    "schedule.warmup_ratio": 0.0,
    "tracking.uri": "sqlite:///mlflow.db",
}
SCRIPT = """
import gc, json, signal, sys, time
from trainer.api import train
from data_prep.base.errors import UserError

settings = json.loads(sys.argv[1])
handler = signal.getsignal(signal.SIGINT)
first = train("tiny_cpu", settings)
try:
    train("tiny_cpu", settings | {"training.seed": 99})
    code = "none"
except UserError as error:
    code = error.code
again = train("tiny_cpu", settings)
longer = train("tiny_cpu", settings | {"training.max_steps": 8})
gc.unfreeze()
for _ in range(60):  # a thread of the run that has not ended yet may keep one for a moment
    engines = sum(type(each).__name__ == "DeepSpeedEngine" for each in gc.get_objects())
    if not engines:
        break
    time.sleep(1)
    gc.collect()
print(json.dumps({
    "engines": engines,
    "steps": [first.step, again.step, longer.step],
    "status": [first.status, again.status, longer.status],
    "loss": first.metrics["valid/mlm_loss"],
    "checkpoints": [str(first.checkpoint), str(longer.checkpoint)],
    "view_hint": first.view_hint,
    "code": code,
    "handler_is_restored": signal.getsignal(signal.SIGINT) is handler,
}))
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("api")
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def settings(small_shards: Path) -> dict[str, object]:
    return SMALL | {"data.shards": str(small_shards), "output_dir": "run"}


@pytest.fixture(scope="module")
def ran(folder: Path, settings: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """A process that trains four times from Python."""
    done = fork_server.run(["-c", SCRIPT, json.dumps(settings)], folder, environment())
    assert done.returncode == 0, done.stderr
    return done


def test_training_returns_its_result_and_may_be_called_again(ran: subprocess.CompletedProcess[str]) -> None:
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["steps"] == [4, 4, 8] and set(result["status"]) == {"finished"}
    assert 1.0 < result["loss"] < 10.0 and result["code"] != "none"
    assert result["checkpoints"] == ["run/checkpoints/step-00000004", "run/checkpoints/step-00000008"]
    assert result["handler_is_restored"]
    assert "mlflow ui --backend-store-uri" in result["view_hint"] and "/model-metrics?" in result["view_hint"]


def test_nothing_keeps_the_engines_of_earlier_runs(ran: subprocess.CompletedProcess[str]) -> None:
    assert json.loads(ran.stdout.splitlines()[-1])["engines"] == 0


UNEVALUATED = """
import json, sys
from trainer.api import train

settings = json.loads(sys.argv[1]) | {"evaluation.every_steps": 2, "checkpoint.every_steps": 2}
first = train("tiny_cpu", settings)
longer = train("tiny_cpu", settings | {"training.max_steps": 6, "evaluation.minimal_pairs": "pairs.jsonl"})
print(json.dumps([{"status": each.status, "metrics": dict(each.metrics)} for each in (first, longer)]))
"""


@pytest.mark.slow
def test_a_data_set_without_a_valid_split_trains_and_resumes_without_evaluating_it(
    shards_without_valid: Path, tmp_path: Path
) -> None:
    pair = {"sentence_good": "the river crossed the village.", "sentence_bad": "the river the crossed village."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    settings = SMALL | {"data.shards": str(shards_without_valid), "output_dir": "run"}
    done = fork_server.run(["-c", UNEVALUATED, json.dumps(settings)], tmp_path, environment())
    assert done.returncode == 0, done.stderr
    first, longer = json.loads(done.stdout.splitlines()[-1])
    assert first["status"] == longer["status"] == "finished"
    assert not [name for name in first["metrics"] if name.startswith("valid/")]
    assert "valid/minimal_pairs_accuracy" in longer["metrics"] and "valid/mlm_loss" not in longer["metrics"]
    output = done.stdout + done.stderr
    assert output.count("evaluation is off: the data set has no valid split") == 2
    assert output.count("valid at step") == 1 and not is_pending(tmp_path / "run/checkpoints/step-00000006")


MANY = """
import json, sys
import psutil
from trainer.api import train

process, settings, measured = psutil.Process(), json.loads(sys.argv[1]), {}
for number in range(1, 11):
    train("tiny_cpu", settings | {"output_dir": f"many-{number}"})
    measured[number] = (process.memory_info().rss, process.num_fds(), process.num_threads())
print(json.dumps([measured[3], measured[10]]))
"""


@pytest.mark.slow
def test_memory_files_and_threads_do_not_grow_with_the_number_of_runs(
    folder: Path, settings: dict[str, object]
) -> None:
    larger = {"model.hidden_size": 256, "model.num_hidden_layers": 4, "model.intermediate_size": 1024}
    words = ["-c", MANY, json.dumps(settings | larger | {"training.max_steps": 2})]
    done = fork_server.run(words, folder, environment())
    assert done.returncode == 0, done.stderr
    third, tenth = json.loads(done.stdout.splitlines()[-1])
    assert tenth[0] - third[0] < 50 << 20, (third, tenth)
    assert tenth[1] - third[1] < 10 and tenth[2] - third[2] < 4, (third, tenth)


def test_a_checkpoint_states_its_scores_and_how_they_were_measured(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    evaluation = json.loads((folder / "run/checkpoints/step-00000008/evaluation.json").read_text())
    measured = {"mlm_loss", "mlm_perplexity", "pair_accuracy", "own_mlm_loss", "word_bits_per_byte"}
    assert {f"valid/{name}" for name in measured} <= evaluation["metrics"].keys()
    facts = evaluation["facts"]
    settings = {"mlm_probability": "0.15", "mask_unit": "token", "seed": "0", "sequence_length": "64", "rows": "8"}
    assert settings.items() <= facts.items() and facts["sentence_pairs"] == "next_sentence"
    assert "length 32" in facts["own"] and {"valid_split", "tokenizer", "words"} <= facts.keys()
    assert json.loads((folder / "run/status.json").read_text())["evaluation"] == facts


def test_a_longer_run_after_a_decay_warns_of_both_learning_rates(ran: subprocess.CompletedProcess[str]) -> None:
    (warning,) = [line for line in ran.stderr.splitlines() if "learning rate jumps" in line]
    assert "from 4 to 8" in warning and "warmup_stable_decay" in warning


def test_a_finished_run_is_recognized_without_torch_and_counts_no_restart(
    ran: subprocess.CompletedProcess[str], folder: Path, settings: dict[str, object]
) -> None:
    history = folder / "run" / HISTORY_NAME
    before = history.read_text()
    assert sum('"started"' in line for line in before.splitlines()) == 2, "one start for each training"
    words = [f"{name}={value}" for name, value in (settings | {"training.max_steps": 8}).items()]
    code = (
        "import sys; from launch.pretrain import main; main(); print(sorted({'torch', 'deepspeed'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", code, "--config", "tiny_cpu", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "run is finished: step 8/8" in done.stdout and "step-00000008" in done.stdout
    assert history.read_text() == before


@pytest.mark.parametrize(
    "changed",
    [
        {"training.max_steps": 9},
        {"training.max_steps": 8, "optimizer.learning_rate": 0.5},
        {"training.max_steps": 8, "registry.name": "birds"},
        {"training.max_steps": 8, "checkpoint.upload_to": "s3://bucket/run"},
        {"training.max_steps": 8, "output_dir": "another"},
    ],
)
def test_a_run_with_something_left_to_do_is_not_called_finished(
    ran: subprocess.CompletedProcess[str],
    folder: Path,
    settings: dict[str, object],
    changed: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert find_finished_run(load_config("tiny_cpu", settings | {"training.max_steps": 8})) is not None
    assert find_finished_run(load_config("tiny_cpu", settings | changed)) is None


def test_a_finished_run_that_is_started_with_fewer_steps_stays_finished(
    ran: subprocess.CompletedProcess[str], folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config("tiny_cpu", settings | {"training.max_steps": 4})
    found = find_finished_run(config)
    assert found is not None and found.step == 8
    assert "step 8, beyond the 4 steps of training.max_steps" in finished_text(found, config)


def test_several_hosts_decide_together(
    ran: subprocess.CompletedProcess[str], folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_config("tiny_cpu", settings | {"training.max_steps": 8})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find_finished_run(config) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_finished_run(config) is not None


def test_a_loader_gives_the_batches_of_a_step_on_every_rank(settings: dict[str, object]) -> None:
    config = load_config("tiny_cpu", settings)
    batches = list(open_loader(config))
    assert [batch.first_sample for batch in batches] == [0, 8, 16, 24]
    later = next(open_loader(config, step=2))
    assert later.first_sample == 16
    assert (later.micro_batches[0].input_ids == batches[2].micro_batches[0].input_ids).all()
    halves = [next(open_loader(config, rank=rank, world_size=2)) for rank in (0, 1)]
    rows = [row for half in halves for batch in half.micro_batches for row in batch.input_ids.tolist()]
    assert rows == [row for batch in batches[0].micro_batches for row in batch.input_ids.tolist()]
    assert open_data(config)[0].url == settings["data.shards"]


def test_overrides_may_be_a_mapping_of_any_values() -> None:
    config = load_config("tiny_cpu", {"optimizer.learning_rate": 1e-5, "tracking.uri": None, "output_dir": "a: 'b'"})
    assert (config.optimizer.learning_rate, config.tracking.uri, config.output_dir) == (1e-5, None, "a: 'b'")
    mixture = [{"url": "one", "weight": 2}, {"url": "two", "weight": 1.5}]
    assert load_config("tiny_cpu", {"data.shards": mixture}).data.components[1].weight == 1.5
    with pytest.raises(UsageError, check=coded("overrides-of-loaded-config")):
        resolve_config(config, {"training.seed": 1})


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, check=coded("output-dir-is-url")):
        train("tiny_cpu", settings | {"output_dir": "s3://bucket/run"})
    with pytest.raises(UsageError, check=coded("missing-config")):
        train(tmp_path / "none.yaml")
