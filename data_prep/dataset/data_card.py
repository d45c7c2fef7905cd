"""The data card: a page that tells people what a data set is made of, written beside its manifest.

Plain Markdown that any renderer shows; names, licenses and the like are escaped, since they come from the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from data_prep.base.terminal import printable
from data_prep.base.urls import redact_text
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.manifest_records import RemovalRecord, SourceRecord
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer_info import TokenizerInfo

CARD_NAME = "DATA_CARD.md"
NOT_STATED = "**not stated**"
_SHOWN_CHARACTERS = 120

_NUMBER = re.compile(r"[\d,.]+%?|-")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")
_RECORD = """
A shard is an uncompressed tar of records. A record is a block of whole documents, five arrays of one key:

- `tokens.npy` (num_tokens,) {dtype}: token ids; none of [CLS], [SEP], [PAD] and [MASK] among them
- `documents.npy` (num_documents,) uint32: where each document begins in `tokens`
- `sentences.npy` (num_sentences,) uint32: where each sentence begins in `tokens`
- `sources.npy` (num_documents,) uint16: number of each document's source, as in the table of sources
- `document_ids.npy` (num_documents,) uint64: xxh3_64 of each document's normalized text

Plain webdataset reads it, with nothing else installed. Take the shards that `manifest.json` names: the folder may hold
those of older versions too.

```python
import json
import webdataset

split = json.load(open("manifest.json"))["train"]
shards = [shard["name"] for shard in split["shards"]]
for record in webdataset.WebDataset(shards, shardshuffle=False).decode():
    tokens, starts = record["tokens.npy"], record["documents.npy"]
    first_document = tokens[: starts[1]] if len(starts) > 1 else tokens
```
"""


def write_data_card(folder: str, manifest: Manifest) -> None:
    """Write the card of this version, whose tokenizer lies in `folder` already."""
    storage.write_bytes(storage.join(folder, CARD_NAME), _card_in(folder, manifest).encode())


def card_problem(folder: str, current: Manifest, own_version: str) -> str | None:
    """What is wrong with the card in `folder` beside the current version's manifest, if anything.

    A manifest that another version of clozeworks than `own_version` made has a card of maybe other words: only the
    digest in it is compared then.
    """
    url = storage.join(folder, CARD_NAME)
    where, remedy = storage.redact(url), "restore it, or rewrite it with 'verify --write-card'"
    if not storage.exists(url):
        return f"{where} is missing; {remedy}"
    found = storage.read_bytes(url).decode(errors="replace").split("\n")
    if f"- version: {current.version + 1}{_made_from(current.digest)}" in found:
        return None  # stopped just before that version came
    if f"- manifest digest: `{current.digest}`" not in found:
        named = f"names another digest than {current.digest}, that of manifest.json: one of them was edited by hand"
        return f"{where} {named}; {remedy}"
    wanted = _card_in(folder, current).split("\n") if current.clozeworks_version == own_version else found
    for number, (line, right) in enumerate(zip_longest(found, wanted), 1):
        if line != right:
            says = "is missing" if line is None else f"says {line[:_SHOWN_CHARACTERS]!r}"
            wants = "has no such line" if right is None else f"gives {right[:_SHOWN_CHARACTERS]!r}"
            return f"{where} was edited by hand: line {number} {says} and the manifest {wants}; {remedy}"
    return None


def _card_in(folder: str, manifest: Manifest) -> str:
    info = TokenizerInfo.read(storage.join(folder, TOKENIZER_FOLDER))
    settings = None if info is None else info.settings
    normalization = None if settings is None else settings.normalization.model_dump(mode="json")
    if info is not None and info.kind == "hugging_face":
        normalization = {"by": "tokenizer.json itself"}
    # Of the manifest as it reads back, which may hold its settings in another order than they were given in.
    return data_card(Manifest.model_validate_json(manifest.to_json()), normalization)


def data_card(manifest: Manifest, normalization: Mapping[str, Any] | None = None) -> str:
    """The card as Markdown; `normalization` is the tokenizer's."""
    sections = {
        "Data card": _identity(manifest),
        "Sources": _sources(manifest.sources),
        "Counts": _counts(manifest),
        "Steps of preparation": _steps(manifest),
        "Removals": _removals(manifest),
        "Tokenizer": _tokenizer(manifest, normalization),
        "Settings": _settings(manifest),
        "Format": [_RECORD.format(dtype=manifest.tokenizer.token_dtype).strip()],
        "Check": _check(),
    }
    parts = [
        "\n".join((f"{'#' if n == 0 else '##'} {name}", "", *lines)) for n, (name, lines) in enumerate(sections.items())
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text of the user's as one line of Markdown that shows as it is written, within a table too."""
    line = printable(" ".join(text.split()))
    return _SPECIAL.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _identity(manifest: Manifest) -> Iterator[str]:
    yield f"- manifest digest: `{manifest.digest}`"
    yield f"- version: {manifest.version}{_made_from(manifest.parent) if manifest.parent else ''}"
    yield f"- made with clozeworks {escaped(manifest.clozeworks_version)}"
    unlicensed = [escaped(source.name) for source in manifest.sources if source.documents and not source.license]
    if unlicensed:
        yield ""
        yield f"> **Warning: the license of {', '.join(unlicensed)} is not stated.** Find it out before this data or a "
        yield "> model made from it is passed on, and name it in the configuration (`sources: license`)."


def _made_from(parent: str) -> str:
    return f", made from the version with the digest `{parent}`"


def _sources(sources: Sequence[SourceRecord]) -> Iterator[str]:
    total = sum(source.tokens for source in sources) or 1
    head = ("number", "source", "URL", "license", "date", "language", "documents", "tokens", "words", "share of tokens")
    rows = [
        (
            str(number),
            escaped(source.name),
            escaped(redact_text(source.url)) if source.url else "not stated",
            escaped(source.license) if source.license else NOT_STATED,
            escaped(source.date) if source.date else "not stated",
            escaped(source.language) if source.language else "not stated",
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.words:,}",
            f"{source.tokens / total:.2%}",
        )
        for number, source in enumerate(sources)
    ]
    return _table(head, rows)


def _counts(manifest: Manifest) -> Iterator[str]:
    head = ("split", "shards", "documents", "sentences", "tokens", "MB", "unigram entropy (nats)")
    rows = []
    for name in ("train", "valid"):
        split = manifest.split(name)
        entropy = "-" if split.unigram_entropy_nats is None else f"{split.unigram_entropy_nats:.4f}"
        size = sum(shard.bytes for shard in split.shards) / 1e6
        counts = (len(split.shards), split.documents, split.sentences, split.tokens)
        rows.append((name, *(f"{count:,}" for count in counts), f"{size:,.1f}", entropy))
    return _table(head, rows)


def _steps(manifest: Manifest) -> Iterator[str]:
    head = ("step", "documents in", "dropped", "documents out", "reasons")
    rows = []
    for step in manifest.steps:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in step.dropped.items())
        counts = (step.documents_in, sum(step.dropped.values()), step.documents_out)
        rows.append((step.name, *(f"{count:,}" for count in counts), reasons or "-"))
    yield from _table(head, rows)
    if manifest.cut_words:
        yield ""
        yield f"{manifest.cut_words:,} words of over 1 MiB without a space were encoded in parts; no text was dropped."
    losing = [source for source in manifest.sources if source.dropped]
    if losing:
        yield ""
        yield from _table(
            ("source", "reason", "documents dropped"),
            [
                (escaped(source.name), escaped(reason), f"{count:,}")
                for source in losing
                for reason, count in source.dropped.items()
            ],
        )


def _removals(manifest: Manifest) -> Iterator[str]:
    if not manifest.removals:
        yield "Nothing was removed since it was made."
        return
    head = ("in version", "what", "documents", "tokens", "note")
    rows = [
        (str(item.version), _removed(item), f"{item.documents:,}", f"{item.tokens:,}", escaped(item.note or "-"))
        for item in manifest.removals
    ]
    yield from _table(head, rows)


def _removed(removal: RemovalRecord) -> str:
    if removal.ids is None:
        return f"source {escaped(removal.source or '')}"
    return f"documents, whose ids are in `{removal.ids.name}` (sha256 `{removal.ids.sha256}`)"


def _tokenizer(manifest: Manifest, normalization: Mapping[str, Any] | None) -> Iterator[str]:
    tokenizer = manifest.tokenizer
    yield f"- fingerprint: `{tokenizer.fingerprint}` (folder `{TOKENIZER_FOLDER}/`)"
    yield f"- vocabulary: {tokenizer.vocab_size:,} pieces, ids as {tokenizer.token_dtype}"
    yield f"- normalization of text: {'not stated' if normalization is None else _values(normalization)}"


def _settings(manifest: Manifest) -> Iterator[str]:
    for number, config in enumerate([manifest.config, *manifest.config.get("additions", [])]):
        names = ", ".join(escaped(source["name"]) for source in config.get("sources", []))
        yield f"- {'first preparation' if number == 0 else f'addition {number}'} ({names or 'no source named'})"
        for name, values in config.items():  # whatever sections there are: none has to be entered here
            if isinstance(values, dict):
                yield f"  - {escaped(name)}: {_values(values)}"


def _check() -> Iterator[str]:
    yield "`python -m data_prep verify DIR` hashes every file again, counts all documents, sentences and tokens, and"
    yield "proves that what was removed is gone; `python -m data_prep inspect DIR` shows documents. The sha256 of every"
    yield "file is in `manifest.json`, whose own name is the digest above: the sha256 of `manifest.json`."


def _values(settings: Mapping[str, Any]) -> str:
    return ", ".join(escaped(f"{name} {json.dumps(value, ensure_ascii=False)}") for name, value in settings.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose cells are Markdown already; columns of numbers stand to the right."""
    are_numbers = [all(_NUMBER.fullmatch(cell) for cell in cells) for cells in zip(*rows, strict=True)] or [
        False
    ] * len(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---:' if is_number else '---' for is_number in are_numbers)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
