"""The statistics of a data set as one HTML page for readers without tools: no script, nothing to fetch.

The first screen says what came in, what was kept and why the rest was not; samples, pictures, tables and the data card
follow.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.base.table import escape_html
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.shard_documents import ShardDocuments, all_shards
from data_prep.reports.overview import headline, reason_overview, removal_overview, source_overview
from data_prep.reports.stats import Statistics
from data_prep.reports.tables import tables
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

PAGE_NAME = "index.html"

_SAMPLE_CHARACTERS = 600
_MOST_SAMPLES = 200  # sources that have one
_MOST_INDEXES = 100  # that are read for them, where shards hold several sources
_VISIBLE_ROWS = 12
_STYLE = """
body { margin: 2rem auto; max-width: 78rem; padding: 0 1.5rem; background: #fff; color: #1d2129;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .3rem 0; color: #555b66; overflow-wrap: anywhere; }
.headline p { color: #1d2129; max-width: 60rem; }
.counts { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 0 0 .8rem; }
.counts div { color: #555b66; }
.counts b { display: block; font-size: 1.3rem; font-weight: 600; color: #1d2129;
            font-variant-numeric: tabular-nums; }
.table { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e6ea; }
td { max-width: 26rem; overflow-wrap: break-word; }
th { font-weight: 600; color: #555b66; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(27rem, 1fr)); gap: 1.6rem; margin-top: 1rem;
         align-items: start; }
img { width: 100%; height: auto; }
.sample { border-left: 3px solid #d5d9e0; padding: .1rem 0 .1rem .9rem; margin: .9rem 0; }
.sample p { color: #1d2129; overflow-wrap: anywhere; }
.sample small { color: #555b66; font-size: .85rem; }
summary { cursor: pointer; color: #2f6f9f; margin: .4rem 0; }
code, pre, li { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; }
"""
_INLINE = re.compile(r"\\(.)|`([^`]*)`|(\*\*)|[^\\`*]+|.", re.DOTALL)
_CELLS = re.compile(r"(?<!\\)\|")


class Sample(NamedTuple):
    """A document shown on the page, cut to its beginning."""

    document_id: int
    source: str
    num_tokens: int
    text: str
    is_cut: bool


def write_page(
    output: str,
    statistics: Statistics,
    plots: Mapping[str, bytes],
    samples: Sequence[Sample] = (),
    card: str = "",
) -> str:
    """Write the plots as files, and the page that also holds them, into the folder `output`; return the page's URL."""
    for name, picture in plots.items():
        storage.write_bytes(storage.join(output, f"{name}.png"), picture)
    page = storage.join(output, PAGE_NAME)
    storage.write_bytes(page, render_page(statistics, plots, samples, card).encode())
    return page


def read_samples(folder: str, manifest: Manifest) -> list[Sample]:
    """Return a document of each source, in the order of the sources, from the first shards that hold one.

    Documents are in the order of their hashes, so the first of a source is a random one. A source whose documents are
    rare may have none.
    """
    wanted = {number for number, source in enumerate(manifest.sources) if source.documents}
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    numbers = {source.name: number for number, source in enumerate(manifest.sources)}
    samples: dict[int, Sample] = {}
    num_read = 0
    for split, shard in all_shards(manifest):
        if not wanted - samples.keys() or num_read >= _MOST_INDEXES or len(samples) >= _MOST_SAMPLES:
            break
        if shard.source is not None and numbers.get(shard.source) in samples:
            continue
        documents = ShardDocuments(folder, manifest, split, shard)
        num_read += shard.source is None
        for source, number in documents.first_of_sources().items():
            if source not in samples and len(samples) < _MOST_SAMPLES:
                samples[source] = _read_sample(documents, number, tokenizer)
    return [samples[number] for number in sorted(samples)]


def _read_sample(documents: ShardDocuments, number: int, tokenizer: Tokenizer) -> Sample:
    location = documents.location(number)
    # A token is at least one byte of the text, so this many hold the beginning that is shown.
    tokens = np.concatenate(documents.sentences(number))[: 4 * _SAMPLE_CHARACTERS]
    text = tokenizer.decode(tokens.tolist()).removeprefix(" ")
    is_cut = len(text) > _SAMPLE_CHARACTERS or location.num_tokens > len(tokens)
    return Sample(location.document_id, location.source.name, location.num_tokens, text[:_SAMPLE_CHARACTERS], is_cut)


def render_page(
    statistics: Statistics, plots: Mapping[str, bytes], samples: Sequence[Sample] = (), card: str = ""
) -> str:
    """Return the page as HTML; all text of the corpus in it is escaped.

    Args:
        card: the data card, as Markdown.
    """
    manifest = statistics.manifest
    title = escape_html(f"Data set {statistics.folder}")
    removals = removal_overview(manifest)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # A second line of defense behind the escaping: nothing runs and nothing is fetched, whatever the corpus holds.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>version {manifest.version}, manifest digest <code>{manifest.digest[:16]}</code></p>",
        *_counts(manifest),
        '<div class="headline">',
        *(f"<p>{escape_html(sentence)}</p>" for sentence in headline(manifest)),
        "</div>",
        source_overview(manifest).html(_VISIBLE_ROWS),
        reason_overview(manifest).html(_VISIBLE_ROWS),
    ]
    if removals is not None:
        lines.append(removals.html(_VISIBLE_ROWS))
    if samples:
        lines.append("<h2>A document of each source</h2>")
        lines.extend(map(_sample, samples[:_VISIBLE_ROWS]))
        lines.extend(_folded(f"{len(samples) - _VISIBLE_ROWS:,} more documents", map(_sample, samples[_VISIBLE_ROWS:])))
    if plots:
        lines.append('<h2>In pictures</h2><div class="plots">')
        lines.extend(_picture(name, picture) for name, picture in plots.items())
        lines.append("</div>")
    lines.extend(table.html(_VISIBLE_ROWS) for table in tables(statistics))
    if card:
        lines.append("<h2>Data card</h2>")
        lines.extend(_folded("the whole card, as DATA_CARD.md beside the shards has it", markdown_html(card)))
    lines.append("</body></html>\n")
    return "\n".join(lines)


def markdown_html(text: str) -> Iterator[str]:
    """Yield the HTML of a data card: headings, tables, lists, quotes, code and paragraphs; all text is escaped."""
    for block in re.findall(r"```.*?```|(?:(?!\n\n|```).)+", text, re.DOTALL):
        lines = block.strip("\n").split("\n")
        if block.startswith("```"):
            yield f"<pre>{chr(10).join(map(escape_html, lines[1:-1]))}</pre>"
        elif lines[0].startswith("#"):
            yield f"<h3>{_inline(lines[0].lstrip('# '))}</h3>"
            lines = [line for line in lines[1:] if line]
        elif lines[0].startswith("|"):
            yield from _markdown_table(lines)
        elif lines[0].startswith("- "):
            items = (f"{'&nbsp;' * (len(line) - len(line.lstrip()))}{_inline(line.strip())}" for line in lines)
            yield f"<p>{'<br>'.join(items)}</p>"
        elif lines[0]:
            yield f"<p>{_inline(' '.join(line.removeprefix('> ') for line in lines))}</p>"


def _markdown_table(lines: Sequence[str]) -> Iterator[str]:
    head, _, *rows = ([cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in lines)
    yield f'<div class="table"><table><thead><tr>{"".join(f"<th>{_inline(cell)}</th>" for cell in head)}</tr></thead>'
    yield "<tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td><bdi>{_inline(cell)}</bdi></td>' for cell in row)}</tr>"
    yield "</tbody></table></div>"


def _inline(text: str) -> str:
    """Return Markdown within a line as HTML: what is escaped there, code, and bold text."""
    parts, is_bold = [], False
    for found in _INLINE.finditer(text):
        escaped, code, bold = found.groups()
        if escaped is not None:
            parts.append(escape_html(escaped))
        elif code is not None:
            parts.append(f"<code>{escape_html(code)}</code>")
        elif bold:
            is_bold = not is_bold
            parts.append("<b>" if is_bold else "</b>")
        else:
            parts.append(escape_html(html.unescape(found[0])))
    return "".join(parts) + "</b>" * is_bold


def _counts(manifest: Manifest) -> Iterator[str]:
    splits = (manifest.train, manifest.valid)
    kept = sum(split.documents for split in splits)
    counts = {
        "documents came in": manifest.steps[0].documents_in,
        "documents kept": kept,
        "documents left out or removed": manifest.steps[0].documents_in - kept,
        "tokens": sum(split.tokens for split in splits),
        "source" if len(manifest.sources) == 1 else "sources": len(manifest.sources),
    }
    yield '<div class="counts">'
    yield from (f"<div><b>{count:,}</b>{name}</div>" for name, count in counts.items())
    yield "</div>"


def _folded(summary: str, lines: Iterator[str]) -> Iterator[str]:
    """Yield lines that a reader unfolds; nothing where there are none."""
    content = list(lines)
    if content:
        yield f"<details><summary>{summary}</summary>"
        yield from content
        yield "</details>"


def _sample(sample: Sample) -> str:
    head = f"{sample.source} · {sample.num_tokens:,} tokens · id {sample.document_id:016x}"
    text = sample.text + " …" * sample.is_cut
    return (
        f'<div class="sample"><small><bdi>{escape_html(head)}</bdi></small><p dir="auto">{escape_html(text)}</p></div>'
    )


def _picture(name: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return f'<img alt="{escape_html(name.replace("-", " "))}" src="data:image/png;base64,{data}">'
