"""Minimal pairs: two sentences that differ in one point of grammar; a language model should prefer the good one.

A sentence's score is its pseudo-log-likelihood (Salazar et al. 2020, section 2): every token is masked in turn, and the
log-probabilities of the original tokens are summed. A model is right on a pair when the good sentence scores strictly
higher; a tie is wrong (Warstadt et al. 2020, BLiMP).

Masked copies of one length are scored together, so that nothing is padded. Which copies share a batch depends on the
pairs alone, never on the number of ranks.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import printable

SUFFIXES = (".jsonl", ".jsonl.gz")
BATCH_TOKENS = 4096
"""Tokens of the masked copies that are scored at once: on a CPU a quarter faster than 16,384, which leave its cache."""
NUM_RESAMPLES = 10_000
CHANCE = 0.5
"""Accuracy by chance."""
FEWEST_PAIRS = 30
"""A bootstrap interval of fewer pairs says little; if a model is right on all of them, it has no width."""
_SHOWN_CHARACTERS = 60
VERB_PARADIGMS = (
    *("regular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_1"),
    *("distractor_agreement_relational_noun", "distractor_agreement_relative_clause"),
)
"""Paradigms of BLiMP whose two sentences differ in the verb that agrees with the subject."""
SUBJECT_PARADIGMS = ("regular_plural_subject_verb_agreement_2", "irregular_plural_subject_verb_agreement_2")
"""Paradigms of BLiMP whose two sentences differ in the noun of the subject."""
_SINGULAR_VERBS = frozenset("is was has does isn't wasn't hasn't doesn't".split())
_PLURAL_VERBS = frozenset("are were have do aren't weren't haven't don't".split())
_REGULAR_ENDINGS = (("", "s"), ("", "es"), ("y", "ies"))
_NOUN_ENDINGS = (
    *(*_REGULAR_ENDINGS, ("f", "ves"), ("fe", "ves")),
    *(("man", "men"), ("child", "children"), ("person", "people"), ("ox", "oxen"), ("foot", "feet")),
    *(("tooth", "teeth"), ("goose", "geese"), ("mouse", "mice"), ("louse", "lice")),
    *(("us", "i"), ("is", "es"), ("um", "a"), ("on", "a")),
)
"""Endings of a noun in singular and plural."""


class MinimalPair(NamedTuple):
    """Two sentences of a paradigm; `field` is its field of linguistics, empty where the file names none."""

    good: str
    bad: str
    paradigm: str
    field: str
    location: str
    """The file and the line, for messages."""


class EncodedSentence(NamedTuple):
    """Token ids (length,) of a sentence with its special tokens, and the positions of its own tokens."""

    ids: np.ndarray
    own: np.ndarray


class MaskedCopies(NamedTuple):
    """A batch of N copies of sentences of one length, each with one token masked."""

    input_ids: np.ndarray
    """(N, length) int64."""
    positions: np.ndarray
    """(N,) int64: the masked position of each copy."""
    targets: np.ndarray
    """(N,) int64: the token that was there."""


class Scorer(Protocol):
    """A masked language model: log-probabilities (N,) float64, in nats, of the masked tokens of a batch."""

    def __call__(self, copies: MaskedCopies) -> np.ndarray: ...


def read_minimal_pairs(path: str | Path) -> list[MinimalPair]:
    """Read the pairs of a `.jsonl` or `.jsonl.gz` file, or of all such files of a directory and its subdirectories.

    A line is an object with `sentence_good` and `sentence_bad`; `UID` names the paradigm (by default the path of the
    file does) and `field` its field. Files are read in the order of their paths; hidden ones are skipped.

    Raises:
        UsageError: there is no such file, or a line is not a pair.
    """
    path = Path(path)
    files = _files_in(path) if path.is_dir() else [path]
    if not files or not path.exists():
        what = "has no .jsonl or .jsonl.gz file" if path.is_dir() else "does not exist"
        raise UsageError(
            f"{path} {what}",
            fix="give a directory with files of minimal pairs, as BLiMP publishes them",
            code="no-minimal-pairs",
        )
    pairs = [pair for file in files for pair in _read_file(file, _name_of(file, path))]
    if not pairs:
        raise UsageError(
            f"{path} has no minimal pair",
            fix="give a directory whose files have one pair per line",
            code="no-minimal-pairs",
        )
    return pairs


class NumberedSentence(NamedTuple):
    """A sentence and the number of its subject: `singular` or `plural`."""

    text: str
    number: str
    paradigm: str


def subject_number(pairs: Sequence[MinimalPair]) -> list[NumberedSentence]:
    """Return the good sentences of `VERB_PARADIGMS` and `SUBJECT_PARADIGMS`, each once, with the subject's number.

    The two sentences of a pair differ in one word, which tells the number of the good one. Where this is the verb, a
    form of `is`, `was`, `has` or `does`, or the form in -s of the two, is singular ("The cat sleeps", not "sleep").
    Where it is the noun, the two are singular and plural of one noun ("The women meet", not "woman"). The bad sentences
    are left out, since their subject and verb contradict each other. So are pairs that differ otherwise, and pairs of
    other paradigms.
    """
    numbered = (
        NumberedSentence(pair.good, number, pair.paradigm)
        for pair in pairs
        if (number := _number_of_subject(pair)) is not None
    )
    return list({each.text: each for each in numbered}.values())


def _number_of_subject(pair: MinimalPair) -> str | None:
    """Return the number of the good sentence's subject; None if the pair does not tell."""
    good, bad = (text.rstrip(" .!?").split() for text in (pair.good, pair.bad))
    differing = [words for words in zip(good, bad, strict=False) if words[0] != words[1]]
    if len(good) != len(bad) or len(differing) != 1:
        return None
    ours, other = (word.lower() for word in differing[0])
    if pair.paradigm in SUBJECT_PARADIGMS:
        is_plural, is_singular = (_is_plural_of(*words, _NOUN_ENDINGS) for words in ((ours, other), (other, ours)))
    elif pair.paradigm in VERB_PARADIGMS:
        is_plural = ours in _PLURAL_VERBS or _is_plural_of(other, ours, _REGULAR_ENDINGS)
        is_singular = ours in _SINGULAR_VERBS or _is_plural_of(ours, other, _REGULAR_ENDINGS)
    else:
        return None
    return None if is_plural == is_singular else "plural" if is_plural else "singular"


def _is_plural_of(word: str, base: str, endings: Sequence[tuple[str, str]]) -> bool:
    """Return whether `word` is `base` with one of its endings replaced: a noun's plural, or a verb's form in -s."""
    return any(base.endswith(of_base) and word == base.removesuffix(of_base) + ending for of_base, ending in endings)


def _files_in(folder: Path) -> list[Path]:
    files = (each for each in folder.rglob("*") if each.name.endswith(SUFFIXES) and each.is_file())
    return sorted(each for each in files if not any(part.startswith(".") for part in each.relative_to(folder).parts))


def _name_of(file: Path, path: Path) -> str:
    name = file.relative_to(path).as_posix() if file != path else file.name
    return name.removesuffix(".gz").removesuffix(".jsonl")


def digest_of_pairs(pairs: Sequence[MinimalPair]) -> str:
    """Return the sha256 of the texts and names of pairs; the location of their files does not count."""
    return hashlib.sha256(json.dumps([pair[:4] for pair in pairs]).encode()).hexdigest()


def _read_file(file: Path, name: str) -> Iterator[MinimalPair]:
    try:
        data = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{file} cannot be read ({error})",
            fix="copy the file again",
            code="unreadable-file",
        ) from None
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _read_pair(line, name, f"{file}, line {number:,}")


def _read_pair(line: bytes, name: str, location: str) -> MinimalPair:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{location}: not valid JSON ({error})",
            fix="write one object per line",
            code="invalid-minimal-pair",
        ) from None
    if not isinstance(values, dict):
        raise UsageError(
            f"{location}: not a JSON object ({str(values)[:_SHOWN_CHARACTERS]})",
            fix="write one object per line",
            code="invalid-minimal-pair",
        )
    for key in ("sentence_good", "sentence_bad"):
        if not isinstance(values.get(key), str) or not values[key].strip():
            given = repr(values[key])[:_SHOWN_CHARACTERS] if key in values else "missing"
            raise UsageError(
                f"{location}: {key} must be a sentence ({given})",
                fix="give a text that is not empty",
                code="invalid-minimal-pair",
            )
    paradigm, field = (str(each) if type(each) is int else each for each in map(values.get, ("UID", "field")))
    pair = MinimalPair(
        values["sentence_good"],
        values["sentence_bad"],
        paradigm if isinstance(paradigm, str) and paradigm else name,
        field if isinstance(field, str) else "",
        location,
    )
    try:
        "".join(pair[:4]).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{location}: a text holds half a surrogate pair, which is not a character",
            fix="correct the line, or remove it",
            code="invalid-minimal-pair",
        ) from None
    return pair


@dataclass(frozen=True)
class EncodedPairs:
    """Minimal pairs whose sentences are encoded and numbered, each text once, and the masked copies to score."""

    pairs: tuple[MinimalPair, ...]
    sentences: tuple[EncodedSentence, ...]
    numbers: np.ndarray
    """(num_pairs, 2) int64: the sentences of each pair, the good one first."""
    mask_token_id: int
    owners: np.ndarray
    """(num_copies,) int64: the sentence of each masked copy, the shortest sentences first."""
    positions: np.ndarray
    """(num_copies,) int64: the masked position of each copy."""

    @classmethod
    def encode(
        cls,
        pairs: Sequence[MinimalPair],
        encode: Callable[[str], EncodedSentence],
        mask_token_id: int,
        max_length: int,
        limit: str = "the model takes",
        fix: str = "remove the pair",
    ) -> EncodedPairs:
        """Encode the sentences; `limit` and `fix` are of the error for those with more than `max_length` tokens.

        Raises:
            UsageError: a sentence has no token, whose score would be the highest there is, or too many.
        """
        sentences: dict[str, EncodedSentence] = {}
        for pair in pairs:
            for text in (pair.good, pair.bad):
                if text in sentences:
                    continue
                sentences[text] = encode(text)
                if not len(sentences[text].own):
                    raise UsageError(
                        f"{pair.location}: the tokenizer finds no token in {text[:_SHOWN_CHARACTERS]!r}",
                        fix="remove the pair",
                        code="text-without-token",
                    )
                if (length := len(sentences[text].ids)) > max_length:
                    raise UsageError(
                        f"{pair.location}: the sentence has {length:,} tokens, and {limit} {max_length:,}",
                        fix=fix,
                        code="text-too-long",
                    )
        numbers = {text: number for number, text in enumerate(sentences)}
        encoded = tuple(sentences.values())
        order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
        return cls(
            tuple(pairs),
            encoded,
            np.array([[numbers[pair.good], numbers[pair.bad]] for pair in pairs]),
            mask_token_id,
            np.repeat(order, [len(encoded[number].own) for number in order]),
            np.concatenate([encoded[number].own for number in order]),
        )

    @property
    def num_copies(self) -> int:
        return len(self.owners)

    def batches(self, most_copies: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        """Yield the first copy of each batch and the one after its last: copies of sentences of one length.

        Args:
            most_copies: the largest number of copies of a batch, by the length of their sentences.
        """
        lengths = np.array([len(each.ids) for each in self.sentences])[self.owners]
        bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
        for first, stop in zip(bounds, bounds[1:], strict=False):
            size = most_copies(int(lengths[first]))
            yield from ((start, min(start + size, stop)) for start in range(first, stop, size))

    def copies(self, first: int, stop: int) -> MaskedCopies:
        """Return the masked copies `first` to `stop` - 1, whose sentences have one length."""
        positions, rows = self.positions[first:stop], np.arange(stop - first)
        input_ids = np.stack([self.sentences[number].ids for number in self.owners[first:stop]])  # (N, length)
        targets = input_ids[rows, positions]
        input_ids[rows, positions] = self.mask_token_id
        return MaskedCopies(input_ids, positions, targets)

    def scores(self, log_likelihoods: np.ndarray) -> np.ndarray:
        """Return the pseudo-log-likelihoods (num_pairs, 2) float64 from those of the copies (num_copies,), in nats."""
        scores: np.ndarray = np.bincount(self.owners, log_likelihoods, minlength=len(self.sentences))[self.numbers]
        return scores


def pair_scores(
    encoded: EncodedPairs, scorer: Scorer, advance: Callable[[int], None] = lambda num_copies: None
) -> np.ndarray:
    """Return the pseudo-log-likelihoods of the good and the bad sentences in nats, (num_pairs, 2) float64.

    `advance` is called with the number of masked copies after each batch. A sentence that occurs twice is scored once.

    Raises:
        UserError: a score is not finite.
    """
    log_likelihoods = np.zeros(encoded.num_copies)
    for first, stop in encoded.batches(lambda length: max(1, BATCH_TOKENS // length)):
        log_likelihoods[first:stop] = scorer(encoded.copies(first, stop))
        advance(stop - first)
    scores = encoded.scores(log_likelihoods)
    if not np.isfinite(scores).all():
        pair, side = np.argwhere(~np.isfinite(scores))[0]
        raise UserError(
            f"the model gives a score that is not finite to {encoded.pairs[pair][side][:_SHOWN_CHARACTERS]!r}",
            fix="use a model whose weights are finite",
            code="weights-not-finite",
        )
    return scores


@dataclass(frozen=True)
class Accuracy:
    """A share of pairs that a model judges right, with a bootstrap interval of 95%."""

    num_pairs: int
    num_right: int
    num_ties: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.num_right / self.num_pairs


@dataclass(frozen=True)
class Accuracies:
    """Accuracies over all pairs, by field and by paradigm."""

    overall: Accuracy
    """The share of all pairs, so that a paradigm counts by its number of pairs."""
    fields: dict[str, Accuracy]
    paradigms: dict[str, Accuracy]

    @property
    def mean_of_paradigms(self) -> float:
        """Mean accuracy of the paradigms; it equals `overall` where all paradigms have the same number of pairs."""
        return fmean(each.share for each in self.paradigms.values())


def judge(pairs: Sequence[MinimalPair], scores: np.ndarray) -> Accuracies:
    """Return the accuracies that follow from the scores (num_pairs, 2) of `pair_scores`.

    The interval resamples the pairs within each paradigm, `NUM_RESAMPLES` times with a fixed seed. The number of right
    pairs among n that are drawn with replacement is binomial, so it is drawn directly.
    """
    right, tied = scores[:, 0] > scores[:, 1], scores[:, 0] == scores[:, 1]
    paradigms = np.array([pair.paradigm for pair in pairs])
    fields = np.array([pair.field for pair in pairs])

    def accuracy(chosen: np.ndarray) -> Accuracy:
        generator = np.random.default_rng(0)
        drawn = np.zeros(NUM_RESAMPLES)
        for paradigm in dict.fromkeys(paradigms[chosen].tolist()):
            inside = right[chosen & (paradigms == paradigm)]
            drawn += generator.binomial(len(inside), inside.mean(), NUM_RESAMPLES)
        low, high = np.quantile(drawn / chosen.sum(), (0.025, 0.975)).tolist()
        return Accuracy(int(chosen.sum()), int(right[chosen].sum()), int(tied[chosen].sum()), low, high)

    return Accuracies(
        accuracy(np.ones(len(pairs), bool)),
        {name: accuracy(fields == name) for name in dict.fromkeys(fields.tolist()) if name},
        {name: accuracy(paradigms == name) for name in dict.fromkeys(paradigms.tolist())},
    )


def report_lines(report: Accuracies) -> Iterator[str]:
    """Return the lines of a table in percent: paradigms, fields, and all pairs."""
    width = max(len(printable(name)) for name in ("minimal pairs", *report.fields, *report.paradigms))
    yield f"{'':<{width}}  {'pairs':>7}  {'right %':>7}  {'95% interval':>12}  {'ties':>5}"
    for group in (report.paradigms, report.fields, {"overall": report.overall}):
        for name, each in sorted(group.items()):
            name, share = printable(name), 100 * each.share
            interval = f"{100 * each.low:.1f}-{100 * each.high:.1f}"
            yield f"{name:<{width}}  {each.num_pairs:>7,}  {share:>7.2f}  {interval:>12}  {each.num_ties:>5,}"
        if group:
            yield ""
    mean = f"{100 * report.mean_of_paradigms:.2f}%"
    yield f"overall is the share of all pairs; the mean of the paradigms is {mean}."
    yield f"A tie is wrong; chance is {CHANCE:.0%}."
    if any(
        each.num_pairs < FEWEST_PAIRS for each in (report.overall, *report.fields.values(), *report.paradigms.values())
    ):
        yield f"The intervals of rows with fewer than {FEWEST_PAIRS} pairs are not meaningful."


def as_json(pairs: Sequence[MinimalPair], scores: np.ndarray, report: Accuracies) -> dict[str, Any]:
    """Return shares of right pairs (`overall`, `fields`, `paradigms`), counts, and the scores of every pair."""
    groups = {"fields": report.fields, "paradigms": report.paradigms}
    return {
        "overall": report.overall.share,
        "mean_of_paradigms": report.mean_of_paradigms,
        "interval": [report.overall.low, report.overall.high],
        "num_pairs": report.overall.num_pairs,
        "num_ties": report.overall.num_ties,
        **{key: {name: each.share for name, each in group.items()} for key, group in groups.items()},
        "counts": {
            key: {
                name: {"pairs": each.num_pairs, "right": each.num_right, "ties": each.num_ties}
                | {"interval": [each.low, each.high]}
                for name, each in group.items()
            }
            for key, group in groups.items()
        },
        "pairs": [
            {"paradigm": pair.paradigm, "sentence_good": pair.good, "sentence_bad": pair.bad}
            | {"score_good": good, "score_bad": bad}
            for pair, (good, bad) in zip(pairs, scores.tolist(), strict=True)
        ],
    }
