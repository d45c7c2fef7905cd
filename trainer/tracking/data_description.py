"""What a run and its model say of their data: the manifest's summary, and the versions that it grew from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_prep.base.errors import UserError
from data_prep.dataset.manifest import Manifest, list_versions
from data_prep.storage import storage
from trainer.tracking.journal import DataSetInput


def manifest_summary(url: str, manifest: Manifest) -> dict[str, Any]:
    """A manifest without its lists of files: counts, sources with licenses, what was dropped, tokenizer, parent."""
    values = manifest.model_dump(mode="json", exclude={"inputs", "config", "token_counts", "removals"})
    for split in ("train", "valid"):
        values[split]["shards"] = len(manifest.split(split).shards)
    return {
        "url": storage.redact(url),
        "digest": manifest.digest,
        **values,
        "inputs": len(manifest.inputs),
        "dropped": manifest.dropped,
        "removals": len(manifest.removals),
    }


def data_set_input(url: str, manifest: Manifest) -> DataSetInput:
    """The shard set as an input of an MLflow run."""
    redacted = storage.redact(url)
    profile: dict[str, int | str] = {
        "version": manifest.version,
        "train_tokens": manifest.train.tokens,
        "train_documents": manifest.train.documents,
        "valid_tokens": manifest.valid.tokens,
        "tokenizer_fingerprint": manifest.tokenizer.fingerprint,
    }
    name = redacted.rstrip("/").rpartition("/")[2] or redacted
    return DataSetInput(name=name, digest=manifest.digest, source=redacted, profile=profile)


def lineage(url: str, digest: str) -> tuple[str, ...]:
    """The digest and those of the versions that it grew from, the newest first, as far back as they are known."""
    try:
        parents = {version.digest: version.parent for version in list_versions(url)}
    except (UserError, OSError):
        return (digest,)
    found = [digest]
    while (parent := parents.get(found[-1])) is not None and parent not in found:
        found.append(parent)
    return tuple(found)


def all_lineages(urls: Sequence[str], digests: Sequence[str], earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """The lineages of several shard sets, then of what the weights saw `earlier`, each digest once."""
    found = (each for url, digest in zip(urls, digests, strict=True) for each in lineage(url, digest))
    return tuple(dict.fromkeys((*found, *earlier)))
