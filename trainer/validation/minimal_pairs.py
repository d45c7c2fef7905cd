"""Minimal pairs while a model is trained: scored by the engine, in micro-batches of the stage's shape.

A row holds as many masked copies of one length as fit, each a sequence of its own, so that no further graph is
compiled. The pairs and the stage alone decide which copies share a micro-batch. Ranks take the micro-batches in turn,
and the sums over ranks are exact, because one rank scores each copy. No random number is drawn and no gradient is
computed: the run's losses are bitwise those of a run without minimal pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.batch_arithmetic import StageShape
from trainer.config.objective_settings import MASKED_LM
from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED, Batch
from trainer.data.minimal_pairs import (
    EncodedSentence,
    MinimalPair,
    digest_of_pairs,
    encode_pairs,
    judge,
    read_minimal_pairs,
)
from trainer.data.shard_set import ShardSet, tokenizer_of_run
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.engine.engine import Engine
from trainer.validation.loss import metric_names

PREFIX = "valid/minimal_pairs"


@dataclass(frozen=True)
class MinimalPairs:
    """The pairs of a folder, encoded once by the run's tokenizer."""

    pairs: tuple[MinimalPair, ...]
    sentences: tuple[EncodedSentence, ...]
    numbers: np.ndarray
    """(num_pairs, 2) int64: the sentences of each pair, the good one first."""
    mask_token_id: int
    pad_token_id: int

    @property
    def digest(self) -> str:
        """sha256 of the pairs' texts and names."""
        return digest_of_pairs(self.pairs)

    def evaluate(
        self,
        engine: Engine,
        stage: StageShape,
        ranks: Ranks,
        mark: Callable[[str], None] = lambda doing: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Shares of right pairs by metric name: `valid/minimal_pairs_accuracy`, and by field where files name them.

        All ranks call it alike. `mark` is called before each micro-batch, and `should_stop`, the same on all ranks:
        nothing is returned after it was true.
        """
        owners, positions = _copies(self.sentences)
        log_likelihoods = torch.zeros(len(owners), dtype=torch.float64, device=ranks.device)
        plan = list(_micro_batches(self.sentences, owners, stage))
        engine.eval()
        with torch.no_grad():
            for turn in range(-(-len(plan) // ranks.world_size)):
                if should_stop():
                    engine.train()
                    return {}
                number = turn * ranks.world_size + ranks.rank
                mark(f"evaluating minimal pairs: micro-batch {number:,} of {len(plan):,}")
                first, stop = plan[min(number, len(plan) - 1)]
                batch = self._batch(owners[first:stop], positions[first:stop], stage).to(ranks.device)
                losses = engine.forward(batch, scored=(MASKED_LM,))[MASKED_LM].values["loss"]
                if number < len(plan):  # beyond it, ranks only keep each other company in collectives
                    log_likelihoods[first:stop] = -losses[: stop - first].double()
        engine.train()
        scores = np.bincount(
            owners, all_reduce_sum(log_likelihoods, ranks).cpu().numpy(), minlength=len(self.sentences)
        )
        report = judge(self.pairs, scores[self.numbers])
        metrics = {f"{PREFIX}_accuracy": report.overall.share}
        names = metric_names(list(report.fields))
        return metrics | {
            f"{PREFIX}/field/{name}": each.share for name, each in zip(names, report.fields.values(), strict=True)
        }

    def _batch(self, owners: np.ndarray, positions: np.ndarray, stage: StageShape) -> Batch:
        """A micro-batch of the masked copies of sentences (N,) of one length, each at a position (N,)."""
        length, row = len(self.sentences[owners[0]].ids), stage.sequence_length
        num_rows, per_row = stage.micro_batch_tokens // row, row // length
        copies = np.full((num_rows * per_row, length), self.pad_token_id)
        copies[: len(owners)] = np.stack([self.sentences[owner].ids for owner in owners])
        labels = np.full(len(copies), IGNORED)
        labels[: len(owners)] = copies[np.arange(len(owners)), positions]
        copies[np.arange(len(owners)), positions] = self.mask_token_id
        rows = np.full((num_rows, row), self.pad_token_id)
        rows[:, : per_row * length] = copies.reshape(num_rows, -1)
        slots = np.arange(0, row, length)  # of what is left behind the last copy, too
        starts = (np.arange(0, num_rows * row, row)[:, None] + slots).ravel()
        copy_starts = (np.arange(0, num_rows * row, row)[:, None] + slots[:per_row]).ravel()
        masked = np.zeros(len(copies), np.int64)
        masked[: len(owners)] = copy_starts[: len(owners)] + positions
        return Batch.of_sequences(rows.ravel(), starts, row, masked, labels, pad_token_id=self.pad_token_id)


def minimal_pairs_of(config: RunConfig, shard_set: ShardSet) -> MinimalPairs | None:
    """The minimal pairs of `evaluation.minimal_pairs`, encoded; None where it is not set.

    Raises:
        UserError: they cannot be read, or a sentence has no token or is longer than the shortest row of the run.
    """
    if config.evaluation.minimal_pairs is None:
        return None
    tokenizer = Tokenizer.load(tokenizer_of_run(config.data.tokenizer, shard_set))
    shortest = min(stage.sequence_length for stage in config.stages)
    return open_minimal_pairs(config.evaluation.minimal_pairs, tokenizer, shortest)


def open_minimal_pairs(path: str, tokenizer: Tokenizer, longest: int) -> MinimalPairs:
    """Read and encode the pairs of a folder; `longest` is the shortest row of the run, in tokens.

    Raises:
        UserError: as `read_minimal_pairs`, or a sentence has no token or does not fit into a row.
    """
    pairs, special = read_minimal_pairs(path), tokenizer.special_tokens

    def encode(text: str) -> EncodedSentence:
        ids = np.concatenate([[special.cls], tokenizer.encode_text(text).astype(np.int64), [special.sep]])
        return EncodedSentence(ids, np.arange(1, len(ids) - 1))

    fix = "remove the pair, or raise data.sequence_length"
    encoded = encode_pairs(pairs, encode, longest, "a row of the run has", fix)
    numbers = {text: number for number, text in enumerate(encoded)}
    of_pairs = np.array([[numbers[pair.good], numbers[pair.bad]] for pair in pairs])
    return MinimalPairs(tuple(pairs), tuple(encoded.values()), of_pairs, special.mask, special.pad)


def _copies(sentences: Sequence[EncodedSentence]) -> tuple[np.ndarray, np.ndarray]:
    """The sentence (num_copies,) and the masked position (num_copies,) of every copy, by length of the sentence."""
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number].ids))
    owners = np.concatenate([np.full(len(sentences[number].own), number) for number in order])
    return owners, np.concatenate([sentences[number].own for number in order])


def _micro_batches(
    sentences: Sequence[EncodedSentence], owners: np.ndarray, stage: StageShape
) -> Iterator[tuple[int, int]]:
    """First and last copy (exclusive) of each micro-batch, whose copies have one length."""
    lengths = np.array([len(each.ids) for each in sentences])[owners]
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for first, stop in zip(bounds, bounds[1:], strict=False):
        num_rows = stage.micro_batch_tokens // stage.sequence_length
        size = num_rows * (stage.sequence_length // int(lengths[first]))
        for start in range(first, stop, size):
            yield start, min(start + size, stop)
