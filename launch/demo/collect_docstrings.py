"""Collect English prose without a download: the docstrings of the Python packages that are installed.

Every module of the standard library and of site-packages is read by `ast`, never imported. One module
becomes one document: the docstrings of the module, its classes and its functions in order, paragraph by
paragraph, as one line of JSON {"text", "source", "module"}. Paragraphs that are not prose (doctests,
tables, code) and repeated paragraphs are left out.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.arguments import at_least
from data_prep.base.errors import UserError, run_command
from data_prep.base.progress import Progress
from data_prep.storage import storage
from launch.options import add_dry_run, command_parser

ORDER_SEED = "clozeworks"
NUM_NAMED = 3
MIN_DOCUMENT_CHARACTERS = 300
SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "site-packages", "__pycache__", "_vendor", "vendor"})
STOP_WORDS = frozenset(
    "a an and are as at be by can for from has have if in into is it its may not of on or should that the "
    "their then there these they this to used was when where which will with you your".split()
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# A paragraph with such a line is doctest, code, a table, a directive or drawn.
NOT_PROSE_LINE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |@|\||\+[-=+]|\$ |```)", re.MULTILINE)
# Such a line is not prose itself, and its neighbors may be: a heading's underline, numpydoc's `name : type`.
BETWEEN_PROSE = re.compile(r"^\s*([-=~^*_`.\"#]{3,}|[*`\w.\[\]]+(, [*`\w.]+)* :( .*)?)$")
# What begins an item of a list or the description of a parameter; the rest of the line is prose perhaps.
ITEM_BEGINNING = re.compile(r"^\s*([-*+•] |\d+[.)] |#+ |:\w[^:]*: ?|[*`\w.]+ ?(\([^)]*\))?: )")
ROLE = re.compile(r":[\w:.+-]+:`~?([^`<>]+?)(?: *<[^`]*>)?`_{0,2}")
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


@dataclass(frozen=True)
class Module:
    """A Python source file by dotted name; `source` is its package, or `stdlib`."""

    name: str
    source: str
    path: Path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("collect_docstrings.py", __doc__)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="the file to write")
    parser.add_argument(
        "--max-bytes",
        type=at_least(1),
        default=20_000_000,
        metavar="N",
        help="stop after this many bytes of text (default %(default)s)",
    )
    add_dry_run(parser, "find the modules, but read and write nothing")
    options = parser.parse_args(arguments)
    modules = find_modules(Path(sysconfig.get_path("stdlib")), _site_packages())
    if options.dry_run:
        print(f"{options.output}: would read {len(modules):,} modules")
        return
    num_documents, sources = write_corpus(modules, options.output, options.max_bytes)
    num_bytes = sources.total()
    largest = ", ".join(f"{name} ({size / num_bytes:.0%})" for name, size in sources.most_common(NUM_NAMED))
    size = f"{num_documents:,} documents from {len(sources)} packages, {num_bytes / 1e6:.1f} MB of text"
    print(f"{options.output}: {size}; the largest: {largest}")


def find_modules(standard_library: Path, site_packages: Sequence[Path]) -> list[Module]:
    """All modules but tests, ordered by a hash of the name, so that any beginning is a fair sample."""
    modules: dict[str, Module] = {}
    for root in (standard_library, *site_packages):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if SKIPPED_FOLDERS.isdisjoint(parts) and not parts[-1].startswith("test_"):
                name = ".".join(parts).removesuffix(".__init__")
                source = "stdlib" if root == standard_library else parts[0]
                modules.setdefault(name, Module(name, source, path))
    return [modules[name] for name in sorted(modules, key=_rank)]


def write_corpus(modules: Sequence[Module], output: str, max_bytes: int) -> tuple[int, Counter[str]]:
    """Write documents until `max_bytes` of text are reached; returns their number, and the bytes of each package.

    Raises:
        UserError: no module had a docstring worth keeping.
    """
    num_documents, num_bytes, sources = 0, 0, Counter[str]()
    seen: set[bytes] = set()
    with (
        storage.local_write(output) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
        Progress("docstrings", max_bytes, "MB", 1e6) as progress,
    ):
        for module, paragraphs in zip(modules, _read_all(modules), strict=True):
            text = "\n\n".join(paragraph for paragraph in paragraphs if _is_new(paragraph, seen))
            if len(text) >= MIN_DOCUMENT_CHARACTERS:
                file.write(json.dumps({"text": text, "source": module.source, "module": module.name}) + "\n")
                num_documents, num_bytes = num_documents + 1, num_bytes + len(text.encode())
                sources[module.source] += len(text.encode())
                progress.add(len(text.encode()))
            if num_bytes >= max_bytes:
                break
        if num_documents == 0:
            raise UserError(
                "no installed Python module has docstrings",
                fix="install Python packages with source files, or prepare a corpus of your own",
                code="no-docstrings",
            )
    return num_documents, sources


def docstrings(path: Path) -> Iterator[str]:
    """Yield the cleaned docstrings of a source file in their order; none if it is not valid Python."""
    try:
        content = path.read_bytes()
        if b'"""' not in content and b"'''" not in content:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _docstrings_below(tree)


def prose_paragraphs(path: Path) -> list[str]:
    """The paragraphs of prose in a source file's docstrings, each on one line."""
    pieces = (plain(piece) for text in docstrings(path) for piece in split_paragraphs(text))
    return [piece for piece in pieces if is_prose(piece)]


def split_paragraphs(text: str) -> Iterator[str]:
    """Yield what blank lines, list items, names of parameters and headings divide, but no code and tables."""
    for paragraph in re.split(r"\n\s*\n", text):
        if NOT_PROSE_LINE.search(paragraph):
            continue
        piece: list[str] = []
        for line in paragraph.splitlines():
            between, item = BETWEEN_PROSE.match(line), ITEM_BEGINNING.match(line)
            if between or item:
                yield "\n".join(piece)
                piece = []
            if not between:
                piece.append(line[item.end() :] if item else line)
        yield "\n".join(piece)


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph reads as English sentences, judged by its signs and words."""
    words = WORD.findall(paragraph)
    if len(words) < (4 if paragraph.endswith((".", "!", "?", ":")) else 8):
        return False
    if not paragraph.isascii() and sum(map(str.isascii, paragraph)) < 0.97 * len(paragraph):
        return False
    num_plain = sum(map(len, words)) + paragraph.count(" ") + paragraph.count(",") + paragraph.count(".")
    num_stop_words = sum(word.lower() in STOP_WORDS for word in words)
    return (
        num_plain >= 0.9 * len(paragraph)
        and 3.0 <= sum(map(len, words)) / len(words) <= 8.5
        and num_stop_words >= max(1, 0.15 * len(words))
    )


def plain(paragraph: str) -> str:
    """The paragraph on one line, without the signs of reStructuredText and Markdown around words."""
    text = ROLE.sub(r"\1", paragraph)
    return " ".join(text.replace("`", "").replace("**", "").split())


def _read_all(modules: Sequence[Module]) -> Iterator[list[str]]:
    """Yield the paragraphs of each module in order; processes share the parsing, which takes the time."""
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), initializer=gc.disable) as executor:
        try:
            yield from executor.map(prose_paragraphs, [module.path for module in modules], chunksize=32)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _rank(name: str) -> bytes:
    return hashlib.sha256(f"{ORDER_SEED} {name}".encode()).digest()


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    if isinstance(node, DOCUMENTED):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield inspect.cleandoc(text)
    for child in getattr(node, "body", ()):
        if isinstance(child, DOCUMENTED):
            yield from _docstrings_below(child)


def _site_packages() -> list[Path]:
    return sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


if __name__ == "__main__":
    run_command(main)
