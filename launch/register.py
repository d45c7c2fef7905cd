"""Register a model, compare the versions that there are, and let an alias move past a gate.

    register.py --checkpoint DIR --name NAME --promote champion --if "valid/mlm_loss < champion"
    register.py --model FOLDER --name NAME --alias ALIAS
    register.py --name NAME --version 3 --promote champion
    register.py --name NAME --list
    register.py [--name NAME] --trained-on MANIFEST_DIGEST

A checkpoint is exported first, behind the export's checks; `--model` takes a folder that was exported already. An alias
moves once the new version was uploaded whole and read back. With --promote it moves only where the condition holds, and
the version that bore it is kept as `previous`. At the end one mask is filled through the registry.
Exit status: 0 done, 1 refused or failed, 2 wrong usage, 3 registered but not promoted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from shlex import quote

from data_prep.base.errors import UsageError, run_command
from launch.options import add_tracking_uri, command_parser
from trainer.config.promotion import Condition, check_metrics, parse_conditions
from trainer.config.registry_names import check_names, check_promoted
from trainer.inference.fill_mask import FillMask, report
from trainer.inference.provenance import read_provenance
from trainer.inference.pulled_model import pull
from trainer.registry.model_versions import ModelVersion, list_model_versions, promote, trained_on, version_lines
from trainer.registry.registration import Registration, register
from trainer.registry.served_model import INPUT_EXAMPLE, PipelineTask, ServedModel, load_served


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("register.py", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="a training checkpoint; it is exported first")
    what.add_argument("--model", type=Path, metavar="FOLDER", help="an exported folder")
    what.add_argument("--version", metavar="N", help="a version that is registered already, for --promote")
    what.add_argument("--list", action="store_true", help="compare the versions of --name")
    what.add_argument(
        "--trained-on",
        metavar="DIGEST",
        help="list the versions that saw the data of this manifest, or what grew of it; of all models without --name",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the registered model")
    moved = parser.add_mutually_exclusive_group()
    moved.add_argument("--alias", metavar="ALIAS", help="alias that is to point to the new version in any case")
    moved.add_argument("--promote", metavar="ALIAS", help="alias that moves if --if holds, such as champion")
    parser.add_argument(
        "--if",
        dest="condition",
        metavar="CONDITION",
        help="of --promote: METRIC < ALIAS or METRIC < NUMBER (or >, <=, >=), several joined by 'and'",
    )
    add_tracking_uri(parser)
    parser.add_argument("--dry-run", action="store_true", help="export and check, but register and promote nothing")
    read = parser.parse_args(arguments)
    if read.name is None and not read.trained_on:
        parser.error("--name is missing; only --trained-on searches without it, in all registered models")
    if read.condition and not read.promote:
        parser.error("--if is the condition of --promote ALIAS; give both")
    if read.version and not read.promote:
        parser.error("--version is for --promote ALIAS; give both")
    if (read.list or read.trained_on) and (read.promote or read.alias):
        parser.error("--list and --trained-on look only; leave out --alias and --promote")
    return read


def main() -> None:
    arguments = parse_arguments()
    if arguments.name is not None:
        check_names(arguments.name, arguments.alias)
    if arguments.promote:
        check_promoted(arguments.name, arguments.promote)
    conditions = parse_conditions(arguments.condition) if arguments.condition else ()
    if arguments.list or arguments.trained_on:
        show_versions(arguments)
    elif arguments.version:
        move_alias(arguments.version, conditions, arguments)
    elif arguments.model is not None:
        register_folder(arguments.model, conditions, arguments)
    else:
        from trainer.hf_export.export import export_checkpoint

        with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
            folder = Path(temporary) / arguments.name  # the model card takes its title from here
            export_checkpoint(arguments.checkpoint, folder)
            register_folder(folder, conditions, arguments)


def show_versions(arguments: argparse.Namespace) -> None:
    """Print the versions of one model as a table, or those (without --name of all models) that saw a data set."""
    versions: list[ModelVersion] = list_model_versions(arguments.name, arguments.tracking_uri)
    if arguments.trained_on:
        versions = trained_on(versions, arguments.trained_on)
        count = f"{len(versions)} version{'s' if len(versions) != 1 else ''}"
        where = arguments.name or "all registered models"
        print(f"{count} of {where} saw {arguments.trained_on} or data that grew from it")
    if versions:
        print("\n".join(version_lines(versions, with_names=arguments.name is None)))


def register_folder(folder: Path, conditions: tuple[Condition, ...], arguments: argparse.Namespace) -> None:
    """Register an exported folder, load it back through the registry and show how others load it."""
    if conditions:
        check_metrics(conditions, read_provenance(pull(str(folder))).get("scores") or {})
    if arguments.dry_run:
        load_served(pull(str(folder)))
        print(f"dry run: {folder} can be registered as {arguments.name}; nothing was written")
        return
    registration = register(folder, arguments.name, arguments.alias, arguments.tracking_uri)
    print(f"registered {registration.name} version {registration.version} at {registration.tracking_uri}")
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        pulled = pull(registration.model_uri, Path(temporary) / "model", arguments.tracking_uri)
        served = load_served(pulled)
        asked = f": {served.shown_example}" if served.pipeline_task else ""
        print(f"loaded back from {registration.model_uri}{asked}")
        print("\n".join(answer_lines(served)))
    print(how_to_load(registration, served.pipeline_task), flush=True)
    if arguments.promote:
        move_alias(registration.version, conditions, arguments)


def move_alias(version: str, conditions: tuple[Condition, ...], arguments: argparse.Namespace) -> None:
    """Promote a version, and say by which figures it passed."""
    if not version.isdigit():
        raise UsageError(f"--version {version!r} is no number; give one of those that --list shows")
    if arguments.dry_run:
        print(f"dry run: version {version} would be judged for {arguments.promote}; nothing was changed")
        return
    verdict = promote(arguments.name, version, arguments.promote, conditions, arguments.tracking_uri)
    reasons = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
    print(f"{arguments.promote} of {arguments.name} is version {version} now{reasons}")


def answer_lines(served: ServedModel) -> list[str]:
    """What the model that was loaded back makes of its example: masks filled, a class, or a tag a piece."""
    if served.pipeline_task is None:
        return ["(it answers questions, for which transformers has no pipeline; launch/predict.py asks it)"]
    if served.pipeline_task == "fill-mask":
        return report(FillMask(served.model, served.tokenizer).predict(served.shown_example, top_k=3))
    answers = served.pipeline()(served.example)
    answers = [answers] if isinstance(answers, dict) else answers  # of a pair it is one alone
    shown = (f"{each.get('label', each.get('entity'))} {each['score']:.3f}  {each.get('word', '')}" for each in answers)
    return [line.rstrip() for line in shown] or ["(no word of it has a tag)"]


def how_to_load(registration: Registration, task: PipelineTask | None) -> str:
    """The lines by which others get the model."""
    uri, server = registration.model_uri, registration.tracking_uri
    where = f"--model {quote(uri)} --tracking-uri {quote(server)}"
    command = f"python launch/predict.py {where} --input FILE --output FILE"
    if task == "fill-mask":
        command = f"python launch/fill_mask.py {where} {quote(INPUT_EXAMPLE)}"
    pipeline = f"  mlflow.transformers.load_model({uri!r})  # a {task} pipeline\n" if task else ""
    return (
        f"\nmodel: {uri}\n"
        f"  {command}\n"
        f"  import mlflow; mlflow.set_tracking_uri({server!r})\n"
        f"{pipeline}"
        f"  mlflow.artifacts.download_artifacts({uri + '/hf'!r})  # the whole folder, for AutoModel"
    )


if __name__ == "__main__":
    run_command(main)
