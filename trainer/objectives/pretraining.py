"""The pretraining model: an encoder and its objectives, whose losses are sums.

The losses are sums, never means: micro-batches have different numbers of predictions, and their sum over the global
batch, by which the loss is divided, is known to `trainer/loop/step.py` only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import MASKED_LM, MASKED_LM_ALONE, SENTENCE_PAIRS, Objectives
from trainer.data.batch import Batch
from trainer.model.encoder import Encoder
from trainer.model.initialization import initialize
from trainer.model.layers import FeedForward, GatedFeedForward, SelfAttention
from trainer.objectives.build import build_objectives, check_trained, submodules_of
from trainer.objectives.masked_lm import MaskedLM
from trainer.objectives.objective import EncodedBatch, Objective, Scores, Sums, explained, seed_micro_batch

if TYPE_CHECKING:
    from trainer.objectives.sentence_pairs import SentencePairs

MAX_GRAPHS = 64
"""Limit for all blocks: ModernBERT has 3 kinds, so 6 graphs per stage in training and evaluation. Beyond torch's own
limit of 8 a block would run uncompiled, with a warning."""

Output = Mapping[str, Sums]
"""The sums of each objective by its name."""


class Predictions(NamedTuple):
    """The model's predictions for one micro-batch, in its own precision."""

    mlm_logits: torch.Tensor
    """(P, padded_vocab_size) for `masked_positions`."""
    pair_logits: torch.Tensor | None
    """(C, 2) for `cls_positions`; None without sentence pairs."""


class PretrainingModel(nn.Module):
    """An encoder with the heads of its objectives."""

    def __init__(
        self,
        config: ModelSettings,
        objectives: Objectives = MASKED_LM_ALONE,
        activation_checkpointing: bool = False,
    ) -> None:
        """Build the model with weights that `initialize` sets.

        The submodules of objectives are submodules of the model, so that the name of a weight says what it is, not
        which loss trains it.

        Raises:
            UsageError: an objective of the user's cannot be built.
        """
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, activation_checkpointing)
        self.objectives: Mapping[str, Objective] = build_objectives(objectives, config)
        """By name (`ObjectiveSettings.name`), in order."""
        for name, module in submodules_of(self.objectives, taken=dir(self)):
            self.add_module(name, module)

    def forward(
        self, batch: Batch, scored: Collection[str] = (), objectives: Collection[str] | None = None
    ) -> Output | Mapping[str, Scores]:
        """Return the sums of objectives over `batch`, which must be on the model's device, or their single scores.

        Args:
            scored: names of the objectives whose scores are returned instead, as in evaluation.
            objectives: names of those whose sums are returned; by default all.
        """
        encoded, output = EncodedBatch(batch, self.encoder), dict[str, Any]()
        names = scored or (self.objectives if objectives is None else objectives)
        chosen = {name: objective for name, objective in self.objectives.items() if name in names}
        for objective in () if scored else chosen.values():
            objective.share_sums(encoded)
        for name, objective in chosen.items():
            with explained(name):
                output[name] = objective.checked_scores(encoded) if scored else objective.checked_sums(encoded)
        return output

    def predict(self, batch: Batch) -> Predictions:
        """Return the logits behind the built-in losses, at the predicted positions and the pairs' [CLS] only."""
        encoded = EncodedBatch(batch, self.encoder)
        pairs = cast("SentencePairs | None", self.objectives.get(SENTENCE_PAIRS))
        return Predictions(self.masked_lm.logits(encoded), None if pairs is None else pairs.logits(encoded))

    @property
    def masked_lm(self) -> MaskedLM:
        """The objective of masked language modeling, which a model needs to fill masks and to be exported."""
        objective = self.objectives[MASKED_LM]
        assert isinstance(objective, MaskedLM)
        return objective

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation, as dropout does, for objectives too."""
        for objective in self.objectives.values():
            objective.train(mode)
        return super().train(mode)

    def initialize(self, seed: int) -> None:
        """Initialize every weight from `seed`, the same on every device; then objectives set the weights that differ.

        Raises:
            UserError: an objective of the user's fails, or leaves a weight frozen.
        """
        initialize(self, seed, self.config)
        for number, (name, objective) in enumerate(self.objectives.items()):
            seed_micro_batch(seed, 0, number)
            with explained(name), torch.no_grad():
                objective.initialize()
        check_trained(self.objectives)

    def hidden_matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """Return the weights of the linear layers inside the blocks, and the rows of the matrices stacked in each.

        They are what Muon updates (`trainer/engine/muon.py`); embeddings, norms, biases and heads are the others.
        """
        matrices: dict[torch.Tensor, tuple[int, ...]] = {}
        for module in self.encoder.layers.modules():
            if isinstance(module, SelfAttention | FeedForward | GatedFeedForward):
                matrices |= module.matrices()
        return matrices

    def set_rope_bases(self, config: ModelSettings) -> None:
        """Make attention rotate queries and keys with the bases of `config` from now on."""
        self.encoder.rope_bases = {"global": config.global_rope_theta, "local": config.local_rope_theta}

    def set_output_bias(self, token_counts: torch.Tensor) -> None:
        """Begin at the log of each token's frequency: the best prediction without context.

        Args:
            token_counts: (vocab_size,) int64, how often each token occurs in the training data; the special tokens and
                the rows that pad the vocabulary count as tokens that occur less than once.
        """
        counts = torch.full((self.config.padded_vocab_size,), 0.5, dtype=torch.float64)
        counts[: len(token_counts)] += token_counts
        bias = next(each.mlm_head.bias for each in self.objectives.values() if isinstance(each, MaskedLM))
        assert bias is not None, "the settings refuse frequencies without a decoder bias"
        with torch.no_grad():
            bias.copy_((counts / counts.sum()).log())

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile each block, and what objectives compile, with torch.compile, for the shapes of each stage.

        Blocks of one kind share their graphs: the kinds times the stages, in training and in evaluation. All shapes are
        fixed but the capacity for sequences and the longest of them, which are symbols of the graph.
        """
        self.encoder.is_compiled = True
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
        for layer in self.encoder.layers:
            layer.compile(backend=backend, dynamic=False)
        for objective in self.objectives.values():
            objective.compile_parts(backend)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the parameters of each part of a model by name, `total` last; the tied decoder counts once, as words."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part_of(name)
        counts[part] = counts.get(part, 0) + parameter.numel()
    return {**counts, "total": sum(counts.values())}


def num_parameters(config: ModelSettings, objectives: Objectives) -> int:
    """Return the number of trained parameters of a model, which is built without memory for them."""
    with torch.device("meta"):
        return parameter_counts(PretrainingModel(config, objectives))["total"]


def _part_of(name: str) -> str:
    """Return `embeddings.word` of `encoder.embeddings.word_embeddings.weight`, `layers.attention` of every block."""
    parts = name.split(".")
    if parts[0] != "encoder":
        return parts[0]
    if parts[1] == "layers":
        return f"layers.{'norms' if parts[3].endswith('_norm') else parts[3]}"
    return f"embeddings.{parts[2].removesuffix('_embeddings')}" if parts[1] == "embeddings" else parts[1]
