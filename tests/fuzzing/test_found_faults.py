"""What fuzzing found, each as the smallest file that showed it."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
import torch

from data_prep import prepare
from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest import MANIFEST_NAME, list_versions, read_manifest
from data_prep.dataset.removed_names import removed_ids
from data_prep.tokenizer.foreign_files import TOKENIZER_NAME
from data_prep.tokenizer.tokenizer import INFO_NAME, MODEL_NAME, Tokenizer
from tests.fuzzing.test_fuzz_checkpoint import TENSORS, sign
from tests.fuzzing.watching import read_or_refuse
from tests.support.data_prep_command import as_command
from tests.support.error_codes import coded
from tests.support.living_data_sets import RemovalRecord, read_index
from tests.support.reading import BadInput, reader_of
from tests.support.toy_run import make_weights, write_checkpoint
from trainer.checkpoint.format import STATE_NAME
from trainer.checkpoint.tensors import read_weights
from trainer.data.shard_set import open_shard_set
from trainer.inference.next_sentence import pair_task
from trainer.preflight.hosts import read_hostfile
from trainer.tracking.journal import RECORD_NAME, parse_line, read_record

DEEP = 50_000


def changed_json(path: Path, change: Callable[[dict[str, Any]], object], **written: str) -> None:
    """Change a JSON file; a value "@name" in it becomes what is `written` under that name, as it stands."""
    values = json.loads(path.read_bytes())
    change(values)
    text = json.dumps(values)
    for name, value in written.items():
        text = text.replace(f'"@{name}"', value)
    path.write_text(text)


@pytest.fixture
def shards(tiny_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_shards, tmp_path / "shards"))


@pytest.fixture
def tokenizer(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_tokenizer, tmp_path / "tokenizer"))


@pytest.fixture
def foreign_tokenizer(tiny_foreign_tokenizer: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_foreign_tokenizer, tmp_path / "foreign"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clozeworks_version", "9" * 5_000),  # more digits than Python reads
        ("clozeworks_version", '"\\ud800"'),  # half a character, which cannot be written
        ("version", "1" + "0" * 12),  # as many older versions would be looked for
        ("config", '{"deduplication": {"exact": 1e999}}'),  # null in the digest, as of another manifest
        ("config", '{"documents": {"language": "\\ud800"}}'),  # no digest can be taken
        ("config", '{"a":' * 400 + "1" + "}" * 400),
        ("config", '{"additions": 5}'),
        ("config", '{"deduplication": "exact"}'),
        ("config", '{"sources": [{}]}'),
    ],
)
def test_a_manifest_with_impossible_values_is_refused(shards: Path, key: str, value: str) -> None:
    changed_json(shards / MANIFEST_NAME, lambda values: values.update({key: "@value"}), value=value)
    with pytest.raises(UserError, match="not JSON|damaged", check=coded("damaged-manifest")):
        read_manifest(str(shards))


def test_a_manifest_of_the_last_possible_version_looks_for_one_older_version(shards: Path) -> None:
    changed_json(shards / MANIFEST_NAME, lambda values: values.update(version=999_999))
    assert [manifest.version for manifest in list_versions(str(shards))] == [999_999]


def test_an_impossibly_large_vocabulary_is_refused(shards: Path) -> None:
    changed_json(shards / MANIFEST_NAME, lambda values: values["tokenizer"].update(vocab_size=10**12))
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size", check=coded("damaged-manifest")):
        read_manifest(str(shards))


def signed(shards: Path, content: bytes, *place: Any) -> None:
    """Write a file that the manifest names at a place, with its checksum."""

    def sign_it(values: dict[str, Any]) -> None:
        record: Any = values
        for key in place:
            record = record[key]
        (shards / record["name"]).write_bytes(content)
        record.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    changed_json(shards / MANIFEST_NAME, sign_it)


def test_token_counts_of_one_split_are_refused(shards: Path) -> None:
    counts = safetensors.numpy.load_file(shards / "token_counts.safetensors")
    signed(shards, safetensors.numpy.save({"train": counts["train"]}), "token_counts")
    with pytest.raises(UserError, match="valid counts", check=coded("damaged-counts")):
        open_shard_set(str(shards)).token_counts("train")


def test_token_counts_of_another_vocabulary_are_refused(shards: Path) -> None:
    counts = safetensors.numpy.load_file(shards / "token_counts.safetensors")
    short = {name: values[:-1].copy() for name, values in counts.items()}
    signed(shards, safetensors.numpy.save(short), "token_counts")
    with pytest.raises(UserError, match="train counts", check=coded("damaged-counts")):
        open_shard_set(str(shards)).token_counts("train")


def test_an_index_with_a_type_unknown_to_numpy_is_refused(shards: Path) -> None:
    content = safetensors.torch.save({"document_lengths": torch.zeros(2, dtype=torch.bfloat16)})
    signed(shards, content, "train", "shards", 0, "index")
    manifest = read_manifest(str(shards))
    with pytest.raises(UserError, check=coded("damaged-index")):
        read_index(str(shards), manifest.train.shards[0])


def test_an_invalid_file_of_removed_ids_is_refused(shards: Path) -> None:
    manifest = read_manifest(str(shards))
    removal = RemovalRecord(version=1, ids=manifest.token_counts, documents=0, tokens=0)
    with pytest.raises(UserError, check=coded("damaged-removed-ids")):
        removed_ids(str(shards), manifest.model_copy(update={"removals": (removal,)}))


@pytest.mark.parametrize("text", ["[" * DEEP + "]" * DEEP, "- " * 2_000 + "x", "{a: " * 200 + "1" + "}" * 200])
def test_deeply_nested_yaml_does_not_end_the_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, check=coded("invalid-yaml")):
        prepare("a.txt", tokenizer="none", output=tmp_path / "out", config=tmp_path / "run.yaml")
    with pytest.raises(UsageError, check=coded("invalid-override")):
        prepare("a.txt", tokenizer="none", output=tmp_path / "out", overrides=[f"documents={text}"])


@pytest.mark.parametrize("value", ["!!timestamp x", "!!bool x", "!!int ''"])
def test_a_tagged_value_of_another_type_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.yaml").write_text(f"documents: {value}\n")
    with pytest.raises(UsageError, check=coded("invalid-yaml")):
        prepare("a.txt", tokenizer="none", output=tmp_path / "out", config=tmp_path / "run.yaml")
    with pytest.raises(UsageError, match="override", check=coded("invalid-override")):
        prepare("a.txt", tokenizer="none", output=tmp_path / "out", overrides=[f"documents={value}"])


def test_a_damaged_configuration_beside_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "training_config.yaml").write_text("data: !!bool x\n")
    with pytest.raises(UserError, check=coded("invalid-yaml")):
        pair_task(tmp_path)


@pytest.mark.parametrize(
    "change", [{"settings": None}, {"special_tokens": {"pad": 4, "unk": 1, "cls": 2, "sep": 3, "mask": 0}}]
)
def test_information_that_does_not_fit_a_tokenizer_of_ours_is_refused(tokenizer: Path, change: dict[str, Any]) -> None:
    changed_json(tokenizer / INFO_NAME, lambda values: values.update(change))
    with pytest.raises(UserError, check=coded("damaged-tokenizer")):
        Tokenizer.load(tokenizer)


def test_a_model_whose_bytes_have_other_names_is_refused(tokenizer: Path) -> None:
    path = tokenizer / MODEL_NAME
    assert path.read_bytes().count(b"<0x41>") == 1
    path.write_bytes(path.read_bytes().replace(b"<0x41>", b"<0x4Z>"))
    with pytest.raises(UserError, match=r"tokenizer\.model", check=coded("damaged-tokenizer")):
        Tokenizer.load(tokenizer)


def test_a_foreign_tokenizer_with_other_special_tokens_than_it_says_is_refused(foreign_tokenizer: Path) -> None:
    loaded = Tokenizer.load(foreign_tokenizer)
    loaded.info.write(foreign_tokenizer)
    changed_json(foreign_tokenizer / INFO_NAME, lambda values: values["special_tokens"].update(mask=150))
    with pytest.raises(UserError, check=coded("tokenizer-mismatch")):
        Tokenizer.load(foreign_tokenizer)


def test_a_foreign_tokenizer_with_an_id_of_billions_is_refused(foreign_tokenizer: Path) -> None:
    def renumber(values: dict[str, Any]) -> None:
        values["model"]["vocab"]["[unused7]"] = 4_000_000_000

    changed_json(foreign_tokenizer / TOKENIZER_NAME, renumber)
    with pytest.raises(UserError, match="4,000,000,000", check=coded("damaged-tokenizer")):
        Tokenizer.load(foreign_tokenizer)


def test_a_foreign_tokenizer_without_a_piece_for_the_unknown_is_refused(foreign_tokenizer: Path) -> None:
    changed_json(foreign_tokenizer / TOKENIZER_NAME, lambda values: values["model"].update(unk_token="[NONE]"))
    with pytest.raises(UserError, check=coded("damaged-tokenizer")):
        Tokenizer.load(foreign_tokenizer).encode_text("\u6f22")


def test_a_foreign_tokenizer_with_a_special_token_without_ids_is_refused(foreign_tokenizer: Path) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["post_processor"]["special_tokens"]["[SEP]"] = {"id": "[SEP]", "hds": [102]}

    changed_json(foreign_tokenizer / TOKENIZER_NAME, rename)
    with pytest.raises(UserError, check=coded("damaged-tokenizer")):
        Tokenizer.load(foreign_tokenizer)


@pytest.mark.parametrize(
    "line",
    [
        b'{"t": 1, "s": Infinity, "m": {"a": 1}}',
        b'{"t": 1, "s": 1, "m": {"a": 1' + b"0" * 400 + b"}}",
        b'{"t": 1, "s": 99999999999999999999, "m": {"a": 1}}',
        b'{"t": 1, "s": -1, "m": {"a": 1}}',
        b'{"t": 1, "s": 1, "m": {"\\ud800": 1}}',
        b"[" * DEEP,
    ],
)
def test_a_point_that_no_server_takes_is_a_damaged_line(line: bytes) -> None:
    assert parse_line(line) is None
    assert parse_line(b'{"t": 1, "s": 1, "m": {"a": 1}}') is not None


ARTIFACT = {"sha256": "0", "revision": 1}


@pytest.mark.parametrize(
    "change", [{"artifacts": {"../../.ssh/id": ARTIFACT}}, {"artifacts": {"/etc/passwd": ARTIFACT}}, {"revision": -1}]
)
def test_a_record_that_would_send_other_files_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    record = {"run_uuid": "u", "started_at": 1, "experiment": "e", "run_name": "r"}
    (tmp_path / RECORD_NAME).write_text(json.dumps(record))
    assert read_record(tmp_path) is not None
    (tmp_path / RECORD_NAME).write_text(json.dumps(record | change))
    with pytest.raises(UserError, check=coded("damaged-tracking-record")):
        read_record(tmp_path)


@pytest.mark.parametrize("line", ["node slots=" + "9" * 5_000, "node slots=0", "one slots=1\x0ctwo slots=1"])
def test_a_line_that_the_launcher_would_misread_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "hostfile").write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1", check=coded("invalid-hostfile")) as caught:
        read_hostfile(str(tmp_path / "hostfile"))
    assert len(str(caught.value)) < 1_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run", 10, "f" * 64, make_weights())


def test_impossible_shapes_are_refused_before_memory_is_allocated(checkpoint: Path) -> None:
    values = json.loads((checkpoint / STATE_NAME).read_bytes())
    name = next(iter(values["shapes"]))
    values["shapes"][name] = [1 << 40, 1 << 20]
    sign(checkpoint, STATE_NAME, json.dumps(values).encode())
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        read_weights(checkpoint)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda key, tensor: {f"weight:2:{key}": tensor}, "elements of .* are missing"),  # a hole and an overlap
        (lambda key, tensor: {f"weight:-2:{key}": tensor}, "not a checkpoint file"),
        (lambda key, tensor: {f"weight:0:{key}": tensor.half()}, "not a checkpoint file"),
        (lambda key, tensor: {f"weight:0:{key}": tensor.view(1, -1)}, "not a checkpoint file"),
        (lambda key, tensor: {f"weight:0:{key}": tensor.new_zeros(())}, "not a checkpoint file"),
    ],
)
def test_fragments_with_gaps_or_overlaps_are_refused(
    checkpoint: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], match: str
) -> None:
    tensors = safetensors.torch.load((checkpoint / TENSORS).read_bytes())
    first = next(key for key in sorted(tensors) if key.startswith("weight:0:"))
    tensor = tensors.pop(first)
    sign(checkpoint, TENSORS, safetensors.torch.save(tensors | change(first.split(":", 2)[2], tensor)))
    with pytest.raises(UserError, match=match, check=coded("damaged-checkpoint")):
        read_weights(checkpoint)


def test_an_xz_file_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    whole = lzma.compress(b"text")
    header = whole[12:16] + b"\x28" + whole[17:20]  # a dictionary of 4 GB
    path = tmp_path / "input.txt.xz"
    path.write_bytes(whole[:12] + header + zlib.crc32(header).to_bytes(4, "little") + whole[24:])
    reader = reader_of(path)
    refusals: list[str] = []

    def read() -> None:
        try:
            list(reader)
        except BadInput as error:
            refusals.append(str(error))

    read_or_refuse(read, tmp_path)  # with a gigabyte of memory
    assert len(refusals) == 1 and "more memory than available" in refusals[0]


@pytest.mark.parametrize("behind", [lzma.compress(b"more", lzma.FORMAT_ALONE), b"]" + bytes(12)])
def test_only_another_xz_stream_is_read_after_the_first(tmp_path: Path, behind: bytes) -> None:
    path = tmp_path / "input.txt.xz"
    path.write_bytes(lzma.compress(b"text") + behind)
    with pytest.raises(BadInput, check=coded("damaged-file")):
        list(reader_of(path))


def test_text_of_a_file_is_escaped_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise UserError("\x1b[31munknown setting a\r\nerror: all is well " + "a" * 10_000 + "; take it out")

    with pytest.raises(SystemExit):
        as_command(command)
    told = capsys.readouterr().err
    assert told.startswith("error: \\x1b[31munknown setting a error: all") and told.endswith("; take it out\n")
    assert told.count("\n") == 1 and len(told) < 5_000
