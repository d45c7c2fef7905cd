"""`tests/benchmarks/pretraining.py` trains both sides and judges them alike; what it measures here means nothing."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.settings import load_settings
from trainer.config.run_config import RunConfig
from trainer.config.schedule import learning_rate
from trainer.data.shard_set import open_shard_set

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REPOSITORY = BENCHMARKS.parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a script of the benchmarks' folder, which finds its neighbors there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_the_peers_rows_are_every_document_in_its_special_tokens_one_after_another(
    scripts: Any, small_shards: Path
) -> None:
    shard_set = open_shard_set(str(small_shards))
    rows = scripts("pretraining_rows")["grouped_rows"](shard_set, "train", 32)
    special = shard_set.manifest.tokenizer.special_tokens
    expected: list[int] = []
    for shard in shard_set.shards("train"):
        for tokens, starts in _records(small_shards / shard.record.name):
            for document in np.split(tokens, starts[1:]):
                expected += [special.cls, *document.tolist(), special.sep]
    assert rows.shape == (len(expected) // 32, 32) and len(rows) > 10
    assert rows.reshape(-1).tolist() == expected[: rows.size]
    few = scripts("pretraining_rows")["grouped_rows"](shard_set, "train", 32, 5)
    assert np.array_equal(few, rows[:5])


def _records(shard: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and the documents' starts of every record, as anybody reads a tar."""
    with tarfile.open(shard) as tar:
        members = {name: np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames()}  # type: ignore[union-attr]
    for name, tokens in members.items():
        if name.endswith(".tokens.npy"):
            yield tokens, members[name.replace(".tokens.", ".documents.")]


def test_a_budget_keeps_the_shape_of_the_schedule_and_drops_what_one_side_lacks(scripts: Any) -> None:
    script = scripts("pretraining_budget")
    budgeted, budget = script["budgeted"], script["Budget"]
    overrides = ["data.shards=s", "output_dir=o", "data.mask_unit=word", "data.final_mlm_probability=0.3"]
    config = load_settings(RunConfig, "tiny_cpu", [*overrides, "schedule.warmup_steps=300"])
    small = budgeted(config, budget(100_000, 4, 2, 800), "shards", "work")
    assert small.model.vocab_size == 800 and small.max_steps == 48
    assert small.schedule.warmup_steps == round(300 * 48 / 3000)
    assert small.data.mask_unit == "token" and small.data.evaluated_mlm_probability == 0.3
    assert not small.data.has_sentence_pairs and small.checkpoint.every_steps == 12
    phased = load_settings(RunConfig, "bert_large_phased", ["data.shards=s", "output_dir=o"])
    one = budgeted(phased, budget(10 * phased.stages[0].global_batch_tokens, 2, 1, 800), "shards", "work")
    assert len(one.stages) == 1 and one.max_steps == 10
    assert one.data.sequence_length == phased.stages[0].sequence_length
    with pytest.raises(UsageError, match="fewer than the --points 4"):
        budgeted(config, budget(2048, 4, 2, 800), "shards", "work")


def test_a_curve_reaches_a_loss_between_its_points(scripts: Any) -> None:
    time_to_loss = scripts("pretraining_table")["time_to_loss"]
    points = [
        {"tokens": 100 * number, "seconds": 10 * number, "documents": {"mlm_loss": loss}}
        for number, loss in enumerate((7.0, 6.0, 5.0), start=1)
    ]
    assert time_to_loss(points, "documents", 5.5) == (250.0, 25.0)
    assert time_to_loss(points, "documents", 7.5) == (100.0, 10.0)
    assert time_to_loss(points, "documents", 4.9) is None


def test_the_judge_counts_predicted_places_alone(scripts: Any, tiny_model: Path) -> None:
    judge = scripts("pretraining_rows")["judge"]
    ids = torch.tensor([[2, 6, 4, 3], [2, 4, 3, 0]])
    row = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.full_like(ids, -100)}
    row["labels"][0, 2], row["labels"][1, 1] = 7, 8
    found = judge(tiny_model, {"documents": [row]}, torch.device("cpu"))["documents"]
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        first = model(input_ids=ids[:1]).logits[0, 2].log_softmax(-1)[7]
        second = model(input_ids=ids[1:, :3]).logits[0, 1].log_softmax(-1)[8]
    assert found["predictions"] == 2
    assert found["mlm_loss"] == pytest.approx(-(first + second).item() / 2, abs=1e-5)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_command_trains_both_judges_them_and_goes_on_where_it_stopped(
    precision: str, small_shards: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(BENCHMARKS / "pretraining.py"), "--smoke", "--shards", str(small_shards)]
    command += ["--tokens", "2048", "--points", "2", "--valid-tokens", "512", "--work", str(tmp_path / "work")]
    command += [
        "--results",
        str(tmp_path / "found.json"),
        f"training.precision={precision}",
    ]
    _run([*command, "--seeds", "1"])
    first = tmp_path / "work" / "seed-1"
    written = (first / "ours.json").stat().st_mtime_ns
    assert not (tmp_path / "work" / "seed-2").exists()
    out = _run([*command, "--seeds", "2"])
    assert (first / "ours.json").stat().st_mtime_ns == written, "a stage that is done is not done again"
    assert "documents: " in out and "grouped: " in out
    report = json.loads((tmp_path / "found.json").read_text())
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert set(report["sides"]) == {"ours", "transformers"}
    for side in report["sides"].values():
        assert [point["tokens"] for point in side["points"]] == [1024, 2048]
        seconds = [point["seconds"] for point in side["points"]]
        assert 0 < seconds[0] < seconds[1] <= side["whole_command_seconds"]
        for form in ("documents", "grouped"):
            assert 2.0 < side["points"][-1][form]["mlm_loss"] < 12.0
            assert side["points"][-1][form]["predictions"] > 10
            losses = [seed["points"][-1][form]["mlm_loss"] for seed in side["seeds"]]
            last = side["points"][-1][form]
            assert len(losses) == 2 and losses[0] != losses[1], "another seed is another run"
            assert (last["lowest"], last["highest"]) == (min(losses), max(losses))
            assert last["mlm_loss"] == pytest.approx(np.mean(losses))
    assert str(tmp_path) not in json.dumps(report)
    config = load_settings(RunConfig, tmp_path / "work" / "settings.yaml")
    told = json.loads((first / "peer.json").read_text())
    rates = [learning_rate(min(step, 7), 8, config.optimizer.learning_rate, config.schedule) for step in range(1, 9)]
    assert told["learning_rates"] == pytest.approx(rates)
    _run([*command, "optimizer.learning_rate=0.5"], fails="holds stages of other settings")


def test_a_labeled_file_that_is_missing_is_told_before_anything_is_trained(scripts: Any, tmp_path: Path) -> None:
    script = scripts("downstream")
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.tsv").touch()
    with pytest.raises(UserError, match="has no sst2/dev.tsv"):
        script["check_labeled"](tmp_path, script["TASKS"])
    (tmp_path / "sst2" / "dev.tsv").touch()
    script["check_labeled"](tmp_path, script["TASKS"][:1])


@pytest.mark.slow
def test_the_downstream_command_compares_on_every_task_and_does_none_twice(tiny_model: Path, tmp_path: Path) -> None:
    labeled = tmp_path / "labeled"
    heads = {"sst2": "sentence\tlabel", "mrpc": "Quality\t#1 String\t#2 String", "fr_allocine_films": "text,label"}
    lines = {"sst2": "w{0} w1\t{1}", "mrpc": "{1}\tw{0} w1\tw2", "fr_allocine_films": "w{0} w1,{1}"}
    for name, head in heads.items():
        for file in ("train.csv", "test.csv") if name == "fr_allocine_films" else ("train.tsv", "dev.tsv"):
            rows = [lines[name].format(number % 9, number % 2) for number in range(40)]
            (labeled / name).mkdir(parents=True, exist_ok=True)
            (labeled / name / file).write_text("\n".join([head, *rows]) + "\n")
    _with_tokenizer(tiny_model)
    command = [sys.executable, str(BENCHMARKS / "downstream.py"), "--labeled", str(labeled), "--rows", "30"]
    command += ["--english", str(tiny_model), "--french", str(tiny_model), "--seeds", "2", "--epochs", "1"]
    command += ["--learning-rates", "1e-3", "--max-length", "16", "--work", str(tmp_path / "work")]
    command += ["--results", str(tmp_path / "found.json")]
    _run(command)
    report = json.loads((tmp_path / "found.json").read_text())
    assert set(report["tasks"]) == {f"{name}, 30 rows" for name in heads}
    assert report["tasks"]["sst2, 30 rows"]["num_examples"] == {"train": 27, "valid": 3, "test": 40}
    for task in report["tasks"].values():
        assert set(task["variants"]) == {"scratch", "frozen", "full"} and task["scored_on"] == "test"
        for entry in task["variants"].values():
            values = [fit["scores"]["accuracy"] for fit in entry["fits"]]
            assert len(values) == 2 and entry["mean"]["accuracy"] == pytest.approx(np.mean(values))
    assert str(tmp_path) not in json.dumps(report)
    assert "..." not in _run(command), "tasks that are done are read, not fitted again"


def _with_tokenizer(folder: Path) -> None:
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(15))]
    BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)


def _run(command: list[str], fails: str | None = None) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    if fails is not None:
        assert done.returncode == 1 and fails in done.stderr
        return done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout
