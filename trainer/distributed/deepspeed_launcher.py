"""DeepSpeed's launcher with two additions: pdsh ends with the launcher, and an unreachable host ends the launch.

`clozeworks nodes` starts it. By default pdsh outlives its launcher, also after SIGKILL. If the launcher runs on a host
with ranks, they notice that (`trainer/distributed/launcher.py`); a launcher on a login node would leave a run behind
that cannot be stopped from there. And pdsh continues without an unreachable host, whose ranks the others would wait
for.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any

from deepspeed.launcher import runner

from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS
from trainer.distributed.side_process import end_with_parent

_SSH_FAILED = re.compile(rb"pdsh@[^:]+: ([^:]+): ssh exited with exit code 255")
"""ssh's own status. A host that was reached has printed to standard output before: its launch.py does."""
_DRAIN_SECONDS = 10.0


class WatchedPdsh:
    """The pdsh of a launch: forwards its output, and ends it if a host is unreachable."""

    def __init__(self, command: list[str], **arguments: Any) -> None:
        self.unreached: str | None = None
        self._reached: set[bytes] = set()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=end_with_parent, **arguments
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        stdout = functools.partial(self._pass_on, self.process.stdout, sys.stdout.buffer, self._note_reached)
        stderr = functools.partial(self._pass_on, self.process.stderr, sys.stderr.buffer, self._end_if_unreached)
        self._threads = [threading.Thread(target=target, daemon=True) for target in (stdout, stderr)]
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Wait some seconds for the rest of the output, which a process on a host may keep open."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _pass_on(self, source: IO[bytes], sink: IO[bytes], look_at: Callable[[bytes], None]) -> None:
        for line in source:
            with contextlib.suppress(OSError):  # the reader is gone or the disk is full, which must not stop the ranks
                sink.write(line)
                sink.flush()
            look_at(line)

    def _note_reached(self, line: bytes) -> None:
        host, colon, _ = line.partition(b": ")
        if colon:
            self._reached.add(host)

    def _end_if_unreached(self, line: bytes) -> None:
        failed = _SSH_FAILED.match(line)
        if failed is None or failed[1] in self._reached or self.unreached is not None:
            return
        self.unreached = failed[1].decode(errors="replace")
        # Twice, as by hand: on the first SIGINT pdsh lists its hosts, on the second it ends the processes on them.
        for _ in range(2):
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        self.process.terminate()


def main() -> None:
    """Run the launcher with the arguments of this process; exit with status 76 if a host is unreachable."""
    launched: list[WatchedPdsh] = []

    def start(command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
        if command[0] != "pdsh" or launched:  # the second pdsh of a launch ends the processes on the hosts
            return subprocess.Popen(command, preexec_fn=end_with_parent, **arguments)
        launched.append(WatchedPdsh(command, **arguments))
        return launched[0].process

    # deepspeed 0.19.8 has no setting for it. The launcher starts pdsh with `subprocess.Popen(command, env=...)`.
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    try:
        runner.main()
        status: Any = 0
    except SystemExit as end:
        status = end.code
    for pdsh in launched:
        pdsh.drain()
        if pdsh.unreached is not None:
            print(
                f"error: host {pdsh.unreached} is not reachable by ssh (see its message above); the launch ended on "
                f"all hosts. Fix: make `ssh {pdsh.unreached} true` work without a password, or remove the host from "
                "the hostfile, then rerun the same command. [unreachable-host]",
                file=sys.stderr,
                flush=True,
            )
            status = LOST_RANK_EXIT_STATUS
    sys.exit(status)


if __name__ == "__main__":
    main()
