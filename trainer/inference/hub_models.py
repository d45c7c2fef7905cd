"""Download a model from the Hugging Face Hub: configuration, tokenizer and safetensors weights, no code, no pickles."""

from __future__ import annotations

from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from trainer.config.hub_names import hub_download_command

_WITHOUT_WEIGHTS = ("*.json", "*.txt", "*.model", "README.md")
_SUBFOLDERS = "*/*"
_TIMEOUT_SECONDS = 5.0


def download_from_hub(name: str, with_weights: bool = True) -> Path:
    """Return the local folder of a model on the Hub; files that the cache holds are not downloaded again.

    Raises:
        UsageError: there is no such directory, and the Hub has no such model or cannot be reached (after one attempt).
        UserError: the download fails on the way.
    """
    patterns = [*_WITHOUT_WEIGHTS, *(["*.safetensors"] if with_weights else [])]
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=[_SUBFOLDERS], etag_timeout=_TIMEOUT_SECONDS
        )
    except RepositoryNotFoundError:
        raise UsageError(
            f"{name} is neither a directory nor a public model on the Hugging Face Hub",
            fix="correct the path or the name; for a private model, set HF_TOKEN",
            code="unknown-model",
        ) from None
    except LocalEntryNotFoundError:
        raise UsageError(
            f"{name} is not a directory, and the Hugging Face Hub cannot be reached from here",
            fix=f"correct the path, or run `{hub_download_command(name)}` where there is network and give that "
            "directory",
            code="hub-name-offline",
        ) from None
    except Exception as error:  # whatever the client or the disk raises
        raise UserError(
            f"downloading {name} from the Hugging Face Hub failed ({' '.join(str(error).split())[:300]})",
            fix=f"run the command again, or run `{hub_download_command(name)}` and give that directory",
            code="hub-download-failed",
        ) from error
    return Path(folder)
