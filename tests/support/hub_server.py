"""Servers that stand in for the Hugging Face Hub: of a data set that is read, and of models that are pushed."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the Hub answers for one data set: its files and folders, and their bytes by range."""

    def __init__(self, folder: Path, damage: Callable[[bytes], bytes] = bytes) -> None:
        """Serve the folder as the data set user/tales; `damage` changes what is answered besides files."""
        self.requests: list[str] = []
        self.damage = damage
        self.status: int | None = None
        """Of every answer, where it is set."""
        self.held: str | None = None
        """Name of a file whose bytes are answered only once `release` is set; `is_held` is set at such a request."""
        self.is_held, self.release = threading.Event(), threading.Event()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(f"GET {self.path}")
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
                if path.startswith("/datasets/user/tales/resolve/"):
                    self._file(folder / path.split("/", 6)[6])
                elif path.startswith("/api/datasets/user/tales/tree/"):
                    below = folder / (path.split("/", 7) + [""])[7]
                    self._answer([_entry(item, folder) for item in sorted(below.iterdir())] if below.is_dir() else None)
                elif path.startswith("/api/datasets/user/tales"):
                    self._answer({"id": "user/tales", "sha": COMMIT, "siblings": [], "private": False, "tags": []})
                else:
                    self._answer(None)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.requests.append(f"POST {self.path}")
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = urllib.parse.parse_qs(body) if not body.startswith("{") else json.loads(body)
                found = [folder / name for name in form["paths"]]
                self._answer([_entry(item, folder) for item in found if item.exists()])

            def _file(self, path: Path) -> None:
                if not path.is_file():
                    self._answer(None)
                    return
                if path.name == hub.held and self.command == "GET":
                    hub.is_held.set()
                    hub.release.wait(300)
                data = path.read_bytes()
                start, stop = 0, len(data)
                if wanted := self.headers.get("Range"):
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), min(int(last or len(data)) + 1, len(data))
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(stop - start))
                self.send_header("ETag", '"x"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data[start:stop])

            def _answer(self, values: Any) -> None:
                data = json.dumps(values if values is not None else {"error": "not found"}).encode()
                data = hub.damage(data)
                self.send_response(hub.status or (200 if values is not None else 404))
                if values is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
    return {"type": "file", "path": name, "oid": f"{path.stat().st_size:040x}", "size": path.stat().st_size}


class Stored(NamedTuple):
    """A file of a commit."""

    data: bytes
    is_large: bool

    @property
    def git_digest(self) -> str:
        data = self.data
        if self.is_large:  # git stores a pointer
            oid = hashlib.sha256(data).hexdigest()
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repository:
    """A model repository: its commits, each with all files, and its branches."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, Stored]] = {}
        self.messages: dict[str, str] = {}
        self.parents: dict[str, str | None] = {}
        self.branches: dict[str, str] = {}
        self.add("main", {".gitattributes": Stored(b"*.safetensors filter=lfs\n", False)}, "initial commit")

    def add(self, branch: str, files: dict[str, Stored], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.parents[oid] = self.branches.get(branch)
        self.commits[oid], self.messages[oid], self.branches[branch] = files, message, oid
        return oid

    def history(self, revision: str) -> list[str]:
        """The commits of a revision, the newest first."""
        oid, found = self.branches.get(revision, revision), []
        while oid is not None:
            found.append(oid)
            oid = self.parents[oid]
        return found

    def files(self, revision: str) -> dict[str, Stored] | None:
        return self.commits.get(self.branches.get(revision, revision))

    def contents(self, branch: str) -> dict[str, bytes]:
        """The bytes of a branch's files, without the Hub's own."""
        files = self.commits[self.branches[branch]]
        return {name: file.data for name, file in files.items() if name != ".gitattributes"}


class ModelHub:
    """A Hub of model repositories that answers the requests of huggingface_hub's client, over a socket.

    A request with another token than `token` is refused, and so is an upload to a presigned address with any.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """The large files that were uploaded, by sha256."""
        self.requests: list[str] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        """Returns the status with which a request fails; 0 ends the connection without an answer."""
        self.loses_answer: Callable[[str, str], bool] = lambda method, path: False
        """Whether the work is done and the answer lost."""
        self.start(0)

    def start(self, port: int) -> None:
        """Listen; with the port of before it is the same Hub after an outage."""
        handler = type("Handler", (_ModelHandler,), {"hub": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def count(self, start: str) -> int:
        """How many requests began so."""
        return sum(request.startswith(start) for request in self.requests)


class _ModelHandler(http.server.BaseHTTPRequestHandler):
    hub: ModelHub

    def _route(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.hub.requests.append(f"{self.command} {path}")
        status = self.hub.fault(self.command, path)
        if status == 0:
            self.close_connection = True
            return
        if status is not None:
            self._send(status, {"error": "an answer of the stand-in"})
            return
        status, values, headers = self._work(path, body)
        if self.hub.loses_answer(self.command, path):
            self.close_connection = True
            return
        self._send(status, values, headers)

    do_GET = do_HEAD = do_POST = do_PUT = _route

    def _work(self, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        hub, login = self.hub, self.headers.get("Authorization")
        if path.startswith("/lfs-storage/"):  # presigned
            if login is not None or "X-Amz-Signature=" not in self.path:
                return 400, {"error": "only one auth mechanism allowed"}, {}
            if hashlib.sha256(body).hexdigest() != path.rpartition("/")[2]:
                return 400, {"error": "other content"}, {}
            hub.objects[path.rpartition("/")[2]] = body
            return 200, {}, {}
        if login != f"Bearer {hub.token}":
            return 401, {"error": "Invalid username or password."}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/(batch|verify)", path):
            return self._large(match[1], match[2], json.loads(body))
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/([\w-]+)(?:/(.*))?)?", path):
            repository = hub.repositories.get(match[1])
            if repository is None:
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            return self._model(match[1], repository, match[2] or "revision", match[3] or "main", body)
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(hub.repositories[match[1]], match[2], match[3])
        return 404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"}

    def _create(self, request: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        name = f"{request['organization']}/{request['name']}"
        if name in self.hub.repositories:
            return 409, {"error": "exists", "url": f"{self.hub.url}/{name}"}, {}
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repositories[name] = Repository(private)
        return 200, {"url": f"{self.hub.url}/{name}", "id": name}, {}

    def _large(self, name: str, what: str, request: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if what == "verify":
            return (200 if request["oid"] in self.hub.objects else 404), {}, {}
        objects = []
        for item in request["objects"]:
            signed = f"{self.hub.url}/lfs-storage/{item['oid']}?X-Amz-Signature=presigned-secret"
            actions = {
                "upload": {"href": signed, "header": {}},
                "verify": {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify", "header": {}},
            }
            objects.append(item | ({} if item["oid"] in self.hub.objects else {"actions": actions}))
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _model(
        self, name: str, repository: Repository, what: str, rest: str, body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
                for branch, oid in repository.branches.items()
            ]
            return 200, {"branches": branches, "converts": [], "tags": []}, {}
        if what == "branch":
            if rest in repository.branches:
                return 409, {"error": "Reference already exists"}, {}
            start = (json.loads(body or b"{}")).get("startingPoint") or "main"
            repository.branches[rest] = repository.branches.get(start, start)
            return 200, {}, {}
        files = repository.files(rest)
        if files is None:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        if what == "tree":
            return 200, [self._entry(path, file) for path, file in files.items()], {}
        if what == "commits":
            return 200, [self._described(repository, oid) for oid in repository.history(rest)], {}
        if what == "preupload":
            asked = [item["path"] for item in json.loads(body)["files"]]
            modes = ["lfs" if path.endswith(".safetensors") else "regular" for path in asked]
            oids = [self._entry(path, files[path]) if path in files else {} for path in asked]
            answers = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid.get("lfs", oid).get("oid")}
                for path, mode, oid in zip(asked, modes, oids, strict=True)
            ]
            return 200, {"files": answers}, {}
        if what == "commit":
            return self._commit(name, repository, rest, dict(files), body)
        if what == "revision":
            sha = repository.branches.get(rest, rest)
            siblings = [{"rfilename": path} for path in files]
            return 200, {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []}, {}
        return 404, {"error": "not found"}, {}

    def _entry(self, path: str, file: Stored) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "oid": file.git_digest, "size": len(file.data)}
        if file.is_large:
            entry["lfs"] = {"oid": hashlib.sha256(file.data).hexdigest(), "size": len(file.data), "pointerSize": 130}
        return entry

    def _described(self, repository: Repository, oid: str) -> dict[str, Any]:
        title = repository.messages[oid]
        return {"id": oid, "title": title, "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}

    def _commit(
        self, name: str, repository: Repository, branch: str, files: dict[str, Stored], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        message = ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, repository.branches[branch]):
                    return 412, {"error": "the branch moved"}, {}
            elif item["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return 400, {"error": "a large file was not uploaded"}, {}
                files[value["path"]] = Stored(self.hub.objects[value["oid"]], True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.add(branch, files, message)
        return 200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "hookOutput": ""}, {}

    def _resolve(self, repository: Repository, revision: str, path: str) -> tuple[int, Any, dict[str, str]]:
        file = (repository.files(revision) or {}).get(path)
        if file is None:
            return 404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"}
        etag = hashlib.sha256(file.data).hexdigest()
        return 200, file.data, {"ETag": f'"{etag}"', "X-Repo-Commit": repository.branches.get(revision, revision)}

    def _send(self, status: int, values: Any, headers: dict[str, str] | None = None) -> None:
        data = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


def reached_by(monkeypatch: pytest.MonkeyPatch, hub: ModelHub) -> None:
    """Lead the client in this process to a stand-in, with its token, without Xet, caches and waits."""
    import huggingface_hub.constants
    import huggingface_hub.utils._http

    from trainer.registry import hub_repository

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_repository, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
