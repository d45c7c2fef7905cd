"""Registry of input formats: built-in formats, entry points, and formats of the settings.

A format of the settings is a function from a stream to objects (`CustomFormat`), or a class like those of this folder.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, BinaryIO

from data_prep.base.errors import UsageError, UserError, failure
from data_prep.base.registries import Registry
from data_prep.base.source_digest import check_module_unchanged, module_digest
from data_prep.documents.document import Document, is_json, wrong_values
from data_prep.documents.formats.arrow_format import ArrowFormat
from data_prep.documents.formats.csv_format import CsvFormat, TsvFormat
from data_prep.documents.formats.input_format import Format, Reading, document_of
from data_prep.documents.formats.json_format import JsonLinesFormat
from data_prep.documents.formats.parquet_format import ParquetFormat
from data_prep.documents.formats.text_format import TextFormat
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
_of_settings: dict[str, tuple[Format, str]] = {}
"""By ending, a format of the settings, and the digest of the code that it was made from."""
_of_packages: dict[str, tuple[Format, str]] = {}


def use_formats(formats: Mapping[str, str], begins: bool = False) -> None:
    """Register formats (`module:function`) for file endings, or for their own names, in this process.

    Args:
        begins: where work begins; formats of earlier work are forgotten, and the files of modules are compared.

    Raises:
        UsageError: an ending is that of a built-in format, or a format cannot be imported.
        UserError: with `begins`, the file of a format's module changed after the module was imported.
    """
    for ending in [ending for ending in _of_settings if begins and ending not in formats]:
        del _of_settings[ending]
    for ending, path in formats.items():
        _of_settings[ending] = _current(_of_settings, ending, path)
        if begins:
            check_module_unchanged(_module_of(path))


def check_formats(formats: Mapping[str, str], planned: Mapping[str, Mapping[str, str]]) -> None:
    """Check that the formats in this process are those of the plan, as `described_formats` gave them.

    Raises:
        UserError: the code of one is another.
    """
    use_formats(formats)
    for ending, identity in planned.items():
        item = format_named(ending)[0]
        if _identity(item) != identity:
            raise UserError(
                f"the format {item.path} of this process differs from that at the start of the preparation",
                fix="install the same versions on every machine, restart its workers, or run the command again with "
                "--fresh",
                code="formats-changed",
            )


def format_of(url: str, named: str | None = None) -> tuple[Format, str, str]:
    """Return format, ending and compression of a file by its name, such as (..., ".jsonl", ".gz").

    Args:
        named: the format that the file's source names, which counts instead of the ending; see `format_named`.

    Raises:
        UsageError: the type of the file is unsupported, or the named format is unknown.
    """
    name = (storage.redact(url) if url.startswith(("http://", "https://")) else url).lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    if named is not None:
        item, ending, own_compression = format_named(named)
        return item, ending, own_compression or compression
    plain = name.removesuffix(compression)
    for ending, item in (known := _known(plain.endswith)).items():
        if plain.endswith(ending):
            return item, ending, compression
    raise UsageError(
        f"input {storage.redact(url)} has an unsupported file type; {_listed(known)}",
        fix="name the format of the source with sources[].format (--input-format), rename or convert the file, or set "
        "a custom format for its ending in documents.formats",
        code="unsupported-file-type",
    )


def format_named(named: str) -> tuple[Format, str, str]:
    """Return format, ending and compression of a name such as jsonl, .jsonl, jsonl.gz or module:function.

    The ending of `module:function` is the name itself.

    Raises:
        UsageError: the format is unknown, or cannot be imported.
    """
    if ":" in named:
        use_formats({named: named})
        return _of_settings[named][0], named, ""
    whole = f".{named.lower().removeprefix('.')}"
    compression = next((ending for ending in COMPRESSIONS if whole.endswith(ending)), "")
    ending = whole.removesuffix(compression)
    known = _known(lambda endings: ending in endings)
    if ending not in known:
        raise UsageError(
            f"the format {named!r} is unknown; {_listed(known)}",
            fix="name one of these, or module:function of your own format",
            code="unknown-format",
        )
    return known[ending], ending, compression


def _known(suffices: Callable[[tuple[str, ...]], bool]) -> dict[str, Format]:
    """Return formats by ending; those of packages, which takes reading all of them, if others do not suffice."""
    known = {ending: item for item in BUILT_IN for ending in item.endings}
    known |= {ending: item for ending, (item, _) in _of_settings.items() if ":" not in ending}
    return known if suffices(tuple(known)) else known | _installed()


def _listed(known: Iterable[str]) -> str:
    return f"supported: {' '.join(known)}, each of these also with {' '.join(COMPRESSIONS)} after it"


def is_supported(url: str) -> bool:
    """Return whether a file of this name has a format."""
    try:
        format_of(url)
    except UsageError:
        return False
    return True


def described_formats(files: Iterable[tuple[str, str | None]]) -> dict[str, dict[str, str]]:
    """Return the identity of the custom formats that the files use, by ending: name and source digest.

    Args:
        files: URL and named format of each.
    """
    described = {}
    for item, ending, _ in (format_of(*file) for file in files):
        if item.path and ending not in described:
            described[ending] = _identity(item)
    return described


def _identity(item: Format) -> dict[str, str]:
    return {"name": item.path, "source_sha256": _digest_of(item.path)}


def _digest_of(path: str) -> str:
    """Return the digest of the code of a format; empty where it has no file."""
    return module_digest(_module_of(path)) or ""


def _module_of(path: str) -> types.ModuleType:
    return importlib.import_module(path.partition(":")[0])


def _current(known: Mapping[str, tuple[Format, str]], ending: str, path: str) -> tuple[Format, str]:
    """Return the format that this process has, unless its module was reloaded since; else a new one."""
    item, digest = known.get(ending, (None, ""))
    if item is None or item.path != path:
        return _custom(ending, path), _digest_of(path)
    now = _digest_of(path)
    return (item, digest) if now == digest else (_custom(ending, path), now)


def read_documents(item: Format, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
    """Return the documents of a part of a file, as `Format.documents`; those of a user's class are checked.

    Raises:
        BadInput: as `Format.documents`.
        UserError: a user's function or class fails, or gives something else than a document.
    """
    if item.path and not isinstance(item, CustomFormat):
        return _checked(item, stream, reading)
    return item.documents(stream, reading)


def sniffed(head: bytes) -> Format | None:
    """Return the format that the first bytes of a file identify; None if they identify none."""
    return next((item for item in BUILT_IN if item.matches(head)), None)


def _installed() -> dict[str, Format]:
    """Return the formats of installed packages; an entry point is named by the ending, with or without its dot."""
    for ending, path in _installed_paths().items():
        _of_packages[ending] = _current(_of_packages, ending, path)
    return {ending: item for ending, (item, _) in _of_packages.items()}


@cache
def _installed_paths() -> dict[str, str]:
    return {f".{name.removeprefix('.').lower()}": point.value for name, point in FORMATS.installed().items()}


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
        UserError: it fails or gives something else than a document.
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
        UserError: it raises anything else that does not come from the file itself.
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
