"""One contestant of `peers_preparation.py` in a process of its own; prints a line of JSON that begins with RESULT.

    python tests/benchmarks/peer_contestants.py datatrove TOKENIZER OUTPUT FILE ...

It imports nothing of the project but for SentencePiece's turn, so that it runs in the peers' environment.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = "RESULT "
_BATCH_DOCUMENTS = 1000


def main() -> None:
    """Do the work and tell how long it took and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("tokenizer", help="tokenizer.json, or the folder for sentencepiece")
    parser.add_argument("output")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    print(RESULT + json.dumps(RUNS[arguments.name](arguments.files, arguments.tokenizer, arguments.output)))


def read_texts(path: str) -> Iterator[str]:
    """The text of every line of a jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def run_sentencepiece(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """SentencePiece's `encode` over texts that lie normalised in memory."""
    sys.path.insert(0, str(REPOSITORY))
    import sentencepiece

    from data_prep.text.cleaning import normalise
    from data_prep.tokenizing.tokenizer import Tokenizer

    rules = Tokenizer.load(tokenizer).normalisation
    texts = [normalise(text, rules) for path in files for text in read_texts(path)]
    processor = sentencepiece.SentencePieceProcessor(model_file=os.path.join(tokenizer, "tokenizer.model"))
    clock = _Clock()
    tokens = 0
    for first in range(0, len(texts), _BATCH_DOCUMENTS):
        tokens += sum(map(len, processor.encode(texts[first : first + _BATCH_DOCUMENTS], num_threads=1)))
    return {**clock.read(), "documents": len(texts), "tokens": tokens}


def run_datatrove(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """datatrove's tokenizer pipeline, one task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    folder = os.path.dirname(files[0])
    names = Path(f"{output}-names.txt")
    names.write_text("".join(f"{os.path.basename(path)}\n" for path in files))
    steps = [
        JsonlReader(folder, paths_file=str(names)),
        DocumentTokenizer(output, tokenizer, shuffle_documents=False, batch_size=_BATCH_DOCUMENTS),
    ]
    executor = LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{output}-logs", skip_completed=False)
    clock = _Clock()
    executor.run()
    read = clock.read()
    counts = [os.path.getsize(path) // 8 for path in glob.glob(f"{output}/*.index")]
    tokens = [os.path.getsize(path) // 2 for path in glob.glob(f"{output}/*.ds")]
    shutil.rmtree(f"{output}-logs")
    names.unlink()
    return {**read, "documents": sum(counts), "tokens": sum(tokens)}


def run_datasets(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """`datasets.map` with `tokenizers`."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    encoder = Tokenizer.from_file(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    clock = _Clock()
    texts = datasets.load_dataset("json", data_files=files, split="train", cache_dir=f"{output}-cache")
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("uint16"))})
    encoded = texts.map(
        encode,
        batched=True,
        batch_size=_BATCH_DOCUMENTS,
        num_proc=None,
        remove_columns=texts.column_names,
        features=features,
        cache_file_name=f"{output}-encoded.arrow",
    )
    read = clock.read()
    tokens = sum(len(row) for batch in encoded.with_format("arrow").iter(1000) for row in batch["input_ids"])
    result = {**read, "documents": len(encoded), "tokens": tokens}
    shutil.rmtree(f"{output}-cache")
    os.remove(f"{output}-encoded.arrow")
    return result


class _Clock:
    """Wall and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.monotonic() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


RUNS = {"sentencepiece": run_sentencepiece, "datatrove": run_datatrove, "datasets": run_datasets}

if __name__ == "__main__":
    main()
