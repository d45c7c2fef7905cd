from __future__ import annotations

import numpy as np

from data_prep.base.installed import installed_version


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("clozeworks-of-another-world") is None
