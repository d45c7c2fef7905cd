"""The parts of README.md that are made from results/*.json: between `<!-- benchmarks: NAME -->` and its end.

Every figure in them comes from a report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from data_prep.base.errors import UserError
from tests.benchmarks import readme_tables
from tests.benchmarks.readme_tables import Reports
from tests.benchmarks.reports import Report, Row, figure, machine_of, rows_of

_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n)(.*?)(<!-- end of benchmarks: \2 -->\n)", re.DOTALL)


def rewritten(text: str, reports: Reports) -> str:
    """README with every block regenerated.

    Raises:
        UserError: a block has a name that nothing here makes, or its report is missing.
    """
    return _BLOCK.sub(lambda found: found[1] + made(found[2], reports) + found[4], text)


def made(name: str, reports: Reports) -> str:
    """The text of one block."""
    if name not in BLOCKS:
        raise UserError(f"README.md has a block of benchmarks named {name}; there are {', '.join(BLOCKS)}")
    return "\n".join(BLOCKS[name](reports)) + "\n"


def names_in(text: str) -> list[str]:
    """The blocks that a README has."""
    return [found[2] for found in _BLOCK.finditer(text)]


def overview(reports: Reports) -> Iterator[str]:
    """Every figure that a peer has too."""
    yield "| what | ours | peer | | times better | from (on) to (on) | runs | date, load average |"
    yield "|---|---|---|---|---|---|---|---|"
    for report in _told(reports):
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
    yield (
        f"Measured in turns with the peer, medians, on {' and '.join(machines)}; each file says which. Only ratios "
        "within a row compare: other rows are of other runs, texts, machines and loads. A figure over several corpora "
        "is that of all their text together."
    )


_ELSEWHERE = ("cpu_steps", "encoder_compiled", "downstream", "pretraining")


def compared_rows(reports: Reports) -> list[Row]:
    """The rows of the overview: every figure that a peer has, on text that was not used in development.

    What `cpu_steps`, `encoder`, `downstream` and `pretraining` say more of stands in tables of their own.
    """
    return [row for report in _told(reports) for row in rows_of(report) if row.ratio is not None]


def _told(reports: Reports) -> list[Report]:
    return [report for report in reports.values() if report["benchmark"] not in _ELSEWHERE]


BLOCKS: dict[str, Callable[[Reports], Iterator[str]]] = {
    "overview": overview,
    "preparation": readme_tables.preparation,
    "loader": readme_tables.loader,
    "encoder": readme_tables.encoder,
    "roofline": readme_tables.roofline,
    "cpu_steps": readme_tables.cpu_steps,
    "training": readme_tables.training,
    "pretraining": readme_tables.pretraining,
    "downstream": readme_tables.downstream,
}
