"""From a name or a function to a filter, and what its identity is made of."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document
from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import FilterSettings, PreparationConfig
from data_prep.documents.formats.format_registry import Formats
from data_prep.filters.chain import SourceReading, filter_identities
from data_prep.filters.registry import described_filters, filter_settings, load_filters
from data_prep.storage import remote_reader, storage
from tests.support.error_codes import coded
from tests.support.preparations import config_of, filters_fingerprint

SHORT, LONG = Document("short"), Document("x" * 100)
LIMIT = 10
MODULE = """
class Shorter:
    version = 3
    def __init__(self, characters): self.characters = characters
    def __call__(self, document): return "long" if len(document.text) > self.characters else None

def shorter(document, characters=10): return "long" if len(document.text) > characters else None

class Broken:
    def __init__(self): 1 / 0

class Empty: ...

NUMBER = 5
"""


class ReadWhileWritten:
    """Reads a file that somebody writes again before each of the first `times` readings ends."""

    version = 1
    readings = 0

    def __init__(self, path: str, times: int) -> None:
        self.text = Path(path).read_text()
        type(self).readings += 1
        if type(self).readings <= times:
            Path(path).write_text(f"text {type(self).readings}")

    def __call__(self, document: Document) -> str | None:
        return "listed" if document.text == self.text else None


def uses_limit(document: Document) -> str | None:
    return "long" if _length(document) > LIMIT else None


def _length(document: Document) -> int:
    return len(document.text)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own_filters.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_filters", None)
    return path


def outcomes(**entry: Any) -> list[Any]:
    (step,) = load_filters([filter_settings(entry)])
    return [step.apply(SHORT), step.apply(LONG)]


def test_a_module_may_annotate_its_filters_and_transforms_with_the_protocols(module: Path) -> None:
    module.write_text(
        """
from data_prep.filters.protocol import Filter, Transform

def shorter(document): return "long" if len(document.text) > 10 else None

def same(document): return document

steps: tuple[Filter, Transform] = (shorter, same)
"""
    )
    assert outcomes(name="own_filters:shorter") == [None, "long"]
    assert outcomes(name="own_filters:same") == [SHORT, LONG]


@pytest.mark.usefixtures("module")
def test_functions_and_classes_take_parameters() -> None:
    assert outcomes(name="own_filters:shorter") == [None, "long"]
    assert outcomes(name="own_filters:shorter", characters=100) == [None, None]
    assert outcomes(name="own_filters:Shorter", characters=3) == ["long", "long"]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"name": "nothing"}, "unknown-filter"),
        ({"name": "no_such_module:keep"}, "filter-not-importable"),
        ({"name": "own_filters:absent"}, "filter-not-importable"),
        ({"name": "own_filters:NUMBER"}, "filter-not-callable"),
        ({"name": "own_filters:shorter", "letters": 3}, "filter-parameters"),
        ({"name": "own_filters:Shorter"}, "filter-parameters"),
        ({"name": "own_filters:Broken"}, "filter-failed"),
        ({"name": "own_filters:Empty"}, "filter-not-callable"),
        ({"name": "builtins:len"}, "filter-without-version"),
        ({"name": "own_filters:shorter", "characters": object()}, "filter-parameters"),
        ({"name": "own_filters:shorter", "characters": float("nan")}, "filter-parameters"),
        ({"nam": "language"}, "missing-setting"),
    ],
)
def test_a_wrong_entry_is_refused(entry: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError, check=coded(code)):
        load_filters([filter_settings(entry)])


def test_a_refused_entry_shows_the_correct_entry(tmp_path: Path) -> None:
    for entry, code, expected in (
        ({"name": "langage"}, "unknown-filter", "did you mean language"),
        ({"name": "metadata", "kept": "a > 1"}, "filter-parameters", "it takes keep"),
        ({"name": "url_blocklist", "domains": str(tmp_path / "none.txt")}, "unreadable-file", "filter 'url_blocklist'"),
        ({"name": "decontamination", "sets": str(tmp_path / "n.txt")}, "input-not-found", "filter 'decontamination'"),
    ):
        with pytest.raises(UsageError, match=expected, check=coded(code)):
            load_filters([filter_settings(entry)])
    with pytest.raises(UsageError, match=r"Fix: write {name: language}", check=coded("invalid-setting")):
        config_of("a.jsonl", "documents.filters=[language]")


@pytest.mark.long
def test_the_identity_has_name_parameters_version_and_source(module: Path) -> None:
    (before,) = described_filters([FilterSettings(name="own_filters:Shorter", characters=3)])  # type: ignore[call-arg]
    assert before["name"] == "own_filters:Shorter" and before["parameters"] == {"characters": 3}
    assert before["version"] == "3" and len(before["source_sha256"]) == 64
    fingerprint = filters_fingerprint([filter_settings("own_filters:shorter")])
    assert fingerprint != filters_fingerprint([filter_settings("own_filters:shorter", characters=11)])
    assert fingerprint != filters_fingerprint([filter_settings("own_filters:shorter", version="2")])
    module.write_text(MODULE + "# changed\n")
    described = "described_filters([filter_settings('own_filters:shorter')])"
    command = f"from data_prep.filters.registry import *; print(fingerprint_of({described}))"
    path = {"PYTHONPATH": f"{module.parent}:{Path(__file__).parents[3]}"}
    changed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, env=path)
    assert changed.stdout.strip() not in ("", fingerprint)


def test_an_installed_filter_is_found_by_its_entry_point(module: Path) -> None:
    folder = module.parent / "own-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text("[clozeworks.filters]\nshorter = own_filters:shorter\n")
    importlib.invalidate_caches()
    assert outcomes(name="shorter", characters=2) == ["long", "long"]
    assert described_filters([filter_settings("shorter")])[0]["version"] == "1.5"


def test_a_notebook_function_is_digested_with_the_globals_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    first = filter_settings(uses_limit)
    (step,) = load_filters([first])
    assert [step.apply(SHORT), step.apply(LONG)] == [None, "long"]
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 11)
    assert filter_settings(uses_limit).function_digest != first.function_digest, "a global that it uses"
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 10)
    assert filter_settings(uses_limit).function_digest == first.function_digest
    monkeypatch.setattr(sys.modules[__name__], "_length", lambda document: 0)
    assert filter_settings(uses_limit).function_digest != first.function_digest, "a function that it uses"


def test_a_default_value_counts_by_its_value_or_needs_a_version() -> None:
    def with_default(words: object) -> Callable[[Document], str | None]:
        def keep(document: Document, words: object = words) -> str | None:
            return None if words else "none"

        return keep

    digests = [filter_settings(with_default(words)).function_digest for words in ({"a", "b"}, {"b", "a"}, {"a"})]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(UserError, check=coded("filter-without-version")):
        filter_settings(with_default(object()))
    with pytest.raises(UserError, check=coded("filter-not-callable"), match="a filter is int"):
        filter_settings(3)  # type: ignore[arg-type]


def test_functions_of_one_name_and_version_are_not_confused() -> None:
    outcomes = []
    for limit in (1, 1000):
        names: dict[str, Any] = {"limit": limit}
        exec("def made(document): return 'long' if len(document.text) > limit else None", names)
        (step,) = load_filters([filter_settings(names["made"], version=1)])
        outcomes.append(step.apply(SHORT))
    assert outcomes == ["long", None]
    assert FilterSettings(name="a:b", version=2).version == "2"  # type: ignore[arg-type]


def test_a_function_whose_source_cannot_be_digested_needs_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", object())
    with pytest.raises(UserError, check=coded("filter-without-version")):
        filter_settings(uses_limit)
    assert filter_settings(uses_limit, version=2).version == "2"
    names: dict[str, Any] = {}
    exec("def made(document): return None", names)
    with pytest.raises(UserError, check=coded("filter-without-version")):
        filter_settings(names["made"])
    names["made"].version = "7"
    assert filter_settings(names["made"]).version == "7"


class Longest:
    """A filter with a state."""

    def __init__(self, characters: Any) -> None:
        self.characters = characters

    def __call__(self, document: Document) -> str | None:
        return None if len(document.text) <= self.characters else "too long"


class Words(set[str]):
    def __call__(self, document: Document) -> str | None:
        return "listed" if document.text in self else None


class Slotted(Longest):
    __slots__ = ("unit",)

    def __init__(self, unit: str) -> None:
        super().__init__(3)
        self.unit = unit


def longer(document: Document, limit: int) -> str | None:
    return None if len(document.text) <= limit else "too long"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(longer, limit=1), functools.partial(longer, limit=2)),
        (functools.partial(longer), functools.partial(Longest.__call__)),
        (functools.partial(Longest(1), limit=1), functools.partial(Longest(2), limit=1)),
        (Words({"a"}), Words({"b"})),
        (Slotted("a"), Slotted("b")),
    ],
)
def test_state_outside_the_attributes_of_an_object_is_digested(one: Any, other: Any) -> None:
    digests = [filter_settings(each).function_digest for each in (one, one, other)]
    assert digests[0] is not None and digests[0] == digests[1] != digests[2]
    with pytest.raises(UserError, check=coded("filter-without-version")):
        filter_settings(functools.partial(longer, limit=object()))


def test_an_object_counts_with_its_class_and_its_attributes() -> None:
    digests = [filter_settings(Longest(limit)).function_digest for limit in (3, 3, 4)]
    assert digests[0] is not None and digests[0] == digests[1] != digests[2]
    versions = [filter_settings(Longest(limit), version=1) for limit in (3, 4)]
    assert versions[0].function_digest != versions[1].function_digest, "a version hides no change of an attribute"
    with pytest.raises(UserError, check=coded("filter-without-version")):
        filter_settings(Longest(object()))
    assert filter_settings(Longest(object()), version=1).function_digest is None


@pytest.mark.parametrize("parameters", [{"domains": "{}"}, {"urls": "{}"}, {"sets": "{}"}, {"sets": {"quiz": "{}"}}])
@pytest.mark.parametrize("name", ["{home}/list.txt", "~/list.txt"])
def test_steps_are_made_once_until_a_file_of_their_parameters_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: dict[str, Any], name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "list.txt"
    path.write_text("a.org\n")
    given = json.loads(json.dumps(parameters).replace("{}", name.format(home=tmp_path)))
    entry = filter_settings("decontamination" if "sets" in given else "url_blocklist", **given)
    steps = load_filters([entry])
    assert load_filters([entry]) == steps
    path.write_text("b.org\n")
    assert load_filters([entry]) != steps


def test_a_list_on_a_server_that_states_only_its_size_is_compared_by_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text("a.org\n")
    monkeypatch.setattr(storage, "stamp", lambda url: remote_reader.tag({"size": 6}))
    entry = filter_settings("url_blocklist", domains=str(tmp_path / "list.txt"))
    steps = load_filters([entry])
    assert load_filters([entry]) == steps
    (tmp_path / "list.txt").write_text("b.org\n")
    assert load_filters([entry]) != steps


@pytest.mark.parametrize("name", ["{home}/list.txt", "~/list.txt"])
def test_the_content_of_a_file_that_a_parameter_names_is_in_the_identity(
    module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    module.write_text(MODULE + "def listed(document, options=None): return None\n")
    path = tmp_path / "list.txt"
    entry = filter_settings("own_filters:listed", options={"lists": [Path(name.format(home=tmp_path)), "no file"]})
    described = []
    for text in ("", "a", "b"):
        if text:
            path.write_text(text)
        described += described_filters([entry])
    assert "files" not in described[0] and described[1]["files"].keys() == {str(path)}
    assert described[1]["files"] != described[2]["files"]


def test_a_worker_makes_the_steps_of_a_plan_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    source = {"name": "web", "input": "a.jsonl", "filters": [{"name": "url_blocklist", "domains": str(path)}]}
    config = PreparationConfig.model_validate({"sources": [source], "documents": {"url_field": "url"}})
    path.write_text("a.org\n")
    reading = SourceReading.of(config, filter_identities(config), Formats())
    chain, in_a_worker = reading.filters(0), pickle.loads(pickle.dumps(reading))
    path.write_text("b.org\n")
    assert reading.filters(0) is chain, "work that has begun goes on with what was planned"
    with pytest.raises(UserError, check=coded("filters-changed")):
        in_a_worker.filters(0)


def test_the_identity_of_a_filter_is_that_of_the_file_that_it_read(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    for times in (0, 1):
        path.write_text("text 0")
        ReadWhileWritten.readings = 0
        name = f"{ReadWhileWritten.__module__}:ReadWhileWritten"
        (step,) = load_filters([filter_settings(name, path=str(path), times=times)])
        assert step.apply(Document(f"text {times}")) == "listed" and step.apply(Document(f"text {1 - times}")) is None
        assert step.identity["files"] == {str(path): hashlib.sha256(f"text {times}".encode()).hexdigest()}
    ReadWhileWritten.readings = 0
    with pytest.raises(UserError, match="changed while it was loaded", check=coded("filter-files-changed")):
        load_filters([filter_settings(name, path=str(path), times=99)])
