"""Compare runs and models: means and deviations over seeds, and differences with 95% intervals.

    clozeworks compare runs/old-0 runs/old-1 runs/new-0 runs/new-1
    clozeworks compare old=runs/old-0,runs/old-1 new=models:/new@champion --minimal-pairs DIR --output comparison

Runs that differ in training.seed alone are one group; LABEL=A,B,C names a group. Each is compared with the first one.
A run has the newest scores of its evaluations (valid/*), a model those of its export. --minimal-pairs scores all models
on pairs of sentences, and --suite runs a suite on each (as in `clozeworks evaluate`, whose results are reused). Scores
that were not measured alike, such as on other rows of text, are not compared, and the reason is printed.

A model may be any folder or name on the Hub that transformers opens as a masked language model without code of its own,
with its tokenizer. --text hides each word of a text file in turn, which compares models with different tokenizers.

--labeled scores models of `clozeworks finetune` on a table of examples; they must have one task and the same labels,
and each is a group of its own unless LABEL= says otherwise.

--output writes comparison.md, comparison.json and comparison.png to a new directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.arguments import OnceFlag, local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.local_paths import expand_home
from launch.options import add_tracking_uri, check_new_folder, command_parser
from launch.status import read_run

if TYPE_CHECKING:
    from trainer.data.minimal_pairs import MinimalPair
    from trainer.evaluation.compare import Subject
    from trainer.evaluation.suite_settings import Suite


CONFIG_NAME = "training_config.yaml"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("compare.py", __doc__)
    parser.add_argument(
        "subjects",
        nargs="+",
        metavar="[LABEL=]RUN_OR_MODEL[,...]",
        help="output_dir of a run, or a model as other commands take it; LABEL= makes a group of several",
    )
    parser.add_argument("--minimal-pairs", type=Path, metavar="DIR", help="directory or file with minimal pairs")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text file, one text per line, whose words are hidden"
    )
    parser.add_argument("--suite", metavar="FILE", help="YAML file of a suite, or the name of a preset")
    parser.add_argument(
        "--suite-setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override of a setting of the suite, such as data=DIR; may be repeated",
    )
    parser.add_argument(
        "--output", type=local_output("--output"), metavar="DIR", help="new directory for table, values and picture"
    )
    add_tracking_uri(parser)
    add_labeled(parser)
    parsed = parser.parse_args(arguments)
    if parsed.suite_setting and parsed.suite is None:
        parser.error("--suite-setting is only valid with --suite")
    named = ("text_column", "pair_column", "label_column", "quoting")
    if parsed.labeled is None and (lone := [name for name in named if getattr(parsed, name) is not None]):
        parser.error(f"--{lone[0].replace('_', '-')} is only valid with --labeled")
    if parsed.labeled is not None and any((parsed.minimal_pairs, parsed.text, parsed.suite)):
        parser.error("--labeled scores fine-tuned models, which --minimal-pairs, --text and --suite do not")
    return parsed


def add_labeled(parser: argparse.ArgumentParser) -> None:
    """Add the options of the labeled file."""
    group = parser.add_argument_group("fine-tuned models")
    group.add_argument("--labeled", type=Path, metavar="FILE", help="table of examples that fine-tuned models label")
    for part, what in (("text", "texts"), ("pair", "second texts"), ("label", "labels")):
        group.add_argument(
            f"--{part}-column",
            metavar="NAME",
            help=f"its column of {what} (default: that of the training data)",
        )
    group.add_argument(
        "--quoting", action=OnceFlag, help="whether quotation marks in tsv and csv enclose cells, as in predict"
    )


def main() -> None:
    arguments = parse_arguments()
    if arguments.output is not None:
        check_new_folder(arguments.output)
    named = [pair for text in arguments.subjects for pair in names_in(text)]
    from data_prep.storage import storage
    from trainer.data.minimal_pairs import read_minimal_pairs
    from trainer.evaluation import compare
    from trainer.evaluation.suite_settings import load_suite
    from trainer.evaluation.word_scores import read_lines

    pairs = read_minimal_pairs(arguments.minimal_pairs) if arguments.minimal_pairs is not None else []
    lines = read_lines(arguments.text) if arguments.text is not None else []
    labels = [label for label, _ in named]
    names = [name for _, name in named]
    fitted = open_fitted(names, arguments) if arguments.labeled is not None else []
    subjects = [subject for subject, _ in fitted] or [
        open_subject(name, arguments.tracking_uri, fills_masks=bool(pairs or lines)) for name in names
    ]
    compare.grouped(subjects, labels)  # before anything takes long
    if fitted:
        subjects = with_labels(fitted, arguments)
    if pairs:
        subjects = [with_pairs(each, pairs, arguments.tracking_uri) for each in subjects]
    if lines:
        subjects = [with_text(each, lines, arguments.tracking_uri) for each in subjects]
    if arguments.suite is not None:
        suite = load_suite(arguments.suite, arguments.suite_setting)
        subjects = [with_suite(each, suite, arguments.tracking_uri) for each in subjects]
    groups = compare.grouped(subjects, labels)
    found = compare.comparison(groups, pairs)
    tables = compare.tables(found)
    print("\n\n".join(table.text() for table in tables))
    if arguments.output is None:
        return
    lines = [
        f"## {table.title}\n\n{table.markdown()}\n" + (f"\n{table.note}\n" if table.note else "") for table in tables
    ]
    page = "# Comparison\n\n" + "\n".join(lines) + "\n![scores](comparison.png)\n"
    for name, content in (
        ("comparison.png", compare.picture(groups)),
        ("comparison.json", (json.dumps(found, indent=1) + "\n").encode()),
        ("comparison.md", page.encode()),
    ):
        storage.write_bytes(arguments.output / name, content)
    print(f"\nwrote {arguments.output}/comparison.md, .json and .png")


def names_in(text: str) -> list[tuple[str | None, str]]:
    """Return label and name of each subject of an argument; a path that exists is one name, whatever it contains.

    Raises:
        UsageError: a label has no subject, or subjects have an empty label.
    """
    label, has_label, names = text.partition("=")
    if not has_label or "/" in label or Path(text).exists():
        return [(None, expand_home(text))]
    named: list[tuple[str | None, str]] = [(label, expand_home(name)) for name in names.split(",") if name]
    if not label or not named:
        raise UsageError(f"{text} is not LABEL=RUN", fix="write it as in old=RUN,RUN", code="invalid-group")
    return named


def open_fitted(names: Sequence[str], arguments: argparse.Namespace) -> list[tuple[Subject, Path]]:
    """Return fine-tuned models, still without scores, and their folders.

    Raises:
        UserError: a model is missing, is not fine-tuned, or does not compare with the first one; or the labeled file
            cannot be read.
    """
    from trainer.evaluation.compare import Subject
    from trainer.evaluation.labeled_file import check_one_task
    from trainer.finetuning.fitted_model import read_facts
    from trainer.finetuning.tables import check_readable
    from trainer.inference.pulled_model import is_checkpoint, pull
    from trainer.model.model_folder import check_fine_tuned, not_fine_tuned

    check_readable(arguments.labeled)
    folders: dict[str, Path] = {}
    for name in dict.fromkeys(names):
        if is_checkpoint(name):
            raise not_fine_tuned(f"{name} is a run or a checkpoint of pretraining, which was not fine-tuned for a task")
        folders[name] = pull(name, tracking_uri=arguments.tracking_uri)
        check_fine_tuned(folders[name], name)
    check_one_task(folders)
    seeds = {name: None if (fit := read_facts(folder)) is None else fit.seed for name, folder in folders.items()}
    return [(Subject(name, {}, seed=seeds[name]), folders[name]) for name in names]


def with_labels(opened: Sequence[tuple[Subject, Path]], arguments: argparse.Namespace) -> list[Subject]:
    """Score fine-tuned models on the labeled file."""
    from trainer.evaluation.labeled_file import LabeledFile, score_file
    from trainer.finetuning.fitted_model import read_fitted_task

    columns = (arguments.text_column, arguments.pair_column, arguments.label_column)
    data = LabeledFile(arguments.labeled, *columns, arguments.quoting)
    task = read_fitted_task(opened[0][1])
    subjects = []
    for subject, folder in opened:
        found = score_file(data, folder, task)
        for warning in found.warnings:
            print(f"{subject.name}: {warning}", file=sys.stderr)
        subjects.append(
            replace(
                subject,
                scores={f"labeled/{name}": value for name, value in found.scores.items()},
                by_example={f"labeled/{name}": values for name, values in found.by_example.items()},
                facts={"labeled_examples": found.examples_sha256},
            )
        )
    return subjects


def open_subject(name: str, tracking_uri: str | None, fills_masks: bool = False) -> Subject:
    """Read the scores of a run from its status, and those of a model from its export.

    Raises:
        UserError: there is no such run or model, or it is to fill masks and does not.
    """
    from data_prep.base.yaml_values import read_yaml
    from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder
    from trainer.evaluation.compare import Subject, recipe_of
    from trainer.evaluation.evaluate_suite import open_model_of
    from trainer.model.model_folder import check_fills_masks, read_provenance
    from trainer.tracking.status import STATUS_NAME

    run = Path(name)
    config: dict[str, Any] | None = None
    is_finished = True
    if (run / STATUS_NAME).is_file():
        status = read_run(run)
        step: int | None
        tokens: int | None
        is_finished = status.state == "finished"
        steps, _ = list_steps(run)
        if steps:
            config = CheckpointFolder(step_folder(run, steps[0])).read_state().config
        scores, facts, step, tokens = status.metrics, status.evaluation, status.step, status.tokens_seen
    else:
        folder = open_model_of(name, tracking_uri).folder
        if fills_masks:
            check_fills_masks(folder, name)
        origin = read_provenance(folder)
        if (folder / CONFIG_NAME).is_file():
            config = read_yaml(folder / CONFIG_NAME)
        scores, facts = origin.get("scores") or {}, origin.get("evaluation") or {}
        step, tokens = origin.get("step"), origin.get("tokens_seen")
    return Subject(
        name,
        {metric: value for metric, value in scores.items() if value is not None},
        facts,
        (config or {}).get("training", {}).get("seed"),
        None if config is None else recipe_of(config),
        step,
        tokens,
        is_finished,
    )


def with_pairs(subject: Subject, pairs: Sequence[MinimalPair], tracking_uri: str | None) -> Subject:
    """Score the minimal pairs with a subject."""
    from launch.fill_mask import open_model
    from trainer.evaluation.compare import MINIMAL_PAIRS
    from trainer.evaluation.masked_scorers import score_pairs

    scores = score_pairs(open_model(subject.name, tracking_uri), pairs)
    right = scores[:, 0] > scores[:, 1]
    return replace(
        subject,
        scores={**subject.scores, MINIMAL_PAIRS: float(right.mean())},
        by_example={**subject.by_example, MINIMAL_PAIRS: right},
    )


def with_text(subject: Subject, lines: Sequence[str], tracking_uri: str | None) -> Subject:
    """Score the hidden words of a text with a subject."""
    from launch.fill_mask import open_model
    from trainer.evaluation.word_scores import score_words

    bits_per_byte, digest = score_words(open_model(subject.name, tracking_uri), lines)
    return replace(
        subject,
        scores={**subject.scores, "text/word_bits_per_byte": bits_per_byte},
        facts={**subject.facts, "text_words": digest},
    )


def with_suite(subject: Subject, suite: Suite, tracking_uri: str | None) -> Subject:
    """Run the suite on a subject, or read its results."""
    from trainer.evaluation.compare import directions
    from trainer.evaluation.evaluate_suite import default_output, evaluate_suite, prepare_suite

    plan, model = prepare_suite(suite, subject.name, tracking_uri)
    result = evaluate_suite(plan, model, default_output(plan, model), print, tracking_uri, is_tracked=False)
    by_seed = {f"suite/{suite.name}/{task}": result.scores(task) for task in suite.tasks}
    return replace(
        subject,
        scores={**subject.scores, **result.summary},
        facts={**subject.facts, **result.facts},
        by_seed={name: values for name, values in by_seed.items() if len(values) > 1},
        lower_is_better=directions(suite),
    )


if __name__ == "__main__":
    run_command(main)
