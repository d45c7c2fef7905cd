"""A setting arrives as it was typed: on the command line, in a YAML file, from Python, and printed and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import load_settings
from data_prep.base.settings import Settings, to_yaml
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded
from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.evaluation.suite_settings import load_suite

LOOKS_LIKE_SOMETHING_ELSE = [
    *("12345", "007", "3:30", "12:30:00", "1e3", "0x10", "0o7", "1_000", "2024-01-01", ".5", "+3", ".inf", "=", "<<"),
    *("yes", "no", "on", "off", "true", "False", "y", "~x", "1.0", "é", "a=b", "a.b=c", "a:b", "x#y"),
]
HELD_BY_YAML = [
    *("runs/exp #2", "runs/exp # 2", "&x y", "*x", "!t z", "!!int 3", "{a: b}", "[x]", "a: b", "@x", "%x", "`x`"),
    *(" x ", "'a' b", "'a' #b", '"', "--- x", "- x", "? x", "| x", "> x", "x:", "{a: 1, a: 2}"),
]


class Ship(Settings):
    name: str = "x"
    port: str | None = None
    berth: str | tuple[str, ...] = ()
    crew: tuple[str, ...] = ()
    rooms: dict[str, str] = Field({})
    length: int | None = None
    speed: float = 1.0
    is_fast: bool = False
    sails: Literal["auto", "no", "on"] | bool = "auto"
    duration: int | str = 0
    others: dict[str, Any] = Field({})


def ship(tmp_path: Path, text: str, *overrides: str) -> Ship:
    path = tmp_path / "ship.yaml"
    path.write_text(text, encoding="utf-8")
    return load_settings(Ship, path, overrides)


@pytest.mark.fault(
    row="68",
    fault="a text with ` #`, `&`, `*`, `!` or brackets, or one that looks like a number, date or Boolean value",
    required="a setting that is a text becomes what was typed",
)
@pytest.mark.parametrize("text", [*LOOKS_LIKE_SOMETHING_ELSE, *HELD_BY_YAML])
def test_row_68_a_text_of_the_command_line_is_what_was_typed(text: str, tmp_path: Path) -> None:
    read = load_settings(Ship, None, [f"name={text}", f"rooms.cabin={text}"])
    assert (read.name, read.rooms) == (text, {"cabin": text})
    assert ship(tmp_path, to_yaml(read)) == read, "printed and read again"


@pytest.mark.parametrize("text", LOOKS_LIKE_SOMETHING_ELSE)
def test_a_text_setting_of_a_file_is_read_as_typed(text: str, tmp_path: Path) -> None:
    content = f"name: {text}\nberth: {text}\ncrew: [{text}]\nrooms: {{{text.replace(':', '.')}: {text}}}\n"
    read = ship(tmp_path, content if text not in ("=", "<<", "a:b") else f"name: {text}\nberth: {text}\n")
    assert (read.name, read.berth) == (text, text)
    if read.crew:
        assert (read.crew, read.rooms) == ((text,), {text.replace(":", "."): text})


@pytest.mark.parametrize("text", ["runs/exp #2", "&x y", "*x", "!t z", "{a: b}", "[x]", "a: b", "@x", "%x"])
def test_a_text_of_a_file_that_yaml_would_change_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ship(tmp_path, f"name: {text}\n")
    assert caught.value.code in ("text-cut-by-comment", "invalid-yaml", "invalid-setting")


def test_comments_and_anchors_of_a_file_follow_yaml(tmp_path: Path) -> None:
    read = ship(tmp_path, "# a ship\nname: &n one  # its name\nport: *n\nlength: 3 #meters\nspeed: 1e-4 # slow\n")
    assert (read.name, read.port, read.length, read.speed) == ("one", "one", 3, 1e-4)
    base = ship(tmp_path, "others: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}\n")
    assert base.others == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize("text", ["3 #x", "&a 3", "!!int 3", "--- 3", "3 # x"])
def test_a_number_with_something_that_yaml_drops_is_refused(text: str) -> None:
    with pytest.raises(UsageError, check=coded("value-cut-by-yaml")):
        load_settings(Ship, None, [f"length={text}"])


@pytest.mark.parametrize("text", ["010", "3:30", "0o7", "2024-01-01", "yes", "'3'"])
def test_unusual_spellings_of_numbers_are_refused(text: str, tmp_path: Path) -> None:
    for read in (lambda: load_settings(Ship, None, [f"length={text}"]), lambda: ship(tmp_path, f"length: {text}\n")):
        with pytest.raises(UsageError, check=coded("invalid-setting")):
            read()


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("invalid-yaml"), match="duplicate key name"):
        ship(tmp_path, "name: a\nname: b\n")
    with pytest.raises(UsageError, check=coded("invalid-override"), match="duplicate key a"):
        load_settings(Ship, None, ["others={a: 1, a: 2}"])


def test_quotes_around_the_whole_text_are_those_of_yaml(tmp_path: Path) -> None:
    assert load_settings(Ship, None, ["name='a: b'", 'port="a #b"']) == Ship(name="a: b", port="a #b")
    assert ship(tmp_path, "name: 'a #b'\nport: \"007\"\n") == Ship(name="a #b", port="007")


@pytest.mark.parametrize("text", ["", "~", "null"])
def test_a_text_of_a_file_that_must_be_set_is_not_null(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("invalid-setting"), match="name=null must be a string"):
        ship(tmp_path, f"name: {text}\n")
    assert load_settings(Ship, None, ["name=null"]).name == "null"


@pytest.mark.parametrize("text", ["", "~", "null"])
def test_a_text_that_may_be_missing_is_unset_by_null(text: str, tmp_path: Path) -> None:
    assert load_settings(Ship, None, ["port=x", f"port={text}"]).port is None
    assert ship(tmp_path, f"port: {text}\n").port is None


def test_other_types_read_their_own_words(tmp_path: Path) -> None:
    text = "sails: no\nis_fast: yes\nlength: 1_000\nspeed: 2\nduration: 3\n"
    for read in (ship(tmp_path, text), load_settings(Ship, None, [*text.replace(": ", "=").split()])):
        assert (read.sails, read.is_fast, read.length, read.speed, read.duration) == ("no", True, 1000, 2.0, 3)
    assert load_settings(Ship, None, ["sails=yes", "duration=3 epochs"]).model_dump(include={"sails", "duration"}) == {
        "sails": True,
        "duration": "3 epochs",
    }
    assert load_settings(Ship, None, ["berth=[a, 'b']", "crew=[07, yes]"]) == Ship(berth=("a", "b"), crew=("07", "yes"))


@pytest.mark.parametrize("text", ["no", "1_000", "0x_1F", "1_0.5"])
def test_yaml_1_1_values_such_as_yes_are_refused_in_free_form_values(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, check=coded("ambiguous-value"), match=f"others.language={text}"):
        ship(tmp_path, f"others: {{language: {text}}}\n")
    filters = ["documents.filters=[{name: language, keep: [en, no]}]"]
    with pytest.raises(UsageError, check=coded("ambiguous-value"), match=r"documents.filters.0.keep.1=no"):
        load_settings(PreparationConfig, None, filters)
    assert ship(tmp_path, "others: {language: 'no', flag: false, id: 007}\n").others == {
        "language": "no",
        "flag": False,
        "id": "007",
    }


def test_values_from_python_are_not_read_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("output_dir: x\ndata: {shards: y}\n")
    sizes = {"training": {"max_steps": 3, "micro_batch_tokens": 512, "global_batch_tokens": 512}}
    for text in (*LOOKS_LIKE_SOMETHING_ELSE, *HELD_BY_YAML, "'q'", "a\nb", '"a: b"'):
        config = load_config(
            tmp_path / "run.yaml", {**sizes, "tracking.experiment": text, "tracking": {"run_name": text}}
        )
        assert (config.tracking.experiment, config.tracking.run_name) == (text, text)
    shards = [{"url": Path("a #b"), "weight": 1}]
    assert load_config(tmp_path / "run.yaml", {**sizes, "data.shards": shards}).data.components[0].url == "a #b"


def test_an_index_in_brackets_is_an_index() -> None:
    overrides = ["training.stages=[{steps: 5}, {name: 'on', steps: 6}]"]
    sizes = ["training.micro_batch_tokens=512", "training.global_batch_tokens=512", "output_dir=x", "data.shards=y"]
    for item in ("training.stages[1]", "training.stages.1", "training.stages.on", "training.stages[on]"):
        stages = load_settings(RunConfig, None, [*sizes, *overrides, f"{item}.steps=9"]).training.stages
        assert [(stage.name, stage.duration.steps) for stage in stages] == [(None, 5), ("on", 9)]


def test_settings_of_a_fine_tuning_in_a_suite_are_texts_as_typed(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: 007\ntasks:\n  1e3:\n    files: {train: 2024, valid: yes}\n    metrics: [valid/accuracy]\n"
        "    settings: {header: false, epochs: 2, columns: {text: 0, label: 010}}\n"
    )
    suite = load_suite(path, ["tasks.1e3.settings.columns.pair=1"])
    assert suite.name == "007" and suite.tasks["1e3"].files == {"train": "2024", "valid": "yes"}
    assert suite.tasks["1e3"].settings == {
        "header": False,
        "epochs": 2,
        "columns": {"text": "0", "label": "010", "pair": "1"},
    }


def test_a_file_replaces_values_of_its_base_and_of_the_base_of_that(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("name: one\nlength: 3\ncrew: [a, b]\nrooms: {cabin: x, hold: y}\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\nspeed: 2\ncrew: [c]\n")
    read = ship(tmp_path, "base: two.yaml\nname: 007\nrooms: {hold: z}\nlength: null\n", "speed=3")
    assert read == Ship(name="007", speed=3.0, crew=("c",), rooms={"cabin": "x", "hold": "z"}, length=None)
    assert "base" not in to_yaml(read)


@pytest.mark.parametrize(
    ("base", "code"),
    [
        ("ship.yaml", "invalid-base"),
        ("other.yaml", "invalid-base"),  # whose base is ship.yaml
        ("none.yaml", "missing-config"),
        ("[a, b]", "invalid-base"),
        ("''", "invalid-base"),
        (".", "config-is-folder"),
        ("text.yaml", "config-not-a-mapping"),
        ("wrong.yaml", "invalid-setting"),
    ],
)
def test_a_base_that_cannot_be_is_refused(base: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base: ship.yaml\n")
    (tmp_path / "text.yaml").write_text("a text\n")
    (tmp_path / "wrong.yaml").write_text("length: long\n")
    with pytest.raises(UsageError, match=r"ship\.yaml|text\.yaml", check=coded(code)):
        ship(tmp_path, f"base: {base}\nname: x\n")


def test_a_base_is_only_a_setting_of_files() -> None:
    with pytest.raises(UsageError, check=coded("unknown-setting")):
        load_settings(Ship, None, ["base=one"])
