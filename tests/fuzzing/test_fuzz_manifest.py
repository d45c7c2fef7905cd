"""manifest.json from damaged disks and hostile hands: read as it is written, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset.data_card import data_card
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest, list_versions, read_manifest
from tests.fuzzing.mutations import fuzz, mutated_document, says_the_same
from tests.fuzzing.watching import read_or_refuse


@fuzz(300)
@given(data=st.data())
def test_a_damaged_manifest_is_refused_or_read_as_it_is_written(
    data: st.DataObject, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = json.loads((tiny_shards / MANIFEST_NAME).read_bytes())
    written = data.draw(mutated_document(values))
    folder = tmp_path_factory.mktemp("manifest")
    (folder / MANIFEST_NAME).write_bytes(written)

    def read() -> Manifest:
        manifest = read_manifest(str(folder))
        # What every command asks of a manifest.
        assert list_versions(str(folder))[-1].digest == manifest.digest
        assert manifest.steps[-1].documents_out == sum(source.documents for source in manifest.sources)
        assert data_card(manifest)
        return manifest

    manifest = read_or_refuse(read, folder)
    if manifest is not None:
        assert says_the_same(json.loads(manifest.to_json()), json.loads(written))
