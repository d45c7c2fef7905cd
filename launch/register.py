"""Register a model in MLflow, compare registered versions, and move aliases.

    clozeworks register --checkpoint DIR --name NAME --promote champion \\
        --if "valid/mlm_loss < champion"
    clozeworks register --model FOLDER --name NAME --alias ALIAS
    clozeworks register --name NAME --version 3 --promote champion
    clozeworks register --name NAME --list
    clozeworks register [--name NAME] --trained-on MANIFEST_DIGEST

--checkpoint exports the checkpoint first, with all checks of the export; --model takes an exported folder. An alias
moves only after the new version is uploaded completely and read back. With --promote it moves only if the version meets
the condition, and the version that had the alias becomes `previous`. Versions that were evaluated differently
(settings, valid split, tokenizer) are not compared. At the end the command fills one mask with the registered model.
Exit status: 0 done, 1 refused or failed, 2 wrong usage, 3 registered but not promoted.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from data_prep.base.errors import UsageError, run_command
from launch.options import add_dry_run, add_tracking_uri, command_parser
from trainer.config.promotion import Condition, check_metrics, parse_conditions
from trainer.config.registry_settings import check_names, check_promoted

if TYPE_CHECKING:
    from trainer.registry.registration import Registration
    from trainer.registry.served_model import PipelineTask, ServedModel


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("register.py", __doc__)
    parser.usage = "%(prog)s SUBJECT [OPTIONS]"
    subject = parser.add_argument_group("subject: what to register, promote or list (one of)")
    what = subject.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a checkpoint or a run's output_dir; it is exported first"
    )
    what.add_argument("--model", type=Path, metavar="FOLDER", help="an exported folder")
    what.add_argument("--version", metavar="N", help="a registered version, for --promote")
    what.add_argument("--list", action="store_true", help="compare the versions of --name")
    what.add_argument(
        "--trained-on",
        metavar="DIGEST",
        help="list the versions that were trained on the data of this manifest or on a data set made from it; without "
        "--name in all registered models",
    )
    registry = parser.add_argument_group("registry")
    registry.add_argument("--name", metavar="NAME", help="name of the registered model")
    add_tracking_uri(registry)
    aliases = parser.add_argument_group("aliases")
    moved = aliases.add_mutually_exclusive_group()
    moved.add_argument("--alias", metavar="ALIAS", help="alias to set on the new version unconditionally")
    moved.add_argument(
        "--promote", metavar="ALIAS", help="alias to move if the version meets the condition, such as champion"
    )
    aliases.add_argument(
        "--if",
        dest="condition",
        metavar="CONDITION",
        help="condition of --promote: METRIC < ALIAS or METRIC < NUMBER (also >, <=, >=), several joined by 'and'",
    )
    aliases.add_argument(
        "--allow-different-evaluation",
        action="store_true",
        help="let --if compare versions that were evaluated with other settings, other data or another tokenizer",
    )
    add_dry_run(parser, "export and check, but register and promote nothing")
    read = parser.parse_args(arguments)
    if read.name is None and not read.trained_on:
        parser.error("--name is required; only --trained-on works without it, on all registered models")
    if read.condition and not read.promote:
        parser.error("--if is only valid with --promote ALIAS")
    if read.allow_different_evaluation and not read.condition:
        parser.error("--allow-different-evaluation is only valid with --if CONDITION")
    if read.version and not read.promote:
        parser.error("--version is only valid with --promote ALIAS")
    if (read.list or read.trained_on) and (read.promote or read.alias):
        parser.error("--list and --trained-on only list versions; remove --alias and --promote")
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
    """Print the versions of a model; with --trained-on those that saw a data set, without --name of all models."""
    from trainer.registry.model_versions import list_model_versions, trained_on, version_lines

    versions = list_model_versions(arguments.name, arguments.tracking_uri)
    if arguments.trained_on:
        versions = trained_on(versions, arguments.trained_on)
        count = f"{len(versions)} version{'s' if len(versions) != 1 else ''}"
        what = arguments.name or "all registered models"
        print(f"{count} of {what} trained on {arguments.trained_on} or on data made from it")
    if versions:
        print("\n".join(version_lines(versions, with_names=arguments.name is None)))


def register_folder(folder: Path, conditions: tuple[Condition, ...], arguments: argparse.Namespace) -> None:
    """Register an exported folder, load it back from the registry and print how others load it."""
    from trainer.inference.pulled_model import pull
    from trainer.model.model_folder import check_registrable, read_provenance
    from trainer.registry.registration import register
    from trainer.registry.served_model import load_served
    from trainer.tracking.mlflow_server import registry_view_hint

    if conditions:
        check_metrics(conditions, read_provenance(pull(str(folder))).get("scores") or {})
    if arguments.dry_run:
        source = pull(str(folder))
        check_registrable(source)
        load_served(source)
        print(f"dry run: {folder} can be registered as {arguments.name}; nothing was written")
        return
    registration = register(folder, arguments.name, arguments.alias, arguments.tracking_uri)
    print(f"registered {registration.name} version {registration.version} at {registration.server}")
    print(f"registry: {registry_view_hint(registration.server, registration.name, registration.version)}")
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        pulled = pull(registration.model_uri, Path(temporary) / "model", arguments.tracking_uri)
        served = load_served(pulled)
        example = f": {served.example_text}" if served.pipeline_task else ""
        print(f"loaded back from {registration.model_uri}{example}")
        print("\n".join(answer_lines(served)))
    print(how_to_load(registration, served.pipeline_task), flush=True)
    if arguments.promote:
        move_alias(registration.version, conditions, arguments)


def move_alias(version: str, conditions: tuple[Condition, ...], arguments: argparse.Namespace) -> None:
    """Promote a version if it meets the conditions, and print the compared metrics."""
    if not version.isdigit():
        raise UsageError(
            f'--version must be a number, got "{version}"',
            fix="give one of the numbers that --list prints",
            code="invalid-model-version",
        )
    if arguments.dry_run:
        print(f"dry run: would compare version {version} with {arguments.promote}; nothing was changed")
        return
    from trainer.registry.model_versions import promote

    decision = promote(
        arguments.name,
        version,
        arguments.promote,
        conditions,
        arguments.tracking_uri,
        arguments.allow_different_evaluation,
    )
    reasons = f": {'; '.join(decision.reasons)}" if decision.reasons else ""
    print(f"{arguments.promote} of {arguments.name} is now version {version}{reasons}")


def answer_lines(served: ServedModel) -> list[str]:
    """Return the output of the loaded model's pipeline for its example: filled masks, a class, or a tag per token."""
    from trainer.inference.fill_mask import FillMask, report

    if served.pipeline_task is None:
        return ["(transformers has no pipeline for question answering; `clozeworks predict` runs this model)"]
    if served.pipeline_task == "fill-mask":
        return report(FillMask(served.model, served.tokenizer).predict(served.example_text, top_k=3))
    answers = served.pipeline()(served.example)
    answers = [answers] if isinstance(answers, dict) else answers  # one dictionary for a pair
    lines = (f"{each.get('label', each.get('entity'))} {each['score']:.3f}  {each.get('word', '')}" for each in answers)
    return [line.rstrip() for line in lines] or ["(no word has a tag)"]


def how_to_load(registration: Registration, task: PipelineTask | None) -> str:
    """Return the lines by which others load the model."""
    from trainer.registry.served_model import INPUT_EXAMPLE

    uri, server, registry = registration.model_uri, registration.tracking_uri, registration.registry_uri
    options = f"--model {quote(uri)} --tracking-uri {quote(server)}"
    variable = f"MLFLOW_REGISTRY_URI={quote(registry)} " if registry else ""
    command = f"{variable}clozeworks predict {options} --input FILE --output FILE"
    if task == "fill-mask":
        command = f"{variable}clozeworks fill-mask {options} {quote(INPUT_EXAMPLE)}"
    set_registry = f"; mlflow.set_registry_uri({registry!r})" if registry else ""
    pipeline = f"  mlflow.transformers.load_model({uri!r})  # a {task} pipeline\n" if task else ""
    if task != "fill-mask":
        pipeline += f"  mlflow.pyfunc.load_model({uri!r}).predict([...])  # as `mlflow models serve` answers\n"
    return (
        f"\nmodel: {uri}\n"
        f"  {command}\n"
        f"  import mlflow; mlflow.set_tracking_uri({server!r}){set_registry}\n"
        f"{pipeline}"
        f"  mlflow.artifacts.download_artifacts({uri + '/hf'!r})  # the whole folder, for AutoModel"
    )


if __name__ == "__main__":
    run_command(main)
