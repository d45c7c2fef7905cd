"""Registry of input formats: built-in formats, entry points, and formats of the settings.

A format of the settings is a function from a stream to objects (`CustomFormat`), or a class like those of this folder.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, BinaryIO

from data_prep.base.errors import UsageError, UserError, failure
from data_prep.base.registries import Registry
from data_prep.base.source_digest import check_module_unchanged, module_digest
from data_prep.config.preparation_config import PreparationConfig
from data_prep.documents.document import Document, is_json, wrong_values
from data_prep.documents.formats.csv_format import CsvFormat, TsvFormat
from data_prep.documents.formats.input_format import Format, Reading, document_of
from data_prep.documents.formats.table_formats import ArrowFormat, ParquetFormat
from data_prep.documents.formats.text_format import JsonLinesFormat, TextFormat
from data_prep.documents.rejects import BadInput, Fault
from data_prep.storage import storage
from data_prep.storage.compression import COMPRESSIONS, DAMAGE
from data_prep.storage.parquet import DamagedTable

FORMATS = Registry(
    where="the format {name!r}",
    import_fix="give module:function; your module must be on PYTHONPATH",
    import_code="format-not-importable",
    callable_fix="give a function from a stream of bytes to objects, or a subclass of Format",
    callable_code="format-not-callable",
    entry_points="clozeworks.formats",
)
BUILT_IN: tuple[Format, ...] = (
    TextFormat(),
    JsonLinesFormat(),
    ParquetFormat(),
    CsvFormat(),
    TsvFormat(),
    ArrowFormat(),
)
_BY_ENDING: dict[str, Format] = {ending: item for item in BUILT_IN for ending in item.endings}
_COMPRESSED_GROWTH = 3.0  # text bytes of a compressed byte, about


@dataclass(frozen=True)
class FileFormat:
    """How a file is read; its compression and its format, which `Formats` holds by its ending.

    Attributes:
        ending: of the format, such as .jsonl; `module:function` of one that only a source names.
        compression: its ending, such as .gz; empty for none.
        named: the format that the file's source names, where it is another than that of the file's ending.
        growth: about how many bytes of text a byte of the file is.
        has_fields: whether the documents have fields besides the text.
        can_be_split: whether a large file is read in parts; a compressed one is read from its beginning.
    """

    ending: str
    compression: str
    named: str | None
    growth: float
    has_fields: bool
    can_be_split: bool


_file_format = cache(FileFormat)  # one object for many files, which travels with a task once


@dataclass(frozen=True)
class Formats:
    """The formats of a preparation: the built-in ones, those of its settings, and those of installed packages.

    Each process makes a format when it first reads a file of it.

    Attributes:
        paths: `module:function` of the formats of the settings, by the ending of their files, or by itself for one that
            a source names.
        identities: by ending, the name and the source digest of the custom formats when the work began; a format with
            another identity is refused.
    """

    paths: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _made: dict[str, Format] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, config: PreparationConfig) -> Formats:
        """Return the formats of a configuration, made of the code of now."""
        named = [settings.format for settings in map(config.documents_of, config.sources) if settings.format]
        formats = cls({**config.documents.formats, **{name: name for name in named if ":" in name}})
        for ending, path in formats.paths.items():
            formats[ending]
            check_module_unchanged(_module_of(path))
        for name in named:
            formats._named(name)
        return formats

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def __getitem__(self, ending: str) -> Format:
        """Return the format of an ending."""
        if ending in _BY_ENDING and ending not in self.paths:
            return _BY_ENDING[ending]
        if ending not in self._made:
            item = _custom(ending, self.paths.get(ending) or _installed_paths().get(ending, ending))
            if self.identities.get(ending, identity := _identity(item)) != identity:
                raise UserError(
                    f"the format {item.path} of this process differs from that at the start of the preparation",
                    fix="install the same versions on every machine, restart its workers, or run the command again "
                    "with --fresh",
                    code="formats-changed",
                )
            self._made[ending] = item
        return self._made[ending]

    def for_files(self, files: Iterable[FileFormat]) -> Formats:
        """Return the formats with the identities of those custom ones that read the files."""
        items = {ending: self[ending] for ending in dict.fromkeys(file.ending for file in files)}
        custom = {ending: item for ending, item in items.items() if item.path}
        found = replace(self, identities={ending: _identity(item) for ending, item in custom.items()})
        found._made.update(custom)
        return found

    def supports(self, url: str) -> bool:
        """Return whether a file of this name has a format."""
        return bool(self._by_name(url)[0])

    def of_file(self, url: str, named: str | None = None) -> FileFormat:
        """Return how a file is read, by its name or by the format that its source names.

        Args:
            named: such as jsonl, .jsonl, jsonl.gz or module:function; it counts instead of the ending.

        Raises:
            UsageError: the type of the file is unsupported, or the named format is unknown.
        """
        ending, compression = self._by_name(url)
        if named is None and not ending:
            raise UsageError(
                f"input {storage.redact(url)} has an unsupported file type; {self._listed()}",
                fix="name the format of the source with sources[].format (--input-format), rename or convert the file, "
                "or set a custom format for its ending in documents.formats",
                code="unsupported-file-type",
            )
        if named is not None:
            wanted, own_compression = self._named(named)
            own_compression = own_compression or compression
            if ending and self[ending] is self[wanted] and compression == own_compression:
                named = None
            else:
                ending, compression = wanted, own_compression
        item = self[ending]
        return _file_format(
            ending,
            compression,
            named,
            growth=_COMPRESSED_GROWTH if compression else item.growth,
            has_fields=item.has_fields,
            can_be_split=not compression and type(item).cuts is not Format.cuts,
        )

    def _by_name(self, url: str) -> tuple[str, str]:
        """Return format and compression that a file's name ends in; the first is empty if it is unsupported."""
        name = (storage.redact(url) if url.startswith(("http://", "https://")) else url).lower()
        compression = _compression_of(name)
        plain = name.removesuffix(compression)
        return next((ending for ending in self._endings() if plain.endswith(ending)), ""), compression

    def _named(self, named: str) -> tuple[str, str]:
        if ":" in named:
            return named, ""
        whole = f".{named.lower().removeprefix('.')}"
        compression = _compression_of(whole)
        ending = whole.removesuffix(compression)
        if ending not in self._endings():
            raise UsageError(
                f"the format {named!r} is unknown; {self._listed()}",
                fix="name one of these, or module:function of your own format",
                code="unknown-format",
            )
        return ending, compression

    def _endings(self) -> Iterator[str]:
        """Yield the known endings; those of installed packages, which takes reading all of them, come last."""
        yield from _BY_ENDING
        yield from (ending for ending in self.paths if ":" not in ending)
        yield from _installed_paths()

    def _listed(self) -> str:
        endings = dict.fromkeys(self._endings())
        return f"supported: {' '.join(endings)}, each of these also with {' '.join(COMPRESSIONS)} after it"


def _compression_of(name: str) -> str:
    return next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")


def _identity(item: Format) -> dict[str, str]:
    return {"name": item.path, "source_sha256": module_digest(_module_of(item.path)) or ""}


def _module_of(path: str) -> types.ModuleType:
    return importlib.import_module(path.partition(":")[0])


@cache
def _installed_paths() -> dict[str, str]:
    """Return `module:function` of the formats of installed packages; an entry point is named by the ending, with or
    without its dot."""
    return {f".{name.removeprefix('.').lower()}": point.value for name, point in FORMATS.installed().items()}


def read_documents(item: Format, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
    """Return the documents of a part of a file, as `Format.documents`; those of a user's class are checked.

    Raises:
        BadInput: as `Format.documents`.
    """
    if item.path and not isinstance(item, CustomFormat):
        return _checked(item, stream, reading)
    return item.documents(stream, reading)


def _custom(ending: str, path: str) -> Format:
    taken = [built_in for item in BUILT_IN for built_in in item.endings]
    is_ending = ending.startswith(".") and ending == ending.lower() and ":" not in ending
    if ending != path and (not is_ending or ending in taken or ending in COMPRESSIONS):
        raise UsageError(
            f"documents.formats names a format for the ending {ending!r}",
            fix=f"give an ending in lower case that begins with a dot, none of {' '.join([*taken, *COMPRESSIONS])}",
            code="format-ending",
        )
    found = FORMATS.load(path, path)
    try:
        made = found() if inspect.isclass(found) else CustomFormat(ending, found) if callable(found) else found
    except (AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"{FORMATS.where.format(name=path)} cannot be made ({error})",
            fix=FORMATS.import_fix,
            code=FORMATS.import_code,
        ) from None
    if not isinstance(made, Format):
        raise UsageError(
            f"{FORMATS.where.format(name=path)} is {type(made).__name__}",
            fix=FORMATS.callable_fix,
            code=FORMATS.callable_code,
        )
    made.endings, made.path = (ending,), path
    return made


def _checked(item: Format, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
    """Yield the documents that a user's class of a format gives.

    Raises:
        BadInput: as `_explained`.
    """
    ending, where = item.endings[0], reading.rejects.where
    for number, document in enumerate(_explained(partial(item.documents, stream, reading), ending, where), 1):
        wrong = "" if isinstance(document, Document) else f"gave {type(document).__name__}, not a document"
        if not wrong and (values := wrong_values(document)):
            wrong = f"gave a document whose {values}"
        elif not wrong and not is_json(document.metadata):
            wrong = "gave a document whose metadata holds what JSON does not have"
        if wrong:
            raise UserError(
                f"the format {ending} {wrong}, on {where}, document {number}",
                fix="correct the class of the format",
                code="format-failed",
            )
        yield document


def _explained(read: Callable[[], Iterable[Any]], ending: str, where: str) -> Iterator[Any]:
    """Yield what a user's code reads of a file, with errors that name the file and the document.

    Raises:
        BadInput: the code raises ValueError: the file is damaged.
    """
    number = 1
    try:
        for found in read():
            yield found
            number += 1
    except (UserError, OSError, DamagedTable, *DAMAGE):
        raise
    except ValueError as error:
        raise BadInput(
            f"{where} is damaged at document {number} ({error})",
            "damaged file",
            spoils_file=True,
            fix="fetch it again, or leave it out with documents.on_bad_input=skip",
        ) from None
    except Exception as error:
        raise UserError(
            f"the format {ending} {failure(error)}, on {where}, document {number}",
            fix="correct the code of the format; it raises ValueError where a file is damaged",
            code="format-failed",
        ) from error


class CustomFormat(Format):
    """A format read by a function, which yields objects from a stream of bytes; the settings name their fields.

    The function raises ValueError for a file of another format; nothing of the file is then used.
    """

    def __init__(self, ending: str, read: Callable[[BinaryIO], Iterable[Mapping[str, Any]]]) -> None:
        self.endings = (ending,)
        self._read = read

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        rejects = reading.rejects
        for number, values in enumerate(_explained(partial(self._read, stream), self.endings[0], rejects.where), 1):
            try:
                if not isinstance(values, Mapping):
                    raise Fault(f"is {type(values).__name__}, not an object with fields", "no object")
                document = document_of(values, reading.fields)
                num_bytes = len(document.text.encode(errors="surrogatepass"))
            except Fault as fault:
                rejects.bad(f"document {number}", fault)
                continue
            if num_bytes > reading.limit:
                rejects.too_long(num_bytes)
                continue
            rejects.place = f"document {number}"
            yield document
