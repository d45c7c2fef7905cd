"""Every benchmark: what it measures, its command and its duration; its results are in results/NAME.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One script with its arguments.

    In an argument `{corpus}` is a folder of jsonl.gz files, `{corpus_file}` the first of them, `{tokenizer}` and
    `{shards}` the results of its preparation, and `{work}` a temporary folder. `{corpora}` becomes one argument
    NAME=PATTERN for each corpus of the comparison with peers.
    """

    name: str
    measures: str
    minutes: float
    """Approximate, on two cores."""
    inputs: str
    """Arguments of every run."""
    full: str = ""
    """Further ones of a run that measures."""
    quick: str = ""
    """Further ones of a run that only shows that everything works."""
    script: str = ""
    """Default: the name."""
    beside_itself: bool = False
    """Whether what it is compared with is this project."""

    @property
    def file(self) -> str:
        """The script's file."""
        return f"{self.script or self.name}.py"

    def arguments(self, quick: bool) -> Sequence[str]:
        """The arguments of one run."""
        return f"{self.inputs} {self.quick if quick else self.full}".split()


_PREPARATION = "--corpus {corpus} --tokenizer {tokenizer} --work {work}"
_PEERS = "--corpora {corpora} --work {work}"
_PEERS_QUICK = "--limit-mb 1 --runs 1 --vocab-size 512"
_NEAR = "--tokenizer {tokenizer} --corpus {corpus_file} --work {work}"

BENCHMARKS = (
    Benchmark(
        "tokenizing",
        "tokenizing and training a tokenizer on one core, in MB of normalized text",
        6,
        _PEERS,
        quick=f"{_PEERS_QUICK} --contestants ours sentencepiece sentencepiece_paragraphs tokenizers",
    ),
    Benchmark(
        "peers_preparation",
        "text to verified shards on one core compared with encoders alone, datatrove and datasets.map, by corpus",
        8,
        _PEERS,
        quick=_PEERS_QUICK,
    ),
    Benchmark(
        "preparation",
        "text to shards by number of workers",
        6,
        _PREPARATION,
        quick="--limit-mb 1 --runs 1",
    ),
    Benchmark(
        "preparation_scale",
        "text to shards by size, without deduplication and verification",
        3,
        _PREPARATION,
        full="--runs 0 --scale 1 4 16 --scale-workers 2",
        quick="--limit-mb 1 --runs 0 --scale 1 2",
        script="preparation",
    ),
    Benchmark(
        "near_duplicates",
        "near-duplicate search in a million documents",
        3,
        _NEAR,
        full="--parts scale speed",
        quick="--parts scale speed --documents 5000 --limit-mb 1 --runs 1",
    ),
    Benchmark(
        "near_duplicates_quality",
        "near-duplicates found, by threshold and n-gram, with 128 hashes",
        5,
        _NEAR,
        full="--parts quality",
        quick="--parts quality --limit-mb 0.3 --edited 20",
        script="near_duplicates",
    ),
    Benchmark(
        "loader",
        "masked batches of 65,536 tokens; the collator gets full rows",
        6,
        "--work {work}",
        full="--runs 3",
        quick="--runs 1 --tokens 20000000",
    ),
    Benchmark(
        "resuming",
        "the wait of a resumed run for its data",
        9,
        "--work {work}",
        quick="--streamed-tokens 1000000 --indexed-tokens 50000000 --runs 1 --peers",
    ),
    Benchmark(
        "encoder",
        "training steps in real tokens on the same documents",
        10,
        "",
        full="--shards {shards} --workloads grouped full --modes eager --steps 1 --tokens 2048 --device cpu",
        quick="--smoke --modes eager --precision fp32",
    ),
    Benchmark(
        "encoder_compiled",
        "the same with and without compilation, on documents that the peer does not group",
        15,
        "",
        full="--shards {shards} --workloads documents --steps 1 --device cpu",
        quick="--smoke --workloads documents --precision fp32",
        script="encoder",
    ),
    Benchmark(
        "cpu_steps",
        "whole steps of `tiny_cpu` and `small_cpu` at lengths 64, 128 and 512 on one core",
        4,
        "",
        quick="--config tiny_cpu --length 64 --steps 1 --rounds 1",
        beside_itself=True,
    ),
    Benchmark(
        "training",
        "presets at their own length, batch and vocabulary, with the faster form of Trainer",
        20,
        "--corpora {corpora} --work {work}",
        quick="--config tiny_cpu=2 --limit-mb 1",
    ),
    Benchmark(
        "scaling",
        "efficiency of two hosts on a link that is as slow as that of a cluster",
        7,
        "",
        quick="--runs 1 --steps 1 --rows 2",
    ),
    Benchmark(
        "starting",
        "what a rank of 512 opens, reads and waits for at its start",
        3,
        "--work {work}",
        quick="--ranks 16 --shards 40 --sampled 2",
        beside_itself=True,
    ),
    Benchmark(
        "roofline",
        "predictions, not measurements, for one H200 and one H100, kernel by kernel",
        1,
        "",
        quick="--cases bert_base",
        beside_itself=True,
    ),
    Benchmark(
        "speedrun",
        "CPU seconds until a small encoder has learned so much, compared with Trainer in the style of run_mlm.py",
        5,
        "--work {work}/speedrun",
        full="--corpus pack_small={corpus}/../pack_small.jsonl.gz --steps 380 400 --seeds 3 "
        "training.global_batch_tokens=2048 training.micro_batch_tokens=2048",
        quick="--corpus corpus={corpus}/*.jsonl.gz --vocab-size 512 --steps 2 --seeds 1",
    ),
    Benchmark(
        "proof",
        "minimal pairs and loss after 1 to 10 epochs of 10 million words, compared with run_mlm and LTG-BERT",
        600,
        "--corpus {corpus}/*.jsonl.gz --minimal-pairs {corpus}/../../evaluation/blimp --work {work}/proof",
        quick="--words 20000 --vocab-size 512 --runs 1",
    ),
    Benchmark(
        "ablations",
        "loss of one change at a time of the recipe: optimizers, schedule, masking, merging",
        240,
        "--other {corpus}/*.jsonl.gz --work {work}/ablations",
        full="--corpus {corpus}/../pack_small.jsonl.gz",
        quick="--corpus {corpus}/*.jsonl.gz --vocab-size 512 --steps 2 --words 20000 --runs 1",
        beside_itself=True,
    ),
    Benchmark(
        "masking",
        "loss, minimal pairs and fine-tuning by masking rate, and with a teacher",
        400,
        "--corpus {corpus}/*.jsonl.gz --minimal-pairs {corpus}/../../evaluation/blimp --labeled {corpus}/../labeled "
        "--work {work}/masking",
        full="--small {corpus}/../pack_small.jsonl.gz",
        quick="--small {corpus}/*.jsonl.gz --words 20000 --steps 2 --vocab-size 512 --runs 1",
        beside_itself=True,
    ),
    Benchmark(
        "adoption",
        "loss at the start with `init_from` and `adopt`, and tokens until the loss of training from nothing",
        300,
        "--work {work}/adoption",
        full="--corpus {corpus}/../pack_small.jsonl.gz --other {corpus}/msdocs_other-00.jsonl.gz",
        quick="--corpus {corpus}/*.jsonl.gz --other {corpus}/*.jsonl.gz --vocab-sizes 512 640 --base-steps 2 --steps 2 "
        "--seeds 1 --runs 1",
        beside_itself=True,
    ),
    Benchmark(
        "causal",
        "loss of masked tokens after next tokens and masked ones, compared with masked ones alone",
        30,
        "--work {work}/causal",
        full="--corpus {corpus}/../pack_small.jsonl.gz",
        quick="--corpus {corpus}/*.jsonl.gz --vocab-size 512 --steps 40 --runs 1",
        beside_itself=True,
    ),
    Benchmark(
        "distillation",
        "loss with and without a teacher of twice the width at equal tokens",
        45,
        "--work {work}/distillation",
        full="--corpus {corpus}/../pack_small.jsonl.gz",
        quick="--corpus {corpus}/*.jsonl.gz --vocab-size 512 --steps 2 --runs 2",
        beside_itself=True,
    ),
    Benchmark(
        "domain",
        "losses and accuracy of an encoder before and after it is continued on law",
        40,
        "--work {work}/domain",
        full="--general {corpus}/[agmw]*-00.jsonl.gz --law {corpus}/dc_law-00.jsonl.gz",
        quick="--general {corpus}/*.jsonl.gz --law {corpus}/*.jsonl.gz --words 20000 --vocab-size 512 --base-steps 2 "
        "--steps 2 --epochs 1 --runs 2",
        beside_itself=True,
    ),
    Benchmark(
        "domain_few",
        "accuracy of this encoder with few labels, before and after it is continued on law",
        30,
        "--few --work {work}/domain",
        full="--general {corpus}/[agmw]*-00.jsonl.gz --law {corpus}/dc_law-00.jsonl.gz",
        quick="--general {corpus}/*.jsonl.gz --law {corpus}/*.jsonl.gz --words 20000 --vocab-size 512 --base-steps 2 "
        "--steps 2 --epochs 1 --draws 1 --runs 2",
        script="domain",
        beside_itself=True,
    ),
    Benchmark(
        "extension",
        "losses in rows of 128 and 512 tokens of an encoder of 128, extended to 512, and of one of 512 from the start",
        40,
        "--work {work}/extension",
        full="--corpus {corpus}/../pack_small.jsonl.gz --seeds 3",
        quick="--corpus {corpus}/*.jsonl.gz --vocab-size 512 --base-steps 2 --steps 5 --runs 3",
        beside_itself=True,
    ),
    Benchmark(
        "retrieval",
        "titles that find their abstracts before and after `finetune --task embedding`",
        10,
        "--work {work}/retrieval",
        full="--pairs {corpus}/arxiv_abstracts-00.jsonl.gz --base {corpus}/../pack_small.jsonl.gz",
        quick="--pairs {corpus}/*.jsonl.gz --base {corpus}/*.jsonl.gz --vocab-size 512 --base-steps 2 --train 40 "
        "--valid 10 --test 10 --epochs 1 --runs 2",
        beside_itself=True,
    ),
    Benchmark(
        "downstream",
        "accuracy on labeled tasks with a pretrained encoder, frozen and in full; means of the seeds",
        60,
        "--labeled {corpus}/../labeled --shards {shards} --work {work}/downstream",
        quick="--config tiny_cpu training.max_steps=2 --rows 40 --seeds 1 --epochs 1 --learning-rates 1e-3",
        beside_itself=True,
    ),
)
