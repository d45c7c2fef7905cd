"""Run a suite on a checkpoint, in a process of its own.

The follower with the process id PID starts `python -m trainer.evaluation.evaluate_checkpoint PID`, which ends when the
follower ends. The request is JSON on standard input; the scores are JSON on standard output. The process has the lowest
priority and computes on the CPU, so that it takes no memory of a GPU and only idle time of the cores.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from data_prep.base.errors import run_command
from trainer.distributed.launcher import end_with_parent
from trainer.evaluation.evaluate_suite import evaluate_suite, prepare_suite
from trainer.evaluation.suite_result import SuiteResult
from trainer.evaluation.suite_settings import SuiteRequest, load_suite
from trainer.hf_export.export import export_checkpoint

LOWEST_PRIORITY = 19


def evaluate_checkpoint(request: SuiteRequest) -> SuiteResult:
    """Export the checkpoint, run the jobs without a result, and return the result of the suite.

    Raises:
        UserError: the export or a task failed; complete results stay and are not computed again.
    """
    suite = load_suite(request.suite, request.overrides)
    output = Path(request.output)
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        folder = export_checkpoint(request.checkpoint, Path(temporary) / "model").output
        plan, model = prepare_suite(suite, str(folder))
        model = model._replace(name=request.checkpoint)
        result = evaluate_suite(plan, model, output, lambda text: print(text, file=sys.stderr), is_tracked=False)
    shutil.rmtree(output / "models", ignore_errors=True)  # one for each checkpoint would fill the disk
    return result


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    os.nice(LOWEST_PRIORITY)
    values = json.load(sys.stdin)
    result = evaluate_checkpoint(SuiteRequest(**{**values, "overrides": tuple(values["overrides"])}))
    print(json.dumps({"metrics": result.summary, "facts": result.facts}))


if __name__ == "__main__":
    run_command(main)
