"""Start the ranks of this node with torchrun, and end with the exit status of the rank that failed first.

    clozeworks ranks --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST launch/pretrain.py --config FILE ...

The arguments are those of torchrun (see torchrun --help). torchrun itself always ends with status 1 when a rank fails,
so that a batch script could not tell a run that saved and can resume (75, 76) from one that failed. A rank that was
killed by signal N counts as status 128 + N.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from data_prep.base.errors import UsageError, run_command
from launch.options import command_parser

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"], ["-h"]):
        parser = command_parser("ranks.py", __doc__)
        parser.usage = "%(prog)s [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]"
        parser.print_help()
        sys.exit(0 if arguments else 2)
    sys.exit(run_torchrun(arguments))


def run_torchrun(arguments: list[str]) -> int:
    """Run torchrun in this process and return the exit status.

    Raises:
        UsageError: torchrun cannot use an argument.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trainer.distributed.rank_environment import raise_descriptor_limit

    raise_descriptor_limit()  # torchrun owns the store of all ranks
    try:
        run.main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return status_of(error.failures.values())
    except SignalException as error:
        return 128 + int(error.sigval)
    except ValueError as error:
        raise UsageError(f"torchrun: {error}", fix="see `torchrun --help`", code="usage") from error
    return 0


def status_of(failures: Iterable[ProcessFailure]) -> int:
    """Return the exit status of the rank that failed first."""
    code = min(failures, key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    run_command(main)
