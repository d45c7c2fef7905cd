"""`python -m data_prep stats DIR`: show counts, lengths and frequencies of a data set, as text or as a page."""

from __future__ import annotations

import argparse

from data_prep.base.errors import UsageError
from data_prep.commands.data_set import add_data_set, open_data_set
from data_prep.reports.stats import read_statistics
from data_prep.reports.stats_report import stats_report
from data_prep.storage import storage

HELP = "show counts, lengths and frequencies of a data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="also write a page (index.html) with its plots (PNG) into this folder or URL"
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print the report; with --output write the page too.

    Raises:
        UserError: the data set is damaged, or the page cannot be written.
    """
    output = arguments.output
    if output is not None and storage.folder_of_file(output):
        raise UsageError(f"--output={output} is a file; name a folder")
    statistics = read_statistics(open_data_set(arguments))
    for line in stats_report(statistics):
        print(line)
    if output is not None:
        # Imported here: matplotlib takes a second, and a terminal needs none.
        from data_prep.reports.page import write_page
        from data_prep.reports.plots import draw_plots

        page = write_page(output, statistics, draw_plots(statistics))
        print(f"\npage and plots: {storage.redact(page)}")
