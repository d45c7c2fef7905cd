"""The variables of the process while other threads change them, as MLflow's client has it done."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from data_prep.base.environment import environment_now
from data_prep.storage import storage

VARIABLE = "CLOZEWORKS_TEST_OF_THREADS"


@contextlib.contextmanager
def a_variable_that_comes_and_goes() -> Iterator[None]:
    done, interval = threading.Event(), sys.getswitchinterval()

    def change() -> None:
        while not done.is_set():
            os.environ[VARIABLE] = "here"
            del os.environ[VARIABLE]

    thread = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.long
def test_the_variables_are_read_while_another_thread_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {f"{VARIABLE}_{number}": str(number) for number in range(50)}
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    with a_variable_that_comes_and_goes():
        with pytest.raises(KeyError):  # what `environment_now` is for
            for _ in range(1_000_000):
                dict(os.environ)
        for _ in range(2000):
            found = {name: value for name, value in environment_now().items() if name.startswith(VARIABLE)}
            assert found in (others, others | {VARIABLE: "here"})
            assert storage.hide_secrets("a text") == "a text"
