"""Settings, inputs and fingerprint of a tokenizer: tokenizer_info.json, the marker of a complete folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from data_prep.base.errors import UserError
from data_prep.base.settings import Settings
from data_prep.base.validation import FileName, Sha256, first_problem
from data_prep.storage import storage
from data_prep.text.cleaning import METASPACE, Normalization, normalize
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SPECIAL_TOKENS, SpecialTokens

INFO_NAME = "tokenizer_info.json"
REPORT_NAME = "tokenizer_report.json"
FORMAT_VERSION = 2
"""Format 1 states no version of the normalization, which was then 1."""
MIN_VOCAB_SIZE = 6  # five special tokens and one of text

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class TokenizerSettings(Settings):
    """Settings of tokenizer training."""

    vocab_size: PositiveInt = Field(30_522, description="number of ids, 5 special tokens and 256 bytes among them")
    character_coverage: Annotated[float, Field(ge=0.98, le=1.0)] = Field(
        0.9995,
        description="share of the sample's characters with an id of their own, at least 0.98; the space and printable "
        "ASCII always have one",
    )
    byte_fallback: bool = Field(
        True,
        description="characters without an id become their bytes; false: they become [UNK], and their text is lost",
    )
    user_symbols: tuple[str, ...] = Field(
        (), description="texts that are always one token, also within words, such as ['<sep>', '@user']"
    )
    sample_bytes: PositiveInt = Field(100_000_000, description="bytes of the training sample; bounds the memory")
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = Field(0, description="seed of the sample of documents")
    sampling_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        1.0,
        description="exponent of the shares of sources (or languages) in the sample: 1 keeps their shares of the "
        "text, 0 makes them equal",
    )
    sampling_by: Literal["source", "language"] = Field("source", description="unit whose shares sampling_alpha changes")
    normalization: Normalization = Field(Normalization(), description="normalization of text before encoding")

    @model_validator(mode="after")
    def _user_symbols_can_be_met(self) -> TokenizerSettings:
        for number, symbol in enumerate(self.user_symbols):
            reason = self._why_impossible(symbol)
            if symbol in self.user_symbols[:number]:
                reason = "is listed twice"
            if reason is not None:
                raise ValueError(f"user symbol {symbol!r} {reason}; change it, or remove it from user_symbols")
        return self

    def _why_impossible(self, symbol: str) -> str | None:
        if not symbol:
            return "is empty"
        if symbol in SPECIAL_TOKENS:
            return "is already a special token"
        if _BYTE_PIECE.fullmatch(symbol):
            return "is the name of a byte token"
        if any(character.isspace() or character == METASPACE for character in symbol):
            return "contains white space or U+2581, which separate words"
        normalized = normalize(symbol, self.normalization)
        if normalized != f" {symbol}":
            return f"does not occur in normalized text, which has {normalized[1:]!r} instead"
        if normalize(f"a{symbol}", self.normalization) != f" a{symbol}":
            return "begins with a combining mark, which joins the letter before it"
        return None


class TokenizerInfo(BaseModel):
    """What made a tokenizer, and the fingerprint of what it does; tokenizer_info.json.

    Settings and inputs of a foreign tokenizer, which came as tokenizer.json, are not known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1, 2]
    fingerprint: Sha256
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, lt=1 << 32)]
    settings: TokenizerSettings | None
    inputs: dict[str, Any] = Field(description="the caller's description of the training texts")
    libraries: dict[str, str] = Field(description="versions of the libraries that trained it")
    files: dict[FileName, Sha256] = Field({}, description="sha256 of the other files of a foreign one by name")
    kind: Literal["sentencepiece", "hugging_face"] = "sentencepiece"
    special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS

    @model_validator(mode="before")
    @classmethod
    def _read_format_1(cls, values: Any) -> Any:
        settings = values.get("settings") if isinstance(values, dict) and values.get("format_version") == 1 else None
        if isinstance(settings, dict) and isinstance(normalization := settings.get("normalization"), dict):
            return {**values, "settings": {**settings, "normalization": {"version": 1, **normalization}}}
        return values

    @model_validator(mode="after")
    def _of_its_kind(self) -> TokenizerInfo:
        if self.kind == "sentencepiece" and (self.settings is None or self.special_tokens != OWN_SPECIAL_TOKENS):
            raise ValueError("a tokenizer made here has settings, and its special tokens are ids 0 to 4")
        return self

    @classmethod
    def read(cls, folder: str | Path) -> TokenizerInfo | None:
        """Read the folder's marker; None where there is none, so that there is no complete tokenizer.

        Raises:
            UserError: the file is damaged or of another format version.
        """
        url = storage.join(folder, INFO_NAME)
        if not storage.exists(url):
            return None
        path = storage.redact(url)
        try:
            values = json.loads(storage.read_bytes(url))
            version = values.get("format_version") if isinstance(values, dict) else None
            if version not in range(1, FORMAT_VERSION + 1):
                raise UserError(
                    f"{path} has format version {version!r}; this release reads 1 to {FORMAT_VERSION}",
                    fix="use the release that wrote it, or train the tokenizer again",
                    code="unsupported-format-version",
                )
            return cls.model_validate(values)
        except (ValidationError, ValueError, RecursionError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise UserError(
                f"{path} is damaged ({reason})",
                fix="copy it again, or train the tokenizer again",
                code="damaged-tokenizer",
            ) from None

    def write(self, folder: str | Path) -> None:
        """Write the marker, the last act of a training."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True)
        storage.write_bytes(storage.join(folder, INFO_NAME), (text + "\n").encode())

    def differences(self, settings: TokenizerSettings, inputs: dict[str, Any]) -> Iterator[str]:
        """Name what differs from the settings and inputs of a tokenizer that is wanted now.

        A version of the normalization that was not requested does not count as a difference.
        """
        known = self.settings and self.settings.model_dump(mode="json")
        if self.settings is not None and "version" not in settings.normalization.model_fields_set:
            version = {"version": self.settings.normalization.version}
            normalization = settings.normalization.model_copy(update=version)
            settings = settings.model_copy(update={"normalization": normalization})
        theirs = {"tokenizer": known, **_by_url(self.inputs)}
        mine = {"tokenizer": settings.model_dump(mode="json"), **_by_url(inputs)}
        return _differences(theirs, mine, "")


def _by_url(inputs: dict[str, Any]) -> dict[str, Any]:
    files = {file["url"]: {**file, "url": None} for file in inputs.get("files", [])}
    return {**inputs, "files": files}


def _differences(theirs: Any, mine: Any, where: str) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted({*theirs, *mine}):
            if where == "files" and not (name in theirs and name in mine):
                yield f"input {name} is {'new' if name in mine else 'gone'}"
            else:
                yield from _differences(theirs.get(name), mine.get(name), f"{where}.{name}".lstrip("."))
    elif theirs != mine:
        yield f"{where} was {json.dumps(theirs, ensure_ascii=False)} and is now {json.dumps(mine, ensure_ascii=False)}"
