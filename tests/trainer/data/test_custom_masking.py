"""A masking of the user's own: what it masks, that nothing but rows and keys decides it, and its mistakes."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import (
    CLS_TOKEN_ID,
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    SEP_TOKEN_ID,
    SPECIAL_TOKENS,
    Tokenizer,
)
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.api import EXTENSIONS, open_loader
from trainer.config.custom_code import MASKING
from trainer.config.measurements import OWN_MASKED_LM, measurements_of
from trainer.config.objective_settings import MASKED_LM
from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED
from trainer.data.custom_masking import CustomMasking
from trainer.data.evaluation_batches import measured_batches
from trainer.data.loader import GlobalBatch
from trainer.data.masking import Masking
from trainer.data.randomness import fold, root_key, uniform
from trainer.data.shard_set import open_shard_set
from trainer.preflight.checks import CHECKS
from trainer.preflight.plan import PlannedRun
from trainer.validation.loss import facts_of_run

NAME = "tests.support.toy_masking:four_letters"
VOCAB_SIZE = 100
LENGTH = 16
SETTINGS = Masking(max_mlm_probability=0.3, mask_share=0.8, random_share=0.1, vocab_size=VOCAB_SIZE)
HERE = "tests.trainer.data.test_custom_masking"


def config_of(shards: Path, num_workers: int = 0, masking: str | None = NAME) -> RunConfig:
    return tiny_config(
        model={"vocab_size": 800, "max_position_embeddings": 64},
        data={"shards": str(shards), "sequence_length": 64, "num_workers": num_workers, "masking": masking},
        training={"micro_batch_tokens": 192, "global_batch_tokens": 384, "max_steps": 3},
    )


def rows_of(batches: list[GlobalBatch]) -> list[torch.Tensor]:
    """Every row of the global batches in their order, with its labels at their positions."""
    rows = []
    for batch in itertools.chain.from_iterable(each.micro_batches for each in batches):
        labels = torch.full_like(batch.input_ids, IGNORED)
        used = batch.labels != IGNORED
        labels[batch.masked_positions[used]] = batch.labels[used]
        rows += torch.stack([batch.input_ids, labels], -1).view(batch.num_rows, -1)
    return rows


def test_it_masks_what_it_chooses_and_nothing_else(small_shards: Path) -> None:
    config = config_of(small_shards)
    tokenizer = Tokenizer.load(open_shard_set(str(small_shards)).tokenizer_folder)
    lengths = set()
    for row in rows_of(list(open_loader(config))):
        seen, labels = row.view(-1, 2).T
        predicted = labels != IGNORED
        assert (seen[predicted] == MASK_TOKEN_ID).all() and not (seen[~predicted] == MASK_TOKEN_ID).any()
        words = "".join(tokenizer.pieces[token] for token in labels[predicted].tolist()).split("\u2581")
        lengths |= {len(word) % 4 for word in words}
    assert lengths == {0}
    assert any(batch.num_masked for each in open_loader(config) for batch in each.micro_batches)


def test_ranks_and_workers_slice_the_same_masks(small_shards: Path) -> None:
    whole = rows_of(list(open_loader(config_of(small_shards))))
    built_in = rows_of(list(open_loader(config_of(small_shards, masking=None))))
    assert not all(map(torch.equal, whole, built_in))
    assert all(map(torch.equal, whole, rows_of(list(open_loader(config_of(small_shards, num_workers=2))))))
    ranks = [open_loader(config_of(small_shards), rank=rank, world_size=2) for rank in range(2)]
    divided = [row for parts in zip(*ranks, strict=True) for row in rows_of(list(parts))]
    assert len(divided) == len(whole) and all(map(torch.equal, whole, divided))


def masked_ids(shards: str) -> list[int]:
    """The input ids of the first global batch: in a process of its own."""
    return next(iter(open_loader(config_of(Path(shards))))).micro_batches[0].input_ids.tolist()


@pytest.mark.long
def test_a_spawned_process_masks_alike(small_shards: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(masked_ids, (str(small_shards),)) == masked_ids(str(small_shards))


def test_evaluations_measure_it_beside_the_masking_of_every_run(small_shards: Path) -> None:
    own, plain = (
        list(measured_batches([open_shard_set(str(small_shards))], measurements_of(config.stages[0]), 0, 1))
        for config in (config_of(small_shards), config_of(small_shards, masking=None))
    )
    of_every_run = [each.batch.input_ids for each in own if each.metrics == {MASKED_LM}]
    assert of_every_run and all(map(torch.equal, of_every_run, (each.batch.input_ids for each in plain)))
    assert any(each.metrics == {OWN_MASKED_LM} and each.batch.num_masked for each in own)


def test_it_is_among_the_facts_by_which_scores_compare(small_shards: Path) -> None:
    shard_sets = [open_shard_set(str(small_shards))]
    own, built_in = (
        facts_of_run(config_of(small_shards, masking=masking).stages[0], shard_sets, None, None)
        for masking in (NAME, None)
    )
    described = own.pop("own")
    assert own == built_in and described.endswith(f", masking {NAME} of version {MASKING.version(NAME)}")


def findings(config: RunConfig) -> list[tuple[str, str]]:
    """What the doctor finds about the masking: level and text."""
    run = PlannedRun(config, 1, torch.device("cpu"), EXTENSIONS)
    (check,) = (each for each in CHECKS if each.name == "masking")
    return [(each.level, each.text) for each in check.findings(run)]


def test_the_doctor_masks_a_micro_batch(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fail" not in dict(findings(config_of(small_shards)))
    monkeypatch.setitem(globals(), "current", lambda *_: None)
    ((level, text),) = findings(config_of(small_shards, masking=f"{HERE}:current"))
    assert level == "fail" and f"data.masking={HERE}:current returned NoneType" in text


def text_rows(num_rows: int = 5) -> np.ndarray:
    """Rows of [CLS] tokens [SEP], with padding at the end of every other row."""
    rows = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_rows, LENGTH))
    rows[:, 0], rows[:, -1] = CLS_TOKEN_ID, SEP_TOKEN_ID
    rows[::2, -3:] = PAD_TOKEN_ID
    return rows


def plain(rows: np.ndarray, keys: np.ndarray, rates: np.ndarray, settings: Masking) -> tuple[np.ndarray, np.ndarray]:
    """Mask the second position of each row with the probability `rates`."""
    chosen = np.zeros(rows.shape, bool)
    chosen[:, 1] = uniform(keys) < rates
    return np.where(chosen, MASK_TOKEN_ID, rows), np.where(chosen, rows, IGNORED)


def masked(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_rows: int = 5):
    """The masked rows of a function that is found under a name of this module."""
    monkeypatch.setitem(globals(), "current", function)
    rows = text_rows(num_rows)
    return rows, CustomMasking(f"{HERE}:current", SETTINGS).mask_rows(rows, fold(root_key(0), np.arange(num_rows)), 0.3)


def current(*_: object) -> None:
    """Another function in each test."""


def test_positions_and_labels_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, result = masked(lambda rows, keys, rates, settings: plain(rows, keys, rates + 1, settings), monkeypatch)
    assert result.masked_positions[:5].tolist() == [1, 17, 33, 49, 65] and not result.masked_positions[5:].any()
    assert result.labels[:5].tolist() == rows[:, 1].tolist() and (result.labels[5:] == IGNORED).all()
    assert len(result.labels) == 5 * 5  # ceil(0.3 * 16) in each row
    assert (result.input_ids.reshape(5, LENGTH)[:, 1] == MASK_TOKEN_ID).all()


def changed(name: str, row: int, column: int, value: int) -> Callable[..., Any]:
    """`plain`, with one of its two arrays changed at a place."""

    def function(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        made = dict(zip(("input_ids", "labels"), plain(*arguments), strict=True))
        if len(made[name]) > row:
            made[name][row, column] = value
        return made["input_ids"], made["labels"]

    return function


def labels_of_all(rows: np.ndarray, *_: object) -> tuple[np.ndarray, np.ndarray]:
    return rows, np.where(SETTINGS.special_tokens.are_ordinary(rows), rows, IGNORED)


def fills_its_rows(rows: np.ndarray, *_: object) -> None:
    rows[:, 1] = MASK_TOKEN_ID


@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        (lambda *_: 1 // 0, "masking-failed", "ZeroDivisionError"),
        (fills_its_rows, "masking-failed", "read-only"),
        (lambda *_: None, "not-a-masking", "returned NoneType"),
        (lambda rows, *_: (rows, rows.tolist()), "not-a-masking", "labels as list"),
        (lambda rows, *_: (rows[:, 1:], rows), "not-a-masking", "input_ids as int64 of shape"),
        (lambda rows, *_: (rows, rows.astype(float)), "not-a-masking", "labels as float64"),
        (changed("input_ids", 0, 2, VOCAB_SIZE), "not-a-masking", "input id 100 at position 2"),
        (changed("input_ids", 0, 2, PAD_TOKEN_ID), "not-a-masking", "input id 0 at position 2"),
        (changed("input_ids", 1, 0, 7), "not-a-masking", "in place of a special token"),
        (changed("input_ids", 0, LENGTH - 1, MASK_TOKEN_ID), "not-a-masking", "in place of a special token or padding"),
        (changed("labels", 0, 2, VOCAB_SIZE), "not-a-masking", "label 100 at position 2"),
        (changed("labels", 0, 2, -1), "not-a-masking", "label -1 at position 2"),
        (changed("labels", 0, LENGTH - 1, 7), "not-a-masking", "at a position without a token of text"),
        (labels_of_all, "not-a-masking", "predicts 14 of the 16 tokens of a row, more than the 5"),
    ],
)
def test_a_wrong_masking_is_one_error_with_its_name(
    function: Callable[..., Any], code: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"data.masking={HERE}:current", check=coded(code)) as caught:
        masked(function, monkeypatch)
    assert part in caught.value.problem


def counting() -> Callable[..., Any]:
    """A function that masks at every other call."""
    calls = itertools.cycle([0, 1 << 63])
    return lambda rows, keys, rates, settings: plain(rows, np.full_like(keys, next(calls)), rates, settings)


def by_place(rows: np.ndarray, keys: np.ndarray, rates: np.ndarray, settings: Masking) -> Any:
    return plain(rows, np.where(np.arange(len(rows)) == 0, 0, 1 << 63).astype(np.uint64), rates, settings)


def by_number_of_rows(rows: np.ndarray, keys: np.ndarray, rates: np.ndarray, settings: Masking) -> Any:
    return plain(rows, np.full(len(rows), 0 if len(rows) > 3 else 1 << 63, np.uint64), rates, settings)


@pytest.mark.parametrize("function", [counting(), by_place, by_number_of_rows])
def test_a_masking_that_depends_on_more_than_row_and_key_is_refused(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"{HERE}:current", check=coded("masking-not-repeatable")):
        masked(function, monkeypatch)


def test_a_single_row_is_masked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, check=coded("masking-not-repeatable")):
        masked(counting(), monkeypatch, num_rows=1)
