"""A small tokenizer of made-up words."""

from __future__ import annotations

import pytest

from data_prep import Tokenizer
from tests.support.made_up_documents import SMALL, documents, train_tokenizer


@pytest.fixture(scope="session")
def made_up_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(documents(), folder, SMALL, {"files": 1})
    return Tokenizer.load(folder)
