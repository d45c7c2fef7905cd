"""A server that stands in for the Hugging Face Hub."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
