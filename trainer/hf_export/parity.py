"""The parity gate of an export: it compares the folder, as transformers loads it, with our model and tokenizer.

The gate compares the logits at every position of sample sequences, which are packed into rows here and padded for
transformers, and the ids of `AutoTokenizer` for raw text with those of preparation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from data_prep.base.errors import UserError
from data_prep.text.cleaning import normalize, replace_surrogates
from data_prep.tokenizer.adversarial_lines import ADVERSARIAL_LINES
from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, PAD_TOKEN_ID, SpecialTokens
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.objective_settings import SENTENCE_PAIRS
from trainer.data.batch import Batch
from trainer.model.quiet_transformers import quiet_transformers
from trainer.objectives.pretraining import PretrainingModel

LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit. float32 rounds by 6e-8 in each operation, the two sides
sum in different orders, and 24 layers add up to about 1e-6; a wrong weight makes a difference of 1e-2 or more."""

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
"""Text before and after a mask."""


@dataclass(frozen=True)
class ParityReport:
    """Counts of what was compared, and the largest difference."""

    num_texts: int
    num_sequences: int
    num_logits: int
    max_logit_difference: float
    max_logit: float

    def __str__(self) -> str:
        return (
            f"{self.num_texts} texts, pairs and masked texts tokenized alike; {self.num_logits:,} logits of "
            f"{self.num_sequences} sequences: largest difference {self.max_logit_difference:.2e} at logits "
            f"up to {self.max_logit:.1f} (allowed {LOGIT_TOLERANCE * self.max_logit:.2e})"
        )


def check_export(folder: Path, model: PretrainingModel, tokenizer: Tokenizer) -> ParityReport:
    """Compare the Hugging Face files in `folder` with `model` (fp32, CPU) and `tokenizer`.

    Raises:
        UserError: they differ, or transformers does not find the weights it expects.
    """
    with quiet_transformers():  # the checks here replace its warnings
        num_texts = check_token_ids(folder, tokenizer)
        reference = load_reference(folder)
    window = model.config.local_attention or 0
    longest = min(model.config.max_position_embeddings, max(64, window + 32))  # longer than a local layer attends
    sequences = sample_sequences(tokenizer, longest, SENTENCE_PAIRS in model.objectives)
    difference, largest, num_logits = compare_logits(model, reference, sequences, tokenizer.special_tokens.pad)
    if not difference <= LOGIT_TOLERANCE * largest:
        raise UserError(
            f"the exported model's logits differ from the trained model's by {difference:.3g} "
            f"(largest logit {largest:.3g}, allowed {LOGIT_TOLERANCE} of it); nothing was exported",
            fix=f"report this as a bug of clozeworks, with the version of transformers ({transformers.__version__})",
            code="export-differs",
        )
    return ParityReport(num_texts, len(sequences), num_logits, difference, largest)


def check_token_ids(folder: Path, tokenizer: Tokenizer) -> int:
    """Compare the ids of `AutoTokenizer` for raw text, pairs and masks with those of preparation; return their number.

    Raises:
        UserError: a text is encoded differently.
    """
    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    count = 0
    for text, expected, actual in _token_id_cases(loaded, tokenizer):
        if actual != expected:
            raise UserError(
                f"transformers {transformers.__version__} with tokenizers {tokenizers.__version__} gives "
                f"other ids than preparation for {text!r}: {actual[:20]} instead of {expected[:20]}; "
                "nothing was exported",
                fix="install the versions of constraints.txt",
                code="export-differs",
            )
        count += 1
    return count


def _token_id_cases(loaded: Any, tokenizer: Tokenizer) -> Iterator[tuple[str, Any, Any]]:
    def prepared(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_text(text).tolist()
        return ids

    raw = [replace_surrogates(text) for text in (*SAMPLE_TEXTS, *ADVERSARIAL_LINES)]
    for text in (text for text in raw if not _has_special_token(text, tokenizer)):
        yield text, prepared(text), loaded(text, add_special_tokens=False)["input_ids"]
    for first, second in zip(SAMPLE_TEXTS, SAMPLE_TEXTS[1:], strict=False):
        pair = loaded(first, second, return_token_type_ids=True)
        is_like_rows = tokenizer.pair_separators == 1  # else the model was trained on no pairs (`check_pairs`)
        ends = [] if is_like_rows else [tokenizer.special_tokens.sep]
        expected = encode_pair(prepared(first), [*ends, *prepared(second)], tokenizer.special_tokens)
        yield f"{first} | {second}", expected.input_ids, pair["input_ids"]
        if is_like_rows and "token_type_ids" in loaded.model_input_names:
            yield f"{first} | {second}", expected.token_type_ids, pair["token_type_ids"]
    mask = tokenizer.vocabulary[tokenizer.special_tokens.mask].text
    for before, after in MASK_TEXTS:
        text = f"{before} {mask}{after}"
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        if isinstance(tokenizer, ForeignTokenizer):
            yield text, tokenizer.encode_marked(text), ids
            continue
        mask_index = ids.index(tokenizer.special_tokens.mask)
        # No space is added before the text that follows a mask; an existing one is kept.
        rest = normalize(after, tokenizer.normalization)[0 if after.startswith(" ") else 1 :]
        yield text, (prepared(before), rest), (ids[:mask_index], tokenizer.decode(ids[mask_index + 1 :]))


def _has_special_token(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text has a literal "[MASK]" or the like: the mask to transformers, and plain text to preparation."""
    return any(tokenizer.vocabulary[token_id].text in text for token_id in tokenizer.special_tokens.ids)


def load_reference(folder: Path) -> Any:
    """Load the exported model with transformers, in evaluation mode.

    Raises:
        UserError: weights are missing, left over or of another shape.
    """
    architecture = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    reference, info = architecture.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
    )
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise UserError(
            f"transformers {transformers.__version__} does not find the exported weights as it "
            f"expects them: {problems}; nothing was exported",
            fix="report this as a bug of clozeworks",
            code="export-differs",
        )
    return reference.eval()


@torch.no_grad()
def compare_logits(
    model: PretrainingModel, reference: Any, sequences: Sequence[EncodedSequence], pad_token_id: int = PAD_TOKEN_ID
) -> tuple[float, float, int]:
    """Return largest difference, largest logit and number of logits, over all positions and the [CLS] of pairs."""
    packed = pack_rows(sequences, max(len(sequence.input_ids) for sequence in sequences), pad_token_id)
    model.eval()
    ours = model.predict(packed)
    inputs = pad_rows(sequences, pad_token_id)
    if model.config.type_vocab_size == 0:
        del inputs["token_type_ids"]
    theirs = reference(**inputs)
    mlm_logits = getattr(theirs, "prediction_logits", None)
    mlm_logits = theirs.logits if mlm_logits is None else mlm_logits
    compared = [(ours.mlm_logits, mlm_logits[inputs["attention_mask"].bool()])]
    if ours.pair_logits is not None:
        compared.append((ours.pair_logits, theirs.seq_relationship_logits))
    assert all(mine.shape == other.shape for mine, other in compared)
    # torch's max returns a NaN; Python's may skip it.
    differences = torch.stack([(mine - other).abs().max() for mine, other in compared])
    largest = max(other.abs().max().item() for _, other in compared)
    return differences.max().item(), largest, sum(mine.numel() for mine, _ in compared)


@dataclass(frozen=True)
class EncodedSequence:
    """A sequence with special tokens."""

    input_ids: list[int]
    token_type_ids: list[int]


def sample_sequences(tokenizer: Tokenizer, max_length: int, pairs: bool) -> list[EncodedSequence]:
    """Encode the sample texts, with one masked token in each; with `pairs` also sentence pairs.

    The last text repeats all others up to `max_length` tokens, which is longer than a local layer attends.
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
        sequences.append(EncodedSequence([special.cls, *text_ids, special.sep], [0] * (len(text_ids) + 2)))
    if pairs:
        half = (max_length - 3) // 2
        sequences += [
            encode_pair(first[:half], second[:half], special)
            for first, second in zip(ids[:-1], ids[1:-1], strict=False)
        ]
    return sequences


def encode_pair(
    first: Sequence[int], second: Sequence[int], special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS
) -> EncodedSequence:
    """Return [CLS] first [SEP] second [SEP]; segment 1 begins at the second text."""
    return EncodedSequence(
        [special_tokens.cls, *first, special_tokens.sep, *second, special_tokens.sep],
        [0] * (len(first) + 2) + [1] * (len(second) + 1),
    )


def pad_rows(sequences: Sequence[EncodedSequence], pad_token_id: int = PAD_TOKEN_ID) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `token_type_ids` and `attention_mask`, one sequence per row, padded to the longest."""

    def padded(rows: Iterable[list[int]], value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    return {
        "input_ids": padded((sequence.input_ids for sequence in sequences), pad_token_id),
        "token_type_ids": padded((sequence.token_type_ids for sequence in sequences), 0),
        "attention_mask": padded(([1] * len(sequence.input_ids) for sequence in sequences), 0),
    }


def pack_rows(sequences: Sequence[EncodedSequence], sequence_length: int, pad_token_id: int = PAD_TOKEN_ID) -> Batch:
    """Return a batch that predicts every position of every sequence, in order, and pools the first ones."""
    pieces: list[EncodedSequence] = []  # sequences, and the padding at the end of rows
    starts: list[int] = []
    used = 0

    def lay(piece: EncodedSequence) -> None:
        nonlocal used
        pieces.append(piece)
        used += len(piece.input_ids)

    def close_row() -> None:
        if padding := -used % sequence_length:
            lay(EncodedSequence([pad_token_id] * padding, [0] * padding))

    for sequence in sequences:
        if used % sequence_length + len(sequence.input_ids) > sequence_length:
            close_row()
        starts.append(used)
        lay(sequence)
    close_row()
    input_ids = np.array([token for piece in pieces for token in piece.input_ids])
    lengths = [len(sequence.input_ids) for sequence in sequences]
    masked_positions = np.concatenate([np.arange(length) for length in lengths]) + np.repeat(starts, lengths)
    return Batch.of_sequences(
        input_ids,
        np.cumsum([0, *(len(piece.input_ids) for piece in pieces)])[:-1],
        sequence_length,
        masked_positions,
        input_ids[masked_positions],
        token_type_ids=np.array([kind for piece in pieces for kind in piece.token_type_ids]),
        cls_positions=np.array(starts),
        next_sentence_labels=np.zeros(len(sequences), np.int64),
        pad_token_id=pad_token_id,
    )
