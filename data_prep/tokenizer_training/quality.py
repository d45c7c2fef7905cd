"""Quality of a tokenizer on held-out text, by source and language, and its report as text.

Fertility is tokens per word (Rust et al. 2021, section 3.1). It means little in scripts without spaces, so the report
also has tokens per character.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np

from data_prep.documents.drops import Drop, by_step, by_summary
from data_prep.text.cleaning import normalize
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.special_tokens import UNK_TOKEN_ID
from data_prep.tokenizer.tokenizer_report import GroupReport, LeftOutCharacters, TokenizerReport
from data_prep.tokenizer_training.alphabet import Alphabet
from data_prep.tokenizer_training.sampling import CorpusCounts
from data_prep.tokenizer_training.training_sample import HeldOutDocument, TrainingSample

_LONGEST_PIECES = 12
_LEFT_OUT_IN_REPORT, _LEFT_OUT_IN_LINES = 100, 20
_EXAMPLE_CHARACTERS = 100
_EXAMPLES = 6


def measure(
    tokenizer: SentencePieceTokenizer,
    sample: TrainingSample,
    counts: CorpusCounts,
    held_out: Sequence[HeldOutDocument],
    alphabet: Alphabet,
) -> TokenizerReport:
    """Measure the tokenizer on the documents that `TrainingSample.set_aside` returned."""
    texts = [normalize(document.text, tokenizer.normalization) for document in held_out]
    tokens = tokenizer.encode_many(texts)
    is_byte = np.array([piece.kind == "byte" for piece in tokenizer.vocabulary])
    measured = [_measured(text, ids, is_byte) for text, ids in zip(texts, tokens, strict=True)]
    drops: dict[str, dict[Drop, int]] = {}
    for (source, *drop), count in sorted(counts.dropped.items()):
        drops.setdefault(source, {})[Drop(*drop)] = count

    def grouped(kind: str) -> dict[str, GroupReport]:
        corpus, chosen = counts.bytes_by(kind), sample.bytes_by(kind)
        names = [getattr(document, kind) for document in held_out]
        return {
            name: _total(
                [item for item, of in zip(measured, names, strict=True) if of == name],
                corpus_share=round(corpus[name] / max(1, corpus.total()), 6),
                sample_share=round(chosen[name] / max(1, chosen.total()), 6),
            )
            for name in sorted({*names, *corpus})
        }

    used = np.unique(np.concatenate(tokens)) if tokens else np.empty(0)
    longest = sorted((p.text for p in tokenizer.vocabulary if p.kind == "normal"), key=lambda text: (-len(text), text))
    return TokenizerReport(
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        sample_documents=sample.num_documents,
        sample_bytes=sample.num_bytes,
        corpus_documents=counts.documents.total(),
        corpus_bytes=counts.text_bytes.total(),
        is_before_filters=counts.is_before_filters,
        held_out_in_sample=sum(document.document_hash in sample.choice for document in held_out),
        pieces_used=round(len(used) / tokenizer.vocab_size, 4),
        left_out_characters=LeftOutCharacters(
            distinct=len(alphabet.left_out),
            share=round(alphabet.left_out_share, 8),
            commonest=dict(islice(alphabet.left_out.items(), _LEFT_OUT_IN_REPORT)),
        ),
        everything=_total(measured),
        sources=grouped("source"),
        languages=grouped("language"),
        longest_pieces=longest[:_LONGEST_PIECES],
        examples=[_example(tokenizer, text) for text in _some_of_each(held_out, texts)],
        dropped={source: by_summary(each) for source, each in drops.items()},
        dropped_by_step={source: by_step(each) for source, each in drops.items()},
    )


def report_lines(report: TokenizerReport) -> Iterator[str]:
    """Yield the report as lines."""
    everything = report.everything
    inside = "held out of the training sample"
    if report.held_out_in_sample:
        inside = f"{report.held_out_in_sample:,} also in the training sample (too few documents to hold any out)"
    yield f"fingerprint         {report.fingerprint}"
    yield f"vocabulary          {report.vocab_size:,} tokens, {report.pieces_used:.1%} used in the measured documents"
    yield (
        f"trained on          {report.sample_documents:,} documents, {report.sample_bytes / 1e6:.2f} MB, of "
        f"{report.corpus_documents:,} documents, {report.corpus_bytes / 1e6:.2f} MB"
        f"{', before filters' if report.is_before_filters else ''}"
    )
    yield f"measured on         {everything.documents:,} documents, {everything.text_bytes / 1e6:.2f} MB, {inside}"
    if report.left_out_characters is not None:
        yield f"without a token     {_left_out(report.left_out_characters)}"
    yield ""
    yield (
        f"{'':<24}{'bytes/':>8}{'tokens/':>9}{'tokens/':>11}{'unknown':>10}{'single':>10}{'share of':>12}{'in the':>9}"
    )
    yield f"{'':<24}{'token':>8}{'word':>9}{'character':>11}{'':>10}{'bytes':>10}{'the corpus':>12}{'sample':>9}"
    yield _row("everything", everything)
    if len(report.sources) > 1:
        yield from ("", "by source", *(_row(f"  {name}", group) for name, group in report.sources.items()))
    if len(report.languages) > 1:
        yield from ("", "by language", *(_row(f"  {name}", group) for name, group in report.languages.items()))
    yield ""
    yield f"longest tokens      {'  '.join(report.longest_pieces)}"
    for source, reasons in report.dropped.items():
        left_out: list[tuple[Drop | str, int]] = [*reasons.items()]
        if report.dropped_by_step is not None:
            steps = report.dropped_by_step[source].items()
            left_out = [(Drop(step, reason), count) for step, of_step in steps for reason, count in of_step.items()]
        judged = " (of what the sample needs)" if report.is_before_filters else ""
        yield f"left out of {source}{judged}: " + ", ".join(f"{count:,} {why}" for why, count in left_out)
    yield ""
    for pieces in report.examples:
        yield f"  {' '.join(pieces)}"


FEW_OCCURRENCES = 20
"""Mean occurrences of a token in the training sample, below which `size_warning` warns.

Gowda and May 2020 (arXiv 2004.02334, section 5) recommend the largest vocabulary of which 95% of the tokens have at
least 100 examples in training; the mean lies above that of the rare ones by far.
"""
_FEWEST_TOKENS = 5 + 256 + 95  # special tokens, bytes and printable ASCII, which a vocabulary has before all others


def size_warning(report: TokenizerReport) -> str | None:
    """Warn of a vocabulary that is far too large for the text that it was learned from."""
    if not report.everything.tokens:
        return None
    tokens = report.sample_bytes / report.everything.bytes_per_token
    mean, most = tokens / report.vocab_size, int(tokens / FEW_OCCURRENCES)
    if mean >= FEW_OCCURRENCES:
        return None
    is_part = report.corpus_bytes > 2 * report.sample_bytes  # the rest is left out by tokenizer.sample_bytes
    where, fix = ("sample", "raise tokenizer.sample_bytes") if is_part else ("text", "give more text")
    smaller = f", or a vocabulary of at most {most:,} tokens" if most > _FEWEST_TOKENS else ""
    return (
        f"warning: a vocabulary of {report.vocab_size:,} tokens is far too large for this {where}: a token occurs "
        f"{mean:.1f} times in it on average, and a model learns little of tokens that are rare. Fix: {fix}{smaller}"
    )


def _measured(text: str, ids: np.ndarray, is_byte: np.ndarray) -> GroupReport:
    words = text.count(" ")
    return GroupReport(
        documents=1,
        text_bytes=len(text.encode()),
        characters=len(text) - words,
        words=words,
        tokens=len(ids),
        byte_tokens=int(is_byte[ids].sum()),
        unknown_tokens=int((ids == UNK_TOKEN_ID).sum()),
    )


def _total(
    measured: Sequence[GroupReport], corpus_share: float | None = None, sample_share: float | None = None
) -> GroupReport:
    names = [name for name in GroupReport.model_fields if not name.endswith("_share")]
    sums = {name: sum(getattr(item, name) for item in measured) for name in names}
    return GroupReport(**sums, corpus_share=corpus_share, sample_share=sample_share)


def _row(name: str, group: GroupReport) -> str:
    shares = (group.corpus_share, group.sample_share)
    formatted = [f"{share:.2%}" if share is not None else "" for share in shares]
    figures = f"{'-':>8}{'-':>9}{'-':>11}{'-':>10}{'-':>10}"  # none of it was held out
    if group.tokens:
        figures = (
            f"{group.bytes_per_token:>8.2f}{group.tokens_per_word:>9.3f}{group.tokens_per_character:>11.3f}"
            f"{group.unknown_tokens / group.tokens:>10.4%}{group.byte_tokens / group.tokens:>10.4%}"
        )
    return f"{name:<24}{figures}{formatted[0]:>12}{formatted[1]:>9}".rstrip()


def _left_out(characters: LeftOutCharacters) -> str:
    """Describe the characters without a token: their number, and the commonest with counts."""
    if not characters.distinct:
        return "no character of the training sample"
    commonest = islice(characters.commonest.items(), _LEFT_OUT_IN_LINES)
    listed = ", ".join(f"{_visible(character)} {count:,}" for character, count in commonest)
    more = ", ..." if characters.distinct > _LEFT_OUT_IN_LINES else ""
    return f"{characters.distinct:,} characters, {characters.share:.4%} of the training sample: {listed}{more}"


def _visible(character: str) -> str:
    """Return the character, or its code point if it is invisible or a combining character."""
    shows = character.isprintable() and not unicodedata.category(character).startswith("M")
    return character if shows else f"U+{ord(character):04X}"


def _some_of_each(held_out: Sequence[HeldOutDocument], texts: Sequence[str]) -> list[str]:
    """Choose texts of all sources and languages in turn, at most `_EXAMPLES`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for document, text in zip(held_out, texts, strict=True):
        groups.setdefault((document.source, document.language), []).append(text)
    in_turn = [text for texts_in_turn in zip_longest(*groups.values()) for text in texts_in_turn if text is not None]
    return in_turn[:_EXAMPLES]


def _example(tokenizer: SentencePieceTokenizer, text: str) -> list[str]:
    return [tokenizer.vocabulary[number].text for number in tokenizer.encode(text[:_EXAMPLE_CHARACTERS]).tolist()]
