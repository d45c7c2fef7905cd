import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

import configs
from data_prep.base.errors import UsageError
from data_prep.base.settings import Settings, describe, load_settings, to_yaml
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded
from trainer.config.run_config import RunConfig


class Engine(Settings):
    cylinders: int = Field(4, ge=1, description="number of cylinders")
    rate: float = Field(0.1, description="litres a second")


class Car(Settings):
    name: str
    engine: Engine = Engine()
    wheels: tuple[int, ...] = (1, 2)
    fuel: Literal["petrol", "diesel", "none"] | None = Field("petrol", description="what it burns")


def written(folder: Path, text: str) -> Path:
    path = folder / "car.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_replace_the_files_values(tmp_path):
    path = written(tmp_path, "name: one\nengine:\n  rate: 1e-4\n")
    car = load_settings(Car, path, ["engine.cylinders=8", "wheels=[3,4]"])
    assert (car.engine.rate, car.engine.cylinders, car.wheels) == (1e-4, 8, (3, 4))


def test_the_printed_configuration_reads_back_to_the_same_value(tmp_path):
    car = Car(name="öne: two", engine=Engine(cylinders=2, rate=3e-5))
    assert load_settings(Car, written(tmp_path, to_yaml(car))) == car


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("name: a\nengin: {}\n", [], "unknown setting engin (did you mean engine?). Fix: use engine"),
        (
            "name: a\nengine: {cylinder: 3}\n",
            [],
            "unknown setting engine.cylinder (did you mean engine.cylinders?). Fix: use engine.cylinders",
        ),
        ("name: a\nrate: 3\n", [], "unknown setting rate (did you mean engine.rate?). Fix: use engine.rate"),
        ("just text\n", [], "has no mapping"),
        ("name: a\nlang: en\n", [], "unknown setting lang. Fix: use one of name, engine"),
        (
            "name: a\nengine: {just text: 3}\n",
            [],
            "unknown setting engine.just text. Fix: use one of engine.cylinders",
        ),
        ("engine: {}\n", [], "name is required and not set"),
        ("name: a\n", ["engine.cylinders=0"], "engine.cylinders=0 must be greater than or equal to 1"),
        ("name: a\n", ["engine.rate=.nan"], "engine.rate"),
        ("name: a\n", ["engine.cylinders=three"], 'engine.cylinders="three"'),
        ("name: a\n", ["cylinders"], "not of the form section.field=value"),
        ("name: ${oc.env:HOME}\n", [], "interpolation"),
        ('name: "a\\0b"\n', [], r"name='a\x00b' contains the character NUL"),
        ("- a\n- b\n", [], "has no mapping"),
        ("name: [unclosed\n", [], "not valid YAML"),
        ("name: !!python/object/apply:os.system ['true']\n", [], "not valid YAML"),
    ],
)
def test_a_wrong_configuration_is_one_paragraph_that_says_what_is_wrong(tmp_path, text, overrides, said):
    with pytest.raises(UsageError) as caught:
        load_settings(Car, written(tmp_path, text), overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_and_what_is_not_utf8_are_told_with_the_remedy(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    for path, code in (
        (tmp_path, "config-is-folder"),
        (tmp_path / "latin.yaml", "not-utf8"),
    ):
        with pytest.raises(UsageError, match=re.escape(str(path)), check=coded(code)):
            load_settings(Car, path)


def test_a_missing_file_names_the_presets_of_its_own_kind_only(tmp_path):
    said = {}
    for schema in RunConfig, PreparationConfig:
        with pytest.raises(UsageError) as caught:
            load_settings(schema, tmp_path / "none.yaml")
        said[schema] = set(re.findall(r"\w+", str(caught.value).partition("presets ")[2]))
    presets = {path.stem for path in Path(configs.__file__).parent.glob("*.yaml")}
    assert said[PreparationConfig] == {"data"} and said[RunConfig] == presets - {"data"}
    with pytest.raises(UsageError, match=r"give a YAML file\.$", check=coded("missing-config")):
        load_settings(Car, tmp_path / "none.yaml")


def test_help_lists_every_setting_with_default_and_description():
    lines = "\n".join(describe(Car))
    assert "name  (required)" in lines
    assert "engine.cylinders  (default 4)  number of cylinders" in lines
    assert 'fuel  (default "petrol", or "diesel", "none")  what it burns' in lines


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.cylinders=true", "engine.cylinders=true must be a number, got true"),
        ("engine.cylinders='6'", 'engine.cylinders="6" must be a number, got "6"'),
    ],
)
def test_a_number_is_no_truth_value_and_no_text(override, said):
    with pytest.raises(UsageError) as caught:
        load_settings(Car, None, ["name=x", override])
    assert said in str(caught.value)
    assert load_settings(Car, None, ["name=x", "engine.cylinders=6"]).engine.cylinders == 6
