"""A small model and its training in processes of their own, for the tests of engine and checkpoint.

Run as `python toy_training.py PLAN.json` with the launcher's environment (or none, for a world of one); the plan is a
list of jobs, done one after another in one process: DeepSpeed's stage 3 leaves patches behind, so a process keeps to
one stage.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.average import averaged_weights
from trainer.checkpoint.format import DataIdentity, TrainState, step_folder
from trainer.checkpoint.restore import find_latest, load
from trainer.checkpoint.upload import Uploader
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import CheckpointSettings
from trainer.config.training_settings import OptimizerSettings, TrainingSettings, ZeroSettings
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import Ranks, barrier, gather_objects, initialize_distributed, shut_down
from trainer.engine.engine import Engine, build_engine

VOCABULARY, WIDTH, INNER = 37, 13, 17
ROWS, LENGTH = 8, 16
"""A global batch; the numbers of parameters (481, 37, 13, 442, 34, 221) are divided by neither 2 nor 3, or by one."""


class ToyModel(nn.Module):
    """Tied embedding, LayerNorm, GeGLU, dropout; the loss is a sum over labeled tokens, whose number differs by row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gated = nn.Linear(WIDTH, 2 * INNER)
        self.dense = nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.embedding.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values, gates = self.gated(self.embedding(rows)).chunk(2, dim=-1)
        hidden = self.dropout(self.norm(self.dense(nn.functional.gelu(values) * gates)))
        return nn.functional.cross_entropy(
            self.decoder(hidden).float().flatten(0, 1), labels_of(rows).flatten(), reduction="sum", ignore_index=-100
        )

    def hidden_matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """As `PretrainingModel.hidden_matrices`."""
        half = self.gated.out_features // 2
        return {self.gated.weight: (half, half), self.dense.weight: (self.dense.out_features,)}


def labels_of(rows: torch.Tensor) -> torch.Tensor:
    """What is to be predicted; a different share of every row."""
    return torch.where((rows + rows[:, :1]) % 3 == 0, (rows * 7 + 1) % VOCABULARY, -100)


def global_batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1000 + step))


def make_config(
    output_dir: str, zero_stage: int, precision: str = "fp32", offload: bool = False, **changes: Any
) -> RunConfig:
    return RunConfig(
        output_dir=output_dir,
        data=DataSettings(shards="none", sequence_length=LENGTH),
        training=TrainingSettings(
            max_steps=100,
            micro_batch_tokens=LENGTH,
            global_batch_tokens=ROWS * LENGTH,
            precision=precision,
            gradient_clipping=changes.pop("gradient_clipping", 0.3),
        ),
        optimizer=OptimizerSettings(name=changes.pop("optimizer", "adamw"), weight_decay=0.1, beta2=0.98),
        zero=ZeroSettings(stage=zero_stage, offload_optimizer=offload),
        checkpoint=CheckpointSettings(keep_last=changes.pop("keep_last", 10)),
        **changes,
    )


def take_step(engine: Engine, ranks: Ranks, step: int, accumulation: int, dropout: bool) -> tuple[float, float]:
    """One step of the loop's kind (contract 5); returns the global loss and the gradient norm."""
    batch = global_batch(step)
    count = int((labels_of(batch) != -100).sum())
    engine.train() if dropout else engine.eval()
    engine.set_learning_rate(3e-2 / (1 + step))
    loss_sum = torch.zeros((), dtype=torch.float64)
    slices = ranks.world_size * accumulation
    for number in range(accumulation):
        slice_number = ranks.rank * accumulation + number
        rows = batch[slice_number * ROWS // slices : (slice_number + 1) * ROWS // slices]
        torch.manual_seed(step * 1000 + slice_number)
        loss = engine.forward(rows)
        engine.backward(loss * ranks.world_size / count, is_last_micro_batch=number == accumulation - 1)
        loss_sum += loss.detach()
    norm = engine.step()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(loss_sum)
    return float(loss_sum) / count, float(norm)


def run_job(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Start or resume, train `steps` steps, save; report losses, norms and whether the forward's weights are right."""
    output_dir, remote = job["output_dir"].replace("RANK", str(ranks.rank)), job.get("upload_to")
    if job.get("find_only"):
        warnings: list[str] = []
        found = find_latest(output_dir, ranks, warnings.append, zero_stage=job["stage"])
        return {"found": gather_objects(found and found.step, ranks), "warnings": warnings}
    optimizer = job.get("optimizer", "adamw")
    config = make_config(
        output_dir, job["stage"], job.get("precision", "fp32"), job.get("offload", False), optimizer=optimizer
    )
    if remote is not None:  # each rank is a node with a disk of its own
        ranks = replace(ranks, local_rank=0)
        settings = config.checkpoint.model_copy(update={"upload_to": remote})
        config = config.model_copy(update={"checkpoint": settings})
    found = find_latest(config.output_dir, ranks, remote=remote, zero_stage=job["stage"])
    engine = build_engine(ToyModel(), config, ranks)
    engine.warmup_step(lambda: engine.forward(global_batch(0)[:2]))
    first = 0
    if found is not None:
        load(engine, found)
        first = found.step
    identity = DataIdentity(manifest_digests=("d",), tokenizer_fingerprint="f")
    results, averages = [], []
    for step in range(first, first + job["steps"]):
        results.append(take_step(engine, ranks, step, job["accumulation"], job.get("dropout", True)))
        if job.get("average"):
            checkpoints.save(config.output_dir, engine, TrainState(step=step + 1), config, identity)
            averages.append(average_of_all(engine, config.output_dir, step + 1))
    if job.get("poison"):
        before = engine.optimizer_steps
        engine.backward(engine.forward(global_batch(0)[:2]) * float("nan"), is_last_micro_batch=True)
        norm = float(engine.step())
        assert not engine.was_step_applied and engine.optimizer_steps == before, (norm, before)
        assert norm != norm or norm == float("inf"), norm
    if job.get("blocked_rank") == ranks.rank:
        storage.local_write = refuse_to_write
    state = TrainState(step=first + job["steps"])
    saved = checkpoints.save(config.output_dir, engine, state, config, identity)
    if remote is not None:
        uploader = Uploader(config.checkpoint, ranks, print)
        uploader.submit(saved)
        assert uploader.close()
    report = {
        "first": first,
        "losses": [loss for loss, _ in results],
        "norms": [norm for _, norm in results],
        "saved": saved is not None,
        "averages": averages,
    }
    engine.destroy()
    barrier(ranks)
    return report


def average_of_all(engine: Engine, output_dir: str, step: int) -> float:
    """The loss of a batch by the mean of the checkpoints up to `step`."""
    folders = [step_folder(output_dir, number) for number in range(1, step + 1)]
    engine.eval()
    with averaged_weights(engine, folders) as problem, torch.no_grad():
        assert problem is None, problem
        return float(engine.forward(global_batch(0)))


def refuse_to_write(url: object) -> None:
    """A full disk on one rank alone."""
    raise UserError(f"{url} cannot be written: No space left on device")


def main() -> int:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    ranks = initialize_distributed(make_config("none", 0, distributed={"timeout_seconds": 60}).distributed)
    reports = [run_job(job, ranks) for job in jobs]
    if ranks.is_first:
        Path(sys.argv[1]).with_suffix(".out").write_text(json.dumps(reports))
    shut_down(ranks)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    run_rank(main)
