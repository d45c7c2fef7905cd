"""Turn texts into rows for a model of a Hugging Face directory: its tokenizer, and the longest input that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.text.cleaning import replace_surrogates
from data_prep.tokenizer.untrusted_file import library_errors
from trainer.model.pretrained import load_config, load_tokenizer
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
"""One input of a model: `input_ids` (length,) or stored hidden states `inputs_embeds` (length, hidden_size), perhaps
`token_type_ids` (length,), and labels as the model takes them."""

SHORTEST = 8
"""Tokens that a model has to take at least; fewer leave no room for text beside the special ones."""
OFFSET_POSITIONS = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "xmod", "mpnet", "longformer")
    + ("luke", "lilt", "ibert", "data2vec-text", "esm", "markuplm", "layoutlmv3")
)
"""RoBERTa's kin by model_type: their first position is pad_token_id + 1, and the rows before it are never used."""


@dataclass(frozen=True)
class Preprocessor:
    """Tokenizes texts into rows: a tokenizer, the longest input in tokens, and whether the model has token types."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    has_token_types: bool
    is_shortened: bool = False
    """Whether `max_length` is less than the model takes."""

    @classmethod
    def load(cls, folder: Path) -> Preprocessor:
        """Load what fits the model of a folder.

        Raises:
            UserError: as `load_text_tokenizer` and `max_length`.
        """
        config, tokenizer = load_config(folder), load_text_tokenizer(folder)
        return cls(tokenizer, max_length(config, tokenizer), getattr(config, "type_vocab_size", 0) > 1)

    @property
    def pad_token_id(self) -> int:
        """The id of padding; 0 where the tokenizer has none, for the attention mask hides it."""
        return self.tokenizer.pad_token_id or 0

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[list[Row], list[int]]:
        """Rows of texts or pairs, the longer text truncated first, and their lengths in tokens before that."""
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


def load_text_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, to which "[SEP]" and the like in a text are text, as they are in preparation.

    Raises:
        UserError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(folder)
    tokenizer.split_special_tokens = True
    return tokenizer


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The longest input in tokens, special tokens included.

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
