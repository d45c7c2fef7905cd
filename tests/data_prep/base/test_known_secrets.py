"""Secrets: every place that hides them or keeps them back knows the same ones."""

from __future__ import annotations

import pytest

from data_prep.base.known_secrets import secrets_of, without_secrets
from data_prep.base.urls import has_password
from data_prep.storage import storage

SECRETS = {
    name: f"value-of-{name.lower()}"
    for name in (
        "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_ACCESS_KEY "
        "AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_KEY AZURE_STORAGE_SAS_TOKEN "
        "GOOGLE_API_KEY HF_TOKEN MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN OTEL_EXPORTER_OTLP_HEADERS SLURM_JWT"
    ).split()
}
NO_SECRETS = {
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "GIT_AUTHOR_NAME": "Mary Shelley",
    "GOOGLE_APPLICATION_CREDENTIALS": "/keys/key.json",
    "HF_HUB_OFFLINE": "1",
    "HF_TOKEN_PATH": "/keys/token",
    "MAX_OUTPUT_TOKENS": "100000",
    "MLFLOW_TRACKING_AUTH": "name-of-a-plugin",
    "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
    "SSH_AUTH_SOCK": "/run/agent.1",
    "TOKENIZERS_PARALLELISM": "false-or-true",
    "UCX_IB_PKEY": "0x7fff",
}
URL = {"MLFLOW_TRACKING_URI": "https://me:battery@mlflow.example.org"}


def test_secrets_are_known_by_name_or_by_the_password_in_a_url() -> None:
    assert secrets_of(NO_SECRETS | SECRETS | URL) == SECRETS | URL


@pytest.mark.parametrize("name", SECRETS)
def test_errors_and_mlflow_tags_hide_the_same_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRETS[name])
    assert storage.hide_secrets(f"refused: {SECRETS[name]}!") == "refused: (hidden)!"


def test_an_address_is_shown_without_its_password() -> None:
    said = without_secrets(f"{URL['MLFLOW_TRACKING_URI']}/x does not answer", [], URL)
    assert said == "https://mlflow.example.org/x does not answer"


def test_a_secret_that_holds_a_url_is_hidden_whole() -> None:
    secret = "AccountKey=correct-horse;BlobEndpoint=https://box.example.org/?sv=1;"
    assert without_secrets(f"bad: {secret}", [], {"AZURE_STORAGE_CONNECTION_STRING": secret}) == "bad: (hidden)"


def test_a_password_that_looks_like_a_query_takes_its_user_along() -> None:
    assert without_secrets("postgresql://me:one?key=two@db/x is away", [], {}) == "postgresql://db/x is away"


def test_a_short_value_is_left_alone() -> None:
    assert without_secrets("one two", ["one"], {"HF_TOKEN": "two"}) == "one two"


def test_a_url_with_a_port_is_not_taken_for_one_with_a_password() -> None:
    assert has_password("https://me:battery@host/x") and has_password("tracking.uri=postgresql://a:b@c/d")
    assert has_password("postgresql://a:b/b@c/d")
    assert not has_password("https://host:5000/a@b") and not has_password("s3://bucket/key")
