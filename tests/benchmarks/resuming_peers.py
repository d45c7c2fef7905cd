"""The peers of `resuming.py` that save where their data stands, each turn in a process of its own.

    python tests/benchmarks/resuming_peers.py prepare|check|resume NAME FOLDER TOKENS

`prepare` writes the data (one block of rows under as many names as TOKENS need) and goes to its middle, where it saves
the state; `resume` opens the data again, loads the state and takes the next batch; `check` says whether the batch after
a resume is the one of a loader that never stopped. Batches hold 128 rows of 512 tokens and are masked by
`DataCollatorForLanguageModeling` with `return_tensors="np"`, its fastest form. The states:

- datasets: `IterableDataset.state_dict` of arrow files that are streamed;
- torchdata: the same within a StatefulDataLoader;
- torchdata_indexed: a StatefulDataLoader over rows by number, in a shuffled order;
- streaming: mosaicml-streaming's StreamingDataLoader over MDS shards, in a shuffled order.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import masking_collator
from machine import peak_memory_mb

from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, SEP_TOKEN_ID, SPECIAL_TOKENS

LENGTH, ROWS, VOCAB_SIZE = 512, 128, 30_522
BLOCK_ROWS = 8192
Collate = Callable[[list[Any]], Any]


class Collator:
    """Stacks rows and masks them."""

    def __init__(self) -> None:
        self._collate = masking_collator(VOCAB_SIZE, return_tensors="np")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        """Also keep the rows as they were, for the check."""
        ids = [np.asarray(row["input_ids"], np.int64) for row in rows]
        return {**self._collate(ids), "rows": np.stack(ids)}


class Rows:
    """`num_rows` full rows by number; row i is row i % 8192 of one block of random ids."""

    def __init__(self, num_rows: int) -> None:
        self._block, self._num_rows = block(), num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self._block[number % BLOCK_ROWS]}


def block() -> np.ndarray:
    """(8192, 512) ids."""
    ids = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, (BLOCK_ROWS, LENGTH))
    ids[:, 0], ids[:, -1] = CLS_TOKEN_ID, SEP_TOKEN_ID
    return ids.astype(np.uint16)


def write_arrow(folder: Path, num_rows: int) -> None:
    """One arrow file under several names."""
    import pyarrow

    table = pyarrow.table({"input_ids": pyarrow.array(list(block()))})
    with pyarrow.OSFile(str(folder / "first"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    for number in range(num_rows // BLOCK_ROWS):
        os.link(folder / "first", folder / f"{number:05d}.arrow")


def write_mds(folder: Path, num_rows: int) -> None:
    """One MDS shard under several names."""
    streaming = import_streaming()
    with streaming.MDSWriter(
        out=str(folder), columns={"input_ids": "ndarray:uint16:512"}, size_limit=1 << 30
    ) as writer:
        for row in block():
            writer.write({"input_ids": row})
    index = json.loads((folder / "index.json").read_text())
    (shard,) = index["shards"]
    index["shards"] = []
    for number in range(num_rows // BLOCK_ROWS):
        name = f"copy.{number:05d}.mds"
        os.link(folder / shard["raw_data"]["basename"], folder / name)
        index["shards"].append(shard | {"raw_data": shard["raw_data"] | {"basename": name}})
    (folder / "index.json").write_text(json.dumps(index))


def import_streaming() -> Any:
    """mosaicml-streaming, which imports torchvision for data sets of pictures that are not used here."""
    for name, attributes in {
        "torchvision": (),
        "torchvision.datasets": ("VisionDataset",),
        "torchvision.transforms": (),
        "torchvision.transforms.functional": ("to_tensor",),
    }.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).parent)]  # the package catalog is meant
    import streaming

    return streaming


class DatasetsLoader:
    """Batches of a streamed data set, with its own state."""

    def __init__(self, folder: Path, num_rows: int, collate: Collate) -> None:
        from torch.utils.data import DataLoader

        self._data_set = open_streamed(folder)
        self._loader = DataLoader(self._data_set, batch_size=ROWS, collate_fn=collate)
        self.state_dict, self.load_state_dict = self._data_set.state_dict, self._data_set.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def open_streamed(folder: Path) -> Any:
    """The arrow files as an IterableDataset."""
    import datasets

    files = sorted(str(path) for path in folder.glob("*.arrow"))
    cache = str(folder / "cache")
    data_set = datasets.load_dataset("arrow", data_files=files, split="train", streaming=True, cache_dir=cache)
    return data_set.with_format("numpy")


def make_torchdata(folder: Path, num_rows: int, collate: Collate) -> Any:
    """A StatefulDataLoader over the streamed data set."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(open_streamed(folder), batch_size=ROWS, collate_fn=collate)


def make_torchdata_indexed(folder: Path, num_rows: int, collate: Collate) -> Any:
    """A StatefulDataLoader over rows by number."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(0)
    return StatefulDataLoader(Rows(num_rows), ROWS, shuffle=True, collate_fn=collate, generator=generator)


class StreamingLoader:
    """A StreamingDataLoader over the MDS shards; its state is a number of samples, and can be had at once."""

    def __init__(self, folder: Path, num_rows: int, collate: Collate) -> None:
        streaming = import_streaming()
        streaming.base.util.clean_stale_shared_memory()
        self._data_set = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=ROWS)
        self._loader = streaming.StreamingDataLoader(self._data_set, batch_size=ROWS, collate_fn=collate)
        self.load_state_dict = self._loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_at(self, num_samples: int) -> dict[str, Any]:
        """The state after so many samples of the first epoch."""
        next(iter(self._loader))
        state: dict[str, Any] = self._data_set.state_dict(num_samples=num_samples, from_beginning=True)
        return state


_WRITERS: dict[str, Callable[[Path, int], None]] = {
    "datasets": write_arrow,
    "torchdata": write_arrow,
    "torchdata_indexed": lambda folder, num_rows: None,
    "streaming": write_mds,
}
_LOADERS: dict[str, Callable[[Path, int, Collate], Any]] = {
    "datasets": DatasetsLoader,
    "torchdata": make_torchdata,
    "torchdata_indexed": make_torchdata_indexed,
    "streaming": StreamingLoader,
}


def prepare(name: str, folder: Path, num_rows: int) -> int:
    """Write the data and the state at its middle; returns the rows before that."""
    folder.mkdir(parents=True)
    _WRITERS[name](folder, num_rows)
    seen = num_rows // 2 // ROWS * ROWS
    loader = _LOADERS[name](folder, num_rows, list)
    if isinstance(loader, StreamingLoader):
        state = loader.state_at(seen)
    else:
        iterator = iter(loader)
        for _ in range(seen // ROWS):
            next(iterator)
        state = loader.state_dict()
    (folder / "state.pickle").write_bytes(pickle.dumps(state))
    return seen


def check(name: str, folder: Path, num_rows: int) -> bool:
    """Whether the batch after a resume has the rows of a loader that never stopped."""
    seen = prepare(name, folder, num_rows)
    resumed = next_batch(name, folder, num_rows)["rows"]
    straight = next(itertools.islice(_LOADERS[name](folder, num_rows, Collator()), seen // ROWS, None))["rows"]
    return bool(np.array_equal(resumed, straight))


def resume(name: str, folder: Path, num_rows: int) -> dict[str, float]:
    """Seconds and CPU seconds from opening the data to the next batch; what is imported is there before."""
    if name == "streaming":
        import_streaming()
    else:
        import datasets
        import torchdata.stateful_dataloader  # noqa: F401

        datasets.disable_progress_bars()
    cpu_started_at, started_at = time.process_time(), time.perf_counter()
    next_batch(name, folder, num_rows)
    return {
        "cpu_seconds": time.process_time() - cpu_started_at,
        "seconds": time.perf_counter() - started_at,
        "peak_mb": peak_memory_mb(),
    }


def next_batch(name: str, folder: Path, num_rows: int) -> dict[str, np.ndarray]:
    """The batch that training goes on with."""
    loader = _LOADERS[name](folder, num_rows, Collator())
    loader.load_state_dict(pickle.loads((folder / "state.pickle").read_bytes()))
    batch: dict[str, np.ndarray] = next(iter(loader))
    return batch


if __name__ == "__main__":
    torch.set_num_threads(1)
    action, name, folder, num_tokens = sys.argv[1:]
    answer = {"prepare": prepare, "check": check, "resume": resume}[action](
        name, Path(folder), int(num_tokens) // LENGTH
    )
    print(json.dumps(answer), flush=True)
    os._exit(0)  # mosaicml-streaming leaves threads that wait for each other
