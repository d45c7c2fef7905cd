import json
import math

from trainer.watching.status import append_history, read_history, read_status, write_status


def test_what_is_written_is_read_and_replaced(tmp_path):
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", {"step": 1})
    write_status(tmp_path, "finished", {"step": 2})
    status = read_status(tmp_path)
    assert (status["state"], status["step"]) == ("finished", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_diverged_run_still_writes_strict_json(tmp_path):
    write_status(tmp_path, "running", {"metrics": {"train/loss": math.nan, "valid/mlm_perplexity": math.inf, "x": 1.5}})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "status.json").read_text()
    assert json.loads(text, parse_constant=refuse)["metrics"] == {
        "train/loss": None,
        "valid/mlm_perplexity": None,
        "x": 1.5,
    }


def test_a_cause_with_unicodes_line_ends_is_one_event(tmp_path):
    for cause in ("a\u2028b", "a\u0085b", "a\nb"):
        append_history(tmp_path, "ended", {"state": "failed", "step": 1, "cause": cause, "launched_at": 1.0})
    assert [event["cause"] for event in read_history(tmp_path)] == ["a\u2028b", "a\u0085b", "a\nb"]
