"""Say whether sentence B follows sentence A.

    clozeworks next-sentence --model models:/NAME@ALIAS "He opened the door." "The room was dark."

The model must be pretrained on sentence pairs. The command prints IsNext or NotNext (next-sentence prediction), or
InOrder or Swapped (sentence-order prediction), with the probability. Without A and B the command reads pairs from
standard input: one pair per line, A and B separated by a tab.
"""

from __future__ import annotations

import argparse
import sys

from data_prep.base.errors import UsageError, run_command
from data_prep.base.terminal import counted, json_line
from launch.options import add_model, add_tracking_uri, check_utf8, command_parser, lines_of_stdin


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("next_sentence.py", __doc__)
    model = parser.add_argument_group("model")
    add_model(model)
    add_tracking_uri(model)
    pairs = parser.add_argument_group("pairs")
    pairs.add_argument("pair", nargs="*", metavar="A B", help="the two sentences (default: lines of standard input)")
    pairs.add_argument("--json", action="store_true", help="print one JSON object per pair")
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    pairs = read_pairs(arguments.pair)
    from trainer.inference.pulled_model import hugging_face_folder

    folder = hugging_face_folder(arguments.model, arguments.tracking_uri)
    from trainer.inference.next_sentence import NextSentence  # imports torch

    model = NextSentence.load(folder, arguments.model)
    for first, second in pairs:
        prediction = model.predict(first, second)
        if arguments.json:
            value = {"first": first, "second": second, "label": prediction.label, "probability": prediction.probability}
            print(json_line(value))
        else:
            print(f"{prediction.label} (probability {prediction.probability:.3f})")


def read_pairs(pair: list[str]) -> list[tuple[str, str]]:
    """Return the pair of the command line, or those of standard input.

    Raises:
        UsageError: there are not two texts, or a line has no tab.
    """
    if pair:
        if len(pair) != 2:
            raise UsageError(
                f"a pair is two sentences, got {counted(len(pair), 'text')}",
                fix="give two sentences, each in quotation marks",
                code="not-a-pair",
            )
        check_utf8(pair)
        return [(pair[0], pair[1])]
    if sys.stdin.isatty():
        raise UsageError(
            "no sentences are given", fix="append two sentences, each in quotation marks", code="missing-text"
        )
    pairs = []
    for number, line in enumerate(lines_of_stdin(), start=1):
        if line.strip():
            first, tab, second = line.partition("\t")
            if not tab:
                raise UsageError(
                    f"line {number} of standard input has no tab",
                    fix="separate the two sentences with a tab",
                    code="not-a-pair",
                )
            if not first.strip() or not second.strip():
                raise UsageError(
                    f"line {number} of standard input has an empty sentence beside the tab",
                    fix="give two sentences",
                    code="not-a-pair",
                )
            pairs.append((first.strip(), second.strip()))
    if not pairs:
        raise UsageError(
            "standard input is empty", fix="give two sentences per line, separated by a tab", code="missing-text"
        )
    return pairs


if __name__ == "__main__":
    run_command(main)
