"""The corpora of a benchmark: files that a pattern names, or the beginning of each of them."""

from __future__ import annotations

import argparse
import csv
import glob
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_TEXT_COLUMNS = ("text", "sentence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --corpora, --limit-mb and --vocab-size."""
    parser.add_argument(
        "--corpora",
        nargs="+",
        required=True,
        metavar="NAME=PATTERN[,PATTERN ...]",
        help="jsonl.gz files with the field text, or csv and tsv with a column text or sentence",
    )
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="about so much text of each (default: all of it)")
    parser.add_argument("--vocab-size", type=int, default=30_522, help="of the tokenizers (default %(default)s)")


def corpora_of(words: list[str]) -> dict[str, list[str]]:
    """The files of every NAME=PATTERN[,PATTERN ...], sorted."""
    corpora = {}
    for word in words:
        name, _, patterns = word.partition("=")
        corpora[name] = sorted(path for pattern in patterns.split(",") for path in glob.glob(pattern))
        if not corpora[name]:
            sys.exit(f"error: no file matches {word}. Fix: give NAME=PATTERN of files that exist.")
    return corpora


def read_texts(path: str) -> Iterator[str]:
    """The documents of a jsonl, jsonl.gz, csv or tsv file."""
    if path.endswith((".jsonl", ".gz")):
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]
        return
    with open(path, encoding="utf-8-sig", newline="") as file:
        is_tsv = path.endswith(".tsv")
        rows = csv.DictReader(
            file, delimiter="\t" if is_tsv else ",", quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
        )
        column = next((name for name in _TEXT_COLUMNS if name in (rows.fieldnames or ())), None)
        if column is None:
            sys.exit(
                f"error: {path} has no column {' or '.join(_TEXT_COLUMNS)}. Fix: give jsonl, csv or tsv files of text."
            )
        for row in rows:
            yield row[column]


def take_part(files: list[str], limit_mb: float | None, folder: Path) -> list[str]:
    """The files, or jsonl.gz copies of the beginning of each that together hold about `limit_mb` MB of text.

    Files that are no jsonl.gz are always copied into it.
    """
    if limit_mb is None and all(path.endswith(".jsonl.gz") for path in files):
        return files
    folder.mkdir(parents=True)
    whole = sum(map(os.path.getsize, files))
    parts = []
    for number, path in enumerate(files):
        left = float("inf") if limit_mb is None else limit_mb * 1e6 * os.path.getsize(path) / whole
        part = folder / f"{number:02d}-{os.path.basename(path).partition('.')[0]}.jsonl.gz"
        with gzip.open(part, "wt", encoding="utf-8") as target:
            for text in read_texts(path):
                target.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                left -= len(text.encode(errors="replace"))
                if left <= 0:
                    break
        parts.append(str(part))
    return parts


def select_documents(files: list[str], num_words: int, seed: int, output: Path) -> dict[str, int | str]:
    """Write a jsonl.gz of documents of `files` with about `num_words` whitespace words, chosen by a seeded hash.

    Documents are taken by ascending SHA-256 of "SEED:TEXT" until the words are reached, and written in that order.

    Returns:
        documents, words, and digest: the SHA-256 of the texts in their order, each with its length before it.
    """
    ranked = sorted(
        (hashlib.sha256(f"{seed}:{text}".encode()).digest(), len(text.split()), number, file)
        for file in files
        for number, text in enumerate(read_texts(file))
    )
    taken: dict[tuple[str, int], int] = {}
    words = 0
    for place, (_, count, number, file) in enumerate(ranked):
        if words >= num_words:
            break
        taken[file, number] = place
        words += count
    texts = [""] * len(taken)
    for file in files:
        for number, text in enumerate(read_texts(file)):
            if (file, number) in taken:
                texts[taken[file, number]] = text
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_name(f"new-{output.name}")
    with gzip.open(new, "wt", encoding="utf-8", compresslevel=4) as target:
        target.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    new.replace(output)
    return {"documents": len(texts), "words": words, "digest": digest.hexdigest()}
