"""Counts of the sentence pairs of every shard in an epoch, from which the number of rows of the epoch follows.

Planning all shards takes minutes to hours, so the counts are kept: in memory, and in a folder for the next start of the
run and for workers that were forked before they were known.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.storage import storage
from trainer.data import pair_rows, randomness, sentence_pairs
from trainer.data.packing import RowSettings
from trainer.data.pair_rows import PairCounts, PairPlan
from trainer.data.randomness import Purpose, fold
from trainer.data.shard_set import Shard

LOG = logger(__name__)

PAIR_COUNTS = "pair_counts"
"""Directory in the output directory."""
NUM_COUNTS = len(fields(PairCounts))
_MOST_NUMBERS, _MOST_BYTES = 1 << 25, 1 << 30
"""Numbers kept in memory, and bytes of files. A mixture needs every epoch of each component since the start of its own:
there is room for 250 of 15,625 shards."""
RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class PairPlanner:
    """The sentence pairs of an epoch of one component, planned shard by shard."""

    shards: Sequence[Shard]
    settings: RowSettings
    key: np.uint64
    """Of seed, epoch and component."""

    def plan(self, number: int) -> PairPlan:
        """Plan the pairs of a shard."""
        shard, settings = self.shards[number], self.settings
        assert settings.pair_task is not None
        return sentence_pairs.plan_pairs(
            shard.read_index(),
            shard.itemsize,
            settings.sequence_length,
            settings.short_seq_probability,
            fold(fold(self.key, Purpose.SENTENCE_PAIRS), number),
            settings.pair_task,
        )

    def check(self, number: int, plan: PairPlan, counts: np.ndarray) -> None:
        """Compare a plan with the counts of all shards, (num_shards, `NUM_COUNTS`).

        Raises:
            UserError: they differ, so the order of samples would be wrong.
        """
        if astuple(plan.counts) != tuple(counts[number].tolist()):
            raise UserError(
                f"shard {self.shards[number].record.name} has {plan.counts.rows} rows of sentence pairs in this epoch, "
                f"and the run counted {counts[number, -2]}",
                fix="remove the directory pair_counts in output_dir, and resume from a checkpoint before this epoch",
                code="wrong-pair-counts",
            )

    def identity(self) -> dict[str, Any]:
        """Return all that the counts depend on, for JSON."""
        names = "\n".join(f"{shard.record.name} {shard.record.index.sha256}" for shard in self.shards)
        return {
            "shards": hashlib.sha256(names.encode()).hexdigest(),
            "key of seed, epoch and component": f"{int(self.key):016x}",
            "sequence_length": self.settings.sequence_length,
            "task": self.settings.pair_task,
            "short_seq_probability": self.settings.short_seq_probability,
            "source": _digest_of_source(),
        }


class KeptPairCounts:
    """The counts of the epochs of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, np.ndarray] = {}
        self._unwritten: dict[str, bytes] = {}
        self._retry_at, self._is_failing = 0.0, False

    def find(self, planner: PairPlanner) -> np.ndarray | None:
        """Return the counts of all shards, (num_shards, `NUM_COUNTS`) int64; None if they are unknown.

        A file that is damaged, or whose contents do not match its name, is ignored with a warning.
        """
        identity = planner.identity()
        name = _name(identity)
        if name in self._known:
            return self._known[name]
        path = self._folder / name
        try:
            stored = json.loads(path.read_bytes())
            counts = np.array(stored["counts"], np.int64)
            shape = (len(planner.shards), NUM_COUNTS)
            if stored["identity"] != identity or counts.shape != shape or stored["sha256"] != _digest(counts):
                raise ValueError("its content is another than its name says")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            LOG.warning(f"{path} is damaged ({error}); the sentence pairs are counted again")
            return None
        return self._remember(name, counts)

    def keep(self, planner: PairPlanner, counts: np.ndarray, writes: bool) -> None:
        """Remember the counts; with `writes`, write them atomically for other processes too, or later if that fails."""
        identity = planner.identity()
        name = _name(identity)
        self._remember(name, counts)
        if writes:
            content = {"identity": identity, "sha256": _digest(counts), "counts": counts.tolist()}
            self._unwritten[name] = json.dumps(content).encode()
            self._retry_at = 0.0
            self.write_late()

    def write_late(self) -> None:
        """Write what could not be written before, at most once in `RETRY_SECONDS`."""
        if not self._unwritten or time.monotonic() < self._retry_at:
            return
        try:
            while self._unwritten:
                name = next(iter(self._unwritten))
                storage.write_bytes(self._folder / name, self._unwritten[name])
                del self._unwritten[name]
            self._is_failing = False
        except (OSError, UserError) as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._is_failing:
                problem = error.problem if isinstance(error, UserError) else error
                LOG.warning(
                    "cannot write the counts of sentence pairs; the run tries again every minute. Until then the next "
                    f"start and each data worker count their epoch again: {problem}"
                )
            self._is_failing = True
            return
        with contextlib.suppress(OSError):  # another node may remove them too
            self._remove_oldest(except_for=name)

    def _remove_oldest(self, except_for: str) -> None:
        newest_first = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        left = _MOST_BYTES
        for path in newest_first:
            left -= path.stat().st_size
            if left < 0 and path.name != except_for:
                path.unlink()

    def _remember(self, name: str, counts: np.ndarray) -> np.ndarray:
        self._known[name] = counts
        while len(self._known) > 1 and sum(each.size for each in self._known.values()) > _MOST_NUMBERS:
            del self._known[next(iter(self._known))]
        return counts


def _name(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def _digest(counts: np.ndarray) -> str:
    return hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()


@functools.cache
def _digest_of_source() -> str:
    """Return a digest of the code that plans: another version may plan other pairs."""
    modules = (pair_rows, randomness, sentence_pairs)
    digests = [storage.sha256_of(Path(str(module.__file__))) for module in modules]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
