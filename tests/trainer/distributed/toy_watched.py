"""What the ranks of `test_watchdog.py` do: `python toy_watched.py MODE STACKS`; the last rank is the one in trouble.

STACKS is the folder for their stacks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from data_prep.base.errors import UserError
from trainer.config.run_settings import HealthSettings
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import Ranks
from trainer.distributed.watchdog import Watchdog

SETTINGS = HealthSettings(heartbeat_timeout_seconds=6, step_timeout_seconds=8)


def main() -> None:
    mode = sys.argv[1]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    ranks = Ranks(rank, world_size, local_rank=rank, device=torch.device("cpu"))
    longer = {}
    if mode == "one has an error":  # which stays for some seconds
        longer = {"heartbeat_timeout_seconds": 60, "step_timeout_seconds": 60}
    elif "stops" in mode:  # a stopped rank is found by its silence alone, however slow the machine
        longer = {"step_timeout_seconds": 60}
    settings = SETTINGS.model_copy(update=longer)
    watchdog = Watchdog(settings, ranks, Path(sys.argv[2]))
    watchdog.on_exit = lambda failure: print(f"told: {failure}", flush=True)
    watchdog.start()
    troubled = 0 if mode == "the first stops" else world_size - 1
    for step in range(3):
        watchdog.mark(f"step {step}: counting")
        if world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1))
    if mode == "all is well":
        for step in range(30):  # longer than the timeouts, as is the time after the end
            time.sleep(0.3)
            watchdog.mark(f"step {step}")
        watchdog.close()
        time.sleep(9 if rank == 0 else 0)
        return
    if mode == "one is killed in step 40":
        for step in range(3, 41):  # much faster than it beats
            watchdog.mark(f"step {step}: counting")
            torch.distributed.all_reduce(torch.zeros(1))
        if rank == troubled:
            os.kill(os.getpid(), signal.SIGKILL)
        with watchdog.report_lost_ranks():
            torch.distributed.all_reduce(torch.zeros(1))
    watchdog.mark("fetching batch 3")
    beat = watchdog._beat
    while watchdog._beat < beat + 2:  # until it hears of it
        time.sleep(0.01)
    if rank == troubled:
        if "stops" in mode:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mode == "one is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "one has an error":
            raise UserError("this host's disk is gone", fix="mount it again", code="disk-gone")
        time.sleep(100)  # hangs
    watchdog.mark("step 3: counting")
    with watchdog.report_lost_ranks():
        torch.distributed.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    run_rank(lambda: main() or 0)
