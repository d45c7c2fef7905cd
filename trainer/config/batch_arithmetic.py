"""How a global batch is divided over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.base.terminal import counted
from trainer.config.training_settings import BatchWarmup


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """Length and batch sizes of a stage of the run."""

    steps: int
    """Optimizer steps."""
    sequence_length: int
    """Tokens per row."""
    micro_batch_tokens: int
    """Maximum tokens in one forward pass of one rank."""
    global_batch_tokens: int
    """Tokens in one optimizer step over all ranks, after the ramp-up."""
    batch_warmup: BatchWarmup | None = None
    """Batch-size ramp-up, in steps."""
    is_causal: bool = False
    """Whether a position sees only what is before it, and predicts the next token."""


@dataclass(frozen=True)
class BatchArithmetic:
    """Rows (of `sequence_length` tokens) in one optimizer step.

    The global batch has `world_size * accumulation_steps` slices of `micro_batch_rows` rows each, completed with
    padding rows, which carry no labels.
    """

    sequence_length: int
    global_rows: int
    micro_batch_rows: int
    world_size: int
    accumulation_steps: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_rows * self.sequence_length

    @property
    def computed_rows(self) -> int:
        return self.world_size * self.accumulation_steps * self.micro_batch_rows

    def slice_of(self, number: int) -> tuple[int, int]:
        """Return the first row of micro-batch `number` (counted over all ranks) and the row after its last.

        Slices are consecutive and differ by at most one row.
        """
        num_slices = self.world_size * self.accumulation_steps
        return number * self.global_rows // num_slices, (number + 1) * self.global_rows // num_slices

    @property
    def padding_share(self) -> float:
        """Share of padding rows among the computed rows."""
        return 1.0 - self.global_rows / self.computed_rows

    def __str__(self) -> str:
        text = (
            f"global batch {self.global_rows * self.sequence_length:,} tokens = "
            f"{counted(self.micro_batch_rows, 'row')} x {self.sequence_length} tokens x "
            f"{counted(self.world_size, 'rank')} x {counted(self.accumulation_steps, 'gradient accumulation step')}"
        )
        if self.computed_rows > self.global_rows:
            text += (
                f" - {self.computed_rows - self.global_rows} padding rows ({self.padding_share:.1%} of the "
                "computed ones)"
            )
        return text


def batch_arithmetic(stage: StageShape, world_size: int, global_batch_tokens: int | None = None) -> BatchArithmetic:
    """Return the fewest accumulation steps for the global batch on `world_size` ranks, and the smallest micro-batch.

    The micro-batch has at most `stage.micro_batch_tokens`, and one size for the whole stage (that of the full global
    batch), so that graphs are compiled once.

    Args:
        global_batch_tokens: tokens of a batch of the ramp-up; by default the stage's full size.
    """
    global_rows = (global_batch_tokens or stage.global_batch_tokens) // stage.sequence_length
    full_rows = stage.global_batch_tokens // stage.sequence_length
    full_steps = -(-full_rows // (world_size * (stage.micro_batch_tokens // stage.sequence_length)))
    micro_batch_rows = -(-full_rows // (world_size * full_steps))
    return BatchArithmetic(
        sequence_length=stage.sequence_length,
        global_rows=global_rows,
        micro_batch_rows=micro_batch_rows,
        world_size=world_size,
        accumulation_steps=-(-global_rows // (world_size * micro_batch_rows)),
    )
