"""Near-duplicate removal: what it finds, how fast it signs, and what a million documents cost. Figures, not tests.

    python tests/benchmarks/near_duplicates.py --tokenizer DIR --corpus FILE [--parts quality speed scale]
        [--results FILE]

- quality: of the documents of a .jsonl.gz corpus, copies are made that are edited in known ways, and put behind the
  originals. For every length of n-gram, number of hashes and threshold: of the copies whose true Jaccard similarity
  (of the n-gram sets, computed here by other code) is in a range, how many go; which part of each kind of edit; and
  which originals go when they are alone, with the true similarity to the nearest document before them.
- speed: tokens and bytes of text a second that are signed and written, on one core, beside encoding them; and the
  whole preparation of the corpus without near-duplicates and with them, in turns.
- scale: --documents synthetic documents (log-normal, 300 tokens on average; a fifth are edited copies, and a tenth are
  one document with a few words changed): time of every phase with --workers, the largest process, bytes on the disk.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reports
from contestants import in_turns
from reports import Row, alone

from data_prep.api.configuration import resolve_config
from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication.near_duplicates import find_near_duplicates
from data_prep.deduplication.signature_files import open_signatures
from data_prep.deduplication.similarity_search import choose_bands
from data_prep.executors.executors import run_units
from data_prep.pipeline.plan import make_plan
from data_prep.pipeline.preparation import prepare_shards
from data_prep.tokenizer.tokenizer import Tokenizer

PARTS = ("quality", "speed", "scale")
GRID = list(itertools.product((0.8, 0.5), (3, 5, 8, 13), (64, 128, 256)))  # threshold, ngram_tokens, num_hashes
BINS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
UNIT_DOCUMENTS = 20_000


def main() -> None:
    arguments = _parse()
    described, details = machine.described("rensa", "numpy"), {}
    for part in arguments.parts:
        print(f"== {part}", flush=True)
        details[part] = {"quality": quality, "speed": speed, "scale": scale}[part](arguments)
    reports.save(arguments.results, described, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """What signing and searching cost, and the copies above the threshold that the default number of hashes finds."""
    found = []
    if "speed" in details:
        found.append(alone("signing for near-duplicates", details["speed"]["MB of text a second"], "MB/s", "more"))
    if size := details.get("scale"):
        name = f"near-duplicates of {size['documents'] / 1e6:g} million documents"
        seconds = size["seconds to make and sign the documents"] + size["seconds to find the near-duplicates"]
        percent = 100.0 * size["edited copies that went"] / size["edited copies"]
        found.append(alone(name, seconds, "s", "less"))
        found.append(alone(f"{name}, largest process", size["largest process that searches, MB"], "MB", "less"))
        found.append(alone(f"{name}, found", percent, "%", "more"))
    for row in details.get("quality", {}).get("rows", ()):
        if row["num_hashes"] == DeduplicationSettings().num_hashes:
            name = f"copies at or above {row['threshold']} found, {row['ngram_tokens']}-grams"
            found.append(alone(name, 100.0 * row["recall of copies at or above the threshold"], "%", "more"))
    return found


# ---- quality


def edits(words: list[str], others: list[str], generator: random.Random) -> dict[str, list[str]]:
    """A document's words, edited in each of the ways; `others` are words of the corpus to take new ones from."""

    def replaced(share: float) -> list[str]:
        places = set(generator.sample(range(len(words)), round(share * len(words))))
        return [generator.choice(others) if place in places else word for place, word in enumerate(words)]

    header = [generator.choice(others) for _ in range(25)]
    return {
        "1% of words replaced": replaced(0.01),
        "5% of words replaced": replaced(0.05),
        "10% of words replaced": replaced(0.10),
        "20% of words replaced": replaced(0.20),
        "40% of words replaced": replaced(0.40),
        "last tenth cut off": words[: round(0.9 * len(words))],
        "second half cut off": words[: len(words) // 2],
        "header of 25 words": header + words,
        "one word changed": words[: len(words) // 2] + [generator.choice(others)] + words[len(words) // 2 + 1 :],
    }


def ngram_set(tokens: np.ndarray, length: int) -> set[tuple[int, ...]]:
    values = tokens.tolist()
    return {tuple(values[place : place + length]) for place in range(max(1, len(values) - length + 1))}


def jaccard(left: set, right: set) -> float:
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def quality(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.load(arguments.tokenizer)
    texts = read_texts(arguments.corpus, arguments.limit_mb)
    generator = random.Random(1)
    originals = tokenizer.encode_many([" " + " ".join(text.split()) for text in texts])
    vocabulary = [word for text in texts for word in text.split()]
    chosen = [number for number in range(len(texts)) if 50 <= len(texts[number].split()) <= 5000]
    chosen = generator.sample(chosen, min(arguments.edited, len(chosen)))
    kinds: list[str] = []
    sources: list[int] = []
    copies: list[np.ndarray] = []
    for number in chosen:
        edited = edits(texts[number].split(), vocabulary, generator)
        kinds += edited
        sources += [number] * len(edited)
        copies += tokenizer.encode_many([" " + " ".join(words) for words in edited.values()])
    print(f"{len(texts)} documents, {len(copies)} edited copies of {len(chosen)}", flush=True)

    rows = []
    for ngram_tokens in sorted({entry[1] for entry in GRID}):
        sets = {number: ngram_set(originals[number], ngram_tokens) for number in range(len(texts))}
        similarity = np.array(
            [jaccard(sets[number], ngram_set(copy, ngram_tokens)) for number, copy in zip(sources, copies, strict=True)]
        )
        nearest = nearest_before(sets)
        del sets
        for threshold, _, num_hashes in (entry for entry in GRID if entry[1] == ngram_tokens):
            settings = DeduplicationSettings(
                near=True, threshold=threshold, ngram_tokens=ngram_tokens, num_hashes=num_hashes
            )
            alone, gone = dropped(originals, copies, kinds, settings)
            false = [float(nearest[number]) for number in np.flatnonzero(alone) if nearest[number] < threshold]
            above, below = similarity >= threshold, similarity < threshold
            row = {
                "threshold": threshold,
                "ngram_tokens": ngram_tokens,
                "num_hashes": num_hashes,
                "bands": choose_bands(threshold, num_hashes).num_bands,
                "rows": choose_bands(threshold, num_hashes).rows,
                "recall of copies at or above the threshold": share(gone[above]),
                "copies below the threshold that went": share(gone[below]),
                "of those, true similarity below threshold - 0.1": int(gone[similarity < threshold - 0.1].sum()),
                "originals dropped": int(alone.sum()),
                "originals with a nearer one before, at or above the threshold": int((nearest >= threshold).sum()),
                "originals dropped though none before is that near": len(false),
                "their true similarity": [round(value, 3) for value in sorted(false)],
                "by true similarity": {
                    f"{low:g} to {high:g}": [int(inside.sum()), share(gone[inside])]
                    for low, high in itertools.pairwise(BINS)
                    if (inside := (similarity >= low) & (similarity < high)).any()
                },
                "by edit": {
                    kind: {
                        "mean true similarity": round(float(similarity[inside].mean()), 3),
                        "dropped": share(gone[inside]),
                    }
                    for kind in dict.fromkeys(kinds)
                    if (inside := np.array([one == kind for one in kinds])).any()
                },
            }
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if not key.startswith("by ")}), flush=True)
    return {"documents": len(texts), "copies": len(copies), "rows": rows}


def nearest_before(sets: dict[int, set]) -> np.ndarray:
    """Of each document the largest true similarity to one before it; all pairs that share an n-gram are looked at."""
    holders: dict[Any, list[int]] = defaultdict(list)
    nearest = np.zeros(len(sets))
    for number, ngrams in sets.items():
        shared: dict[int, int] = defaultdict(int)
        for ngram in ngrams:
            for other in holders[ngram]:
                shared[other] += 1
            holders[ngram].append(number)
        sizes = ((count / (len(ngrams) + len(sets[other]) - count)) for other, count in shared.items())
        nearest[number] = max(sizes, default=0.0)
    return nearest


def dropped(
    originals: Sequence[np.ndarray], copies: Sequence[np.ndarray], kinds: Sequence[str], settings: DeduplicationSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Which originals go when they are alone, and which copies go behind them, those of each kind for themselves."""
    gone = np.zeros(len(copies), bool)
    with tempfile.TemporaryDirectory(prefix="clozeworks-near-") as folder:

        def ids_of(kind: str, numbers: Sequence[int]) -> list[int]:
            work, url = f"{folder}/{kind}", f"{folder}/{kind}.signatures"
            with open_signatures(url, settings) as writer:
                for number in numbers:
                    writer.add(len(originals) + number, copies[number])
            return find_near_duplicates([first, url], settings, work, _in_process)[:, 0].tolist()

        first = f"{folder}/originals.signatures"
        with open_signatures(first, settings) as writer:
            for number, tokens in enumerate(originals):
                writer.add(number, tokens)
        alone = np.isin(np.arange(len(originals)), ids_of("none", []))
        for kind in dict.fromkeys(kinds):
            ids = ids_of(kind, [number for number, one in enumerate(kinds) if one == kind])
            gone[[number - len(originals) for number in ids if number >= len(originals)]] = True
    return alone, gone


def share(values: np.ndarray) -> float | None:
    return round(float(values.mean()), 4) if len(values) else None


# ---- speed


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.load(arguments.tokenizer)
    texts = [" " + " ".join(text.split()) for text in read_texts(arguments.corpus, arguments.limit_mb)]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    settings = DeduplicationSettings(near=True)
    encode_seconds, sign_seconds = [], []
    for _ in range(arguments.runs):
        started_at = time.perf_counter()
        tokens = tokenizer.encode_many(texts)
        encode_seconds.append(time.perf_counter() - started_at)
        with tempfile.TemporaryDirectory(prefix="clozeworks-near-") as folder:
            started_at = time.perf_counter()
            with open_signatures(f"{folder}/map-000000.signatures", settings) as writer:
                for number, document in enumerate(tokens):
                    writer.add(number, document)
            sign_seconds.append(time.perf_counter() - started_at)
            signature_bytes = Path(folder, "map-000000.signatures").stat().st_size
    num_tokens = sum(map(len, tokens))
    without, near = prepared_seconds(arguments, tokenizer)
    row = {
        "MB of text": round(megabytes, 2),
        "documents": len(texts),
        "tokens": num_tokens,
        "seconds to sign and write (median)": round(float(np.median(sign_seconds)), 4),
        "MB of text a second": round(megabytes / float(np.median(sign_seconds)), 1),
        "tokens a second": round(num_tokens / float(np.median(sign_seconds))),
        "MB of text a second, encoding": round(megabytes / float(np.median(encode_seconds)), 1),
        "signature bytes a document": round(signature_bytes / len(texts)),
        "CPU seconds of the whole preparation, exact only (median)": round(without, 3),
        "CPU seconds of the whole preparation, near too (median)": round(near, 3),
    }
    print(json.dumps(row), flush=True)
    return row


def prepared_seconds(arguments: argparse.Namespace, tokenizer: Tokenizer) -> tuple[float, float]:
    """CPU seconds of a preparation of the corpus in this process, without and with near-duplicates, in turns."""

    def run(near: str, number: int) -> float:
        config = resolve_config(None, [arguments.corpus], overrides=[f"deduplication.near={near}"])
        with tempfile.TemporaryDirectory(prefix="clozeworks-near-", dir=arguments.work) as folder:
            started_at = time.process_time()
            prepare_shards(make_plan(config, tokenizer), tokenizer, folder, 1)
            return time.process_time() - started_at

    seconds = in_turns(("false", "true"), arguments.runs, run, "near=")
    return float(np.median(seconds["false"])), float(np.median(seconds["true"]))


# ---- scale


def scale(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = DeduplicationSettings(near=True)
    num_units = -(-arguments.documents // UNIT_DOCUMENTS)
    with tempfile.TemporaryDirectory(prefix="clozeworks-near-", dir=arguments.work) as folder:
        units = [(folder, number, arguments.documents, settings) for number in range(num_units)]
        started_at = time.perf_counter()
        for _, _ in run_units(make_unit, units, arguments.workers):
            pass
        made_at = time.perf_counter()
        urls = [f"{folder}/map-{number:06d}.signatures" for number in range(num_units)]
        num_bytes = sum(Path(url).stat().st_size for url in urls)
        peaks: list[float] = []

        def run(
            title: str, work: Callable, tasks: Sequence, result: Callable, amount: Callable, unit: tuple[str, float]
        ) -> None:
            for _, peak in run_units(_Measured(work), tasks, arguments.workers):
                peaks.append(peak)

        searched_at = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(1) as clean:
            # A process of its own for the rest too, so that its memory is seen alone.
            baseline = clean.apply(machine.peak_memory_mb)
        ids = find_near_duplicates(urls, settings, folder, run)[:, 0]
        ended_at = time.perf_counter()
        pair_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.npy"))
    copies = {number for number in range(arguments.documents) if is_copy(number)}
    row = {
        "documents": arguments.documents,
        "workers": arguments.workers,
        "seconds to make and sign the documents": round(made_at - started_at, 1),
        "seconds to find the near-duplicates": round(ended_at - searched_at, 1),
        "parts": len(peaks),
        "largest process that searches, MB": round(max(peaks)),
        "process that makes the clusters, MB": round(machine.peak_memory_mb()),
        "a process that only imported, MB": round(baseline),
        "signature files, MB": round(num_bytes / 1e6),
        "files of pairs, MB": round(pair_bytes / 1e6, 1),
        "edited copies": len(copies),
        "edited copies that went": len(copies & set(ids.tolist())),
        "others that went": len(set(ids.tolist()) - copies),
    }
    print(json.dumps(row), flush=True)
    return row


def is_copy(number: int) -> bool:
    """Whether a synthetic document is an edited copy of one that is always there before it."""
    return (number % 10 == 3 and number > 3) or number % 5 == 1


def synthetic_document(number: int) -> np.ndarray:
    """The tokens of a document: every tenth an edit of document 3, two of ten an edit of the one before."""
    if number % 10 == 3:
        return edited_tokens(plain_document(3, 400), number)
    if number % 5 == 1:
        return edited_tokens(plain_document(number - 1), number)
    return plain_document(number)


def plain_document(number: int, length: int | None = None) -> np.ndarray:
    generator = np.random.default_rng((7, number))
    length = length or int(np.clip(generator.lognormal(5.4, 0.7), 150, 20_000))
    return generator.integers(261, 32_000, length).astype(np.uint16)


def edited_tokens(tokens: np.ndarray, number: int) -> np.ndarray:
    """About 0.4% of the tokens changed: a Jaccard similarity of about 0.94 for n-grams of 8."""
    generator = np.random.default_rng((8, number))
    tokens = tokens.copy()
    places = generator.integers(0, len(tokens), max(1, len(tokens) // 250))
    tokens[places] = generator.integers(261, 32_000, len(places))
    return tokens


def make_unit(unit: tuple[str, int, int, DeduplicationSettings]) -> None:
    folder, number, documents, settings = unit
    with open_signatures(f"{folder}/map-{number:06d}.signatures", settings) as writer:
        for document in range(number * UNIT_DOCUMENTS, min((number + 1) * UNIT_DOCUMENTS, documents)):
            writer.add(document, synthetic_document(document))


class _Measured:
    """A task that answers with the most memory that its process has had."""

    def __init__(self, work: Callable[[Any], int]) -> None:
        self._work = work

    def __call__(self, task: Any) -> float:
        self._work(task)
        return machine.peak_memory_mb()


# ---- what the parts share


def read_texts(path: str, limit_mb: float) -> list[str]:
    texts, size = [], 0
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size > limit_mb * 1e6:
                break
    return texts


def _in_process(
    title: str, work: Callable, tasks: Sequence, result: Callable, amount: Callable, unit: tuple[str, float]
) -> None:
    for task in tasks:
        work(task)


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--tokenizer", metavar="DIR", help="made by python -m data_prep tokenizer")
    parser.add_argument("--corpus", metavar="FILE", help=".jsonl.gz with the text in the field text")
    parser.add_argument("--limit-mb", type=float, default=20.0, help="text of the corpus that is read, in MB")
    parser.add_argument("--edited", type=int, default=400, help="documents of which edited copies are made")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
