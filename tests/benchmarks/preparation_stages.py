"""Where the CPU seconds of preparation go on one core, by stage, in one process; prints JSON.

    python tests/benchmarks/preparation_stages.py TOKENIZER FILE.jsonl.gz ...

Each stage runs three times over the whole text, and the least counts. `words` is the encoding of text of which all
words are cached, `new words` what encoding takes beyond that from an empty cache; `SentencePiece` is the part of the
new words that the library takes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from data_prep.pipeline.map_task import _BATCH_CHARACTERS
from data_prep.text.sentences import batch_sentence_starts
from data_prep.text.text_batch import normalize_batch
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.word_cache import WordCache, pieces_of

_RUNS = 3
Result = TypeVar("Result")


def main() -> None:
    """Print the CPU seconds of every stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tokenizer", help="folder of a tokenizer")
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl.gz", help="text, one JSON object per line")
    arguments = parser.parse_args()
    print(json.dumps(seconds_by_stage(arguments.tokenizer, arguments.files)))


def seconds_by_stage(folder: str, files: Sequence[str]) -> dict[str, float]:
    """CPU seconds by name of the stage."""
    found: dict[str, float] = {}
    compressed = [Path(file).read_bytes() for file in files]
    found["decompression"], contents = _least(lambda: [gzip.decompress(data) for data in compressed])
    lines = [line for content in contents for line in content.splitlines()]
    found["JSON"], texts = _least(lambda: [json.loads(line)["text"] for line in lines])
    tokenizer = Tokenizer.load(folder)
    groups = _groups(texts)
    found["normalization"], batches = _least(
        lambda: [normalize_batch(group, tokenizer.normalization) for group in groups]
    )
    found["sentences (sentencex)"], _ = _least(
        lambda: [batch_sentence_starts(batch, ["en"] * len(batch)) for batch in batches]
    )
    pieces = [piece for batch in batches for piece in pieces_of(batch.data)]
    library = [0.0]

    def encode_words(words: list[bytes]) -> list[list[int]]:
        started_at = time.process_time()
        ids: list[list[int]] = tokenizer._encode_directly(words)
        library[0] += time.process_time() - started_at
        return ids

    cold = []
    for _ in range(_RUNS):
        library[0] = 0.0
        cache = WordCache(encode_words, tokenizer.token_dtype, tokenizer._merged_pieces())
        seconds, _ = _timed(lambda: [cache.encode(piece) for piece in pieces])  # noqa: B023 - it is called here
        cold.append((seconds, library[0]))
    found["words"], _ = _least(lambda: [cache.encode(piece) for piece in pieces])
    found["new words"] = max(0.0, min(cold)[0] - found["words"])
    found["SentencePiece"] = min(cold)[1]
    return found


def _groups(texts: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    num_characters = 0
    for text in texts:
        groups[-1].append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            groups.append([])
            num_characters = 0
    return groups if groups[-1] else groups[:-1]


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started_at = time.process_time()
    result = work()
    return time.process_time() - started_at, result


def _least(work: Callable[[], Result]) -> tuple[float, Result]:
    seconds, result = _timed(work)
    return min([seconds, *(_timed(work)[0] for _ in range(_RUNS - 1))]), result


if __name__ == "__main__":
    main()
