from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.doctor import findings_of
from tests.support.toy_run import preset_config
from trainer.preflight.data_checks import EVALUATION_IS_OFF


def failures(shards: Path, folder: Path, *overrides: str) -> list[str]:
    findings = findings_of(preset_config(*overrides, shards=shards, output_dir=folder / "run"), "data", num_ranks=1)
    return [finding.text for finding in findings if finding.level == "fail"]


def test_shards_of_another_tokenizer_or_of_more_ids_fail(small_shards, tmp_path):
    (text,) = failures(small_shards, tmp_path, "model.vocab_size=100")
    assert "set model.vocab_size=800" in text


def test_sentence_pairs_of_shards_without_sentences_fail(shards_without_sentences, tmp_path):
    (text,) = failures(shards_without_sentences, tmp_path)  # the preset has pairs
    assert "documents.sentences=none" in text and "data.sentence_pairs=none" in text
    assert failures(shards_without_sentences, tmp_path, "data.sentence_pairs=none") == []


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train-000000", "flipped"), ("train-000000", "short"), ("train-000000", "gone"), ("valid-000000", "flipped")],
)
def test_a_damaged_shard_fails_and_is_named(name, damage, small_shards, tmp_path):
    shards = shutil.copytree(small_shards, tmp_path / "shards")
    shard = shards / f"{name}.tar"
    if damage == "gone":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[1000] ^= 1
        shard.write_bytes(data if damage == "flipped" else data[:-512])
    (text,) = failures(shards, tmp_path)
    assert name in text and "restore it" in text


def test_a_file_that_is_missing_is_named_also_where_it_is_not_in_the_sample(small_shards, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.preflight.data_checks.SAMPLED_TRAIN_SHARDS", 1)
    shards = shutil.copytree(small_shards, tmp_path / "shards")
    assert failures(shards, tmp_path) == []
    (shards / "train-000003.tar").unlink()
    (text,) = failures(shards, tmp_path)
    assert "lacks 1 of the files in its manifest: train-000003.tar; restore it" in text
    (shards / "train-000002.index.safetensors").unlink()
    assert "lacks 2 of the files" in failures(shards, tmp_path)[0]


def test_a_tokenizer_file_that_only_an_export_would_carry_is_looked_at_too(small_shards, tmp_path):
    shards = shutil.copytree(small_shards, tmp_path / "shards")
    path = shards / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("[MASK]", "[MUSK]"), encoding="utf-8")
    (text,) = failures(shards, tmp_path)
    assert "tokenizer.json has sha256" in text and "copy the whole folder again" in text


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ((), False),
        (("checkpoint.keep_best=1",), True),
        (("checkpoint.average_last=2",), True),
        (("registry.name=m", "registry.promote_to=champion", "registry.only_if=valid/mlm_loss < 3"), True),
        (("checkpoint.keep_best=1", "checkpoint.best_metric=valid/minimal_pairs_accuracy"), False),
    ],
)
def test_without_a_valid_split_only_what_compares_its_scores_is_refused(
    overrides, is_refused, shards_without_valid, tmp_path
):
    config = preset_config(
        "evaluation.minimal_pairs=pairs", *overrides, shards=shards_without_valid, output_dir=tmp_path / "run"
    )
    findings = findings_of(config, "data", num_ranks=1)
    assert any(f"and {EVALUATION_IS_OFF}" in each.text for each in findings if each.level == "fail") == is_refused
    assert is_refused or EVALUATION_IS_OFF in [each.text for each in findings]


def test_a_part_of_a_mixture_without_a_valid_split_is_no_reason_to_refuse(shards_without_valid, small_shards, tmp_path):
    mixture = f"data.shards=[{{url: '{shards_without_valid}'}}, {{url: '{small_shards}'}}]"
    config = preset_config(mixture, "checkpoint.keep_best=1", shards=small_shards, output_dir=tmp_path / "run")
    findings = findings_of(config, "data", num_ranks=1)
    assert [each.text for each in findings if each.level == "fail"] == []
    assert any("has no valid documents, so it is not evaluated" in each.text for each in findings)
