"""The generated parts of the pages: from `<!-- benchmarks: NAME -->` to its end, written from results/*.json.

Every figure in them comes from a report. README.md has numbers, summary and language; tests/benchmarks/README.md has
everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from data_prep.base.errors import UserError
from tests.benchmarks import language_tables, readme_tables
from tests.benchmarks.readme_tables import Reports
from tests.benchmarks.reports import Report, Row, figure, machine_of, rows_of

_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n)(.*?)(<!-- end of benchmarks: \2 -->\n)", re.DOTALL)


def rewritten(text: str, reports: Reports) -> str:
    """The page with every block regenerated.

    Raises:
        UserError: a block has an unknown name, or its report is missing.
    """
    return _BLOCK.sub(lambda found: found[1] + made(found[2], reports) + found[4], text)


def made(name: str, reports: Reports) -> str:
    """The text of one block."""
    if name not in BLOCKS:
        raise UserError(
            f"unknown benchmark block {name}",
            fix=f"use one of {', '.join(BLOCKS)}",
            code="unknown-benchmark-block",
        )
    return "\n".join(BLOCKS[name](reports)) + "\n"


def names_in(text: str) -> list[str]:
    """The names of the blocks of a page."""
    return [found[2] for found in _BLOCK.finditer(text)]


SUMMARY = {
    ("tokenizing, one core", "SentencePiece"): "tokenizing",
    ("tokenizing, one core", "tokenizers (encode_batch_fast)"): "tokenizing",
    ("tokenizing, one core", "gigatoken"): "tokenizing",
    ("text to shards, one core", "datatrove"): "text to verified shards",
    ("text to shards, one core", "datasets.map + tokenizers"): "text to verified shards",
    ("memory of preparation, 64 MB of text", "datatrove"): "memory of preparation",
    ("masked batches, MLM, length 512", "DataCollatorForLanguageModeling, np arrays"): "masked batches",
    ("resume after 5G tokens of an indexed set", "mosaicml-streaming"): "resume after 5G tokens",
    ("training step, bert_base bf16, documents of like length together", "transformers, SDPA"): "training step, bf16",
    ("whole training loop, tiny_cpu", "Trainer, group_by_length"): "whole training loop, `tiny_cpu`",
    ("training to the goal of the speed run", "Trainer, run_mlm's recipe"): "CPU seconds to a valid loss (speed run)",
}
"""Rows of the overview that README.md shows, by name and peer, with their shorter names there."""


NUMBERS = {
    ("text to shards, one core", "datatrove"): "the preparation throughput of datatrove",
    ("resume after 5G tokens of an indexed set", "mosaicml-streaming"): "the resume speed of mosaicml-streaming",
    (
        "whole training loop, tiny_cpu",
        "Trainer, group_by_length",
    ): "the throughput of transformers' Trainer, `tiny_cpu`",
}
"""The rows behind the three numbers at the top of README.md."""


def numbers(reports: Reports) -> Iterator[str]:
    """Three ratios, for the top of README.md."""
    rows = [_row(reports, *key) for key in NUMBERS]
    yield "| " + " | ".join(f"**{figure(row.ratio or 0.0)} times**" for row in rows) + " |"
    yield "|---" * len(rows) + "|"
    yield "| " + " | ".join(NUMBERS.values()) + " |"


def summary(reports: Reports) -> Iterator[str]:
    """A few rows of the overview, for README.md."""
    yield "| task | peer | times better than the peer | range |"
    yield "|---|---|---|---|"
    for key, name in SUMMARY.items():
        row = _row(reports, *key)
        yield f"| {name} | {row.peer_name} | {figure(row.ratio or 0.0)} | {row.range} |"


def _row(reports: Reports, name: str, peer: str) -> Row:
    for row in compared_rows(reports):
        if (row.name, row.peer_name) == (name, peer):
            return row
    raise UserError(
        f"no result has the row {name} with the peer {peer}",
        fix="correct NUMBERS and SUMMARY in tests/benchmarks/readme_blocks.py",
        code="missing-benchmark-row",
    )


def overview(reports: Reports) -> Iterator[str]:
    """Every figure that a peer has too."""
    yield "| task | ours | peer | | times better | range | runs | date, load average |"
    yield "|---|---|---|---|---|---|---|---|"
    for report in _compared(reports):
        when = f"{report['date']}, {report['machine']['load_average']:.1f}"
        for row in rows_of(report):
            if row.peer is None or row.ratio is None:
                continue
            yield (
                f"| {row.name} | {figure(row.ours)} {row.unit} | {figure(row.peer)} {row.unit} | {row.peer_name} | "
                f"{figure(row.ratio)} | {row.range} | {row.runs} | {when} |"
            )
    yield ""
    machines = sorted({machine_of(report) for report in reports.values()})
    yield f"Machines: {'; '.join(machines)}. Each result file names its own."


_ELSEWHERE = ("cpu_steps", "encoder_compiled", "downstream", "proof", "ablations")


def compared_rows(reports: Reports) -> list[Row]:
    """The rows of the overview: every figure that a peer has, on text that was not used in development.

    `cpu_steps`, `encoder_compiled`, `downstream`, `proof` and `ablations` have tables of their own.
    """
    return [row for report in _compared(reports) for row in rows_of(report) if row.ratio is not None]


def _compared(reports: Reports) -> list[Report]:
    return [report for report in reports.values() if report["benchmark"] not in _ELSEWHERE]


BLOCKS: dict[str, Callable[[Reports], Iterator[str]]] = {
    "numbers": numbers,
    "summary": summary,
    "language": language_tables.language,
    "overview": overview,
    "preparation": readme_tables.preparation,
    "loader": readme_tables.loader,
    "encoder": readme_tables.encoder,
    "roofline": readme_tables.roofline,
    "cpu_steps": readme_tables.cpu_steps,
    "training": readme_tables.training,
    "speedrun": language_tables.speedrun,
    "proof": language_tables.proof,
    "fills": language_tables.fills,
    "ablations": language_tables.ablations,
    "downstream": readme_tables.downstream,
}
