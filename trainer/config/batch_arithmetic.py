"""How a global batch is cut over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.base.terminal import counted
from trainer.config.training_settings import Stage


@dataclass(frozen=True)
class BatchArithmetic:
    """Rows (of `sequence_length` places) in one optimizer step.

    The `world_size * accumulation_steps` slices of the global batch are computed at `micro_batch_rows` each; where the
    rows do not fill them, the rest is rows without labels.
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
        """First row of the global batch that is in micro-batch `number` of all ranks' ones, and the row after its last.

        The slices are consecutive and differ by one row at most.
        """
        num_slices = self.world_size * self.accumulation_steps
        return number * self.global_rows // num_slices, (number + 1) * self.global_rows // num_slices

    @property
    def filling_share(self) -> float:
        """Share of the computed rows that only fill up."""
        return 1.0 - self.global_rows / self.computed_rows

    def __str__(self) -> str:
        text = (
            f"{self.micro_batch_rows} rows x {self.sequence_length} places = "
            f"{self.micro_batch_tokens:,} tokens a micro-batch; "
            f"x {counted(self.world_size, 'rank')} x {self.accumulation_steps} accumulation = "
            f"{self.computed_rows * self.sequence_length:,} global tokens"
        )
        if self.computed_rows > self.global_rows:
            text += (
                f", of which {self.global_rows * self.sequence_length:,} are asked for and "
                f"{self.filling_share:.1%} are rows that only fill up"
            )
        return text


def batch_arithmetic(stage: Stage, world_size: int, global_batch_tokens: int | None = None) -> BatchArithmetic:
    """The fewest accumulation steps that hold the global batch on `world_size` ranks, and the smallest micro-batch.

    The micro-batch has at most `stage.micro_batch_tokens` and one size for the whole stage, so that graphs are compiled
    once: what the full global batch needs.

    Args:
        global_batch_tokens: places of a batch of the warm-up; by default the stage's full size.
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
