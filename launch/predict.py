"""Label texts with a fine-tuned model.

    clozeworks predict --model models:/NAME@ALIAS --input texts.tsv --output labeled.tsv

The output is the input with the additional columns `predicted`, `probability` and one per class (regression: only
`predicted`; question answering: also `start`). Both files are tsv, csv, jsonl or parquet, according to their suffix. An
input that has such a column already is refused, unless --result-suffix gives the additional ones other names. A row
with an empty or invalid text has empty predictions, and a warning names it.

The input may also be a .txt file, of which each line is a text (blank lines are left out and counted), SQuAD's .json
or a .conll file. With --label-column the command also scores the predictions against the labels of the input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.arguments import OnceFlag, local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.terminal import counted
from launch.options import (
    add_batch_size,
    add_dry_run,
    add_model,
    add_tracking_uri,
    check_new_file,
    command_parser,
)

if TYPE_CHECKING:
    import pandas

    from trainer.finetuning.examples import Columns, Examples
    from trainer.finetuning.fitted_model import FittedModel
    from trainer.finetuning.tasks import Task


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("predict.py", __doc__)
    model = parser.add_argument_group("model")
    add_model(model)
    add_tracking_uri(model)
    add_batch_size(model)
    tables = parser.add_argument_group("tables")
    tables.add_argument("--input", required=True, type=Path, metavar="FILE", help="table with the texts")
    tables.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="FILE", help="the table to write"
    )
    tables.add_argument(
        "--text-column", metavar="NAME", help="column with the texts (default: as in the training data)"
    )
    tables.add_argument(
        "--pair-column", metavar="NAME", help="column with the second texts (default: as in the training data)"
    )
    tables.add_argument(
        "--label-column", metavar="NAME", help="score the predictions against the labels in this column"
    )
    tables.add_argument(
        "--quoting",
        action=OnceFlag,
        help="whether quotation marks in tsv and csv enclose cells (default: as in the training data)",
    )
    tables.add_argument(
        "--result-suffix",
        default="",
        metavar="TEXT",
        help="text after the names of the additional columns, such as _2 (default: none)",
    )
    add_dry_run(tables, "load the model, read the input and check its columns, but predict and write nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.finetuning.field_formats import NUM_BLANK
    from trainer.finetuning.tables import check_suffix, check_table_can_be_written, read_table, write_table

    check_suffix(arguments.output)
    check_new_file(arguments.output)
    if arguments.output.resolve() == arguments.input.resolve():
        raise UsageError(
            f"--output {arguments.output} is the file of --input", fix="give another file", code="output-is-input"
        )
    folder, columns, task = fitted_folder(arguments)
    examples = read_texts(arguments, columns, task) if columns is not None and task is not None else None
    from trainer.finetuning.fitted_model import FittedModel  # imports torch
    from trainer.finetuning.scores import figure
    from trainer.finetuning.task_data import with_own_labels

    model = FittedModel.load(folder)
    if examples is None:
        examples = read_texts(arguments, columns, model.task)
    examples = with_own_labels(model.task, examples, arguments.input)
    table = read_table(arguments.input, arguments.quoting)
    check_result_columns(model, table, arguments)
    check_table_can_be_written(table, arguments.output, arguments.quoting)
    if num_blank := table.attrs.get(NUM_BLANK):
        print(
            f"warning: skipped {counted(num_blank, 'blank line')} of {arguments.input}, so the output has one row "
            "for each other line",
            file=sys.stderr,
        )
    if arguments.dry_run:
        num_texts = counted(len(examples), "text")
        print(f"dry run: would label {num_texts} and write {arguments.output}; nothing was written")
        return
    table, num_long, scores = add_predictions(model, examples, table, arguments)
    write_table(table, arguments.output, arguments.quoting)
    most = f"longer than the model's {model.preprocessor.max_length} tokens: {model.task.of_long_texts}"
    long = f"; {num_long:,} of {counted(len(examples), 'text')} {most}" if num_long else ""
    without = f"; {counted(len(examples.bad_rows), 'row')} without one" if examples.bad_rows else ""
    print(f"{arguments.output}: {counted(len(examples), 'prediction')} by {model.task.name}{without}{long}")
    if scores:
        shown = ", ".join(f"{name} {figure(value)}" for name, value in scores.items())
        print(f"scores of {counted(len(examples), 'row')} against {arguments.label_column}: {shown}")


def fitted_folder(arguments: argparse.Namespace) -> tuple[Path, Columns | None, Task | None]:
    """Return the model's folder, the columns to read, and its task where finetune.json names it; needs no torch."""
    from trainer.finetuning.examples import Columns
    from trainer.finetuning.tables import check_columns, check_readable
    from trainer.finetuning.task_data import make_task
    from trainer.finetuning.tasks import TASK_NAMES
    from trainer.inference.pulled_model import is_checkpoint, pull
    from trainer.model.model_folder import FINETUNE_FILE, check_fine_tuned, not_fine_tuned, read_json

    check_readable(arguments.input)
    if is_checkpoint(arguments.model):
        raise not_fine_tuned(f"{arguments.model} is a checkpoint of pretraining, which was not fine-tuned for a task")
    folder = pull(arguments.model, tracking_uri=arguments.tracking_uri)
    check_fine_tuned(folder, arguments.model)
    facts = read_json(folder / FINETUNE_FILE)
    if arguments.quoting is None:
        arguments.quoting = facts.get("quoting") is not False
    text, pair = (getattr(arguments, f"{part}_column") or facts.get(f"{part}_column") for part in ("text", "pair"))
    if arguments.input.suffix == ".txt" and arguments.text_column is None:
        text = "text"  # the only column of lines
    named = {"--text-column": text, "--pair-column": pair, "--label-column": arguments.label_column}
    check_columns(arguments.input, named, arguments.quoting)
    label = arguments.label_column or ""
    columns = Columns(text, pair if isinstance(pair, str) else None, label) if isinstance(text, str) else None
    return folder, columns, make_task(facts["task"]) if facts.get("task") in TASK_NAMES else None


def read_texts(arguments: argparse.Namespace, columns: Columns | None, task: Task) -> Examples:
    """Read the texts of the input."""
    from trainer.finetuning.examples import read_examples
    from trainer.finetuning.task_data import check_has_pair

    if columns is None:
        raise UsageError(
            "the model does not record the names of its text columns",
            fix="give --text-column, and --pair-column for pairs",
            code="missing-text-column",
        )
    check_has_pair(task, columns.pair, "the model")
    parse = task.parse_label if columns.label else None
    examples = read_examples(
        arguments.input,
        columns,
        task.parse_text,
        parse,
        arguments.quoting,
        skip_bad=True,
        read_label_column=task.read_label_column,
    )
    for warning in examples.warnings("no prediction"):
        print(warning, file=sys.stderr)
    return examples


def check_result_columns(model: FittedModel, table: pandas.DataFrame, arguments: argparse.Namespace) -> None:
    """Refuse an input that has a column of the predictions' name."""
    names = [f"{name}{arguments.result_suffix}" for name in model.task.result_columns]
    if taken := [name for name in names if name in table.columns]:
        raise UsageError(
            f"{arguments.input} already has {', '.join(map(repr, taken))}, as the columns of the predictions are named",
            fix="give --result-suffix TEXT, such as --result-suffix _2, or rename these columns",
            code="existing-result-columns",
        )


def add_predictions(
    model: FittedModel, examples: Examples, table: pandas.DataFrame, arguments: argparse.Namespace
) -> tuple[pandas.DataFrame, int, dict[str, float]]:
    """Return the table with additional columns of predictions, the number of truncated texts, and scores by metric.

    The rows that were left out have no predictions. There are scores if the examples have labels.
    """
    import pandas

    from trainer.finetuning.answer_task import Answer

    predictions, num_long = model.predict(examples, arguments.batch_size)
    rows = []
    for one in predictions:
        label = one.label.text if isinstance(one.label, Answer) else one.label
        probability = {} if one.probability is None else {"probability": one.probability}
        rows.append({"predicted": label, **probability, **one.columns})
    good = [index for index in range(len(table)) if index + 1 not in examples.bad_rows]
    columns = pandas.DataFrame(rows, index=good, dtype=object).reindex(range(len(table)))
    scores = {} if examples.labels is None else model.task.score(examples.labels, predictions)
    return pandas.concat([table, columns.add_suffix(arguments.result_suffix)], axis=1), num_long, scores


if __name__ == "__main__":
    run_command(main)
