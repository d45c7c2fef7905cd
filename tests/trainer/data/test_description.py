from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.toy_run import stage_of
from trainer.config.batch_arithmetic import StageShape, batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.data.batch import Batch
from trainer.data.description import describe_batch, rows_as_data
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import ShardSet, open_shard_set

LENGTH = 64
LABELS = ("B is next", "B is from another document")


@pytest.fixture(scope="module")
def shard_set(small_shards) -> ShardSet:
    return open_shard_set(str(small_shards))


def batch_of(shard_set: ShardSet, rows: int = 6, **data: object) -> Batch:
    stage = StageShape(
        steps=1, sequence_length=LENGTH, micro_batch_tokens=rows * LENGTH, global_batch_tokens=rows * LENGTH
    )
    assert batch_arithmetic(stage, 1).global_rows == rows
    settings = DataSettings(shards=shard_set.url, num_workers=0, **data)
    loader = Loader([shard_set], stage_of(stage, settings), Position(0, 0, 0), 0)
    return next(iter(loader)).micro_batches[0]


def test_every_prediction_is_shown_once_with_its_piece(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, mask_share=0.4, random_share=0.3)
    text = "\n".join(describe_batch(batch, tokenizer, LABELS, color=False))
    shown = re.findall("⟦(.*?)(→.*?|=)?⟧", text)
    assert len(shown) == batch.num_masked
    labels = batch.labels[batch.labels >= 0].tolist()
    pieces = [tokenizer.decode([token]).strip() for token in labels]
    assert [original for original, _ in shown if original in pieces] == [piece for piece in pieces if piece]
    counts = [re.findall(r"(\d+) masked, (\d+) random, (\d+) unchanged", line) for line in text.splitlines()]
    masked, random, kept = (sum(int(found[0][kind]) for found in counts if found) for kind in range(3))
    assert random == sum(other.startswith("→") for _, other in shown) > 0
    assert kept == sum(other == "=" for _, other in shown) > 0
    assert masked + random + kept == batch.num_masked


def test_without_predictions_the_text_itself_is_shown(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, mlm_probability=1e-9)
    lines = [line for line in describe_batch(batch, tokenizer, LABELS, color=False) if line.startswith("  | ")]
    ids = [token for token in batch.input_ids.tolist() if token > 4]
    shown = " ".join(line[4:].removeprefix("[CLS]").removesuffix("[SEP]") for line in lines)
    assert "".join(shown.split()) == "".join(tokenizer.decode(ids).split())


def test_pairs_are_shown_with_their_label(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, sentence_pairs="next_sentence")
    lines = list(describe_batch(batch, tokenizer, LABELS, color=True))
    assert sum(line.startswith("  A [CLS]") for line in lines) == batch.num_pairs
    judged = batch.next_sentence_labels[batch.next_sentence_labels >= 0].tolist()
    assert [line.rpartition("<- ")[2] for line in lines if line.startswith("  B ")] == [
        f"{label} = {LABELS[label]}" for label in judged
    ]
    assert any("\033[31m" in line for line in lines)


def test_a_causal_row_is_plain_text_with_the_number_of_its_predictions(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    masked = replace(batch_of(shard_set), labels=torch.empty(0).long(), masked_positions=torch.empty(0).long())
    plain = [line for line in describe_batch(masked, tokenizer, LABELS, color=False) if line.startswith("  |")]
    places = torch.tensor([0, 1, 2])
    causal = replace(masked, masked_positions=places, labels=masked.input_ids[places + 1], is_causal=True)
    lines = list(describe_batch(causal, tokenizer, LABELS, color=False))
    assert "3 predicted (each from those before it)" in lines[0] and "⟦" not in "".join(lines)
    assert [line for line in lines if line.startswith("  |")] == plain


def hand_made_batch() -> Batch:
    """Three rows of 8 positions: two documents and padding, a sentence pair, a row of padding. [CLS] 2, [SEP] 3."""
    rows = [[2, 10, 4, 3, 2, 11, 3, 0], [2, 12, 3, 4, 14, 3, 0, 0], [0] * 8]
    types = [[0] * 8, [0, 0, 0, 1, 1, 1, 0, 0], [0] * 8]
    positions = [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 0, 1], [*range(8)]]
    return Batch(
        input_ids=torch.tensor(rows).flatten(),
        position_ids=torch.tensor(positions).flatten(),
        token_type_ids=torch.tensor(types).flatten(),
        cu_seqlens=torch.tensor([0, 4, 7, 8, 14, 16, 24, 24, 24], dtype=torch.int32),
        masked_positions=torch.tensor([2, 5, 11, 0, 0, 0]),
        labels=torch.tensor([20, 11, 13, -100, -100, -100]),
        cls_positions=torch.tensor([8, 0, 0]),
        next_sentence_labels=torch.tensor([1, -100, -100]),
        sequence_length=8,
    )


def test_rows_as_data_are_those_of_the_batch() -> None:
    first, second = rows_as_data(hand_made_batch(), LABELS, first_sample=30)
    assert first == {
        "row": 0,
        "sample": 30,
        "num_tokens": 7,
        "input_ids": [2, 10, 4, 3, 2, 11, 3, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
        "token_type_ids": [0] * 8,
        "masked_positions": [2, 5],
        "labels": [20, 11],
        "documents": [{"start": 0, "stop": 4}, {"start": 4, "stop": 7}],
        "pairs": [],
    }
    assert (second["row"], second["sample"], second["num_tokens"]) == (1, 31, 6)
    assert (second["masked_positions"], second["labels"]) == ([3], [13])
    assert second["documents"] == [{"start": 0, "stop": 6}]
    assert second["pairs"] == [{"cls_position": 0, "label": 1, "meaning": "B is from another document"}]


@pytest.mark.parametrize("pairs", ["none", "next_sentence"])
def test_data_of_real_rows_hold_every_prediction_document_and_pair(shard_set: ShardSet, pairs: str) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, sentence_pairs=pairs)
    rows = list(rows_as_data(batch, LABELS))
    assert [token for row in rows for token in row["input_ids"]] == batch.input_ids.tolist()
    assert sum(len(row["labels"]) for row in rows) == batch.num_masked > 0
    assert sum(len(row["pairs"]) for row in rows) == batch.num_pairs
    assert (batch.num_pairs > 0) is (pairs != "none")
    for row in rows:
        ids = row["input_ids"]
        for document in row["documents"]:
            assert ids[document["start"]] == tokenizer.special_tokens.cls
            assert ids[document["stop"] - 1] == tokenizer.special_tokens.sep
        assert sum(each["stop"] - each["start"] for each in row["documents"]) == row["num_tokens"]
        assert not set(row["labels"]) & set(tokenizer.special_tokens.never_in_text)
        assert set(row["masked_positions"]) <= {position for position, token in enumerate(ids) if token != 0}
