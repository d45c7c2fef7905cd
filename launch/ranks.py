"""Start the ranks of this node with torchrun, and end with their exit status: `ranks.py TORCHRUN_ARGUMENTS`.

torchrun itself ends with 1 whatever its ranks say, so that a batch script could not tell a run that saved and asks to
go on (75, 76) from one that failed. Here the first rank that ended badly decides; signal N that killed one is 128 + N.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def main(arguments: list[str]) -> int:
    if arguments in ([], ["--help"], ["-h"]):
        print(__doc__)
        return 0 if arguments else 2
    try:
        run.main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return status_of(error.failures.values())
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def status_of(failures: Iterable[ProcessFailure]) -> int:
    """The exit status of the rank that ended badly first."""
    code = min(failures, key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
