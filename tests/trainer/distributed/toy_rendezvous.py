"""What the ranks of `test_rendezvous.py` do: `python toy_rendezvous.py MODE SECONDS GO`; rank 1 is the one in trouble.

They begin when the file GO is there, so that none is late for the meeting on a busy machine.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed  # noqa: F401 - here, where nobody waits for it

from trainer.config.training_settings import DistributedSettings
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import initialize_distributed, shut_down
from trainer.distributed.rendezvous import meet
from trainer.distributed.stop_signal import StopSignal


def main() -> int:
    mode, seconds, go = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    settings = DistributedSettings(
        timeout_seconds=600, meeting_timeout_seconds=seconds, connect_timeout_seconds=seconds
    )
    stop_signal = StopSignal()
    print("listening", flush=True)
    while not go.exists():
        time.sleep(0.02)
    if mode == "dies after the meeting" and os.environ["RANK"] == "1":
        store = meet(1, int(os.environ["WORLD_SIZE"]), settings)
        assert store is not None
        os._exit(3)
    ranks = initialize_distributed(settings)
    stop_signal.can_save()
    shut_down(ranks)


if __name__ == "__main__":
    run_rank(main)
