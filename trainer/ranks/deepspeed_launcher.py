"""DeepSpeed's launcher, whose pdsh ends when it does, by SIGKILL too; `launch/nodes.py` starts it.

Left alone, a pdsh goes on without its launcher. Where the launcher runs on a host with ranks, they notice that
(`trainer/ranks/launcher.py`); one on a login node would leave a run behind that nobody can stop from there.
"""

from __future__ import annotations

import functools
import subprocess
from types import SimpleNamespace

from deepspeed.launcher import runner

from trainer.ranks.end_with_parent import end_with_parent


def main() -> None:
    """The launcher, with the words of this process's command line."""
    # deepspeed 0.19.8 has no setting for it. The launcher starts pdsh with `subprocess.Popen(command, env=...)`.
    bound = functools.partial(subprocess.Popen, preexec_fn=end_with_parent)
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": bound})
    runner.main()


if __name__ == "__main__":
    main()
