import io
import sys

import pytest

from data_prep.base.logs import logger
from trainer.loop.console import StepBar, compact, device_line, evaluation_line, groups_line, scientific, step_line

PAIRS = {"mlm": "mlm", "pair": "nsp"}
"""What the objectives of a run with next-sentence prediction are called, by their metric."""


def test_the_first_line_names_device_hosts_precision_and_zero_stage():
    line = device_line(["a", "a", "b", "b"], ["H100"] * 4, "bf16", 1)
    assert line == "4 ranks on 2 hosts (a, b) | device H100 | precision bf16 | ZeRO stage 1"
    many = device_line([f"host-{number}" for number in range(9)], ["H100"] * 8 + ["A100"], "bf16", 2)
    assert "9 hosts (host-0, host-1, host-2, host-3, ...) | device H100, A100" in many
    assert device_line(["a"], ["CPU (x)"], "fp32", 0).startswith("1 rank on 1 host (a) | device CPU (x)")


def test_a_step_line_reads_like_those_of_other_trainers():
    metrics = {"train/loss": 7.48, "train/mlm_loss": 6.75, "train/pair_loss": 0.73, "train/learning_rate": 2e-3}
    metrics |= {"train/tokens_per_second": 13_796.0, "train/data_wait_share": 0.05}
    expected = "step 100/3000 | epoch 0.25 | loss 7.480 (mlm 6.750, nsp 0.730) | lr 2.0e-3 | 13.8k tokens/s | ETA 7:01"
    assert step_line(100, 3000, 0.25, metrics, 421, PAIRS) == expected


def test_a_step_line_without_pairs_shows_perplexity_and_hours():
    metrics = {"train/loss": 2.302585, "train/mlm_loss": 2.302585, "train/learning_rate": 1e-3}
    line = step_line(50, 3000, 0.0, metrics | {"train/tokens_per_second": 950.0}, 3723, {"mlm": "mlm"})
    assert line.replace(" | epoch 0.00", "") == step_line(
        50, 3000, None, metrics | {"train/tokens_per_second": 950.0}, 3723, {"mlm": "mlm"}
    ), "epochs of a mixture do not end"
    assert "loss 2.303 (ppl 10.0)" in line and "950 tokens/s" in line and line.endswith("ETA 1:02:03")


def test_a_step_line_shows_mfu_and_data_loading_where_they_matter():
    speed = {"train/learning_rate": 0.0, "train/tokens_per_second": 1.0, "train/mfu": 0.414}
    line = step_line(1, 2, 0.0, speed | {"train/data_wait_share": 0.3}, 0, PAIRS)
    assert "all samples skipped | lr 0 |" in line and "MFU 41.4% | data loading 30%" in line
    assert "data loading" not in step_line(1, 2, 0.0, speed | {"train/data_wait_share": 0.09}, 0, PAIRS)


def test_an_evaluation_shows_the_unigram_entropy_beside_the_loss():
    metrics = {"valid/mlm_loss": 5.0, "valid/mlm_accuracy": 0.2, "valid/mlm_accuracy_top5": 0.4}
    line = evaluation_line(10, metrics | {"valid/mlm_perplexity": 148.4}, 6.97, {"mlm": "mlm"})
    expected = "mlm loss 5.000 (unigram entropy 6.970) | accuracy 20.0% (top 5 40.0%) | perplexity 148.4"
    assert line == f"valid at step 10 | {expected}"
    line = evaluation_line(10, metrics | {"valid/mlm_perplexity": 148.4, "valid/bound_bits_per_byte": 2.5}, 6.97, {})
    assert line.endswith("| bound 2.500 bits/byte")


def test_next_tokens_have_figures_as_masked_ones_and_stand_beside_them():
    names = {"mlm": "mlm", "causal": "causal"}
    values = {"loss": 5.0, "accuracy": 0.2, "accuracy_top5": 0.4, "perplexity": 148.4}
    metrics = {f"valid/{name}_{value}": number for name in names for value, number in values.items()}
    parts = evaluation_line(10, metrics, 6.97, names).split(" | ")[1:]
    assert [parts[0], parts[3]] == [f"{name} loss 5.000 (unigram entropy 6.970)" for name in names]
    assert parts[1:3] == parts[4:] == ["accuracy 20.0% (top 5 40.0%)", "perplexity 148.4"]


@pytest.mark.parametrize("pairs", [{}, {"valid/pair_accuracy": 0.5}])
def test_an_evaluation_in_which_nothing_is_masked_says_so(pairs):
    line = evaluation_line(10, pairs, 6.97, {"mlm": "mlm", "pair": "sop"})
    assert line.startswith("valid at step 10 | no mlm loss: no token") and ("sop accuracy 50.0%" in line) == bool(pairs)


def test_the_task_of_sentence_pairs_has_its_name():
    metrics = {"valid/mlm_loss": 5.0, "valid/mlm_accuracy": 0.2, "valid/mlm_accuracy_top5": 0.4}
    metrics |= {"valid/mlm_perplexity": 148.4, "valid/pair_accuracy": 0.75}
    assert "sop accuracy 75.0%" in evaluation_line(10, metrics, None, {"mlm": "mlm", "pair": "sop"})


def test_an_objective_of_the_users_has_its_metric_in_both_lines():
    metrics = {"train/loss": 3.0, "train/rtd_loss": 3.0, "train/learning_rate": 1e-3, "train/tokens_per_second": 9.0}
    assert "| loss 3.000 (rtd 3.000) |" in step_line(1, 2, 0.0, metrics, 0, {"rtd": "rtd"})
    assert evaluation_line(2, {"valid/rtd_loss": 2.5}, 6.97, {"rtd": "rtd"}) == "valid at step 2 | rtd loss 2.500"
    both = {"valid/rtd_loss": 2.5, "valid/rtd_accuracy": 0.5}
    assert evaluation_line(2, both, 6.97, {"rtd": "rtd"}) == "valid at step 2 | rtd accuracy 50.0%"


def test_losses_by_source_and_length_are_listed_where_there_are_several():
    metrics = {"valid/mlm_loss": 3.0, "valid/length/0-127/mlm_loss": 3.0}
    assert groups_line(metrics) is None
    metrics |= {"valid/source/books/mlm_loss": 2.5, "valid/source/web/mlm_loss": 3.5}
    assert groups_line(metrics) == "  mlm loss by source: books 2.500, web 3.500"
    metrics |= {f"valid/source/s{number}/mlm_loss": 1.0 for number in range(20)}
    assert groups_line(metrics).endswith("s5 1.000 ...")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.00k"), (13_796, "13.8k"), (131_000, "131k"), (1_050_000, "1.05M")],
)
def test_numbers_are_shown_with_three_digits_and_a_unit(number: float, text: str) -> None:
    assert compact(number) == text


def test_a_learning_rate_has_a_short_exponent():
    assert [scientific(rate) for rate in (2e-3, 6.9e-7, 1.0)] == ["2.0e-3", "6.9e-7", "1.0e0"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_step_throughput_and_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = StepBar(True, step=4, max_steps=10)
    bar.advance()
    bar.describe({"train/loss": 7.48, "train/tokens_per_second": 13_800.0}, 421)
    logger("test").info("a line")
    bar.close()
    assert "step 5/10" in terminal.getvalue() and "loss 7.480 | 13.8k tokens/s | ETA 7:01" in terminal.getvalue()


def test_no_bar_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_shown, stream in ((True, io.StringIO()), (False, _Terminal())):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = StepBar(is_shown, step=0, max_steps=2)
        bar.advance()
        bar.close()
        assert not stream.getvalue()
