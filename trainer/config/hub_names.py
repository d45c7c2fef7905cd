"""Names of models on the Hugging Face Hub, such as `bert-base-uncased` and `google-bert/bert-base-uncased`."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".tar", ".txt", ".tsv", ".csv", ".jsonl", ".parquet", ".model")


def hub_name(text: str) -> str | None:
    """Return `text` if it can be a name on the Hub: NAME or OWNER/NAME, and no local path; else None."""
    if _HUB_NAME.fullmatch(text) is None or ".." in text or "--" in text or text.endswith((".", "-", *_FILE_SUFFIXES)):
        return None
    return None if Path(text).exists() or (Path(text.partition("/")[0]).is_dir() and "/" in text) else text


def hub_download_command(name: str) -> str:
    """Return the command that downloads a model to a folder of its last name."""
    return f"hf download {quote(name)} --local-dir {quote(name.rpartition('/')[2])}"
