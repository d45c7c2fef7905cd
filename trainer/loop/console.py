"""Lines for people: what rank 0 prints while training. Pure functions from numbers to text."""

from __future__ import annotations

from data_prep.base.terminal import duration
from trainer.evaluation.validation_loss import perplexity

NOTABLE_WAIT = 0.1
"""Share of the time spent waiting for data from which on a line tells it."""
SHOWN_GROUPS = 8
"""Sources, or lengths, whose losses a line tells; MLflow has them all."""


def step_line(step: int, max_steps: int, epoch: float, metrics: dict[str, float], seconds_left: float) -> str:
    """One line on the step just taken; `metrics` are those of MLflow, `epoch` counts from 0 with its fraction."""
    if "train/loss" in metrics:
        loss = f"loss {metrics['train/loss']:.4f}"
        if "train/pair_loss" in metrics:
            loss += f" (mlm {metrics['train/mlm_loss']:.4f}, pairs {metrics['train/pair_loss']:.4f})"
        loss += f"  ppl {perplexity(metrics['train/mlm_loss']):,.1f}"
    else:
        loss = "all samples skipped"
    speed = f"{metrics['train/tokens_per_second']:,.0f} tokens/s"
    if "train/mfu" in metrics:
        speed += f"  mfu {metrics['train/mfu']:.1%}"
    if metrics.get("train/data_wait_share", 0.0) >= NOTABLE_WAIT:
        speed += f"  waiting for data {metrics['train/data_wait_share']:.0%}"
    return (
        f"epoch {epoch:.2f}  step {step:,}/{max_steps:,}  {loss}  "
        f"lr {metrics['train/learning_rate']:.2e}  {speed}  left {duration(seconds_left)}"
    )


def evaluation_line(
    step: int, metrics: dict[str, float], unigram_entropy: float | None, pair_task: str = "sentence-pair"
) -> str:
    """One line on an evaluation, beside the loss of a model that knows only how frequent each piece is.

    Args:
        pair_task: what the sentence pairs are judged for, such as "next-sentence".
    """
    text = (
        f"valid at step {step:,}: mlm loss {metrics['valid/mlm_loss']:.4f}  "
        f"accuracy {metrics['valid/mlm_accuracy']:.1%} (top 5 {metrics['valid/mlm_accuracy_top5']:.1%})  "
        f"perplexity {metrics['valid/mlm_perplexity']:,.1f}"
    )
    if "valid/pair_accuracy" in metrics:
        text += f"  {pair_task} accuracy {metrics['valid/pair_accuracy']:.1%}"
    if "valid/minimal_pairs_accuracy" in metrics:
        text += f"  minimal pairs {metrics['valid/minimal_pairs_accuracy']:.1%}"
    if unigram_entropy is not None:
        text += f"  (unigram entropy {unigram_entropy:.4f})"
    return text


def groups_line(metrics: dict[str, float]) -> str | None:
    """The MLM loss by component, source and length; None where there are no two groups of a kind."""
    parts = []
    for kind in ("component", "source", "length"):
        prefix, suffix = f"valid/{kind}/", "/mlm_loss"
        losses = {
            name.removeprefix(prefix).removesuffix(suffix): loss
            for name, loss in metrics.items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        if len(losses) > 1:
            shown = [f"{name} {loss:.4f}" for name, loss in list(losses.items())[:SHOWN_GROUPS]]
            parts.append(f"by {kind}: " + ", ".join(shown) + (" ..." if len(losses) > SHOWN_GROUPS else ""))
    return "  mlm loss " + "; ".join(parts) if parts else None
