"""Minimal pairs in training: the scores of the command, on any number of ranks, and a run that is not disturbed."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from trainer.checkpoint.writer import ALONE
from trainer.config.batch_arithmetic import StageShape
from trainer.config.run_config import RunConfig
from trainer.data.minimal_pairs import EncodedPairs, judge, pair_scores
from trainer.distributed.process_group import Ranks
from trainer.evaluation.masked_scorers import PretrainingScorer, SentenceEncoder
from trainer.inference.checkpoint_model import load_checkpoint
from trainer.validation import minimal_pairs as module
from trainer.validation.minimal_pairs import MinimalPairs, open_minimal_pairs

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "v1"
PAIRS = (
    ("The shards are written.", "The shards is written.", "agreement"),
    ("A checkpoint that was saved is read.", "A checkpoint that were saved is read.", "agreement"),
    ("x", "x y", "length"),
    ("It reads nothing twice, and nothing is lost.", "It reads nothing twice, and nothing lost is.", "order"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad, "field": field}) for good, bad, field in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained() -> Any:
    return load_checkpoint(GOLDEN / "run")


@pytest.fixture
def pairs(folder: Path) -> MinimalPairs:
    return open_minimal_pairs(str(folder), Tokenizer.load(GOLDEN / "run" / "tokenizer"), 64)


def stage_of(rows: int, length: int = 64) -> StageShape:
    return StageShape(
        steps=1, sequence_length=length, micro_batch_tokens=rows * length, global_batch_tokens=rows * length
    )


class PlainEngine:
    """What the evaluation asks of an engine; knows how many micro-batches it saw, and their shapes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.shapes = model, set[tuple[int, ...]]()
        self.num_batches = 0

    def eval(self) -> None:
        self.model.eval()

    def train(self) -> None:
        self.model.train()

    def forward(self, batch: Any, scored: Collection[str]) -> Any:
        self.shapes.add(tuple(batch.input_ids.shape))
        self.num_batches += 1
        return self.model(batch, scored=scored)


@pytest.mark.parametrize("stage", [stage_of(1), stage_of(3), stage_of(40)], ids=["1 row", "3 rows", "40 rows"])
def test_shares_are_those_of_the_command(trained: Any, pairs: MinimalPairs, stage: StageShape) -> None:
    engine = PlainEngine(trained.model.model)
    found = pairs.evaluate(engine, stage, ALONE)  # type: ignore[arg-type]
    encode, scorer = SentenceEncoder(trained.tokenizer), PretrainingScorer(trained.model.model.eval())
    encoded = EncodedPairs.encode(pairs.encoded.pairs, encode, trained.tokenizer.mask_token_id, 64)
    report = judge(encoded.pairs, pair_scores(encoded, scorer))
    assert found == {
        "valid/minimal_pairs_accuracy": report.overall.share,
        **{f"valid/minimal_pairs/field/{name}": each.share for name, each in report.fields.items()},
    }
    assert engine.shapes == {(stage.micro_batch_tokens,)}, "the shape of the stage, for which its graphs are compiled"


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_copy_is_scored_by_one_rank_and_all_ranks_take_as_many_micro_batches(
    trained: Any, pairs: MinimalPairs, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[torch.Tensor] = []

    def keep(found: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        summed.append(found)
        return found

    monkeypatch.setattr(module, "all_reduce_sum", keep)
    engines = []
    for size in (1, world_size):
        for rank in range(size):
            engines.append(PlainEngine(trained.model.model))
            pairs.evaluate(engines[-1], stage_of(2), Ranks(rank, size, 0, torch.device("cpu")))  # type: ignore[arg-type]
    alone, *parts = summed
    assert torch.equal(torch.stack(parts).sum(0), alone)
    assert (torch.stack(parts) != 0).sum(0).max() == 1
    assert len({engine.num_batches for engine in engines[1:]}) == 1


def test_scores_agree_with_those_of_the_command(
    trained: Any, pairs: MinimalPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where micro-batches of other shapes round otherwise."""
    seen: list[np.ndarray] = []

    def keep(given: Any, scores: np.ndarray) -> Any:
        seen.append(scores)
        return judge(given, scores)

    monkeypatch.setattr(module, "judge", keep)
    pairs.evaluate(PlainEngine(trained.model.model), stage_of(3), ALONE)  # type: ignore[arg-type]
    encode, scorer = SentenceEncoder(trained.tokenizer), PretrainingScorer(trained.model.model.eval())
    encoded = EncodedPairs.encode(pairs.encoded.pairs, encode, trained.tokenizer.mask_token_id, 64)
    assert seen[0] == pytest.approx(pair_scores(encoded, scorer), abs=1e-4)


def test_a_sentence_that_fits_into_no_row_is_refused_with_its_line(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"pairs.jsonl, line 1: the sentence has \d+ tokens, and a row of the run has 8"
    ):
        open_minimal_pairs(str(folder), Tokenizer.load(GOLDEN / "run" / "tokenizer"), 8)


def test_a_sentence_without_token_is_refused_with_its_line(tmp_path: Path) -> None:
    """Its score would be 0, the highest there is; preparation removes the zero-width space."""
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"sentence_good": "a cat", "sentence_bad": "\u200b"}))
    with pytest.raises(UserError, match=r"pairs.jsonl, line 1: ", check=coded("text-without-token")):
        open_minimal_pairs(str(tmp_path), Tokenizer.load(GOLDEN / "run" / "tokenizer"), 64)


def test_steps_between_scorings_are_a_multiple_of_those_between_evaluations() -> None:
    values: dict[str, Any] = {
        "output_dir": "run",
        "data": {"shards": "none"},
        "training": {"max_steps": 100, "micro_batch_tokens": 512, "global_batch_tokens": 512},
    }
    with pytest.raises(ValueError, match="evaluation.minimal_pairs_every_steps=30 is not a multiple of"):
        RunConfig.model_validate(values | {"evaluation": {"every_steps": 20, "minimal_pairs_every_steps": 30}})
    config = RunConfig.model_validate(values | {"evaluation": {"every_steps": 20}})
    assert config.evaluation.pairs_every_steps == 20
