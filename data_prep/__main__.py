"""The command line of data preparation: `python -m data_prep tokenizer|shards|verify|inspect|stats`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from data_prep import storage
from data_prep.config import PreparationConfig, load_config
from data_prep.documents import BadInput, DocumentReader, InputUnit
from data_prep.errors import UsageError, UserError, run_command
from data_prep.executors import default_num_workers
from data_prep.manifest import Manifest, SplitRecord
from data_prep.plan import InputFile, Plan, find_inputs, make_plan
from data_prep.prepare import prepare_shards
from data_prep.progress import Progress
from data_prep.report import TextSample, inspect_report, stats_report, tokenizer_report
from data_prep.settings import describe
from data_prep.tokenizer import Tokenizer, TokenizerInfo, train_tokenizer
from data_prep.verify import verify_shards

_COMMANDS = "tokenizer trains a tokenizer; shards makes a shard set; verify checks, inspect shows and stats counts one"


def main() -> None:
    """Parse the command line and run its command.

    Raises:
        UserError: the command did not do all that it was asked for.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args()
    overrides = _overrides(parser, arguments, rest)
    commands = {
        "tokenizer": _tokenizer,
        "shards": _shards,
        "verify": _verify,
        "inspect": _inspect,
        "stats": _stats,
    }
    commands[arguments.command](arguments, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep", description=_COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    settings = "settings (section.name=value, here or in the file of --config):\n" + "\n".join(
        describe(PreparationConfig)
    )
    for name, text in (
        ("tokenizer", "train a SentencePiece tokenizer"),
        ("shards", "make a shard set of a corpus"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=settings,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "--input",
            nargs="+",
            default=[],
            metavar="FILE",
            help=".txt .jsonl .json, also .gz .zst .bz2 .xz; patterns",
        )
        command.add_argument("--output", required=True, metavar="DIR", help="folder to write")
        command.add_argument("--config", metavar="FILE", help="YAML file of settings")
        command.add_argument("--fresh", action="store_true", help="begin anew where the output holds something else")
        command.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")
        if name == "tokenizer":
            command.add_argument("--vocab-size", type=int, metavar="N", help="short for tokenizer.vocab_size=N")
        else:
            command.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of a tokenizer")
            command.add_argument("--workers", type=int, metavar="N", help="processes; by default one for each core")
    for name, text in (
        ("verify", "check every byte and count of a shard set"),
        ("inspect", "show decoded documents of a shard set, a sentence a line"),
        ("stats", "show counts, lengths and frequencies of a shard set"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", metavar="DIR", help="folder or URL of the shard set")
        if name == "verify":
            command.add_argument("--workers", type=int, metavar="N", help="processes; by default one for each core")
        if name == "inspect":
            command.add_argument("--split", choices=("train", "valid"), default="train")
            command.add_argument("--shard", type=int, default=0, metavar="N", help="number of the shard (default 0)")
            command.add_argument("--documents", type=int, default=3, metavar="K", help="how many documents (default 3)")
    return parser


def _overrides(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """The `section.name=value` words, wherever on the command line they stand (also after the files of --input)."""
    known = (*PreparationConfig.model_fields,)

    def is_override(word: str) -> bool:
        return "=" in word and word.partition("=")[0].partition(".")[0] in known and not os.path.exists(word)

    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "input" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "input" not in arguments:
        return []
    overrides = [*rest, *filter(is_override, arguments.input)]
    arguments.input = [word for word in arguments.input if not is_override(word)]
    return overrides


def _tokenizer(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.vocab_size is not None:
        overrides = [*overrides, f"tokenizer.vocab_size={arguments.vocab_size}"]
    config = load_config(arguments.config, overrides, arguments.input)
    files = find_inputs(config)
    inputs = {"files": [{"url": storage.redact(file.url), "bytes": file.bytes} for file in files]}
    if arguments.dry_run:
        size = sum(file.bytes for file in files) / 1e6
        print(
            f"would train {config.tokenizer.vocab_size:,} pieces on {len(files)} files ({size:.1f} MB) into "
            f"{arguments.output}"
        )
        return
    output = Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output} is a file; name a folder")
    present = TokenizerInfo.read(output) if not arguments.fresh else None
    if present is not None and (present.settings, present.inputs) == (config.tokenizer, inputs):
        print(f"{output} is complete already: the tokenizer of these inputs and settings; --fresh trains it again")
        return
    if present is not None:
        raise UserError(
            f"{output} holds a tokenizer of other inputs or settings (fingerprint "
            f"{present.fingerprint[:16]}); "
            "choose another folder, or replace it with --fresh"
        )
    sample = TextSample()
    with storage.hold_lock(output):
        train_tokenizer(_texts(files, config, sample), output, config.tokenizer, inputs)
    print("\n".join(tokenizer_report(Tokenizer.load(output), sample.texts)))


def _texts(files: tuple[InputFile, ...], config: PreparationConfig, sample: TextSample) -> Iterator[str]:
    """The documents of all files, as they are read; some are kept for the report."""
    with Progress("reading", sum(file.bytes for file in files), "MB", 1e6) as progress:
        for file in files:
            reader = DocumentReader(InputUnit(file.url, 0, file.bytes, True, file.source), config.documents)
            try:
                for text in reader:
                    sample.add(text)
                    yield text
            except BadInput as error:
                if config.documents.on_bad_input == "error":
                    raise
                print(f"warning: {error}; the tokenizer learns from what came before", file=sys.stderr)
            for reason, count in reader.dropped.items():
                print(f"warning: {storage.redact(file.url)}: {count} left out: {reason}", file=sys.stderr)
            progress.add(file.bytes)


def _shards(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides, arguments.input)
    tokenizer = Tokenizer.load(arguments.tokenizer)
    plan = make_plan(config, tokenizer)
    if arguments.dry_run:
        print(_described(plan, arguments.output))
        return
    if not storage.is_remote(arguments.output) and storage.local_path(arguments.output).is_file():
        raise UsageError(f"output {arguments.output} is a file; name a folder")
    num_workers = _num_workers(arguments.workers if arguments.workers is not None else config.num_workers)
    manifest, is_new = prepare_shards(plan, tokenizer, arguments.output, num_workers, arguments.fresh)
    if not is_new:
        place = storage.redact(arguments.output)
        print(f"{place} is complete already, of the same inputs, settings and tokenizer; nothing was done")
    print(_summary(manifest, arguments.output))


def _described(plan: Plan, output: str) -> str:
    size = sum(file.bytes for file in plan.inputs) / 1e6
    destinations = plan.destinations
    return (
        f"would read {len(plan.inputs)} files ({size:.1f} MB) in {len(plan.units)} units and write at most "
        f"{destinations.num_train} train and {destinations.num_valid} valid shards to {storage.redact(output)}"
    )


def _summary(manifest: Manifest, output: str) -> str:
    def described(name: str, split: SplitRecord) -> str:
        return (
            f"{name}: {split.documents:,} documents, {split.sentences:,} sentences, {split.tokens:,} tokens "
            f"in {len(split.shards)} shards"
        )

    dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items()) or "nothing"
    return "\n".join(
        (
            described("train", manifest.train),
            described("valid", manifest.valid),
            f"dropped: {dropped}",
            storage.redact(output),
        )
    )


def _verify(arguments: argparse.Namespace, overrides: list[str]) -> None:
    manifest, problems = verify_shards(arguments.folder, _num_workers(arguments.workers))
    if problems:
        for problem in problems[1:]:
            print(f"problem: {problem}", file=sys.stderr)
        raise UserError(f"{storage.redact(arguments.folder)} is not sound, {len(problems)} problem(s): {problems[0]}")
    splits = (manifest.train, manifest.valid)
    print(
        f"ok: {sum(len(split.shards) for split in splits)} shards, "
        f"{sum(split.documents for split in splits):,} documents, "
        f"{sum(split.sentences for split in splits):,} sentences, {sum(split.tokens for split in splits):,} "
        "tokens, "
        f"tokenizer {manifest.tokenizer.fingerprint[:16]}"
    )


def _inspect(arguments: argparse.Namespace, overrides: list[str]) -> None:
    for line in inspect_report(arguments.folder, arguments.split, arguments.shard, arguments.documents):
        print(line)


def _stats(arguments: argparse.Namespace, overrides: list[str]) -> None:
    for line in stats_report(arguments.folder):
        print(line)


def _num_workers(wanted: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise UsageError(f"--workers={wanted} is not possible; give 1 or more")
    return wanted or default_num_workers()


if __name__ == "__main__":
    try:
        run_command(main)
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough; keep the interpreter from complaining at its
        # end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
