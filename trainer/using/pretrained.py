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


def load_pretrained(
    auto_class: str, folder: Path, purpose: str, **options: Any
) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model in evaluation mode, float32, and the names of weights that the folder lacks (they are random).

    `auto_class` is one of transformers' (`AutoModel`, `AutoModelForSequenceClassification`), `purpose` says in an
    error what the folder was to be loaded as.

    Raises:
        UserError: transformers cannot make such a model of the folder.
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
        UserError: there is none that transformers understands.
    """
    with quiet_transformers():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(folder), **SAFELY)
        except Exception as error:  # as above; tokenizers raises plain `Exception`
            raise _cannot_load(folder, "a tokenizer", error) from error


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The longest input in tokens, special tokens included."""
    longest: int = min(config.max_position_embeddings, tokenizer.model_max_length)
    return longest


def _cannot_load(folder: Path, purpose: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{folder} cannot be loaded as {purpose} ({reason}); export or register it again")
