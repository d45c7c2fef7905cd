import math

from trainer.evaluation import metrics_of, perplexity


def test_means_are_over_all_predictions_and_pairs():
    metrics = metrics_of([20.0, 5.0, 10.0, 2.0, 3.0, 4.0])
    assert metrics["valid/mlm_loss"] == 2.0
    assert metrics["valid/mlm_accuracy"] == 0.5
    assert metrics["valid/mlm_perplexity"] == math.exp(2.0)
    assert (metrics["valid/nsp_loss"], metrics["valid/nsp_accuracy"]) == (0.5, 0.75)


def test_nothing_is_said_of_pairs_where_there_are_none():
    assert not any("nsp" in name for name in metrics_of([20.0, 5.0, 10.0, 0.0, 0.0, 0.0]))


def test_perplexity_of_a_diverged_loss_is_infinite_and_no_error():
    assert perplexity(1e6) == math.inf
