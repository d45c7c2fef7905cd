"""DeepSpeed's launcher, whose pdsh ends with it and whose exit status says that a host was lost.

`clozeworks nodes` starts it. By default pdsh outlives its launcher, also after SIGKILL. If the launcher runs on a host
with ranks, they notice that (`trainer/distributed/launcher.py`); a launcher on a login node would leave a run behind
that cannot be stopped from there.
"""

from __future__ import annotations

import functools
import subprocess
from types import SimpleNamespace

from deepspeed.launcher import runner

from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS
from trainer.distributed.side_process import end_with_parent

SSH_FAILED = 255


def main() -> None:
    """Run the launcher with the arguments of this process."""
    # deepspeed 0.19.8 has no setting for it. The launcher starts pdsh with `subprocess.Popen(command, env=...)`.
    start = functools.partial(subprocess.Popen, preexec_fn=end_with_parent)
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    try:
        runner.main()
    except SystemExit as ended:  # with the largest status of all hosts
        if ended.code == SSH_FAILED:
            raise SystemExit(LOST_RANK_EXIT_STATUS) from None
        raise


if __name__ == "__main__":
    main()
