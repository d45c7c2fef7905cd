"""The collector reads docstrings without importing, and keeps English prose only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from launch.demo import collect_docstrings
from launch.demo.collect_docstrings import docstrings, find_modules, is_prose, prose_paragraphs, write_corpus
from tests.support.error_codes import coded

LONG = " ".join(["The reader returns the next block of the file that was opened for it."] * 6)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_docstrings_of_module_classes_and_functions_come_in_order_and_no_code_runs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "one.py",
        '"""Module."""\nraise SystemExit("imported")\nclass A:\n    """Class."""\n    def f(self):\n'
        '        """Method.\n\n        Second.\n        """\nasync def g():\n    """Function."""\n'
        'x = """no docstring"""\n',
    )
    assert list(docstrings(path)) == ["Module.", "Class.", "Method.\n\nSecond.", "Function."]


@pytest.mark.parametrize("content", [b"def broken(:\n    '''text'''", b"\xff\xfe'''text'''", b"x = '''\0'''"])
def test_a_file_that_is_no_python_gives_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.py"
    path.write_bytes(content)
    assert list(docstrings(path)) == []


def test_code_tables_and_doctests_are_left_out_and_descriptions_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "one.py",
        '''"""Return the sum of the values that are given.

    >>> total = sum_of_the_values(in_the_list)
    6

    Parameters
    ----------
    values : list of int, optional
        The values to add, in the order of the file.

    Args:
        axis (int): The axis along which the values are added.

    ====  =====
    name  value
    ====  =====

    - This is the first of the remarks about it.
    - See :class:`~package.Thing` for the ``other`` way.
    """''',
    )
    assert prose_paragraphs(path) == [
        "Return the sum of the values that are given.",
        "The values to add, in the order of the file.",
        "The axis along which the values are added.",
        "This is the first of the remarks about it.",
        "See package.Thing for the other way.",
    ]


@pytest.mark.parametrize(
    "paragraph",
    [
        "x = 1; y = [2, 3]; z = {4: (5, 6)}",
        "int or None",
        "alpha beta gamma delta epsilon zeta eta theta.",
        "これは日本語の文章です and that is all there is of it.",
        "+--+--+ | a | b | +--+--+",
    ],
)
def test_a_paragraph_that_is_no_english_prose_is_refused(paragraph: str) -> None:
    assert not is_prose(paragraph)


def test_tests_are_skipped_and_sources_named(tmp_path: Path) -> None:
    library, packages = tmp_path / "library", tmp_path / "site-packages-of-a-test"
    write(library / "json" / "__init__.py", "")
    write(library / "site-packages" / "elsewhere.py", "")
    write(library / "test" / "support.py", "")
    write(packages / "package" / "core.py", "")
    write(packages / "package" / "tests" / "case.py", "")
    write(packages / "package" / "test_core.py", "")
    found = {(module.name, module.source) for module in find_modules(library, [packages])}
    assert found == {("json", "stdlib"), ("package.core", "package")}


def test_the_order_does_not_follow_the_alphabet(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / f"module_{number:02d}.py", "")
    names = [module.name for module in find_modules(tmp_path, [])]
    assert names != sorted(names) and len(names) == 50
    assert names == [module.name for module in find_modules(tmp_path, [])]


def test_one_module_is_one_document_and_a_paragraph_met_before_is_left_out(tmp_path: Path) -> None:
    first, second = LONG, LONG.replace("block", "line")
    write(tmp_path / "a.py", f'"""{first}"""\ndef f():\n    """{second}"""\ndef g():\n    """{first}"""\n')
    write(tmp_path / "b.py", f'"""{second}"""\n')
    output = tmp_path / "out" / "corpus.jsonl"
    modules = sorted(find_modules(tmp_path, []), key=lambda module: module.name)
    num_documents, sources = write_corpus(modules, str(output), 10**6)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"text": f"{first}\n\n{second}", "source": "stdlib", "module": "a"}]
    assert (num_documents, sources) == (1, {"stdlib": len(f"{first}\n\n{second}")})


def test_the_cap_ends_the_collection_at_the_document_that_reaches_it(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"m{number}.py", f'"""{LONG.replace("file", "f" + "i" * number + "le")}"""\n')
    output = tmp_path / "corpus.jsonl"
    num_documents, sources = write_corpus(find_modules(tmp_path, []), str(output), 1500)
    assert num_documents == 4
    assert 1500 <= sources.total() < 1500 + len(LONG) + 200
    assert len(output.read_text(encoding="utf-8").splitlines()) == 4


def test_no_docstrings_at_all_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "x = 1\n")
    with pytest.raises(UserError, check=coded("no-docstrings")):
        write_corpus(find_modules(tmp_path, []), str(tmp_path / "corpus.jsonl"), 100)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_a_wrong_cap_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        collect_docstrings.main(["--output", str(tmp_path / "corpus.jsonl"), "--max-bytes", "0"])
    assert caught.value.code == 2
