"""The special tokens: the first five ids of every vocabulary made here; a foreign vocabulary has its own."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_TOKEN_ID, UNK_TOKEN_ID, CLS_TOKEN_ID, SEP_TOKEN_ID, MASK_TOKEN_ID = range(5)
MAX_VOCAB_SIZE = 1 << 24  # arrays are made of this size; no tokenizer comes near it

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class SpecialTokens(BaseModel):
    """The ids of a vocabulary that stand for no text; tokenizer_info.json and the manifest hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pad: TokenId
    unk: TokenId | None
    """None: every text has ids of its own, as with bytes."""
    cls: TokenId
    sep: TokenId
    mask: TokenId
    others: tuple[TokenId, ...] = ()
    """Special to the tokenizer for what is not done here."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All these ids, ascending."""
        named = (self.pad, self.cls, self.sep, self.mask, *(() if self.unk is None else (self.unk,)))
        return tuple(sorted({*named, *self.others}))

    @property
    def never_in_text(self) -> tuple[int, ...]:
        """The ids to which no text is encoded: all but [UNK]."""
        return tuple(token_id for token_id in self.ids if token_id != self.unk)

    @cached_property
    def are_first(self) -> bool:
        """Whether these are the ids from 0 on, without a gap."""
        return self.ids == tuple(range(len(self.ids)))

    def are_ordinary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return which ids, of any shape, are not special; bool."""
        if self.are_first:
            return token_ids >= len(self.ids)
        return ~np.isin(token_ids, self.ids)

    def ordinary(self, vocab_size: int) -> np.ndarray:
        """(vocab_size - number of special tokens,) int64: the ids below `vocab_size` that are not special."""
        return np.setdiff1d(np.arange(vocab_size), self.ids)


OWN_SPECIAL_TOKENS = SpecialTokens(
    pad=PAD_TOKEN_ID, unk=UNK_TOKEN_ID, cls=CLS_TOKEN_ID, sep=SEP_TOKEN_ID, mask=MASK_TOKEN_ID
)
