"""The door to MLflow: which server, how patiently it is asked, and what may be said to it.

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
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage

if TYPE_CHECKING:
    from mlflow import MlflowClient

EMBEDDED_DATABASE = "mlflow.db"  # MLflow's own default, with the artifacts in ./mlruns beside it
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SERVERS = ("http", "https", "databricks", "databricks-uc", "uc")
UPLOAD_RETRIES = 4
UPLOAD_TIMEOUT_SECONDS = 300  # a server that stores gigabytes answers late
REQUIREMENT = "mlflow>=3.17,<4"
MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
_DIGEST_DIGITS = 12
_NOT_IN_NAMES = re.compile(r"[^\w./ -]|/(?=[/.])")

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT"

_limits_lock = threading.Lock()
_open_limits: list[dict[str, int]] = []
"""The limits of every block of `request_limits` that has begun and not ended."""
_limits_of_user: set[str] = set()
"""Which were set by the user before the first of these blocks began."""


class MlflowNotInstalled(UsageError):
    """MLflow is not installed."""

    def __init__(self) -> None:
        super().__init__(f"mlflow is not installed. Fix: pip install {quote(REQUIREMENT)}")


def resolve_tracking_uri(setting: str | None, recorded: str | None = None) -> str:
    """The server to talk to: the setting, else MLFLOW_TRACKING_URI, else the embedded sqlite file.

    `recorded` is where the run was tracked before: an embedded file is found again from another folder.

    Raises:
        UsageError: the URI is a plain path or of an unknown kind.
    """
    uri, source = setting, "the tracking URI"
    if not uri:
        uri, source = os.environ.get("MLFLOW_TRACKING_URI", "").strip(), "MLFLOW_TRACKING_URI"
    if not uri:
        if recorded and recorded.startswith("sqlite:///") and Path(recorded.removeprefix("sqlite:///")).is_file():
            return recorded
        return f"sqlite:///{Path(EMBEDDED_DATABASE).absolute()}"
    scheme = "databricks" if uri == "databricks" else urlsplit(uri).scheme.partition("+")[0]
    if scheme not in DATABASES + SERVERS:
        remedy = f"for a file write sqlite:///{Path(uri).absolute()}.db" if not scheme else "file stores are retired"
        raise UsageError(
            f"{source} {storage.hide_secrets(uri)!r} is no MLflow address; give the address of a server, such as "
            f"http://127.0.0.1:5000, or of a database, such as sqlite:///mlflow.db ({remedy})"
        )
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def connect(tracking_uri: str) -> MlflowClient:
    """A client of that server, of which nothing is asked yet, or of that database, which is opened or made.

    Raises:
        MlflowNotInstalled: there is no MLflow.
        UserError: the database cannot be opened, or is half made; MLflow asks one that is away again for 100 s.
    """
    import_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if tracking_uri.startswith("sqlite:///"):
            _make_database(Path(tracking_uri.removeprefix("sqlite:///").partition("?")[0]))
        return MlflowClient(tracking_uri)
    # ImportError: its driver is not installed; ValueError: a port of letters.
    except (SQLAlchemyError, MlflowException, ImportError, ValueError, OSError) as error:
        cause, where = short(error), storage.hide_secrets(tracking_uri)
        remedy = (
            "if no other command makes it just now, one was killed as it did: remove that file"
            if "already exists" in cause
            else "see to that database and its address"
        )
        raise UserError(f"{where} cannot be opened by MLflow: {cause}; {remedy}") from error


def _make_database(path: Path) -> None:
    """Make a new database beside its place, and put it there whole: a kill may come in the seconds that it takes."""
    if path.exists() or not path.parent.is_dir():
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
            return  # another process was faster
        except OSError:  # a file system without links
            os.rename(whole, path)


def import_mlflow() -> None:
    """Import MLflow as all of this project uses it: it reports to nobody and tells little.

    Raises:
        MlflowNotInstalled: there is none. An installation that cannot be imported raises its own ImportError.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # training reports to nobody else
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # At the end of a run MLflow prints its address, with the password where the URL has one; `view_hint` has none.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    try:
        import mlflow  # noqa: F401 - for what it does to the loggers
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        raise MlflowNotInstalled from None

    for name in ("mlflow", "alembic"):  # they log the creation of a database in many lines
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def registry_client(uri: str, doing: str, moves_alias: bool = False) -> Iterator[MlflowClient]:
    """A client, with MLflow's global address set for the block (its registry reads that), and errors for people."""
    client = connect(uri)
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import _tracking_service
    from sqlalchemy.exc import SQLAlchemyError

    before, variable = _tracking_service.utils._tracking_uri, os.environ.get("MLFLOW_TRACKING_URI")
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it misses model cards, licenses and hub pages in long warnings
    mlflow.set_tracking_uri(uri)
    try:
        with request_limits(UPLOAD_RETRIES, UPLOAD_TIMEOUT_SECONDS):
            yield client
    except (MlflowException, SQLAlchemyError, OSError) as error:
        unmoved = ". No alias was moved" if moves_alias else ""
        raise UserError(
            f"{doing} at {storage.hide_secrets(uri)} failed: {short(error)}{unmoved}; fix that and run the "
            "same command again"
        ) from error
    finally:
        logger.setLevel(level)
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None: as it was before anybody set one
        if variable is not None:  # which that takes away
            os.environ["MLFLOW_TRACKING_URI"] = variable


_NO_ANSWER = {
    "Connection refused": "nothing answers there (connection refused)",
    "Failed to resolve": "there is no host of that name",
    "error responses": "the server answers with errors, also when asked again",
    "timed out": "the server does not answer in time",
}
"""Signs in urllib3's text of several lines' length, and what they mean."""


def short(error: Exception) -> str:
    """The beginning of an error's text on one line, without secrets; what befell a connection in plain words.

    Of SQLAlchemy's it is the database's own word, without the statement.
    """
    text = storage.hide_secrets(" ".join(str(getattr(error, "orig", None) or error).split()))
    if "Max retries exceeded" in text:
        for sign, meaning in _NO_ANSWER.items():
            if sign in text:
                return meaning
    return text if len(text) <= 300 else text[:297] + "..."


def view_hint(tracking_uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """Where a person looks at the run: an address, or the command that serves one."""
    if tracking_uri.startswith(("http://", "https://")):
        path = f"/#/experiments/{experiment_id}/runs/{run_id}" if run_id else ""
        return storage.hide_secrets(tracking_uri.rstrip("/")) + path
    if tracking_uri.startswith("sqlite:"):
        return f"mlflow ui --backend-store-uri {quote(storage.hide_secrets(tracking_uri))}"
    return storage.hide_secrets(tracking_uri)


@contextlib.contextmanager
def request_limits(max_retries: int, timeout_seconds: int) -> Iterator[None]:
    """Within the block MLflow's requests end after these; what the user set in the environment goes first.

    MLflow reads the limits from the environment of the process at each request, and several threads of a training make
    requests at once (its curves, its registrations), so that none may set or take away what another goes by.

    Where the blocks of several threads overlap, the most patient limits hold for all. MLflow's defaults are 7 retries
    of 120 seconds: a server that is down would hold a caller for minutes.
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
            del _open_limits[next(place for place, held in enumerate(_open_limits) if held is limits)]
            _apply_limits()


def _apply_limits() -> None:
    for name in {RETRIES, SECONDS} - _limits_of_user:
        if _open_limits:
            os.environ[name] = str(max(limits[name] for limits in _open_limits))
        else:
            os.environ.pop(name, None)


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
