"""The demo's closing table shows the scores beside the baseline, and commands that can be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UserError
from launch.demo import demo_summary
from tests.support.error_codes import coded
from tests.support.preparations import Manifest

STATUS = {
    "step": 3000,
    "max_steps": 3000,
    "tokens_seen": 6_144_000,
    "parameters": 1_234_567,
    "state": "finished",
    "metrics": {
        "valid/mlm_loss": 5.25,
        "valid/mlm_accuracy": 0.2,
        "valid/mlm_perplexity": 190.6,
        "valid/pair_accuracy": 0.61,
    },
    "mlflow_run_id": "abc",
    "tracking_uri": "sqlite:///mlflow.db",
}

RESULTS = {
    "masks": 300,
    "top_1": 0.25,
    "top_5": 0.5,
    "unigram_top_1": 0.06,
    "unigram_top_5": 0.18,
    "view_hint": "mlflow ui",
}


def split(name: str, documents: int, tokens: int, entropy: float | None) -> dict[str, Any]:
    """The record of a split of one shard."""
    counts = {"documents": documents, "sentences": documents, "tokens": tokens}
    index = {"name": f"{name}-000000.index.safetensors", "bytes": 0, "sha256": "0" * 64}
    shard = index | {"name": f"{name}-000000.tar", "index": index, "records": 1, "min_document_tokens": 1} | counts
    return {"shards": [shard], "unigram_entropy_nats": entropy} | counts


def manifest(entropy: float | None = 6.9) -> Manifest:
    return Manifest.model_validate(
        {
            "format_version": 2,
            "clozeworks_version": "0",
            "tokenizer": {"fingerprint": "0" * 64, "vocab_size": 8192, "token_dtype": "uint16"},
            "config": {},
            "inputs": [],
            "sources": [],
            "train": split("train", 90, 4_000_000, 7.1),
            "valid": split("valid", 10, 40_000, entropy),
            "token_counts": {"name": "token_counts.safetensors", "bytes": 0, "sha256": "0" * 64},
        }
    )


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps(STATUS))
    (tmp_path / "timings.tsv").write_text(
        "environment\t95\ncorpus\t20\npretraining-run\t4000\npretraining-run-full\t9000\n"
    )
    (tmp_path / "results-run.json").write_text(json.dumps(RESULTS))
    (tmp_path / "corpus.txt").write_text("docstrings\n")
    (tmp_path / "shards" / "manifest.json").write_text(manifest().to_json(), encoding="utf-8")
    return tmp_path


def test_the_table_shows_sizes_times_scores_baseline(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_summary.main(["--demo", str(demo), "--model", "models:/demo@best"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:32].strip(): line[32:].split() for line in lines}
    assert rows["parameters"] == ["1,234,567"]
    assert rows["tokens, train + valid"] == ["4,000,000", "+", "40,000"]
    assert rows["time, environment"] == ["1:35"]
    assert rows["time, pretraining"] == ["1:06:40"]
    assert rows["time, all after the environment"] == ["1:07:00"]
    assert rows["valid MLM loss (nats)"] == ["5.250", "6.900"]
    assert rows["valid MLM perplexity"] == ["190.6", "992.3"]
    assert rows["300 masked words: top 1"] == ["25.0%", "6.0%"]
    assert rows["300 masked words: top 5"] == ["50.0%", "18.0%"]
    assert "The model has read only the docstrings of installed Python packages" in "".join(lines)
    assert any(line == f"loss curves: {demo / 'curves-run.png'}" for line in lines)


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [(6.9, "loss is 1.65 nats below"), (5.0, "loss is 0.25 nats above"), (5.0, "does not use context yet")],
)
def test_the_verdict_follows_the_comparison_with_the_baseline(entropy: float, expected: str) -> None:
    assert expected in demo_summary.format_scores(STATUS["metrics"], manifest(entropy), RESULTS)


def test_a_lower_loss_without_hits_is_not_called_context() -> None:
    """Tokens that masking leaves as they are can be copied: that alone lowers the loss."""
    text = demo_summary.format_scores(STATUS["metrics"], manifest(6.9), RESULTS | {"top_5": 0.1})
    assert "1.65 nats below" in text and "does not use context yet" in text
    assert "does not use context" not in demo_summary.format_scores(STATUS["metrics"], manifest(6.9), RESULTS)


def test_without_a_baseline_none_is_claimed() -> None:
    text = demo_summary.format_scores(STATUS["metrics"], manifest(None), RESULTS)
    assert "5.250" in text and "nats below" not in text


def test_the_next_commands_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////data/one/mlflow.db")
    monkeypatch.setenv("VIRTUAL_ENV", "/my home/it's/.venv")
    hint = (
        "mlflow ui --backend-store-uri sqlite:////data/one/mlflow.db, then open http://127.0.0.1:5000/#/experiments/1"
    )
    text = demo_summary.next_commands("models:/demo@best", hint, "It's the [MASK].", "bash launch/demo.sh --full")
    words = [shlex.split(line, comments=True) for line in text.splitlines()[1:]]
    assert ["source", "/my home/it's/.venv/bin/activate"] in words
    assert ["export", "MLFLOW_TRACKING_URI=sqlite:////data/one/mlflow.db"] in words
    assert ["mlflow", "ui", "--backend-store-uri", "sqlite:////data/one/mlflow.db"] in words
    assert ["clozeworks", "fill-mask", "--model", "models:/demo@best", "It's the [MASK]."] in words
    assert words[-1] == ["bash", "launch/demo.sh", "--full"] and "http://127.0.0.1:5000/#/experiments/1" in text


def test_a_password_in_the_address_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@mlflow.example.org")
    view = "https://mlflow.example.org/#/experiments/1"
    assert "secret" not in demo_summary.next_commands("models:/demo@best", view, "a [MASK]", "demo.sh")


def test_a_model_of_own_text_is_not_asked_about_functions(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (demo / "corpus.txt").write_text("hf://datasets/user/tales/data/*.parquet\n")
    results = demo / "results-run.json"
    results.write_text(json.dumps(RESULTS | {"example": "Once upon a [MASK] there was a king."}))
    demo_summary.main(["--demo", str(demo), "--model", "models:/demo@best"])
    out = capsys.readouterr().out
    assert "has read only hf://datasets/user/tales/data/*.parquet." in out and "docstrings" not in out
    assert "'Once upon a [MASK] there was a king.'" in out


def test_the_whole_recipe_is_trained_on_the_same_shards() -> None:
    default = demo_summary.REPOSITORY / "demo"
    assert demo_summary.whole_recipe(default, "docstrings", 8192) == "bash launch/demo.sh --full"
    other = demo_summary.whole_recipe(Path("/a b"), "/c/*.txt", 300)
    assert other == "bash launch/demo.sh --full --output '/a b' --corpus '/c/*.txt' --vocab-size 300"


def test_without_masked_words_there_are_no_rows_of_them(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (demo / "corpus.txt").write_text("https://me:pass1word@example.org/zh.jsonl\n")
    results = {name: value for name, value in RESULTS.items() if name == "view_hint"}
    (demo / "results-run.json").write_text(json.dumps(results | {"masks": 0}))
    demo_summary.main(["--demo", str(demo), "--model", "models:/demo@best"])
    out = capsys.readouterr().out
    assert "masked words" not in out and "1.65 nats below" in out and "does not use context" not in out
    assert "'A text of yours with a [MASK].'" in out
    assert "example.org/zh.jsonl" in out and "pass1word" not in out


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({**STATUS, "metrics": {}})])
def test_a_run_without_scores_is_an_error(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "status.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="status.json", check=coded("unreadable-demo", "unfinished-demo")):
        demo_summary.read_json(path, "valid/mlm_loss")
