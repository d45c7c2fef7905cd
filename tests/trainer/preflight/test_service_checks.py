from __future__ import annotations

import sys
from pathlib import Path

from tests.support.toy_run import preset_config
from trainer.preflight.service_checks import check_mlflow


def test_an_mlflow_that_is_away_is_a_warning_for_training_would_continue():
    (finding,) = check_mlflow(preset_config("tracking.uri=http://127.0.0.1:9"))
    assert finding.level == "warn"
    assert finding.text == (
        "http://127.0.0.1:9 does not answer (connection refused); start it, or set "
        "tracking.uri. Training would continue and send its metrics later"
    )


def test_it_fails_where_the_run_is_to_register_its_model():
    (finding,) = check_mlflow(preset_config("tracking.uri=http://127.0.0.1:9", "registry.name=small"))
    assert finding.level == "fail" and "end with status 1: small would not be registered" in finding.text


def test_a_registry_that_cannot_be_written_fails_where_the_run_is_to_register_its_model(monkeypatch):
    class ReadOnly:
        def search_experiments(self, max_results: int) -> list[str]:
            return []

        def create_registered_model(self, name: str) -> None:
            raise OSError("permission denied")

    monkeypatch.setattr("trainer.preflight.service_checks.connect", lambda uri: ReadOnly())
    for overrides, level in (([], "warn"), (["registry.name=small"], "fail")):
        answers, registry = check_mlflow(preset_config("tracking.uri=http://127.0.0.1:9", *overrides))
        assert (answers.level, registry.level) == ("ok", level) and "permission denied" in registry.text


def test_a_database_that_the_run_creates_is_not_created_by_the_check(tmp_path: Path):
    (finding,) = check_mlflow(preset_config(f"tracking.uri=sqlite:///{tmp_path}/new.db"))
    assert finding.level == "ok" and "does not exist yet" in finding.text and not list(tmp_path.iterdir())


def test_a_database_that_cannot_be_made_is_a_warning_without_a_traceback(tmp_path: Path):
    (tmp_path / "file").touch()
    (finding,) = check_mlflow(preset_config(f"tracking.uri=sqlite:///{tmp_path}/file/m.db"))
    assert finding.level == "warn" and "does not answer" in finding.text


def test_an_mlflow_that_is_not_installed_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for overrides, level in (([], "warn"), (["registry.name=small"], "fail")):
        (finding,) = check_mlflow(preset_config("tracking.uri=http://127.0.0.1:9", *overrides))
        assert finding.level == level and "does not answer" not in finding.text
        assert finding.text.startswith("mlflow is not installed. Fix: pip install 'mlflow")
        assert ("small would not be registered" in finding.text) == bool(overrides)
