"""Storage options: the longest prefix wins, and secrets are shown nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from data_prep.base.errors import UsageError
from data_prep.storage import storage_options
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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"s3": {}}, "'s3' of storage_options is not a URL prefix"), ({"s3://": 3}, "not a mapping")],
)
def test_what_is_no_option_is_refused(options: dict, message: str) -> None:
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
    assert storage_options.hide_secrets(text) == "refused: (hidden), (hidden), https://host/a and s3://a/b"
