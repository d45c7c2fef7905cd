"""Preparation beside what a user would pick instead: same text, vocabulary and core, over several corpora.

    python tests/benchmarks/peers_preparation.py --corpora english=pack_small.jsonl.gz chinese=zh_wikipedia.jsonl.gz
        [--limit-mb 20] [--runs 3] [--results FILE]

Contestants, each a process of its own bound to one core, in turns:

- ours: `python -m data_prep shards`, whole, and `verify` of what it wrote: from jsonl.gz to verified shards, with exact
  deduplication, sentence boundaries, global shuffle and checksums;
- ours_without_sentences: the same with `documents.sentences=none`;
- sentencepiece, sentencepiece_paragraphs: `encode` alone, over documents and over their paragraphs, which are read and
  normalized beforehand, ids as arrays; the faster of both counts;
- tokenizers, gigatoken: `encode_batch_fast` and `encode_batch` alone, over documents that are read and normalized
  beforehand; gigatoken reads tokenizer.model, and has texts and ids as arrays. Their ids are compared with
  SentencePiece's document by document, and the figure of a corpus counts only if all are equal;
- datatrove: JsonlReader and DocumentTokenizer, one worker, no shuffle, to its binary files;
- datasets, datasets_gigatoken: `load_dataset("json")` and `map(batched=True)` in one process, from jsonl.gz to arrow
  files, with `tokenizers` (encode_batch_fast), and in arrow format with gigatoken.

Every corpus has a tokenizer of its own, trained on every third document, which is not measured. The peers read text
that was normalized beforehand, untimed, and tokenizer.json without its normalizer and special tokens: the same ids with
the least work. The figure is CPU seconds (of SentencePiece, tokenizers and gigatoken: of encoding alone) of a process
that has done the same for two documents before, so that importing does not count for anybody; the CPU seconds until
then are recorded beside it. What ours takes by stage is measured
in a process of its own (`preparation_stages.py`). MB are those of the raw text. Memory is that of the largest process.
With --results, a measurement that was interrupted continues after the last corpus that is complete.
"""

from __future__ import annotations

import argparse
import gzip
import json
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus_part
import peers_environment
import reports
from contained_process import run_contained
from contestants import ENVIRONMENT, REPOSITORY, answer_of, in_turns, median, one_core, train_tokenizer
from machine import described
from peer_contestants import write_peer_tokenizer
from reports import Row

CONTESTANTS = (
    *("ours", "ours_without_sentences", "sentencepiece", "sentencepiece_paragraphs", "tokenizers", "gigatoken"),
    *("datatrove", "datasets", "datasets_gigatoken"),
)
ENCODERS_ALONE = {
    "SentencePiece's encode alone": ("sentencepiece", "sentencepiece_paragraphs"),
    "tokenizers' encode_batch_fast alone": ("tokenizers",),
    "gigatoken's encode_batch alone": ("gigatoken",),
}
"""Of the forms of a peer the fastest counts on every corpus."""
_ALONE = {form for forms in ENCODERS_ALONE.values() for form in forms}
PIPELINES = {
    "datatrove": ("datatrove",),
    "datasets.map + tokenizers": ("datasets",),
    "datasets.map in arrow format + gigatoken": ("datasets_gigatoken",),
    "this project without sentence boundaries": ("ours_without_sentences",),
}
"""What reads files and writes files, as ours does."""
_OURS = {"ours": "preparation", "ours_without_sentences": "preparation_without_sentences"}
_IDS_COMPARED = {"tokenizers": "tokenizers", "gigatoken": "gigatoken", "datasets_gigatoken": "gigatoken"}
"""By contestant: whose ids prove that its own are SentencePiece's."""
_FORMS = {"ours": "ours", "ours_without_sentences": "ours", "sentencepiece_paragraphs": "paragraphs"}
PACKAGES = ("numpy", "sentencepiece", "datatrove", "datasets", "tokenizers", "gigatoken")
_TRAINING_PART = 3  # of so many documents one trains the tokenizer and is not measured
_CONTESTANTS_SCRIPT, _STAGES_SCRIPT = (
    Path(__file__).with_name(f"{name}.py") for name in ("peer_contestants", "preparation_stages")
)


def main() -> None:
    """Run the contestants in turns on every corpus, and print and write the figures."""
    arguments = _parse()
    python = peers_environment.make_environment(arguments.environment)
    machine = described(*PACKAGES, python=python)
    corpora = reports.kept(arguments.results, machine).get("corpora", {})
    for name, files in corpus_part.corpora_of(arguments.corpora).items():
        if name not in corpora:
            with tempfile.TemporaryDirectory(prefix="clozeworks-peers-", dir=arguments.work) as folder:
                corpora[name] = compare(name, files, arguments, python, Path(folder))
            reports.save(arguments.results, machine, {"corpora": corpora}, rows({"corpora": corpora}))


def rows(details: dict[str, Any]) -> list[Row]:
    """MB per CPU second beyond starting, and memory of the largest process, each with the ratios by corpus."""
    corpora = details["corpora"]
    found = rows_over_corpora("text to verified shards, one core", corpora, ENCODERS_ALONE | PIPELINES)
    for peer, (form,) in PIPELINES.items():
        if not all(form in each["runs"] for each in corpora.values()):
            continue  # which earlier measurements did not include
        ours, theirs = (
            {corpus: median(each["runs"][name], "peak_mb") for corpus, each in corpora.items()}
            for name in ("ours", form)
        )
        runs = min(len(each["runs"][form]) for each in corpora.values())
        ratios = {corpus: theirs[corpus] / ours[corpus] for corpus in corpora}
        most = (max(ours.values()), max(theirs.values()))
        found.append(Row("memory of preparation, the most", *most, peer, "MB", "less", runs, ratios))
    return found


def rows_over_corpora(
    name: str, corpora: dict[str, Any], peers: Mapping[str, Sequence[str]], seconds: str = "cpu_seconds"
) -> list[Row]:
    """A row for each peer: MB per CPU second over all corpora on which it gives the right ids, and each's ratio."""
    found = []
    for peer, forms in peers.items():
        equal = {corpus: each for corpus, each in corpora.items() if all(has_equal_ids(each, form) for form in forms)}
        if not equal:
            continue
        ours, theirs = (
            {corpus: min(median(each["runs"][form], seconds) for form in those) for corpus, each in equal.items()}
            for those in (("ours",), forms)
        )
        megabytes = sum(each["text_mb"] for each in equal.values())
        speeds = (megabytes / sum(taken.values()) for taken in (ours, theirs))
        runs = min(len(each["runs"]["ours"]) for each in equal.values())
        ratios = {corpus: theirs[corpus] / ours[corpus] for corpus in equal}
        found.append(Row(name, *speeds, peer, "MB/CPU s", "more", runs, ratios))
    return found


def has_equal_ids(found: dict[str, Any], form: str) -> bool:
    """Whether a contestant gave SentencePiece's ids for every document; those that write no ids are not asked."""
    compared = found["documents_with_other_ids"]
    return form in found["runs"] and (form not in _IDS_COMPARED or compared.get(_IDS_COMPARED[form]) == 0)


def compare(corpus: str, files: list[str], arguments: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Train a tokenizer, and run every contestant `--runs` times on the corpus and on its first two documents."""
    files = corpus_part.take_part(files, arguments.limit_mb, folder / "corpus")
    texts = [text for path in files for text in corpus_part.read_texts(path)]
    training = _write_jsonl(texts[::_TRAINING_PART], folder / "training.jsonl.gz")
    texts = [text for number, text in enumerate(texts) if number % _TRAINING_PART]
    files = [_write_jsonl(texts, folder / "measured.jsonl.gz")]
    train_tokenizer([training], folder / "tokenizer", arguments.vocab_size)
    write_peer_tokenizer(folder / "tokenizer" / "tokenizer.json", folder / "peer.json")
    two = [_write_jsonl(texts[:2], folder / "two.jsonl.gz")]
    inputs = {"ours": (two[0], files)} | {
        form: (normalized(two, form, folder)[0], normalized(files, form, folder))
        for form in ("documents", "paragraphs")
    }

    def run(name: str, number: int) -> dict[str, Any]:
        first, whole = inputs[_FORMS.get(name, "documents")]
        return run_contestant(name, python, whole, folder, None if name in _ALONE else first)

    runs = in_turns(CONTESTANTS, arguments.runs, run, f"{corpus}, ")
    _check_counts(runs, len(texts))
    differing = documents_with_other_ids(runs)
    text_mb = sum(len(text.encode(errors="replace")) for text in texts) / 1e6
    stages = answer_of([python, str(_STAGES_SCRIPT), str(folder / "tokenizer"), *files], one_core())
    return {
        "text_mb": text_mb,
        "documents": len(texts),
        "documents_with_other_ids": differing,
        "runs": runs,
        "stages": stages,
    }


def run_contestant(name: str, python: str, files: list[str], folder: Path, first: str | None = None) -> dict[str, Any]:
    """Run one contestant on one core: CPU seconds, memory of its largest process, tokens and documents.

    The CPU seconds of encoders are those of encoding alone; those of ours include `verify`.
    """
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)
    tokenizer = folder / ("peer.json" if name in ("tokenizers", "datatrove", "datasets") else "tokenizer")
    command = [python, str(_CONTESTANTS_SCRIPT), name, str(tokenizer), str(output), *files]
    if name in _OURS and first is not None:
        command[0], command[2] = sys.executable, _OURS[name]
    if first is not None:
        shutil.rmtree(f"{output}-first", ignore_errors=True)
        command += ["--first", first]
    figures = _contained(command, folder)
    return figures | reports.read(Path(f"{output}-result.json"))


def _contained(command: list[str], folder: Path) -> dict[str, Any]:
    environment = os.environ | ENVIRONMENT | {"HF_HOME": str(folder / "home")}
    return dict(run_contained(command, REPOSITORY, one_core(), environment))


def normalized(files: list[str], form: str, folder: Path) -> list[str]:
    """Copies of the files with their text normalized as the tokenizer requires; a paragraph a line, or a document."""
    from data_prep.text.cleaning import normalize
    from data_prep.tokenizer.tokenizer import Tokenizer

    rules = Tokenizer.load(folder / "tokenizer").normalization
    (folder / form).mkdir(exist_ok=True)
    copies = []
    for path in files:
        texts = corpus_part.read_texts(path)
        if form == "paragraphs":
            texts = (part for text in texts for part in text.split("\n") if part.strip())
        copies.append(_write_jsonl((normalize(text, rules) for text in texts), folder / form / os.path.basename(path)))
    return copies


def _write_jsonl(texts: Iterable[str], path: Path) -> str:
    with gzip.open(path, "wt", encoding="utf-8") as target:
        target.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return str(path)


def _check_counts(runs: dict[str, list[dict[str, Any]]], documents: int) -> None:
    """Everyone saw every document and made the same tokens, except for the documents that ours drops."""
    sentencepiece = runs["sentencepiece"][0]["tokens"]
    for name, results in runs.items():
        for run in results:
            if name == "sentencepiece_paragraphs":
                run["documents"] = documents  # it was given paragraphs
            seen = run["documents"] + run.get("dropped", 0)
            if seen != documents:
                sys.exit(f"{name} saw {seen} of {documents} documents: the comparison is not fair")
            allowed = 0.05 if run.get("dropped") else 0.001
            if abs(run["tokens"] / sentencepiece - 1) > allowed:
                sys.exit(f"{name} made {run['tokens']} tokens and SentencePiece {sentencepiece}: not the same work")


def documents_with_other_ids(runs: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Take the digests out of the results; return how many documents have other ids than SentencePiece's, the most."""
    digests = {
        name: [run.pop("ids_sha256") for run in results if "ids_sha256" in run] for name, results in runs.items()
    }
    expected = digests["sentencepiece"][0]
    return {
        name: max(sum(map(operator.ne, each, expected)) for each in found)
        for name, found in digests.items()
        if found and name != "sentencepiece_paragraphs"
    }


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    corpus_part.add_arguments(parser)
    parser.add_argument("--runs", type=int, default=3)
    peers_environment.add_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
