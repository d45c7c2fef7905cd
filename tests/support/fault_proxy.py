"""An HTTP proxy in front of a server that makes real faults: refusals, broken connections, silence, lost answers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import pytest

from data_prep.storage import store_errors

# refuse: answer with a status and an S3 error code.
# reset: break the connection before anything is asked of the server.
# cut: answer half the body, and break the connection.
# lose_answer: let the server do it, and break the connection instead of answering.
# hang: answer nothing until the proxy ends.
# slow: answer rightly after `seconds`.
Kind = Literal["refuse", "reset", "cut", "lose_answer", "hang", "slow"]

_PER_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "expect", "host"}


@dataclass
class Fault:
    """What happens to a request, and to which: those that `concerns` picks, `times` of them."""

    kind: Kind
    times: float = float("inf")
    concerns: Callable[[Request], bool] = lambda request: True
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 1.0
    happened: int = 0


@dataclass(frozen=True)
class Request:
    """A request as it came."""

    method: str
    target: str  # path and query
    headers: dict[str, str]  # names in lower case
    num_bytes: int  # of its body


@dataclass
class FaultProxy:
    """The running proxy; the faults in `faults` happen to the requests that follow."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.happened < fault.times and fault.concerns(request):
                    fault.happened += 1
                    return fault
        return None


@contextlib.contextmanager
def run_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of `endpoint` (http://HOST:PORT) while the block runs."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            fault = proxy.fault_for(Request(self.command, self.path, headers, len(body)))
            kind = fault.kind if fault else None
            if kind == "hang":
                ended.wait()
            if fault and kind == "slow":
                ended.wait(fault.seconds)
            if kind in ("reset", "hang"):
                return self.break_connection()
            if fault and kind == "refuse":
                return self.refuse(fault)
            status, answer_headers, answer = self.ask_server(body, headers)
            if kind == "lose_answer":
                return self.break_connection()
            self.send_response(status)
            for name, value in answer_headers:
                if name.lower() not in _PER_CONNECTION:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2] if kind == "cut" else answer)
            if kind == "cut":
                self.break_connection()

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = handle_any

        def ask_server(self, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
            server = urlsplit(endpoint)
            connection = http.client.HTTPConnection(str(server.hostname), server.port, timeout=60)
            kept = {name: value for name, value in headers.items() if name not in _PER_CONNECTION}
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, kept)
                answer = connection.getresponse()
                return answer.status, answer.getheaders(), answer.read()

        def refuse(self, fault: Fault) -> None:
            text = f"<Error><Code>{fault.code}</Code><Message>made by the test</Message></Error>".encode()
            self.send_response(fault.status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def break_connection(self) -> None:
            self.wfile.flush()
            # Closed with a reset rather than a polite end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the connections that were broken on purpose

    server = Server(("127.0.0.1", 0), Handler)
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield proxy
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def run_store_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """The same in front of a store, whose failed requests are soon tried again."""
    with pytest.MonkeyPatch.context() as patch, run_proxy(endpoint) as proxy:
        patch.setattr(store_errors, "_FIRST_WAIT_SECONDS", 0.02)
        yield proxy
