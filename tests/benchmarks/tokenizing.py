"""Tokenizing alone, on one core: ours beside SentencePiece, `tokenizers` and gigatoken, over several corpora.

    python tests/benchmarks/tokenizing.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--contestants ours sentencepiece ...] [--limit-mb 20] [--runs 3] [--results FILE]

Every corpus has a tokenizer of its own, trained on it first. All contestants encode the same normalized texts, each in
the form that is its fastest:

- ours: `encode_many` over documents;
- sentencepiece, sentencepiece_paragraphs: `encode` over documents, and over their paragraphs, since it slows down
  with the length of a text; the faster of both counts;
- tokenizers: `encode_batch_fast` over documents, with our tokenizer.json without its normalizer and special tokens;
- gigatoken: `encode_batch` over documents, with the same file.

Each turn is a process of its own on one core that finds the texts in memory, 1,000 per call, so that word
caches begin empty. The figure is MB per CPU second, the median of the runs. Ours and SentencePiece must give the same
ids for every document, or this stops; of the others it says how many documents have other ids.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus_part
import numpy as np
import peers_environment
import reports
from contestants import answer_of, in_turns, median, one_core, train_tokenizer
from machine import described, peak_memory_mb
from peer_contestants import write_peer_tokenizer
from reports import Row

CONTESTANTS = ("ours", "sentencepiece", "sentencepiece_paragraphs", "tokenizers", "gigatoken")
_PACKAGES = {"ours": "numpy", "sentencepiece_paragraphs": "sentencepiece"}
_FORMS = {"sentencepiece_paragraphs": "paragraphs"}
_BATCH_TEXTS = 1000
Encode = Callable[[list[str]], list[Any]]


def main() -> None:
    """Run the contestants in turns on every corpus, and print and write the figures."""
    arguments = _parse()
    if arguments.child:
        print(json.dumps(run_contestant(arguments.child, Path(arguments.folder))))
        return
    python = sys.executable
    if "gigatoken" in arguments.contestants:
        python = peers_environment.make_environment(arguments.environment)
    packages = {_PACKAGES.get(name, name) for name in arguments.contestants}
    machine = described(*sorted(packages), python=python)
    corpora = {}
    for name, files in corpus_part.corpora_of(arguments.corpora).items():
        with tempfile.TemporaryDirectory(prefix="clozeworks-tokenizing-", dir=arguments.work) as folder:
            corpora[name] = compare(name, files, arguments, python, Path(folder))
    reports.save(arguments.results, machine, {"corpora": corpora}, rows({"corpora": corpora}))


PEERS = {
    "SentencePiece": ("sentencepiece", "sentencepiece_paragraphs"),
    "tokenizers (encode_batch_fast)": ("tokenizers",),
    "gigatoken": ("gigatoken",),
}
"""Of the forms of a peer the fastest counts on every corpus."""


def rows(details: dict[str, Any]) -> list[Row]:
    """MB of normalized text per CPU second; of a peer only the corpora on which its ids are SentencePiece's."""
    return rows_over_corpora("tokenizing, one core", details["corpora"], PEERS)


def rows_over_corpora(name: str, corpora: dict[str, Any], peers: Mapping[str, Sequence[str]]) -> list[Row]:
    """A row for each peer: MB per CPU second over all corpora on which it gives the right ids, and each's ratio."""
    found = []
    for peer, forms in peers.items():
        equal = {corpus: each for corpus, each in corpora.items() if all(has_equal_ids(each, form) for form in forms)}
        if not equal:
            continue
        ours, theirs = (
            {corpus: min(median(each["runs"][form], "cpu_seconds") for form in those) for corpus, each in equal.items()}
            for those in (("ours",), forms)
        )
        megabytes = sum(each["text_mb"] for each in equal.values())
        speeds = (megabytes / sum(seconds.values()) for seconds in (ours, theirs))
        runs = min(len(each["runs"]["ours"]) for each in equal.values())
        ratios = {corpus: theirs[corpus] / ours[corpus] for corpus in equal}
        found.append(Row(name, *speeds, peer, "MB/CPU s", "more", runs, ratios))
    return found


def has_equal_ids(found: dict[str, Any], form: str) -> bool:
    """Whether a contestant gave SentencePiece's ids for every document; those that write no ids are not asked."""
    compared = found["documents_with_other_ids"]
    return form in found["runs"] and (form not in ("tokenizers", "gigatoken") or compared.get(form) == 0)


def compare(corpus: str, files: list[str], arguments: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Train a tokenizer, normalize the texts once, and let every contestant encode them `--runs` times."""
    files = corpus_part.take_part(files, arguments.limit_mb, folder / "part")
    train_tokenizer(files, folder / "tokenizer", arguments.vocab_size)
    write_peer_tokenizer(folder / "tokenizer" / "tokenizer.json", folder / "peer.json")
    texts = _write_texts(files, folder)
    checksums: dict[str, list[int]] = {}

    def run(name: str, number: int) -> dict[str, Any]:
        command = [python, __file__, "--child", name, "--folder", str(folder)]
        found: dict[str, Any] = answer_of(command, one_core())
        checksums[name] = found.pop("checksums")
        return found

    runs = in_turns(arguments.contestants, arguments.runs, run, f"{corpus}, ")
    differing = {
        name: sum(one != other for one, other in zip(found, checksums["sentencepiece"], strict=True))
        for name, found in checksums.items()
    }
    if any(differing[name] for name in CONTESTANTS[:3]):
        sys.exit(f"{corpus}: ours and SentencePiece gave different ids: the comparison is not fair")
    return {
        "text_mb": sum(len(text.encode()) for text in texts) / 1e6,
        "documents": len(texts),
        "documents_with_other_ids": differing,
        "runs": runs,
    }


def run_contestant(name: str, folder: Path) -> dict[str, Any]:
    """Encode the texts, timed, and checksum every document's ids."""
    documents: list[list[str]] = json.loads((folder / f"{_FORMS.get(name, 'documents')}.json").read_text("utf-8"))
    texts = [text for document in documents for text in document]
    encode = _ENCODERS[name](folder)
    encode(["a"])  # what is imported at the first call
    load, cpu_started_at, started_at = os.getloadavg()[0], time.process_time(), time.perf_counter()
    encodings = [encode(texts[first : first + _BATCH_TEXTS]) for first in range(0, len(texts), _BATCH_TEXTS)]
    seconds, cpu_seconds = time.perf_counter() - started_at, time.process_time() - cpu_started_at
    ids = (np.asarray(found, np.uint32) for batch in encodings for found in batch)
    joined = [np.concatenate([next(ids) for _ in document]) for document in documents]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": sum(map(len, joined)),
        "checksums": [zlib.crc32(found.tobytes()) for found in joined],
        "peak_mb": peak_memory_mb(),
        "load_before": load,
    }


def _ours(folder: Path) -> Encode:
    from data_prep.tokenizer.tokenizer import Tokenizer

    return Tokenizer.load(folder / "tokenizer").encode_many


def _sentencepiece(folder: Path) -> Encode:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer" / "tokenizer.model"))
    return lambda texts: processor.encode(texts, num_threads=1)


def _tokenizers(folder: Path) -> Encode:
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(folder / "peer.json"))
    return lambda texts: [found.ids for found in encoder.encode_batch_fast(texts, add_special_tokens=False)]


def _gigatoken(folder: Path) -> Encode:
    import gigatoken

    encoder = gigatoken.Tokenizer.from_json((folder / "peer.json").read_bytes())
    return lambda texts: encoder.encode_batch(texts, parallel=False)


_ENCODERS = dict(zip(CONTESTANTS, (_ours, _sentencepiece, _sentencepiece, _tokenizers, _gigatoken), strict=True))


def _write_texts(files: list[str], folder: Path) -> list[str]:
    """Write the normalized documents, whole and by paragraph; returns them whole."""
    from data_prep.text.cleaning import normalize
    from data_prep.tokenizer.tokenizer import Tokenizer

    rules = Tokenizer.load(folder / "tokenizer").normalization
    texts = [text for path in files for text in corpus_part.read_texts(path) if text.strip()]
    forms = {
        "documents": [[normalize(text, rules)] for text in texts],
        "paragraphs": [[normalize(part, rules) for part in text.split("\n") if part.strip()] for text in texts],
    }
    for form, documents in forms.items():
        (folder / f"{form}.json").write_text(json.dumps(documents, ensure_ascii=False), encoding="utf-8")
    return [text for (text,) in forms["documents"]]


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    names = parser.add_mutually_exclusive_group(required=True)
    corpus_part.add_argument(names, required=False)
    names.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="default: all")
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--limit-mb", type=float, metavar="MB", help="about so much text of each (default: all of it)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    peers_environment.add_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
