from trainer.loop.console import evaluation_line, groups_line, step_line


def test_a_step_line_tells_epoch_step_loss_perplexity_rate_speed_and_time_left():
    metrics = {"train/loss": 3.0, "train/mlm_loss": 2.302585, "train/pair_loss": 0.7, "train/learning_rate": 1e-3}
    metrics |= {"train/tokens_per_second": 12345.6, "train/data_wait_share": 0.05}
    line = step_line(50, 3000, 0.25, metrics, 3723)
    assert "waiting" not in line and "mfu" not in line
    for part in (
        "epoch 0.25",
        "step 50/3,000",
        "loss 3.0000",
        "ppl 10.0",
        "lr 1.00e-03",
        "12,346 tokens/s",
        "left 1:02:03",
    ):
        assert part in line


def test_a_step_line_tells_mfu_and_waiting_where_there_is_something_to_tell():
    speed = {"train/learning_rate": 0.0, "train/tokens_per_second": 1.0, "train/mfu": 0.414}
    line = step_line(1, 2, 0.0, speed | {"train/data_wait_share": 0.3}, 0)
    assert "all samples skipped" in line and "mfu 41.4%  waiting for data 30%" in line


def test_an_evaluation_stands_beside_the_unigram_entropy():
    metrics = {"valid/mlm_loss": 5.0, "valid/mlm_accuracy": 0.2, "valid/mlm_accuracy_top5": 0.4}
    line = evaluation_line(10, metrics | {"valid/mlm_perplexity": 148.4}, 6.97)
    assert "accuracy 20.0% (top 5 40.0%)" in line and "unigram entropy 6.9700" in line and "pair" not in line


def test_the_task_of_sentence_pairs_is_called_by_its_name():
    metrics = {"valid/mlm_loss": 5.0, "valid/mlm_accuracy": 0.2, "valid/mlm_accuracy_top5": 0.4}
    metrics |= {"valid/mlm_perplexity": 148.4, "valid/pair_accuracy": 0.75}
    assert "sentence-order accuracy 75.0%" in evaluation_line(10, metrics, None, "sentence-order")


def test_losses_by_source_and_length_are_told_where_there_are_several():
    metrics = {"valid/mlm_loss": 3.0, "valid/length/0-127/mlm_loss": 3.0}
    assert groups_line(metrics) is None
    metrics |= {"valid/source/books/mlm_loss": 2.5, "valid/source/web/mlm_loss": 3.5}
    assert groups_line(metrics) == "  mlm loss by source: books 2.5000, web 3.5000"
    metrics |= {f"valid/source/s{number}/mlm_loss": 1.0 for number in range(20)}
    assert groups_line(metrics).endswith("s5 1.0000 ...")
