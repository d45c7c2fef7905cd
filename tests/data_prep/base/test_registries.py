"""The registry: a name stands for what is built in, for an entry point, or for `module:function`, in this order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.base import registries
from data_prep.base.errors import UsageError
from data_prep.base.registries import Registry
from tests.support.error_codes import coded

THINGS = Registry(
    where="thing {name!r}",
    import_fix="correct it",
    import_code="thing-not-importable",
    callable_fix="name a function",
    callable_code="thing-not-callable",
    unknown_code="unknown-thing",
    built_in={"own": abs, "lazy": "own_things:Group.first", "taken": "own_things:first"},
    entry_points="clozeworks.things",
    placeholders=("adapter:NAME",),
)


@pytest.fixture(autouse=True)
def _things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_things.py").write_text(
        "NUMBER = 1\ndef first(): return 1\ndef second(): return 2\nclass Group:\n    first = staticmethod(first)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        SimpleNamespace(name="installed", value="own_things:second", dist=SimpleNamespace(version="1.5")),
        SimpleNamespace(name="taken", value="own_things:second", dist=None),
    ]
    monkeypatch.setattr(
        registries.importlib.metadata, "entry_points", lambda group: points if group == "clozeworks.things" else []
    )


def test_a_name_is_built_in_or_installed_or_a_module_and_function() -> None:
    assert THINGS.find("own") == (abs, None)
    assert THINGS.find("lazy").value() == 1 and THINGS.find("taken").value() == 1
    found = THINGS.find("installed")
    assert found.value() == 2 and found.package_version == "1.5"
    assert THINGS.find("own_things:second").value() == 2 and THINGS.find("own_things:Group.first").value() == 1


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("instaled", "unknown-thing", r"did you mean installed\?.*adapter:NAME, installed, lazy, own, taken, or"),
        ("own_things:third", "thing-not-importable", "thing 'own_things:third'"),
        ("no_such_module:first", "thing-not-importable", "no_such_module"),
        (":first", "thing-not-importable", "':first'"),
        ("own_things:NUMBER", "thing-not-callable", "is int"),
    ],
)
def test_a_name_that_names_no_object_is_refused(name: str, code: str, text: str) -> None:
    with pytest.raises(UsageError, match=text, check=coded(code)):
        THINGS.find(name)


def test_a_registry_without_entry_points_looks_for_none() -> None:
    alone = Registry("thing {name}", "", "thing-not-importable", "", "thing-not-callable", "unknown-thing")
    assert alone.installed() == {}
    with pytest.raises(UsageError, check=coded("unknown-thing")):
        alone.find("installed")
