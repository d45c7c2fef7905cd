"""What PyYAML does that `data_prep/base/yaml_values.py` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import pytest
import yaml

from tests.workarounds.new_process import run_python


@pytest.mark.parametrize("text", ["a: !!timestamp x", "a: !!bool x", "a: !!int ''"])
def test_pyyaml_lets_the_errors_of_its_constructors_pass(text: str) -> None:
    with pytest.raises(Exception, match=".") as caught:
        yaml.safe_load(text)
    assert not isinstance(caught.value, yaml.YAMLError), "YAML_FAULTS of data_prep/base/yaml_values.py may be shorter"


@pytest.mark.spawn
def test_libyaml_ends_the_process_on_a_deeply_nested_document() -> None:
    answer = run_python("import yaml; yaml.load('[' * 60_000 + ']' * 60_000, Loader=yaml.CSafeLoader)")
    assert answer.returncode < 0, "_check_depth of data_prep/base/yaml_values.py may be taken out"


def test_pyyaml_takes_a_number_without_a_point_for_text() -> None:
    assert yaml.safe_load("1e-4") == "1e-4", (
        "the float of _PlainLoader in data_prep/base/yaml_values.py may be PyYAML's"
    )
