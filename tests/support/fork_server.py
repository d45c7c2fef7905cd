"""Python scripts started as forks of one process that has imported what a training run imports, at once or later.

A new process spends 7 CPU seconds on imports; a fork takes milliseconds. It is a process of its own as a started one
is: it has its own pid, environment, working folder, standard streams and signals, runs the script as `__main__`, counts
lines where coverage asks for it, and ends as Python ends. Only what is read while torch and DeepSpeed are imported is
the server's: with an environment that differs there, `start` starts a new process.

The workers of pytest-xdist share one server, which tests/conftest.py starts; without them a process of the tests starts
its own with the first script. It ends with the process that started it. They share what `made_once` makes too.

`stand_in` makes a command that is called as Python is and hands its process over to a fork: scripts that start Python
many times, and DeepSpeed's launcher, run as they stand. The fork gets its signals, and is killed when it is killed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESS_VARIABLE = "CLOZEWORKS_FORK_SERVER"
FOLDER_VARIABLE = "CLOZEWORKS_TESTS_FOLDER"
STAND_IN_VARIABLE = "CLOZEWORKS_STAND_IN"
# With what set-up and end of a run import: optimizers and engines, MLflow's stores, figures. And the commands after it.
_IMPORTED = """
torch torch.distributed torch._dynamo torch._inductor.compile_fx deepspeed transformers webdataset
mlflow mlflow.store.tracking.sqlalchemy_store mlflow.store.model_registry.sqlalchemy_store sqlalchemy.dialects.sqlite
trainer.loop.train trainer.loop.result trainer.tracking.figures launch.pretrain
sklearn.metrics accelerate transformers.pipelines mlflow.transformers
trainer.hf_export.export trainer.registry.registration trainer.finetuning.finetune trainer.inference.fill_mask
""".split()
_READ_BY_USE = ("DS_BUILD_", "MLFLOW_TRACKING_", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_EXT", "TORCHINDUCTOR_CACHE_")
_READ_BY_IMPORTS = ("PYTHON", "LD_", "OMP_", "MKL_", "DS_", "TORCH", "HF_", "TRANSFORMERS_", "MLFLOW_", "NUMEXPR")
FIXED = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""Of scripts of this tree; those of another one (`tree`) have its PYTHONPATH, and a server of their own."""


class ForkedProcess:
    """A fork of the server, with what tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, pid: int, pipes: Sequence[int] = ()) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._pipes = [open(pipe, encoding="utf-8", errors="replace") for pipe in pipes]
        self.stdout, self.stderr = self._pipes or (None, None)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and everything that it wrote to the pipes of standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        with ThreadPoolExecutor() as pool:
            reads = [pool.submit(pipe.read) for pipe in self._pipes]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            stdout, stderr = (read.result() for read in reads)
        for pipe in self._pipes:
            pipe.close()
        return stdout, stderr

    def poll(self) -> int | None:
        """Its exit status, negative for a signal's number; None while it runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            line = self._connection.recv(100)
            self._connection.close()
            self.returncode = int(line) if line else -signal.SIGKILL  # the server is gone
        return self.returncode


Started = ForkedProcess | subprocess.Popen[str]


def can_fork(environment: Mapping[str, str], tree: Path = ROOT) -> bool:
    """Whether a script with this environment finds torch and DeepSpeed imported as it would import them."""
    return _of_imports(environment) == _of_imports(os.environ | FIXED | {"PYTHONPATH": str(tree)})


def start(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: int | None = None,
    tree: Path = ROOT,
) -> Started:
    """Run `python ARGUMENTS`, in a fork if `can_fork`, with nothing on standard input.

    The arguments are a script, `-m` and a module, or `-c` and code, with its words. Both output streams go to the file
    descriptor `output`, or each into a pipe of its own.
    """
    if not can_fork(environment, tree):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.PIPE if output is None else output,
            text=True,
        )
    pipes = [os.pipe() for _ in range(2)] if output is None else []
    files = [write for _, write in pipes] or [output, output]
    with open(os.devnull) as null:
        connection, pid = _request(_address(tree), arguments, folder, environment, [null.fileno(), *files])
    for _, write in pipes:
        os.close(write)
    return ForkedProcess(connection, pid, [read for read, _ in pipes])


def _request(
    address: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[int | None]
) -> tuple[socket.socket, int]:
    """Ask for a fork with these three standard streams; the connection that its end comes by, and its process id."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + address)
    request = json.dumps({"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)})
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(request))
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], files)
    connection.sendall(request.encode())
    return connection, int(connection.recv(100))


def stand_in(folder: Path) -> Path:
    """Write a command `python` into the folder, which runs its arguments in a fork where `can_fork` allows it."""
    path = folder / "python"
    imported = json.dumps(_of_imports(os.environ | FIXED))
    words = [sys.executable, "-I", "-S", __file__, "--hand-over", _address(), imported, str(path)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def beside(command: Sequence[str], folder: Path) -> list[str]:
    """A command that ends with its parent, whose process id is its last word, as a fork, whose parent is the server."""
    parent = run(["-c", "import os; print(os.getppid())"], folder, os.environ | FIXED).stdout.strip()
    return [str(stand_in(folder)), *command[1:-1], parent]


def _hand_over(address: str, imported: str, own_path: str, *arguments: str) -> None:
    """Run the arguments in a fork with this process's streams, pass signals on, and end as it ends."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-B"):
        rest.pop(0)
    is_known = rest and (rest[0] in ("-m", "-c") or rest[0][:1] != "-")
    if not is_known or _of_imports(os.environ) != json.loads(imported):
        os.execv(sys.executable, [sys.executable, *arguments])
    environment = os.environ | {STAND_IN_VARIABLE: own_path}
    connection, pid = _request(address, rest, Path.cwd(), environment, [0, 1, 2])
    process = ForkedProcess(connection, pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    status = process.wait()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 1500
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` as `start` does, to its end."""
    process = start(arguments, folder, environment)
    stdout, stderr = process.communicate(timeout=timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, stdout, stderr)


def _of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(_READ_BY_IMPORTS) and not name.startswith(_READ_BY_USE)]
    return {name: environment[name] for name in names}


def share() -> None:
    """Start a server, and make a folder, for the processes that this one starts."""
    os.environ[ADDRESS_VARIABLE] = _own_server()
    os.environ[FOLDER_VARIABLE] = str(_shared_folder())


@functools.cache
def _shared_folder() -> Path:
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    folder = Path(tempfile.mkdtemp(prefix="clozeworks-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name, made by the first process of the tests that asks for it; others wait. Not to be changed.

    `make` fills the folder that it is given, which is empty.
    """
    folder = _shared_folder() / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(f"{folder}.made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            Path(f"{folder}.made").touch()
    return folder


def _address(tree: Path = ROOT) -> str:
    return (os.environ.get(ADDRESS_VARIABLE) if tree == ROOT else None) or _own_server(tree)


@functools.cache
def _own_server(tree: Path = ROOT) -> str:
    """Start this process's server and return its address, where it listens while it still imports."""
    address = f"clozeworks-tests-{os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | FIXED | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, address],
        cwd=tree,
        env={name: value for name, value in environment.items() if not name.startswith("COVERAGE_PROCESS")},
        stdin=subprocess.PIPE,  # its end tells the server that the tests are gone
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.wait)
    atexit.register(process.kill)  # before it is waited for
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n", "the fork server did not start"
    return address


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for every request until standard input ends; returns the request in the fork, None in the server."""
    import threading

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(100)
    print("listening", flush=True)
    _import_libraries()
    assert threading.active_count() == 1, f"threads do not survive a fork: {threading.enumerate()}"
    gc.collect()
    gc.freeze()  # a fork's collections do not touch, and so copy, what is imported
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    handed_over: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, woken, sys.stdin, *handed_over], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_the_ended(running)
            handed_over = {connection: pid for connection, pid in handed_over.items() if pid in running}
        for connection in handed_over.keys() & ready:  # whose stand-in was killed, and can pass no signal on
            os.kill(handed_over.pop(connection), signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            pid = os.fork()
            if pid == 0:
                _become(request, files)
                return request
            for file in files:
                os.close(file)
            running[pid] = connection
            if STAND_IN_VARIABLE in request["environment"]:
                handed_over[connection] = pid
            connection.send(str(pid).encode())
        if sys.stdin in ready:
            return None


def _import_libraries() -> None:
    os.environ["TORCH_WARM_POOL"] = "0"  # no processes of torch's compiler
    for name in _IMPORTED:
        with contextlib.suppress(Exception):  # a script that cannot import it either says so itself
            __import__(name)


def _compile_all() -> None:
    """Write the bytecode of libraries, and of tests with rewritten assertions, where several would each make it."""
    import pytest

    _import_libraries()
    sys.path.pop(0)  # the folder of this script, whose modules are tests.support's
    pytest.main(["--collect-only", "-q"])


def _tell_the_ended(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):  # where nobody waits for it
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    request: dict[str, Any] = json.loads(connection.recv(int.from_bytes(length, "big")))
    return request, list(files)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Give this fork the streams, environment and folder of the request, and signals as Python has them."""
    import random

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for given, standard in zip(files, range(3), strict=True):
        os.dup2(given, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1 if number == 2 else -1, closefd=False) for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        coverage.process_startup(force=True)


def main() -> None:
    if sys.argv[1] == "--hand-over":
        _hand_over(*sys.argv[2:])
    if sys.argv[1] == "--compile":
        return _compile_all()
    request = _serve(sys.argv[1])
    if request is None:
        return
    first, *words = request["arguments"]
    stand_in_path = os.environ.pop(STAND_IN_VARIABLE, None)
    launchers = ("deepspeed.launcher.", "torch.distributed.run")
    if stand_in_path and (Path(first).name == "deepspeed" or (words and words[0].startswith(launchers))):
        sys.executable = stand_in_path  # the launcher starts its second half and the ranks with it
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv, sys.path[0] = words, os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request["arguments"]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
