"""Draw where heads look: `show_attention.py --model models:/NAME@ALIAS --output heads.png "The cat sat on the mat."`

One map for each head: a row is the token that looks, a column the one looked at, darker is more. `--layer` and `--head`
choose some (counted from 1); a second text makes a pair.
"""

from __future__ import annotations

import argparse

from data_prep.base.arguments import local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.terminal import counted
from data_prep.storage import storage
from launch.options import add_model, add_tracking_uri, check_new_file, check_utf8, command_parser

MOST_MAPS = 144


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("show_attention.py", __doc__)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a sentence, or two as a pair")
    add_model(parser)
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="FILE.png", help="the picture to write"
    )
    parser.add_argument(
        "--layer", type=int, action="append", metavar="N", help="a layer; may be repeated (default all)"
    )
    parser.add_argument("--head", type=int, action="append", metavar="N", help="a head; may be repeated (default all)")
    add_tracking_uri(parser)
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    if len(arguments.texts) > 2:
        raise UsageError(f"{len(arguments.texts)} texts are given; give one sentence or two, in quotation marks")
    if arguments.output.suffix.lower() != ".png":
        raise UsageError(f"--output {arguments.output} is no .png; the picture is a PNG")
    check_utf8(arguments.texts)
    from trainer.inference.attention_maps import attention_maps, choose
    from trainer.inference.pulled_model import hugging_face_folder
    from trainer.tracking.figures import draw_heads

    check_new_file(arguments.output, "--output")
    maps = attention_maps(hugging_face_folder(arguments.model, arguments.tracking_uri), *arguments.texts)
    layers = choose(arguments.layer, maps.weights.shape[0], "--layer")
    heads = choose(arguments.head, maps.weights.shape[1], "--head")
    shown = f"{counted(len(layers), 'layer')} x {counted(len(heads), 'head')}"
    if len(layers) * len(heads) > MOST_MAPS:
        raise UsageError(f"{shown} are too many to be seen; choose some by --layer")
    titles = [f"layer {layer + 1}, head {head + 1}" for layer in layers for head in heads]
    weights = maps.weights[layers][:, heads].reshape(len(titles), len(maps.tokens), -1)
    storage.write_bytes(arguments.output, draw_heads(weights, maps.tokens, titles, columns=len(heads)))
    print(f"{arguments.output}: {shown} over {counted(len(maps.tokens), 'token')}")


if __name__ == "__main__":
    run_command(main)
