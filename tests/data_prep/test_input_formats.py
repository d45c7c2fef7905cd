"""Every format, compressed in every way, on a disk and in stores: one corpus of all of them gives the same shards."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.config.preparation_config import PreparationConfig
from data_prep.pipeline.plan import Plan, make_plan
from data_prep.pipeline.preparation import prepare_shards
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.compressions import COMPRESS
from tests.support.living_data_sets import document_ids, read_texts
from tests.support.s3_server import S3Bucket

FORMATS = (".txt", ".jsonl", ".parquet")
NAMES = [f"part{ending}{compression}" for ending in FORMATS for compression in COMPRESS]


def contents_of(texts: list[str], ending: str) -> bytes:
    if ending == ".txt":
        return "\n\n".join(texts).encode()
    if ending == ".jsonl":
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file, row_group_size=5)
    return file.getvalue()


def plan_of(folder: str, tokenizer: Tokenizer) -> Plan:
    config = PreparationConfig.model_validate(
        {
            "sources": [{"name": name, "input": f"{folder}/{name}"} for name in NAMES],
            "documents": {"txt_documents": "blank_lines"},
            "shards": {"min_shards": 2, "valid_fraction": 0.2, "unit_bytes": 2000},
        }
    )
    return make_plan(config, tokenizer)


@pytest.mark.parametrize("store", ["local", "memory", "s3"])
def test_every_format_in_every_compression_gives_its_documents(
    store: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path, s3_bucket: S3Bucket
) -> None:
    texts = [text.replace("\n\n", " ") for text in read_texts(small_corpus)]
    folder = {"local": str(tmp_path / "in"), "memory": "memory://every-format", "s3": f"{s3_bucket.url}/in"}[store]
    parts = {name: texts[number :: len(NAMES)] for number, name in enumerate(NAMES)}
    for name, part in parts.items():
        ending, _, compression = name.removeprefix("part.").partition(".")
        data = COMPRESS[f".{compression}" if compression else ""](contents_of(part, f".{ending}"))
        storage.write_bytes(f"{folder}/{name}", data)
    tokenizer = Tokenizer.load(small_tokenizer)
    plan = plan_of(folder, tokenizer)
    output = tmp_path / "out"
    manifest, _ = prepare_shards(plan, tokenizer, str(output), 1)
    assert {source.name: source.documents for source in manifest.sources} == {
        name: len(part) for name, part in parts.items()
    }
    assert all(not source.dropped for source in manifest.sources)
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(contents_of(texts, ".jsonl"))
    config = plan.config.model_copy(
        update={"sources": (plan.config.sources[0].model_copy(update={"input": (str(plain),)}),)}
    )
    prepare_shards(make_plan(config, tokenizer), tokenizer, str(tmp_path / "plain"), 1)
    assert document_ids(output) == document_ids(tmp_path / "plain")
