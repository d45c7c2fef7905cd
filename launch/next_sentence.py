"""Does B follow A? `next_sentence.py --model models:/NAME@ALIAS "He opened the door." "The room was dark."`

Needs a model that was pretrained on pairs: IsNext or NotNext with its probability (of a model pretrained on the order
of sentences: InOrder or Swapped). Without A and B, pairs are read from standard input, a line each, A and B parted by
a tab.
"""

from __future__ import annotations

import argparse
import json
import sys

from data_prep.base.errors import UsageError, run_command
from launch.options import add_model, add_tracking_uri, check_utf8, command_parser, lines_of_stdin


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("next_sentence.py", __doc__)
    parser.add_argument(
        "pair", nargs="*", metavar="A B", help="the two sentences; without any, lines of standard input"
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a pair instead of lines for people")
    add_tracking_uri(parser)
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    pairs = read_pairs(arguments.pair)
    from trainer.inference.next_sentence import NextSentence
    from trainer.inference.pulled_model import hugging_face_folder

    model = NextSentence.load(hugging_face_folder(arguments.model, arguments.tracking_uri))
    for first, second in pairs:
        found = model.predict(first, second)
        if arguments.json:
            value = {"first": first, "second": second, "label": found.label, "probability": found.probability}
            print(json.dumps(value, ensure_ascii=False))
        else:
            print(f"{found.label} (probability {found.probability:.3f})")


def read_pairs(pair: list[str]) -> list[tuple[str, str]]:
    """The pair of the command line, or those of standard input.

    Raises:
        UsageError: there are not two texts, or a line holds no tab.
    """
    if pair:
        if len(pair) != 2:
            given = "1 text is" if len(pair) == 1 else f"{len(pair)} texts are"
            raise UsageError(f"{given} given; give two sentences, each in quotation marks")
        check_utf8(pair)
        return [(pair[0], pair[1])]
    if sys.stdin.isatty():
        raise UsageError("no sentences are given; put two behind the options, each in quotation marks")
    pairs = []
    for number, line in enumerate(lines_of_stdin(), start=1):
        if line.strip():
            first, tab, second = line.partition("\t")
            if not tab:
                raise UsageError(f"line {number} of standard input holds no tab; part the two sentences with one")
            if not first.strip() or not second.strip():
                raise UsageError(
                    f"line {number} of standard input has a tab with nothing on one side; give two sentences"
                )
            pairs.append((first.strip(), second.strip()))
    if not pairs:
        raise UsageError("standard input is empty; give two sentences a line, parted by a tab")
    return pairs


if __name__ == "__main__":
    run_command(main)
