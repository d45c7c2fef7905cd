"""Small models, and documents packed into rows by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import IGNORED, Batch
from trainer.objectives.pretraining import PretrainingModel


@dataclass(frozen=True)
class Document:
    """One sequence with its tasks."""

    input_ids: list[int]
    token_type_ids: list[int]
    masked: list[int]
    """Places within the sequence that are predicted."""
    labels: list[int]
    next_sentence_label: int = IGNORED


@dataclass(frozen=True)
class Packed:
    """A batch and where each document begins in it."""

    batch: Batch
    starts: list[int]


@pytest.fixture
def tiny_config() -> ModelSettings:
    return ModelSettings(
        vocab_size=61,
        pad_vocab_size_to_multiple_of=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
    )


@pytest.fixture
def modern_config() -> ModelSettings:
    """Four layers, of which the first and the last are global; a window far shorter than the longest sequence."""
    return ModelSettings(
        family="modernbert",
        vocab_size=61,
        pad_vocab_size_to_multiple_of=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        local_attention=6,
    )


@pytest.fixture
def euro_config() -> ModelSettings:
    """Four query heads, of which two share keys and values; a decoder of its own, without a bias."""
    return ModelSettings(
        family="eurobert",
        vocab_size=61,
        pad_vocab_size_to_multiple_of=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
    )


@pytest.fixture
def make_model() -> Callable[..., PretrainingModel]:
    """A model whose norms and biases are not at their initial ones and zeros, so that nothing cancels unseen."""

    def make(config: ModelSettings, next_sentence: bool = True, seed: int = 0, **options: bool) -> PretrainingModel:
        model = PretrainingModel(config, objectives_of("next_sentence" if next_sentence else "none"), **options)
        model.initialize(seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        return model

    return make


@pytest.fixture
def make_documents() -> Callable[..., list[Document]]:
    """Documents of the given lengths with random ids, segments, predictions and next-sentence labels."""

    def make(lengths: list[int], vocab_size: int = 61, seed: int = 0) -> list[Document]:
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, count: int) -> list[int]:
            return torch.randint(high, (count,), generator=generator).tolist()

        documents = []
        for number, length in enumerate(lengths):
            num_masked = max(1, length // 4)
            segment_a = (length + 1) // 2
            documents.append(
                Document(
                    input_ids=[5 + token for token in draw(vocab_size - 5, length)],
                    token_type_ids=[0] * segment_a + [1] * (length - segment_a),
                    masked=sorted(torch.randperm(length, generator=generator)[:num_masked].tolist()),
                    labels=draw(vocab_size, num_masked),
                    next_sentence_label=number % 2,
                )
            )
        return documents

    return make


@pytest.fixture
def pack() -> Callable[..., Packed]:
    """Lay documents into rows of `sequence_length`, first come first placed, with unused entries in every
    capacity."""

    def pack_documents(documents: list[Document], sequence_length: int) -> Packed:
        flat: dict[str, list[int]] = {
            name: [] for name in ("ids", "positions", "types", "masked", "labels", "cls", "next")
        }
        boundaries, starts = [0], []

        def close_row() -> None:
            dead = -len(flat["ids"]) % sequence_length
            if dead:
                flat["ids"] += [0] * dead
                flat["types"] += [0] * dead
                flat["positions"] += range(dead)
                boundaries.append(len(flat["ids"]))

        for document in documents:
            length = len(document.input_ids)
            if len(flat["ids"]) % sequence_length + length > sequence_length:
                close_row()
            start = len(flat["ids"])
            starts.append(start)
            flat["ids"] += document.input_ids
            flat["types"] += document.token_type_ids
            flat["positions"] += range(length)
            flat["masked"] += [start + position for position in document.masked]
            flat["labels"] += document.labels
            flat["cls"].append(start)
            flat["next"].append(document.next_sentence_label)
            boundaries.append(start + length)
        close_row()
        spare = 3
        batch = Batch(
            input_ids=torch.tensor(flat["ids"]),
            position_ids=torch.tensor(flat["positions"]),
            token_type_ids=torch.tensor(flat["types"]),
            cu_seqlens=torch.tensor(boundaries + [len(flat["ids"])] * spare, dtype=torch.int32),
            masked_positions=torch.tensor(flat["masked"] + [0] * spare),
            labels=torch.tensor(flat["labels"] + [IGNORED] * spare),
            cls_positions=torch.tensor(flat["cls"] + [0] * spare),
            next_sentence_labels=torch.tensor(flat["next"] + [IGNORED] * spare),
            sequence_length=sequence_length,
        )
        return Packed(batch, starts)

    return pack_documents
