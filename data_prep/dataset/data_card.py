"""The data card: a Markdown page beside the manifest that describes what a data set is made of.

Everything that users write (names, licenses, notes) is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from data_prep.base.table import Column, Table
from data_prep.base.table import escape_markdown as escaped
from data_prep.base.urls import redact_text
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.manifest_records import RemovalRecord, SourceRecord
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer_info import TokenizerInfo

__all__ = ["CARD_NAME", "card_changes", "card_in", "card_problem", "data_card", "escaped", "write_data_card"]

CARD_NAME = "DATA_CARD.md"
NOT_STATED = "not stated"
_OF_SOURCES = ("filters", "format", "id_field", "language_field", "text_field", "url_field")
"""Settings that a source has instead of those of `documents`, besides its language."""
_SHOWN_CHARACTERS = 120

_RECORD = """
A shard is an uncompressed tar of records. A record is a block of whole documents: five arrays with one key.

- `tokens.npy` (num_tokens,) {dtype}: token ids, without [CLS], [SEP], [PAD] and [MASK]
- `documents.npy` (num_documents,) uint32: start offset of each document in `tokens`
- `sentences.npy` (num_sentences,) uint32: start offset of each sentence in `tokens`{one_each}
- `sources.npy` (num_documents,) uint16: number of each document's source, as in the table of sources
- `document_ids.npy` (num_documents,) uint64: xxh3_64 of each document's normalized text

Plain webdataset reads it. Read the shards that `manifest.json` names: the folder may also hold shards of older
versions.

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
    """Write the card of this version; its tokenizer must be in `folder` already."""
    storage.write_bytes(storage.join(folder, CARD_NAME), card_in(folder, manifest).encode())


def card_changes(folder: str, manifest: Manifest) -> str | None:
    """Describe the first difference between the card in `folder` and that of the manifest; None if they are equal."""
    url = storage.join(folder, CARD_NAME)
    if not storage.exists(url):
        return "it is missing"
    found = storage.read_bytes(url).decode(errors="replace").split("\n")
    for number, (line, right) in enumerate(zip_longest(found, card_in(folder, manifest).split("\n")), 1):
        if line != right:
            present = "is missing" if line is None else f"is {line[:_SHOWN_CHARACTERS]!r}"
            wanted = "has no such line" if right is None else f"gives {right[:_SHOWN_CHARACTERS]!r}"
            return f"line {number} {present}, and the manifest {wanted}"
    return None


def card_problem(folder: str, current: Manifest, own_version: str) -> str | None:
    """Describe what is wrong with the card of the current version's manifest; None if nothing is.

    A manifest that another version of clozeworks than `own_version` made may have a card in other words: then only
    the digest in it is compared.
    """
    url = storage.join(folder, CARD_NAME)
    where, fix = storage.redact(url), "Fix: restore it, or rewrite it with 'verify --write-card'"
    if not storage.exists(url):
        return f"{where} is missing. {fix}"
    found = storage.read_bytes(url).decode(errors="replace").split("\n")
    if f"- version: {current.version + 1}{_made_from(current.digest)}" in found:
        return None  # the command was stopped just before it published that version
    if f"- manifest digest: `{current.digest}`" not in found:
        return f"{where} does not name the digest of manifest.json, {current.digest}: one of them was edited. {fix}"
    changes = card_changes(folder, current) if current.clozeworks_version == own_version else None
    return None if changes is None else f"{where} was edited: {changes}. {fix}"


def card_in(folder: str, manifest: Manifest) -> str:
    """Return the card of a version of the data set in `folder`, which holds its tokenizer."""
    info = TokenizerInfo.read(storage.join(folder, TOKENIZER_FOLDER))
    settings = None if info is None else info.settings
    normalization = None if settings is None else settings.normalization.model_dump(mode="json")
    if normalization is not None and normalization["version"] == 1:
        del normalization["version"]  # cards written before there were versions stay as they are
    if info is not None and info.kind == "hugging_face":
        normalization = {"by": "tokenizer.json itself"}
    # The manifest as it reads back, whose settings may be in another order than the given ones.
    return data_card(Manifest.model_validate_json(manifest.to_json()), normalization)


def data_card(manifest: Manifest, normalization: Mapping[str, Any] | None = None) -> str:
    """Return the card as Markdown; `normalization` is the tokenizer's."""
    sections = {
        "Data card": _identity(manifest),
        "Sources": _sources(manifest.sources),
        "Counts": _counts(manifest),
        "Steps of preparation": _steps(manifest),
        **({"Additions": _additions(manifest)} if any(map(_is_compared, manifest.preparations)) else {}),
        "Removals": _removals(manifest),
        "Tokenizer": _tokenizer(manifest, normalization),
        "Settings": _settings(manifest),
        "Format": [
            _RECORD.format(
                dtype=manifest.tokenizer.token_dtype,
                one_each="" if manifest.has_sentences else "; sentences are not split, so each document is one",
            ).strip()
        ],
        "Check": _check(),
    }
    parts = [
        "\n".join((f"{'#' if n == 0 else '##'} {name}", "", *lines)) for n, (name, lines) in enumerate(sections.items())
    ]
    return "\n\n".join(parts) + "\n"


def _identity(manifest: Manifest) -> Iterator[str]:
    yield f"- manifest digest: `{manifest.digest}`"
    yield f"- version: {manifest.version}{_made_from(manifest.parent) if manifest.parent else ''}"
    yield f"- made with clozeworks {escaped(manifest.clozeworks_version)}"
    unlicensed = [escaped(source.name) for source in manifest.sources if source.documents and not source.license]
    if unlicensed:
        yield ""
        yield f"> **Warning: the license of {', '.join(unlicensed)} is not stated.** Find it out before you share"
        yield "> this data or a model trained on it, and name it in the configuration (`sources: license`)."


def _made_from(parent: str) -> str:
    return f", derived from the version with digest `{parent}`"


def _sources(sources: Sequence[SourceRecord]) -> Iterator[str]:
    total = sum(source.tokens for source in sources) or 1
    columns = (
        Column("number"),
        *(Column(name, False) for name in ("source", "URL", "license", "date", "language")),
        *map(Column, ("documents", "tokens", "words", "share of tokens")),
    )
    rows = tuple(
        (
            str(number),
            source.name,
            redact_text(source.url) if source.url else NOT_STATED,
            source.license or NOT_STATED,
            source.date or NOT_STATED,
            source.language or NOT_STATED,
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.words:,}",
            f"{source.tokens / total:.2%}",
        )
        for number, source in enumerate(sources)
    )
    yield Table("Sources", columns, rows).markdown()
    use = {
        "weight": "weight {}",
        "max_tokens": "at most {:,} tokens",
        "epochs": "{} epochs",
    }
    for source in sources:
        given = [text.format(value) for name, text in use.items() if (value := getattr(source, name, None)) is not None]
        if given:
            yield f"\nTraining uses source {escaped(source.name)} with {', '.join(given)}."


def _counts(manifest: Manifest) -> Iterator[str]:
    columns = (
        Column("split", False),
        *map(Column, ("shards", "documents", "sentences", "tokens", "MB", "unigram entropy (nats)")),
    )
    rows = []
    for name in ("train", "valid"):
        split = manifest.split(name)
        entropy = "-" if split.unigram_entropy_nats is None else f"{split.unigram_entropy_nats:.4f}"
        size = sum(shard.bytes for shard in split.shards) / 1e6
        sentences = f"{split.sentences:,}" if manifest.has_sentences else "not split"
        counts = (f"{len(split.shards):,}", f"{split.documents:,}", sentences, f"{split.tokens:,}")
        rows.append((name, *counts, f"{size:,.1f}", entropy))
    yield Table("Counts", columns, tuple(rows)).markdown()


def _steps(manifest: Manifest) -> Iterator[str]:
    columns = (
        Column("step", False),
        *map(Column, ("documents in", "dropped", "documents out")),
        Column("reasons", False),
    )
    rows = []
    for step in manifest.steps:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in step.dropped.items())
        counts = (step.documents_in, sum(step.dropped.values()), step.documents_out)
        rows.append((step.title, *(f"{count:,}" for count in counts), reasons or "-"))
    yield Table("Steps", columns, tuple(rows)).markdown()
    if manifest.cut_words:
        yield f"\n{manifest.cut_words:,} words of over 1 MiB were encoded in parts; no text was dropped."
    names, losing = ["source", "step", "reason"], list[tuple[str, ...]]()
    for source in manifest.sources:
        for name, dropped in source.steps.items():
            losing += [(source.name, name, reason, f"{count:,}") for reason, count in dropped.items()]
    if all(source.dropped_by_step is None for source in manifest.sources):  # of an earlier release, whose card stays
        names.remove("step")
        losing = [(each.name, why, f"{count:,}") for each in manifest.sources for why, count in each.dropped.items()]
    if losing:
        columns = (*(Column(name, False) for name in names), Column("documents dropped"))
        yield f"\n{Table('Dropped', columns, tuple(losing)).markdown()}"


def _is_compared(preparation: Mapping[str, Any]) -> bool:
    """Whether an addition states what it did not pass; earlier releases did not compare."""
    return "addition" in preparation


def _additions(manifest: Manifest) -> Iterator[str]:
    for number, preparation in enumerate(manifest.preparations):
        if not _is_compared(preparation):
            continue
        names = ", ".join(escaped(source["name"]) for source in preparation.get("sources", []))
        compared = preparation["addition"]
        lacking, grown = ("; ".join(map(escaped, compared.get(name, []))) for name in ("not_passed", "grown"))
        if lacking:
            yield f"- **addition {number} ({names}) did not pass all filters of the data set**: {lacking}"
        else:
            yield f"- addition {number} ({names}) passed the filters and the deduplication of the data set"
        if grown:
            yield f"  - earlier documents did not pass what was new in it: {grown}"


def _removals(manifest: Manifest) -> Iterator[str]:
    if not manifest.removals:
        yield "Nothing was removed from it."
        return
    columns = (
        Column("since version"),
        Column("what", False),
        Column("documents"),
        Column("tokens"),
        Column("note", False),
    )
    rows = tuple(
        (str(item.version), _removed(item), f"{item.documents:,}", f"{item.tokens:,}", item.note or "-")
        for item in manifest.removals
    )
    yield Table("Removals", columns, rows).markdown()


def _removed(removal: RemovalRecord) -> str:
    if removal.ids is None:
        return f"source {removal.source or ''}"
    absent = f"; {removal.not_present:,} requested, not present" if removal.not_present else ""
    return f"documents by {removal.kind}: {removal.ids.name} (sha256 {removal.ids.sha256}){absent}"


def _tokenizer(manifest: Manifest, normalization: Mapping[str, Any] | None) -> Iterator[str]:
    tokenizer = manifest.tokenizer
    yield f"- fingerprint: `{tokenizer.fingerprint}` (folder `{TOKENIZER_FOLDER}/`)"
    yield f"- vocabulary: {tokenizer.vocab_size:,} tokens, ids as {tokenizer.token_dtype}"
    yield f"- text normalization: {NOT_STATED if normalization is None else _values(normalization)}"


def _settings(manifest: Manifest) -> Iterator[str]:
    earlier = {source.name for source in manifest.sources if source.dropped_by_step is None}  # whose card stays
    for number, config in enumerate(manifest.preparations):
        names = ", ".join(escaped(source["name"]) for source in config.get("sources", []))
        yield f"- {'first preparation' if number == 0 else f'addition {number}'} ({names or 'no source named'})"
        for name, values in sorted(config.items()):
            if name not in ("sources", "addition", "safeguards"):
                yield f"  - {escaped(name)}: {_values(values) if isinstance(values, dict) else _values({name: values})}"
        for source in config.get("sources", []):
            own = {name: source[name] for name in _OF_SOURCES if source.get(name)}
            if own and source["name"] not in earlier:
                yield f"  - source {escaped(source['name'])}: {_values(own)}"


def _check() -> Iterator[str]:
    yield "`clozeworks verify DIR` hashes every file, recounts all documents, sentences and tokens, and proves"
    yield "that removed documents are gone; `clozeworks inspect DIR` shows documents. `manifest.json` lists"
    yield "the sha256 of every file; the manifest digest above is the sha256 of `manifest.json`."


def _values(settings: Mapping[str, Any]) -> str:
    return ", ".join(escaped(f"{name} {json.dumps(value, ensure_ascii=False)}") for name, value in settings.items())
