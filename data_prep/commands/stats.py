"""`clozeworks stats`: Show counts, lengths and frequencies of a data set, as text or as a report for others.

The report (index.html) is one file without scripts or anything to fetch. It begins with what came in, what was kept and
why the rest was left out, by source; a document of each source, plots, tables and the data card follow.
"""

from __future__ import annotations

import argparse

from data_prep.base.logs import logger
from data_prep.base.packages import missing_extra
from data_prep.commands.options import add_data_set, open_data_set
from data_prep.dataset.data_card import card_in
from data_prep.reports.page import read_samples, write_page
from data_prep.reports.stats import Statistics, read_statistics
from data_prep.reports.tables import stats_report
from data_prep.storage import storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="also write a report (index.html) and its plots (PNG, with the extra `plots`) to this folder or URL",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --output: print the report, and write nothing")


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print the report; with --output also write the page."""
    output = arguments.output
    if output is not None:
        storage.check_folder("--output", output)
    folder = open_data_set(arguments)
    statistics = read_statistics(folder)
    for line in stats_report(statistics):
        print(line)
    if output is not None and arguments.dry_run:
        print(f"\nwould write index.html and its plots to {storage.redact(output)}")
    elif output is not None:
        samples, card = read_samples(folder, statistics.manifest), card_in(folder, statistics.manifest)
        page = write_page(output, statistics, _plots(statistics), samples, card)
        print(f"\nreport: {storage.redact(page)}")


def _plots(statistics: Statistics) -> dict[str, bytes]:
    """Draw the plots; without the library there are none."""
    # Imported here: matplotlib is an extra and takes a second, and the text report needs none.
    try:
        from data_prep.reports.plots import draw_plots
    except ImportError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        logger(__name__).warning(f"the report has no plots: {missing}")
        return {}
    return draw_plots(statistics)
