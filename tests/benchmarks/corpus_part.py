"""A part of a corpus, to try a benchmark on."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path


def take_part(files: list[str], limit_mb: float | None, folder: Path) -> list[str]:
    """The files, or copies of the beginning of each that together hold about `limit_mb` MB of text."""
    if not files:
        sys.exit("no file matches --corpus")
    if limit_mb is None:
        return files
    folder.mkdir(parents=True)
    whole = sum(os.path.getsize(path) for path in files)
    parts = []
    for path in files:
        left = limit_mb * 1e6 * os.path.getsize(path) / whole
        part = folder / os.path.basename(path)
        with gzip.open(path, "rt", encoding="utf-8") as source, gzip.open(part, "wt", encoding="utf-8") as target:
            for line in source:
                target.write(line)
                left -= len(json.loads(line)["text"].encode(errors="replace"))
                if left <= 0:
                    break
        parts.append(str(part))
    return parts
