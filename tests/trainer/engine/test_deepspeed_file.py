from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from data_prep.base.settings import load_settings
from tests.support.error_codes import coded
from trainer.config.run_config import RunConfig
from trainer.engine.deepspeed_file import with_deepspeed_file


def test_the_file_stands_for_the_block(tmp_path):
    config = load_settings(RunConfig, "tiny_cpu")
    assert with_deepspeed_file(config, None) is config
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 3}')
    assert with_deepspeed_file(config, str(path)).deepspeed == {"steps_per_print": 3}
    with pytest.raises(UsageError, check=coded("contradicting-options")):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu", ["deepspeed={}"]), str(path))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid-deepspeed-file"),
        ("[1]", "invalid-deepspeed-file"),
        (None, "unreadable-config"),
        ('{"comet":' * 100_000 + "1" + "}" * 100_000, "invalid-deepspeed-file"),
        ('{"comet":' + "[" * 100 + "]" * 100 + "}", "invalid-deepspeed-file"),
        ('{"gradient_predivide_factor": NaN}', "invalid-deepspeed-file"),
        (r'{"comet": {"project": "\ud800"}}', "invalid-deepspeed-file"),
    ],
    ids=["torn", "list", "missing", "too deep to read", "too deep to write", "NaN", "surrogate"],
)
def test_what_is_no_json_object_is_refused(text, code, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, check=coded(code)):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu"), str(path))
