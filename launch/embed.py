"""Write the vectors of texts, or compare a word with other words or its own occurrences.

    clozeworks embed --model models:/NAME@ALIAS --input texts.txt --output vectors.npy
    clozeworks embed --model models:/NAME@ALIAS --neighbors bank --input texts.txt
    clozeworks embed --model models:/NAME@ALIAS --occurrences bank --input texts.txt

The texts are the lines of a file or of standard input, or a column of a table (tsv, csv, jsonl, parquet). A .parquet
output contains the texts and their vectors. A row of a table with an empty or invalid text has a vector of NaN, and a
warning names it. --neighbors lists the nearest words by the embedding table and, with
--input, by their contextual vectors in these texts. --occurrences prints a line for each occurrence of a word with its
sentence and its cosine with the first occurrence: static is that of the embedding table, context that of the hidden
states; the last number is the occurrence that is nearest in context.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.arguments import at_least, local_output
from data_prep.base.errors import UsageError, UserError, run_command
from data_prep.base.logs import logger
from data_prep.base.terminal import counted, printable
from data_prep.storage import storage
from launch.options import (
    add_batch_size,
    add_dry_run,
    add_model,
    add_no_quoting,
    add_tracking_uri,
    check_new_file,
    check_utf8,
    command_parser,
    lines_of,
    lines_of_stdin,
)

LOG = logger(__name__)

if TYPE_CHECKING:
    import numpy as np

    from trainer.inference.embedding import Embedder

TABLES = (".tsv", ".csv", ".jsonl", ".parquet")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("embed.py", __doc__)
    model = parser.add_argument_group("model")
    add_model(model)
    add_tracking_uri(model)
    model.add_argument(
        "--layer", type=int, default=-1, metavar="N", help="0 for the embeddings, 1... for layers (default: the last)"
    )
    add_batch_size(model)
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--input", type=Path, metavar="FILE", help="one text per line, or a table (default: -, standard input)"
    )
    texts.add_argument("--text-column", metavar="NAME", help="column of a table that contains the texts")
    add_no_quoting(texts)
    vectors = parser.add_argument_group("vectors")
    vectors.add_argument(
        "--output", type=local_output("--output"), metavar="FILE", help="vectors as .npy (float32) or .parquet"
    )
    vectors.add_argument(
        "--pooling", choices=("mean", "cls"), help="pooling over a text's tokens (default: the model's, else mean)"
    )
    add_dry_run(vectors, "read the texts and load the model, but write nothing")
    words = parser.add_argument_group("one word")
    words.add_argument("--neighbors", metavar="WORD", help="list the nearest words of WORD, and write no vectors")
    words.add_argument("--top-k", type=at_least(1), default=10, metavar="K", help="number of words (default 10)")
    words.add_argument("--occurrences", metavar="WORD", help="compare the occurrences of WORD in the texts")
    read = parser.parse_args(arguments)
    if read.neighbors is None and read.occurrences is None and read.output is None:
        parser.error("give --output FILE for vectors, or --neighbors WORD, or --occurrences WORD")
    if read.occurrences is not None and (read.neighbors is not None or read.output is not None):
        parser.error("--occurrences writes no vectors and lists no neighbors: leave --output and --neighbors out")
    if read.output is not None and read.output.suffix not in (".npy", ".parquet"):
        parser.error(f"--output {read.output} has an unsupported file type; supported: .npy, .parquet")
    if read.input is not None and read.input.suffix in TABLES and read.text_column is None:
        parser.error(f"--input {read.input} is a table; name the column that contains the texts with --text-column")
    return read


def main() -> None:
    arguments = parse_arguments()
    word = arguments.neighbors if arguments.occurrences is None else arguments.occurrences
    if word is not None:
        check_utf8([word])
    else:
        check_new_file(arguments.output)
    # The embedding table needs no texts, so the command does not wait for standard input.
    texts = input_texts(arguments) if arguments.neighbors is None or arguments.input is not None else []
    from trainer.inference.embedding import Embedder

    embedder = Embedder(arguments.model, tracking_uri=arguments.tracking_uri)
    given = [text for text in texts if text is not None]
    if arguments.neighbors is not None:
        show_neighbors(embedder, given, arguments)
        return
    if arguments.occurrences is not None:
        show_occurrences(embedder, given, arguments)
        return
    if arguments.dry_run:
        print(f"dry run: would embed {counted(len(given), 'text')} into {arguments.output}; nothing was written")
        return
    embedded = embedder.embed(given, arguments.pooling, arguments.layer, arguments.batch_size)
    write_vectors(arguments.output, texts, embedded.vectors)
    cut = (
        f"; {embedded.num_truncated:,} of {counted(len(given), 'text')} longer than the model's {embedder.max_length} "
        "tokens: their ends are not read"
        if embedded.num_truncated
        else ""
    )
    print(
        f"{arguments.output}: {counted(embedded.vectors.shape[0], 'vector')} of size {embedded.vectors.shape[1]:,}{cut}"
    )


def input_texts(arguments: argparse.Namespace) -> Sequence[str | None]:
    """Return the texts of --input, or of standard input; None of a row of a table that has none."""
    path: Path | None = arguments.input
    if path is not None and path.suffix in TABLES:
        from trainer.finetuning.examples import Columns, read_examples, text_of

        quoting = not arguments.no_quoting
        examples = read_examples(path, Columns(arguments.text_column, None, ""), text_of, None, quoting, skip_bad=True)
        for warning in examples.warnings("no vector"):
            print(warning, file=sys.stderr)
        texts: Iterator[str] = iter(examples.texts)
        numbers = range(1, len(examples) + len(examples.bad_rows) + 1)
        return [None if number in examples.bad_rows else next(texts) for number in numbers]
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            raise UsageError(
                "no texts are given",
                fix="name a file with --input, or give one text per line on standard input",
                code="missing-text",
            )
        name, lines = "standard input", lines_of_stdin()
    else:
        name, lines = str(path), file_texts(path)
    lines_with_text = [line.strip() for line in lines if line.strip()]
    if not lines_with_text:
        raise UsageError(f"{name} contains no text", fix="give one text per line", code="missing-text")
    if len(lines_with_text) < len(lines):
        empty = f"skipped {len(lines) - len(lines_with_text):,} empty lines of {name}"
        LOG.warning(f"{empty}; each other line has a vector")
    return lines_with_text


def file_texts(path: Path) -> list[str]:
    """Return the lines of a file.

    Raises:
        UsageError: it does not exist or is not UTF-8.
        UserError: it cannot be read.
    """
    if not path.exists():
        raise UsageError(f"--input {path} does not exist", fix="give a text file or a table", code="missing-path")
    try:
        return lines_of(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"--input {path} cannot be read ({error.strerror})",
            fix="give a text file or a table",
            code="unreadable-input",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--input {path} is not UTF-8 (byte {error.start})",
            fix="convert the file to UTF-8, for example with iconv",
            code="input-not-utf8",
        ) from None


def write_vectors(path: Path, texts: Sequence[str | None], vectors: np.ndarray) -> None:
    """Write the vectors (num_given, hidden_size) float32 of texts atomically; a .parquet file contains the texts too.

    None in `texts` has no vector: its row is NaN, or null in a .parquet file.

    Raises:
        UserError: the file cannot be written.
    """
    import numpy as np

    is_given = np.array([text is not None for text in texts])
    if path.suffix == ".npy":
        rows = np.full((len(texts), vectors.shape[1]), np.nan, np.float32)
        rows[is_given] = vectors
        with storage.local_write(path) as partial, open(partial, "wb") as file:  # save(name) would append .npy
            np.save(file, rows)
    else:
        import pandas

        from trainer.finetuning.tables import write_table

        found = iter(vectors)
        cells = [next(found) if each else None for each in is_given]
        write_table(pandas.DataFrame({"text": texts, "embedding": cells}), path)


def show_neighbors(embedder: Embedder, texts: list[str], arguments: argparse.Namespace) -> None:
    """Print the nearest words by the embedding table and, if there are texts, by contextual vectors."""
    word = arguments.neighbors
    static = embedder.static_neighbors(word, arguments.top_k)
    print(f"{word!r} in the embedding table: " + ", ".join(f"{neighbor} {cosine:.3f}" for neighbor, cosine in static))
    if texts:
        near, count = embedder.contextual_neighbors(word, texts, arguments.top_k, arguments.layer, arguments.batch_size)
        print(
            f"{word!r} in context ({counted(count, 'time')} in {counted(len(texts), 'text')}): "
            + ", ".join(f"{neighbor} {cosine:.3f}" for neighbor, cosine in near)
        )


def show_occurrences(embedder: Embedder, texts: list[str], arguments: argparse.Namespace) -> None:
    """Print a line for each occurrence of a word: its cosines with the first one, the nearest one, its sentence."""
    import numpy as np

    from trainer.inference.embedding import cosines_with

    word = arguments.occurrences
    found = embedder.occurrences(word, texts, arguments.layer, arguments.batch_size)
    static, contextual = (np.stack([getattr(each, kind) for each in found]) for kind in ("static", "contextual"))
    print(f"{word!r}: {counted(len(found), 'occurrence')} in {counted(len(texts), 'text')}")
    print("number  static  context  nearest  sentence")
    columns = zip(found, cosines_with(static[0], static), cosines_with(contextual[0], contextual), strict=True)
    for number, (each, by_table, by_context) in enumerate(columns):
        others = cosines_with(contextual[number], contextual)
        others[number] = -np.inf
        nearest = str(int(others.argmax()) + 1) if len(found) > 1 else "-"
        marked = f"{each.text[: each.start]}[{each.text[each.start : each.stop]}]{each.text[each.stop :]}"
        print(f"{number + 1:>6}  {by_table:>6.3f}  {by_context:>7.3f}  {nearest:>7}  {printable(marked)}")


if __name__ == "__main__":
    run_command(main)
