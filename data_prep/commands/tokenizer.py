"""`python -m data_prep tokenizer`: train a SentencePiece tokenizer."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import printable
from data_prep.commands.options import add_preparation, add_workers, configured, num_workers
from data_prep.config.preparation_config import PreparationConfig
from data_prep.documents.input_files import InputFile, find_inputs, find_units
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer_info import INFO_NAME, TokenizerInfo
from data_prep.tokenizer.tokenizer_report import read_report
from data_prep.tokenizer_training.quality import report_lines
from data_prep.tokenizer_training.sampling import draw_sample
from data_prep.tokenizer_training.training import check_vocab_size, train_on_sample

HELP = "train a SentencePiece tokenizer"

_WORK_FOLDER = ".sampling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preparation(parser)
    add_workers(parser)
    parser.add_argument("--vocab-size", type=int, metavar="N", help="short for tokenizer.vocab_size=N")


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Draw the sample, train, and print a report of the tokenizer.

    Raises:
        UserError: there is no text, or the output holds another tokenizer.
    """
    output = arguments.output
    if output is None:
        raise UsageError("no output is named; give --output DIR")
    if arguments.vocab_size is not None:
        _check_one_size(arguments.vocab_size, overrides)
        overrides = [*overrides, f"tokenizer.vocab_size={arguments.vocab_size}"]
    config = configured(arguments, overrides)
    check_vocab_size(config.tokenizer)
    workers = num_workers(arguments.workers if arguments.workers is not None else config.num_workers)
    files = find_inputs(config)
    size = sum(file.bytes for file in files) / 1e6
    if arguments.dry_run:
        print(f"would train {config.tokenizer.vocab_size:,} pieces on {len(files)} files ({size:.1f} MB) into {output}")
        return
    if storage.folder_of_file(output):
        raise UsageError(f"output {output} is a file; name a folder")
    inputs = _described(files, config)
    if not arguments.fresh and _is_complete(output, config, inputs):
        print(f"{output} is complete already: the tokenizer of these inputs and settings; --fresh trains it again")
        for url in _written_since(output, files)[:1]:
            print(f"note: {url} was written since, at the same size; if its text is another now, train again")
        return
    units = find_units(files, config)
    with _new_folder_or_none(output), storage.hold_lock(output), _local_work_folder(output) as work_folder:
        storage.remove_unfinished(output)
        sample, counts = draw_sample(config, units, work_folder, workers)
        train_on_sample(sample, counts, output, config.tokenizer, inputs)
    report = read_report(output)
    assert report is not None
    print(f"tokenizer           {storage.redact(output)}")
    for line in report_lines(report):
        print(printable(line))


def _check_one_size(vocab_size: int, overrides: Sequence[str]) -> None:
    """Refuse a setting that says otherwise than --vocab-size.

    Raises:
        UsageError: one does.
    """
    other = [word for word in overrides if word.startswith("tokenizer.vocab_size=")]
    if other and other[-1] != f"tokenizer.vocab_size={vocab_size}":
        raise UsageError(f"--vocab-size {vocab_size} and {other[-1]} contradict each other; give one of them")


def _described(files: Sequence[InputFile], config: PreparationConfig) -> dict[str, Any]:
    """What the tokenizer is made of, apart from its own settings."""
    sources = config.sources
    return {
        "files": [
            {"url": storage.redact(file.url), "bytes": file.bytes, "source": sources[file.source].name}
            for file in files
        ],
        "sources": {
            source.name: source.model_dump(mode="json", include={"language", "text_field"}) for source in sources
        },
        "documents": config.documents.model_dump(mode="json"),
    }


def _is_complete(output: str, config: PreparationConfig, inputs: dict[str, Any]) -> bool:
    """Whether the output holds this very tokenizer.

    Raises:
        UserError: it holds another; the message names what differs.
    """
    present = TokenizerInfo.read(output)
    if present is None:
        return False
    differences = list(present.differences(config.tokenizer, inputs))
    if differences:
        raise UserError(
            f"{storage.redact(output)} holds a tokenizer of other inputs or settings (fingerprint "
            f"{present.fingerprint[:16]}): {'; '.join(differences[:5])}{' ...' if len(differences) > 5 else ''}; "
            "choose another folder, or replace it with --fresh"
        )
    return True


def _written_since(output: str, files: Sequence[InputFile]) -> list[str]:
    """The inputs that were written after the tokenizer, as far as clocks tell; their sizes are what they were."""
    made_at = storage.modified_at(storage.join(output, INFO_NAME))
    times = [(storage.redact(file.url), storage.modified_at(file.url)) for file in files]
    return [url for url, written_at in times if made_at is not None and written_at is not None and written_at > made_at]


@contextmanager
def _new_folder_or_none(output: str) -> Iterator[None]:
    """Remove again the folders that the block makes where it fails and leaves nothing in them."""
    path = storage.local_path(output).absolute()
    missing = [] if storage.is_remote(output) else [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):  # one that is not empty, or was never made
                place.rmdir()
        raise


@contextmanager
def _local_work_folder(output: str) -> Iterator[Path]:
    """A folder for the units' samples: beside the tokenizer, where there is space, or a temporary one."""
    if not storage.is_remote(output):
        yield storage.local_path(output) / _WORK_FOLDER
        return
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder:
        yield Path(folder) / _WORK_FOLDER
