"""Storage options: the longest prefix wins, and secrets are shown nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from data_prep.base.errors import UsageError
from data_prep.base.known_secrets import hide_secrets
from data_prep.storage import storage_options
from data_prep.storage.exact_keys import map_at_once
from tests.support.error_codes import coded


@pytest.fixture(autouse=True)
def no_options() -> Iterator[None]:
    yield
    storage_options.configure({})


def test_the_longest_prefix_of_a_url_wins() -> None:
    storage_options.configure({"s3://": {"profile": "all"}, "s3://corpus": {"profile": "one"}})
    assert storage_options.options_for("s3://corpus/a.txt") == {"profile": "one"}
    assert storage_options.options_for("s3://corpus") == {"profile": "one"}
    assert storage_options.options_for("s3://other/a.txt") == {"profile": "all"}
    assert storage_options.options_for("gs://corpus/a.txt") == {}


def test_a_prefix_ends_where_a_folder_does() -> None:
    storage_options.configure({"s3://corpus/new": {"profile": "one"}})
    assert storage_options.options_for("s3://corpus/newer/a.txt") == {}


def test_new_options_replace_the_old_and_none_can_be_changed_from_outside() -> None:
    storage_options.configure({"s3://a": {"profile": "one"}})
    storage_options.configure({"s3://b": {"profile": "two"}})
    storage_options.options()["s3://b"]["profile"] = "three"
    assert storage_options.options() == {"s3://b": {"profile": "two"}}


@pytest.mark.fault(
    row=74, fault="two preparations with different logins in two threads", required="each thread keeps its own"
)
def test_threads_keep_their_own_options_and_pass_them_to_the_threads_that_they_start() -> None:
    configured = threading.Barrier(2, timeout=60)
    found: dict[str, set[str]] = {}

    def prepare(profile: str) -> None:
        storage_options.configure({"s3://": {"profile": profile}})
        configured.wait()
        found[profile] = {*map_at_once(lambda url: storage_options.options_for(url)["profile"], ["s3://a"] * 40)}

    threads = [threading.Thread(target=prepare, args=(profile,)) for profile in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": {"one"}, "two": {"two"}}


def test_a_thread_without_options_of_its_own_has_those_of_the_process() -> None:
    storage_options.configure({"s3://": {"profile": "one"}})
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(storage_options.options()))
    thread.start()
    thread.join()
    assert found == [{"s3://": {"profile": "one"}}]


def test_options_end_with_their_call_also_for_threads_without_their_own() -> None:
    def of_a_thread() -> object:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(storage_options.options()))
        thread.start()
        thread.join()
        return found[0]

    before, own, later = ({"s3://": {"profile": name}} for name in ("before", "own", "later"))
    storage_options.configure(before)
    with storage_options.own_options():
        assert storage_options.options() == before
        storage_options.configure(own)
        assert storage_options.options() == of_a_thread() == own
        with pytest.raises(KeyError), storage_options.own_options(later):
            assert storage_options.options() == of_a_thread() == later
            raise KeyError
        assert storage_options.options() == of_a_thread() == own
    assert storage_options.options() == of_a_thread() == before


def test_concurrent_calls_keep_their_own_options() -> None:
    own = {"s3://": {"profile": "own"}}
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with storage_options.own_options({"s3://": {"profile": "other"}}):
            begun.set()
            assert ended.wait(60)

    with storage_options.own_options(own):
        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(60) and storage_options.options() == own
    ended.set()
    thread.join()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(storage_options.options()))
    thread.start()
    thread.join()
    assert found == [{}]


def test_secrets_of_earlier_options_stay_hidden() -> None:
    storage_options.configure({"s3://": {"secret": "do-not-show", "password": 20304050}})
    storage_options.configure({})
    assert hide_secrets("secrets: do-not-show 20304050") == "secrets: (hidden) (hidden)"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"s3": {}}, "'s3' of storage_options is not a URL prefix"), ({"s3://": 3}, "not a mapping")],
)
def test_invalid_storage_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message, check=coded("invalid-storage-options")):
        storage_options.configure(options)


def test_a_manifest_shows_the_endpoint_and_no_secret() -> None:
    options = {
        "s3://corpus": {
            "key": "AKIAEXAMPLE",
            "secret": "do-not-show",
            "anon": False,
            "profile": "research",
            "endpoint_url": "https://user:do-not-show@store.example/?sig=do-not-show",
            "client_kwargs": {"region_name": "eu-west-1", "aws_session_token": "do-not-show"},
        },
        "abfs://user:do-not-show@box": {"sas_token": "do-not-show", "account_key": "do-not-show"},
        "https://data.example": {"headers": {"Authorization": "Bearer do-not-show"}},
    }
    shown = storage_options.redacted_options(options)
    assert "do-not-show" not in str(shown) and "AKIAEXAMPLE" not in str(shown)
    assert shown["s3://corpus"]["profile"] == "research"
    assert shown["s3://corpus"]["endpoint_url"] == "https://store.example/"
    assert shown["s3://corpus"]["client_kwargs"]["region_name"] == "eu-west-1"


def test_known_secrets_are_hidden_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    storage_options.configure({"s3://a": {"client_kwargs": {"aws_secret_access_key": "from-the-options"}}})
    text = "refused: from-the-environment, from-the-options, https://me:word@host/a?sig=abc and s3://a/b"
    assert hide_secrets(text) == "refused: (hidden), (hidden), https://host/a and s3://a/b"
