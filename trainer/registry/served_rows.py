"""MLflow's function of a registered model: if a row cannot be answered, the other rows of the batch still are.

Each registered model contains a copy of this file, and works without this project. So this file imports nothing of the
project.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pandas
from mlflow import transformers
from mlflow.exceptions import MlflowException

LOG = logging.getLogger(__name__)


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> RowByRow:
    """Load the function of a model's folder; MLflow calls it by this name."""
    return RowByRow(transformers._load_pyfunc(path, model_config))


class RowByRow:
    """Answers batches with the function of MLflow's transformers flavor.

    A row whose text is missing or empty, or that the function cannot answer, has None in a list of answers and missing
    values in a table of answers. A batch in which no row has an answer fails.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def get_raw_model(self) -> Any:
        """Return the transformers pipeline."""
        return self.function.get_raw_model()

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the answers of a text, of a pair, or of a batch of them (a list or a table)."""
        if not isinstance(data, list | pandas.DataFrame) or len(data) == 0:
            return self.function.predict(data, params)
        every = range(len(data))
        numbers = [number for number in every if _has_text(_rows(data, [number]))]
        if not numbers:
            raise MlflowException.invalid_parameter_value("no row has a text")
        try:
            answers = self.function.predict(_rows(data, numbers), params)
        except Exception:  # noqa: BLE001  # its class, and which row caused it, depend on the libraries
            outcomes = self._one_by_one(data, numbers, params)
            numbers, parts = list(outcomes), list(outcomes.values())
            if isinstance(parts[0], pandas.DataFrame):
                answers = pandas.concat(parts)
            else:  # the answer of a text with several masks is a list, in a batch and alone
                answers = [part[0] if len(part) == 1 else part for part in parts]
        if len(numbers) == len(data):
            return answers
        LOG.warning("%d of %d rows have no answer", len(data) - len(numbers), len(data))
        if isinstance(answers, pandas.DataFrame):
            return answers.set_axis(numbers).reindex(every)
        of_number = dict(zip(numbers, answers, strict=True))
        return [of_number.get(number) for number in every]

    def _one_by_one(self, data: Any, numbers: Sequence[int], params: dict[str, Any] | None) -> dict[int, Any]:
        """Return the answers by the number of their row; rows that fail have none."""
        outcomes = {}
        errors = []
        for number in numbers:
            try:
                outcomes[number] = self.function.predict(_rows(data, [number]), params)
            except Exception as error:  # noqa: BLE001  # as above
                errors.append(error)
        if not outcomes:
            raise errors[0]
        return outcomes


def _rows(data: Any, numbers: Sequence[int]) -> Any:
    """Return these rows of a list or a table."""
    return data.iloc[list(numbers)] if isinstance(data, pandas.DataFrame) else [data[number] for number in numbers]


def _has_text(row: Any) -> bool:
    """Return whether every cell of a batch of one row is a text that is not empty."""
    cells = row.iloc[0].tolist() if isinstance(row, pandas.DataFrame) else row
    texts = [cell for each in cells for cell in (each.values() if isinstance(each, dict) else [each])]
    return all(isinstance(text, str) and text.strip() for text in texts)
