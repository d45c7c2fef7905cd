"""One text is masked as training masks a row of its length."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.base.errors import UsageError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from trainer.config.data_settings import DataSettings
from trainer.data.batch import IGNORED
from trainer.data.masker import mask_text, masking_of
from trainer.data.masking import mask_rows
from trainer.data.randomness import Purpose, root_key

TEXT = "the old river flows around the narrow valley " * 12
DATA = DataSettings(shards="none")


def test_a_text_is_the_row_that_training_would_mask(tokenizer: Tokenizer) -> None:
    masked = mask_text(TEXT, tokenizer, DATA, rate=0.15, seed=7)
    special = tokenizer.special_tokens
    row = np.array([[special.cls, *tokenizer.encode_text(TEXT), special.sep]], np.int64)
    masking = masking_of(DATA, tokenizer.vocab_size, special, None)
    expected = mask_rows(row, np.array([root_key(7, Purpose.MASKING)]), masking, 0.15)
    assert [token.input_id for token in masked.tokens] == expected.input_ids.tolist()
    assert [token.token_id for token in masked.tokens] == row[0].tolist()
    predicted = {n: token.label for n, token in enumerate(masked.tokens) if token.label != IGNORED}
    used = expected.labels != IGNORED
    assert predicted == dict(zip(expected.masked_positions[used].tolist(), expected.labels[used].tolist(), strict=True))


def test_eighty_ten_ten_is_counted(tokenizer: Tokenizer) -> None:
    texts = [mask_text(TEXT, tokenizer, DATA, rate=0.15, seed=seed) for seed in range(60)]
    counts = {kind: sum(text.count(kind) for text in texts) for kind in ("masked", "random", "unchanged")}
    total = sum(counts.values())
    assert total == sum(token.label != IGNORED for text in texts for token in text.tokens) > 500
    shares = {kind: count / total for kind, count in counts.items()}
    assert shares == pytest.approx({"masked": 0.8, "random": 0.1, "unchanged": 0.1}, abs=0.05)


def test_a_text_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, check=coded("empty-text")):
        mask_text(" ", tokenizer, DATA, rate=0.15)
