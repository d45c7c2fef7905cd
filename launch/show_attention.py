"""Draw the attention maps of a text, or print them as numbers.

    clozeworks attention --model models:/NAME@ALIAS --output heads.png "The cat sat on the mat."
    clozeworks attention --model models:/NAME@ALIAS --numbers --layer 1 --head 2 "The cat sat on the mat."

There is one map per head: rows are the attending tokens, columns the attended tokens, darker is more weight. The
numbers of a row sum to 1, up to rounding.
--layer and --head select some of them (counted from 1). A second text makes a sentence pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from data_prep.base.arguments import local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.terminal import counted, printable
from data_prep.storage import storage
from launch.options import add_dry_run, add_model, add_tracking_uri, check_new_file, check_utf8, command_parser

if TYPE_CHECKING:
    import numpy as np

MOST_MAPS = 144


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("show_attention.py", __doc__)
    model = parser.add_argument_group("model")
    add_model(model)
    add_tracking_uri(model)
    picture = parser.add_argument_group("picture")
    picture.add_argument("texts", nargs="+", metavar="TEXT", help="a sentence, or two as a pair")
    picture.add_argument("--output", type=local_output("--output"), metavar="FILE.png", help="the picture to write")
    picture.add_argument("--numbers", action="store_true", help="print each map as a table of numbers")
    picture.add_argument(
        "--layer", type=int, action="append", metavar="N", help="a layer; repeat it for several (default: all)"
    )
    picture.add_argument(
        "--head", type=int, action="append", metavar="N", help="a head; repeat it for several (default: all)"
    )
    add_dry_run(picture, "compute the maps, but write no picture")
    read = parser.parse_intermixed_args(arguments)
    if read.output is None and not read.numbers:
        parser.error("give --output FILE.png for a picture, or --numbers for tables")
    return read


def main() -> None:
    arguments = parse_arguments()
    if len(arguments.texts) > 2:
        raise UsageError(
            f"{len(arguments.texts)} texts are given",
            fix="give one or two sentences, each in quotation marks",
            code="not-a-pair",
        )
    if arguments.output is not None and arguments.output.suffix.lower() != ".png":
        raise UsageError(
            f"--output {arguments.output} does not end in .png", fix="name a .png file", code="unsupported-file-type"
        )
    check_utf8(arguments.texts)
    from trainer.inference.attention_maps import attention_maps, choose
    from trainer.inference.pulled_model import hugging_face_folder
    from trainer.tracking.figures import draw_heads

    if arguments.output is not None:
        check_new_file(arguments.output)
    maps = attention_maps(hugging_face_folder(arguments.model, arguments.tracking_uri), *arguments.texts)
    layers = choose(arguments.layer, maps.weights.shape[0], "--layer")
    heads = choose(arguments.head, maps.weights.shape[1], "--head")
    size = f"{counted(len(layers), 'layer')} x {counted(len(heads), 'head')}"
    if len(layers) * len(heads) > MOST_MAPS:
        raise UsageError(
            f"{size} are {len(layers) * len(heads):,} maps; at most {MOST_MAPS} are drawn or printed",
            fix="select some with --layer and --head",
            code="too-many-maps",
        )
    if arguments.numbers:
        for layer in layers:
            for head in heads:
                print(f"layer {layer + 1}, head {head + 1}")
                print("\n".join(table_of(maps.weights[layer, head], maps.tokens)), end="\n\n")
    if arguments.output is None:
        return
    if arguments.dry_run:
        print(f"dry run: would draw {size} over {counted(len(maps.tokens), 'token')}; nothing was written")
        return
    titles = [f"layer {layer + 1}, head {head + 1}" for layer in layers for head in heads]
    weights = maps.weights[layers][:, heads].reshape(len(titles), len(maps.tokens), -1)
    storage.write_bytes(arguments.output, draw_heads(weights, maps.tokens, titles, columns=len(heads)))
    print(f"{arguments.output}: {size} over {counted(len(maps.tokens), 'token')}")


def table_of(weights: np.ndarray, tokens: Sequence[str]) -> list[str]:
    """Return the lines of a map (length, length): a row for each attending token, a column for each attended one."""
    names = [printable(token) for token in tokens]
    first = max(map(len, names))
    widths = [max(len(name), len("0.00")) for name in names]
    header = " ".join([" " * first, *(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))])
    return [header] + [
        " ".join([f"{name:<{first}}", *(f"{value:>{width}.2f}" for value, width in zip(row, widths, strict=True))])
        for name, row in zip(names, weights.tolist(), strict=True)
    ]


if __name__ == "__main__":
    run_command(main)
