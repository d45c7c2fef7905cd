"""Access to MLflow: the server, limits of requests, names that it accepts, and URLs of its pages.

mlflow is imported only when a client is made: it takes seconds, and most ranks never need one. The fluent API and
autolog are not used: their state is global, and autolog patches classes that DeepSpeed uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as url_quote
from urllib.parse import unquote, urlsplit

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import remember_logins
from data_prep.base.local_paths import expand_home
from data_prep.base.logs import hide_secrets_in_records
from data_prep.base.settings import flatten
from data_prep.storage import storage

if TYPE_CHECKING:
    from mlflow import MlflowClient

EMBEDDED_DATABASE = "mlflow.db"  # MLflow's own default
ARTIFACT_FOLDER = "mlruns"
"""Folder beside an sqlite database; the default of MLflow is a folder where a command is started."""
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SERVERS = ("http", "https", "databricks", "databricks-uc", "uc")
UPLOAD_RETRIES = 4
READ_RETRIES = 2
"""Retries of a command that only reads, 6 seconds of waiting in all: a user waits for it."""
UPLOAD_TIMEOUT_SECONDS = 300  # a server that stores gigabytes answers late
REQUIREMENT = "mlflow>=3.17,<4"
MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
DEFAULT_UI = "http://127.0.0.1:5000"
"""Where `mlflow ui` listens by default."""
TRAINING_VIEW = "?workflowType=machine_learning"
_DIGEST_DIGITS = 12
_ESCAPED = re.compile("%[0-9A-Fa-f]{2}|[?]")  # what would be decoded, or end the path, in the address of a file
_NOT_IN_NAMES = re.compile(r"[^\w./ -]|/(?=[/.])")

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT"

_ROOT_VARIABLE = "_MLFLOW_SERVER_ARTIFACT_ROOT"
_root_lock = threading.RLock()

_limits_lock = threading.Lock()
_open_limits: list[dict[str, int]] = []
"""Limits of all open blocks of `request_limits`."""
_limits_of_user: set[str] = set()
"""Limits that the user had set before the first of these blocks."""


class MlflowNotInstalled(UsageError):
    """MLflow is not installed."""

    def __init__(self) -> None:
        super().__init__("mlflow is not installed", fix=f"pip install {quote(REQUIREMENT)}", code="mlflow-missing")


def resolve_tracking_uri(setting: str | None, recorded: str | None = None) -> str:
    """Return the tracking URI: the setting, else MLFLOW_TRACKING_URI, else the embedded sqlite file.

    `recorded` is where the run was tracked before: an embedded file is found again from another directory.

    Raises:
        UsageError: the URI is a plain path or has an unknown scheme, or the working directory cannot hold the file.
    """
    uri, source = setting, "the tracking URI"
    if not uri:
        uri, source = os.environ.get("MLFLOW_TRACKING_URI", "").strip(), "MLFLOW_TRACKING_URI"
    if not uri:
        if recorded and (file := database_file(recorded)) is not None and file.is_file():
            return recorded
        return _checked(f"sqlite:///{EMBEDDED_DATABASE}", source)
    return _checked(uri, source)


def registry_of(tracking_uri: str) -> str:
    """Return where registered models are: MLFLOW_REGISTRY_URI where it is set, else the tracking server.

    Raises:
        UsageError: that variable is a plain path or has an unknown scheme.
    """
    uri = os.environ.get("MLFLOW_REGISTRY_URI", "").strip()
    return _checked(uri, "MLFLOW_REGISTRY_URI") if uri else tracking_uri


def _checked(uri: str, source: str) -> str:
    """Return the URI, the path of an sqlite file made absolute; `source` is what the user set."""
    uri = expand_home(uri)
    scheme = "databricks" if uri == "databricks" else urlsplit(uri).scheme.partition("+")[0]
    if scheme not in DATABASES + SERVERS:
        file = f"sqlite:///{Path(uri).absolute()}.db" if not scheme else "sqlite:///mlflow.db"
        raise UsageError(
            f"{source} {storage.hide_secrets(uri)!r} is not an MLflow URI",
            fix=f"give the URL of a server, such as http://127.0.0.1:5000, or of a database, such as {file}",
            code="invalid-tracking-uri",
        )
    driver, separator, path = uri.partition(":///")
    if database_file(uri) is not None and not path.startswith("/"):
        base = Path.cwd()
        if sign := _ESCAPED.search(str(base)):
            raise UsageError(
                f"MLflow cannot open a database in {base}: {sign[0]!r} has a meaning in its address",
                fix="start from another directory, or give the URL of a server or of a database elsewhere",
                code="unusable-tracking-directory",
            )
        return f"{driver}{separator}{base}/{path}"
    return uri


def database_file(tracking_uri: str) -> Path | None:
    """Return the file of an sqlite database; None of a server, of another database, or of one in memory."""
    driver, separator, path = tracking_uri.partition(":///")
    path = path.partition("?")[0]
    is_file = driver.partition("+")[0] == "sqlite" and bool(separator) and bool(path)
    return Path(unquote(path)) if is_file and not path.startswith((":memory:", "file:")) else None


def artifact_root(tracking_uri: str) -> Path | None:
    """Return where the artifacts of new experiments go: beside an sqlite database; None where its server decides."""
    file = database_file(tracking_uri)
    return None if file is None else file.parent.resolve() / ARTIFACT_FOLDER


def connect(tracking_uri: str) -> MlflowClient:
    """Create a client of a server, without a request, or of a database, which is opened or created.

    Raises:
        MlflowNotInstalled: MLflow is missing.
        UserError: the database cannot be opened, or is incomplete; MLflow retries an unreachable one for 100 s.
    """
    remember_logins(tracking_uri)
    import_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    registry = registry_of(tracking_uri)
    try:
        with _artifacts_beside(tracking_uri):
            for file in filter(None, map(database_file, {tracking_uri, registry})):
                _make_database(file)
            return MlflowClient(tracking_uri, registry if registry != tracking_uri else None)
    # ImportError: its driver is not installed; ValueError: a port of letters.
    except (SQLAlchemyError, MlflowException, ImportError, ValueError, OSError) as error:
        cause, address = short(error), storage.hide_secrets(tracking_uri)
        fix = (
            "remove that file, unless another command creates it right now (one was killed while it did)"
            if "already exists" in cause
            else "check the database and its URI"
        )
        raise UserError(
            f"MLflow cannot open {address} ({cause})", fix=fix, code="unusable-tracking-database"
        ) from error


@contextlib.contextmanager
def _artifacts_beside(tracking_uri: str) -> Iterator[None]:
    """Within the block, make a store that MLflow opens keep new artifacts beside its database.

    MLflow reads this variable of its server when it opens a store, and has no argument for it.
    """
    root = artifact_root(tracking_uri)
    can_be_made = root is not None and (root.is_dir() or os.access(root.parent, os.W_OK))
    with _root_lock:
        if root is None or not can_be_made or _ROOT_VARIABLE in os.environ:
            yield
            return
        os.environ[_ROOT_VARIABLE] = as_location(root)
        try:
            yield
        finally:
            del os.environ[_ROOT_VARIABLE]


def as_location(folder: Path) -> str:
    """Return a directory as MLflow records it: its path, or a URL where the path would be read as one."""
    path = str(folder)
    return folder.as_uri() if any(sign in path for sign in "#%?;") else path


def _make_database(path: Path) -> None:
    """Create a new database under a temporary name and rename it: creation takes seconds, and may be killed.

    Raises:
        OSError: its directory does not exist, for which MLflow would wait 100 s.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the directory {path.parent} does not exist")
    if path.exists() or _ESCAPED.search(str(path)):
        return
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made, whole = Path(folder, "made.db"), Path(folder, "whole.db")
        MlflowClient(f"sqlite:///{made}")
        with contextlib.closing(sqlite3.connect(made)) as connection:
            connection.execute("VACUUM INTO ?", (str(whole),))  # into one file, whatever the journal's form is
        try:
            os.link(whole, path)
        except FileExistsError:
            return  # another process created it
        except OSError:  # a file system without links
            os.rename(whole, path)


def import_mlflow() -> None:
    """Import MLflow without telemetry and with few log lines.

    Raises:
        MlflowNotInstalled: MLflow is missing. A broken installation raises its own ImportError.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no reports to third parties
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # At the end of a run MLflow prints its address, with the password where the URL has one; `view_hint` has none.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    try:
        import mlflow  # noqa: F401 - for what it does to the loggers
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        raise MlflowNotInstalled from None

    hide_secrets_in_records()
    for name in ("mlflow", "alembic"):  # they log the creation of a database in many lines
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def registry_client(uri: str, doing: str, *, writes: bool = False, moves_alias: bool = False) -> Iterator[MlflowClient]:
    """Yield a client, with MLflow's global URI set (its registry reads it), and turn its errors into `UserError`.

    A client that writes, or moves an alias, waits longer for an unavailable server than a client that reads: what it
    writes may have taken hours.
    """
    client = connect(uri)
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import _tracking_service
    from sqlalchemy.exc import SQLAlchemyError

    before, variable = _tracking_service.utils._tracking_uri, os.environ.get("MLFLOW_TRACKING_URI")
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns at length of missing model cards, licenses and hub pages
    mlflow.set_tracking_uri(uri)
    try:
        with request_limits(UPLOAD_RETRIES if writes or moves_alias else READ_RETRIES, UPLOAD_TIMEOUT_SECONDS):
            yield client
    except (MlflowException, SQLAlchemyError, OSError) as error:
        unmoved = "; no alias was moved" if moves_alias else ""
        raise UserError(
            f"{doing} at {describe_servers(uri)} failed ({short(error)}){unmoved}",
            fix="check the server and rerun the same command",
            code="registry-request-failed",
        ) from error
    finally:
        logger.setLevel(level)
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None: as before
        if variable is not None:  # set_tracking_uri removes it
            os.environ["MLFLOW_TRACKING_URI"] = variable


def describe_servers(tracking_uri: str) -> str:
    """Return the server of registered models, and that of runs and files where it is another one; without secrets."""
    tracking, registry = storage.hide_secrets(tracking_uri), storage.hide_secrets(registry_of(tracking_uri))
    return tracking if registry == tracking else f"{registry} (MLFLOW_REGISTRY_URI; tracking at {tracking})"


_NO_ANSWER = {
    "Connection refused": "connection refused",
    "Failed to resolve": "the host name does not resolve",
    "error responses": "the server answers with errors, also after retries",
    "timed out": "the server does not answer in time",
}
"""Parts of the long messages of urllib3, and what they mean."""


def short(error: Exception) -> str:
    """Return the beginning of an error's text on one line, without secrets; a failed connection in short.

    An error of SQLAlchemy gives the database's own message, without the statement.
    """
    text = storage.hide_secrets(" ".join(str(getattr(error, "orig", None) or error).split()))
    if "Max retries exceeded" in text:
        for sign, meaning in _NO_ANSWER.items():
            if sign in text:
                return meaning
    return text if len(text) <= 300 else text[:297] + "..."


def view_hint(tracking_uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """Return how to see the metrics of a run: the URL of a server, or the `mlflow ui` command and the URL it serves.

    The URL opens MLflow's view of model training: its start page shows tools for GenAI and none of the metrics.
    """
    path = f"#/experiments/{experiment_id}/runs/{run_id}/model-metrics{TRAINING_VIEW}" if run_id else ""
    return _hint_for(tracking_uri, path)


def registry_view_hint(tracking_uri: str, name: str, version: str | int | None = None) -> str:
    """Return how to see a registered model, or one of its versions, as `view_hint` does for a run."""
    path = f"#/models/{url_quote(name, safe='')}"
    return _hint_for(tracking_uri, (path if version is None else f"{path}/versions/{version}") + TRAINING_VIEW)


def sync_command(output_dir: Path, tracking_uri: str | None) -> str:
    """Return the command line that sends the unsent metrics of a run's folder."""
    return join(["clozeworks", "sync-tracking", str(output_dir), *server_options(tracking_uri)])


def server_options(tracking_uri: str | None) -> list[str]:
    """Return the options that name a server in a printed command; none for a URL with a login, which is not printed."""
    is_plain = tracking_uri is not None and storage.redact(tracking_uri) == tracking_uri
    return ["--tracking-uri", str(tracking_uri)] if is_plain else []


def _hint_for(tracking_uri: str, path: str) -> str:
    uri = storage.hide_secrets(tracking_uri)
    if tracking_uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/{path}".rstrip("/")
    if urlsplit(tracking_uri).scheme.partition("+")[0] not in DATABASES:
        return uri
    return f"mlflow ui --backend-store-uri {quote(uri)}, then open {DEFAULT_UI}/{path}"


@contextlib.contextmanager
def request_limits(max_retries: int, timeout_seconds: int) -> Iterator[None]:
    """Limit MLflow's requests within the block; limits that the user set in the environment take precedence.

    MLflow reads the limits from the process environment at each request, and several threads of a run send requests at
    once (metrics, registrations), so no thread may change the limits of another. Where the blocks of several threads
    overlap, the largest limits apply to all. MLflow's defaults are 7 retries of 120 seconds: a server that is down
    would block a caller for minutes.
    """
    limits = {RETRIES: max_retries, SECONDS: timeout_seconds}
    with _limits_lock:
        if not _open_limits:
            _limits_of_user.clear()
            _limits_of_user.update(name for name in limits if name in os.environ)
        _open_limits.append(limits)
        _apply_limits()
    try:
        yield
    finally:
        with _limits_lock:
            del _open_limits[next(index for index, each in enumerate(_open_limits) if each is limits)]
            _apply_limits()


def _apply_limits() -> None:
    for name in {RETRIES, SECONDS} - _limits_of_user:
        if _open_limits:
            os.environ[name] = str(max(limits[name] for limits in _open_limits))
        else:
            os.environ.pop(name, None)


def flat_text(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as MLflow parameters: dotted names, values as text, without secrets."""
    flat: dict[str, str] = {}
    for name, value in flatten(values, prefix):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        flat[_param_name(storage.hide_secrets(name))] = storage.hide_secrets(text)[:MAX_PARAM_LENGTH]
    return flat


def _param_name(name: str) -> str:
    """Return the name in MLflow's alphabet: an invalid one (storage_options has URLs) would block all the others.

    The end of a long name is replaced by a digest, which keeps it distinct.
    """
    taken = _NOT_IN_NAMES.sub("_", name)
    if len(taken) <= MAX_NAME_LENGTH:
        return taken
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    return f"{taken[: MAX_NAME_LENGTH - _DIGEST_DIGITS - 1]}-{digest}"
