"""The files of every released format still load, and give what they gave when they were written."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import open_dataset, prepare, verify
from data_prep.dataset.manifest import FORMAT_VERSION as MANIFEST_FORMAT
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.tokenizer_info import FORMAT_VERSION as TOKENIZER_FORMAT
from data_prep.tokenizer.tokenizer_info import INFO_NAME
from tests.golden import make
from tests.support import fork_server
from tests.support.references import check_parity
from trainer.checkpoint.format import FORMAT_VERSION as CHECKPOINT_FORMAT
from trainer.checkpoint.format import CheckpointFolder, step_folder
from trainer.checkpoint.restore import find_latest
from trainer.checkpoint.tensors import read_weights
from trainer.hf_export.export_source import read_source
from trainer.inference.fill_mask import FillMask

GOLDEN = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
CHECKPOINT = step_folder(Path("run"), make.RESUMED_STEP)
FORMATS = {
    Path("shards", "manifest.json"): MANIFEST_FORMAT,
    Path("shards", "tokenizer", INFO_NAME): TOKENIZER_FORMAT,
    CHECKPOINT / "checkpoint.json": CHECKPOINT_FORMAT,
    CHECKPOINT / "state.json": CHECKPOINT_FORMAT,
}
LOSS_TOLERANCE = 1e-4
"""Of a loss of about 6, after three steps of fp32: other versions of torch order its sums otherwise."""


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a release's folder, which readers may write into."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


@pytest.fixture
def expected(release: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((release / "expected.json").read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("file", FORMATS, ids=str)
def test_every_format_has_golden_files(file: Path) -> None:
    """A new format of any of them needs a folder of its own (`make.py` writes it)."""
    versions = {json.loads((GOLDEN / name / file).read_bytes())["format_version"] for name in RELEASES}
    assert FORMATS[file] in versions


def test_the_golden_files_are_small_and_stored_once() -> None:
    for name in RELEASES:
        paths = [path for path in (GOLDEN / name).rglob("*") if path.is_file() and not path.is_symlink()]
        contents = [path.read_bytes() for path in paths]
        assert sum(map(len, contents)) < 600_000, name
        assert len(set(contents)) == len(contents), name


def test_the_page_says_what_a_version_reads_and_the_golden_files_prove_it() -> None:
    page = (GOLDEN.parents[1] / "trainer" / "README.md").read_text(encoding="utf-8")
    page = page.partition("\n## Upgrades\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| [^|]+ \| `([\w.]+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {file.name: str(version) for file, version in FORMATS.items() if file.name != "state.json"}
    read = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| \d+ \| ([\d, ]+) \|", page, re.MULTILINE)
    for file in FORMATS:
        proven = sorted({json.loads((GOLDEN / name / file).read_bytes())["format_version"] for name in RELEASES})
        assert dict(read).get(file.name, "1") == ", ".join(map(str, proven)), file


def test_the_data_set_is_whole_and_has_its_digest(release: Path, expected: dict[str, Any]) -> None:
    manifest = verify(release / "shards").manifest
    assert manifest.digest == expected["manifest_digest"]
    assert [manifest.train.tokens, manifest.valid.tokens] == expected["tokens"]


def test_the_tokenizer_gives_the_same_ids(release: Path, expected: dict[str, Any]) -> None:
    folder = release / "shards" / "tokenizer"
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.fingerprint == expected["tokenizer_fingerprint"]
    assert [tokenizer.encode_text(text).tolist() for text in make.TEXTS] == expected["ids"]
    assert [tokenizer.encode_text(text).tolist() for text in make.INVISIBLE_TEXTS] == expected["invisible_ids"]
    check_parity(folder, [*make.TEXTS, *make.INVISIBLE_TEXTS])


NORMALIZED = {"v1": "one onetwo \u061cthree", "v2": "one one two three"}
"""By the tokenizer of a release; the first had version 1 of the normalization."""


def test_new_shards_are_normalized_as_their_tokenizer_was(release: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one one\u200btwo \u061cthree"}) + '\n{"text": "other"}\n')
    folder = release / "shards" / "tokenizer"
    dataset = prepare([tmp_path / "text.jsonl"], tokenizer=folder, output=tmp_path / "new", num_workers=1)
    assert {document.text for document in dataset} == {NORMALIZED[release.name], "other"}


def test_training_sees_the_same_rows(release: Path, expected: dict[str, Any]) -> None:
    assert make.first_rows(release) == expected["first_rows"]


def test_the_checkpoint_has_the_same_weights_and_state(release: Path, expected: dict[str, Any]) -> None:
    found = find_latest(release / "run", warn=pytest.fail)
    assert found is not None and found.step == make.RESUMED_STEP
    folder = step_folder(release / "run", make.RESUMED_STEP)
    assert make.digest_of_tensors(read_weights(folder)) == expected["weights_sha256"]
    state = CheckpointFolder(folder).read_state().state.model_dump(mode="json")
    then = dict(expected["state"])
    seen = {"masked_lm": then.pop("masked_seen"), "sentence_pairs": then.pop("pairs_seen")}
    assert state["predictions_seen"] == seen
    assert {name: state[name] for name in then} == then
    assert state["step"] == make.RESUMED_STEP and state["tokens_seen"] > 0


def test_the_checkpoint_can_be_exported(release: Path) -> None:
    source = read_source(release / "run")
    assert source.config.model.hidden_size == 16
    assert source.facts.step == make.RESUMED_STEP
    digest = open_dataset(release / "shards").manifest.digest
    assert source.facts.data_digests["shards"] == digest and source.facts.data_lineage == (digest,)


def test_the_export_gives_the_same_logits(release: Path, expected: dict[str, Any]) -> None:
    found = make.logits(release)
    assert np.allclose(found, expected["logits"], rtol=0, atol=2e-5)
    assert max(map(abs, found)) > 0.01


def test_the_export_fills_a_mask(release: Path) -> None:
    prediction = FillMask.load(release / "export").predict(make.MASKED_TEXT)
    assert len(prediction.masks) == 1 and len(prediction.masks[0]) == 5
    assert "[MASK]" not in prediction.filled


@pytest.mark.long
def test_the_run_resumes_bitwise(release: Path, expected: dict[str, Any], empty_database: Path) -> None:
    """Other processors and other versions of torch order the sums of their kernels otherwise."""
    shutil.copy(empty_database, release / "mlflow.db")
    command = [str(make.PRETRAIN), "--config", "run.yaml"]
    done = fork_server.run(command, release, os.environ | fork_server.FIXED)
    assert done.returncode == 0, done.stdout + done.stderr
    found = make.losses(release)
    recorded = {str(step): expected["losses"][str(step)] for step in range(make.RESUMED_STEP + 1, make.MAX_STEPS + 1)}
    assert found == pytest.approx(recorded, rel=0, abs=LOSS_TOLERANCE)
    if expected["losses_computed_on"] == make.machine():
        assert found == recorded
