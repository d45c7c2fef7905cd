from __future__ import annotations

import re

import pytest

from data_prep.tokenizing.tokenizer import Tokenizer
from trainer.batch_arithmetic import batch_arithmetic
from trainer.data.batch import Batch
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.data.show import describe_batch
from trainer.settings.data import DataSettings
from trainer.settings.training import Phase

LENGTH = 64
LABELS = ("B is next", "B is from another document")


@pytest.fixture(scope="module")
def shard_set(small_shards) -> ShardSet:
    return open_shard_set(str(small_shards))


def batch_of(shard_set: ShardSet, rows: int = 6, **data: object) -> Batch:
    phase = Phase(steps=1, sequence_length=LENGTH, micro_batch_tokens=rows * LENGTH, global_batch_tokens=rows * LENGTH)
    assert batch_arithmetic(phase, 1).global_rows == rows
    settings = DataSettings(shards=shard_set.url, num_workers=0, **data)
    loader = Loader([shard_set], settings, phase, Position(0, 0, 0), 0, 0, 1, lambda step: settings.mlm_probability, 0)
    return next(iter(loader)).micro_batches[0]


def test_every_prediction_is_shown_once_with_its_piece(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, mask_share=0.4, random_share=0.3)
    text = "\n".join(describe_batch(batch, tokenizer, LABELS, colour=False))
    shown = re.findall("⟦(.*?)(→.*?|=)?⟧", text)
    assert len(shown) == batch.num_masked
    labels = batch.labels[batch.labels >= 0].tolist()
    pieces = [tokenizer.decode([token]).strip() for token in labels]
    assert [original for original, _ in shown if original in pieces] == [piece for piece in pieces if piece]
    counts = [re.findall(r"(\d+) masked, (\d+) random, (\d+) kept", line) for line in text.splitlines()]
    masked, random, kept = (sum(int(found[0][kind]) for found in counts if found) for kind in range(3))
    assert random == sum(other.startswith("→") for _, other in shown) > 0
    assert kept == sum(other == "=" for _, other in shown) > 0
    assert masked + random + kept == batch.num_masked


def test_without_predictions_the_text_itself_is_shown(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, mlm_probability=1e-9)
    lines = [line for line in describe_batch(batch, tokenizer, LABELS, colour=False) if line.startswith("  | ")]
    ids = [token for token in batch.input_ids.tolist() if token > 4]
    shown = " ".join(line[4:].removeprefix("[CLS]").removesuffix("[SEP]") for line in lines)
    assert "".join(shown.split()) == "".join(tokenizer.decode(ids).split())


def test_pairs_are_shown_with_their_label(shard_set: ShardSet) -> None:
    tokenizer = Tokenizer.load(shard_set.tokenizer_folder)
    batch = batch_of(shard_set, sentence_pairs="next_sentence")
    lines = list(describe_batch(batch, tokenizer, LABELS, colour=True))
    assert sum(line.startswith("  A [CLS]") for line in lines) == batch.num_pairs
    judged = batch.next_sentence_labels[batch.next_sentence_labels >= 0].tolist()
    assert [line.rpartition("<- ")[2] for line in lines if line.startswith("  B ")] == [
        f"{label} = {LABELS[label]}" for label in judged
    ]
    assert any("\033[31m" in line for line in lines)
