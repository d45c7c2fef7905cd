"""Report on a tokenizer, tokenizer_report.json: quality on held-out text, by source and language."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer_info import REPORT_NAME as REPORT_NAME


class GroupReport(BaseModel):
    """Measurements of a source or a language; the counts are those of its held-out text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: int
    text_bytes: int
    characters: int = Field(description="without spaces")
    words: int = Field(description="what stands between spaces")
    tokens: int
    byte_tokens: int = Field(description="tokens that are a byte of a character outside the vocabulary")
    unknown_tokens: int
    corpus_share: float | None = Field(None, description="share of the text of the whole corpus, in bytes")
    sample_share: float | None = Field(None, description="share of the text that was learned from")

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens)

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(1, self.words)

    @property
    def tokens_per_character(self) -> float:
        return self.tokens / max(1, self.characters)


class LeftOutCharacters(BaseModel):
    """Characters of the training sample without a token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distinct: int
    share: float = Field(description="share of all characters of the text, a space counted as one")
    commonest: dict[str, int] = Field(description="how often they are in the text, at most 100 of them")


class TokenizerReport(BaseModel):
    """The report of a tokenizer; tokenizer_report.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    vocab_size: int
    sample_documents: int
    sample_bytes: int
    corpus_documents: int
    corpus_bytes: int
    is_before_filters: bool = Field(
        False, description="filters judged the documents of the sample alone; the corpus and its shares are before them"
    )
    held_out_in_sample: int = Field(description="documents measured on that were also learned from, for want of others")
    pieces_used: float = Field(description="share of the vocabulary that the held-out text uses")
    left_out_characters: LeftOutCharacters | None = Field(None, description="null in reports of earlier releases")
    everything: GroupReport
    sources: dict[str, GroupReport]
    languages: dict[str, GroupReport]
    longest_pieces: list[str]
    examples: list[list[str]] = Field(description="the pieces of some beginnings of documents")
    dropped: dict[str, dict[str, int]] = Field(description="documents or files left out, by source and reason")
    dropped_by_step: dict[str, dict[str, dict[str, int]]] | None = Field(
        None, description="the same by source, step and reason; null in reports of earlier releases"
    )


def write_report(report: TokenizerReport, folder: str | Path) -> None:
    """Write tokenizer_report.json."""
    text = json.dumps(report.model_dump(mode="json"), indent=1, ensure_ascii=False)
    storage.write_bytes(storage.join(folder, REPORT_NAME), (text + "\n").encode())


def read_report(folder: str | Path) -> TokenizerReport | None:
    """Read tokenizer_report.json; None where there is none, as in tokenizers of earlier releases.

    Raises:
        UserError: it is damaged.
    """
    url = storage.join(folder, REPORT_NAME)
    if not storage.exists(url):
        return None
    try:
        return TokenizerReport.model_validate_json(storage.read_bytes(url))
    except ValidationError as error:
        raise UserError(
            f"{storage.redact(url)} is damaged ({first_problem(error)})", fix="copy it again", code="damaged-tokenizer"
        ) from None
