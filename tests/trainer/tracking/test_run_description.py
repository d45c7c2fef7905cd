"""What runs and models say of their data, their machine and their source."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from data_prep import open_dataset
from data_prep.dataset.manifest import list_versions
from data_prep.dataset.versions import publish
from trainer.tracking.run_description import (
    all_lineages,
    data_set_input,
    describe_environment,
    installed_packages,
    lineage,
    manifest_summary,
)


def test_the_summary_has_counts_and_sources_and_no_list_of_files(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    summary = manifest_summary(f"s3://me:pass1word@{small_shards}", manifest)
    assert summary["digest"] == manifest.digest and summary["train"]["tokens"] == manifest.train.tokens
    assert summary["train"]["shards"] == 4 and summary["sources"][0]["tokens"] > 0
    text = json.dumps(summary)
    assert ".tar" not in text and "pass1word" not in text


def test_the_input_is_named_by_its_folder_and_the_manifests_digest(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    found = data_set_input("s3://me:pass1word@bucket/birds/", manifest)
    assert (found.name, found.digest) == ("birds", manifest.digest)
    assert "pass1word" not in found.model_dump_json()


def test_a_version_descends_from_those_before_it(small_shards: Path, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = open_dataset(small_shards).manifest
    shutil.copy(small_shards / "manifest.json", folder)
    second = first.model_copy(update={"version": 2, "parent": first.digest})
    publish(folder, second)
    third = second.model_copy(update={"version": 3, "parent": second.digest})
    publish(folder, third)
    assert [each.version for each in list_versions(folder)] == [1, 2, 3]
    assert lineage(folder, third.digest) == (third.digest, second.digest, first.digest)
    assert lineage(folder, first.digest) == (first.digest,)
    assert all_lineages([folder, folder], [second.digest, first.digest]) == (second.digest, first.digest)
    assert all_lineages([folder], [second.digest], ("e" * 64, first.digest)) == (second.digest, first.digest, "e" * 64)
    assert lineage(str(tmp_path / "gone"), "d" * 64) == ("d" * 64,)


def test_the_environment_is_versions_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "open-sesame")
    environment = describe_environment()
    assert environment["python"].startswith("3.") and "torch" in environment
    assert "open-sesame" not in str(environment)


@pytest.mark.long
def test_the_packages_are_those_that_their_metadata_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {
        "plain-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: Plain\nVersion: 1.0\n\nName: no field\n",
        "old-2.0.egg-info/PKG-INFO": "Name: old\nVersion: 2.0\n",
        "windows-5.0.dist-info/METADATA": "Name: windows\r\nVersion: 5.0\r\n\r\nVersion: no field\r\n",
        "broken-3.0.dist-info/METADATA": "",
    }
    (tmp_path / "file-4.0.egg-info").write_text("Name: file\nVersion: 4.0\n", encoding="utf-8")
    for name, text in described.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(text.encode())
    monkeypatch.syspath_prepend(tmp_path)
    lines = installed_packages().splitlines()
    assert {"Plain==1.0", "old==2.0", "file==4.0", "windows==5.0"} <= {*lines} and not [
        line for line in lines if "broken" in line.lower()
    ]
    monkeypatch.setattr(sys, "path", sys.path[1:])
    parsed = {each.name.lower(): f"{each.name}=={each.version}" for each in metadata.distributions()}
    assert installed_packages().splitlines() == [line for _, line in sorted(parsed.items())]
