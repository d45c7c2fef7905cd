"""Row 62: a stop while something is evaluated does not wait for it, and the next start completes it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import plain_ranks
from tests.support.plain_ranks import final_tensors, newest_checkpoint
from tests.system.conftest import Training
from trainer.checkpoint.late_scores import EVALUATION_NAME, evaluation_of, read_late_scores
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

SETTINGS = (
    "training.max_steps=12",
    "checkpoint.every_steps=6",
    "checkpoint.average_last=2",
    "checkpoint.keep_best=1",
    "evaluation.every_steps=6",
    "logging.every_steps=1",
    "data.num_workers=0",
)
SECONDS = 0.55
"""For a micro-batch of an evaluation: longer than ranks wait before they agree again."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    words = ("one", "two two", "three three three", "four " * 4, "five " * 5, "six " * 6)
    lines = [json.dumps({"sentence_good": f"The {each} is.", "sentence_bad": f"The {each} are."}) for each in words]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def evaluated(training: Callable[..., Training], pairs: Path) -> Callable[[], Training]:
    return lambda: training(*SETTINGS, f"evaluation.minimal_pairs={pairs}")


def points(training: Training) -> dict[tuple[int, str], float]:
    """Every value of the run's journal that no clock changes, by step and metric."""
    lines = (training.output_dir / "tracking" / "points.jsonl").read_text().splitlines()
    found: dict[tuple[int, str], float] = {}
    for line in map(json.loads, lines):
        for name, value in line["m"].items():
            if name.split("/")[0] in ("valid", "average") or name in ("train/loss", "train/grad_norm"):
                assert found.setdefault((line["s"], name), value) == value, "a step has two values"
    return found


def stop_while(training: Training, num_ranks: int, doing: str, number: int = signal.SIGTERM) -> str:
    """Start, send the last rank a signal in an operation that begins so, and return what was said."""
    for path in training.folder.glob("evaluated-*"):
        path.unlink()
    seconds = SECONDS if num_ranks > 1 else 0.0
    trouble = {"signal": {"rank": num_ranks - 1, "number": number, "doing": doing, "seconds": seconds}}
    ranks = plain_ranks.start(training, num_ranks, trouble=trouble)
    statuses = plain_ranks.finish(ranks)
    said = "".join(rank.output for rank in ranks)
    expected = STOPPED_EXIT_STATUS if number == signal.SIGTERM else -number
    assert statuses == [expected] * num_ranks, said
    return said


def micro_batches_after(training: Training, doing: str) -> list[int]:
    """How many micro-batches of an evaluation each rank began after that one."""
    found = []
    for path in sorted(training.folder.glob("evaluated-*")):
        lines = path.read_text().splitlines()
        found.append(len(lines) - 1 - next(number for number, line in enumerate(lines) if line.startswith(doing)))
    return found


@pytest.fixture(scope="module")
def unbroken(evaluated: Callable[[], Training]) -> Callable[[int], Training]:
    made: dict[int, Training] = {}

    def make(num_ranks: int) -> Training:
        if num_ranks not in made:
            made[num_ranks] = evaluated()
            plain_ranks.run(made[num_ranks], num_ranks)
        return made[num_ranks]

    return make


@pytest.mark.fault(
    row="62",
    fault="SIGTERM in an evaluation, in one of a resumed run, in minimal pairs, and in the last step's",
    required="status 75 after the micro-batch; a checkpoint of the step; no partial score; the curve is bitwise",
)
@pytest.mark.parametrize(
    ("num_ranks", "stops"),
    [
        (2, [(6, "evaluating after step 6: micro-batch 1")]),
        pytest.param(
            1,
            [
                (6, "evaluating after step 6: micro-batch 1"),
                (6, "evaluating minimal pairs: micro-batch 1"),
                (12, "evaluating after step 12: micro-batch 2"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_row_62_a_stop_in_an_evaluation_saves_and_leaves_it_to_the_next_start(
    num_ranks: int,
    stops: list[tuple[int, str]],
    evaluated: Callable[[], Training],
    unbroken: Callable[[int], Training],
) -> None:
    broken, whole = evaluated(), unbroken(num_ranks)
    for step, doing in stops:
        said = stop_while(broken, num_ranks, doing)
        assert f"checkpoint saved at step {step:,}" in said and "Traceback" not in said, said
        assert max(micro_batches_after(broken, doing)) <= 1
        assert newest_checkpoint(broken).name == f"step-{step:08d}"
        scores = read_late_scores(newest_checkpoint(broken), EVALUATION_NAME)
        assert scores is not None and (scores.state, scores.metrics) == ("pending", {})
        assert not [name for at, name in points(broken) if at == step and name.startswith("valid/")]
        status = read_status(broken.output_dir)
        assert status is not None and (status.state, status.step) == ("stopped", step)
    said = plain_ranks.run(broken, num_ranks)
    assert f"evaluating step {stops[-1][0]}" in said
    assert points(broken) == points(whole)
    assert final_tensors(broken) == final_tensors(whole)
    scores, expected = evaluation_of(newest_checkpoint(broken)), evaluation_of(newest_checkpoint(whole))
    assert scores == expected and expected.metrics
    names = [{path.name for path in (each.output_dir / "checkpoints").iterdir()} for each in (broken, whole)]
    assert names[0] == names[1], "the same checkpoints are the best and the newest"


@pytest.mark.fault(
    row="62",
    fault="SIGKILL and SIGTERM in the mean of the newest checkpoints",
    required="the validation of that step stays; the next start evaluates the mean; the curve is bitwise",
)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_row_62_a_mean_that_was_cut_short_is_evaluated_by_the_next_start(
    number: int, evaluated: Callable[[], Training], unbroken: Callable[[int], Training]
) -> None:
    broken, whole = evaluated(), unbroken(1)
    stop_while(broken, 1, "averaging checkpoints after step 12", number)
    found = points(broken)
    assert (12, "valid/mlm_loss") in found and (12, "average/mlm_loss") not in found
    plain_ranks.run(broken, 1)
    assert points(broken) == points(whole) and (12, "average/mlm_loss") in points(broken)
    history = (broken.output_dir / "history.jsonl").read_text()
    assert history.count('"evaluated"') == 2, "the validation was not repeated"


@pytest.mark.fault(
    row="69",
    fault="evaluations that mask nothing, with sentence pairs and without, a best checkpoint and a mean",
    required="a line says so; the run goes on and finishes",
)
@pytest.mark.parametrize("pairs", ["next_sentence", pytest.param("none", marks=pytest.mark.slow)])
def test_row_69_an_evaluation_in_which_nothing_is_masked_ends_no_run(
    pairs: str, training: Callable[..., Training]
) -> None:
    nothing = ("evaluation.mlm_probability=1e-9", "data.mlm_probability=0.15", f"data.sentence_pairs={pairs}")
    masked_nothing = training(*SETTINGS, *nothing, "schedule.warmup_steps=1")
    said = plain_ranks.run(masked_nothing, 1)
    assert said.count("no mlm loss: no token") == 3, said  # two evaluations, and the mean of two checkpoints
    assert (12, "valid/mlm_loss") not in points(masked_nothing)
    assert read_late_scores(newest_checkpoint(masked_nothing), EVALUATION_NAME).state == "done"  # type: ignore[union-attr]
