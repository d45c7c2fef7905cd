"""Executors: every unit once, killed processes survived, a user's mistake told as such."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.base import registries
from data_prep.base.errors import UsageError, UserError
from data_prep.executors.executors import ExecutorOptions, ProcessExecutor, open_executor, run_units
from tests.support.error_codes import coded

_TASKS = textwrap.dedent(
    """
    import os, signal, sys, threading, time
    from pathlib import Path
    import psutil
    from data_prep.base.errors import UserError
    from data_prep.storage import storage
    from data_prep.executors import worker_server
    from data_prep.executors.executors import run_units
    from data_prep.executors.executors import ProcessExecutor

    def whoami(task):
        folder, run, number = task
        (folder / f"here-{run}-{os.getpid()}").touch()
        while len(list(folder.glob(f"here-{run}-*"))) < 2:
            time.sleep(0.01)
        return os.getpid(), [*storage.options(), os.environ["LOGIN"]]

    def killed_once(unit):
        folder, number = unit
        if number == 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def always_killed(unit):
        os.kill(os.getpid(), signal.SIGKILL)

    def refused(unit):
        raise UserError(f"unit {unit} is bad", fix="correct it", code="bad-unit")

    class Peculiar(Exception):
        def __init__(self, text, number):
            super().__init__(text)

    def peculiar(unit):
        raise Peculiar("not read again", unit)

    class Counted(Exception):
        def __init__(self, number):
            super().__init__(f"not read again: {int(number)}")

    def counted(unit):
        import tasks  # the class of a module, which the caller can import

        raise tasks.Counted(unit)

    def endless(folder):
        (folder / f"worker-{os.getpid()}").touch()
        time.sleep(600)

    def warm(folder):
        (folder / f"warm-{os.getpid()}").touch()
        time.sleep(0.2)
        raise UserError("warming up went wrong")

    def waits(folder):
        (folder / f"begun-{os.getpid()}").touch()
        time.sleep(600)

    def large(unit):
        return bytes(20_000_000)  # more than a pipe holds

    def wait_until_all_send(executor):
        while not all(worker.connection.poll() for worker in executor._workers):
            time.sleep(0.01)

    def helpers(name):
        children = psutil.Process().children()
        return [child for child in children if f"multiprocessing.{name} import main" in " ".join(child.cmdline())]

    def goes_on(task):
        folder, number = task
        (folder / f"run-{os.getpid()}").touch()
        while not (folder / "killed").exists():
            time.sleep(0.01)
        return number

    def kill_when_running(name, folder):
        while len(list(folder.glob("run-*"))) < 2:
            time.sleep(0.01)
        for helper in helpers(name):
            helper.kill()
        (folder / "killed").touch()

    if __name__ == "__main__":
        folder = Path(sys.argv[2])
        if sys.argv[1] == "killed_once":
            print(sorted(result for _, result in run_units(killed_once, [(folder, n) for n in range(8)], 2)))
        elif sys.argv[1] == "whoami":
            with ProcessExecutor(2) as executor:
                tasks = [[(folder, run, number) for number in range(4)] for run in range(2)]
                runs = []
                for name, run in zip(("here", "somewhere"), tasks):
                    storage.configure({f"s3://{name}": {"profile": "research"}})
                    os.environ["LOGIN"] = name
                    runs.append([result for _, result in run_units(whoami, run, executor)])
            pids = [{pid for pid, _ in run} for run in runs]
            print(pids[0] == pids[1], len(pids[0]), os.getpid() in pids[0], {tuple(names) for _, names in runs[1]})
        elif sys.argv[1] == "warm":
            os.environ["LOGIN"] = ""
            with ProcessExecutor(2) as executor:
                executor.warm_up(warm, folder)
                pids = {pid for _, (pid, _) in executor.run(whoami, [(folder, 0, number) for number in range(8)])}
            print({int(path.name[5:]) for path in folder.glob("warm-*")} <= pids | {0}, len(pids))
        elif sys.argv[1] == "given_up":
            try:
                with ProcessExecutor(2) as executor:
                    executor.warm_up(waits, folder)
                    while not list(folder.glob("begun-*")):
                        time.sleep(0.02)
                    raise UserError("the plan is bad")
            except UserError as error:
                print("user error:", error)
        elif sys.argv[1] == "server_killed_at_start":
            worker_server.start_worker_server()
            while not (servers := helpers("forkserver")):  # it is forked, and about to be another program
                time.sleep(0.01)
            server, = servers
            server.suspend()  # so that it is asked for a process, and answers nothing
            threading.Timer(0.5, server.kill).start()
            print(sorted(result for _, result in run_units(abs, [-1, -2, -3], 2)))
        elif sys.argv[1] == "server_killed_at_work":
            threading.Thread(target=kill_when_running, args=("forkserver", folder), daemon=True).start()
            print(sorted(result for _, result in run_units(goes_on, [(folder, n) for n in range(5)], 2)))
        elif sys.argv[1] == "tracker_killed":
            with ProcessExecutor(2) as executor:
                print(sorted(result for _, result in executor.run(abs, [-1, -2, -3])))
                tracker, = helpers("resource_tracker")
                tracker.kill()
                print(sorted(result for _, result in executor.run(abs, [-1, -2, -3])))
            print(sorted(result for _, result in run_units(abs, [-1, -2, -3], 2)))
        elif sys.argv[1] == "killed_while_sending":
            try:
                with ProcessExecutor(2) as executor:
                    results = executor.run(large, [1, 2, 3, 4])
                    next(results)
                    wait_until_all_send(executor)
                    executor._workers[0]._process.kill()
                    print(len(list(results)))
                    for _ in executor.run(large, [1, 2, 3, 4]):
                        wait_until_all_send(executor)
                        raise UserError("the disk is full")
            except UserError as error:
                print("user error:", error)
        elif sys.argv[1] == "endless":
            list(run_units(endless, [folder, folder], 2))
        else:
            try:
                list(run_units(globals()[sys.argv[1]], [1, 2, 3], 2))
            except UserError as error:
                print("user error:", error.code)
    """
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(_TASKS)
    return path


def _start(script: Path, case: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    return subprocess.Popen(
        [sys.executable, str(script), case, str(script.parent)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_one_worker_runs_the_units_here_and_in_order() -> None:
    assert list(run_units(lambda number: (number * number, os.getpid()), [3, 1, 2], 1)) == [
        (number, (number * number, os.getpid())) for number in (3, 1, 2)
    ]
    assert list(run_units(abs, [], 4)) == []


def test_one_workers_error_reaches_the_caller() -> None:
    def refuse(unit: int) -> None:
        raise UserError(f"unit {unit} is bad")

    with pytest.raises(UserError, match="unit 5 is bad"):
        list(run_units(refuse, [5], 1))


@pytest.mark.spawn
@pytest.mark.fault(
    row=74, fault="processes that are kept for a run with another login", required="they use that of the run"
)
def test_processes_are_kept_from_run_to_run_and_know_the_stores_options(script: Path) -> None:
    output, _ = _start(script, "whoami").communicate(timeout=60)
    assert output.strip() == "True 2 False {('s3://somewhere', 'somewhere')}"


@pytest.mark.fault(row=12, fault="a worker of the pool is killed", required="its units are done again")
@pytest.mark.spawn
def test_units_of_a_killed_worker_are_done_again(script: Path) -> None:
    output, errors = _start(script, "killed_once").communicate(timeout=60)
    assert output.strip() == str(list(range(8)))
    assert (script.parent / "killed").exists() and "attempt 1 of 3" in errors


@pytest.mark.spawn
def test_a_unit_that_always_kills_its_worker_is_given_up(script: Path) -> None:
    output, _ = _start(script, "always_killed").communicate(timeout=60)
    assert "user error: workers-killed" in output


@pytest.mark.fault(row=55, fault="the fork server is killed at its start", required="the work is done again")
@pytest.mark.spawn
def test_a_fork_server_killed_at_its_start_loses_no_result(script: Path) -> None:
    output, errors = _start(script, "server_killed_at_start").communicate(timeout=60)
    assert output.strip() == "[1, 2, 3]" and errors.count("\n") == 1, errors
    assert "3 unfinished units" in errors and "1 of 3" in errors


@pytest.mark.fault(row=55, fault="the fork server is killed at work", required="no traceback, no loss")
@pytest.mark.spawn
def test_a_fork_server_killed_at_work_loses_no_result_and_leaves_no_worker(script: Path) -> None:
    output, errors = _start(script, "server_killed_at_work").communicate(timeout=60)
    assert (output.strip(), errors) == ("[0, 1, 2, 3, 4]", "")
    workers = [int(path.name.partition("-")[2]) for path in script.parent.glob("run-*")]
    assert len(workers) == 2 and not any(map(_is_alive, workers))


@pytest.mark.fault(row=55, fault="the resource tracker of preparation killed", required="no line; nothing is lost")
@pytest.mark.spawn
def test_a_killed_resource_tracker_loses_no_result(script: Path) -> None:
    process = _start(script, "tracker_killed")
    output, errors = process.communicate(timeout=60)  # to the end of all that writes there, the new tracker too
    assert output.splitlines() == ["[1, 2, 3]"] * 3 and errors == ""


@pytest.mark.spawn
def test_a_workers_error_reaches_the_caller(script: Path) -> None:
    output, _ = _start(script, "refused").communicate(timeout=60)
    assert output.strip() == "user error: bad-unit"


@pytest.mark.parametrize("name", ["peculiar", "counted"])
@pytest.mark.spawn
def test_an_error_that_cannot_be_read_again_is_printed_with_its_own_traceback(script: Path, name: str) -> None:
    _, errors = _start(script, name).communicate(timeout=60)
    assert f"{name.capitalize()}: not read again" in errors and "RuntimeError: what a unit returned or" in errors


@pytest.mark.spawn
def test_a_worker_killed_while_it_sends_a_result_loses_no_result(script: Path) -> None:
    output, errors = _start(script, "killed_while_sending").communicate(timeout=60)
    assert output.splitlines() == ["3", "user error: the disk is full"] and "Traceback" not in errors, errors


@pytest.mark.spawn
def test_workers_are_warmed_up_and_a_failed_warm_up_does_not_stop_units(script: Path) -> None:
    output, _ = _start(script, "warm").communicate(timeout=60)
    assert output.strip() == "True 2"
    assert list(script.parent.glob("warm-*"))


@pytest.mark.spawn
def test_an_error_before_the_units_does_not_wait_for_the_warming_up(script: Path) -> None:
    output, _ = _start(script, "given_up").communicate(timeout=60)
    assert output.strip() == "user error: the plan is bad"


_SCRIPT_WITHOUT_GUARD = """
import os
from data_prep.executors.executors import run_units
print("started")
factor = 3
def times(number):
    return factor * number, os.getpid()
found = [result for _, result in run_units(times, [1, 2, 3], 2)]
found += [(result, 0) for _, result in run_units(lambda number: number + factor, [1, 2], 2)]
print(sorted(value for value, _ in found), os.getpid() in {pid for _, pid in found})
"""


@pytest.mark.spawn
@pytest.mark.parametrize("how", ["script", "-c", "stdin"])
def test_functions_of_a_script_without_a_main_guard_run_in_workers(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT_WITHOUT_GUARD)
    words = {"script": [str(tmp_path / "script.py")], "-c": ["-c", _SCRIPT_WITHOUT_GUARD], "stdin": ["-"]}[how]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, *words], env=environment, text=True, capture_output=True, timeout=120, cwd=tmp_path,
        input=_SCRIPT_WITHOUT_GUARD if how == "stdin" else None,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["started", "[3, 4, 5, 6, 9] False"], done.stderr


@pytest.mark.spawn
def test_workers_end_when_their_parent_is_killed(script: Path) -> None:
    process = _start(script, "endless")
    deadline = time.monotonic() + 180
    while len(workers := list(script.parent.glob("worker-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    numbers = [int(path.name.partition("-")[2]) for path in workers]
    assert len(numbers) == 2
    while any(map(_is_alive, numbers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_is_alive, numbers))


def _is_alive(number: int) -> bool:
    """Whether the process runs; one that ended and was not collected by anybody does not count."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_executor_is_opened_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_executor.py").write_text(
        "from data_prep.executors.executors import ProcessExecutor\n"
        "def open_mine(options):\n    return ProcessExecutor(10 * options.num_workers)\n"
        "text = 'not a function'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        registries.importlib.metadata,
        "entry_points",
        lambda group: (
            [SimpleNamespace(name="mine", value="my_executor:open_mine", dist=None)] * (group == "clozeworks.executors")
        ),
    )
    for name, num_workers in (("process", 2), ("my_executor:open_mine", 20), ("mine", 20)):
        opened = open_executor(name, ExecutorOptions(2))
        assert isinstance(opened, ProcessExecutor) and opened.num_workers == num_workers
        assert [result for _, result in run_units(abs, [-1], opened)] == [1]
    for name, code in (
        ("slurm", "unknown-executor"),
        ("no_such_module:open", "missing-package"),
        ("my_executor:close", "unknown-executor"),
        ("my_executor:text", "unknown-executor"),
        (":open", "unknown-executor"),
    ):
        with pytest.raises(UsageError, match=name, check=coded(code)):
            open_executor(name, ExecutorOptions())
    with pytest.raises(UsageError, match="tcp://a:1", check=coded("scheduler-without-cluster")):
        open_executor("process", ExecutorOptions(2, "tcp://a:1"))
    with pytest.raises(UsageError, check=coded("missing-scheduler")):
        open_executor("dask", ExecutorOptions(2))


OWN = """
from concurrent.futures import ThreadPoolExecutor

class Own:
    def __init__(self, left_out=0, error=None): self.left_out, self.error = left_out, error
    def run(self, task, units):
        if self.error: raise self.error
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(lambda unit: (unit, task(unit)), units[self.left_out:])

def open_own(options): return Own()
def open_lossy(options): return Own(1)
def open_lost(options): return Own(error=ConnectionError("no cluster"))
def open_full(options): return Own(error=OSError(28, "No space left on device"))
def open_nothing(options): return None
def open_broken(options): raise ValueError("no such cluster")
"""


def test_an_executor_of_the_user_is_a_class_with_one_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_executor.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in (
        ("own", ""),
        ("lossy", "executor-failed"),
        ("lost", "executor-failed"),
        ("nothing", "unknown-executor"),
        ("broken", "executor-failed"),
    ):
        with (
            pytest.raises(UserError, check=coded(code)) if code else nullcontext(),
            open_executor(f"own_executor:open_{name}", ExecutorOptions()) as opened,
        ):
            assert sorted(run_units(abs, [-1, -2], opened)) == [(-2, 2), (-1, 1)]
    with (
        pytest.raises(OSError, match="No space left"),
        open_executor("own_executor:open_full", ExecutorOptions()) as it,
    ):
        list(run_units(abs, [-1], it))
