"""`clozeworks stats`: Show counts, lengths and frequencies of a data set, as text or as a web page.

The page (index.html) holds plots, sample documents and tables in one file, without scripts or anything to fetch.
"""

from __future__ import annotations

import argparse

from data_prep.commands.options import add_data_set, open_data_set
from data_prep.reports.stats import read_statistics
from data_prep.reports.tables import stats_report
from data_prep.storage import storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="also write a page (index.html) and its plots (PNG) to this folder or URL"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --output: print the report, and write nothing")


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print the report; with --output also write the page."""
    output = arguments.output
    if output is not None:
        storage.check_folder("--output", output)
        # Imported here: matplotlib is an extra and takes a second, and the text report needs none.
        from data_prep.reports.page import read_samples, write_page
        from data_prep.reports.plots import draw_plots
    folder = open_data_set(arguments)
    statistics = read_statistics(folder)
    for line in stats_report(statistics):
        print(line)
    if output is not None and arguments.dry_run:
        print(f"\nwould write index.html and its plots to {storage.redact(output)}")
    elif output is not None:
        samples = read_samples(folder, statistics.manifest)
        page = write_page(output, statistics, draw_plots(statistics), samples)
        print(f"\npage and plots: {storage.redact(page)}")
