"""Configurations of training and preparation with damaged YAML and hostile values: a `UsageError` or what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.load_settings import find_config, load_settings
from data_prep.base.settings import Settings
from data_prep.config.preparation_config import PreparationConfig
from tests.fuzzing.mutations import HOSTILE_TEXTS, fuzz, mutated_bytes, mutated_json, says_the_same
from tests.fuzzing.watching import read_or_refuse
from tests.support.settings import yaml_of
from trainer.config.run_config import RunConfig, without_secrets
from trainer.config.stages import epochs_of
from trainer.config.training_settings import BatchWarmup, ScheduleSettings, StageSettings, TrainingSettings

SCHEMAS: dict[str, type[Settings]] = {"tiny_cpu": RunConfig, "bert_large_phased": RunConfig, "data": PreparationConfig}
HOSTILE_YAML = (
    *("&a [*a]", "*a", "!!timestamp x", "!!bool x", "!!int ''", "!!float x", "!!binary x", "!!set {a}", "!!omap [a]"),
    *(
        "!!python/object/apply:os.system [true]",
        "<<: 1",
        "? [1, 2]\n: 3",
        "{[1]: 2}",
        "[" * 3000,
        "{a: " * 3000,
        "%TAG",
    ),
    *("2026-13-45", "2026-05-01", "190:20:30", "0o17", "1_000", "1e5", ".inf", ".nan", "~", "=", "|", ">", "- -", "\t"),
    *(f"{text!r}" for text in HOSTILE_TEXTS[:-1]),
)


DURATIONS = {
    name
    for section in (TrainingSettings, StageSettings, BatchWarmup, ScheduleSettings)
    for both in section.earlier_names.items()
    for name in both
}


def without_durations(said: Any) -> Any:
    """A document without the settings that are written in several ways (`tests/trainer/config/test_duration.py`)."""
    if isinstance(said, dict):
        return {name: without_durations(value) for name, value in said.items() if name not in DURATIONS}
    return [without_durations(item) for item in said] if isinstance(said, list) else said


def presets() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(SCHEMAS))


def load(path: Path, schema: type[Settings], overrides: tuple[str, ...] = ()) -> Settings:
    """Read a configuration and ask of it what a command does before it starts."""
    config = load_settings(schema, path, overrides)
    if isinstance(config, RunConfig):
        if epochs_of(config.training):
            return config  # the data are opened first
        assert config.longest_sequence > 0
        without_secrets(config)
    return config


@fuzz(100)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(presets())
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_bytes(data.draw(mutated_bytes(find_config(name).read_bytes())))
    config = read_or_refuse(lambda: load(path, SCHEMAS[name]), path.parent)
    if config is not None:
        path.write_text(yaml_of(config), encoding="utf-8")
        assert load_settings(SCHEMAS[name], path) == config


@fuzz(100)
@given(data=st.data())
def test_hostile_values_are_refused_or_read_as_they_are_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(presets())
    written = data.draw(mutated_json(yaml.safe_load(find_config(name).read_text(encoding="utf-8"))))
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_bytes(written)  # JSON is YAML
    config = read_or_refuse(lambda: load(path, SCHEMAS[name]), path.parent)
    if config is not None:
        said = without_durations(json.loads(written, parse_constant=str))  # NaN is a text in YAML
        read = config.model_dump(mode="json")
        assert all(says_the_same(read[key], value) for key, value in said.items() if key != "sources"), (read, said)


@fuzz(100)
@given(data=st.data())
def test_hostile_overrides_are_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(presets())
    names = [
        "data.shards",
        "model",
        "training.max_steps",
        "sources",
        "tokenizer.user_symbols",
        "a..b",
        "a[0]",
        "a[",
        ".",
    ]
    override = st.tuples(
        st.sampled_from(names) | st.text(max_size=8), st.sampled_from(HOSTILE_YAML) | st.text(max_size=8)
    )
    overrides = data.draw(st.lists(override.map("=".join), min_size=1, max_size=2))
    folder = tmp_path_factory.mktemp("config")
    config = read_or_refuse(lambda: load(find_config(name), SCHEMAS[name], tuple(overrides)), folder)
    if config is not None:
        (folder / "again.yaml").write_text(yaml_of(config), encoding="utf-8")
        assert load_settings(SCHEMAS[name], folder / "again.yaml") == config


@pytest.mark.parametrize("text", HOSTILE_YAML)
@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_yaml_as_a_value_is_refused_or_read(name: str, text: str, tmp_path: Path) -> None:
    key = "documents" if name == "data" else "output_dir"
    path = tmp_path / "run.yaml"
    path.write_bytes(f"{key}: {text}\n".encode(errors="surrogatepass"))
    config = read_or_refuse(lambda: load(path, SCHEMAS[name]), tmp_path)
    if config is not None:
        (tmp_path / "again.yaml").write_text(yaml_of(config), encoding="utf-8")
        assert load_settings(SCHEMAS[name], tmp_path / "again.yaml") == config
