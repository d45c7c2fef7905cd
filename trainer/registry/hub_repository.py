"""A model repository on the Hugging Face Hub: its branches and files, and commits to them.

An outage (no connection, a timeout, an answer such as 500) is tried again, a refusal is not. Nothing is sent twice: the
files of a branch are compared before each commit, and large files whose content the Hub has are not uploaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import remember_logins, remember_secrets
from data_prep.base.logs import logger
from data_prep.storage import storage

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

LOG = logger(__name__)
MAIN = "main"
RETRIES = 3
FIRST_WAIT_SECONDS = 2.0
"""Before the first retry; doubled before each further one. Most requests were retried by the client before."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_NAME_LENGTH = 96
_OF_GIT = ".gitattributes"  # which the Hub writes
_TRANSIENT = (408, 409, 412, 425, 429)
"""Statuses below 500 after which a retry can help: 409 and 412 mean that the branch moved, whose files are read
again."""
_TRANSPORTS = {"httpx", "httpx2", "requests"}
"""Packages that carry the client's requests, by release; their errors are those of the network."""
Result = TypeVar("Result")


class RemoteFile(NamedTuple):
    """A file on the Hub."""

    size: int
    digest: str
    """sha256 of a large file, else git's sha1 of its blob."""

    def is_copy_of(self, path: Path) -> bool:
        if path.stat().st_size != self.size:
            return False
        return self.digest == (storage.sha256_of(path) if len(self.digest) == 64 else _blob_digest(path))


class HubBranch(NamedTuple):
    """A branch as it was read."""

    commit: str
    files: Mapping[str, RemoteFile]


def check_repository_name(name: str) -> None:
    """Refuse what cannot be OWNER/NAME on the Hub.

    Raises:
        UsageError: naming the text.
    """
    is_plain = _NAME.fullmatch(name) is not None and not name.endswith((".", "-", ".git"))
    if not is_plain or ".." in name or "--" in name or len(name) > _MAX_NAME_LENGTH:
        raise UsageError(
            f"--hub {name!r} is not OWNER/NAME",
            fix="give the user or organization and the name of the repository: letters, digits and single - _ . "
            f"between them, at most {_MAX_NAME_LENGTH} characters in all",
            code="invalid-hub-name",
        )


class HubRepository:
    """A model repository, which may not exist yet."""

    def __init__(self, name: str) -> None:
        """Connect to the Hub of HF_ENDPOINT, by default huggingface.co, with the token of HF_TOKEN or its login file.

        Raises:
            UsageError: there is no token, or the name is not OWNER/NAME.
        """
        check_repository_name(name)
        from huggingface_hub import HfApi, get_token, is_offline_mode

        self.name, self.address = name, hub_address()
        if is_offline_mode():
            raise UsageError(
                f"HF_HUB_OFFLINE is set, so {name} cannot be reached",
                fix="unset HF_HUB_OFFLINE, and TRANSFORMERS_OFFLINE if it is set",
                code="hub-offline",
            )
        token = get_token()
        if token is None:
            raise UsageError(
                f"there is no token for {self.address}",
                fix="set HF_TOKEN to a token that may write, or run `hf auth login`",
                code="missing-hub-token",
            )
        remember_secrets([token])
        self._api: HfApi = HfApi(endpoint=_endpoint(), token=token)

    @property
    def url(self) -> str:
        return f"{self.address}/{self.name}"

    def is_private(self) -> bool | None:
        """Return whether the repository is private; None if there is none, or none that the token may see."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def ask() -> bool | None:
            try:
                return bool(self._api.model_info(self.name).private)
            except RepositoryNotFoundError as error:
                if error.response.status_code == 401:
                    raise
                return None

        return self._patiently("look for it", ask)

    def create(self, private: bool) -> None:
        """Create the repository; with `private=False` it gets the default visibility of its owner."""
        self._patiently("create it", lambda: self._api.create_repo(self.name, private=private or None, exist_ok=True))

    def branches(self) -> dict[str, str]:
        """Return the newest commit of every branch."""
        refs = self._patiently("list its branches", lambda: self._api.list_repo_refs(self.name))
        return {branch.name: branch.target_commit for branch in refs.branches}

    def read(self, branch: str) -> HubBranch | None:
        """Return the files of a branch; None if there is no such branch."""
        commit = self.branches().get(branch)
        return None if commit is None else self._patiently(f"list {branch}", lambda: self._at(commit))

    def _at(self, commit: str) -> HubBranch:
        from huggingface_hub.hf_api import RepoFile

        entries = self._api.list_repo_tree(self.name, recursive=True, revision=commit)
        files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path != _OF_GIT]
        return HubBranch(
            commit, {file.path: RemoteFile(file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files}
        )

    def create_branch(self, branch: str) -> None:
        """Create a branch from the first commit, which has no model; it stays as it is if it exists.

        From main it would hold the model of main, under the name of another one, until its own is sent.
        """

        def attempt() -> None:
            commits = self._api.list_repo_commits(self.name)  # the newest first
            first = commits[-1].commit_id if commits else None
            self._api.create_branch(self.name, branch=branch, revision=first, exist_ok=True)

        self._patiently(f"create {branch}", attempt)

    def send(self, branch: str, folder: Path, is_kept: Callable[[str], bool], message: str) -> tuple[str, int]:
        """Make an existing branch hold the files of `folder`; return its commit and the number of changed files.

        Files of the branch that the folder lacks are removed unless `is_kept(name)`. The change is one commit.
        """

        def attempt() -> tuple[str, int]:
            _show_progress_on_terminals()
            # Read again each time: the answer to a commit that was made may be what an outage took away.
            there = self._at(self._commit_of(branch))
            changes = list(_changes(there, folder, is_kept))
            if not changes:
                return there.commit, 0
            made = self._api.create_commit(
                self.name, changes, commit_message=message, revision=branch, parent_commit=there.commit
            )
            return made.oid, len(changes)

        return self._patiently(f"send {branch}", attempt)

    def _commit_of(self, branch: str) -> str:
        refs = self._api.list_repo_refs(self.name)
        return next(each.target_commit for each in refs.branches if each.name == branch)

    def _patiently(self, what: str, call: Callable[[], Result]) -> Result:
        """Call again after an outage.

        Raises:
            UserError: the Hub refuses, or the outage lasts; `what` completes "could not ...".
        """
        for attempt in range(RETRIES + 1):
            try:
                return call()
            except Exception as error:
                if isinstance(error, UserError) or not _is_of_hub(error):
                    raise
                if (refusal := self._refusal(error, what)) is not None:
                    raise refusal from error
                if attempt == RETRIES:
                    raise UserError(
                        f"{self.url}: could not {what} ({_short(error)})",
                        fix="check the network and the Hub, and rerun the same command, which sends only what is "
                        "missing",
                        code="hub-unavailable",
                    ) from error
                wait = FIRST_WAIT_SECONDS * 2**attempt
                LOG.warning(f"{self.address} fails ({_short(error)}); next attempt to {what} in {wait:.0f} s")
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self, error: BaseException, what: str) -> UserError | None:
        """Return the error for an answer that a retry does not change; None for an outage."""
        from huggingface_hub.errors import HfHubHTTPError

        http = next((each for each in _chain(error) if isinstance(each, HfHubHTTPError)), None)
        if http is None:
            if isinstance(error, ValueError) and "README.md" in str(error):  # metadata that the Hub does not accept
                return UserError(
                    f"{self.url}: could not {what} ({_short(error)})",
                    fix="correct the metadata at the top of README.md and rerun the same command",
                    code="hub-refuses",
                )
            return None
        status = http.response.status_code
        if status >= 500 or status in _TRANSIENT:
            return None
        fixes = {
            401: "set HF_TOKEN to a valid token, or run `hf auth login`",
            403: f"use a token that may write to {self.name.partition('/')[0]}",
            404: f"check the name, and that the token may see and write to {self.name}",
            413: "free storage of the account, or use another one",
        }
        return UserError(
            f"{self.url}: could not {what}; the Hub refuses with status {status} ({_short(http)})",
            fix=fixes.get(status, "correct what the answer names and rerun the same command"),
            code="hub-refuses",
        )


def _show_progress_on_terminals() -> None:
    """Show the client's progress bars on a terminal alone; transformers shows them again after each model it loads."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def hub_address() -> str:
    """Return the address of the Hub without a login."""
    return storage.redact(_endpoint()).rstrip("/")


def _endpoint() -> str:
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    remember_logins(endpoint)
    return endpoint.rstrip("/")


def _changes(
    there: HubBranch, folder: Path, is_kept: Callable[[str], bool]
) -> Iterator[CommitOperationAdd | CommitOperationDelete]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = files_of(folder)
    for name in names:
        if name not in there.files or not there.files[name].is_copy_of(folder / name):
            yield CommitOperationAdd(name, str(folder / name))
    for name in there.files:
        if name not in names and not is_kept(name):
            yield CommitOperationDelete(name)


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files of a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _blob_digest(path: Path) -> str:
    """Return the name that git gives to a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_hub(error: BaseException) -> bool:
    """Return whether the network, the Hub or its client raised an error, and not a mistake of this project."""
    from huggingface_hub import errors

    for each in _chain(error):
        packages = {base.__module__.partition(".")[0] for base in type(each).__mro__}
        if isinstance(each, OSError | json.JSONDecodeError) or packages & _TRANSPORTS:
            return True
    if isinstance(error, errors.HFValidationError) or not isinstance(error, RuntimeError | ValueError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # the client raises these for answers and large files
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "huggingface_hub"


def _short(error: BaseException) -> str:
    """Return the text of the first cause on one line, without secrets."""
    text = " ".join(str(list(_chain(error))[-1]).split()) or type(error).__name__
    return storage.hide_secrets(text)[:300]
