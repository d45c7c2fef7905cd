"""Sample sequences for the parity gate of an export, as both sides take them: packed rows and padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, PAD_TOKEN_ID, SpecialTokens
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.data.batch import Batch

SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "In 1905 he published four papers, of which the third is the shortest.",
    "cafe\u0301 and caf\u00e9, na\u00efve and nai\u0308ve",
    "one\ttab,  two spaces and a\nnew line",
    "Москва — столица России. 東京は日本の首都です。",
    "e = mc^2, 100% of (x_i + y_i); https://example.org/a?b=c",
    "x",
)
MASK_TEXTS = (
    ("The capital of France is", "."),
    ("", " is the capital of France."),
    ("He said (", "), then left the room."),
)
"""Text before and after a mask: before punctuation, at the start, within brackets."""


@dataclass(frozen=True)
class Encoded:
    """One sequence with its special tokens."""

    input_ids: list[int]
    token_type_ids: list[int]


def sample_sequences(tokenizer: Tokenizer, max_length: int, pairs: bool) -> list[Encoded]:
    """The sample texts as the model sees them, a token of each masked; with `pairs`, sentence pairs too.

    The last text is all of them, again and again: a sequence of `max_length` tokens, further than a local layer sees.
    """
    ids = [tokenizer.encode_text(text).tolist() for text in SAMPLE_TEXTS]
    together = [token for text_ids in ids for token in text_ids]
    ids.append((together * max_length)[: max_length - 2])
    special = tokenizer.special_tokens
    sequences = []
    for number, text_ids in enumerate(ids):
        is_short = number % 2 == 1 and number < len(SAMPLE_TEXTS)  # so that some share a row
        length = max(3, max_length // 3) if is_short else max_length
        text_ids = text_ids[: length - 2]
        text_ids[number % len(text_ids)] = special.mask
        sequences.append(Encoded([special.cls, *text_ids, special.sep], [0] * (len(text_ids) + 2)))
    if pairs:
        half = (max_length - 3) // 2
        sequences += [
            encode_pair(first[:half], second[:half], special)
            for first, second in zip(ids[:-1], ids[1:-1], strict=False)
        ]
    return sequences


def encode_pair(
    first: Sequence[int], second: Sequence[int], special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS
) -> Encoded:
    """[CLS] first [SEP] second [SEP], with segment 1 from the second text on."""
    return Encoded(
        [special_tokens.cls, *first, special_tokens.sep, *second, special_tokens.sep],
        [0] * (len(first) + 2) + [1] * (len(second) + 1),
    )


def pad_rows(sequences: Sequence[Encoded], pad_token_id: int = PAD_TOKEN_ID) -> dict[str, torch.Tensor]:
    """One sequence a row, padded to the longest: `input_ids`, `token_type_ids`, `attention_mask`."""
    shape = (len(sequences), max(len(sequence.input_ids) for sequence in sequences))
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    inputs["input_ids"].fill_(pad_token_id)
    for row, sequence in enumerate(sequences):
        length = len(sequence.input_ids)
        inputs["input_ids"][row, :length] = torch.tensor(sequence.input_ids)
        inputs["token_type_ids"][row, :length] = torch.tensor(sequence.token_type_ids)
        inputs["attention_mask"][row, :length] = 1
    return inputs


def pack_rows(sequences: Sequence[Encoded], sequence_length: int, pad_token_id: int = PAD_TOKEN_ID) -> Batch:
    """A batch that predicts every place of every sequence, in order, and pools every first place."""
    packed = _Packed(sequence_length, pad_token_id)
    for sequence in sequences:
        packed.add(sequence)
    packed.close_row()
    lengths = torch.tensor(packed.boundaries).diff().tolist()
    input_ids = torch.tensor(packed.input_ids)
    masked_positions = torch.cat(
        [torch.arange(start, start + len(s.input_ids)) for start, s in zip(packed.starts, sequences, strict=True)]
    )
    return Batch(
        input_ids=input_ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        token_type_ids=torch.tensor(packed.token_type_ids),
        cu_seqlens=torch.tensor(packed.boundaries, dtype=torch.int32),
        masked_positions=masked_positions,
        labels=input_ids[masked_positions],
        cls_positions=torch.tensor(packed.starts),
        next_sentence_labels=torch.zeros(len(sequences), dtype=torch.int64),
        sequence_length=sequence_length,
        pad_token_id=pad_token_id,
    )


@dataclass
class _Packed:
    """Rows being filled, first come first placed."""

    sequence_length: int
    pad_token_id: int
    input_ids: list[int] = field(default_factory=list)
    token_type_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=lambda: [0])

    def add(self, sequence: Encoded) -> None:
        if len(sequence.input_ids) > self._room():
            self.close_row()
        self.starts.append(len(self.input_ids))
        self._append(sequence)

    def close_row(self) -> None:
        dead = self._room() % self.sequence_length
        if dead:
            self._append(Encoded([self.pad_token_id] * dead, [0] * dead))

    def _room(self) -> int:
        return self.sequence_length - len(self.input_ids) % self.sequence_length

    def _append(self, sequence: Encoded) -> None:
        self.input_ids += sequence.input_ids
        self.token_type_ids += sequence.token_type_ids
        self.boundaries.append(len(self.input_ids))
