"""Lines for people: what rank 0 prints while training. Pure functions from numbers to text."""

from __future__ import annotations

from trainer.evaluation import perplexity

NOTABLE_WAIT = 0.1
"""Share of the time spent waiting for data from which on a line tells it."""


def step_line(step: int, max_steps: int, epoch: float, metrics: dict[str, float], seconds_left: float) -> str:
    """One line on the step just taken; `metrics` are those of MLflow, `epoch` counts from 0 with its fraction."""
    if "train/loss" in metrics:
        loss = f"loss {metrics['train/loss']:.4f}"
        if "train/nsp_loss" in metrics:
            loss += f" (mlm {metrics['train/mlm_loss']:.4f}, nsp {metrics['train/nsp_loss']:.4f})"
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


def evaluation_line(step: int, metrics: dict[str, float], unigram_entropy: float | None) -> str:
    """One line on an evaluation, beside the loss of a model that knows only how frequent each piece is."""
    text = (
        f"valid at step {step:,}: mlm loss {metrics['valid/mlm_loss']:.4f}  "
        f"accuracy {metrics['valid/mlm_accuracy']:.1%}  perplexity {metrics['valid/mlm_perplexity']:,.1f}"
    )
    if "valid/nsp_accuracy" in metrics:
        text += f"  next-sentence accuracy {metrics['valid/nsp_accuracy']:.1%}"
    if unigram_entropy is not None:
        text += f"  (unigram entropy {unigram_entropy:.4f})"
    return text


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss under an hour."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
