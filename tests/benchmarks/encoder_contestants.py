"""Who trains in `encoder.py`: our model and transformers' `BertForPreTraining`, each with batches of its own kind.

Both have the same sizes (both heads, no attention dropout) and train in the same loop (`PlainEngine`: weights in the
precision measured, master weights, gradients and AdamW in fp32). Batches lie on the device before a clock starts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from contestants import masking_collator
from transformers import BertConfig, BertForPreTraining

from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, SEP_TOKEN_ID
from trainer.benchmark.measurement import StepClock
from trainer.benchmark.plain_engine import PlainEngine
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.data.batch import Batch
from trainer.data.loader import Loader, Position
from trainer.data.packing import document_starts
from trainer.data.shard_set import ShardSet
from trainer.model.hugging_face import hugging_face_config
from trainer.objectives.pretraining import PretrainingModel

PADDED_TO_MULTIPLE_OF = 8
POOL_BATCHES = 50
"""Batches among which the peer's documents are sorted, as in Trainer."""
MLM_PROBABILITY = 0.15


@dataclass(frozen=True)
class Step:
    """One micro-batch on the device: its loss, a mean over the predicted tokens, and the real tokens in it."""

    compute_loss: Callable[[PlainEngine], torch.Tensor]
    num_tokens: int
    num_places: int


class Contestant:
    """A model in training; `steps` are its batches of the current workload."""

    def __init__(self, name: str, engine: PlainEngine) -> None:
        self.name, self.engine = name, engine
        self.steps: list[Step] = []

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def is_compiled(self) -> bool:
        return self.name.endswith("compiled")

    def run(self) -> float:
        """Train on all batches once; returns seconds, on the CPU CPU seconds, which other work hardly changes."""
        clock = StepClock(self.engine.device)
        cpu_started_at = time.process_time()
        clock.mark()
        for step in self.steps:
            self.engine.backward(step.compute_loss(self.engine))
            self.engine.step()
        clock.mark()
        if self.engine.device.type == "cpu":
            return time.process_time() - cpu_started_at
        return sum(clock.seconds())


def make_contestants(config: RunConfig, device: torch.device, modes: Sequence[str]) -> list[Contestant]:
    """Ours and the peer in each of the modes "eager" and "compiled"."""
    contestants = [
        Contestant(f"{side} {mode}", _make_engine(side, mode, config, device))
        for mode in modes
        for side in ("ours", "transformers")
    ]
    sizes = {entry.name: sum(weight.numel() for weight in entry.engine.module.parameters()) for entry in contestants}
    assert len(set(sizes.values())) == 1, f"the models differ in size: {sizes}"
    return contestants


def _make_engine(side: str, mode: str, config: RunConfig, device: torch.device) -> PlainEngine:
    model: torch.nn.Module
    if side == "ours":
        model = PretrainingModel(config.model, objectives_of("next_sentence"), activation_checkpointing=False)
        model.initialize(config.training.seed)
        if mode == "compiled":
            model.compile_blocks()
    else:
        model = BertForPreTraining._from_config(
            BertConfig(**hugging_face_config(config.model, next_sentence=True)), attn_implementation="sdpa"
        )
        if mode == "compiled":
            model.compile()
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    engine = PlainEngine(model, config.optimizer, device, dtype, config.training.gradient_clipping)
    engine.set_learning_rate(0.0)  # the ids may be random: nothing should diverge
    engine.train()
    return engine


def our_steps(shard_set: ShardSet, config: RunConfig, device: torch.device, num_steps: int, seed: int) -> list[Step]:
    """Packed micro-batches of our loader."""
    (stage,) = config.stages
    loader = Loader([shard_set], stage, Position(0, 0, 0), seed)
    batches = [step.micro_batches[0] for step in itertools.islice(loader, num_steps)]
    return [_our_step(batch, device) for batch in batches]


def _our_step(batch: Batch, device: torch.device) -> Step:
    num_masked, on_device = batch.num_masked, batch.to(device)
    return Step(
        lambda engine: engine.forward(on_device)["masked_lm"]["loss"] / num_masked,
        batch.num_tokens,
        batch.input_ids.numel(),
    )


def _equal_tokens(lengths: Sequence[int], num_batches: int) -> list[int]:
    """Bounds of batches of about as many tokens each: kinder to the peer than as many documents in each."""
    sums = np.cumsum(lengths)
    wanted = np.arange(1, num_batches) * sums[-1] / num_batches
    return [0, *np.searchsorted(sums, wanted).tolist(), len(lengths)]


def _typical(batches: Sequence[list[Any]], count: int) -> list[list[Any]]:
    """The `count` batches whose share of padding is nearest to that of all, so that few batches owe nothing to luck."""
    tokens = np.array([sum(map(len, batch)) for batch in batches])
    longest = np.array([max(map(len, batch)) for batch in batches])
    places = -(-longest // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF * np.array([len(batch) for batch in batches])
    distances = np.abs(tokens / places - tokens.sum() / places.sum())
    return [batches[number] for number in sorted(np.argsort(distances, kind="stable")[:count])]


class Peer:
    """Makes transformers' batches from the same documents."""

    def __init__(self, config: RunConfig, device: torch.device, num_steps: int) -> None:
        self._collate = masking_collator(config.model.vocab_size, pad_to_multiple_of=PADDED_TO_MULTIPLE_OF)
        self._config, self._device, self._num_steps = config, device, num_steps

    def steps(self, shard_set: ShardSet, grouped: bool, seed: int) -> list[Step]:
        """Batches of about our number of tokens: of those that Trainer would make, the ones filled as all are together.

        `grouped` sorts by length within a pool of batches, as its `group_by_length` does; else documents come as they
        are, the same number in each batch.
        """
        (stage,) = self._config.stages
        wanted = stage.micro_batch_tokens * max(POOL_BATCHES, self._num_steps)
        pieces, total = [], 0
        for piece in pieces_of(shard_set, self._config.data.sequence_length, seed):
            if total >= wanted:
                break
            pieces.append(piece)
            total += len(piece)
        pool = max(self._num_steps, total // stage.micro_batch_tokens)
        if grouped:
            pieces.sort(key=len, reverse=True)
            bounds = _equal_tokens([len(piece) for piece in pieces], pool)
        else:
            bounds = [number * len(pieces) // pool for number in range(pool + 1)]
        batches = [pieces[first:last] for first, last in itertools.pairwise(bounds)]
        return [self._step([{"input_ids": piece} for piece in batch]) for batch in _typical(batches, self._num_steps)]

    def _step(self, rows: list[dict[str, Any]]) -> Step:
        batch = dict(self._collate(rows))
        tokens = int(batch["attention_mask"].sum())
        batch["next_sentence_label"] = torch.zeros(len(rows), dtype=torch.int64)
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        return Step(lambda engine: engine.module(**batch).loss, tokens, batch["input_ids"].numel())


def pieces_of(shard_set: ShardSet, length: int, seed: int) -> Iterator[list[int]]:
    """Documents in a random order, cut into pieces of at most `length` tokens with [CLS] and [SEP]."""
    shards = shard_set.shards("train")
    tokens = [shard.read_tokens() for shard in shards]
    documents = []
    for number, shard in enumerate(shards):
        index = shard.read_index()
        starts = document_starts(index, shard.itemsize)
        stops = starts + index.document_lengths
        documents += [(number, start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    for which in itertools.cycle(np.random.default_rng(seed).permutation(len(documents))):
        number, start, stop = documents[which]
        for first in range(start, stop, length - 2):
            ids = tokens[number][first : min(first + length - 2, stop)]
            yield [CLS_TOKEN_ID, *ids.tolist(), SEP_TOKEN_ID]
