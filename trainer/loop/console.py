"""Log lines of training on rank 0, and its progress bar. The lines are pure functions from numbers to text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import tqdm

from data_prep.base.terminal import counted, duration
from trainer.validation.loss import perplexity

NOTABLE_WAIT = 0.1
"""A line shows data loading if it takes at least this share of the time."""
SHOWN_HOSTS = 4
OF_TOKENS = ("mlm", "causal")
"""Names in metrics of the objectives that predict tokens."""
SHOWN_GROUPS = 8
"""Maximum number of sources, or lengths, in a line; MLflow has all."""


def step_line(
    step: int,
    max_steps: int,
    epoch: float | None,
    metrics: Mapping[str, float],
    seconds_left: float,
    labels: Mapping[str, str],
) -> str:
    """Format the log line of a step.

    Args:
        epoch: of the data of the stage, from 0, with its fraction; None for a mixture, whose epochs do not end.
        metrics: under their MLflow names.
        labels: what each objective is called, by its name in metrics, such as `{"mlm": "mlm", "pair": "nsp"}`.
    """
    parts = [f"step {step}/{max_steps}", *([] if epoch is None else [f"epoch {epoch:.2f}"]), _loss(metrics, labels)]
    parts += [f"lr {scientific(metrics['train/learning_rate'])}", _speed(metrics)]
    if "train/mfu" in metrics:
        parts.append(f"MFU {metrics['train/mfu']:.1%}")
    if metrics.get("train/data_wait_share", 0.0) >= NOTABLE_WAIT:
        parts.append(f"data loading {metrics['train/data_wait_share']:.0%} of the time")
    return " | ".join([*parts, f"ETA {duration(seconds_left)}"])


def device_line(hosts: Sequence[str], devices: Sequence[str], precision: str, zero_stage: int) -> str:
    """Format the first line of a run from host and device of each rank."""
    by_host, kinds = list(dict.fromkeys(hosts)), ", ".join(dict.fromkeys(devices))
    named = ", ".join(by_host[:SHOWN_HOSTS]) + (", ..." if len(by_host) > SHOWN_HOSTS else "")
    ranks = f"{counted(len(devices), 'rank')} on {counted(len(by_host), 'host')} ({named})"
    return f"{ranks} | device {kinds} | precision {precision} | ZeRO stage {zero_stage}"


def evaluation_line(
    step: int, metrics: Mapping[str, float], unigram_entropy: float | None, labels: Mapping[str, str]
) -> str:
    """Format the line of an evaluation, with the loss of a model that knows only how frequent each token is."""
    parts = [f"valid at step {step}"]
    for name in OF_TOKENS:
        if f"valid/{name}_loss" in metrics:
            loss, accuracy, top5 = (metrics[f"valid/{name}_{value}"] for value in ("loss", "accuracy", "accuracy_top5"))
            parts += [
                f"{name} loss {loss:.3f}"
                + (f" (unigram entropy {unigram_entropy:.3f})" if unigram_entropy is not None else ""),
                f"accuracy {accuracy:.1%} (top 5 {top5:.1%})",
                f"perplexity {metrics[f'valid/{name}_perplexity']:,.1f}",
            ]
        elif name in labels:
            parts.append(f"no {name} loss: no token of the valid split is predicted, because it is empty or too small")
    if "valid/own_mlm_loss" in metrics:
        parts.append(f"as it trains {metrics['valid/own_mlm_loss']:.3f}")
    if "valid/word_bits_per_byte" in metrics:
        parts.append(f"words {metrics['valid/word_bits_per_byte']:.3f} bits/byte")
    if "valid/bound_bits_per_byte" in metrics:
        parts.append(f"bound {metrics['valid/bound_bits_per_byte']:.3f} bits/byte")
    for name, label in labels.items():
        if name not in OF_TOKENS and f"valid/{name}_accuracy" in metrics:
            parts.append(f"{label} accuracy {metrics[f'valid/{name}_accuracy']:.1%}")
        elif name not in OF_TOKENS and f"valid/{name}_loss" in metrics:
            parts.append(f"{label} loss {metrics[f'valid/{name}_loss']:.3f}")
    if "valid/minimal_pairs_accuracy" in metrics:
        parts.append(f"minimal pairs {metrics['valid/minimal_pairs_accuracy']:.1%}")
    return " | ".join(parts)


def groups_line(metrics: Mapping[str, float]) -> str | None:
    """Format the MLM loss by component, source and length; None unless a kind has two groups."""
    parts = []
    for kind in ("component", "source", "length"):
        prefix, suffix = f"valid/{kind}/", "/mlm_loss"
        losses = {
            name.removeprefix(prefix).removesuffix(suffix): loss
            for name, loss in metrics.items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        if len(losses) > 1:
            listed = [f"{name} {loss:.3f}" for name, loss in list(losses.items())[:SHOWN_GROUPS]]
            parts.append(f"by {kind}: " + ", ".join(listed) + (" ..." if len(losses) > SHOWN_GROUPS else ""))
    return "  mlm loss " + " | ".join(parts) if parts else None


def scientific(value: float) -> str:
    """Format a number as `2.0e-3`."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def compact(number: float) -> str:
    """Format a number with three digits and its unit: 950, 13.8k, 1.05M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{number:.0f}"


def _loss(metrics: Mapping[str, float], labels: Mapping[str, str]) -> str:
    if "train/loss" not in metrics:
        return "all samples skipped"
    losses = {name: metrics[f"train/{name}_loss"] for name in labels if f"train/{name}_loss" in metrics}
    details = [f"{labels[name]} {loss:.3f}" for name, loss in losses.items()]
    if [*losses] == ["mlm"]:
        details = [f"ppl {perplexity(losses['mlm']):,.1f}"]
    return f"loss {metrics['train/loss']:.3f} ({', '.join(details)})"


def _speed(metrics: Mapping[str, float]) -> str:
    return f"{compact(metrics['train/tokens_per_second'])} tokens/s"


class StepBar:
    """Progress bar of a run on a terminal; shows nothing elsewhere."""

    def __init__(self, is_visible: bool, step: int, max_steps: int) -> None:
        """`step` is the number of completed steps."""
        self._bar: tqdm.tqdm[NoReturn] | None = None
        if is_visible and sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=max_steps,
                initial=step,
                file=sys.stderr,
                leave=False,
                bar_format="{percentage:3.0f}%|{bar:24}| step {n_fmt}/{total_fmt}{desc}",
            )

    def advance(self) -> None:
        """Count a completed step."""
        if self._bar is not None:
            self._bar.update()

    def describe(self, metrics: Mapping[str, float], seconds_left: float) -> None:
        """Show the newest loss, throughput and ETA."""
        if self._bar is not None:
            loss = f"loss {metrics['train/loss']:.3f} | " if "train/loss" in metrics else ""
            self._bar.set_description_str(f" | {loss}{_speed(metrics)} | ETA {duration(seconds_left)}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
