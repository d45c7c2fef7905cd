"""The part of `clozeworks export` that needs the extra `onnx`: --onnx and --int8."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.base.packages import missing_extra
from launch.options import check_new_folder
from trainer.model.model_folder import PICKLE_SUFFIXES

_NOT_COPIED = (".onnx", ".onnx_data", ".onnx.data", ".py", *PICKLE_SUFFIXES)


def export_onnx(arguments: argparse.Namespace) -> None:
    """Write the folder of --output with model.onnx, and with --int8 model_quantized.onnx, and print the checks."""
    check_libraries()
    check_new_folder(arguments.output)
    if not arguments.dry_run:
        _export(arguments, arguments.output)
        return
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        _export(arguments, Path(temporary) / arguments.output.name)
    print(f"dry run: the model can be exported to {arguments.output}; nothing was written")


def check_libraries() -> None:
    """Import what the extra `onnx` installs, before anything large is read.

    Raises:
        UsageError: a library is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error, "onnx") or error from None


def _export(arguments: argparse.Namespace, output: Path) -> None:
    lines: list[str] = []

    def extend(folder: Path) -> None:
        lines.extend(_add(folder, arguments))

    from trainer.inference.pulled_model import is_checkpoint

    if arguments.int8:
        from trainer.finetuning.tables import check_readable

        check_readable(arguments.int8_data)  # before minutes of work
    checkpoint = arguments.checkpoint
    if checkpoint is None and is_checkpoint(arguments.model):
        checkpoint = Path(arguments.model)
    if checkpoint is not None:
        from trainer.hf_export.export import export_checkpoint

        report = export_checkpoint(checkpoint, output, extend)
        lines.insert(0, f"checked: {report.parity}")
        what = f"{report.checkpoint}, {report.num_parameters:,} parameters,"
    else:
        from trainer.hf_export.export import new_folder
        from trainer.inference.pulled_model import pull

        source = pull(arguments.model, tracking_uri=arguments.tracking_uri)
        if arguments.output.resolve().is_relative_to(source.resolve()):  # it would be copied too, and change the model
            raise UsageError(
                f"--output {arguments.output} is inside the model's folder {source}",
                fix="give a folder beside it",
                code="output-inside-model",
            )
        with new_folder(output.absolute()) as folder:
            try:
                shutil.copytree(source, folder, ignore=_left_out, dirs_exist_ok=True)
                extend(folder)
            except OSError as error:
                raise UserError(
                    f"{output} cannot be written ({error}); nothing was exported",
                    fix="free the disk, or give another directory",
                    code="unwritable-file",
                ) from None
        what = str(arguments.model)
    print("\n".join(lines))
    if not arguments.dry_run:
        print(f"exported {what} to {output}")


def _left_out(folder: str, names: Collection[str]) -> list[str]:
    """Return the files that are not copied: other graphs, pickles and code."""
    return [name for name in names if name.lower().endswith(_NOT_COPIED)]


def _add(folder: Path, arguments: argparse.Namespace) -> list[str]:
    from trainer.hf_export.onnx_export import INT8_FILE, ONNX_FILE, add_onnx

    report = add_onnx(folder, arguments.onnx)
    lines = [f"{ONNX_FILE}: {report}"]
    if report.weights_were:
        lines.append(f"{ONNX_FILE}: the weights were {' and '.join(report.weights_were)}, and are float32 there")
    if arguments.int8:
        from trainer.evaluation.int8_agreement import MIN_AGREEMENT, add_checked_int8, lines_of, summary
        from trainer.evaluation.labeled_file import LabeledFile

        columns = (arguments.text_column, arguments.pair_column, arguments.label_column)
        data = LabeledFile(arguments.int8_data, *columns, arguments.quoting)
        least = MIN_AGREEMENT if arguments.min_agreement is None else arguments.min_agreement
        compared = add_checked_int8(folder, report.part, data, least)
        lines += [f"{INT8_FILE}: {summary(compared)}", *lines_of(compared)]
    return lines
