"""A masking of the user's own: `data.masking: module:function`.

The function gets the rows of a micro-batch, their keys, their masking rates and the settings of masking (`Masking`),
and returns input ids and labels:

    def masking(rows, keys, rates, settings):
        # rows: (R, L) int64 ids; keys: (R,) uint64; rates: (R,) float64, the share of tokens to predict
        draws = uniform(fold(keys[:, None], np.arange(rows.shape[1])))      # (R, L) in [0, 1)
        chosen = settings.special_tokens.are_ordinary(rows) & (draws < rates[:, None])
        return np.where(chosen, settings.special_tokens.mask, rows), np.where(chosen, rows, -100)

All randomness comes from the keys (`trainer/data/randomness.py`), and no row depends on another: ranks, workers and
micro-batches slice the rows in any way, and a resumed run masks them again. This is checked for the first micro-batch
of each loader in each process; what a function returns is checked for each.
"""

from __future__ import annotations

import numpy as np

from data_prep.base.errors import UserError
from trainer.config.custom_code import MASKING
from trainer.data.batch import IGNORED
from trainer.data.masking import MaskedRows, Masking


class CustomMasking:
    """The user's function between the rows of a micro-batch and its masked rows."""

    def __init__(self, name: str, settings: Masking) -> None:
        """Take `name` rather than the function, so that a worker may be started in any way."""
        self._name = name
        self._settings = settings
        self._is_repeatable = False

    def mask_rows(self, input_ids: np.ndarray, keys: np.ndarray, rates: np.ndarray | float) -> MaskedRows:
        """Mask rows as `trainer.data.masking.mask_rows` does.

        Raises:
            UserError: the function fails, depends on more than a row and its key, or returns no masked rows.
        """
        rates = np.broadcast_to(np.asarray(rates, np.float64), len(keys))
        seen, labels = self._call(input_ids, keys, rates)
        self._check(input_ids, seen, labels)
        if not self._is_repeatable:
            self._check_repeatable(input_ids, keys, rates, seen, labels)
            self._is_repeatable = True
        positions = np.flatnonzero(labels != IGNORED)
        return MaskedRows.of(seen.reshape(-1), positions, labels.reshape(-1)[positions], self._capacity(labels))

    def _call(self, input_ids: np.ndarray, keys: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the function makes of the rows, as two (R, L) int64; it cannot change its arguments."""
        arguments = [input_ids.copy(), keys.copy(), rates.copy()]
        for argument in arguments:
            argument.flags.writeable = False
        function = MASKING.load(self._name)
        try:
            made = function(*arguments, self._settings)
        except Exception as error:
            raise MASKING.failed(self._name, error) from error
        if not isinstance(made, tuple) or len(made) != 2:
            raise self._wrong(f"returned {type(made).__name__}", "return the tuple (input_ids, labels)")
        ids, labels = (self._array(name, each, input_ids.shape) for name, each in zip(_RETURNED, made, strict=True))
        return ids, labels

    def _array(self, name: str, made: object, shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(made, np.ndarray) and made.shape == shape and made.dtype.kind in "iu":
            return made.astype(np.int64)
        is_array = isinstance(made, np.ndarray)
        got = f"{made.dtype} of shape {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
        raise self._wrong(
            f"returned {name} as {got}" + (f" for rows of shape {shape}" if is_array else ""),
            f"return {name} as a numpy array of integers with the shape of the rows",
        )

    def _check_repeatable(
        self, input_ids: np.ndarray, keys: np.ndarray, rates: np.ndarray, seen: np.ndarray, labels: np.ndarray
    ) -> None:
        """Mask the first half of the rows once more, in the opposite order."""
        half = slice((len(keys) + 1) // 2)
        again = self._call(input_ids[half][::-1], keys[half][::-1], rates[half][::-1])
        if not all(map(np.array_equal, again, (seen[half][::-1], labels[half][::-1]))):
            raise UserError(
                f"data.masking={self._name} masked rows otherwise when they were given a second time, in another order "
                "and without the other rows",
                fix="draw from the row's key alone (trainer/data/randomness.py), and let no row depend on another",
                code="masking-not-repeatable",
            )

    def _check(self, input_ids: np.ndarray, seen: np.ndarray, labels: np.ndarray) -> None:
        special = self._settings.special_tokens
        is_text, changed, predicted = special.are_ordinary(input_ids), seen != input_ids, labels != IGNORED
        fix_ids = (
            "replace tokens of the text alone, by [MASK] or by other tokens of the text (settings.special_tokens, "
            "settings.ordinary_ids)"
        )
        fix_labels = f"return the original ids of the predicted tokens as labels, and {IGNORED} elsewhere"
        replaced = changed & ~self._is_ordinary(seen) & (seen != special.mask)
        for wrong, name, made, what, fix in (
            (changed & ~is_text, "input id", seen, "in place of a special token or padding", fix_ids),
            (replaced, "input id", seen, "which is neither a token of text nor [MASK]", fix_ids),
            (predicted & ~is_text, "label", labels, "at a position without a token of text", fix_labels),
            (predicted & ~self._is_ordinary(labels), "label", labels, "which is not a token of text", fix_labels),
        ):
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                raise self._wrong(
                    f"returned the {name} {made[row, column]} at position {column} of a row, {what} (the vocabulary "
                    f"has {self._settings.vocab_size} tokens)",
                    fix,
                )
        most, limit = int(predicted.sum(1).max(initial=0)), self._settings.max_masked(labels.shape[1])
        if most > limit:
            raise self._wrong(
                f"predicts {most} of the {labels.shape[1]} tokens of a row, more than the {limit} for which "
                + ("the highest rate of data.masking_law, " if self._settings.law else "data.mlm_probability=")
                + f"{self._settings.max_mlm_probability:g} makes space",
                "predict fewer, or raise data.mlm_probability",
            )

    def _is_ordinary(self, ids: np.ndarray) -> np.ndarray:
        ordinary: np.ndarray = self._settings.special_tokens.are_ordinary(ids)
        ordinary &= (ids >= 0) & (ids < self._settings.vocab_size)
        return ordinary

    def _capacity(self, labels: np.ndarray) -> int:
        return len(labels) * self._settings.max_masked(labels.shape[1])

    def _wrong(self, problem: str, fix: str) -> UserError:
        return MASKING.wrong(self._name, problem, fix)


_RETURNED = ("input_ids", "labels")
