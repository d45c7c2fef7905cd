"""The encoder beside transformers' `BertForPreTraining`, on documents of the same lengths: figures, not tests.

    python tests/benchmarks/encoder.py --config bert_base --shards DIR                 (CPU)
    python tests/benchmarks/encoder.py --config bert_large --compile --results FILE    (CUDA: the whole table)

Both train the same sizes (BERT with both heads, no attention dropout) in the same loop (`PlainEngine`: weights in
--precision, master weights and AdamW in fp32), in turns in one process. Batches lie on the device before the clock
starts: loading has a benchmark of its own. Tokens are real ones, [CLS] and [SEP] included, padding not. Workloads:

- documents: each of its own length, cut at --length; ours packs them, the peer pads every batch to its longest (to a
  multiple of 8), in random order, as `DataCollatorForLanguageModeling` gives them;
- grouped: the same, and the peer's batches hold documents of like length (Trainer's `group_by_length`);
- full: every row is one document of exactly --length places, so that nobody pads.

The peer is transformers' model with SDPA; "compiled" is torch.compile of its whole model and of our blocks. Without
--shards the documents' lengths are log-normal, as the output says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast, DataCollatorForLanguageModeling

from data_prep.settings import load_settings
from data_prep.special_tokens import CLS_TOKEN_ID, SEP_TOKEN_ID, SPECIAL_TOKENS
from trainer.benchmark.measure import StepClock, free_memory
from trainer.benchmark.plain_engine import PlainEngine
from trainer.benchmark.profiling import profile_steps, top_operations
from trainer.benchmark.report import describe_machine, device_name, operation_lines
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config import RunConfig
from trainer.data.batch import Batch
from trainer.data.loader import Loader, Position
from trainer.data.packing import document_starts
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.model.hugging_face import hugging_face_config
from trainer.model.pretraining import PretrainingModel
from trainer.model.sizes import flops_per_token
from trainer.throughput import data_sheet_flops

WORKLOADS = ("documents", "grouped", "full")
PADDED_TO_MULTIPLE_OF = 8
Loss = Callable[[PlainEngine], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One micro-batch on the device: its loss, a mean over the predicted tokens, and the real tokens in it."""

    compute_loss: Loss
    num_tokens: int
    num_places: int


class Contestant:
    """A model in training; `steps` are its batches of the current workload."""

    def __init__(self, name: str, engine: PlainEngine, only_backward: bool) -> None:
        self.name, self.engine, self._only_backward = name, engine, only_backward
        self.steps: list[Step] = []

    def run(self) -> float:
        """Train on all batches once; returns seconds."""
        clock = StepClock(self.engine.device)
        clock.mark()
        for step in self.steps:
            self.engine.backward(step.compute_loss(self.engine))
            if self._only_backward:
                self.engine.clear_gradients()
            else:
                self.engine.step()
        clock.mark()
        return sum(clock.seconds())


def main() -> None:
    arguments = _parse()
    device = torch.device("cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu")
    config = _config(arguments, device)
    report: dict[str, Any] = machine.described("torch", "transformers", "numpy")
    report |= {"device": describe_machine(device), "model": config.model.model_dump(mode="json")}
    report |= {"length": config.data.sequence_length, "micro_batch_tokens": arguments.tokens}
    report |= {"precision": config.training.precision, "only_forward_and_backward": arguments.only_backward}
    print(f"{device_name(device)}, {config.training.precision}, {json.dumps(report['versions'])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="clozeworks-encoder-") as folder:
        documents = DocumentLengths(arguments.document_tokens, arguments.document_sigma)
        report["lengths"] = {}
        report["workloads"] = {}
        peer = Peer(config, device, arguments.steps)
        shards = {
            "documents": open_documents(arguments.shards, Path(folder) / "documents", config, documents, arguments),
            "full": open_documents(
                None,
                Path(folder) / "full",
                config,
                DocumentLengths(config.data.sequence_length - 2, 0.0),
                arguments,
            ),
        }
        for compiled in (False, True) if arguments.compile else (False,):
            contestants = make_contestants(config, device, compiled, arguments)
            for workload in arguments.workloads:
                shard_set = shards["full" if workload == "full" else "documents"]
                report["lengths"][workload] = described_lengths(shard_set, config.data.sequence_length)
                ours, theirs = contestants
                ours.steps = our_steps(shard_set, config, device, arguments.steps)
                theirs.steps = peer.steps(shard_set, grouped=workload == "grouped")
                found = compare(contestants, arguments.rounds, config)
                report["workloads"].setdefault(workload, {}).update(found)
                if arguments.profile:
                    profile(contestants, device)
            del contestants, ours, theirs
            free_memory()
    print_table(report)
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")


def make_contestants(
    config: RunConfig, device: torch.device, compiled: bool, arguments: argparse.Namespace
) -> tuple[Contestant, Contestant]:
    """Ours and the peer, with as many parameters each."""
    ours = PretrainingModel(config.model, next_sentence=True, activation_checkpointing=False)
    ours.initialise(config.training.seed)
    theirs = BertForPreTraining._from_config(
        BertConfig(**hugging_face_config(config.model, next_sentence=True)), attn_implementation="sdpa"
    )
    sizes = {model.__class__: sum(weight.numel() for weight in model.parameters()) for model in (ours, theirs)}
    assert len(set(sizes.values())) == 1, f"the models differ in size: {sizes}"
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    suffix = " compiled" if compiled else ""
    contestants = []
    for name, model in (("ours", ours), ("transformers", theirs)):
        engine = PlainEngine(model, config.optimizer, device, dtype, config.training.gradient_clipping)
        engine.set_learning_rate(0.0)  # the ids may be random: nothing should diverge
        engine.train()
        if compiled:
            ours.compile_blocks() if model is ours else theirs.compile()
        contestants.append(Contestant(name + suffix, engine, arguments.only_backward))
    return contestants[0], contestants[1]


def our_steps(shard_set: ShardSet, config: RunConfig, device: torch.device, num_steps: int) -> list[Step]:
    """Packed micro-batches of our loader."""
    (phase,) = config.phases
    loader = Loader([shard_set], config.data, phase, Position(0, 0, 0), 0, 0, 1, lambda step: 0.15, 0)
    batches = [step.micro_batches[0] for step in itertools.islice(loader, num_steps)]
    return [_our_step(batch, device) for batch in batches]


def _our_step(batch: Batch, device: torch.device) -> Step:
    num_masked, on_device = batch.num_masked, batch.to(device)
    return Step(
        lambda engine: engine.forward(on_device).mlm_loss_sum / num_masked, batch.num_tokens, batch.input_ids.numel()
    )


class Peer:
    """Makes transformers' batches from the same documents."""

    def __init__(self, config: RunConfig, device: torch.device, num_steps: int) -> None:
        words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(config.model.vocab_size - len(SPECIAL_TOKENS)))]
        vocabulary = {word: number for number, word in enumerate(words)}
        self._collate = DataCollatorForLanguageModeling(
            BertTokenizerFast(vocab=vocabulary),
            mlm_probability=0.15,
            pad_to_multiple_of=PADDED_TO_MULTIPLE_OF,
        )
        self._config, self._device, self._num_steps = config, device, num_steps

    def steps(self, shard_set: ShardSet, grouped: bool) -> list[Step]:
        """As many documents as give our number of tokens, the same number of documents in each batch."""
        (phase,) = self._config.phases
        wanted = phase.micro_batch_tokens * self._num_steps
        pieces, total = [], 0
        for piece in _pieces(shard_set, self._config.data.sequence_length):
            if total >= wanted:
                break
            pieces.append(piece)
            total += len(piece)
        if grouped:
            pieces.sort(key=len, reverse=True)
            bounds = self._equal_places([len(piece) for piece in pieces])
        else:
            bounds = [number * len(pieces) // self._num_steps for number in range(self._num_steps + 1)]
        return [
            self._step([{"input_ids": piece} for piece in pieces[first:last]])
            for first, last in itertools.pairwise(bounds)
        ]

    def _equal_places(self, lengths: Sequence[int]) -> list[int]:
        """Bounds of batches of about as many tokens each: kinder to the peer than as many documents in each."""
        sums = np.cumsum(lengths)
        wanted = np.arange(1, self._num_steps) * sums[-1] / self._num_steps
        return [0, *np.searchsorted(sums, wanted).tolist(), len(lengths)]

    def _step(self, rows: list[dict[str, Any]]) -> Step:
        batch = dict(self._collate(rows))
        tokens = int(batch["attention_mask"].sum())
        batch["next_sentence_label"] = torch.zeros(len(rows), dtype=torch.int64)
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        return Step(lambda engine: engine.module(**batch).loss, tokens, batch["input_ids"].numel())


def _pieces(shard_set: ShardSet, length: int) -> Iterator[list[int]]:
    """Documents in a random order, cut into pieces of at most `length` places with [CLS] and [SEP]."""
    shards = shard_set.shards("train")
    tokens = [shard.read_tokens() for shard in shards]
    documents = []
    for number, shard in enumerate(shards):
        index = shard.read_index()
        starts = document_starts(index, shard.itemsize)
        stops = starts + index.document_lengths
        documents += [(number, start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    for which in itertools.cycle(np.random.default_rng(0).permutation(len(documents))):
        number, start, stop = documents[which]
        for first in range(start, stop, length - 2):
            ids = tokens[number][first : min(first + length - 2, stop)]
            yield [CLS_TOKEN_ID, *ids.tolist(), SEP_TOKEN_ID]


def compare(contestants: Sequence[Contestant], rounds: int, config: RunConfig) -> dict[str, Any]:
    """Tokens a second of each, in turns, median of `rounds`; a first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds + 1):
        for contestant in contestants:
            elapsed_seconds = contestant.run()
            if number:
                seconds[contestant.name].append(elapsed_seconds)
    flops = flops_per_token(config.model, config.data.sequence_length)
    peak = _peak(contestants[0].engine.device, config)
    found = {}
    for contestant in contestants:
        tokens = sum(step.num_tokens for step in contestant.steps)
        places = sum(step.num_places for step in contestant.steps)
        median = statistics.median(seconds[contestant.name])
        found[contestant.name] = {
            "tokens_per_second": tokens / median,
            "milliseconds_per_batch": 1000.0 * median / len(contestant.steps),
            "tokens": tokens,
            "filled_share": tokens / places,
            "mfu": flops * tokens / median / peak if peak else None,
            "runs_tokens_per_second": [tokens / elapsed for elapsed in seconds[contestant.name]],
        }
        print(f"  {contestant.name}: {tokens / median:,.0f} tokens/s", flush=True)
    return found


def profile(contestants: Sequence[Contestant], device: torch.device) -> None:
    for contestant in contestants:
        profiler = profile_steps(lambda contestant=contestant: contestant.run(), device)
        print(f"  where {contestant.name} spends its time:")
        print("\n".join(f"    {line}" for line in operation_lines(top_operations(profiler, device))), flush=True)


def open_documents(
    url: str | None, folder: Path, config: RunConfig, lengths: DocumentLengths, arguments: argparse.Namespace
) -> ShardSet:
    """The shards at `url`, else synthetic ones of these lengths."""
    if url is None:
        folder.mkdir()
        num_tokens = max(2 * arguments.steps * arguments.tokens, 200_000)
        write_synthetic_shards(folder, config.model.vocab_size, num_tokens, lengths)
    return open_shard_set(url or str(folder))


def described_lengths(shard_set: ShardSet, length: int) -> dict[str, Any]:
    """Tokens of the documents, and how many are longer than a row."""
    lengths = np.concatenate([shard.read_index().document_lengths for shard in shard_set.shards("train")])
    percentiles = np.percentile(lengths, [10, 25, 50, 75, 90])
    return {
        "documents": len(lengths),
        "mean": float(lengths.mean()),
        "p10, p25, p50, p75, p90": percentiles.tolist(),
        "share_longer_than_a_row": float((lengths > length - 2).mean()),
    }


def print_table(report: dict[str, Any]) -> None:
    """Every contestant of every workload, beside the peer of its kind and the best of the peer."""
    for workload, found in report["workloads"].items():
        lengths = report["lengths"][workload]
        print(
            f"\n{workload}: {lengths['documents']:,} documents, mean {lengths['mean']:,.0f} tokens, p10 to p90 ", end=""
        )
        print(", ".join(f"{value:,.0f}" for value in lengths["p10, p25, p50, p75, p90"]), end="")
        print(f"; {lengths['share_longer_than_a_row']:.0%} longer than a row")
        print(f"{'':24}  {'tokens/s':>10}  {'ms a batch':>10}  {'filled':>7}  {'MFU':>6}  / its peer  / the best peer")
        best = max(entry["tokens_per_second"] for name, entry in found.items() if name.startswith("transformers"))
        for name, entry in found.items():
            peer = found[name.replace("ours", "transformers")]["tokens_per_second"]
            mfu = f"{entry['mfu']:.1%}" if entry["mfu"] else "-"
            speed, milliseconds = entry["tokens_per_second"], entry["milliseconds_per_batch"]
            print(
                f"{name:24}  {speed:>10,.0f}  {milliseconds:>10,.1f}  {entry['filled_share']:>7.1%}  "
                f"{mfu:>6}  {speed / peer:>10.2f}  {speed / best:>15.2f}"
            )


def _config(arguments: argparse.Namespace, device: torch.device) -> RunConfig:
    overrides = [
        "training.phases=[]",
        "training.max_steps=1",
        f"data.sequence_length={arguments.length}",
        f"training.micro_batch_tokens={arguments.tokens}",
        f"training.global_batch_tokens={arguments.tokens}",
        f"training.precision={arguments.precision}",
        "model.attention_probs_dropout_prob=0.0",
        "data.sentence_pairs=none",
        "data.num_workers=0",
        "schedule.warmup_ratio=0",
        "zero.stage=1",
    ]
    if arguments.layers:
        overrides.append(f"model.num_hidden_layers={arguments.layers}")
    return load_settings(RunConfig, arguments.config, [*overrides, *arguments.overrides])


def _peak(device: torch.device, config: RunConfig) -> float | None:
    if device.type != "cuda":
        return None
    return data_sheet_flops(torch.cuda.get_device_name(device), config.training.precision)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bert_base", help="preset or YAML file of family bert (default bert_base)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument(
        "--layers", type=int, help="fewer layers, for a quick try: it flatters ours, whose head is small"
    )
    parser.add_argument("--length", type=int, default=512, help="places in a row (default 512)")
    parser.add_argument("--tokens", type=int, help="places in our micro-batch (default 4,096; on CUDA 32,768)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: bf16")
    parser.add_argument("--steps", type=int, default=8, help="batches in a round (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--compile", action="store_true", help="compiled contestants as well")
    parser.add_argument("--only-backward", action="store_true", help="forward and backward without the optimizer step")
    parser.add_argument("--profile", action="store_true", help="say where each spends its time")
    parser.add_argument("--shards", metavar="DIR", help="real documents (default: synthetic lengths)")
    parser.add_argument("--document-tokens", type=float, default=600.0, help="mean of synthetic lengths (default 600)")
    parser.add_argument("--document-sigma", type=float, default=1.0, help="sigma of their logarithm (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is one")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    arguments = parser.parse_intermixed_args()
    uses_cuda = torch.cuda.is_available() and arguments.device != "cpu"
    arguments.tokens = arguments.tokens or (32_768 if uses_cuda else 4_096)
    arguments.precision = arguments.precision or "bf16"
    return arguments


if __name__ == "__main__":
    main()
