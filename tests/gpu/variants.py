"""Whole training steps with and without one thing, measured as `launch/benchmark.py` does, all in one process.

    python tests/gpu/variants.py --results FILE [--toy] NAME ...        appends a JSON line per variant to FILE

One process pays once for imports and the compiler's caches. What was lost by a defect that has no switch is brought
back by a patch here, never by an option of the product.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from launch import benchmark_session
from launch.benchmark import parse_arguments, read_config
from launch.benchmark_session import BenchmarkSession, open_documents
from trainer.benchmark.measurement import Training, free_memory
from trainer.config.families.modernbert import ModernBert
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import DistributedSettings
from trainer.data import workers
from trainer.data.batch import Batch
from trainer.distributed.process_group import Ranks, all_reduce_sum, initialize_distributed, shut_down
from trainer.model.numerics import with_compilation_decided

WORST_SEQUENCES_PER_ROW = 171
"""Of 512 positions: the capacity before it followed the micro-batch, on a corpus with a one-token document."""
TOY = ["model.num_hidden_layers=1", "model.hidden_size=64", "model.num_attention_heads=2"]
TOY += ["model.intermediate_size=64", "data.num_workers=1"]
TOY_DIVISOR = 32
Switch = Callable[[RunConfig], AbstractContextManager[object]]


@contextlib.contextmanager
def full_capacity(config: RunConfig) -> Iterator[None]:
    """Room for as many sequences as the rows could hold at worst."""
    (stage,) = config.stages
    most = WORST_SEQUENCES_PER_ROW * stage.micro_batch_tokens // 512
    with patch("trainer.data.batch.sequence_capacity", lambda num_sequences: max(num_sequences, most)):
        yield


@contextlib.contextmanager
def token_type_lookup(config: RunConfig) -> Iterator[None]:
    """The token types of every position are looked up, where no segment B exists too."""
    unpack = Batch.unpack

    def without_knowledge(packed: torch.Tensor) -> Batch:
        batch = unpack(packed)
        object.__setattr__(batch, "has_segment_b", True)
        return batch

    with patch.object(Batch, "unpack", without_knowledge):
        yield


@contextlib.contextmanager
def short_prefetch(config: RunConfig) -> Iterator[None]:
    """Four micro-batches per worker lie ready, however many a step takes."""
    make = workers.DataLoader

    def with_four(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **options | ({"prefetch_factor": 4} if options["num_workers"] else {}))

    with patch.object(workers, "DataLoader", with_four):
        yield


@contextlib.contextmanager
def flash_attention_3(config: RunConfig) -> Iterator[None]:
    """FlashAttention 3, where this environment has it."""
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


@contextlib.contextmanager
def counts_on_device(config: RunConfig) -> Iterator[None]:
    """The counts of a step travel over the device's group, so that its queue drains."""

    def on_device(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
        total = all_reduce_sum(values, ranks).cpu()
        return lambda: total

    with patch("trainer.loop.step.begin_sum_on_hosts", on_device):
        yield


class Unavailable(Exception):
    """This environment has not what a variant tries."""


@dataclass(frozen=True)
class Variant:
    """A preset, what is set differently (after options of `launch/benchmark.py`), and what is patched."""

    preset: str
    overrides: tuple[str, ...] = ()
    switch: Switch | None = None


def _large(*overrides: str, switch: Switch | None = None) -> Variant:
    return Variant("bert_large", overrides, switch)


PAIRS = "data.sentence_pairs=next_sentence"
FULL_BATCH = "training.global_batch_tokens=1048576"
DETERMINISTIC = "training.deterministic=true"
"""Set when a process starts, so that its variants agree in it."""
FIRST_STAGE = ("training.stages=[]", "training.max_steps=1000", "schedule.warmup_tokens=null")
FIRST_STAGE += ("data.sequence_length=1024", "training.micro_batch_tokens=98304", "training.global_batch_tokens=196608")
"""Of modernbert_base alone: the batch of a stage cannot be set by itself."""
LONG_ROWS = ("data.sequence_length=8192",)
MODERN_WITH_SEGMENTS = (
    *(f"model.{name}={json.dumps(value)}" for name, value in ModernBert.defaults.items() if name != "type_vocab_size"),
    *("model.family=custom", "model.type_vocab_size=2", PAIRS),
)
"""ModernBERT has neither segments nor a head for pairs: its layers with those of BERT."""
VARIANTS = {
    "bert_large": _large(),
    "bert_large pairs": _large(PAIRS),
    "bert_large eager": _large("training.compile=false"),
    "bert_large full capacity": _large(switch=full_capacity),
    "bert_large StableAdamW": _large("optimizer.name=stable_adamw"),
    "bert_large deterministic": _large(DETERMINISTIC),
    "bert_large cold compile": _large(),
    "bert_large warm compile": _large(),
    "bert_large 16384": _large("training.micro_batch_tokens=16384"),
    "bert_large 32768": _large("training.micro_batch_tokens=32768"),
    "bert_large throughput timer": _large("deepspeed={timers: {throughput: {enabled: true}}}"),
    "bert_large stage 2 overlap": _large("zero.stage=2", "deepspeed={zero_optimization: {overlap_comm: true}}"),
    "bert_large token-type lookup": _large(switch=token_type_lookup),
    "bert_large FA3": _large(switch=flash_attention_3),
    "bert_large full batch": _large(FULL_BATCH),
    "bert_large full batch, short prefetch": _large(FULL_BATCH, switch=short_prefetch),
    "bert_base": Variant("bert_base"),
    "bert_base pairs": Variant("bert_base", (PAIRS,)),
    "modernbert_base": Variant("modernbert_base", FIRST_STAGE),
    "modern_large": Variant("modern_large"),
    "modern_large 8192": Variant("modern_large", LONG_ROWS),
    "modern_large 8192 whole rows": Variant(
        "modern_large", ("--document-tokens", "8190", "--document-sigma", "0", *LONG_ROWS)
    ),
    "modern_large pairs": Variant("modern_large", MODERN_WITH_SEGMENTS),
    "ranks": Variant("bert_base"),
    "ranks, counts on device": Variant("bert_base", switch=counts_on_device),
    "ranks, stage 2 overlap": Variant(
        "bert_base", ("zero.stage=2", "deepspeed={zero_optimization: {overlap_comm: true}}")
    ),
}


def arguments_of(variant: Variant, steps: int, toy: bool) -> list[str]:
    """The command line of `launch/benchmark.py` for a variant; a toy has one narrow layer and 1/32 of the tokens."""
    overrides = ["training.global_batch_tokens=131072", *variant.overrides]
    if toy:
        micro = ["training.micro_batch_tokens=32768"]
        scaled = [re.sub(r"(_tokens|_length)=(\d+)", _divided, word) for word in micro + overrides]
        overrides = [*TOY, "model.max_position_embeddings=512", "data.sequence_length=512", *scaled]
    return ["--config", variant.preset, "--steps", str(steps), "--warmup-steps", "1" if toy else "3", *overrides]


def _divided(found: re.Match[str]) -> str:
    return f"{found[1]}={int(found[2]) // TOY_DIVISOR}"


def measure(variant: Variant, steps: int, toy: bool, ranks: Ranks, profile: Path | None) -> dict[str, Any]:
    """Figures of a variant, and the seconds of its start (model, engine, compilation); what it raises comes through."""
    words = arguments_of(variant, steps, toy) + (["--profile", str(profile)] if profile else [])
    arguments = parse_arguments(words)
    config, _ = with_compilation_decided(read_config(arguments), ranks)
    switch = variant.switch(config) if variant.switch else contextlib.nullcontext()
    starts = []

    def start(*of_training: Any, **options: Any) -> Training:
        started_at = time.monotonic()
        training = Training(*of_training, **options)
        starts.append(round(time.monotonic() - started_at, 1))
        return training

    timed = patch.object(benchmark_session, "Training", start)
    with switch, timed, tempfile.TemporaryDirectory(prefix="clozeworks-variant-") as folder:
        shard_sets, _ = open_documents(config, arguments, ranks, Path(folder))
        point = BenchmarkSession(config, arguments, ranks, shard_sets).measure()
    described = {"compiled": config.training.compile, "start_seconds": starts[0], "ranks": ranks.world_size}
    return described | asdict(point)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=VARIANTS, metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile the last variant")
    parser.add_argument("--steps", type=int, default=6, metavar="N")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: does it run at all")
    arguments = parser.parse_args()
    deterministic = {DETERMINISTIC in VARIANTS[name].overrides for name in arguments.names}
    if len(deterministic) > 1:
        parser.error("a process is deterministic or not: measure these variants in two")
    ranks = initialize_distributed(DistributedSettings(), deterministic.pop())
    for name in arguments.names:
        started_at = time.monotonic()
        profile = arguments.profile if name == arguments.names[-1] else None
        try:
            found = measure(VARIANTS[name], arguments.steps, arguments.toy, ranks, profile)
        except Unavailable as error:
            found = {"unavailable": str(error)[:500]}
        except Exception as error:  # noqa: BLE001 - the other variants are tried all the same
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        free_memory()
        row = {"name": name, "seconds": round(time.monotonic() - started_at, 1), "device": ranks.device.type} | found
        if ranks.is_first:
            with arguments.results.open("a") as sink:
                sink.write(json.dumps(row) + "\n")
    shut_down(ranks)


if __name__ == "__main__":
    main()
