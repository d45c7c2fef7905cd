"""The first screen of the page: what came in, what was kept, and why the rest was left out, in plain words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_prep.base.table import Column, Table
from data_prep.base.terminal import counted, listed
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import RemovalRecord, StepRecord, own_budget
from data_prep.documents.drops import EARLIER_FILTERING, REMOVAL, Drop, name_of_filter, place_of_filter
from data_prep.filters.protocol import UNUSABLE

_MOST_REASONS = 3  # that a sentence or a cell names, before it adds up others
NOT_STATED = "not stated"
_WHY = "because the document ..."

_STEPS = {
    "reading": "reading the files",
    "filtering": "filters",
    "filtered text": "checking the filtered text",
    "takedowns": "leaving out what was taken down before",
    "cleaning": "cleaning the text",
    "encoding": "encoding the text as tokens",
    "deduplication": "dropping copies",
    "near duplicates": "dropping near-copies",
    "removal": "removals on request",
}
_REASONS = {
    "invalid UTF-8": "is not UTF-8 text",
    "invalid JSON": "is not valid JSON",
    "invalid CSV": "is not valid CSV",
    "no object": "is not a record with fields",
    "missing field": "lacks the field with the text",
    "not text": "has a number or a list instead of a text",
    "binary": "is a binary file",
    "damaged file": "is in a damaged file",
    "wrong ending": "is in a file of another type than its name says",
    "empty file": "is in an empty file",
    "too many bytes": "is larger than the limit for one document",
    "unreadable": "cannot be read",
    "too many marks": "is made of combining marks (accents without letters)",
    "carriage returns": "is in a file with unsupported line ends",
    "repeated header": "repeats the header of the table",
    "empty": "has no text",
    "too short": "is shorter than the limit",
    "too long": "is longer than the limit",
    "duplicate": "has the same text as another document",
    "near duplicate": "has almost the same text as another document",
    "in the data set already": "was in the data set before",
    "removed earlier": "was taken down before",
    "removed": "was removed on request",
}
_OF_FILTERS = {
    "decontamination": ((r"(.+)", "contains text of the evaluation set {0}"),),
    "language": ((r"uncertain", "has no clear language"), (r"(.+)", "is in another language ({0})")),
    "metadata": ((r"not (.+)", "does not meet the condition {0}"), (r"no (.+)", "has no value for {0}")),
    "url_blocklist": ((r"domain", "comes from a blocked website"), (r"url", "has a blocked address")),
    "datatrove": (
        (r"empty", "has no text"),
        (r"dropped", "was rejected without a reason"),
        (r"lorem_ipsum", "contains placeholder text (lorem ipsum)"),
        (r"curly_bracket", "contains program code (curly brackets)"),
        (r"too_few_sentences", "has too few sentences"),
        (r"< (\d+) paragraphs", "has fewer than {0} long paragraphs"),
        (r"line_punct_ratio", "has too few lines that end like sentences"),
        (r"short_line_ratio", "has too many short lines"),
        (r"char_dup_ratio|dup_line_char_frac", "has too much text in repeated lines"),
        (r"list_ratio", "is mostly a list"),
        (r"gopher_short_doc", "has too few words"),
        (r"gopher_long_doc", "has too many words"),
        (r"gopher_below_avg_threshold", "has too short words on average"),
        (r"gopher_above_avg_threshold", "has too long words on average"),
        (r"gopher_too_many_hashes", "has too many hash signs"),
        (r"gopher_too_many_ellipsis", "has too many ellipses (...)"),
        (r"gopher_too_many_bullets", "has too many lines that begin with a bullet"),
        (r"gopher_too_many_end_ellipsis", "has too many lines that end with an ellipsis (...)"),
        (r"gopher_below_alpha_threshold", "has too few words with letters"),
        (r"gopher_enough_stop_words", "has too few common words (such as the, and)"),
        (r"dup_para_frac", "has too many repeated paragraphs"),
        (r"dup_para_char_frac", "has too much text in repeated paragraphs"),
        (r"dup_line_frac", "has too many repeated lines"),
        (r"top_(\d+)_gram", "repeats one phrase of {0} words too often"),
        (r"duplicated_(\d+)_n_grams", "has too much text in repeated phrases of {0} words"),
    ),
}
"""Of filters by name, and of datatrove's: patterns of their reasons, and what each means, after "the document ..."."""
_EARLIER_REASON = re.compile(rf"filter ({'|'.join(_OF_FILTERS)}|datatrove:\w+): (.*)", re.DOTALL)


def plain_reason(drop: Drop) -> str:
    """Return why a document was left out in words that follow "the document"; reasons of a user's own are quoted."""
    name, reason = name_of_filter(drop.step), drop.reason
    if drop.step == EARLIER_FILTERING and (found := _EARLIER_REASON.fullmatch(reason)):
        name, reason = found[1], found[2]
    if name is None and reason in _REASONS:
        return _REASONS[reason]
    if name is not None and reason == UNUSABLE:
        return "has values that the filter cannot judge"
    # The module of a user's own filter, as in `language:check`, may have the name of a built-in filter.
    known = "datatrove" if name is not None and name.startswith("datatrove:") else name or ""
    for pattern, meaning in _OF_FILTERS.get(known, ()):
        if found := re.fullmatch(pattern, reason, re.DOTALL):
            return meaning.format(*found.groups())
    return f'was dropped as "{reason}"'


def plain_step(step: StepRecord) -> str:
    """Return what a step does, with the sources that pass it where others do not."""
    place, name = place_of_filter(step.name), name_of_filter(step.name)
    what = _STEPS.get(step.name, step.name) if place is None else f"filter {place}: {name}"
    return f"{what} (of {listed(step.sources)})" if step.sources else what


class TrainingUse(NamedTuple):
    """How training mixes the sources.

    Attributes:
        shares: of each source in the training samples.
        repetitions: how often a run of `run_tokens` reads each document of a source.
        run_tokens: of a run that uses the budgets of the sources, or, with weights, as many as there are.
    """

    shares: list[float]
    repetitions: list[float]
    run_tokens: float


def training_use(manifest: Manifest) -> TrainingUse:
    """Return the use of each source by a run with this data set alone, as `trainer` mixes them, without padding.

    Where shards hold several sources, a source has the same part of valid as of the data set.
    """
    sources, train_tokens = manifest.sources, manifest.train.tokens
    train_part = train_tokens / max(train_tokens + manifest.valid.tokens, 1)
    tokens = [train_part * source.tokens for source in sources]
    if manifest.has_source_budgets:
        of_source = Counter[str | None]()
        for shard in manifest.train.shards:
            of_source[shard.source] += shard.tokens
        tokens = [float(of_source[source.name]) for source in sources]
    uses = []
    for source, own in zip(sources, tokens, strict=True):
        budget = own_budget(source.max_tokens, source.epochs, own)
        uses.append((source.weight or (own if budget is None else budget)) if own else 0.0)
    total = sum(uses) or 1.0
    run_tokens = sum(tokens if any(source.weight for source in sources) else uses)
    shares = [use / total for use in uses]
    repetitions = [run_tokens * share / own if own else 0.0 for share, own in zip(shares, tokens, strict=True)]
    return TrainingUse(shares, repetitions, run_tokens)


def headline(manifest: Manifest) -> Iterator[str]:
    """Yield what a reader must know first, a sentence each."""
    came_in, kept = manifest.steps[0].documents_in, manifest.train.documents + manifest.valid.documents
    tokens = manifest.train.tokens + manifest.valid.tokens
    yield f"{_documents(came_in)} came in; {_part(kept, came_in)} are in the data set now, with {tokens:,} tokens."
    drops = _drops(manifest)
    if left_out := drops.total():
        yield f"{_part(left_out, came_in)} {_were(left_out)} left out, because the document {_most(_by_words(drops))}."
    else:
        yield "No document was left out."
    if manifest.removals:
        removed = sum(removal.documents for removal in manifest.removals)
        of = counted(len(manifest.removals), "request")
        yield f"{_documents(removed)} {_were(removed)} removed afterwards, by {of}."
    else:
        yield "Nothing was removed afterwards."
    unlicensed = [source.name for source in manifest.sources if source.documents and not source.license]
    if unlicensed:
        yield (
            f"The license of {listed(unlicensed)} is not stated. Find it out before you share this data or a model "
            "trained on it."
        )


def source_overview(manifest: Manifest) -> Table:
    """Return a row for each source: what came in, what was kept, why the rest was not, and its use in training."""
    use, rows = training_use(manifest), []
    for source, share, repetitions in zip(manifest.sources, use.shares, use.repetitions, strict=True):
        drops = Counter(source.drops)
        came_in, removed = source.documents + drops.total(), drops.pop(Drop(REMOVAL, "removed"), 0)
        rows.append(
            (
                source.name,
                f"{came_in:,}",
                f"{source.documents:,}",
                _percent(source.documents, came_in) if came_in else "-",
                f"{drops.total():,}",
                _most(_by_words(drops)) or "-",
                f"{removed:,}",
                f"{source.tokens:,}",
                _percent(share, 1.0) if share else "-",
                f"{repetitions:,.2f}" if share else "-",
                source.license or NOT_STATED,
            )
        )
    texts = {"source", _WHY, "license"}
    names = ("source", "came in", "kept", "kept in %", "left out", _WHY, "removed", "tokens")
    columns = (*names, "share of training", "repetitions", "license")
    return Table(
        "What came in and what was kept, by source",
        tuple(Column(name, name not in texts) for name in columns),
        tuple(rows),
        "came in, kept, left out and removed count documents; share of training and repetitions (how often each "
        f"document is read) hold for a run of {use.run_tokens:,.0f} tokens with this data set alone",
    )


def reason_overview(manifest: Manifest) -> Table:
    """Return the steps from 1 with what each left out, and why."""
    rows, steps = [], manifest.steps
    for number, step in enumerate(steps, 1):
        words = _by_words(Counter({Drop(step.name, reason): count for reason, count in step.dropped.items()}))
        rows.append(
            (
                str(number),
                plain_step(step),
                f"{step.documents_in:,}",
                f"{sum(step.dropped.values()):,}",
                f"{step.documents_out:,}",
                _listed(words.most_common()) or "-",
            )
        )
    columns = (Column("#"), Column("step", False), *map(Column, ("came in", "left out", "continued")))
    return Table(
        "Why documents were left out, step by step",
        (*columns, Column(_WHY, False)),
        tuple(rows),
        "only the documents of the named sources pass a step that names some" if any(s.sources for s in steps) else "",
    )


def removal_overview(manifest: Manifest) -> Table | None:
    """Return the removals; None if there are none."""
    if not manifest.removals:
        return None
    rows = tuple(
        (str(each.version), _removed(each), f"{each.documents:,}", f"{each.tokens:,}", each.note or "-")
        for each in manifest.removals
    )
    columns = (Column("since version"), Column("what", False), *map(Column, ("documents", "tokens")))
    return Table("What was removed on request", (*columns, Column("note", False)), rows)


def _removed(removal: RemovalRecord) -> str:
    return f"the source {removal.source}" if removal.source is not None else f"documents named by {removal.kind}"


def _drops(manifest: Manifest) -> Counter[Drop]:
    """Return what preparation left out, without the removals that followed."""
    found: Counter[Drop] = Counter()
    for source in manifest.sources:
        found.update(source.drops)
    return Counter({drop: count for drop, count in found.items() if drop.step != REMOVAL})


def _by_words(drops: Counter[Drop]) -> Counter[str]:
    found: Counter[str] = Counter()
    for drop, count in sorted(drops.items()):
        found[plain_reason(drop)] += count
    return found


def _most(words: Counter[str]) -> str:
    found = words.most_common()
    if len(found) > _MOST_REASONS + 1:
        others = [count for _, count in found[_MOST_REASONS:]]
        found[_MOST_REASONS:] = [(f"was left out for one of {len(others):,} other reasons", sum(others))]
    return _listed(found)


def _listed(words: Sequence[tuple[str, int]]) -> str:
    return "; ".join(f"{why} ({count:,})" for why, count in words)


def _documents(number: int) -> str:
    return counted(number, "document")


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _part(number: int, of: int) -> str:
    return f"{number:,} ({_percent(number, of)})" if of else f"{number:,}"


def _percent(number: float, of: float) -> str:
    """Return a part in percent; a part that is neither all nor nothing does not look so."""
    rounded = f"{number / of:.1%}"
    if rounded == "100.0%" and number < of:
        return "over 99.9%"
    return "under 0.1%" if rounded == "0.0%" and number else rounded
