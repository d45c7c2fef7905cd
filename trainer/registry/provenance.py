"""The provenance of an exported folder as the registry reads it: a file that people edit, so its shape is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from data_prep.errors import UserError
from trainer.using.model_folder import PROVENANCE_FILE, read_provenance


class _Provenance(BaseModel):
    """What is looked into; all else becomes tags as it is."""

    mlflow_run_id: str | None = None
    data_digests: dict[str, str] | None = None
    data_lineage: list[str] | None = None
    scores: dict[str, float] | None = None


def read_checked_provenance(folder: Path) -> dict[str, Any]:
    """What the export wrote down of the model's origin; empty for a folder from elsewhere.

    Raises:
        UserError: it is not of the form that an export writes.
    """
    provenance = read_provenance(folder)
    try:
        _Provenance.model_validate(provenance)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{folder / PROVENANCE_FILE} is not as an export wrote it ({where}: {first['msg']}); export the model "
            "again, or mend it"
        ) from None
    return provenance
