"""Labeled files as the field publishes them, read as tables: SQuAD's json, CoNLL's columns, and lines of plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas

_TAG = re.compile(r"O|[BIESLU]-.+", re.DOTALL)
_IOB2 = {"S": "B", "U": "B", "E": "I", "L": "I"}
_ENDS = {frozenset("ES"): ("E", "S"), frozenset("LU"): ("L", "U")}
"""By the letters that BIOES and BILOU have and IOB2 lacks, the letter of a last word and that of an only word."""
_COMMENT = re.compile(r"#\s*[\w.-]+ = ")
_CONLLU_ID = re.compile(r"\d+(?:[-.]\d+)?")
DOCUMENT_START = "-DOCSTART-"
FAULTS = "faults"
"""Key of a table's `attrs`: why a column cannot be read as labels, and what to do, by the column's name."""
NUM_BLANK = "num_blank"
"""Key of a table's `attrs`: the number of blank lines, which are no rows."""


class UnreadableFormat(ValueError):
    """A file that looks like another format, with what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def read_lines(text: str) -> pandas.DataFrame:
    """Return the lines that are not blank as the column `text`; `attrs` has the number of the others."""
    lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    table = pandas.DataFrame({"text": [line for line in lines if line.strip()]}, dtype=object)
    table.attrs[NUM_BLANK] = len(lines) - len(table)
    return table


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
        is_impossible = question.get("is_impossible", False)
        if not isinstance(is_impossible, bool):
            raise UnreadableFormat(
                f"question {number:,} has is_impossible={json.dumps(is_impossible)[:40]}, neither true nor false",
                fix="write true or false, without quotation marks",
            )
        answers = [] if is_impossible else question.get("answers", [])
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
    none. Lines that begin with "#" are comments if they have no tab; where spaces part cells, if they have another
    number of cells than the lines of words, or are of the form `# name = value`. An empty cell is None. Columns of
    entity tags (IOB1, IOB2, BIOES, BILOU) become IOB2; one that has other tags too is a fault, which `attrs` has.

    Raises:
        ValueError: a line has another number of columns than the first one, or is a range of words of CoNLL-U.
    """
    given = [line.rstrip("\r") for line in text.split("\n")]
    some = [line for line in given if line.strip() and not line.startswith(DOCUMENT_START)]
    of_words = [line for line in some if not line.startswith("#")] or some
    is_tabbed = any("\t" in line for line in of_words)
    sentences: list[list[list[str | None]]] = [[]]
    lines: list[int] = []
    width = 0 if is_tabbed or not of_words else len(_parted(of_words[0]))
    for number, line in enumerate(given, start=1):
        if not line.strip() or line.startswith(DOCUMENT_START):
            sentences.append([])
            continue
        if is_tabbed and line.startswith("#") and "\t" not in line:
            continue
        cells = [cell.strip() or None for cell in line.split("\t")] if is_tabbed else _parted(line)
        if not is_tabbed and line.startswith("#") and (len(cells) != width or _COMMENT.match(line)):
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise ValueError(f"line {number:,} has {len(cells)} columns, and the first one {width}")
        lines.append(number)
        sentences[-1].append(cells)
    sentences = [sentence for sentence in sentences if sentence]
    columns = [list(cells) for cells in zip(*(cells for sentence in sentences for cells in sentence), strict=True)]
    _check_no_ranges(columns, lines)
    table = pandas.DataFrame(index=range(len(sentences)))
    faults: dict[str, tuple[str, str]] = {}
    for place, cells in enumerate(columns, start=1):
        if odd := _odd_tag(cells):
            faults[str(place)] = (
                f"line {lines[cells.index(odd)]:,}, column '{place}': {odd!r} is not a tag of entities, but the others "
                "are (O, or B-, I-, E-, S-, L- or U- with a type)",
                "correct the tag, or write O; the tags of a .jsonl file stay as they are",
            )
        rest = iter(cells)
        tags = [[next(rest) for _ in sentence] for sentence in sentences]
        table[str(place)] = pandas.Series(as_iob2(tags), dtype=object)
    table.attrs[FAULTS] = faults
    return table


def _parted(line: str) -> list[str | None]:
    return [*re.findall("[^ ]+", line)]


def _check_no_ranges(columns: Sequence[Sequence[str | None]], lines: Sequence[int]) -> None:
    """Refuse lines of CoNLL-U that are not words of their own: `1-2` is written as one word, `8.1` is not written."""
    numbers = [cell or "" for cell in columns[0]] if len(columns) > 1 else []
    if not all(map(_CONLLU_ID.fullmatch, numbers)):
        return
    for line, number in zip(lines, numbers, strict=False):
        if not number.isdecimal():
            raise UnreadableFormat(
                f"line {line:,} of CoNLL-U has the number {number}, so it does not count as a word",
                fix="remove the lines whose number has a hyphen or a point, such as 1-2 and 8.1",
            )


def as_iob2(sentences: Sequence[Sequence[str | None]]) -> list[list[str | None]]:
    """Return entity tags in the scheme IOB2, where B- begins every entity; a column of anything else as it is.

    An empty cell (None) stays, and ends an entity.
    """
    every = {tag for tags in sentences for tag in tags if tag is not None}
    if every <= {"O"} or not all(_TAG.fullmatch(tag) for tag in every):
        return [list(tags) for tags in sentences]
    return [_as_iob2(tags) for tags in sentences]


def as_scheme_of(names: Sequence[str], sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return entity tags in the scheme of `names`, the tags of a model; those of its own scheme as they are.

    A model may have tags of IOB2, or of BIOES or BILOU, which mark the last word of an entity too. Tags of anything
    else stay as they are.
    """
    every = {tag for tags in sentences for tag in tags}
    if every <= {"O"} or not all(_TAG.fullmatch(tag) for tag in {*names, *every}):
        return [list(tags) for tags in sentences]
    ours, given = _letters(names), _letters(every)
    if ours == given:
        return [list(tags) for tags in sentences]
    plain = [[tag or "O" for tag in _as_iob2(tags)] for tags in sentences]
    return plain if ours is None else [_with_ends(tags, *_ENDS[ours]) for tags in plain]


def _letters(tags: Iterable[str]) -> frozenset[str] | None:
    """Return the letters of `_ENDS` whose scheme the tags have; None for IOB1 and IOB2, or if they have both."""
    first = {tag[0] for tag in tags}
    schemes = [letters for letters in _ENDS if letters & first]
    return schemes[0] if len(schemes) == 1 else None


def _with_ends(tags: Sequence[str], last: str, single: str) -> list[str]:
    """Return tags of IOB2 with the letter of every entity's last word."""
    result = []
    for tag, after in zip(tags, [*tags[1:], "O"], strict=True):
        is_last = tag != "O" and after != f"I-{tag[2:]}"
        result.append(f"{(last if tag[0] == 'I' else single) if is_last else tag[0]}{tag[1:]}")
    return result


def not_of_iob2(tags: Sequence[str]) -> str | None:
    """Return the first tag that is not of IOB2 although most, apart from O, are tags of entities; None without any."""
    named = [tag for tag in tags if tag != "O"]
    if 2 * sum(_TAG.fullmatch(tag) is not None for tag in named) <= len(named):
        return None
    return next((tag for tag in named if tag[:2] not in ("B-", "I-")), None)


def _odd_tag(cells: Sequence[str | None]) -> str | None:
    """Return the first cell of a column of entity tags that is none; None if there is none, or no such column.

    A column has entity tags if most of its cells, apart from O and empty ones, are such tags.
    """
    named = [cell for cell in cells if cell not in (None, "O")]
    odd = [cell for cell in named if not _TAG.fullmatch(cell)]
    return odd[0] if odd and 2 * len(odd) < len(named) else None


def _as_iob2(tags: Sequence[str | None]) -> list[str | None]:
    result: list[str | None] = []
    before = "O"  # the tag before, of which an entity may go on
    for tag in tags:
        if tag is None:
            result.append(None)
            before = "O"
            continue
        sign, kind = _IOB2.get(tag[0], tag[0]), tag[2:]
        goes_on = before[0] in "BI" and before[2:] == kind
        result.append("O" if tag == "O" else f"{'I' if sign == 'I' and goes_on else 'B'}-{kind}")
        before = tag
    return result
