"""The last step of a preparation: writes the files beside the shards, and the manifest last."""

from __future__ import annotations

from data_prep.dataset.addition import publish_addition
from data_prep.dataset.counts import token_counts_file
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.versions import publish
from data_prep.pipeline.manifest_assembly import assemble
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.plan import Plan, absolute
from data_prep.pipeline.reduce_phase import ShardTotals, nothing_to_train_on
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


def publish_shards(plan: Plan, tokenizer: Tokenizer, output: str, summary: MapSummary, totals: ShardTotals) -> Manifest:
    """Make a data set of the finished shards; for an addition, the next version of the extended data set.

    Raises:
        UserError: no document is left to train on, or `output` cannot be written.
    """
    if plan.parent is None and not totals.of_split("train"):
        raise nothing_to_train_on(plan)
    for name in totals.empty:
        storage.remove(storage.join(output, name))
    counts = totals.token_counts
    manifest = assemble(plan, tokenizer, summary, totals)
    if plan.parent is not None:
        return publish_addition(output, plan.parent, manifest, counts)
    record, data = token_counts_file(counts, manifest.version)
    storage.write_bytes(storage.join(output, record.name), data)
    if not is_own_tokenizer(tokenizer, output):
        tokenizer.copy_files(storage.join(output, TOKENIZER_FOLDER))
    publish(output, manifest)
    return manifest


def is_own_tokenizer(tokenizer: Tokenizer, output: str) -> bool:
    """Return whether the tokenizer is in the folder of the output's copy."""
    own = storage.canonical(absolute(storage.join(output, TOKENIZER_FOLDER)))
    return storage.canonical(absolute(tokenizer.url)).rstrip("/") == own
