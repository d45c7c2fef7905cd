"""The provenance of an exported folder (provenance.json): people edit it, so its shape is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from trainer.inference.model_folder import read_json

PROVENANCE_FILE = "provenance.json"


class _Provenance(BaseModel):
    """What is looked into; all else becomes tags as it is."""

    mlflow_run_id: str | None = None
    data_digests: dict[str, str] | None = None
    data_lineage: list[str] | None = None
    scores: dict[str, float] | None = None


def read_provenance(folder: Path) -> dict[str, Any]:
    """What the export wrote down of the model's origin; empty for a folder from elsewhere.

    Raises:
        UserError: it is not of the form that an export writes.
    """
    provenance = read_json(folder / PROVENANCE_FILE)
    try:
        _Provenance.model_validate(provenance)
    except ValidationError as error:
        raise UserError(
            f"{folder / PROVENANCE_FILE} does not have the form that an export writes ({first_problem(error)})",
            fix="export the model again, or correct the file",
            code="damaged-provenance",
        ) from None
    return provenance


def data_lineage(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Manifest digests of all data that the weights saw; empty if the provenance has none."""
    digests: dict[str, str] = provenance.get("data_digests") or {}
    return tuple(dict.fromkeys([*digests.values(), *(provenance.get("data_lineage") or [])]))
