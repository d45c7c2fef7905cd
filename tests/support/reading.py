"""How tests read input files: the one place that knows how a pattern becomes files, a file units, a unit documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.config.preparation_config import DocumentSettings, PreparationConfig
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader, unit_sha256
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputFile as InputFile
from data_prep.documents.input_files import InputUnit, split_into_units
from data_prep.documents.input_files import find_inputs as find_inputs
from data_prep.documents.input_files import find_units as find_units
from data_prep.documents.input_files import relative_name as relative_name
from data_prep.documents.rejects import BadInput as BadInput
from data_prep.filters.chain import FilterChain
from data_prep.filters.registry import configured_filters, planned_filters

DEFAULTS = DocumentSettings()
SKIP = DocumentSettings(on_bad_input="skip")
FORMATS = Formats()


def file_of(url: str, num_bytes: int = 1000) -> InputFile:
    """A file of this name and size, which need not exist."""
    return InputFile(url, 0, num_bytes, "", FORMATS.of_file(url))


def units_of(path: str | Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30) -> list[InputUnit]:
    """Units of about `unit_bytes`; by default the whole file is one, unless its format has parts of its own."""
    file = file_of(str(path), Path(path).stat().st_size)
    return split_into_units(file, FORMATS, unit_bytes, settings.txt_documents)


def reader_of(source: str | Path | InputUnit, settings: DocumentSettings = DEFAULTS) -> DocumentReader:
    """A reader of a file that is one unit, or of a unit."""
    (unit,) = [source] if isinstance(source, InputUnit) else units_of(source, settings)
    return DocumentReader(unit, settings, FORMATS)


class Filtered:
    """The documents of a file, one unit of the source "web", that the filters of the settings keep; and its reader."""

    def __init__(self, path: Path, settings: DocumentSettings, fingerprint: str | None = None, **options: Any) -> None:
        (unit,) = units_of(path)
        self.reader = DocumentReader(unit, settings, FORMATS, source="web")
        steps = configured_filters(settings) if fingerprint is None else planned_filters(settings, fingerprint)
        self._chain, self._options = FilterChain(settings, steps), options

    def __iter__(self) -> Iterator[Document]:
        return self._chain.apply(self.reader, **self._options)


def digest_of(unit: InputUnit, settings: DocumentSettings = DEFAULTS) -> str:
    """What a preparation compares to notice that the input has changed."""
    return unit_sha256(unit, settings, Formats(settings.formats))


def files_of_input(pattern: str | Path) -> list[str]:
    config = PreparationConfig.model_validate({"sources": [{"name": "all", "input": str(pattern)}]})
    return [file.url for file in find_inputs(config)]


def readers_of(config: PreparationConfig) -> list[DocumentReader]:
    """A reader of each unit of the inputs."""
    formats = Formats.of(config)
    units = find_units(find_inputs(config), config, formats)
    return [DocumentReader(unit, config.documents, formats, config.sources[unit.source].name) for unit in units]


def read_and_count(
    path: Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30
) -> tuple[list[str], Counter[str]]:
    """The texts of a file, and how many documents of it were dropped, by reason."""
    readers = [DocumentReader(unit, settings, FORMATS) for unit in units_of(path, settings, unit_bytes)]
    texts = [document.text for reader in readers for document in reader]
    return texts, sum((reader.dropped for reader in readers), Counter())
