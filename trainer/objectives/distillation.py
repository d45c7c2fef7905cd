"""Distillation: what a trained model predicts, and its hidden states, as further targets at the masked tokens.

A teacher reads the same packed micro-batch as the model. It belongs to no module of the model: it is not trained,
partitioned, saved, counted or exported. `trainer/checkpoint/teacher.py` loads it.

The student's logits are computed once for the labels and for the teacher, many of them in chunks as in
`trainer/model/chunked_loss.py`: the logits of all rows never exist at once, neither the student's nor the teacher's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import MASKED_LM, DistillationSettings
from trainer.data.batch import IGNORED, Batch
from trainer.model.chunked_loss import differentiate, is_chunked, rows_per_chunk
from trainer.model.encoder import Encoder
from trainer.model.layers import WordEmbeddings
from trainer.objectives.masked_lm import MaskedLanguageModelHead
from trainer.objectives.objective import EncodedBatch, Objective, Sums


class TeacherStates(NamedTuple):
    """What a teacher computes for a micro-batch."""

    of_layers: list[torch.Tensor]
    """(P, its hidden_size) after each of its blocks, at `masked_positions`; none where no objective reads them."""
    before_decoder: torch.Tensor
    """(P, its hidden_size): what its decoder turns into logits."""


@dataclass(frozen=True)
class Teacher:
    """A frozen model in evaluation mode on the device, in the precision of the run; the same on every rank."""

    config: ModelSettings
    encoder: Encoder
    head: MaskedLanguageModelHead
    num_tokens: int
    """Tokens of the tokenizer: rows beyond it pad the vocabulary, of either side, and take no part."""
    digest: str
    """sha256 over config.json and weights."""

    def read(self, encoded: EncodedBatch) -> TeacherStates:
        """Return the states for a micro-batch, which are computed once for all objectives."""
        if "teacher" not in encoded.shared:
            encoded.shared["teacher"] = self._read(encoded.batch, encoded.of_layers is not None)
        states: TeacherStates = encoded.shared["teacher"]
        return states

    def attach_to(self, objectives: Iterable[Objective]) -> None:
        """Become the teacher of the objectives that compare the model with one."""
        for objective in objectives:
            if isinstance(objective, Taught):
                objective.teacher = self

    def describe(self) -> str:
        """Return family, number of parameters and digest in words."""
        parameters = {*self.encoder.parameters(), *self.head.parameters()}
        number = sum(parameter.numel() for parameter in parameters)
        return f"a {self.config.family} of {number:,} parameters, sha256 {self.digest[:12]}"

    @torch.no_grad()
    def _read(self, batch: Batch, keeps_layers: bool) -> TeacherStates:
        if self.config.type_vocab_size < 2:  # such a model sees both segments of a pair as one kind
            batch = replace(batch, has_segment_b=False)
        of_layers: list[torch.Tensor] | None = [] if keeps_layers else None
        last = self.encoder(batch, of_layers=of_layers).index_select(0, batch.masked_positions)
        before_decoder = self.head(last, self.encoder.embeddings.word_embeddings, lambda hidden, weight, bias: hidden)
        return TeacherStates([each.index_select(0, batch.masked_positions) for each in of_layers or ()], before_decoder)

    @property
    def decoder(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix (num_tokens, its hidden_size) and the bias (num_tokens,) of its decoder."""
        matrix = (self.head.decoder or self.encoder.embeddings.word_embeddings).weight[: self.num_tokens].detach()
        return matrix, None if self.head.bias is None else self.head.bias[: self.num_tokens].detach()


class Taught(Objective):
    """An objective that compares the model with a teacher."""

    teacher: Teacher | None = None
    """Set before the first micro-batch; a frozen dataclass, so that its modules are not modules of the model."""

    def num_predictions(self, batch: Batch) -> int:
        """Return the number of tokens that are compared."""
        return batch.num_masked

    @property
    def its_teacher(self) -> Teacher:
        assert self.teacher is not None, "a run loads its teacher before it takes a step"
        return self.teacher


class Distillation(Taught):
    """The Kullback-Leibler divergence of the model's distribution from the teacher's (Hinton et al. 2015).

    Both are softmaxes of logits / temperature over the tokens of the tokenizer, and the divergence is multiplied by
    temperature**2, so that the gradient keeps its size. Its gradient is that of the cross-entropy to the teacher's
    distribution, which is larger by the entropy of the teacher. `data.loss_weight` is of the labels alone.
    """

    metric = "distillation"

    def __init__(self, config: ModelSettings, **settings: Any) -> None:
        super().__init__(config)
        self.temperature = DistillationSettings(**settings).temperature
        self.mlm_head = MaskedLanguageModelHead(config)
        self._sums = self._compute

    def share_sums(self, encoded: EncodedBatch) -> None:
        """Compute the loss of labels too, from the same logits."""
        encoded.sums[MASKED_LM] = self._of_labels

    def forward(self, encoded: EncodedBatch) -> Sums:
        """Return `loss`, () float32: the sum of the divergences, in nats."""
        return {"loss": self._both(encoded)[1]}

    def _of_labels(self, encoded: EncodedBatch) -> Sums:
        return {"loss": self._both(encoded)[0]}

    def compile_parts(self, backend: str) -> None:
        """Compile the head with both losses."""
        self._sums = torch.compile(self._compute, backend=backend, dynamic=False)

    def _both(self, encoded: EncodedBatch) -> torch.Tensor:
        if "losses" not in encoded.shared:
            batch, teacher, words = encoded.batch, self.its_teacher, encoded.encoder.embeddings.word_embeddings
            hidden_states, theirs = encoded.hidden_states, teacher.read(encoded).before_decoder
            targets = batch.masked_positions, batch.labels, batch.label_weights
            encoded.shared["losses"] = self._sums(hidden_states, *targets, words, theirs, *teacher.decoder)
        losses: torch.Tensor = encoded.shared["losses"]
        return losses

    def _compute(
        self,
        hidden_states: torch.Tensor,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        label_weights: torch.Tensor | None,
        words: WordEmbeddings,
        theirs: torch.Tensor,
        their_matrix: torch.Tensor,
        their_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the sums (2,) float32: the loss of labels, and the divergence."""

        def losses(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            target = Target(theirs, their_matrix, their_bias, self.temperature)
            return losses_of(hidden, weight, bias, labels, target, label_weights=label_weights)

        sums: torch.Tensor = self.mlm_head(hidden_states.index_select(0, masked_positions), words, losses)
        return sums


class Target(NamedTuple):
    """The teacher's side of P predictions."""

    hidden: torch.Tensor
    """(P, its hidden_size)."""
    weight: torch.Tensor
    """(num_tokens, its hidden_size)."""
    bias: torch.Tensor | None
    """(num_tokens,)."""
    temperature: float


def losses_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    target: Target,
    chunk_rows: int | None = None,
    label_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums (2,), at least float32: the cross-entropies of labels, and temperature**2 x the divergences.

    Args:
        hidden: (P, hidden_size).
        weight: (V, hidden_size), the decoder's matrix; its first `num_tokens` rows are compared with the teacher's.
        bias: (V,), or None.
        labels: (P,) int64; rows with -100 count for nothing.
        chunk_rows: rows of a chunk; by default chunks are made of many logits alone (`is_chunked`).
        label_weights: (P,) float32, factors of the cross-entropies (`data.loss_weight`); None for 1.
    """
    if chunk_rows is None and not is_chunked(len(hidden), len(weight), hidden.dtype):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden, weight, bias).to(exact)
        reduction = "sum" if label_weights is None else "none"
        of_labels = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction)
        of_labels = of_labels if label_weights is None else (of_labels * label_weights).sum()
        ours = (logits[:, : len(target.weight)] / target.temperature).log_softmax(-1)
        wanted = (F.linear(*target[:3]).to(exact) / target.temperature).log_softmax(-1)
        divergences = F.kl_div(ours, wanted, reduction="none", log_target=True).sum(-1)
        of_teacher = torch.where(labels != IGNORED, divergences, 0.0).sum() * target.temperature**2
        return torch.stack([of_labels, of_teacher])
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight))
    arguments = (hidden, weight, bias, labels, label_weights, *target, rows, torch.is_grad_enabled())
    sums: torch.Tensor = _ChunkedLosses.apply(*arguments)  # type: ignore[no-untyped-call]  # torch gives it no types
    return sums


class _ChunkedLosses(torch.autograd.Function):
    """As `chunked_loss` does for labels alone: the gradients of both sums are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        label_weights: torch.Tensor | None,
        theirs: torch.Tensor,
        their_weight: torch.Tensor,
        their_bias: torch.Tensor | None,
        temperature: float,
        chunk_rows: int,
        with_gradients: bool,
    ) -> torch.Tensor:
        exact, num_tokens = torch.promote_types(hidden.dtype, torch.float32), len(their_weight)
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        of_hidden: list[list[torch.Tensor]] = [[], []]
        of_weight = [torch.zeros_like(weight, dtype=exact) for _ in range(2)]
        of_bias = None if bias is None else [torch.zeros_like(bias, dtype=exact) for _ in range(2)]
        factors_of_chunks: Iterable[torch.Tensor | None] = itertools.repeat(None)
        if label_weights is not None:
            factors_of_chunks = label_weights.split(chunk_rows)
        chunks = zip(*(each.split(chunk_rows) for each in (hidden, labels, theirs)), strict=True)
        for (rows, targets, their_rows), factors in zip(chunks, factors_of_chunks, strict=False):
            if torch.compiler.is_compiling() and of_bias is not None:  # as in `chunked_loss`
                rows = rows.masked_fill(of_bias[0][0].isnan(), torch.nan)
            logits = F.linear(rows, weight, bias)
            is_counted = (targets != IGNORED)[:, None]
            their_logits = F.linear(their_rows, their_weight, their_bias)
            divergences, of_common = _diverge(logits[:, :num_tokens], their_logits, is_counted, temperature)
            losses, of_logits = differentiate(logits, targets, factors)
            del logits, their_logits
            sums = sums + torch.stack([losses.sum(), divergences.sum()])
            for number, gradient in enumerate((of_logits, of_common) if with_gradients else ()):
                used = gradient.shape[1]
                of_hidden[number].append((gradient @ weight[:used]).to(exact))
                of_weight[number][:used] += gradient.T @ rows
                if of_bias is not None:
                    of_bias[number][:used] += gradient.sum(0, dtype=exact)
            del of_logits, of_common
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if with_gradients:
            ctx.save_for_backward(*map(torch.cat, of_hidden), *of_weight, *(of_bias or (None, None)))
        return sums

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: Sequence[torch.Tensor | None] = ctx.saved_tensors
        gradients: list[torch.Tensor | None] = []
        for of_labels, of_teacher, dtype in zip(saved[::2], saved[1::2], ctx.dtypes, strict=True):
            if of_labels is None or of_teacher is None:
                gradients.append(None)
            else:
                gradients.append((of_labels * factors[0] + of_teacher * factors[1]).to(dtype))
        return *gradients, *(None,) * 8


def _diverge(
    logits: torch.Tensor, their_logits: torch.Tensor, is_counted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return temperature**2 x the divergences (n, 1) of n rows, and the gradient of their sum by the logits, (n, V)."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    ours = (logits.to(exact) / temperature).log_softmax(-1)
    wanted = (their_logits.to(exact) / temperature).log_softmax(-1)
    probabilities = wanted.exp()
    divergences = (probabilities * (wanted - ours)).sum(-1, keepdim=True) * temperature**2
    gradient = torch.where(is_counted, (ours.exp() - probabilities) * temperature, 0.0)
    return torch.where(is_counted, divergences, 0.0), gradient.to(logits.dtype)


class HiddenStates(Taught):
    """1 - the cosine of the hidden states of a layer and of a layer of the teacher, in the mean over layers.

    Layer n of N is compared with layer n M / N of the teacher's M, rounded up, so the last with the last (Jiao et al.
    2020, "TinyBERT", uniform mapping). The states are those after the block, before a final norm. The cosine (Sanh et
    al. 2019, "DistilBERT") does not depend on the size of the states, which grows from block to block in some families.
    Where the widths differ, a matrix per layer that is trained, and not exported, turns the states of the model.
    """

    metric = "hidden_states"

    def __init__(self, config: ModelSettings, teacher_hidden_size: int | None = None) -> None:
        super().__init__(config)
        self.teacher_hidden_size = teacher_hidden_size or config.hidden_size
        sizes = config.hidden_size, self.teacher_hidden_size
        self.projections = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(config.num_hidden_layers))
            if self.teacher_hidden_size != config.hidden_size
            else None
        )

    def share_sums(self, encoded: EncodedBatch) -> None:
        """Have the hidden states of every layer kept."""
        encoded.of_layers = []

    def forward(self, encoded: EncodedBatch) -> Sums:
        """Return `loss`, () float32: the sum over the predicted tokens."""
        batch, theirs = encoded.batch, self.its_teacher.read(encoded).of_layers
        _ = encoded.hidden_states
        assert encoded.of_layers is not None
        is_counted, num_layers = batch.labels != IGNORED, len(encoded.of_layers)
        total = torch.zeros((), dtype=torch.float32, device=batch.labels.device)
        for number, states in enumerate(encoded.of_layers):
            masked = states.index_select(0, batch.masked_positions)
            if self.projections is not None:
                masked = self.projections[number](masked)
            wanted = theirs[teacher_layer(number + 1, num_layers, len(theirs)) - 1]
            cosines = F.cosine_similarity(masked.float(), wanted.float(), dim=-1)
            total = total + torch.where(is_counted, 1.0 - cosines, 0.0).sum()
        return {"loss": total / num_layers}


def teacher_layer(number: int, num_layers: int, num_layers_of_teacher: int) -> int:
    """Return the layer of the teacher, counted from 1, that layer `number` of the model is compared with."""
    return -(-number * num_layers_of_teacher // num_layers)
