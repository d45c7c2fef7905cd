"""Code of the user's own: its names, its versions, and what a run names of it."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support import toy_optimizers
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.config.custom_code import METRIC, check_code, code_of, versions_of

LION = "tests.support.toy_optimizers:lion"
OF_STAGES = [{"steps": 1}, {"steps": 1, "masking": "json:loads"}, {"steps": 1, "masking": "json:dumps"}]


def test_what_a_run_names_is_listed_once_with_its_kind():
    config = tiny_config(
        optimizer={"name": LION},
        data={"masking": "json:loads"},
        training={"stages": OF_STAGES, "max_steps": None},
        logging={"metrics": ["json:dump"]},
    )
    assert [(kind.setting, name) for kind, name in code_of(config)] == [
        ("optimizer.name", LION),
        ("data.masking", "json:loads"),
        ("data.masking", "json:dumps"),
        ("logging.metrics", "json:dump"),
    ]
    assert list(code_of(tiny_config())) == []


def test_versions_are_of_what_numbers_depend_on(monkeypatch):
    config = tiny_config(optimizer={"name": LION}, logging={"metrics": ["json:dump"]}, data={"masking": "json:loads"})
    versions = versions_of(config)
    assert set(versions) == {"optimizer", "masking json:loads"}
    assert {len(digest) for digest in versions.values()} == {64}
    monkeypatch.setattr(toy_optimizers.lion, "version", 1.2, raising=False)
    assert versions_of(config) == versions | {"optimizer": "1.2"}
    assert versions_of(tiny_config(optimizer={"name": "muon"})) == {}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"data": {"masking": "no.such.module:mask"}}, "masking-not-importable"),
        ({"logging": {"metrics": ["tests.support.toy_optimizers:A_NUMBER"]}}, "not-a-metric"),
        ({"optimizer": {"name": "math:sqrt"}}, "optimizer-without-version"),
    ],
)
def test_a_start_checks_all_of_it(settings, code):
    with pytest.raises(UsageError, check=coded(code)):
        check_code(tiny_config(**settings))


def test_a_file_that_changed_after_its_import_is_refused_at_a_start_and_runs_in_the_middle(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_metric.py"
    file.write_text("def one(step, metrics, model):\n    return {}\n")
    assert METRIC.find("edited_metric:one")(0, {}, None) == {}
    file.write_text("def one(step, metrics, model):\n    return {'a/b': 1.0}\n")
    assert METRIC.load("edited_metric:one")(0, {}, None) == {}
    with pytest.raises(UserError, check=coded("module-changed")):
        check_code(tiny_config(logging={"metrics": ["edited_metric:one"]}))


def test_an_exception_is_reported_with_the_line_of_the_users_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_metric.py").write_text("import json\n\ndef one():\n    json.loads('[')\n")
    with pytest.raises(ValueError, match="Expecting value") as caught:
        METRIC.load("failing_metric:one")()
    error = METRIC.failed("failing_metric:one", caught.value)
    assert f"logging.metrics=failing_metric:one failed at {tmp_path}/failing_metric.py:4 (JSON" in error.problem


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"data": {"masking": "whole_word"}}, "unknown-masking"),
        ({"logging": {"metrics": ["norms"]}}, "invalid-metric-functions"),
        ({"logging": {"metrics": ["json:dump", "json:dump"]}}, "invalid-metric-functions"),
        ({"training": {"max_steps": None, "stages": [{"steps": 1, "masking": "whole_word"}]}}, "unknown-masking"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_configuration(settings, code):
    with pytest.raises(UsageError, check=coded(code)):
        tiny_config(**settings)
