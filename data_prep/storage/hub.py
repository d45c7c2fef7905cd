"""Models and tokenizers on the Hugging Face Hub, by names such as `google-bert/bert-base-uncased`.

Only configuration, tokenizer and safetensors are downloaded: no code and no pickles.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from shlex import quote

from data_prep.base.errors import UsageError, UserError

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".tar", ".txt", ".tsv", ".csv", ".jsonl", ".parquet", ".model")
_WITHOUT_WEIGHTS = ("*.json", "*.txt", "*.model", "README.md")
_SUBFOLDERS = "*/*"
_TIMEOUT_SECONDS = 5.0


def hub_name(text: str) -> str | None:
    """Return `text` if it can be a name on the Hub: NAME or OWNER/NAME, and no local path; else None."""
    if _HUB_NAME.fullmatch(text) is None or ".." in text or "--" in text or text.endswith((".", "-", *_FILE_SUFFIXES)):
        return None
    return None if os.path.exists(text) or ("/" in text and os.path.isdir(text.partition("/")[0])) else text


def hub_download_command(name: str) -> str:
    """Return the command that downloads a model to a folder of its last name."""
    return f"hf download {quote(name)} --local-dir {quote(name.rpartition('/')[2])}"


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
