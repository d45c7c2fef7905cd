"""The built-in filter `url_blocklist`: drops documents by the domain or the URL that they come from."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.local_paths import expand_home
from data_prep.documents.document import Document
from data_prep.filters.protocol import hashes_of
from data_prep.storage import storage

_NO_DOMAIN = re.compile(r"[\s*|^,;]")  # as in a line of a hosts file or of an ad blocker's list


class UrlBlocklist:
    """Drops documents of listed domains, their subdomains included, and of listed URLs.

    A list is given in the configuration, or as a file with one entry per line and comments after `#`. URLs are compared
    without scheme, `www.`, fragment and a slash at the end. Documents without a URL are kept.
    """

    version = "1"
    needs = frozenset({"url"})

    def __init__(self, domains: Sequence[str] | str = (), urls: Sequence[str] | str = ()) -> None:
        self._domains = {_domain(domain, where) for where, domain in _entries(domains)}
        self._urls = {_without_scheme(url) for _, url in _entries(urls)}
        if not self._domains and not self._urls:
            raise UsageError(
                "filter 'url_blocklist' has no entry",
                fix="give domains or urls, each a list or the name of a file with one entry per line",
                code="empty-blocklist",
            )

    @staticmethod
    def files(domains: Sequence[str] | str = (), urls: Sequence[str] | str = ()) -> list[str]:
        """Return the files that are read."""
        return [expand_home(given) for given in (domains, urls) if isinstance(given, str)]

    def identity(self) -> dict[str, Any]:
        """Return the content of the lists instead of their file names."""
        return {"parameters": {"domains": _described(self._domains), "urls": _described(self._urls)}}

    def lists(self) -> dict[str, np.ndarray]:
        """Return the hashes of the entries of each list, (n,) uint64, by which an addition knows a list that grew."""
        return {"domains": hashes_of(self._domains), "urls": hashes_of(self._urls)}

    def __call__(self, document: Document) -> str | None:
        if document.url is None:
            return None
        if self._urls and _without_scheme(document.url) in self._urls:
            return "url"
        labels = _host(document.url).split(".") if self._domains else []
        return "domain" if any(".".join(labels[first:]) in self._domains for first in range(len(labels))) else None


def _entries(given: Sequence[str] | str) -> list[tuple[str, str]]:
    """The entries of a list, and where each is."""
    if not isinstance(given, str):
        return [(f"entry {number}", str(entry).strip()) for number, entry in enumerate(given, 1) if str(entry).strip()]
    given = expand_home(given)
    try:
        lines = storage.read_bytes(given).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"blocklist {storage.redact(given)} is not UTF-8 (byte {error.start})",
            fix="convert it, such as with iconv",
            code="not-utf8",
        ) from None
    return [
        (f"{storage.redact(given)} line {number}", entry)
        for number, line in enumerate(lines, 1)
        if (entry := line.partition("#")[0].strip())
    ]


def _domain(entry: str, where: str) -> str:
    domain = _host(entry)
    if not domain or _NO_DOMAIN.search(domain):
        raise UsageError(
            f"filter 'url_blocklist': {where} is not a domain: {entry[:100]!r}",
            fix="give one name per line, such as example.org, which includes its subdomains",
            code="filter-parameters",
        )
    return domain


def _host(url: str) -> str:
    """Return the host of a URL or bare domain in lower case and ASCII, also for malformed URLs."""
    rest = url.partition("://")[2] or url.removeprefix("//")
    for end in "/?#":
        rest = rest.partition(end)[0]
    host = rest.rpartition("@")[2].partition(":")[0].strip(".").lower()
    if not host.isascii():
        with contextlib.suppress(UnicodeError):
            host = host.encode("idna").decode()
    return host.removeprefix("www.")


def _without_scheme(url: str) -> str:
    rest = (url.partition("://")[2] or url.removeprefix("//")).partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{_host(host)}{slash}{path}".rstrip("/")


def _described(entries: Iterable[str]) -> dict[str, Any]:
    in_order = sorted(entries)
    return {"entries": len(in_order), "sha256": hashlib.sha256("\n".join(in_order).encode()).hexdigest()}
