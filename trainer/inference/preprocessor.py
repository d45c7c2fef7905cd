"""Rows of a model from texts, by the tokenizer of its Hugging Face directory, and padded batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.text.cleaning import replace_surrogates
from data_prep.tokenizer.foreign_tokenizer import cut_names
from data_prep.tokenizer.untrusted_file import library_errors
from trainer.config.families.registry import published_families
from trainer.model.pretrained import load_config, load_tokenizer
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
"""One input of a model: `input_ids` (length,) or stored hidden states `inputs_embeds` (length, hidden_size), perhaps
`token_type_ids` (length,), and labels as the model takes them."""

IGNORED = -100
"""Label of a position that counts for nothing in transformers' losses."""
SHORTEST = 8
"""Tokens that a model has to take at least; fewer leave no room for text beside the special ones."""
OFFSET_POSITIONS = frozenset(
    [family.name for family in published_families() if family.first_position(0)]
    + ["xlm-roberta-xl", "roberta-prelayernorm", "camembert", "xmod", "mpnet", "longformer"]
    + ["luke", "lilt", "ibert", "data2vec-text", "esm", "markuplm", "layoutlmv3"]
)
"""Values of model_type whose first position is pad_token_id + 1, as in RoBERTa: the rows before it are never used."""
_PADDING = {"labels": IGNORED, "token_type_ids": 0}


@dataclass(frozen=True)
class Preprocessor:
    """A tokenizer, the longest input in tokens, and whether the model has token types."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    has_token_types: bool
    is_shortened: bool = False
    """Whether `max_length` is less than the model takes."""

    @classmethod
    def load(cls, folder: Path) -> Preprocessor:
        """Load the preprocessor of the model in a folder."""
        config, tokenizer = load_config(folder), load_text_tokenizer(folder)
        return cls(tokenizer, max_length(config, tokenizer), getattr(config, "type_vocab_size", 0) > 1)

    def limited(self, most: int | None) -> Preprocessor:
        """Return the preprocessor with `most` as its longest input, which --max-length gives; None changes nothing."""
        if most is None:
            return self
        if most > self.max_length:
            raise UsageError(
                f"--max-length {most} exceeds the {self.max_length} tokens of the model's pretraining length",
                fix=f"give at most {self.max_length}, or leave it out",
                code="max-length-too-large",
            )
        return replace(self, max_length=most, is_shortened=most < self.max_length)

    @property
    def collate(self) -> Collator:
        """The collator of the rows; it pads with 0 if the tokenizer has no padding, for the mask hides it."""
        return Collator(self.tokenizer.pad_token_id or 0)

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[list[Row], list[int]]:
        """Return the rows of texts or pairs, the longer text truncated first, and their lengths before truncation."""
        if not texts:
            return [], []
        # A lone surrogate counts as U+FFFD, as in preparation.
        given = tuple(None if each is None else [*map(replace_surrogates, each)] for each in (texts, pairs))
        options = {"return_token_type_ids": self.has_token_types, "return_attention_mask": False}
        # transformers warns of every text that is longer than the model takes
        with quiet_transformers(), library_errors(self.tokenizer.name_or_path):
            encoded = self.tokenizer(*given, **options)
            lengths = [len(ids) for ids in encoded["input_ids"]]
            if max(lengths) > self.max_length:
                cut = {"truncation": "longest_first", "max_length": self.max_length}
                encoded = self.tokenizer(*given, **cut, **options)
        return [{name: encoded[name][index] for name in encoded} for index in range(len(texts))], lengths


class Collator:
    """Pads rows of ids, or of stored hidden states, to the longest of the batch."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return tensors (num_rows, length, ...) by name, with the `attention_mask`."""
        import numpy as np
        import torch

        lengths = [row_length(row) for row in rows]
        longest = max(lengths)
        mask = [[1] * length + [0] * (longest - length) for length in lengths]
        batch = {"attention_mask": torch.tensor(mask)}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name == "inputs_embeds":
                states = [torch.as_tensor(np.asarray(value)) for value in values]  # (row_length, hidden_size) each
                batch[name] = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
            elif isinstance(values[0], (list, np.ndarray)):
                pad = _PADDING.get(name, self._pad_token_id)
                batch[name] = torch.tensor([[*value, *([pad] * (longest - len(value)))] for value in values])
            else:
                batch[name] = torch.tensor(values)
        return batch

    def training_batches(self, rows: Sequence[Row], batch_size: int, epochs: int, seed: int) -> Any:
        """Return a sampler of batches of row numbers for training; None for that of transformers' Trainer."""
        return None

    def by_length(
        self, rows: Sequence[Row], batch_size: int, device: torch.device
    ) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Yield batches of rows of similar length, shortest first, with the indices of their rows."""
        order = sorted(range(len(rows)), key=lambda index: row_length(rows[index]))
        for start in range(0, len(rows), batch_size):
            indices = order[start : start + batch_size]
            batch = self([rows[index] for index in indices])
            yield indices, {name: value.to(device) for name, value in batch.items()}


def row_length(row: Row) -> int:
    """Return the number of positions of a row; of a group of rows by name, those of the longest."""
    for name in ("input_ids", "inputs_embeds"):
        if name in row:
            return len(row[name])
    return max(row_length(part) for part in row.values() if isinstance(part, dict))


def load_text_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, to which "[SEP]" and the like in a text are text, as they are in preparation."""
    tokenizer = load_tokenizer(folder)
    tokenizer.split_special_tokens = True
    if tokenizer.is_fast:
        cut_names(tokenizer.backend_tokenizer, tokenizer.all_special_tokens)
    return tokenizer


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the longest input in tokens, special tokens included.

    Raises:
        UserError: the model has no number of positions, or model or tokenizer has an impossible length.
    """
    folder = tokenizer.name_or_path
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise UserError(
            f"{folder} is a {config.model_type}, which has no max_position_embeddings, so it is not "
            "an encoder like BERT",
            fix="give an encoder",
            code="not-an-encoder",
        )
    if getattr(config, "model_type", None) in OFFSET_POSITIONS:
        positions -= (config.pad_token_id or 0) + 1
    longest = tokenizer.model_max_length
    for name, length in (
        ("max_position_embeddings (config.json)", positions),
        ("model_max_length (tokenizer_config.json)", longest),
    ):
        if not isinstance(length, int | float) or not length >= SHORTEST:
            raise UserError(
                f"{folder} takes {length!r} tokens by its {name}, which must be a number from {SHORTEST} up",
                fix="correct the file, or give another model",
                code="invalid-model-config",
            )
    return int(min(positions, longest))


def checked_texts(texts: Any) -> list[str]:
    """Return several texts as a list.

    Raises:
        UsageError: they are not a list of strings; a single string would be read character by character.
    """
    is_several = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | dict)
    values: list[Any] = list(texts) if is_several else [texts]
    wrong = [text for text in values if not is_several or not isinstance(text, str)]
    if wrong:
        given = wrong[0]
        raise UsageError(
            f"{given!r:.80} ({type(given).__name__}) is not a text or a list of texts",
            fix="give a string, or a list of strings",
            code="not-a-text",
        )
    return values
