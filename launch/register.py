"""Register a model: `register.py --checkpoint DIR --name NAME --alias ALIAS`.

A checkpoint is exported first, behind the export's checks; `--model` takes a folder that was exported already. The
alias moves once the new version was uploaded whole and read back. At the end one mask is filled through the registry.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from data_prep.errors import run_command
from trainer.fill_mask import MASK_TOKEN, FillMask, report
from trainer.registry import Registration, check_names, pull, register
from trainer.served_model import INPUT_EXAMPLE


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="register.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="a training checkpoint; it is exported first")
    source.add_argument("--model", type=Path, metavar="FOLDER", help="an exported folder")
    parser.add_argument("--name", required=True, metavar="NAME", help="name of the registered model")
    parser.add_argument("--alias", metavar="ALIAS", help="alias that is to point to the new version, such as champion")
    parser.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow server (default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db)"
    )
    parser.add_argument("--dry-run", action="store_true", help="export and check, but register nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    check_names(arguments.name, arguments.alias)
    if arguments.model is not None:
        register_folder(arguments.model, arguments)
        return
    from trainer.export import export_checkpoint

    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        folder = Path(temporary) / arguments.name  # the model card takes its title from here
        export_checkpoint(arguments.checkpoint, folder)
        register_folder(folder, arguments)


def register_folder(folder: Path, arguments: argparse.Namespace) -> None:
    """Register an exported folder, load it back through the registry and show how others load it."""
    if arguments.dry_run:
        FillMask.load(pull(str(folder)))
        print(f"dry run: {folder} can be registered as {arguments.name}; nothing was written")
        return
    registration = register(folder, arguments.name, arguments.alias, arguments.tracking_uri)
    print(f"registered {registration.name} version {registration.version} at {registration.tracking_uri}")
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        pulled = pull(registration.model_uri, Path(temporary) / "model", arguments.tracking_uri)
        model = FillMask.load(pulled)
        print(f"loaded back from {registration.model_uri}: {INPUT_EXAMPLE}")
        print("\n".join(report(model.predict(INPUT_EXAMPLE.replace(MASK_TOKEN, model.mask_token), top_k=3))))
    print(how_to_load(registration))


def how_to_load(registration: Registration) -> str:
    """The lines by which others get the model."""
    uri = registration.model_uri
    return (
        f"\nmodel: {uri}\n"
        f"  python launch/fill_mask.py --model {uri} --tracking-uri {registration.tracking_uri} {INPUT_EXAMPLE!r}\n"
        f"  import mlflow; mlflow.set_tracking_uri({registration.tracking_uri!r})\n"
        f"  mlflow.transformers.load_model({uri!r})  # a fill-mask pipeline\n"
        f"  mlflow.artifacts.download_artifacts({uri + '/hf'!r})  # the whole folder, for AutoModel"
    )


if __name__ == "__main__":
    run_command(main)
