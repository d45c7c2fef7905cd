"""Pretraining on one page: the loader and the model of this project, and plain PyTorch, on one process.

    python launch/minimal.py --config tiny_cpu data.shards=demo/shards training.max_steps=20

It takes a preset and settings as `clozeworks pretrain` does, and prints the loss of each step. The losses are those of
the whole trainer in fp32 (a test compares them), since both read the same batches, begin with the same weights, drop
the same neurons and divide by the same counts. Read it to learn what a step is, or copy it to begin something else.

The whole trainer (`trainer/loop/training_loop.py`) adds what a long run needs: several ranks and ZeRO, bf16,
compilation, checkpoints that resume bitwise, evaluation, MLflow, health checks, signals. None of that is here: nothing
is written, and a second start begins at step 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from data_prep.base.errors import UsageError, run_command
from launch.options import add_config, command_parser
from trainer.api import open_loader
from trainer.checkpoint.data_version import open_data, with_epochs_counted
from trainer.config.run_config import RunConfig, load_config
from trainer.metrics.unigram import training_counts
from trainer.objectives.objective import StageObjectives, seed_micro_batch
from trainer.objectives.pretraining import PretrainingModel


def build_model(config: RunConfig) -> PretrainingModel:
    """Return the model with its first weights, a pure function of the settings, the seed and the data."""
    model = PretrainingModel(config.model, config.all_objectives)
    model.initialize(config.training.seed)
    if config.model.output_bias == "frequencies":
        # The head begins with the frequency of each token, so that it need not learn it.
        first = config.stages[0]
        counts = training_counts(first.data, first.select(open_data(config)))
        model.set_output_bias(torch.from_numpy(counts))
    return model


def build_optimizer(config: RunConfig, model: PretrainingModel) -> torch.optim.AdamW:
    """Return AdamW with two groups of parameters: weight decay is for matrices, and not for biases and norms."""
    parameters = list(model.parameters())  # the word embeddings once, though the head has them too
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if each.dim() >= 2]},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    settings = config.optimizer
    return torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def train(config: RunConfig) -> Iterator[tuple[int, float, float]]:
    """Train, and yield after each step its number from 1, its loss in nats, and the norm of its gradient."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config).to(device).train()
    optimizer = build_optimizer(config, model)
    for parameter in model.parameters():  # what a stage does not train has a gradient of 0, and so momentum
        parameter.grad = torch.zeros_like(parameter)
    # A global batch is what one update sees. It comes as micro-batches, each as large as memory allows.
    for step, global_batch in enumerate(open_loader(config)):
        stage = config.stage_of(step + 1)  # most runs have one; a recipe has several with other lengths and data
        model.set_rope_bases(stage.model)
        optimizer.param_groups[0]["weight_decay"] = stage.weight_decay
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(step)

        # The loss of an objective is a mean over the whole global batch, and micro-batches hold different numbers of
        # predictions. So these are counted first, and each micro-batch adds its sum divided by the number of all.
        objectives = StageObjectives(model.objectives, {each.name: each.weight for each in stage.objectives})
        predictions = objectives.num_predictions(global_batch.micro_batches)
        loss_of_step = 0.0
        for number, batch in enumerate(global_batch.micro_batches):
            seed_micro_batch(config.training.seed, step, number)  # of dropout: a function of the step, not of the past
            sums = model(batch.to(device), objectives=objectives.weights)  # by objective
            loss = objectives.loss(sums, predictions)
            loss.backward()  # adds to the gradient
            loss_of_step += loss.item()

        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), stage.gradient_clipping or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield step + 1, loss_of_step, norm.item()


def check_settings(config: RunConfig) -> None:
    """Refuse what this page leaves out and what would change the losses.

    Raises:
        UsageError: a setting asks for it.
    """
    for name, is_left_out in (
        (f"optimizer.name={config.optimizer.name}", config.optimizer.name != "adamw"),
        (f"init_from={config.init_from}", config.init_from is not None),
        (f"teacher={config.teacher}", config.teacher is not None),
        (f"training.precision={config.training.precision}", config.training.precision not in ("fp32", "auto")),
        ("--branch-from", config.branch is not None),
    ):
        if is_left_out:
            raise UsageError(
                f"launch/minimal.py does not have {name}",
                fix="leave it out, or train with clozeworks pretrain",
                code="left-out-of-minimal",
            )


def main() -> None:
    parser = command_parser("minimal.py", __doc__)
    add_config(parser)
    arguments = parser.parse_intermixed_args()
    config = with_epochs_counted(load_config(arguments.config, arguments.overrides))
    check_settings(config)
    for step, loss, norm in train(config):
        print(f"step {step}/{config.max_steps} | loss {loss:.3f} | gradient norm {norm:.2f}")


if __name__ == "__main__":
    run_command(main)
