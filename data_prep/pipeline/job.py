"""The job of a preparation: what all its tasks share, which goes to a process once instead of with every task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings, ShardSettings
from data_prep.dataset.manifest_records import FileRecord
from data_prep.dataset.removed_names import ExcludedNames, files_of_removed_names, removed_names
from data_prep.executors.executors import shared
from data_prep.filters.chain import SourceReading
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

Unit = TypeVar("Unit")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """What all tasks of a preparation share, with everything needed to run them in any process.

    It holds what users keep secret, such as a login in the parameter of a filter, and is written into no file.

    Attributes:
        reading: of the sources of the plan.
        units: names of the units, in their order.
        first_source: number in the manifest of the plan's first source.
        has_provenance: as `Plan.has_provenance`.
        tokenizer_folder: a folder or URL.
        output: folder or URL of the data set.
        removed_names: files of the extended data set with removed URLs and corpus ids.
        keeps: as `Plan.keeps`.
    """

    reading: SourceReading
    deduplication: DeduplicationSettings
    shards: ShardSettings
    destinations: Destinations
    units: tuple[str, ...]
    first_source: int
    has_provenance: bool
    tokenizer_folder: str
    tokenizer_fingerprint: str
    vocab_size: int
    token_dtype: Literal["uint16", "uint32"]
    work_folder: str
    output: str
    removed_names: tuple[FileRecord, ...]
    keeps: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, tokenizer: Tokenizer, output: str) -> Job:
        """Return the job of a plan; tasks in this process use the loaded tokenizer."""
        folder = storage.absolute(tokenizer.url)
        keep_tokenizer(tokenizer, folder)
        return cls(
            reading=plan.reading,
            deduplication=plan.config.deduplication,
            shards=plan.config.shards,
            destinations=plan.destinations,
            units=tuple(unit.name for unit in plan.units),
            first_source=plan.first_source,
            has_provenance=plan.has_provenance,
            tokenizer_folder=folder,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            token_dtype=dtype_name(tokenizer),
            work_folder=storage.absolute(plan.work_folder(output)),
            output=storage.absolute(output),
            removed_names=() if plan.parent is None else files_of_removed_names(plan.parent),
            keeps=plan.keeps,
        )

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """Type of the tokens."""
        return np.uint16 if self.token_dtype == "uint16" else np.uint32

    def task(self, function: Callable[[Job, Unit], Result]) -> Callable[[Unit], Result]:
        """Return a function of this job and a unit as one of the unit, which executors take to other processes."""
        return shared(function, self)

    def without_filters(self) -> Job:
        """Return the job of phases that read no input, so that long lists of filters do not travel for them."""
        settings = tuple(each.model_copy(update={"filters": ()}) for each in self.reading.settings)
        return dataclasses.replace(self, reading=dataclasses.replace(self.reading, settings=settings))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which this process loads once.

        Raises:
            UserError: it is another one than at the start of the preparation.
        """
        return cached_tokenizer(self.tokenizer_folder, self.tokenizer_fingerprint)

    def excluded_names(self) -> ExcludedNames | None:
        """Return the names in the extended data set, which its additions leave out; None if takedowns named none."""
        return ExcludedNames(removed_names(self.output, self.removed_names)) if self.removed_names else None


def dtype_name(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if np.dtype(tokenizer.token_dtype) == np.uint16 else "uint32"


_loaded: dict[tuple[str, str], Tokenizer] = {}


def keep_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Make `cached_tokenizer` return this tokenizer, loaded from `folder`, in this process."""
    _loaded.clear()
    _loaded[folder, tokenizer.fingerprint] = tokenizer


def load_tokenizer(folder: str) -> None:
    """Load the tokenizer at a folder or URL for `cached_tokenizer`."""
    keep_tokenizer(Tokenizer.load(folder), folder)


def cached_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    """Return the tokenizer at a folder or URL, loaded once per process."""
    if (folder, fingerprint) in _loaded:
        return _loaded[folder, fingerprint]
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"tokenizer {storage.redact(folder)} changed while shards were made: its fingerprint is "
            f"{tokenizer.fingerprint} and was {fingerprint}",
            fix="run the command again with --fresh",
            code="tokenizer-changed",
        )
    keep_tokenizer(tokenizer, folder)
    return tokenizer
