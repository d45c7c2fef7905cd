"""The built-in filter `decontamination`: drops documents that contain text of evaluation sets.

Tokens are words, or characters in scripts without spaces, without case and punctuation: they depend on
no vocabulary, so the tokenizer's own training text is decontaminated by the same rule (n-grams of words as in GPT-3,
arXiv:2005.14165, appendix C).
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import expand_home
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputUnit, expand
from data_prep.filters.protocol import hashes_of
from data_prep.storage import storage

_TOKEN = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
    r"|[\p{L}\p{M}\p{N}--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]+",
    regex.VERSION1,
)
_ASCII_TOKEN = re.compile("[a-z0-9]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
_UNKNOWN = np.uint64(0)
_REMAINDERS_PER_KEY = 16


class Decontamination:
    """Drops documents that share `ngram` consecutive tokens with an evaluation set; the reason is the set's name.

    Examples are the lines of the fields, and each field of several lines as a whole. An example of fewer than `ngram`
    tokens is searched as a whole if it has at least `min_tokens`; shorter lines are too common to be searched on their
    own, and are counted in the identity.

    Args:
        sets: by name, files or patterns of any input format, or {files: ..., fields: [...], format: ...}; fields are
            `text` by default. The format is named as in `sources[].format`, by default it follows from the names. A
            file, or each of a list of files, is a set with the file's name. Sets are searched in this order, and a
            document counts for the first.
        ngram: number of consecutive tokens.
        min_tokens: least tokens of an example that is shorter than an n-gram.
    """

    version = "2"

    def __init__(self, sets: Mapping[str, Any] | Sequence[str] | str, ngram: int = 13, min_tokens: int = 8) -> None:
        sets = _named(sets)
        if not isinstance(sets, Mapping) or not sets or not 1 <= min_tokens <= ngram <= 100:
            raise UsageError(
                f"filter 'decontamination' with ngram={ngram}, min_tokens={min_tokens} and "
                f"sets={json.dumps(sets, default=str)[:200]}",
                fix="give sets: {NAME: FILES} and 1 <= min_tokens <= ngram <= 100",
                code="filter-parameters",
            )
        self._ngram, self._min_tokens = ngram, min_tokens
        self._word_ids: dict[str, int] = {}
        self._described: dict[str, Any] = {}
        self._examples: dict[str, np.ndarray] = {}
        hashes: list[dict[int, list[np.ndarray]]] = []
        for name, given in sets.items():
            hashes.append(self._read(str(name), given))
        self._names = list(map(str, sets))
        self._tables = {
            length: _Table.of([found.get(length, []) for found in hashes])
            for length in sorted({length for found in hashes for length in found})
        }

    @staticmethod
    def files(sets: Any = None) -> list[str]:
        """Return the files of all sets that are well described."""
        named, found = _named(sets), list[str]()
        for given in named.values() if isinstance(named, Mapping) else ():
            each = given if isinstance(given, Mapping) else {"files": given}
            files: Any = [each.get("files")] if isinstance(each.get("files"), str) else each.get("files")
            found.extend(_urls(files, each.get("format")) if _are_texts(files) else ())
        return found

    def identity(self) -> dict[str, Any]:
        """Return the content of the sets instead of their file names."""
        return {"parameters": {"ngram": self._ngram, "min_tokens": self._min_tokens, "sets": self._described}}

    def lists(self) -> dict[str, np.ndarray]:
        """Return the hashes of the examples of each set, (n,) uint64, by which an addition knows a set that grew."""
        return self._examples

    def __call__(self, document: Document) -> str | None:
        words = tokens_of(document.text)
        values = np.fromiter(map(self._word_ids.get, words, repeat(0)), np.uint64, len(words))
        found: int | None = None
        for length, hashed in _rolling(values, max(self._tables, default=0)):
            if length in self._tables and (first := self._tables[length].first_set(hashed)) is not None:
                found = first if found is None else min(found, first)
        return None if found is None else self._names[found]

    def _read(self, name: str, given: Any) -> dict[int, list[np.ndarray]]:
        """Return the hashes of a set's n-grams by length."""
        hashes: dict[int, list[np.ndarray]] = {}
        num_examples = num_short = 0
        digest = hashlib.sha256()
        examples: list[str] = []
        for text in _texts(name, given):
            lines = [words for words in map(tokens_of, text.splitlines()) if words]
            for words in lines:
                num_examples += 1
                num_short += len(words) < self._min_tokens
                digest.update((" ".join(words) + "\n").encode(errors="surrogatepass"))
                self._add(words, hashes)
            digest.update(b"\n")
            examples.append("\n".join(map(" ".join, lines)))
            if len(lines) > 1:  # a leak may be of lines that are short
                self._add([word for words in lines for word in words], hashes)
        self._examples[name] = hashes_of(examples)
        self._described[name] = {"examples": num_examples, "too_short": num_short, "sha256": digest.hexdigest()}
        return hashes

    def _add(self, words: Sequence[str], hashes: dict[int, list[np.ndarray]]) -> None:
        """Add the n-grams of an example that is long enough, or the whole of one that is shorter than an n-gram."""
        if len(words) < self._min_tokens:
            return
        ids = [self._word_ids.setdefault(word, _word_id(word)) for word in words]
        length = min(self._ngram, len(words))
        for size, hashed in _rolling(np.array(ids, np.uint64), length):
            if size == length:
                hashes.setdefault(length, []).append(hashed)


def _named(sets: Any) -> Any:
    """Return sets by name; a file, or each of a list of files, is a set with the file's name without extension."""
    files = [sets] if isinstance(sets, str) else sets
    if isinstance(files, Mapping) or not _are_texts(files):
        return sets
    named = {name.rstrip("/").rpartition("/")[2].partition(".")[0] or name: name for name in files}
    return named if len(named) == len(files) else {name: name for name in files}


def tokens_of(text: str) -> list[str]:
    """Return the words of a text, without case, punctuation and compatibility forms."""
    if text.isascii():
        return _ASCII_TOKEN.findall(text.lower())
    found: list[str] = _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())
    return found


def _word_id(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "little") | 1


def _rolling(values: np.ndarray, longest: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield 1, 2 ... `longest`, each with the hashes (n - length + 1,) uint64 of all runs of so many values."""
    hashed = values
    for length in range(1, min(longest, len(values)) + 1):
        if length > 1:
            hashed = (hashed[:-1] ^ (hashed[:-1] >> np.uint64(29))) * _BASE + values[length - 1 :]
        yield length, hashed


class _Table(NamedTuple):
    """The n-grams of one length of all sets, as hashes."""

    keys: np.ndarray
    """(n,) uint64, ascending."""
    sets: np.ndarray
    """(n,) int64: number of the first set that contains each."""
    may_hold: np.ndarray
    """(power of two,) bool: whether a key has this remainder. Few other hashes pass, and the search is slow."""

    @classmethod
    def of(cls, by_set: Sequence[Sequence[np.ndarray]]) -> _Table:
        keys = np.concatenate([np.zeros(0, np.uint64), *(hashed for found in by_set for hashed in found)])
        sets = np.concatenate([np.full(len(hashed), n) for n, found in enumerate(by_set) for hashed in found])
        unique, first = np.unique(keys, return_index=True)
        may_hold = np.zeros(1 << (_REMAINDERS_PER_KEY * len(unique)).bit_length(), bool)
        may_hold[_remainders(unique, may_hold)] = True
        return cls(unique, sets[first], may_hold)

    def first_set(self, hashed: np.ndarray) -> int | None:
        """Return the number of the first set that contains one of these n-grams."""
        possible = hashed[self.may_hold[_remainders(hashed, self.may_hold)]]
        indices = np.minimum(np.searchsorted(self.keys, possible), len(self.keys) - 1)
        is_found = self.keys[indices] == possible
        return int(self.sets[indices[is_found]].min()) if is_found.any() else None


def _remainders(hashed: np.ndarray, table: np.ndarray) -> np.ndarray:
    return (hashed & np.uint64(len(table) - 1)).view(np.int64)


def _texts(name: str, given: Any) -> Iterator[str]:
    """Yield the texts of a set."""
    values = given if isinstance(given, Mapping) else {"files": given}
    files: Any = values.get("files")
    fields: Any = values.get("fields", ["text"])
    patterns, fields = ([item] if isinstance(item, str) else item for item in (files, fields))
    named: Any = values.get("format")
    if (
        set(values) - {"files", "fields", "format"}
        or not _are_texts(patterns)
        or not _are_texts(fields)
        or not isinstance(named, str | None)
    ):
        raise UsageError(
            f"the evaluation set {name!r} of filter 'decontamination' is {json.dumps(given, default=str)[:200]}",
            fix="give files, or {files: [...], fields: [...], format: NAME}",
            code="filter-parameters",
        )
    settings, formats = DocumentSettings(text_field=fields[0], metadata_fields=tuple(fields[1:])), Formats()
    for url in _urls(patterns, named):
        try:
            unit = InputUnit(url, 0, storage.size(url), True, 0, formats.of_file(url, named))
            for document in DocumentReader(unit, settings, formats):
                yield document.text
                yield from (str(value) for value in document.metadata.values())
        except UserError as error:
            if error.code not in _SET_FIXES:
                raise
            # The settings of the corpus, which the error advises, do not reach an evaluation set.
            what, setting = _SET_FIXES[error.code]
            raise UsageError(
                f"the evaluation set {name!r} of filter 'decontamination': {error.problem}",
                fix=f"name its {what}: sets: {{{name}: {{files: {json.dumps(patterns)}, {setting}}}}}",
                code=error.code,
            ) from None


_SET_FIXES = {
    "missing-field": ("fields", "fields: [FIELD]"),
    "unsupported-file-type": ("format", "format: NAME"),
}


def _urls(patterns: Sequence[str], named: str | None) -> list[str]:
    return [url for pattern in patterns for url in expand(expand_home(pattern), is_format_named=named is not None)]


def _are_texts(items: Any) -> bool:
    return isinstance(items, Sequence) and len(items) > 0 and all(isinstance(item, str) for item in items)
