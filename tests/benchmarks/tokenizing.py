"""Tokenizing alone, on one core: ours beside SentencePiece, `tokenizers` and gigatoken, over several corpora.

    python tests/benchmarks/tokenizing.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--contestants ours sentencepiece ...] [--limit-mb 20] [--runs 3] [--results FILE]

Every corpus has a tokenizer of its own, trained on it first. All contestants encode the same normalized texts, which
lie in memory, 1,000 per call, as `peer_contestants.py` states; of SentencePiece the faster of documents and paragraphs
counts. Each turn is a process of its own on one core, so that word caches begin empty. The figure is MB per CPU second
of encoding, the median of the runs. Ours and SentencePiece must give the same ids for every document, or this stops; of
the others it says how many documents have other ids.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import corpus_part
import peers_environment
import reports
from contestants import in_turns, train_tokenizer
from machine import described
from peer_contestants import ENCODERS, write_peer_tokenizer
from peers_preparation import documents_with_other_ids, normalized, rows_over_corpora, run_encoder
from reports import Row

PEERS = {
    "SentencePiece": ("sentencepiece", "sentencepiece_paragraphs"),
    "tokenizers (encode_batch_fast)": ("tokenizers",),
    "gigatoken": ("gigatoken",),
}
"""Of the forms of a peer the fastest counts on every corpus."""


def main() -> None:
    """Run the contestants in turns on every corpus, and print and write the figures."""
    parser = reports.parser(__doc__)
    corpus_part.add_arguments(parser)
    parser.add_argument("--contestants", nargs="+", choices=ENCODERS, default=list(ENCODERS), help="default: all")
    parser.add_argument("--runs", type=int, default=3)
    peers_environment.add_argument(parser)
    arguments = parser.parse_args()
    python = sys.executable
    if "gigatoken" in arguments.contestants:
        python = peers_environment.make_environment(arguments.environment)
    packages = {"numpy", "sentencepiece", *arguments.contestants} - {"ours", "sentencepiece_paragraphs"}
    machine, corpora = described(*sorted(packages), python=python), {}
    for name, files in corpus_part.corpora_of(arguments.corpora).items():
        with tempfile.TemporaryDirectory(prefix="clozeworks-tokenizing-", dir=arguments.work) as folder:
            corpora[name] = compare(name, files, arguments, python, Path(folder))
    reports.save(arguments.results, machine, {"corpora": corpora}, rows({"corpora": corpora}))


def rows(details: dict[str, Any]) -> list[Row]:
    """MB of normalized text per CPU second; of a peer only the corpora on which its ids are SentencePiece's."""
    return rows_over_corpora("tokenizing, one core", details["corpora"], PEERS)


def compare(corpus: str, files: list[str], arguments: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Train a tokenizer, normalize the texts once, and let every contestant encode them `--runs` times."""
    files = corpus_part.take_part(files, arguments.limit_mb, folder / "part")
    train_tokenizer(files, folder / "tokenizer", arguments.vocab_size)
    write_peer_tokenizer(folder / "tokenizer" / "tokenizer.json", folder / "peer.json")
    inputs = {form: normalized(files, form, folder) for form in ("documents", "paragraphs")}

    def run(name: str, number: int) -> dict[str, Any]:
        return run_encoder(name, python, inputs["paragraphs" if name.endswith("paragraphs") else "documents"], folder)

    runs = in_turns(arguments.contestants, arguments.runs, run, f"{corpus}, ")
    differing = documents_with_other_ids(runs)
    if differing.get("ours"):
        sys.exit(f"{corpus}: ours and SentencePiece gave different ids: the comparison is not fair")
    texts = [text for path in inputs["documents"] for text in corpus_part.read_texts(path)]
    return {
        "text_mb": sum(len(text.encode()) for text in texts) / 1e6,
        "documents": len(texts),
        "documents_with_other_ids": differing,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
