"""Log-probabilities of masked tokens by a model; the head runs on masked positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data_prep.base.errors import UserError
from data_prep.base.progress import Progress
from trainer.data.batch import Batch
from trainer.data.minimal_pairs import (
    EncodedPairs,
    EncodedSentence,
    MaskedCopies,
    MinimalPair,
    Scorer,
    pair_scores,
)
from trainer.distributed.memory import keep_freed_memory
from trainer.inference.checkpoint_model import CheckpointMaskedLM
from trainer.inference.fill_mask import FillMask, TextEncoder
from trainer.objectives.pretraining import PretrainingModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}


def scorer_of(model: FillMask, device: torch.device, dtype: torch.dtype) -> Scorer:
    """Return the scorer of a loaded model, on a device and in a precision."""
    if isinstance(model.model, CheckpointMaskedLM):
        return PretrainingScorer(model.model.model.to(device, dtype).eval())
    return TransformersScorer(model.model, device, dtype)


def score_pairs(model: FillMask, pairs: Sequence[MinimalPair], precision: str = "fp32") -> np.ndarray:
    """Return pseudo-log-likelihoods (num_pairs, 2) float64 of the good and the bad sentences; show the progress."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    tokenizer, scorer = model.tokenizer, scorer_of(model, device, DTYPES[precision])
    encoded = EncodedPairs.encode(pairs, SentenceEncoder(tokenizer), tokenizer.mask_token_id, model.max_length)
    with Progress("scoring masked copies", encoded.num_copies, "copies") as progress:
        return pair_scores(encoded, scorer, progress.add)


class TransformersScorer:
    """Scores with a masked language model of transformers.

    A forward hook reduces the hidden states of the base model to the masked positions before the head reads them, if
    the model passes `base_model(...)[0]` to the head.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model.to(device, dtype).eval()
        self._device = device

    def __call__(self, copies: MaskedCopies) -> np.ndarray:
        """Return the log-probabilities (N,) float64 of the masked tokens, in nats."""
        input_ids, positions, targets = (torch.from_numpy(each).to(self._device) for each in copies)
        rows = torch.arange(len(input_ids), device=self._device)

        def keep_masked(module: Any, inputs: Any, output: Any) -> Any:
            output["last_hidden_state"] = output[0][rows, positions].unsqueeze(1)  # (N, 1, hidden_size)
            return output

        hook = self._model.base_model.register_forward_hook(keep_masked)
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{type(self._model).__name__} cannot be scored from token ids and an attention mask alone ({error})",
                fix="give a masked language model of text",
                code="model-not-scorable",
            ) from error
        finally:
            hook.remove()
        if logits.shape[1] == 1:
            return _log_probabilities(logits[:, 0], targets)
        return _log_probabilities(logits[rows, positions], targets)  # the head read something else


class PretrainingScorer:
    """Scores with a model of this project, on the device of the model."""

    def __init__(self, model: PretrainingModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    def __call__(self, copies: MaskedCopies) -> np.ndarray:
        """Return the log-probabilities (N,) float64 of the masked tokens, in nats."""
        num_copies, length = copies.input_ids.shape
        starts = np.arange(num_copies) * length
        masked = starts + copies.positions
        batch = Batch.of_sequences(copies.input_ids.reshape(-1), starts, length, masked, copies.targets)
        batch = batch.to(self._device)
        with torch.inference_mode():
            logits = self._model.predict(batch).mlm_logits  # (N, padded_vocab_size)
        return _log_probabilities(logits, batch.labels)


class SentenceEncoder:
    """Encodes sentences as the tokenizer does, and records which tokens are not special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = TextEncoder(tokenizer)

    def __call__(self, text: str) -> EncodedSentence:
        ids, special = self._encode(text)
        return EncodedSentence(np.array(ids, np.int64), np.flatnonzero(np.array(special) == 0))


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """Return the log-probabilities (N,) of the targets by logits (N, vocab_size), computed in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    log_probabilities: np.ndarray = (chosen - logits.logsumexp(dim=1)).double().cpu().numpy()
    return log_probabilities
