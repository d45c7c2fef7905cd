"""Minimal pairs during training: the engine scores them in micro-batches of the stage's shape.

A row has as many masked copies of one length as fit, each as a sequence of its own, so that no further graph is
compiled. The pairs and the stage alone decide which copies share a micro-batch. Ranks take the micro-batches in turn,
and the sums over ranks are exact, because one rank scores each copy. No random number is drawn and no gradient is
computed, so the losses of a run do not depend on minimal pairs, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.batch_arithmetic import StageShape
from trainer.config.objective_settings import MASKED_LM
from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED, Batch
from trainer.data.minimal_pairs import (
    EncodedPairs,
    EncodedSentence,
    MaskedCopies,
    digest_of_pairs,
    judge,
    read_minimal_pairs,
)
from trainer.data.shard_set import ShardSet, open_tokenizer
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.engine.engine import Engine
from trainer.validation.loss import metric_names

PREFIX = "valid/minimal_pairs"


@dataclass(frozen=True)
class MinimalPairs:
    """The pairs of a folder, encoded by the run's tokenizer."""

    encoded: EncodedPairs
    pad_token_id: int

    @property
    def digest(self) -> str:
        """sha256 of the pairs' texts and names."""
        return digest_of_pairs(self.encoded.pairs)

    def evaluate(
        self,
        engine: Engine,
        stage: StageShape,
        ranks: Ranks,
        mark: Callable[[str], None] = lambda doing: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return the shares of right pairs by metric name: of all, and by field if files name fields; a collective.

        Args:
            mark: called before each micro-batch.
            should_stop: called before each micro-batch, with the same answer on all ranks; once true, the result is
                empty.
        """
        encoded, length = self.encoded, stage.sequence_length
        log_likelihoods = torch.zeros(encoded.num_copies, dtype=torch.float64, device=ranks.device)
        plan = list(encoded.batches(lambda own: stage.micro_batch_tokens // length * (length // own)))
        engine.eval()
        with torch.no_grad():
            for turn in range(-(-len(plan) // ranks.world_size)):
                if should_stop():
                    engine.train()
                    return {}
                number = turn * ranks.world_size + ranks.rank
                mark(f"evaluating minimal pairs: micro-batch {number:,} of {len(plan):,}")
                first, stop = plan[min(number, len(plan) - 1)]
                batch = self._batch(encoded.copies(first, stop), stage).to(ranks.device)
                losses = engine.forward(batch, scored=(MASKED_LM,))[MASKED_LM].values["loss"]
                if number < len(plan):  # beyond it, ranks only keep each other company in collectives
                    log_likelihoods[first:stop] = -losses[: stop - first].double()
        engine.train()
        report = judge(encoded.pairs, encoded.scores(all_reduce_sum(log_likelihoods, ranks).cpu().numpy()))
        metrics = {f"{PREFIX}_accuracy": report.overall.share}
        names = metric_names(list(report.fields))
        return metrics | {
            f"{PREFIX}/field/{name}": each.share for name, each in zip(names, report.fields.values(), strict=True)
        }

    def _batch(self, copies: MaskedCopies, stage: StageShape) -> Batch:
        """Return a micro-batch of masked copies, as many in a row as fit."""
        (num_copies, length), row = copies.input_ids.shape, stage.sequence_length
        num_rows, per_row = stage.micro_batch_tokens // row, row // length
        filled = np.full((num_rows * per_row, length), self.pad_token_id)
        filled[:num_copies] = copies.input_ids
        rows = np.full((num_rows, row), self.pad_token_id)
        rows[:, : per_row * length] = filled.reshape(num_rows, -1)
        # The rest of a row after its last copy is a sequence too.
        starts = np.arange(0, num_rows * row, row)[:, None] + np.arange(0, row, length)
        masked, labels = np.zeros(len(filled), np.int64), np.full(len(filled), IGNORED)
        masked[:num_copies] = starts[:, :per_row].ravel()[:num_copies] + copies.positions
        labels[:num_copies] = copies.targets
        return Batch.of_sequences(rows.ravel(), starts.ravel(), row, masked, labels, pad_token_id=self.pad_token_id)


def minimal_pairs_of(config: RunConfig, shard_set: ShardSet) -> MinimalPairs:
    """Read and encode the minimal pairs of `evaluation.minimal_pairs`, which is set.

    Raises:
        UserError: they cannot be read, or a sentence has no token or is longer than the shortest row of the run.
    """
    assert config.evaluation.minimal_pairs is not None, "the caller looks"
    tokenizer = open_tokenizer(config.data.tokenizer, shard_set)
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
    encoded = EncodedPairs.encode(pairs, encode, special.mask, longest, "a row of the run has", fix)
    return MinimalPairs(encoded, special.pad)
