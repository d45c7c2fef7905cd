"""Vectors of texts: `embed.py --model models:/NAME@ALIAS --input texts.txt --output vectors.npy`.

A text a line, from a file or standard input; of a table (tsv, csv, jsonl, parquet) a column. Parquet holds the texts
beside their vectors. `--neighbors WORD` shows the nearest words instead: in the embedding table, and as they are used
in the texts given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.base.arguments import at_least, local_output
from data_prep.base.errors import UsageError, UserError, run_command
from data_prep.base.terminal import counted
from data_prep.storage import storage
from launch.options import (
    add_batch_size,
    add_model,
    add_no_quoting,
    add_tracking_uri,
    check_new_file,
    check_utf8,
    command_parser,
    lines_of,
    lines_of_stdin,
)

if TYPE_CHECKING:
    from trainer.inference.embedding import Embedder

TABLES = (".tsv", ".csv", ".jsonl", ".parquet")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("embed.py", __doc__)
    add_model(parser)
    parser.add_argument("--input", type=Path, metavar="FILE", help="texts, a line each, or a table (default -: stdin)")
    parser.add_argument("--text-column", metavar="NAME", help="of a table: the column with the texts")
    add_no_quoting(parser)
    parser.add_argument(
        "--output", type=local_output("--output"), metavar="FILE", help="vectors as .npy (float32) or .parquet"
    )
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean", help="of a text's tokens (default mean)")
    parser.add_argument("--layer", type=int, default=-1, metavar="N", help="0: embeddings, 1...: layers (default last)")
    add_batch_size(parser)
    parser.add_argument("--neighbors", metavar="WORD", help="show the nearest words instead of writing vectors")
    parser.add_argument("--top-k", type=at_least(1), default=10, metavar="K", help="how many of them (default 10)")
    add_tracking_uri(parser)
    read = parser.parse_args(arguments)
    if read.neighbors is None and read.output is None:
        parser.error("give --output FILE for vectors, or --neighbors WORD")
    if read.output is not None and read.output.suffix not in (".npy", ".parquet"):
        parser.error(f"--output {read.output} is neither .npy nor .parquet")
    if read.input is not None and read.input.suffix in TABLES and read.text_column is None:
        parser.error(f"--input {read.input} is a table; name the column with the texts by --text-column")
    return read


def main() -> None:
    arguments = parse_arguments()
    if arguments.neighbors is not None:
        check_utf8([arguments.neighbors])
    else:
        check_new_file(arguments.output, "--output")
    # The table of embeddings can be looked at with no texts; nothing is waited for then.
    texts = input_texts(arguments) if arguments.neighbors is None or arguments.input is not None else []
    from trainer.inference.embedding import Embedder

    embedder = Embedder(arguments.model, tracking_uri=arguments.tracking_uri)
    if arguments.neighbors is not None:
        show_neighbors(embedder, texts, arguments)
        return
    found = embedder.embed(texts, arguments.pooling, arguments.layer, arguments.batch_size)
    write_vectors(arguments.output, texts, found.vectors)
    cut = f"; {counted(found.num_truncated, 'text')} cut at {embedder.max_length} tokens" if found.num_truncated else ""
    print(f"{arguments.output}: {counted(found.vectors.shape[0], 'vector')} of {found.vectors.shape[1]:,} numbers{cut}")


def input_texts(arguments: argparse.Namespace) -> list[str]:
    """The texts of --input, or of standard input."""
    path: Path | None = arguments.input
    if path is not None and path.suffix in TABLES:
        from trainer.finetuning.examples import Columns, read_examples, text_of

        quoting = not arguments.no_quoting
        return read_examples(path, Columns(arguments.text_column, None, ""), text_of, None, quoting).texts
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            raise UsageError("no texts are given; name a file by --input, or give a text a line on standard input")
        name, lines = "standard input", lines_of_stdin()
    else:
        name, lines = str(path), file_texts(path)
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise UsageError(f"{name} holds no text; give a text a line")
    if len(texts) < len(lines):
        empty = f"{len(lines) - len(texts):,} empty lines of {name} are left out"
        print(f"warning: {empty}, so the vectors are those of the lines with text", file=sys.stderr)
    return texts


def file_texts(path: Path) -> list[str]:
    """The lines of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return lines_of(path.read_bytes())
    except OSError as error:
        raise UserError(f"--input {path} cannot be read ({error.strerror}); give a file of lines, or a table") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path} is not UTF-8 (byte {error.start}); convert it, such as with iconv") from None


def write_vectors(path: Path, texts: list[str], vectors: np.ndarray) -> None:
    """Write (num_texts, hidden_size) float32, all or nothing, to Parquet beside the texts.

    Raises:
        UserError: the file cannot be written.
    """
    if path.suffix == ".npy":
        with storage.local_write(path) as partial, open(partial, "wb") as file:  # of a name, save makes name.npy
            np.save(file, vectors)
    else:
        import pandas

        from trainer.finetuning.labeled_tables import write_table

        write_table(pandas.DataFrame({"text": texts, "embedding": list(vectors)}), path)


def show_neighbors(embedder: Embedder, texts: list[str], arguments: argparse.Namespace) -> None:
    """Print the nearest words by the embedding table, and in the texts where there are any."""
    word = arguments.neighbors
    static = embedder.static_neighbors(word, arguments.top_k)
    print(f"{word!r} in the embedding table: " + ", ".join(f"{found} {cosine:.3f}" for found, cosine in static))
    if texts:
        near, count = embedder.contextual_neighbors(word, texts, arguments.top_k, arguments.layer, arguments.batch_size)
        print(
            f"{word!r} in context ({counted(count, 'time')} in {counted(len(texts), 'text')}): "
            + ", ".join(f"{found} {cosine:.3f}" for found, cosine in near)
        )


if __name__ == "__main__":
    run_command(main)
