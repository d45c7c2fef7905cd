"""What a tokenizer was made with, and its fingerprint: tokenizer_info.json, the marker of a complete folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from data_prep import storage
from data_prep.cleaning import Normalisation
from data_prep.errors import UserError
from data_prep.settings import Settings

INFO_NAME = "tokenizer_info.json"
FORMAT_VERSION = 1


class TokenizerSettings(Settings):
    """How a tokenizer is trained."""

    vocab_size: PositiveInt = Field(30_522, description="number of ids, 5 special tokens and 256 bytes among them")
    character_coverage: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.9995, description="share of the sample's characters with an id of their own; the others become bytes"
    )
    byte_fallback: Literal[True] = Field(True, description="always on: characters without an id become their bytes")
    sample_bytes: PositiveInt = Field(100_000_000, description="text to learn from, in bytes; bounds the memory")
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = Field(0, description="seed of the choice of documents")
    normalisation: Normalisation = Field(Normalisation(), description="what is done to text before encoding")


class TokenizerInfo(BaseModel):
    """What made a tokenizer, and the fingerprint of what it does; tokenizer_info.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    vocab_size: Annotated[int, Field(gt=5)]
    settings: TokenizerSettings
    inputs: dict[str, Any] = Field(description="what the caller says of the texts it was trained on")
    libraries: dict[str, str] = Field(description="versions of the libraries that trained it")

    @classmethod
    def read(cls, folder: str | Path) -> TokenizerInfo | None:
        """Read the folder's marker; None where there is none, so that there is no complete tokenizer.

        Raises:
            UserError: the file is damaged or of another format version.
        """
        path = Path(folder) / INFO_NAME
        if not path.is_file():
            return None
        try:
            values = json.loads(storage.read_bytes(path))
            version = values.get("format_version") if isinstance(values, dict) else None
            if version != FORMAT_VERSION:
                raise UserError(
                    f"{path} has format version {version!r} and this release reads {FORMAT_VERSION}; "
                    "use the release that wrote it, or train the tokenizer again"
                )
            return cls.model_validate(values)
        except (ValidationError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UserError(f"{path} is damaged ({reason}); train the tokenizer again, or copy it again") from None

    def write(self, folder: str | Path) -> None:
        """Write the marker, the last act of a training."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True)
        storage.write_bytes(Path(folder) / INFO_NAME, (text + "\n").encode())
