"""Sizes in closed form: parameters by module, operations per token, memory per rank by part.

Formulas use the names of `ModelSettings`, so that each can be checked by hand.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from torch import nn

from trainer.config import ModelSettings

FLOPS_FORMULA = (
    "6 * num_hidden_layers * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size)"
    " + 12 * num_hidden_layers * hidden_size * sequence_length"
    " + mlm_probability * 6 * (hidden_size**2 + hidden_size * padded_vocab_size)"
)
"""Operations per token of forward and backward, where a multiplication and an addition are two. In words: 6
per weight of the blocks' matrices (2 forward, 4 backward), attention as if each row were one sequence, and
the MLM head on the share of places that is predicted. For BERT-large 1.879e9 at length 128 and 1.992e9 at
512."""

PAIR_FLOPS_FORMULA = "6 * (hidden_size**2 + 2 * hidden_size) / sequence_length"
"""What pooler and next-sentence head add, reckoned at one pair per row."""


_MODULES = {
    r"encoder\.embeddings\.word_embeddings\.": "embeddings.word",
    r"encoder\.embeddings\.position_embeddings\.": "embeddings.position",
    r"encoder\.embeddings\.token_type_embeddings\.": "embeddings.token_type",
    r"encoder\.embeddings\.norm\.": "embeddings.norm",
    r"encoder\.layers\.\d+\.attention\.": "layers.attention",
    r"encoder\.layers\.\d+\.feed_forward\.": "layers.feed_forward",
    r"encoder\.layers\.\d+\.\w+_norm\.": "layers.norms",
    r"mlm_head\.": "mlm_head",
    r"pooler\.": "pooler",
    r"next_sentence_head\.": "next_sentence_head",
}


class ParameterRow(NamedTuple):
    """One line of the parameter table."""

    module: str
    formula: str
    count: int


def parameter_table(config: ModelSettings, next_sentence: bool) -> list[ParameterRow]:
    """Parameters by module with the formula of each, `total` last; the tied decoder counts once, as `word`."""
    hidden, intermediate, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    vocab, positions, types = config.padded_vocab_size, config.max_position_embeddings, config.type_vocab_size
    rows = [
        ParameterRow("embeddings.word", "padded_vocab_size * hidden_size", vocab * hidden),
        ParameterRow("embeddings.position", "max_position_embeddings * hidden_size", positions * hidden),
        ParameterRow("embeddings.token_type", "type_vocab_size * hidden_size", types * hidden),
        ParameterRow("embeddings.norm", "2 * hidden_size", 2 * hidden),
        ParameterRow(
            "layers.attention",
            "num_hidden_layers * (4 * hidden_size**2 + 4 * hidden_size)",
            layers * (4 * hidden**2 + 4 * hidden),
        ),
        ParameterRow(
            "layers.feed_forward",
            "num_hidden_layers * (2 * hidden_size * intermediate_size + intermediate_size + hidden_size)",
            layers * (2 * hidden * intermediate + intermediate + hidden),
        ),
        ParameterRow("layers.norms", "num_hidden_layers * 4 * hidden_size", layers * 4 * hidden),
        ParameterRow(
            "mlm_head", "hidden_size**2 + 3 * hidden_size + padded_vocab_size", hidden**2 + 3 * hidden + vocab
        ),
    ]
    if next_sentence:
        rows.append(ParameterRow("pooler", "hidden_size**2 + hidden_size", hidden**2 + hidden))
        rows.append(ParameterRow("next_sentence_head", "2 * hidden_size + 2", 2 * hidden + 2))
    return [*rows, ParameterRow("total", "sum of the above", sum(row.count for row in rows))]


def counted_parameters(model: nn.Module) -> dict[str, int]:
    """The same modules' parameters as the model holds them, `total` last."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        module = next(module for prefix, module in _MODULES.items() if re.match(prefix, name))
        counts[module] = counts.get(module, 0) + parameter.numel()
    return {**counts, "total": sum(counts.values())}


def num_parameters(config: ModelSettings, next_sentence: bool) -> int:
    """All trained parameters."""
    return parameter_table(config, next_sentence)[-1].count


def flops_per_token(
    config: ModelSettings, sequence_length: int, mlm_probability: float = 0.15, next_sentence: bool = False
) -> float:
    """Operations of forward and backward per place, by `FLOPS_FORMULA` (and `PAIR_FLOPS_FORMULA`).

    Recomputation by activation checkpointing is not counted: it is no useful work.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    blocks = 6 * layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    attention = 12 * layers * hidden * sequence_length
    mlm_head = mlm_probability * 6 * (hidden**2 + hidden * config.padded_vocab_size)
    pairs = 6 * (hidden**2 + 2 * hidden) / sequence_length if next_sentence else 0.0
    return blocks + attention + mlm_head + pairs


def memory_per_rank(
    config: ModelSettings,
    *,
    stage: Literal[0, 1, 2, 3],
    world_size: int,
    micro_batch_tokens: int,
    sequence_length: int,
    precision: Literal["fp32", "bf16", "fp16"] = "bf16",
    mlm_probability: float = 0.15,
    next_sentence: bool = False,
    activation_checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes on one rank by part; DeepSpeed's buckets and the allocator's slack come on top.

    With N parameters, W ranks and b bytes per number in `precision` (ZeRO, Rajbhandari et al. 2020):

    - weights: b N, stage 3: / W
    - gradients (accumulated in fp32): 4 N, stages 2 and 3: / W
    - master_weights (fp32): 4 N / W from stage 1; at stage 0 4 N, and none in fp32
    - optimizer (two fp32 moments): 8 N, from stage 1: / W
    - activations: see `activation_bytes`
    - logits: (b + 12) bytes for each of mlm_probability * micro_batch_tokens * padded_vocab_size (the logits,
      their fp32 copy, its log-softmax and the gradient)
    """
    total = num_parameters(config, next_sentence)
    number_bytes = 4 if precision == "fp32" else 2
    state_ranks, gradient_ranks, weight_ranks = (world_size if stage >= first else 1 for first in (1, 2, 3))
    keeps_master = stage >= 1 or precision != "fp32"
    num_rows = micro_batch_tokens // sequence_length
    num_logits = num_rows * math.ceil(mlm_probability * sequence_length) * config.padded_vocab_size
    return {
        "weights": math.ceil(number_bytes * total / weight_ranks),
        "gradients": math.ceil(4 * total / gradient_ranks),
        "master_weights": math.ceil(4 * total / state_ranks) if keeps_master else 0,
        "optimizer": math.ceil(8 * total / state_ranks),
        "activations": activation_bytes(config, micro_batch_tokens, number_bytes, activation_checkpointing),
        "logits": (number_bytes + 12) * num_logits,
    }


def activation_bytes(
    config: ModelSettings, micro_batch_tokens: int, number_bytes: int, activation_checkpointing: bool
) -> int:
    """Roughly what the blocks keep for the backward, with attention that keeps no (L, L) matrix.

    A block keeps per place, in b bytes each: its input, q, k, v, the attended values, the two sums before the
    norms and the first norm's output (8 hidden_size), GELU's input and output (2 intermediate_size); and
    dropout's masks (2 hidden_size bytes). With checkpointing every block keeps its input only, and one at a
    time all of it.
    """
    per_block = number_bytes * (8 * config.hidden_size + 2 * config.intermediate_size)
    if config.hidden_dropout_prob:
        per_block += 2 * config.hidden_size
    if not activation_checkpointing:
        return micro_batch_tokens * config.num_hidden_layers * per_block
    return micro_batch_tokens * (config.num_hidden_layers * number_bytes * config.hidden_size + per_block)
