"""Label texts with a fitted model: `predict.py --model FOLDER|models:/NAME@ALIAS --input FILE --output FILE`.

The output is the input with the columns `predicted`, `probability` and one for each class (regression: `predicted`
alone; answers: `start` too). Both are tsv, csv, jsonl or parquet, by their endings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.arguments import local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.terminal import counted
from launch.options import (
    add_batch_size,
    add_model,
    add_no_quoting,
    add_tracking_uri,
    check_new_file,
    command_parser,
)

if TYPE_CHECKING:
    import pandas

    from trainer.finetuning.fitted_model import FittedModel


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("predict.py", __doc__)
    add_model(parser)
    parser.add_argument("--input", required=True, type=Path, metavar="FILE", help="the texts, as a table")
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="FILE", help="the table to write"
    )
    parser.add_argument("--text-column", metavar="NAME", help="default: the one it was fitted with")
    parser.add_argument("--pair-column", metavar="NAME", help="default: the one it was fitted with")
    add_no_quoting(parser)
    add_batch_size(parser)
    add_tracking_uri(parser)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.finetuning.fitted_model import FittedModel
    from trainer.finetuning.labeled_tables import check_suffix, write_table
    from trainer.inference.pulled_model import pull

    check_suffix(arguments.output)
    check_new_file(arguments.output, "--output")
    if arguments.output.resolve() == arguments.input.resolve():
        raise UsageError(f"--output {arguments.output} is the input itself; give another file")
    model = FittedModel.load(pull(arguments.model, tracking_uri=arguments.tracking_uri))
    table, num_long = predict_table(model, arguments)
    write_table(table, arguments.output)
    long = f"; {counted(num_long, 'text')} longer than {model.preprocessor.max_length} tokens" if num_long else ""
    print(f"{arguments.output}: {counted(len(table), 'prediction')} by {model.task.name}{long}")


def predict_table(model: FittedModel, arguments: argparse.Namespace) -> tuple[pandas.DataFrame, int]:
    """The input with the predictions beside it, and how many texts were too long.

    Raises:
        UsageError: a column is not there or not named.
    """
    import pandas

    from trainer.finetuning.answer_task import Answer
    from trainer.finetuning.examples import Columns, read_examples
    from trainer.finetuning.labeled_tables import read_table

    text = arguments.text_column or (model.columns.text if model.columns else None)
    pair = arguments.pair_column or (model.columns.pair if model.columns else None)
    if text is None:
        raise UsageError("the model does not say which columns it reads; name them by --text-column and --pair-column")
    quoting = not arguments.no_quoting
    examples = read_examples(arguments.input, Columns(text, pair, ""), model.task.parse_text, None, quoting)
    predictions, num_long = model.predict(examples, arguments.batch_size)
    labels = [one.label.text if isinstance(one.label, Answer) else one.label for one in predictions]
    columns = pandas.DataFrame([dict(one.columns) for one in predictions])
    columns.insert(0, "predicted", labels)
    if predictions[0].probability is not None:
        columns.insert(1, "probability", [one.probability for one in predictions])
    table = read_table(arguments.input, quoting)
    kept = table[[name for name in table.columns if name not in columns.columns]]
    return pandas.concat([kept, columns], axis=1), num_long


if __name__ == "__main__":
    run_command(main)
