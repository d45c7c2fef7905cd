import pytest

from data_prep.errors import UserError
from data_prep.settings import load_settings
from trainer.config import RunConfig
from trainer.preflight.dry_run import batch_lines, explain, flops_lines, memory_lines, parameter_lines, shard_lines


@pytest.mark.parametrize(
    "preset", ["tiny_cpu", "bert_base", "bert_large", "bert_large_phased", "small_gpu", "modern_large"]
)
def test_closed_form_and_count_stand_side_by_side_and_agree(preset):
    lines = parameter_lines(load_settings(RunConfig, preset))
    assert lines[0].split() == ["module", "closed", "form", "counted", "formula"]
    for line in lines[1:]:
        _, closed_form, counted, *_ = line.split()
        assert closed_form == counted


def test_batches_are_reckoned_over_the_steps_that_the_run_takes():
    config = load_settings(RunConfig, "bert_large_phased", ["training.max_steps=900010"])
    first, second = batch_lines(config, 8)
    assert "128 rows x 128 places = 16,384 tokens a micro-batch; x 8 ranks x 1 accumulation" in first
    assert second.endswith("10 steps = 1,310,720 tokens")


def test_operations_of_a_run_are_those_a_token_times_its_tokens():
    config = load_settings(RunConfig, "bert_large", ["training.max_steps=10"])
    assert flops_lines(config) == [
        "length 512: 1.992 GFLOP a token, forward and backward",
        f"the whole run: {1.9920e9 * 10 * 1_048_576:.3g} FLOP",
    ]


def test_memory_is_told_for_every_stage_and_this_runs_stage_is_marked():
    lines = memory_lines(load_settings(RunConfig, "bert_large"), 8)
    assert [line.split()[0] for line in lines] == ["ZeRO", "0", "1", "2", "3"]
    assert [line.endswith("<- this run") for line in lines] == [False, False, True, False, False]
    totals = [float(line.removesuffix("<- this run").split()[-1]) for line in lines[1:]]
    assert totals == sorted(totals, reverse=True)


def test_shards_that_are_not_there_are_told_and_no_error():
    text = explain(load_settings(RunConfig, "tiny_cpu", ["data.shards=nowhere"]), 2)
    assert "not looked at: nowhere holds no manifest.json" in text


def test_shards_are_counted_against_ranks_and_ids_against_the_vocabulary(small_shards):
    config = load_settings(RunConfig, "tiny_cpu", [f"data.shards={small_shards}"])
    assert "4 train shards for 2 ranks" in next(shard_lines(config, 2))
    with pytest.raises(UserError, match="set model.vocab_size=800"):
        list(
            shard_lines(
                load_settings(RunConfig, "tiny_cpu", [f"data.shards={small_shards}", "model.vocab_size=700"]), 2
            )
        )


def test_a_batch_warmup_is_told_size_by_size_and_its_tokens_are_what_is_read():
    warmup = "training.batch_warmup={initial_tokens: 1024, steps: 4}"
    sizes = ["training.global_batch_tokens=3072", "training.micro_batch_tokens=512", "training.max_steps=6"]
    lines = batch_lines(load_settings(RunConfig, "tiny_cpu", [*sizes, warmup]), 2)
    assert lines[0].endswith(f"6 steps = {2 * 1024 + 2 * 2048 + 2 * 3072:,} tokens")
    assert [line.strip() for line in lines[2:]] == [
        "from step 1: 1,024 tokens, 1 accumulation",
        "from step 3: 2,048 tokens, 2 accumulation",
        "from step 5: 3,072 tokens, 3 accumulation",
    ]
    assert (
        "of what is computed 33.3% only fills up"
        in batch_lines(load_settings(RunConfig, "tiny_cpu", [*sizes, warmup]), 3)[2]
    )
