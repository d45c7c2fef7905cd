"""Tokenizing and training a tokenizer, on one core: ours beside SentencePiece, `tokenizers` and gigatoken.

    python tests/benchmarks/tokenizing.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--contestants ours sentencepiece ...] [--limit-mb 20] [--runs 3] [--results FILE]

Every corpus has a tokenizer of its own, trained on it first. All contestants encode the same normalized texts, which
lie in memory, 1,000 per call, as `peer_contestants.py` states; of SentencePiece the faster of documents and paragraphs
counts. Each turn is a process of its own on one core, so that word caches begin empty; then it encodes the same texts
again. The figure is MB per CPU second of encoding, the median of the runs. Ours and SentencePiece must give the same
ids for every document, or this stops; of the others it says how many documents have other ids.

Training is the whole command, ours `python -m data_prep tokenizer` on the files, the peer's SentencePiece's own trainer
(what `spm_train` runs) with our settings on a text file of the same normalized lines, both with their start.
With --results, a measurement that was interrupted continues after the last corpus that is complete.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import corpus_part
import peers_environment
import reports
from contained_process import run_contained
from contestants import ENVIRONMENT, REPOSITORY, in_turns, one_core
from machine import described
from peer_contestants import ENCODERS, write_peer_tokenizer
from peers_preparation import documents_with_other_ids, normalized, rows_over_corpora, run_contestant
from reports import Row

from data_prep.text.cleaning import Normalization, normalize
from data_prep.tokenizer_training.training_sample import MAX_LINE_BYTES, lines_of

PEERS = {
    "SentencePiece": ("sentencepiece", "sentencepiece_paragraphs"),
    "tokenizers (encode_batch_fast)": ("tokenizers",),
    "gigatoken": ("gigatoken",),
}
"""Of the forms of a peer the fastest counts on every corpus."""


_SPM_TRAIN = """\
import sys, sentencepiece
sentencepiece.SentencePieceTrainer.train(
    input=sys.argv[1], model_prefix=sys.argv[2], vocab_size=int(sys.argv[3]), max_sentence_length=int(sys.argv[4]),
    model_type="bpe", character_coverage=0.9995, byte_fallback=True, normalization_rule_name="identity",
    add_dummy_prefix=False, remove_extra_whitespaces=False, input_sentence_size=0, minloglevel=2,
)
"""


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
    machine = described(*sorted(packages), python=python)
    corpora = reports.kept(arguments.results, machine).get("corpora", {})
    for name, files in corpus_part.corpora_of(arguments.corpora).items():
        if name not in corpora:
            with tempfile.TemporaryDirectory(prefix="clozeworks-tokenizing-", dir=arguments.work) as folder:
                corpora[name] = compare(name, files, arguments, python, Path(folder))
            reports.save(arguments.results, machine, {"corpora": corpora}, rows({"corpora": corpora}))


def rows(details: dict[str, Any]) -> list[Row]:
    """MB of normalized text per CPU second; of a peer only the corpora on which its ids are SentencePiece's."""
    corpora = details["corpora"]
    encoding = rows_over_corpora("tokenizing, one core", corpora, PEERS)
    again = rows_over_corpora("tokenizing the same text again, one core", corpora, PEERS, "again_cpu_seconds")
    trained = {name: found | {"runs": found["training"]} for name, found in corpora.items()}
    training = rows_over_corpora("training a tokenizer, one core", trained, {"spm_train": ("spm_train",)})
    return encoding + again + training


def compare(corpus: str, files: list[str], arguments: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Train a tokenizer, normalize the texts once, and let every contestant encode them, all `--runs` times."""
    files = corpus_part.take_part(files, arguments.limit_mb, folder / "part")
    size, lines = str(arguments.vocab_size), folder / "lines.txt"
    texts = (normalize(text, Normalization()) for path in files for text in corpus_part.read_texts(path))
    with lines.open("w", encoding="utf-8", errors="replace", newline="") as target:
        target.writelines(f"{line}\n" for line in lines_of(texts))

    def train(name: str, number: int) -> dict[str, float]:
        command = ["-c", _SPM_TRAIN, str(lines), str(folder / "spm"), size, str(MAX_LINE_BYTES)]
        if name == "ours":
            command = ["-m", "data_prep", "tokenizer", "--output", str(folder / "tokenizer")]
            command += ["--vocab-size", size, "--workers", "1", "--input", *files]
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        return run_contained([sys.executable, *command], REPOSITORY, one_core(), os.environ | ENVIRONMENT)

    training = in_turns(("ours", "spm_train"), arguments.runs, train, f"{corpus}, training, ")
    write_peer_tokenizer(folder / "tokenizer" / "tokenizer.json", folder / "peer.json")
    inputs = {form: normalized(files, form, folder) for form in ("documents", "paragraphs")}

    def run(name: str, number: int) -> dict[str, Any]:
        form = "paragraphs" if name.endswith("paragraphs") else "documents"
        return run_contestant(name, python, inputs[form], folder)

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
        "training": training,
    }


if __name__ == "__main__":
    main()
