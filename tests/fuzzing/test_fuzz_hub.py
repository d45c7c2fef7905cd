"""`hf://` inputs: damaged files give what they give on a disk; damaged answers of the Hub give that or a refusal."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.mutations import fuzz, mutated_bytes
from tests.fuzzing.test_fuzz_inputs import CSV, LINES

REPOSITORY = Path(__file__).resolve().parents[2]
_READ = """
import json
import random
import sys
from pathlib import Path

import pyarrow
from huggingface_hub import HfFileSystem

from data_prep.base.errors import UserError
from data_prep.base.terminal import paragraph
from data_prep.config.preparation_config import PreparationConfig, Source
from data_prep.storage import store_errors, storage
from tests.support.hub_server import Hub
from tests.support.reading import readers_of

folder = Path(sys.argv[1])
store_errors.RETRY_SECONDS = 0.0
hub = Hub(folder)
storage.configure({"hf://": {"endpoint": hub.url, "token": "hf_none", "use_listings_cache": False}})


def read(url):
    config = PreparationConfig(sources=(Source(name="hub", input=(url,)),), documents={"on_bad_input": "skip"})
    try:
        return [document.text for reader in readers_of(config) for document in reader]
    except UserError as error:
        assert "\\n" not in paragraph(error)
        return f"refused: {error.code}"


def damaged(answer):
    if generator.random() < 0.5:
        return answer
    place = generator.randrange(len(answer))
    kind = generator.randrange(4)
    if kind == 0:
        return answer[:place]
    if kind == 1:
        return answer[:place] + bytes([answer[place] ^ 1 << generator.randrange(8)]) + answer[place + 1 :]
    values = json.loads(answer)
    for item in values if isinstance(values, list) else [values]:
        if item and isinstance(item, dict):
            item[generator.choice(sorted(item))] = generator.choice([None, -1, 10**30, "", [], {}, "../../x", "\\0"])
    return json.dumps(values).encode()


for path in sorted((folder / "data").iterdir()):
    print(json.dumps([path.name, read(str(path)), read(f"hf://datasets/user/tales/data/{path.name}")]), flush=True)
generator = random.Random(5)
hub.damage = damaged
for number in range(int(sys.argv[2])):
    HfFileSystem.clear_instance_cache()
    generator.seed(number)
    name = "whole.jsonl.gz" if number % 2 else "whole.parquet"
    pattern = name if number % 3 else name.replace("whole", "who*")
    print(json.dumps([f"answer {number}", None, read(f"hf://datasets/user/tales/data/{pattern}")]), flush=True)
"""


@pytest.mark.spawn
def test_damaged_files_and_answers_of_the_hub_are_read_as_they_are_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two", "three"], "id": [1, 2, 3]}), table, write_page_checksum=True)
    whole = {".jsonl.gz": gzip.compress(b"\n".join(LINES), mtime=0), ".parquet": table.getvalue(), ".csv": CSV}
    for ending, content in whole.items():
        (folder / f"whole{ending}").write_bytes(content)

    @fuzz(30, slow=True)
    @given(ending=st.sampled_from(sorted(whole)), data=st.data())
    def damage(ending: str, data: st.DataObject) -> None:
        number = len(list(folder.iterdir()))
        (folder / f"damaged-{number:04d}{ending}").write_bytes(data.draw(mutated_bytes(whole[ending])))

    damage()
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(tmp_path), "40"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}\n{done.stderr[-3000:]}"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = {name: local for name, local, _ in found if name.startswith("whole")}
    assert len(expected) == 3 and all(len(texts) == 3 for texts in expected.values())
    for name, local, remote in found:
        if name.startswith("answer"):
            assert isinstance(remote, str) or remote in expected.values(), f"{name}: {remote}"
        else:
            assert remote == local, f"{folder / name}"
    assert any(isinstance(local, str) for _, local, _ in found), "some are refused"
