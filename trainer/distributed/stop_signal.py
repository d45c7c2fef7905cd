"""Stop requests: SIGTERM, SIGINT, SIGUSR1 or SIGHUP requests a checkpoint, a second one ends the process at once.

A SIGHUP that is ignored already, as under nohup, stays ignored; one that follows another request is ignored too: after
Ctrl-C the launcher or the terminal may close while the ranks still save. The loss of the launcher also requests a
checkpoint (`trainer/distributed/launcher.py`). Until the run is set up, the first signal ends the process: there is
nothing to save, a rank would wait for a lost one, and compilation takes minutes. A rank waits for others in C++ code,
at the rendezvous as in a collective, where no Python handler runs; so the interpreter writes the signal number to a
pipe, which a thread reads.

`StopPoll` spreads a request to all ranks during a long operation between two steps, such as an evaluation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from data_prep.base.terminal import counted
from trainer.distributed import rank_environment as environment
from trainer.distributed.launcher import watch_launcher

if TYPE_CHECKING:
    import torch

    from trainer.distributed.process_group import Ranks

STOPPED_EXIT_STATUS = 75
"""Stopped by a signal after saving (EX_TEMPFAIL of sysexits.h): rerun the same command."""

REPEAT_SECONDS = 2.0
"""Within this time a signal counts as the first one: on Ctrl-C a terminal signals launcher and ranks, and the launcher
(deepspeed, torchrun) forwards it to the ranks as SIGTERM."""

FORCED_END_SECONDS = 2.0
"""How long a second signal waits until the end is recorded on a disk that may hang."""

POLL_SECONDS = 0.5
MOST_CALLS = 8
"""Several ranks agree at every call that takes as long as `POLL_SECONDS`, and after this many calls at the latest."""

_NAMED = 3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """The stop request of this process; all ranks then agree on the step in `trainer/loop/step.py`.

    Create it in the main thread as early as possible (in another thread it receives no signals); call `can_save` once
    the run is set up.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.request: str | None = None
        """Origin and cause of a request of this rank: "rank 1 (host-b): its launcher was lost"."""
        self.on_forced_end: Callable[[str], None] | None = None
        """Called with the cause when a second signal ends the process; it gets `FORCED_END_SECONDS`."""
        self._name = f"rank {environment.rank()} ({socket.gethostname()})"
        self._requested_at = 0.0
        self._ends_at_once = True
        self._exiting = threading.Lock()  # acquired by the first thread that receives a signal or detects a loss
        self._stderr: int | None = None
        with contextlib.suppress(OSError):  # the process may have no standard error
            self._stderr = os.dup(2)  # deepspeed redirects its own while it probes for compilers
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._install()
        watch_launcher(lambda: self._request_stop("its launcher was lost"))

    def _install(self) -> None:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._read, args=(reading,), name="stop-signal", daemon=True).start()
        # Set before the handlers, so that no signal is lost in between.
        self._wakeup_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            # The number of a signal without a handler is not written to the pipe.
            self._handlers[number] = signal.signal(number, lambda *_: None)

    def close(self) -> None:
        """Restore the signal handlers of a process that outlives the run, and close its files."""
        if self._stderr is not None:
            os.close(self._stderr)
            self._stderr = None
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        os.close(self._writing)  # ends the thread that reads

    def can_save(self) -> None:
        """Leave requests from now on to all ranks, which stop together after a step."""
        self._ends_at_once = False

    def _request_stop(self, cause: str) -> None:
        if self._ends_at_once:
            self._abort(cause)
        if not self.is_requested:
            self._requested_at, self.request = time.monotonic(), f"{self._name}: {cause}"
            self.is_requested = True  # set last, because other threads read it

    def _read(self, reading: int) -> None:
        while written := os.read(reading, 1):
            number = written[0]
            if number not in STOP_SIGNALS:
                continue
            if self.is_requested and number == signal.SIGHUP:
                continue  # the terminal closed during the stop
            if self.is_requested and time.monotonic() - self._requested_at > REPEAT_SECONDS:
                self._end_at_once(number)
            self._request_stop(signal.Signals(number).name)
        os.close(reading)

    def _end_at_once(self, number: int) -> None:
        cause = f"{self._name}: a second signal, {signal.Signals(number).name}"
        if (on_forced_end := self.on_forced_end) is not None:
            thread = threading.Thread(target=on_forced_end, args=(cause,), daemon=True)
            with contextlib.suppress(RuntimeError):  # too little memory for a thread: the end is not recorded
                thread.start()
                thread.join(FORCED_END_SECONDS)
        self._print_now(f"ended by {cause}; rerun the same command to resume\n")
        os._exit(128 + number)

    def _abort(self, cause: str) -> None:
        if not self._exiting.acquire(blocking=False):
            return
        if environment.local_rank() == 0:
            self._print_now(
                f"stopped by {self._name}: {cause} before the first step; nothing to save; rerun the same command\n"
            )
        os._exit(STOPPED_EXIT_STATUS)

    def _print_now(self, text: str) -> None:
        if self._stderr is not None:
            with contextlib.suppress(OSError):  # not `print`, which a signal may interrupt; the reader may be gone
                os.write(self._stderr, text.encode())


def describe_requests(requests: Sequence[str | None]) -> str:
    """Describe origin and cause of a stop from the `request` of each rank in their order."""
    made = [request for request in requests if request is not None]
    more = f" and {counted(len(made) - _NAMED, 'more rank')}" if len(made) > _NAMED else ""
    return ", ".join(made[:_NAMED]) + more


class StopPoll:
    """Tells whether any rank has a stop request; all ranks call it before each micro-batch and stop at the same one.

    A single rank looks at its own request. Several ranks sum their requests on the hosts every few calls; the number of
    calls follows from the mean time between calls, which they sum too. A sum is awaited at the next such call, so that
    no micro-batch waits for the network. With `most_calls=1` the sum is awaited at the same call, for ranks that cannot
    take part in the next micro-batch.
    """

    def __init__(self, signal: StopSignal, ranks: Ranks, most_calls: int = MOST_CALLS) -> None:
        self._signal, self._ranks, self._most_calls = signal, ranks, most_calls
        self.is_agreed = False
        """Whether a call has returned True; from then on all do."""
        self._calls, self._calls_per_poll = 0, 1
        self._polled_at: float | None = None
        self._under_way: tuple[Callable[[], torch.Tensor], int] | None = None
        """A function that waits for the sum, and the number of calls that were timed; 0 at the first sum."""

    def __call__(self) -> bool:
        if self._ranks.world_size == 1:
            self.is_agreed = self.is_agreed or self._signal.is_requested
        elif not self.is_agreed:
            self._calls += 1
            if self._calls >= self._calls_per_poll:
                self._agree(waits=self._most_calls == 1)
        return self.is_agreed

    @property
    def is_requested(self) -> bool:
        """Whether this rank has a stop request; the other ranks may not know yet."""
        return self._signal.is_requested

    def conclude(self) -> None:
        """Agree once more after the last call, because a rank may have left before it; all ranks together."""
        if self._ranks.world_size > 1 and not self.is_agreed:
            self._agree(waits=True)

    def _agree(self, waits: bool) -> None:
        self._learn()
        if self.is_agreed:
            return
        import torch  # here: signals are handled before it is imported, which takes seconds

        from trainer.distributed.process_group import begin_sum_on_hosts

        now = time.monotonic()
        microseconds = 0 if self._polled_at is None else int((now - self._polled_at) * 1e6)
        own = torch.tensor([int(self._signal.is_requested), microseconds])
        self._under_way = begin_sum_on_hosts(own, self._ranks), self._calls if self._polled_at is not None else 0
        self._calls, self._polled_at = 0, now
        if waits:
            self._learn()

    def _learn(self) -> None:
        """Wait for the running sum."""
        if self._under_way is None:
            return
        (wait, calls), self._under_way = self._under_way, None
        requests, total = wait().tolist()
        self.is_agreed = requests > 0
        if calls:
            seconds_per_call = total / self._ranks.world_size / calls / 1e6
            fitting = max(1, int(POLL_SECONDS / max(seconds_per_call, 1e-3)))
            self._calls_per_poll = min(self._most_calls, 2 * self._calls_per_poll, fitting)
