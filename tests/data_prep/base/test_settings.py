import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

import configs
from data_prep.base.errors import UsageError
from data_prep.base.load_settings import load_settings
from data_prep.base.logs import logger
from data_prep.base.settings import SettingError, Settings, describe, flatten, to_yaml
from data_prep.base.yaml_values import read_yaml
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded
from tests.workarounds.new_process import run_python
from trainer.config.run_config import RunConfig


class Engine(Settings):
    cylinders: int = Field(4, ge=1, description="number of cylinders")
    rate: float = Field(0.1, description="liters per second")

    @model_validator(mode="after")
    def _rate(self) -> "Engine":
        if self.rate > self.cylinders:
            problem = f"engine.rate={self.rate} exceeds engine.cylinders={self.cylinders}"
            raise SettingError(problem, fix="lower engine.rate", code="too-fast")
        return self


class Trailer(Settings):
    length: float


class Car(Settings):
    name: str
    engine: Engine = Engine()
    wheels: tuple[int, ...] = (1, 2)
    fuel: Literal["petrol", "diesel", "none"] | None = Field("petrol", description="what it burns")
    trailer: Trailer | None = None

    @classmethod
    def explain_unknown(cls, name: str, value: object, values: object) -> str | None:
        return f"set engine.cylinders to {value} / 20" if name == "horses" else None


def written(folder: Path, text: str) -> Path:
    path = folder / "car.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_replace_the_files_values(tmp_path):
    path = written(tmp_path, "name: one\nengine:\n  rate: 1e-4\n")
    car = load_settings(Car, path, ["engine.cylinders=8", "wheels=[3,4]"])
    assert (car.engine.rate, car.engine.cylinders, car.wheels) == (1e-4, 8, (3, 4))


def test_an_override_with_two_values_is_warned_about_and_the_last_one_counts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger("tests").parent, "propagate", True)  # to what pytest looks at
    path = written(tmp_path, "name: a\n")
    with caplog.at_level("WARNING", "clozeworks"):
        assert load_settings(Car, path, ["engine.cylinders=8", "engine.cylinders=8"]).engine.cylinders == 8
        assert not caplog.records
        assert load_settings(Car, path, ["engine.cylinders=8", "engine.cylinders=6"]).engine.cylinders == 6
    assert "engine.cylinders is given twice" in caplog.text


def test_the_printed_configuration_reads_back_to_the_same_value(tmp_path):
    car = Car(name="öne: two", engine=Engine(cylinders=2, rate=3e-5))
    assert load_settings(Car, written(tmp_path, to_yaml(car))) == car


@pytest.mark.parametrize(
    ("text", "overrides", "code", "shown"),
    [
        ("name: a\nengin: {}\n", [], "unknown-setting", "engin (did you mean engine?)"),
        ("name: a\nengine: {cylinder: 3}\n", [], "unknown-setting", "engine.cylinder (did you mean engine.cylinders?)"),
        ("name: a\nrate: 3\n", [], "unknown-setting", "rate (did you mean engine.rate?)"),
        ("name: a\n", ["engin.cylinders=3"], "unknown-setting", "Fix: write engine.cylinders=3"),
        ("name: a\n", ["horses=3e1"], "unknown-setting", "Fix: set engine.cylinders to 3e1 / 20"),
        ("name: a\n", ["engine.rate=fast"], "invalid-setting", "must be a number. Fix: write a number such as 1e-4"),
        ("name: a\nlang: en\n", [], "unknown-setting", "lang. Fix: use one of name, engine"),
        ("name: a\nengine: {just text: 3}\n", [], "unknown-setting", "engine.just text. Fix: use one of engine.cyl"),
        ("name: a\nhorses: 3\n", [], "unknown-setting", "horses. Fix: set engine.cylinders to 3 / 20"),
        ("just text\n", [], "config-not-a-mapping", "car.yaml"),
        ("- a\n- b\n", [], "config-not-a-mapping", "car.yaml"),
        ("engine: {}\n", [], "missing-setting", "name is required"),
        ("name: a\n", ["engine.cylinders=0"], "invalid-setting", "engine.cylinders=0 must be at least 1"),
        ("name: a\n", ["engine.cylinders=1.5"], "invalid-setting", "engine.cylinders=1.5 must be an integer"),
        ("name: a\n", ["engine.rate=.nan"], "invalid-setting", "engine.rate=NaN must be a finite number"),
        ("name: a\n", ["engine.cylinders=three"], "invalid-setting", 'engine.cylinders="three" must be a number'),
        ("name: a\n", ["engine.cylinders='6'"], "invalid-setting", 'engine.cylinders="6" must be a number'),
        ("name: a\n", ["engine.cylinders=true"], "invalid-setting", "engine.cylinders=true must be a number"),
        ("name: a\n", ["fuel=coal"], "invalid-setting", "fuel=\"coal\" must be one of 'petrol', 'diesel' or 'none'"),
        ("name: a\n", ["wheels=3"], "invalid-setting", "wheels=3 must be a list"),
        ("name: a\n", ["engine=3"], "invalid-setting", "engine=3 must be a section of settings"),
        ("name: a\n", ["engine.rate=9"], "too-fast", "engine.rate=9.0 exceeds engine.cylinders=4. Fix: lower"),
        ("name: a\n", ["cylinders"], "invalid-override", "'cylinders'"),
        ("name: ${oc.env:HOME}\n", [], "interpolation-in-config", "name='${oc.env:HOME}'"),
        ('name: "a\\0b"\n', [], "nul-in-config", r"name='a\x00b'"),
        ("name: [unclosed\n", [], "invalid-yaml", "line 2"),
        ("name: !!python/object/apply:os.system ['true']\n", [], "invalid-yaml", "car.yaml"),
    ],
)
def test_a_wrong_configuration_is_one_paragraph_with_value_fix_and_code(tmp_path, text, overrides, code, shown):
    with pytest.raises(UsageError, check=coded(code)) as caught:
        load_settings(Car, written(tmp_path, text), overrides)
    assert shown in str(caught.value) and "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


STAGES = (
    "output_dir: x\ndata: {shards: y}\n"
    "training: {micro_batch_tokens: 512, global_batch_tokens: 512, stages: [{steps: 5}, {name: decay, tokens: 9000}]}\n"
)


@pytest.mark.parametrize("item", ["1", "decay"])
def test_an_override_reaches_an_item_of_a_list_by_index_and_by_name(tmp_path, item):
    path = written(tmp_path, STAGES)
    overrides = [f"training.stages.{item}.tokens=80000", f"training.stages.{item}.schedule.name=cosine"]
    stages = load_settings(RunConfig, path, [*overrides, "training.seed=3"]).training.stages
    assert (str(stages[0].duration), str(stages[1].duration), stages[1].name) == ("5 steps", "80000 tokens", "decay")
    assert stages[1].schedule is not None and stages[1].schedule.name == "cosine"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.shards=[{url: y, weight: 0}]", "data.shards.0.weight=0 must be greater than 0.0. Fix: change data.sha"),
        ("data.shards=[y]", 'data.shards.0="y" must be a mapping. Fix: write it as {setting: value, ...}'),
        ("data.shards={url: y}", 'data.shards={"url": "y"} must be a string or a list. Fix: change data.shards'),
        ("training.stages={steps: 5}", 'training.stages={"steps": 5} must be a list. Fix: change training.stages'),
        (
            "training.stages.decay=[5]",
            "training.stages.1=[5] must be a mapping. Fix: write it as {setting: value, ...}",
        ),
        ("data=[5]", "data=[5] must be a section of settings. Fix: write data.SETTING=value"),
        ("training.stages.decay.schedul.name=cosine", 'Fix: write training.stages.1.schedule.name="cosine"'),
        ("training.stages.decay.data={shards: y, mask_unit: word}", "Fix: write training.stages.1.mask_unit"),
        (
            "training.stages.decay.schedule={name: cosine, decay_steps: 3}",
            "training.stages.1: schedule.decay_steps=3 has no effect with schedule.name=cosine",
        ),
    ],
)
def test_a_wrong_value_of_a_list_is_named_as_it_is_written(tmp_path, override, problem):
    with pytest.raises(UsageError, match=re.escape(problem)) as caught:
        load_settings(RunConfig, written(tmp_path, STAGES), [override])
    assert "settings are wrong" not in str(caught.value), "one mistake is one problem"


@pytest.mark.parametrize("item", ["2", "warmup", "-1"])
def test_an_override_of_an_item_that_does_not_exist_lists_the_items(tmp_path, item):
    path = written(tmp_path, STAGES)
    with pytest.raises(UsageError, check=coded("invalid-override"), match=re.escape("0, 1 (decay)")):
        load_settings(RunConfig, path, [f"training.stages.{item}.tokens=80000"])


def test_a_preset_with_a_typing_error_is_suggested():
    with pytest.raises(UsageError, check=coded("missing-config"), match=re.escape("(did you mean tiny_cpu?)")):
        load_settings(RunConfig, "tiny-cpu")


def test_a_dotted_key_in_a_file_is_answered_with_the_nested_form(tmp_path):
    path = written(tmp_path, "output_dir: x\ndata.shards: y\noptimizer.learning_rate: 0.5\n")
    with pytest.raises(UsageError) as caught:
        load_settings(RunConfig, path)
    assert "nest it: optimizer: {learning_rate: 0.5}" in str(caught.value)
    assert 'nest it: data: {shards: "y"}' in str(caught.value) and "did you mean" not in str(caught.value)


def test_several_mistakes_are_listed_in_one_error(tmp_path):
    with pytest.raises(UsageError, check=coded("invalid-setting")) as caught:
        load_settings(Car, None, ["name=a", "engine.cylinders=0", "wings=2"])
    assert "cylinders=0" in str(caught.value) and "unknown setting wings" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (["engine.cylinders=0"], "the command line: engine.cylinders=0"),
        (["wings=2"], "the command line: unknown setting wings"),
        (["wheels=[1,x]"], "the command line: wheels.1="),
        ([], "car.yaml: fuel="),
        (["name=b"], "car.yaml: fuel="),
        (["engine.cylinders=0", "fuel=wood"], "the command line: 2 settings are wrong"),
        (["engine.cylinders=0", "name=b"], "the command line and car.yaml: 2 settings are wrong"),
    ],
)
def test_a_wrong_value_is_named_with_the_place_where_it_stands(tmp_path, overrides, origin):
    is_of_file = "car.yaml" in origin
    path = written(tmp_path, "name: a\nfuel: wood" if is_of_file else "name: a")
    path = path.rename(tmp_path / "car.yaml")
    with pytest.raises(UsageError) as refused:
        load_settings(Car, path, overrides)
    assert str(refused.value).replace(f"{tmp_path}/", "").startswith(origin)


def test_a_directory_and_a_file_that_is_not_utf8_have_codes_of_their_own(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    for path, code, shown in (
        (tmp_path, "config-is-folder", str(tmp_path)),
        (tmp_path / "latin.yaml", "not-utf8", "byte 9"),
    ):
        with pytest.raises(UsageError, check=coded(code), match=re.escape(shown)):
            load_settings(Car, path)


def test_a_missing_file_names_the_presets_of_its_own_kind_only(tmp_path):
    said = {}
    for schema in RunConfig, PreparationConfig:
        with pytest.raises(UsageError) as caught:
            load_settings(schema, tmp_path / "none.yaml")
        said[schema] = set(re.findall(r"\w+", str(caught.value).partition("presets ")[2]))
    presets = {path.stem for path in Path(configs.__file__).parent.glob("*.yaml")}
    assert said[PreparationConfig] == {"data"} and said[RunConfig] == presets - {"data", "glue"}
    with pytest.raises(UsageError, check=coded("missing-config"), match="give a YAML file.$"):
        load_settings(Car, tmp_path / "none.yaml")


def test_help_lists_every_setting_with_default_and_description():
    lines = "\n".join(describe(Car))
    assert "name  (required)" in lines
    assert "trailer.length  (required if trailer is set)" in lines
    assert "engine.cylinders  (default 4)  number of cylinders" in lines
    assert 'fuel  (default "petrol", or "diesel", "none")  what it burns' in lines


def test_a_quoted_number_is_not_a_number_and_a_plain_one_is():
    assert load_settings(Car, None, ["name=x", "engine.cylinders=6"]).engine.cylinders == 6


def test_a_command_without_a_configuration_imports_no_yaml_library() -> None:
    code = (
        "import sys; from data_prep.config.preparation_config import PreparationConfig; "
        "from data_prep.base.load_settings import load_settings; load_settings(PreparationConfig, None); "
        "print(sorted({'yaml', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_nested_settings_are_flat_under_dotted_names():
    values = {"a": {"b": 1, "empty": {}, "c": {"d": [1, 2]}}, "parts": [{"url": "x"}, 3, {}], "none": None}
    inner = {"a.b": 1, "a.empty": {}, "a.c.d": [1, 2]}
    assert dict(flatten(values)) == inner | {"parts": values["parts"], "none": None}
    opened = {"parts.0.url": "x", "parts.1": 3, "parts.2": {}}
    assert list(flatten(values, with_items=True)) == list((inner | opened | {"none": None}).items())
    assert list(flatten({"a": 1}, "tag.")) == [("tag.a", 1)] and list(flatten({}, "tag.")) == []


def test_aliases_that_repeat_too_much_are_refused_and_others_are_read(tmp_path):
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 7)]
    with pytest.raises(UsageError, check=coded("invalid-yaml")):
        read_yaml(written(tmp_path, "\n".join(["a0: &a0 [1]", *lines])))
    with pytest.raises(UsageError, check=coded("invalid-yaml")):
        read_yaml(written(tmp_path, "a: &a [1, *a]"))
    assert read_yaml(written(tmp_path, "\n".join(["a0: &a0 [1]", lines[0]]))) == {"a0": [1], "a1": [[1]] * 10}
