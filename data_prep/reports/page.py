"""The statistics of a data set as one HTML page: pictures inside, no script, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping

from data_prep.base.terminal import printable
from data_prep.reports.stats import Statistics
from data_prep.reports.tables import Table, tables
from data_prep.storage import storage

PAGE_NAME = "index.html"

_STYLE = """
body { margin: 2rem auto; max-width: 72rem; padding: 0 1.5rem; background: #fff; color: #1d2129;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; color: #555b66; }
.table { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid #e4e6ea; white-space: nowrap; }
th { font-weight: 600; color: #555b66; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 2rem; }
img { width: 34rem; max-width: 100%; height: auto; align-self: flex-start; }
code { overflow-wrap: anywhere; }
"""


def write_page(output: str, statistics: Statistics, plots: Mapping[str, bytes]) -> str:
    """Write the plots as files and the page, which holds them too, into the folder `output`; returns the page's place.

    Raises:
        UserError: the folder cannot be written.
    """
    for name, picture in plots.items():
        storage.write_bytes(storage.join(output, f"{name}.png"), picture)
    page = storage.join(output, PAGE_NAME)
    storage.write_bytes(page, render_page(statistics, plots).encode())
    return page


def render_page(statistics: Statistics, plots: Mapping[str, bytes]) -> str:
    """The page as HTML text; every name and piece in it is escaped."""
    manifest = statistics.manifest
    title = _escaped(f"Data set {statistics.folder}")
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # A second fence behind the escaping: nothing runs and nothing is fetched, whatever the corpus holds.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>version {manifest.version}, digest <code>{manifest.digest}</code></p>",
        f"<p>made by clozeworks {_escaped(manifest.clozeworks_version)}</p>",
        f"<p>tokenizer <code>{manifest.tokenizer.fingerprint}</code>, {manifest.tokenizer.vocab_size:,} pieces, "
        f"{manifest.tokenizer.token_dtype}</p>",
    ]
    for table in tables(statistics):
        lines.extend(_table(table))
    lines.append('<div class="plots">')
    lines.extend(_picture(name, picture) for name, picture in plots.items())
    lines.append("</div></body></html>\n")
    return "\n".join(lines)


def _table(table: Table) -> Iterator[str]:
    yield f'<h2>{_escaped(table.title)}</h2><div class="table"><table><thead><tr>'
    classes = [' class="number"' if column.is_number else "" for column in table.columns]
    yield "".join(
        f"<th{kind}>{_escaped(column.name)}</th>" for kind, column in zip(classes, table.columns, strict=True)
    )
    yield "</tr></thead><tbody>"
    for row in table.rows:
        # bdi: a right-to-left name does not turn the row around.
        cells = (f"<td{kind}><bdi>{_escaped(cell)}</bdi></td>" for kind, cell in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f"<p>{_escaped(table.note)}</p>"


def _picture(name: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return f'<img alt="{_escaped(name.replace("-", " "))}" src="data:image/png;base64,{data}">'


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)
