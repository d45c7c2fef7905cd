"""The statistics of a data set as one HTML page: pictures inside, no script, nothing to fetch."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.base.table import escape_html
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.shard_documents import ShardDocuments, all_shards
from data_prep.reports.stats import Statistics
from data_prep.reports.tables import tables
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

PAGE_NAME = "index.html"

_NUM_SAMPLES = 5
_SAMPLE_CHARACTERS = 600
_VISIBLE_ROWS = 12
_STYLE = """
body { margin: 2rem auto; max-width: 72rem; padding: 0 1.5rem; background: #fff; color: #1d2129;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; color: #555b66; }
.counts { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 0 0 .8rem; }
.counts div { color: #555b66; }
.counts b { display: block; font-size: 1.3rem; font-weight: 600; color: #1d2129;
            font-variant-numeric: tabular-nums; }
.table { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid #e4e6ea; white-space: nowrap; }
th { font-weight: 600; color: #555b66; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(27rem, 1fr)); gap: 1.6rem; margin-top: 1rem;
         align-items: start; }
img { width: 100%; height: auto; }
.sample { border-left: 3px solid #d5d9e0; padding: .1rem 0 .1rem .9rem; margin: .9rem 0; }
.sample p { color: #1d2129; overflow-wrap: anywhere; }
.sample small, .origin { color: #555b66; font-size: .85rem; }
summary { cursor: pointer; color: #2f6f9f; margin: .4rem 0; }
code { overflow-wrap: anywhere; }
"""


class Sample(NamedTuple):
    """A document shown on the page, cut to its beginning."""

    document_id: int
    source: str
    num_tokens: int
    text: str
    is_cut: bool


def write_page(output: str, statistics: Statistics, plots: Mapping[str, bytes], samples: Sequence[Sample] = ()) -> str:
    """Write the plots as files, and the page that also holds them, into the folder `output`; return the page's URL."""
    for name, picture in plots.items():
        storage.write_bytes(storage.join(output, f"{name}.png"), picture)
    page = storage.join(output, PAGE_NAME)
    storage.write_bytes(page, render_page(statistics, plots, samples).encode())
    return page


def read_samples(folder: str, manifest: Manifest) -> list[Sample]:
    """Return the first documents of the first train shard, of as many sources as possible.

    Documents are in the order of their hashes, so the first ones are a random sample.
    """
    first = next(all_shards(manifest), None)
    if first is None:
        return []
    documents = ShardDocuments(folder, manifest, *first)
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    locations = [documents.location(number) for number in range(min(len(documents), 1_000))]
    first_of_sources = list({location.source.name: location for location in reversed(locations)}.values())[::-1]
    others = [location for location in locations if location not in first_of_sources]
    samples = []
    for location in [*first_of_sources, *others][:_NUM_SAMPLES]:
        # A token is at least one byte of the text, so this many hold the beginning that is shown.
        tokens = np.concatenate(documents.sentences(location.number))[: 4 * _SAMPLE_CHARACTERS]
        text = tokenizer.decode(tokens.tolist()).removeprefix(" ")
        is_cut = len(text) > _SAMPLE_CHARACTERS or location.num_tokens > len(tokens)
        samples.append(
            Sample(location.document_id, location.source.name, location.num_tokens, text[:_SAMPLE_CHARACTERS], is_cut)
        )
    return samples


def render_page(statistics: Statistics, plots: Mapping[str, bytes], samples: Sequence[Sample] = ()) -> str:
    """Return the page as HTML; all text of the corpus in it is escaped."""
    manifest = statistics.manifest
    title = escape_html(f"Data set {statistics.folder}")
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # A second line of defense behind the escaping: nothing runs and nothing is fetched, whatever the corpus holds.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *_counts(manifest),
    ]
    if plots:
        lines.append('<div class="plots">')
        lines.extend(_picture(name, picture) for name, picture in plots.items())
        lines.append("</div>")
    if samples:
        lines.append("<h2>Sample documents</h2>")
        lines.extend(_sample(sample) for sample in samples)
    lines.extend(table.html(_VISIBLE_ROWS) for table in tables(statistics))
    lines.append('<h2>Origin</h2><div class="origin">')
    lines.append(f"<p>version {manifest.version}, manifest digest <code>{manifest.digest}</code></p>")
    lines.append(
        f"<p>tokenizer <code>{manifest.tokenizer.fingerprint}</code>, {manifest.tokenizer.vocab_size:,} tokens, "
        f"ids as {manifest.tokenizer.token_dtype}</p>"
    )
    lines.append(f"<p>made by clozeworks {escape_html(manifest.clozeworks_version)}</p>")
    lines.append("</div></body></html>\n")
    return "\n".join(lines)


def _counts(manifest: Manifest) -> Iterator[str]:
    splits = (manifest.train, manifest.valid)
    counts = {
        "tokens": sum(split.tokens for split in splits),
        "documents": sum(split.documents for split in splits),
        **({"sentences": manifest.num_sentences} if manifest.num_sentences is not None else {}),
        "documents dropped": sum(manifest.dropped.values()),
        "sources": len(manifest.sources),
        "shards": len(manifest.shards),
    }
    yield '<div class="counts">'
    yield from (f"<div><b>{count:,}</b>{name}</div>" for name, count in counts.items())
    yield "</div>"


def _sample(sample: Sample) -> str:
    head = f"{sample.source} · {sample.num_tokens:,} tokens · id {sample.document_id:016x}"
    text = sample.text + " …" * sample.is_cut
    return (
        f'<div class="sample"><small><bdi>{escape_html(head)}</bdi></small><p dir="auto">{escape_html(text)}</p></div>'
    )


def _picture(name: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return f'<img alt="{escape_html(name.replace("-", " "))}" src="data:image/png;base64,{data}">'
