"""One global order: the curve depends neither on ranks, workers, micro-batches nor ZeRO stage; a run moves between."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support import plain_ranks

pytestmark = [pytest.mark.launcher, pytest.mark.spawn]
MOVED = (
    "training.max_steps=12",
    "checkpoint.every_steps=6",
    "model.hidden_dropout_prob=0",
    "health.heartbeat_timeout_seconds=12",
)


def losses(training) -> dict[int, float]:
    points = (json.loads(line) for line in (training.output_dir / "tracking" / "points.jsonl").open())
    return {point["s"]: point["m"]["train/loss"] for point in points if "train/loss" in point["m"]}


@pytest.fixture(scope="module")
def never_moved(training):
    straight = training(*MOVED)
    straight.run(2)
    return straight


@pytest.mark.slow
def test_one_rank_and_two_ranks_with_other_cuts_give_the_same_curve(training):
    one = training("training.max_steps=8", "data.num_workers=0", "training.micro_batch_tokens=512")
    one.run(1)
    two = training(
        "training.max_steps=8", "training.micro_batch_tokens=512", "zero.stage=2", "training.deterministic=true"
    )
    two.run(2)
    # float32 sums in another order; after 8 steps of Adam at 2e-3 the rounding has grown to about 1e-6.
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert len(losses(one)) == 8


@pytest.mark.fault(
    row="25",
    fault="a run of two ranks at ZeRO 1 resumed on one rank at ZeRO 3, and one of one rank at ZeRO 3 resumed on two at "
    "ZeRO 1, with another micro-batch and no workers",
    required="it goes on at the next global sample; the losses agree within rounding",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (1, 3)), ((1, 3), (2, 1))], ids=["to fewer ranks", "to more ranks"]
)
def test_row_25_a_run_goes_on_with_another_number_of_ranks_and_another_stage(
    before, after, training, never_moved, observed
):
    (ranks, stage), (other_ranks, other_stage) = before, after
    moved = training(*MOVED)
    killed = plain_ranks.start(moved, ranks, f"zero.stage={stage}", trouble={"kill": {"rank": 0, "step": 9}})
    assert -signal.SIGKILL in plain_ranks.finish(killed)
    changes = (f"zero.stage={other_stage}", "training.micro_batch_tokens=512", "data.num_workers=0")
    output = plain_ranks.run(moved, other_ranks, *changes)
    assert "resuming after step 6" in output
    assert f"changed since the checkpoint: world_size was {ranks} and is {other_ranks}" in output
    found, expected = losses(moved), losses(never_moved)
    assert found == pytest.approx(expected, rel=2e-5)
    most = max(abs(found[step] / expected[step] - 1) for step in expected)
    observed(
        f"{ranks} rank(s) at ZeRO {stage} to {other_ranks} at ZeRO {other_stage}: goes on after step 6 of 12, the "
        f"losses differ by {most:.0e} of their size at most",
        lost="the steps since the last checkpoint, which are taken again",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "moves_to"), [("adamw", 0), ("muon", 1)])
def test_grouped_attention_and_a_decoder_of_its_own_resume_bitwise_and_move_between_ranks_and_stages(
    training, optimizer, moves_to
):
    """Muon's matrices of queries, keys and values have different heights, and ZeRO cuts them anywhere."""
    model = ("model.family=eurobert", "model.num_key_value_heads=1", "data.sentence_pairs=none")
    settings = (*MOVED, *model, f"optimizer.name={optimizer}")
    straight, resumed, moved = (training(*settings) for _ in range(3))
    plain_ranks.run(straight, 2, "zero.stage=2")
    for one, ranks, stage in ((resumed, 2, 2), (moved, 1, 3)):
        killed = plain_ranks.start(one, ranks, f"zero.stage={stage}", trouble={"kill": {"rank": 0, "step": 9}})
        assert -signal.SIGKILL in plain_ranks.finish(killed)
    assert "resuming after step 6" in plain_ranks.run(resumed, 2, "zero.stage=2")
    assert "resuming after step 6" in plain_ranks.run(moved, 2, f"zero.stage={moves_to}")
    expected = losses(straight)
    assert len(expected) == 12 and losses(resumed) == expected
    assert losses(moved) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_minimal_pairs_do_not_disturb_the_run(training, tmp_path, precision):
    """Bitwise the same losses with and without; the accuracy is a metric, and one that `keep_best` goes by."""
    lines = [{"sentence_good": f"the shards of part {n} are", "sentence_bad": f"the shards of {n} is"} for n in "abcde"]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ("training.max_steps=8", "zero.stage=2", f"training.precision={precision}", "checkpoint.every_steps=2")
    settings += ("evaluation.every_steps=2", "checkpoint.keep_last=1")
    plain = training(*settings)
    plain_ranks.run(plain, 2)
    paired = training(
        *settings,
        f"evaluation.minimal_pairs={tmp_path}",
        "evaluation.minimal_pairs_every_steps=4",
        "checkpoint.keep_best=1",
        "checkpoint.best_metric=valid/minimal_pairs_accuracy",
    )
    output = plain_ranks.run(paired, 2)
    assert losses(paired) == losses(plain)
    points = [json.loads(line) for line in (paired.output_dir / "tracking" / "points.jsonl").open()]
    found = {
        point["s"]: point["m"].get("valid/minimal_pairs_accuracy") for point in points if "valid/mlm_loss" in point["m"]
    }
    assert [step for step, accuracy in found.items() if accuracy is not None] == [4, 8]
    assert set(found) == {2, 4, 6, 8}
    assert output.count("minimal pairs ") == 2
    kept = {path.name for path in (paired.output_dir / "checkpoints").glob("step-*")}
    best = max((4, 8), key=lambda step: (found[step], step))  # of equals the newer
    assert kept == {f"step-{step:08d}" for step in {best, 8}}
