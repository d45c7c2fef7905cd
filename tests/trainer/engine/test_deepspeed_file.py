from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from data_prep.base.settings import load_settings
from trainer.config.run_config import RunConfig
from trainer.engine.deepspeed_file import with_deepspeed_file


def test_the_file_stands_for_the_block(tmp_path):
    config = load_settings(RunConfig, "tiny_cpu")
    assert with_deepspeed_file(config, None) is config
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 3}')
    assert with_deepspeed_file(config, str(path)).deepspeed == {"steps_per_print": 3}
    with pytest.raises(UsageError, match="keep one of them"):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu", ["deepspeed={}"]), str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no JSON object"),
        (None, "No such"),
        ('{"comet":' * 100_000 + "1" + "}" * 100_000, "nested more than 100 levels deep"),
        ('{"comet":' + "[" * 100 + "]" * 100 + "}", "nested more than 100 levels deep"),
        ('{"gradient_predivide_factor": NaN}', "is not JSON"),
        (r'{"comet": {"project": "\ud800"}}', "is not JSON"),
    ],
    ids=["torn", "list", "missing", "too deep to read", "too deep to write", "NaN", "surrogate"],
)
def test_what_is_no_json_object_is_refused(text, said, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu"), str(path))
