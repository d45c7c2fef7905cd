"""Loading a Hugging Face folder as a model of some kind: safetensors only, no code of its own, no look-up elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from trainer.using.fill_mask import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAFELY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
SHORTEST = 8
"""Tokens that a model has to take at least; fewer leave no room for text beside the special ones."""
OFFSET_POSITIONS = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "xmod", "mpnet", "longformer")
    + ("luke", "lilt", "ibert", "data2vec-text", "esm", "markuplm", "layoutlmv3")
)
"""RoBERTa's kin by model_type: their first position is pad_token_id + 1, and the rows before it are never used."""


def load_pretrained(
    auto_class: str, folder: Path, purpose: str, **options: Any
) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model in evaluation mode, float32, and the names of weights that the folder lacks (they are random).

    `auto_class` is one of transformers' (`AutoModel`, `AutoModelForSequenceClassification`), `purpose` says in an
    error what the folder was to be loaded as.

    Raises:
        UserError: transformers cannot make such a model of the folder, or a weight is not finite.
    """
    with quiet_transformers():
        import torch
        import transformers

        try:
            model, info = getattr(transformers, auto_class).from_pretrained(
                str(folder), use_safetensors=True, output_loading_info=True, dtype=torch.float32, **SAFELY, **options
            )
        except Exception as error:  # a file from elsewhere makes the libraries raise whatever there is
            raise _cannot_load(folder, purpose, error) from error
    _check_finite(model, folder)
    return model.eval(), frozenset(info["missing_keys"])


def refuse_random_weights(missing: frozenset[str], folder: Path, purpose: str, but: Sequence[str] = ()) -> None:
    """Refuse a folder that lacks weights, which would be random: it was trained as something else.

    `but` are parts of names that may be missing, since they are not used or are yet to be trained.

    Raises:
        UserError: naming some of them.
    """
    random = sorted(name for name in missing if not any(part in name for part in but))
    if random:
        raise UserError(
            f"{folder} lacks {', '.join(random[:3])} ({len(random)} in all), so that as {purpose} it would hold random "
            "weights; take a model that was trained as one"
        )


def load_config(folder: Path) -> Any:
    """The folder's configuration.

    Raises:
        UserError: there is none that transformers understands.
    """
    with quiet_transformers():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(folder), **SAFELY)
        except Exception as error:  # as above
            raise _cannot_load(folder, "a model", error) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer.

    Raises:
        UserError: there is none that transformers understands, or the model beside it does not know all its ids.
    """
    with quiet_transformers():
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), **SAFELY)
        except Exception as error:  # as above; tokenizers raises plain `Exception`
            raise _cannot_load(folder, "a tokenizer", error) from error
    if (folder / "config.json").is_file():
        _check_ids(tokenizer, getattr(load_config(folder), "vocab_size", None), folder)
    return tokenizer


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The longest input in tokens, special tokens included.

    Raises:
        UserError: the model has no number of positions, or what model and tokenizer say is no length.
    """
    folder = tokenizer.name_or_path
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise UserError(
            f"{folder} is a {config.model_type}, which has no max_position_embeddings, so it is no encoder as BERT is; "
            "take one that is"
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
                f"{folder} takes {length!r} tokens by its {name}, and that has to be a number from {SHORTEST} up; mend "
                "the file, or take another model"
            )
    return int(min(positions, longest))


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Refuse weights with which everything would be NaN, in silence."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{folder} holds numbers in {name} that are not finite (NaN, infinity): its training diverged, or the "
                "file is damaged; take an earlier checkpoint, or another model"
            )


def _check_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, folder: Path) -> None:
    added = tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)  # of which a text may have none
    highest = max((number for piece, number in tokenizer.get_vocab().items() if piece not in added), default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise UserError(
            f"{folder} has a tokenizer with ids up to {highest:,} and a model that knows {vocab_size:,} of them "
            "(vocab_size in config.json), so they do not belong together; copy both from the same model"
        )


def _cannot_load(folder: Path, purpose: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{folder} cannot be loaded as {purpose} ({reason}); export or register it again")
