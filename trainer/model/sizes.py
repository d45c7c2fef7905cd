"""Sizes in closed form: operations per token, memory per rank by part."""

from __future__ import annotations

import math
from typing import Literal

import torch

from trainer.config.model_settings import ModelSettings
from trainer.model.chunked_loss import is_chunked, rows_per_chunk

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FLOPS_FORMULA = (
    "6 * num_hidden_layers * (2 * hidden_size**2 + 2 * hidden_size * key_value_size"
    " + num_feed_forward_matrices * hidden_size * intermediate_size)"
    " + 12 * hidden_size * (num_global_layers * sequence_length"
    " + num_local_layers * min(sequence_length, local_attention))"
    " + mlm_probability * 6 * (num_dense_matrices * hidden_size**2 + hidden_size * padded_vocab_size)"
)
"""What `flops_per_token` computes without sentence pairs and without a causal mask, for reports."""


def num_block_norms(config: ModelSettings) -> int:
    """Return the number of norms in all blocks.

    A block has two. The first one has none before its attention where embeddings were normalized.
    """
    skips_first = config.norm_position == "pre" and config.embedding_norm
    return 2 * config.num_hidden_layers - skips_first


def flops_per_token(
    config: ModelSettings,
    sequence_length: int,
    mlm_probability: float = 0.15,
    next_sentence: bool = False,
    is_causal: bool = False,
) -> float:
    """Return the operations of forward and backward per position, where a multiplication and an addition are two.

    The sum has 6 per weight of the blocks' matrices (2 forward, 4 backward; the feed-forward layer has 2 matrices, 3
    with a gate), attention as if each row were one sequence, of which a local layer sees a window (and half of either
    under a causal mask), the MLM head on the share of positions that is predicted, and pooler and next-sentence head on
    one pair per row. BERT-large has 1.879e9 at length 128 and 1.992e9 at 512. Recomputation by activation checkpointing
    is not counted: it is not useful work.
    """
    hidden = config.hidden_size
    matrices = 2 * hidden**2 + 2 * hidden * config.key_value_size
    matrices += (3 if config.is_gated else 2) * hidden * config.intermediate_size
    num_dense = int(config.mlm_head == "dense")
    window = min(sequence_length, config.local_attention or 0)
    num_global, num_local = (config.attention_kinds.count(kind) for kind in ("global", "local"))
    flops = (
        6 * config.num_hidden_layers * matrices
        + (6 if is_causal else 12) * hidden * (num_global * sequence_length + num_local * window)
        + mlm_probability * 6 * (num_dense * hidden**2 + hidden * config.padded_vocab_size)
    )
    return flops + (6 * (hidden**2 + 2 * hidden) / sequence_length if next_sentence else 0.0)


def memory_per_rank(
    config: ModelSettings,
    *,
    num_parameters: int,
    zero_stage: Literal[0, 1, 2, 3],
    world_size: int,
    micro_batch_tokens: int,
    sequence_length: int,
    device_type: Literal["cuda", "cpu"],
    precision: Precision = "bf16",
    mlm_probability: float = 0.15,
    activation_checkpointing: bool = False,
) -> dict[str, int]:
    """Return the bytes on one rank by part, without DeepSpeed's buckets and the allocator's slack.

    With N parameters (`num_parameters`), W ranks and b bytes per number in `precision` (ZeRO, Rajbhandari et al. 2020):

    - weights: b N, stage 3: / W
    - gradients (accumulated in fp32): 4 N, stages 2 and 3: / W
    - gradient_copy: 4 N / W from stage 1, where DeepSpeed's step lays a rank's gradients out in one tensor (measured on
      the CPU; none at stage 1 in bf16, where they already are)
    - master_weights (fp32): 4 N / W from stage 1; at stage 0 4 N, and none in fp32
    - optimizer (two fp32 moments): 8 N, from stage 1: / W
    - gather_copy, on the CPU only: b N at stages 1 and 2 with several ranks. After each step DeepSpeed gathers the
      weights of all ranks at once; gloo receives them in a tensor of its own (measured), NCCL where they belong
    - activations: the sum of `activation_bytes`
    - logits: `loss_bytes`
    """
    total = num_parameters
    dtype = DTYPES[precision]
    number_bytes = dtype.itemsize
    state_ranks, gradient_ranks, weight_ranks = (world_size if zero_stage >= first else 1 for first in (1, 2, 3))
    keeps_master = zero_stage >= 1 or precision != "fp32"
    copies_gradients = zero_stage >= 2 or (zero_stage == 1 and precision != "bf16")
    copies_gathered = world_size > 1 and zero_stage in (1, 2)
    activations = activation_bytes(config, micro_batch_tokens, number_bytes, activation_checkpointing)
    predictions = num_predictions(micro_batch_tokens, sequence_length, mlm_probability)
    return {
        "weights": math.ceil(number_bytes * total / weight_ranks),
        "gradients": math.ceil(4 * total / gradient_ranks),
        "gradient_copy": math.ceil(4 * total / state_ranks) if copies_gradients else 0,
        "master_weights": math.ceil(4 * total / state_ranks) if keeps_master else 0,
        "optimizer": math.ceil(8 * total / state_ranks),
        **({"gather_copy": number_bytes * total if copies_gathered else 0} if device_type == "cpu" else {}),
        "activations": sum(activations.values()),
        "logits": loss_bytes(config, predictions, dtype),
    }


def num_predictions(micro_batch_tokens: int, sequence_length: int, mlm_probability: float) -> int:
    """Return the number of slots for predicted tokens in a micro-batch: the rows of logits of its loss."""
    return micro_batch_tokens // sequence_length * math.ceil(mlm_probability * sequence_length)


def loss_bytes(config: ModelSettings, predictions: int, dtype: torch.dtype) -> int:
    """Return the bytes that the MLM loss of so many predictions needs, forward and backward.

    In a model of `dtype` (b bytes) they are:

    - of all logits at once: b + 12 bytes for each (the logits, their fp32 copy, its log-softmax and the gradient)
    - in chunks (`trainer/model/chunked_loss.py`): 4 for each logit of a chunk and each gradient of the word matrix and
      the hidden states, in fp32; where b is 2, also b for each logit of a chunk, and for the word matrix's gradient of
      every chunk, which compiled code adds up at the end
    """
    vocabulary, hidden = config.padded_vocab_size, config.hidden_size
    if not is_chunked(predictions, vocabulary, dtype):
        return (dtype.itemsize + 12) * predictions * vocabulary
    rounded = 0 if dtype == torch.float32 else dtype.itemsize
    rows = rows_per_chunk(predictions, vocabulary)
    num_chunks = math.ceil(predictions / rows)
    of_weight = (4 + rounded * num_chunks) * vocabulary * hidden
    return (4 + rounded) * vocabulary * rows + of_weight + 4 * predictions * hidden


def teacher_bytes(
    config: ModelSettings,
    teacher: ModelSettings,
    num_parameters: int,
    micro_batch_tokens: int,
    predictions: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes that a teacher adds on every rank, at any ZeRO stage, in a model of `dtype` (b bytes).

    They are b for each of its parameters, 6 hidden states and what a feed-forward layer takes and gives for one of its
    blocks, and for each logit b + 16 (16 + 2 b in chunks: its logits, both log-softmaxes, its probabilities and the
    gradient). In chunks the word matrix and the hidden states of the model have a second gradient, in fp32.
    """
    size = dtype.itemsize
    inner = (4 if teacher.is_gated else 2) * teacher.intermediate_size
    block = micro_batch_tokens * size * (6 * teacher.hidden_size + inner)
    vocabulary, hidden = config.padded_vocab_size, config.hidden_size
    if not is_chunked(predictions, vocabulary, dtype):
        return size * num_parameters + block + (size + 16) * predictions * vocabulary
    of_chunk = (16 + 2 * size) * rows_per_chunk(predictions, vocabulary) * vocabulary
    return size * num_parameters + block + of_chunk + 4 * (vocabulary + predictions) * hidden


def activation_bytes(
    config: ModelSettings, micro_batch_tokens: int, number_bytes: int, activation_checkpointing: bool
) -> dict[str, int]:
    """Return the bytes that the parts of the encoder keep for the backward; attention keeps no (L, L) matrix.

    Each part keeps per position, in numbers of `number_bytes`:

    - embeddings: the sum before their norm (hidden_size)
    - attention, a block: input, q, k, v and the attended values (5 hidden_size); rotary positions keep the turned q and
      k besides (2 hidden_size); and in float32 the log-sum-exp of every head. Where k and v are repeated for groups of
      heads, the 5 hidden_size count them repeated, and their tensor (2 key_value_size) stays only if q is a part of it,
      which a turned q is not
    - feed_forward, a block: input (hidden_size), and what the activation takes and gives (2 intermediate_size), or with
      a gate values, gates, the activated values and the product (4 intermediate_size)
    - norms: the input of every norm in and after the blocks (hidden_size)

    Dropout keeps a mask of a byte per number (on CUDA; the CPU keeps numbers): hidden_size after embeddings, attention
    and feed-forward, intermediate_size within a feed-forward layer. With checkpointing every block keeps its input only
    (checkpoints), and one block at a time keeps everything.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    dropouts = config.sublayer_dropouts
    embedding_mask = hidden if config.hidden_dropout_prob else 0
    attention_mask = hidden if dropouts.attention_output else 0
    feed_forward_mask = config.intermediate_size if dropouts.feed_forward_inner else 0
    feed_forward_mask += hidden if dropouts.feed_forward_output else 0
    is_rotary, is_grouped = config.position_embedding == "rotary", config.key_value_size < hidden
    turned = 2 * hidden if is_rotary and not is_grouped else 0
    unrepeated = 2 * config.key_value_size if is_grouped and not is_rotary else 0
    inner = (4 if config.is_gated else 2) * config.intermediate_size
    num_final_norms = int(config.norm_position == "pre")
    kept_blocks = 1 if activation_checkpointing else layers
    kept_norms = math.ceil(num_block_norms(config) / layers) if activation_checkpointing else num_block_norms(config)
    per_position = {
        "embeddings": config.embedding_norm * number_bytes * hidden + embedding_mask,
        "attention": kept_blocks
        * (number_bytes * (5 * hidden + turned + unrepeated) + 4 * config.num_attention_heads + attention_mask),
        "feed_forward": kept_blocks * (number_bytes * (hidden + inner) + feed_forward_mask),
        "norms": (kept_norms + num_final_norms) * number_bytes * hidden,
        "checkpoints": layers * number_bytes * hidden if activation_checkpointing else 0,
    }
    return {part: micro_batch_tokens * size for part, size in per_position.items()}
