"""Every benchmark: what it measures, its peers, its command, its requirements and its duration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks import rows
from tests.benchmarks.reports import Report, Row


@dataclass(frozen=True)
class Benchmark:
    """One script with the arguments of its full and its quick run.

    In an argument `{corpus}` is a folder of jsonl.gz files, `{corpus_file}` the first of them, `{tokenizer}` and
    `{shards}` the results of its preparation, and `{work}` a temporary folder. `{corpora}` becomes one argument
    NAME=PATTERN for each corpus of the comparison with peers.
    """

    name: str
    measures: str
    script: str
    rows: Callable[[Report], Sequence[Row]]
    minutes: float
    """Approximate, on two cores."""
    arguments: Sequence[str]
    quick: Sequence[str]
    packages: Sequence[str] = ()
    """Packages that must be installed, those of peers included."""
    peers_environment: bool = False
    """Whether it installs its peers into an environment of their own."""
    results_option: str = "--results"
    threads: int = 1
    results: str = field(default="")
    """File in results/; default: the name."""

    @property
    def file_name(self) -> str:
        return self.results or f"{self.name}.json"


TRANSFORMERS = ("transformers", "accelerate", "torch")

BENCHMARKS = (
    Benchmark(
        "tokenizing",
        "MB per CPU second compared with SentencePiece, tokenizers and gigatoken, on several corpora",
        "tokenizing.py",
        rows.tokenizing,
        5,
        ["--corpora", "{corpora}", "--work", "{work}"],
        ["--corpora", "{corpora}", "--work", "{work}", "--limit-mb", "1", "--runs", "1", "--vocab-size", "512"]
        + ["--contestants", "ours", "sentencepiece", "sentencepiece_paragraphs", "tokenizers"],
        packages=("sentencepiece", "tokenizers"),
        peers_environment=True,
    ),
    Benchmark(
        "preparation",
        "text to verified shards by number of workers: seconds by part, memory",
        "preparation.py",
        rows.preparation,
        6,
        ["--corpus", "{corpus}", "--tokenizer", "{tokenizer}", "--work", "{work}", "--check-ids"],
        ["--corpus", "{corpus}", "--tokenizer", "{tokenizer}", "--work", "{work}", "--limit-mb", "1", "--runs", "1"],
        packages=("sentencepiece",),
    ),
    Benchmark(
        "preparation_scale",
        "time and memory of preparation for a corpus of 1 to 16 times the size, without deduplication",
        "preparation.py",
        rows.preparation_scale,
        3,
        ["--corpus", "{corpus}", "--tokenizer", "{tokenizer}", "--work", "{work}"]
        + ["--runs", "0", "--scale", "1", "4", "16", "--scale-workers", "2"],
        ["--corpus", "{corpus}", "--tokenizer", "{tokenizer}", "--work", "{work}"]
        + ["--limit-mb", "1", "--runs", "0", "--scale", "1", "2"],
        packages=("sentencepiece",),
    ),
    Benchmark(
        "peers_preparation",
        "text to shards compared with SentencePiece alone, datatrove and datasets.map, on several corpora",
        "peers_preparation.py",
        rows.peers_preparation,
        6,
        ["--corpora", "{corpora}", "--work", "{work}"],
        ["--corpora", "{corpora}", "--work", "{work}", "--limit-mb", "1", "--runs", "1", "--vocab-size", "512"],
        peers_environment=True,
    ),
    Benchmark(
        "memory",
        "peak memory of a preparation compared with datatrove and datasets.map",
        "memory.py",
        rows.memory,
        5,
        ["--corpora", "{corpora}", "--work", "{work}"],
        ["--corpora", "{corpora}", "--work", "{work}", "--limit-mb", "1", "--runs", "1", "--vocab-size", "512"],
        peers_environment=True,
    ),
    Benchmark(
        "loader",
        "masked batches compared with DataCollatorForLanguageModeling; start-up; 100G tokens; memory",
        "loader.py",
        rows.loader,
        6,
        ["--runs", "3", "--work", "{work}"],
        ["--runs", "1", "--tokens", "20000000", "--work", "{work}"],
        packages=TRANSFORMERS,
    ),
    Benchmark(
        "resuming",
        "resume of the data position compared with datasets, StatefulDataLoader, mosaicml-streaming and Trainer",
        "resuming.py",
        rows.resuming,
        9,
        ["--work", "{work}"],
        ["--work", "{work}", "--streamed-tokens", "1000000", "--indexed-tokens", "50000000", "--runs", "1", "--peers"],
        packages=TRANSFORMERS,
        peers_environment=True,
    ),
    Benchmark(
        "encoder",
        "training steps of bert_base compared with transformers (SDPA, batches grouped by length)",
        "encoder.py",
        rows.encoder,
        10,
        ["--shards", "{shards}", "--workloads", "grouped", "full", "--modes", "eager", "--steps", "1"]
        + ["--tokens", "2048"],
        ["--smoke", "--modes", "eager", "--precision", "fp32"],
        packages=TRANSFORMERS,
        results="encoder_{device}.json",
    ),
    Benchmark(
        "encoder_compiled",
        "the same with both sides compiled",
        "encoder.py",
        rows.encoder,
        15,
        ["--shards", "{shards}", "--workloads", "grouped", "--steps", "1", "--tokens", "2048"],
        ["--smoke", "--workloads", "grouped", "--precision", "fp32"],
        packages=TRANSFORMERS,
        results="encoder_{device}_compiled.json",
    ),
    Benchmark(
        "roofline",
        "predicted throughput of an H200, kernel by kernel",
        "roofline.py",
        rows.roofline,
        1,
        [],
        ["--presets", "bert_base"],
        packages=("torch", "deepspeed"),
    ),
    Benchmark(
        "cpu_steps",
        "whole training steps on the CPU in fp32 and bf16, each with both attention kernels",
        "cpu_steps.py",
        rows.cpu_steps,
        4,
        [],
        ["--config", "tiny_cpu", "--length", "64", "--steps", "1", "--rounds", "1"],
    ),
    Benchmark(
        "training",
        "whole training loops and their memory compared with Trainer, which groups by length",
        "training.py",
        rows.training,
        20,
        ["--shards", "{shards}", "--work", "{work}"],
        ["--shards", "{shards}", "--work", "{work}", "--config", "tiny_cpu"]
        + ["--steps", "2", "--short-steps", "1", "--seeds", "1", "--length", "64", "--tokens", "256"],
        packages=TRANSFORMERS,
    ),
    Benchmark(
        "speedrun",
        "CPU seconds until a small encoder has learned so much, compared with Trainer in the style of run_mlm.py",
        "speedrun.py",
        rows.speedrun,
        5,
        ["--corpus", "pack_small={corpus}/../pack_small.jsonl.gz", "--steps", "380", "400", "--work", "{work}/speedrun"]
        + ["training.global_batch_tokens=2048", "training.micro_batch_tokens=2048"],
        ["--corpus", "corpus={corpus}/*.jsonl.gz", "--work", "{work}/speedrun", "--vocab-size", "512"]
        + ["--steps", "2", "--seeds", "1"],
        packages=TRANSFORMERS,
    ),
    Benchmark(
        "proof",
        "minimal pairs and loss after 1 to 10 epochs of 10 million words, compared with run_mlm and LTG-BERT",
        "proof.py",
        rows.proof,
        600,
        ["--corpus", "{corpus}/*.jsonl.gz", "--minimal-pairs", "{corpus}/../../evaluation/blimp"]
        + ["--work", "{work}/proof"],
        ["--corpus", "{corpus}/*.jsonl.gz", "--minimal-pairs", "{corpus}/../../evaluation/blimp"]
        + ["--work", "{work}/proof", "--words", "20000", "--vocab-size", "512", "--runs", "1"],
        packages=TRANSFORMERS,
    ),
    Benchmark(
        "ablations",
        "loss of one change at a time of the recipe: optimizers, schedule, masking, merging",
        "ablations.py",
        rows.ablations,
        240,
        ["--corpus", "{corpus}/../pack_small.jsonl.gz", "--other", "{corpus}/*.jsonl.gz", "--work", "{work}/ablations"],
        ["--corpus", "{corpus}/*.jsonl.gz", "--other", "{corpus}/*.jsonl.gz", "--work", "{work}/ablations"]
        + ["--vocab-size", "512", "--steps", "2", "--words", "20000", "--runs", "1"],
        packages=TRANSFORMERS,
    ),
    Benchmark(
        "downstream",
        "labeled tasks with a pretrained encoder, frozen and in full, compared with training from scratch",
        "downstream.py",
        rows.downstream,
        60,
        ["--labeled", "{corpus}/../labeled", "--shards", "{shards}", "--work", "{work}/downstream"],
        ["--labeled", "{corpus}/../labeled", "--shards", "{shards}", "--work", "{work}/downstream"]
        + ["--config", "tiny_cpu", "training.max_steps=2", "--rows", "40", "--seeds", "1", "--epochs", "1"]
        + ["--learning-rates", "1e-3"],
        packages=TRANSFORMERS,
        threads=0,
        results="downstream_{device}.json",
    ),
    Benchmark(
        "scaling",
        "two hosts on a limited link: gradient reduction within the backward compared with after it",
        "scaling.py",
        rows.scaling,
        7,
        ["--runs", "3"],
        ["--runs", "1", "--steps", "1", "--rows", "2"],
        packages=("deepspeed",),
    ),
    Benchmark(
        "near_duplicates",
        "near-duplicate search in a million documents: speed, memory, recall",
        "near_duplicates.py",
        rows.near_duplicates,
        3,
        ["scale", "speed", "--tokenizer", "{tokenizer}", "--corpus", "{corpus_file}", "--work", "{work}"],
        ["scale", "speed", "--tokenizer", "{tokenizer}", "--corpus", "{corpus_file}", "--work", "{work}"]
        + ["--documents", "5000", "--limit-mb", "1", "--runs", "1"],
        packages=("rensa",),
        results="near_duplicates_scale.json",
    ),
    Benchmark(
        "near_duplicates_quality",
        "recall of near-duplicates by threshold, n-gram and number of hashes",
        "near_duplicates.py",
        rows.near_duplicates_quality,
        5,
        ["quality", "--tokenizer", "{tokenizer}", "--corpus", "{corpus_file}", "--work", "{work}"],
        ["quality", "--tokenizer", "{tokenizer}", "--corpus", "{corpus_file}", "--work", "{work}"]
        + ["--limit-mb", "0.3", "--edited", "20"],
        packages=("rensa",),
    ),
)


def named(name: str) -> Benchmark | None:
    """The benchmark of that name."""
    return next((benchmark for benchmark in BENCHMARKS if benchmark.name == name), None)


def of_file(file_name: str) -> Benchmark | None:
    """The benchmark whose results a file holds."""
    for benchmark in BENCHMARKS:
        if file_name in (benchmark.file_name.format(device=device) for device in ("cpu", "cuda")):
            return benchmark
    return None
