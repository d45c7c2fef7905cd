"""What `encoder.py` is asked to compare: its command line, and the configuration of each comparison."""

from __future__ import annotations

import argparse
from typing import Any

import reports
import torch

from data_prep.base.errors import UserError
from trainer import load_config
from trainer.config.run_config import RunConfig

WORKLOADS = ("documents", "grouped", "full")
MODES = ("eager", "compiled")
SMOKE = [
    *("model.vocab_size=512", "model.hidden_size=64", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("model.intermediate_size=128", "model.max_position_embeddings=64"),
]


def parse(description: str | None) -> argparse.Namespace:
    """The command line; what is not given is chosen by the device."""
    parser = reports.parser(description)
    parser.add_argument("--config", nargs="+", default=["bert_base"], help="presets or YAML files of family bert")
    parser.add_argument("--set", nargs="+", dest="overrides", default=[], metavar="section.field=value")
    parser.add_argument("--length", type=int, help="places in a row (default 512)")
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="places in our micro-batch (default 4,096; on CUDA 16,384 32,768 65,536)"
    )
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), help="default: both; on CUDA bf16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")
    parser.add_argument("--steps", type=int, help="batches in a round (default 2; on CUDA 8)")
    parser.add_argument(
        "--rounds", type=int, help="timed rounds, each with batches of its own seed (default 3; on CUDA 5)"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--profile", action="store_true", help="say where each spends its time")
    parser.add_argument("--shards", metavar="DIR", help="real documents (default: synthetic lengths)")
    parser.add_argument("--document-tokens", type=float, help="mean of synthetic lengths (default 600)")
    parser.add_argument("--document-sigma", type=float, default=1.0, help="sigma of their logarithm (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is one")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few batches: figures that mean nothing")
    arguments = parser.parse_args()
    uses_cuda = torch.cuda.is_available() and arguments.device != "cpu"
    defaults: dict[str, Any] = {
        "length": 512,
        "tokens": [4_096],
        "precision": ["fp32", "bf16"],
        "steps": 2,
        "rounds": 3,
        "document_tokens": 600.0,
    }
    if uses_cuda:
        defaults |= {"tokens": [16_384, 32_768, 65_536], "precision": ["bf16"], "steps": 8, "rounds": 5}
    if arguments.smoke:
        defaults |= {"length": 64, "tokens": [512], "steps": 2, "rounds": 1, "document_tokens": 60.0}
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def settings_of(preset: str, precision: str, tokens: int, arguments: argparse.Namespace) -> RunConfig:
    """The configuration of one comparison.

    Raises:
        UserError: the preset is not of family bert.
    """
    overrides = [
        "training.stages=[]",
        "training.max_steps=1",
        f"data.sequence_length={arguments.length}",
        f"training.micro_batch_tokens={tokens}",
        f"training.global_batch_tokens={tokens}",
        f"training.precision={precision}",
        "model.attention_probs_dropout_prob=0.0",
        "data.sentence_pairs=none",
        "data.num_workers=0",
        "schedule={name: linear, warmup_ratio: 0, decay: linear, decay_steps: 0, decay_ratio: 0}",
        "optimizer.name=adamw",
        "zero.stage=1",
    ]
    overrides += [*(SMOKE if arguments.smoke else ()), *arguments.overrides]
    config = load_config(preset, overrides)
    if config.model.family != "bert":
        raise UserError(f"--config {preset} is of family {config.model.family}, and the peer is BERT; give one of BERT")
    return config
