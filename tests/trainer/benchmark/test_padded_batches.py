"""The flat and the padded form hold the same samples: the loader's batches, and what two models make of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining

from tests.benchmarks.padded_batches import to_padded
from tests.support.toy_run import stage_of
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.families.bert import Bert
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import IGNORED, Batch
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.model.hugging_face import hugging_face_config, to_hugging_face
from trainer.objectives.pretraining import PretrainingModel

LENGTH = 64
STAGE = StageShape(steps=1, sequence_length=LENGTH, micro_batch_tokens=8 * LENGTH, global_batch_tokens=8 * LENGTH)
MODES = ["none", "next_sentence", "sentence_order"]


@pytest.fixture(scope="module")
def shard_set(small_shards) -> ShardSet:
    return open_shard_set(str(small_shards))


def batches(shard_set: ShardSet, mode: str, count: int) -> list[Batch]:
    data = DataSettings(shards=shard_set.url, sentence_pairs=mode, num_workers=0)
    loader = Loader([shard_set], stage_of(STAGE, data), Position(0, 0, 0), 0)
    return [step.micro_batches[0] for step in itertools.islice(loader, count)]


def tiny_model(shard_set: ShardSet) -> ModelSettings:
    return ModelSettings(
        vocab_size=shard_set.manifest.tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_position_of_the_flat_form_is_one_of_the_padded_form(shard_set: ShardSet, mode: str) -> None:
    for batch in batches(shard_set, mode, 3):
        padded = to_padded(batch)
        attended = padded["attention_mask"].bool()
        alive = batch.input_ids != 0
        assert padded["input_ids"][attended].tolist() == batch.input_ids[alive].tolist()
        assert padded["token_type_ids"][attended].tolist() == batch.token_type_ids[alive].tolist()
        assert not padded["input_ids"][~attended].any() and (padded["labels"][~attended] == IGNORED).all()
        positions = torch.arange(attended.shape[1]).expand_as(attended)
        assert positions[attended].tolist() == batch.position_ids[alive].tolist()
        assert padded["labels"][padded["labels"] != IGNORED].tolist() == batch.labels[batch.labels != IGNORED].tolist()
        judged = padded["next_sentence_label"]
        expected = batch.next_sentence_labels[batch.next_sentence_labels != IGNORED]
        assert judged[judged != IGNORED].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_both_forms_give_the_same_losses(shard_set: ShardSet, mode: str) -> None:
    config = tiny_model(shard_set)
    model = PretrainingModel(config, objectives_of("next_sentence")).eval()
    model.initialize(0)
    reference = BertForPreTraining(BertConfig(**hugging_face_config(config, True))).eval()
    reference.load_state_dict(to_hugging_face(model.state_dict(), config, Bert()), strict=False)
    reference.tie_weights()
    for batch in batches(shard_set, mode, 2):
        with torch.no_grad():
            ours = model(batch)
            inputs = to_padded(batch)
            labels, judged = inputs.pop("labels"), inputs.pop("next_sentence_label")
            theirs = reference(**inputs)
        sums = [
            torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="sum").item()
            for logits, wanted in (
                (theirs.prediction_logits, labels),
                (theirs.seq_relationship_logits, judged),
            )
        ]
        assert ours["masked_lm"]["loss"].item() == pytest.approx(sums[0], rel=1e-5)
        if mode != "none":
            assert ours["sentence_pairs"]["loss"].item() == pytest.approx(sums[1], rel=1e-5)


def test_a_documents_states_do_not_depend_on_its_row_mates(shard_set: ShardSet) -> None:
    config = tiny_model(shard_set)
    model = PretrainingModel(config).eval()
    model.initialize(0)
    batch = next(batch for batch in batches(shard_set, "none", 5) if (np.diff(batch.cu_seqlens) > 0).sum() > 12)
    starts = torch.unique(batch.cu_seqlens.long()).tolist()
    with torch.no_grad():
        together = model.encoder(batch)
        for start, stop in itertools.pairwise(starts):
            alone = Batch(
                input_ids=torch.nn.functional.pad(batch.input_ids[start:stop], (0, LENGTH - (stop - start))),
                position_ids=torch.cat([torch.arange(stop - start), torch.arange(LENGTH - (stop - start))]),
                token_type_ids=torch.zeros(LENGTH, dtype=torch.int64),
                cu_seqlens=torch.tensor([0, stop - start, LENGTH], dtype=torch.int32),
                masked_positions=torch.zeros(1, dtype=torch.int64),
                labels=torch.tensor([IGNORED]),
                cls_positions=torch.zeros(0, dtype=torch.int64),
                next_sentence_labels=torch.zeros(0, dtype=torch.int64),
                sequence_length=LENGTH,
            )
            assert torch.allclose(model.encoder(alone)[: stop - start], together[start:stop], atol=1e-5)
