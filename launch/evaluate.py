"""Score a model on minimal pairs.

    clozeworks evaluate --model models:/NAME@ALIAS --minimal-pairs DIR --output scores.json

DIR contains files of sentence pairs (.jsonl or .jsonl.gz with sentence_good and sentence_bad, as BLiMP publishes them).
The model is right on a pair if it gives the good sentence the higher pseudo-log-likelihood: every token is masked in
turn, and the log-probabilities of the original tokens are summed. A tie is wrong. Chance is 50%.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from data_prep.base.arguments import local_output
from data_prep.base.errors import run_command
from data_prep.base.progress import Progress
from launch.options import add_dry_run, add_model, add_tracking_uri, check_new_file, command_parser

PRECISIONS = ("fp32", "bf16", "float64")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("evaluate.py", __doc__)
    add_model(parser, or_run=True)
    parser.add_argument(
        "--minimal-pairs", required=True, type=Path, metavar="DIR", help="directory or file with minimal pairs"
    )
    parser.add_argument(
        "--output",
        type=local_output("--output"),
        metavar="FILE",
        help="write accuracies and all scores as JSON",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="precision of the computation (default %(default)s)"
    )
    add_tracking_uri(parser)
    add_dry_run(parser, "check everything and count the pairs, but load no model and write nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.evaluation.minimal_pairs import (
        as_json,
        judge,
        num_masked_copies,
        pair_scores,
        read_minimal_pairs,
        report_lines,
    )
    from trainer.inference.pulled_model import check_model_name

    check_model_name(arguments.model)
    if arguments.output is not None:
        check_new_file(arguments.output, "--output")
    pairs = read_minimal_pairs(arguments.minimal_pairs)
    if arguments.dry_run:
        print(f"dry run: {len(pairs):,} minimal pairs; no model was loaded and nothing was written")
        return
    import torch

    from data_prep.storage import storage
    from launch.fill_mask import open_model
    from trainer.distributed.allocator import keep_freed_memory
    from trainer.evaluation.masked_scorers import SentenceEncoder, scorer_of

    model = open_model(arguments.model, arguments.tracking_uri)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}[arguments.precision]
    encode = SentenceEncoder(model.tokenizer)
    with Progress("scoring masked copies", num_masked_copies(pairs, encode), "copies") as progress:
        scorer = scorer_of(model, device, dtype)
        scores = pair_scores(pairs, encode, model.tokenizer.mask_token_id, model.max_length, scorer, progress.add)
    report = judge(pairs, scores)
    print("\n".join(report_lines(report)).rstrip())
    if arguments.output is not None:
        values = {"model": arguments.model, "precision": arguments.precision, **as_json(pairs, scores, report)}
        storage.write_bytes(arguments.output, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
