"""Score a model on minimal pairs, or on all tasks of a suite.

    clozeworks evaluate --model models:/NAME@ALIAS --minimal-pairs DIR --output scores.json
    clozeworks evaluate --model models:/NAME@ALIAS --suite glue data=DIR --output results

--minimal-pairs: DIR contains files of sentence pairs (.jsonl or .jsonl.gz with sentence_good and sentence_bad, as BLiMP
publishes them), also in subdirectories. The model is right on a pair if it gives the good sentence the higher
pseudo-log-likelihood: every token is masked in turn, and the log-probabilities of the original tokens are summed. A tie
is wrong. Chance is 50%. The overall accuracy is the share of all pairs.

--suite: a YAML file that names tasks, files, metrics and settings, or the name of a preset (glue). Every task runs with
every seed. A result is written once it is complete and reused by the same command as long as model, settings and files
are the same. Settings of the suite can be overridden, such as data=DIR or seeds=[0].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from data_prep.base.arguments import Joined, local_output
from data_prep.base.errors import UsageError, run_command
from launch.options import add_dry_run, add_model, add_tracking_uri, check_new_file, command_parser

PRECISIONS = ("fp32", "bf16", "float64")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("evaluate.py", __doc__)
    add_model(parser, or_run=True)
    parser.fixes_of_repetition["model"] = "give it once, or compare both with `clozeworks compare`"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minimal-pairs", type=Path, metavar="DIR", help="directory or file with minimal pairs")
    what.add_argument("--suite", metavar="FILE", help="YAML file of a suite, or the name of a preset")
    parser.add_argument(
        "--output",
        type=local_output("--output"),
        metavar="PATH",
        help="with --minimal-pairs: JSON file for accuracies and all scores; with --suite: directory of the results "
        "(default evaluations/SUITE-DIGEST, with a digest of the model)",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="precision of --minimal-pairs (default fp32; a suite sets its own)"
    )
    parser.add_argument(
        "--tasks", action=Joined, metavar="A,B,...", help="tasks of --suite to run, with those that they start from"
    )
    parser.add_argument("--no-tracking", action="store_true", help="log nothing of --suite to MLflow")
    add_tracking_uri(parser)
    add_dry_run(parser, "check everything and print the plan, but evaluate and write nothing")
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="overrides of the suite's settings")
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.inference.pulled_model import check_model_name

    check_model_name(arguments.model)
    if arguments.suite is None:
        score_minimal_pairs(arguments)
    else:
        run_suite(arguments)


def run_suite(arguments: argparse.Namespace) -> None:
    """Run a suite, or print its plan."""
    from trainer.evaluation.suite_settings import load_suite

    if arguments.precision is not None:
        raise UsageError(
            "--precision is given with --suite",
            fix="set precision in the settings of the suite's task",
            code="precision-with-suite",
        )
    names = [name.strip() for name in (arguments.tasks or "").split(",") if name.strip()]
    suite = load_suite(arguments.suite, arguments.overrides).selected(names)

    from trainer.evaluation.evaluate_suite import default_output, evaluate_suite, plan_lines, prepare_suite

    plan, model = prepare_suite(suite, arguments.model, arguments.tracking_uri)
    output = arguments.output or default_output(plan, model)
    if arguments.dry_run:
        print("\n".join(plan_lines(plan, output)))
        print(f"dry run: {len(plan.jobs)} evaluations of {arguments.model}, results in {output}; nothing was written")
        return
    evaluate_suite(plan, model, output, log, arguments.tracking_uri, not arguments.no_tracking)
    print(f"\nresults: {output}")


def score_minimal_pairs(arguments: argparse.Namespace) -> None:
    """Score minimal pairs, print the table and write the scores."""
    from trainer.data.minimal_pairs import as_json, judge, read_minimal_pairs, report_lines

    if arguments.tasks or arguments.overrides or arguments.no_tracking:
        raise UsageError(
            "--tasks, --no-tracking and overrides are given without a suite",
            fix="give --suite FILE, or remove them",
            code="suite-options-without-suite",
        )
    if arguments.output is not None:
        check_new_file(arguments.output)
    pairs = read_minimal_pairs(arguments.minimal_pairs)
    if arguments.dry_run:
        print(f"dry run: {len(pairs):,} minimal pairs; no model was loaded and nothing was written")
        return
    from data_prep.storage import storage
    from launch.fill_mask import open_model
    from trainer.evaluation.masked_scorers import score_pairs

    precision = arguments.precision or "fp32"
    scores = score_pairs(open_model(arguments.model, arguments.tracking_uri), pairs, precision)
    report = judge(pairs, scores)
    print("\n".join(report_lines(report)).rstrip())
    if arguments.output is not None:
        values = {"model": arguments.model, "precision": precision, **as_json(pairs, scores, report)}
        storage.write_bytes(arguments.output, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"wrote {arguments.output}", file=sys.stderr)


def log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
