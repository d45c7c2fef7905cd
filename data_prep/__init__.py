"""Preparation of pretraining data: text in, a tokenizer and verified webdataset shards out.

The Python API, whose functions do what the commands `clozeworks tokenizer`, `shards` and so on do:

    from data_prep import prepare, train_tokenizer

    tokenizer = train_tokenizer("corpus/*.jsonl", output="tokenizer", vocab_size=32_000)
    dataset = prepare("corpus/*.jsonl", tokenizer=tokenizer, output="shards")
    print(dataset.num_tokens, next(iter(dataset)).text)

`train_tokenizer`, `prepare`, `open_dataset` and `verify` are documented where they are defined, in `data_prep.api`;
`Document` is what filters take. Importing this package imports only what follows modules of the user's own from their
import on: each name loads when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import data_prep.base.imported_sources  # noqa: F401

if TYPE_CHECKING:
    from data_prep.api.opened_dataset import Dataset, open_dataset, verify
    from data_prep.api.prepare import prepare
    from data_prep.api.train_tokenizer import train_tokenizer
    from data_prep.base.errors import UserError
    from data_prep.config.preparation_config import Source
    from data_prep.documents.document import Document
    from data_prep.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Dataset",
    "Document",
    "Source",
    "Tokenizer",
    "UserError",
    "open_dataset",
    "prepare",
    "train_tokenizer",
    "verify",
]

_MODULES = {
    "Dataset": "data_prep.api.opened_dataset",
    "Document": "data_prep.documents.document",
    "Source": "data_prep.config.preparation_config",
    "Tokenizer": "data_prep.tokenizer.tokenizer",
    "UserError": "data_prep.base.errors",
    "open_dataset": "data_prep.api.opened_dataset",
    "prepare": "data_prep.api.prepare",
    "train_tokenizer": "data_prep.api.train_tokenizer",
    "verify": "data_prep.api.opened_dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'data_prep' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
