from __future__ import annotations

import pytest

from data_prep.errors import UsageError
from data_prep.settings import load_settings
from trainer.config import RunConfig
from trainer.deepspeed_file import with_deepspeed_file


def test_the_file_stands_for_the_block(tmp_path):
    config = load_settings(RunConfig, "tiny_cpu")
    assert with_deepspeed_file(config, None) is config
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 3}')
    assert with_deepspeed_file(config, str(path)).deepspeed == {"steps_per_print": 3}
    with pytest.raises(UsageError, match="keep one of them"):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu", ["deepspeed={}"]), str(path))


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[1]", "holds no JSON object"), (None, "No such")])
def test_what_is_no_json_object_is_refused(text, said, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        with_deepspeed_file(load_settings(RunConfig, "tiny_cpu"), str(path))
