"""Labeled files as the field publishes them, read as tables: SQuAD's json, CoNLL's columns, and lines of plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pandas

_TAG = re.compile(r"O|[BIESLU]-.+", re.DOTALL)
_IOB2 = {"S": "B", "U": "B", "E": "I", "L": "I"}
DOCUMENT_START = "-DOCSTART-"


def read_lines(text: str) -> pandas.DataFrame:
    """Return the lines that are not empty as the column `text`."""
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return pandas.DataFrame({"text": [line for line in lines if line.strip()]}, dtype=object)


def read_squad(text: str) -> pandas.DataFrame:
    """Return a row for each question of a file of SQuAD 1.1 or 2.0: `id`, `context`, `question` and `answers`.

    A question without an answer, as in 2.0, has an empty list, which question answering refuses.

    Raises:
        ValueError: the file does not have the form of SQuAD.
    """
    rows = []
    for number, (context, question) in enumerate(_questions(json.loads(text)), start=1):
        if not isinstance(question, dict) or not isinstance(question.get("question"), str):
            raise ValueError(f"question {number:,} is not an object with the key 'question'")
        if not isinstance(context, str):
            raise ValueError(f"the paragraph of question {number:,} has no text under the key 'context'")
        answers = [] if question.get("is_impossible") else question.get("answers", [])
        rows.append((question.get("id"), context, question["question"], answers))
    return pandas.DataFrame(rows, columns=["id", "context", "question", "answers"], dtype=object)


def _questions(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the context and the object of each question."""
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield paragraph["context"], question
    except (KeyError, TypeError):
        raise ValueError("it has not the form of SQuAD: data, paragraphs, context, qas") from None


def read_conll(text: str) -> pandas.DataFrame:
    """Return a row for each sentence of a CoNLL file, with a list for each column; the columns are "1", "2", ...

    Empty lines part sentences. Cells are parted by tabs if a line has one, else by spaces, of which a no-break space is
    none; lines that begin with "#" and have no tab are comments in the first case. Columns of entity tags (IOB1, IOB2,
    BIOES, BILOU) become IOB2.

    Raises:
        ValueError: a line has another number of columns than the first one.
    """
    is_tabbed = "\t" in text
    sentences: list[list[list[str]]] = [[]]
    width = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith(DOCUMENT_START):
            sentences.append([])
            continue
        if is_tabbed and line.startswith("#") and "\t" not in line:
            continue
        cells = [cell.strip() for cell in line.split("\t")] if is_tabbed else re.findall("[^ ]+", line)
        width = width or len(cells)
        if len(cells) != width:
            raise ValueError(f"line {number:,} has {len(cells)} columns, and the first one {width}")
        sentences[-1].append(cells)
    columns = {
        str(place + 1): as_iob2([[cells[place] for cells in sentence] for sentence in sentences if sentence])
        for place in range(width)
    }
    return pandas.DataFrame({name: pandas.Series(values, dtype=object) for name, values in columns.items()})


def as_iob2(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return entity tags in the scheme IOB2, where B- begins every entity; a column of anything else as it is."""
    every = {tag for tags in sentences for tag in tags}
    if every <= {"O"} or not all(_TAG.fullmatch(tag) for tag in every):
        return [list(tags) for tags in sentences]
    return [_as_iob2(tags) for tags in sentences]


def _as_iob2(tags: Sequence[str]) -> list[str]:
    result: list[str] = []
    before = "O"  # the tag before, of which an entity may go on
    for tag in tags:
        sign, kind = _IOB2.get(tag[0], tag[0]), tag[2:]
        goes_on = before[0] in "BI" and before[2:] == kind
        result.append("O" if tag == "O" else f"{'I' if sign == 'I' and goes_on else 'B'}-{kind}")
        before = tag
    return result
