"""Signals in the processes that build batches."""

from __future__ import annotations

import os
import signal
import threading


def obey_rank_alone(worker: int) -> None:
    """Let a signal that a scheduler or a terminal sends to every process of the job pass a worker by.

    The rank ends its step and saves on such a signal, and needs its workers for that. So a worker ends when its rank
    asks for it (SIGTERM from the rank itself) or is gone (DataLoader's own watch).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_rank, args=(os.getppid(),), daemon=True).start()


def _wait_for_rank(rank_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
        pass
    os._exit(0)
