"""Settings as MLflow takes them: flat, with names and values of the form and length that it allows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from data_prep.storage import storage

MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
_DIGEST_DIGITS = 12
_NOT_IN_NAMES = re.compile(r"[^\w./ -]|/(?=[/.])")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as MLflow parameters: dotted names, values as text, without secrets."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        flat[_param_name(storage.hide_secrets(f"{prefix}{name}"))] = storage.hide_secrets(text)[:MAX_PARAM_LENGTH]
    return flat


def _param_name(name: str) -> str:
    """The name as MLflow takes it, for one that it refuses (of storage_options it holds a URL) would hold up the rest.

    Of a longer one the end is a digest, by which it is still told from others.
    """
    taken = _NOT_IN_NAMES.sub("_", name)
    if len(taken) <= MAX_NAME_LENGTH:
        return taken
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    return f"{taken[: MAX_NAME_LENGTH - _DIGEST_DIGITS - 1]}-{digest}"
