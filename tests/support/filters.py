"""Filters of a user's own, for tests that name them as `module:function`."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from data_prep import Document


def drop_fours(document: Document) -> str | None:
    return "four" if document.metadata["number"] == 4 else None


def count_call(document: Document) -> str | None:
    """Keep every document, and append a line to the file that the environment names."""
    with open(os.environ["FILTER_CALLS"], "a") as file:
        file.write("called\n")
    return None


def take_time(document: Document, milliseconds: int) -> None:
    """Keep every document after a while."""
    time.sleep(milliseconds / 1000)


def shorten(document: Document, words: int) -> Document:
    """Leave so many words of a document."""
    return replace(document, text=" ".join(document.text.split()[:words]))


def give_reason(document: Document, field: str) -> str | None:
    """Drop a document for the reason that the field holds."""
    return document.metadata.get(field)
