"""Errors for a path without a manifest: it is missing, a tokenizer, raw text or an unfinished data set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from shlex import quote

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from data_prep.storage.compression import COMPRESSIONS

# Not in the work folder: it is written before the work folder exists and removed after it, so a partly removed folder
# is never mistaken for another plan's.
PLAN_NAME = ".plan.json"
"""File of an output folder whose preparation began; a finished preparation removes it."""

_TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def explain_missing_data_set(folder: str) -> UserError:
    """Return the error for a path or URL without a manifest."""
    where = storage.redact(folder)
    if is_text_file(folder) and (storage.is_remote(folder) or storage.local_path(folder).is_file()):
        return _raw_text(f"{where} is raw text, not a data set", where)
    if meant := storage.folder_of_file(folder):
        is_data_set = storage.exists(storage.join(meant, "manifest.json"))
        return UsageError(
            f"{where} is a file, not the folder of a data set",
            fix=f"give {meant if is_data_set else 'the folder or URL of a data set'}",
            code="not-a-data-set",
        )
    if not storage.is_remote(folder) and not storage.local_path(folder).exists():
        return UsageError(f"{where} does not exist", fix="give the folder or URL of a data set", code="missing-path")
    is_web = folder.startswith(("http://", "https://"))  # which cannot be listed
    found = [] if is_web else storage.list_names(folder)
    if holds_tokenizer(found):
        return tokenizer_instead_of_shards(where)
    if PLAN_NAME in found:
        return UsageError(
            f"{where} holds no manifest.json: its preparation has not finished",
            fix="rerun the same 'clozeworks shards ...' command that began it",
            code="missing-manifest",
        )
    names = [name for name in found if is_text_file(name)]
    if names:
        ending = "." + names[0].partition(".")[2]
        return _raw_text(
            f"{where} holds raw text such as {names[0]}, not a data set", storage.join(where, f"*{ending}")
        )
    return UsageError(
        f"{where} holds no manifest.json, so it is not a complete data set",
        fix="prepare one with 'clozeworks shards'; if that command was interrupted, rerun it",
        code="missing-manifest",
    )


def holds_tokenizer(names: Iterable[str]) -> bool:
    """Return whether the names of the files in a folder are those of a tokenizer."""
    return any(name in _TOKENIZER_FILES for name in names)


def tokenizer_instead_of_shards(where: str) -> UsageError:
    """Return the error for a tokenizer that was given as a data set; `where` is its path, or a setting with it."""
    return UsageError(
        f"{where} is a tokenizer, not a data set",
        fix="give the folder of the shards that were made with it (--output of `clozeworks shards --tokenizer ...`)",
        code="tokenizer-instead-of-shards",
    )


def is_text_file(name: str) -> bool:
    """Return whether a name has the ending of a file that preparation reads.

    Files of a data set and hidden files do not count.
    """
    from data_prep.documents.formats.format_registry import BUILT_IN  # not needed unless something is wrong

    plain = name.lower()
    for ending in COMPRESSIONS:
        plain = plain.removesuffix(ending)
    endings = tuple(ending for item in BUILT_IN for ending in item.endings)
    own_name = r"\..*|inputs-\d{6}\.jsonl|.*\.provenance\.parquet|.*manifest\.json"
    return plain.endswith(endings) and not re.fullmatch(own_name, plain.rpartition("/")[2])


def _raw_text(problem: str, pattern: str) -> UsageError:
    return UsageError(
        problem,
        fix=f"make shards of it with `clozeworks shards --input {quote(pattern)} --tokenizer TOKENIZER "
        "--output SHARDS`",
        code="text-instead-of-shards",
    )
