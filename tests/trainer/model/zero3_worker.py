"""One process, ZeRO-3 with activation checkpointing: prints how far the gradients are from plain PyTorch's.

Run as `python zero3_worker.py RENDEZVOUS whole|chunked tied|own`: the way in which the MLM loss is made, and the matrix
of its decoder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad

from tests.support.objectives import loss_sum
from trainer.config.families.eurobert import EuroBert
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import Batch
from trainer.model import chunked_loss
from trainer.objectives.pretraining import PretrainingModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
CONFIGS = {
    "tied": ModelSettings(**SIZES),
    # With LayerNorm: an RMSNorm is several operations on the CPU, whose three gradients are added in any order.
    "own": ModelSettings(**SIZES, family="custom", num_key_value_heads=2, **{**EuroBert.defaults, "norm": "layernorm"}),
}
LENGTH = 16


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        input_ids=torch.randint(5, 61, (2 * LENGTH,), generator=generator),
        position_ids=torch.arange(LENGTH).repeat(2),
        token_type_ids=torch.zeros(2 * LENGTH, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        masked_positions=torch.tensor([3, 5, 20, 0]),
        labels=torch.tensor([9, 8, 7, -100]),
        cls_positions=torch.tensor([0, LENGTH]),
        next_sentence_labels=torch.tensor([0, 1]),
        sequence_length=LENGTH,
    )


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(3)
    return loss_sum(model(make_batch()))


def main(rendezvous: Path, loss: str, decoder: str) -> None:
    config = CONFIGS[decoder]
    if loss == "chunked":
        chunked_loss.LOGITS_IN_ONE = chunked_loss.LOGITS_OF_CHUNK = 0
    plain = PretrainingModel(config, objectives_of("next_sentence"))
    plain.initialize(0)
    loss_of(plain).backward()
    divided = PretrainingModel(config, objectives_of("next_sentence"), activation_checkpointing=True)
    divided.initialize(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(
        model=divided,
        optimizer=torch.optim.AdamW(divided.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(loss_of(engine))
    differences = [
        (safe_get_full_grad(parameter) - expected.grad).abs().max().item()
        for parameter, expected in zip(divided.parameters(), plain.parameters(), strict=True)
    ]
    print(f"parameters {len(differences)} largest difference {max(differences)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # DeepSpeed's threads sometimes abort an ordinary exit
