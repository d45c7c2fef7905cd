"""One contestant of `peers_preparation.py` in a process of its own; writes OUTPUT-result.json.

    python tests/benchmarks/peer_contestants.py datatrove TOKENIZER OUTPUT FILE ... --first TWO_DOCUMENTS

What makes files runs on the two documents first, untimed: what it imports and compiles then does not count.
Only `ours` and `preparation` import anything of the project.
"""

from __future__ import annotations

import argparse
import array
import glob
import gzip
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_BATCH_DOCUMENTS = 1000


def main() -> None:
    """Do the work, and write how many documents and tokens there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("tokenizer", help="tokenizer.json, or the folder for sentencepiece and gigatoken")
    parser.add_argument("output")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--first", help="a file of two documents")
    arguments = parser.parse_args()
    run = RUNS[arguments.name]
    if arguments.first is not None:
        run([arguments.first], arguments.tokenizer, f"{arguments.output}-first")
    started_at = cpu_seconds()
    result = run(arguments.files, arguments.tokenizer, arguments.output)
    if arguments.first is not None:
        result |= {"start_cpu_seconds": started_at, "cpu_seconds": cpu_seconds() - started_at}
    Path(f"{arguments.output}-result.json").write_text(json.dumps(result), encoding="utf-8")


def cpu_seconds() -> float:
    """What this process and its ended children have used."""
    return sum(os.times()[:4])


def write_peer_tokenizer(source: Path, target: Path) -> None:
    """Our tokenizer.json without special tokens around a text and without its normalizer: the least work."""
    values = json.loads(source.read_text(encoding="utf-8")) | {"post_processor": None, "normalizer": None}
    target.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def run_ours(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """Our `encode_many` over texts that lie in memory."""
    from data_prep.tokenizer.tokenizer import Tokenizer

    return _encoded(files, Tokenizer.load(tokenizer).encode_many)


def run_sentencepiece(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """SentencePiece's `encode` over texts that lie in memory, ids as arrays."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=os.path.join(tokenizer, "tokenizer.model"))
    return _encoded(files, lambda texts: processor.encode(texts, return_type="numpy", num_threads=1))


def run_tokenizers(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """The library's `encode_batch_fast` over texts that lie in memory."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False)]

    return _encoded(files, encode)


def run_gigatoken(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """gigatoken's `encode_batch` over texts that lie in memory, texts and ids as arrays: no Python object per text."""
    import pyarrow

    encode, texts_of = _gigatoken(tokenizer)
    return _encoded(files, encode, lambda texts: texts_of(pyarrow.array(texts)))


def _gigatoken(folder: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Its `encode_batch`, and what makes the array of texts that it takes of one of pyarrow's."""
    import awkward
    import gigatoken
    import pyarrow

    encoder = gigatoken.Tokenizer.from_sentencepiece(os.path.join(folder, "tokenizer.model"))
    return (
        lambda texts: encoder.encode_batch(texts, parallel=False),
        lambda texts: awkward.from_arrow(texts.cast(pyarrow.large_string())),
    )


def _encoded(
    files: list[str], encode: Callable[[Any], Any], batch_of: Callable[[list[str]], Any] = list
) -> dict[str, Any]:
    """Encode texts that lie in memory; the CPU seconds are those of `encode` alone, then of encoding all of them again.

    `ids_sha256` is a digest of each text's ids. Whatever a caller does with the ids, digests and counts too, is not
    timed.
    """
    texts = [json.loads(line)["text"] for path in files for line in gzip.open(path, "rt", encoding="utf-8")]
    starts = range(0, len(texts), _BATCH_DOCUMENTS)
    batches = [batch_of(texts[first : first + _BATCH_DOCUMENTS]) for first in starts]
    encode(batch_of(["a"]))  # what is imported at the first call
    seconds = {"cpu_seconds": 0.0, "again_cpu_seconds": 0.0}
    digests: list[str] = []
    tokens = 0
    for turn in seconds:
        for batch in batches:
            started_at = time.process_time()
            found = encode(batch)
            seconds[turn] += time.process_time() - started_at
            if turn == "cpu_seconds":
                for ids in found.to_list() if hasattr(found, "to_list") else found:
                    tokens += len(ids)
                    digests.append(hashlib.sha256(array.array("I", map(int, ids)).tobytes()).hexdigest()[:16])
    return {**seconds, "documents": len(texts), "tokens": tokens, "ids_sha256": digests}


def run_preparation(files: list[str], tokenizer: str, output: str, *settings: str) -> dict[str, Any]:
    """Our commands `shards` and `verify` with one worker."""
    from data_prep.__main__ import main as data_prep

    def run(*words: str) -> None:
        sys.argv = ["data_prep", *words, "--workers", "1"]
        data_prep()

    run("shards", *settings, "--tokenizer", tokenizer, "--output", output, "--input", *files)
    started_at = cpu_seconds()
    run("verify", output)
    verify_cpu_seconds = cpu_seconds() - started_at
    manifest = json.loads(Path(output, "manifest.json").read_text(encoding="utf-8"))
    splits = (manifest["train"], manifest["valid"])
    counts = {key: sum(split[key] for split in splits) for key in ("documents", "tokens")}
    dropped = sum(sum(source["dropped"].values()) for source in manifest["sources"])
    return {**counts, "dropped": dropped, "verify_cpu_seconds": verify_cpu_seconds}


def run_preparation_without_sentences(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """The same without sentence boundaries, which no peer finds."""
    return run_preparation(files, tokenizer, output, "documents.sentences=none")


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
    executor.run()
    counts = [os.path.getsize(path) // 8 for path in glob.glob(f"{output}/*.index")]
    tokens = [os.path.getsize(path) // 2 for path in glob.glob(f"{output}/*.ds")]
    shutil.rmtree(f"{output}-logs")
    names.unlink()
    return {"documents": sum(counts), "tokens": sum(tokens)}


def run_datasets(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """`datasets.map` with `tokenizers`."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    return _mapped(files, output, encode, None)


def run_datasets_gigatoken(files: list[str], tokenizer: str, output: str) -> dict[str, Any]:
    """`datasets.map` in arrow format with gigatoken: no text and no id becomes a Python object."""
    import numpy
    import pyarrow

    encode_texts, texts_of = _gigatoken(tokenizer)

    def encode(batch: Any) -> Any:
        found = encode_texts(texts_of(batch["text"].combine_chunks())).layout
        offsets, ids = (numpy.asarray(part.data) for part in (found.offsets, found.content))
        lists = pyarrow.ListArray.from_arrays(offsets.astype(numpy.int32), ids.astype(numpy.uint16))
        return pyarrow.table({"input_ids": lists})

    return _mapped(files, output, encode, "arrow")


def _mapped(files: list[str], output: str, encode: Callable[[Any], Any], form: str | None) -> dict[str, Any]:
    """`datasets.map` in batches and in one process, from jsonl.gz to an arrow file."""
    import datasets

    datasets.disable_progress_bars()
    texts = datasets.load_dataset("json", data_files=files, split="train", cache_dir=f"{output}-cache")
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("uint16"))})
    encoded = texts.with_format(form).map(
        encode,
        batched=True,
        batch_size=_BATCH_DOCUMENTS,
        num_proc=None,
        remove_columns=texts.column_names,
        features=features,
        cache_file_name=f"{output}-encoded.arrow",
    )
    tokens = sum(len(chunk.flatten()) for chunk in encoded.data.column("input_ids").chunks)
    result = {"documents": len(encoded), "tokens": tokens}
    shutil.rmtree(f"{output}-cache")
    os.remove(f"{output}-encoded.arrow")
    return result


ENCODERS = {
    "ours": run_ours,
    "sentencepiece": run_sentencepiece,
    "sentencepiece_paragraphs": run_sentencepiece,
    "tokenizers": run_tokenizers,
    "gigatoken": run_gigatoken,
}
"""Contestants that encode texts in memory."""
RUNS = {
    **ENCODERS,
    "preparation": run_preparation,
    "preparation_without_sentences": run_preparation_without_sentences,
    "datatrove": run_datatrove,
    "datasets": run_datasets,
    "datasets_gigatoken": run_datasets_gigatoken,
}

if __name__ == "__main__":
    main()
