"""The way of CUDA, gone on the CPU: variable-length attention at fixed shapes, bf16 with fp32 master weights, and no
look at what the device computes within a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.support.objectives import all_objectives, loss_sum
from tests.trainer.model.varlen_on_cpu import varlen_on_cpu
from trainer.benchmark.plain_engine import PlainEngine
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.config.training_settings import OptimizerSettings
from trainer.data.batch import IGNORED, TENSOR_NAMES, Batch
from trainer.distributed.process_group import Ranks
from trainer.loop import step as step_module
from trainer.loop.step import Counting, StepResult, take_step
from trainer.metrics.throughput import WorkClock
from trainer.model import encoder
from trainer.objectives.pretraining import PretrainingModel

LENGTH = 16
BATCHES = ([9, 6, 12], [16, 2, 1, 13], [1, 15, 16], [5, 5, 5, 16])
CPU = torch.device("cpu")
pytestmark = pytest.mark.gpu


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Attention takes CUDA's kernel; gives its calls."""
    monkeypatch.setattr(encoder, "choose_kernel", lambda *arguments: "varlen")
    torch._dynamo.reset()
    counters.clear()
    with varlen_on_cpu() as calls:
        yield calls
    torch._dynamo.reset()


def with_capacity(batch: Batch, num_sequences: int) -> Batch:
    """As the loader makes them: fixed shapes, but for the room for sequences and the longest of them, which differ."""
    unused = torch.full((num_sequences + 1 - batch.cu_seqlens.numel(),), batch.input_ids.numel(), dtype=torch.int32)
    spare = (0, 2 * LENGTH - batch.labels.numel())
    return replace(
        batch,
        longest_sequence=LENGTH + num_sequences,  # a bound, another one in each batch
        cu_seqlens=torch.cat([batch.cu_seqlens, unused]),
        masked_positions=F.pad(batch.masked_positions, spare),
        labels=F.pad(batch.labels, spare, value=IGNORED),
    )


@pytest.fixture
def batches(make_documents, pack) -> list[Batch]:
    made = [
        with_capacity(pack(make_documents(lengths, seed=n), LENGTH).batch, 12 + n) for n, lengths in enumerate(BATCHES)
    ]
    assert all(batch.num_rows == 2 for batch in made)
    return made


@pytest.fixture
def configs(tiny_config, modern_config, euro_config) -> dict[str, ModelSettings]:
    return {"bert": tiny_config, "modernbert": modern_config, "eurobert": euro_config}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert"])
def test_loss_and_gradients_are_those_of_the_reference_attention(
    configs, make_model, batches, monkeypatch, varlen, family, is_causal
):
    config = configs[family]
    ours, reference = (make_model(config, next_sentence=False) for _ in range(2))
    for batch in (replace(batch, is_causal=is_causal) for batch in batches):
        loss = loss_sum(ours(batch))
        loss.backward()
        with monkeypatch.context() as patch:
            patch.setattr(encoder, "choose_kernel", lambda *arguments: "masked")
            expected = loss_sum(reference(batch))
        expected.backward()
        torch.testing.assert_close(loss, expected)
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, reference)]
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-4, msg=name)
    lefts = {-1, 3} if family == "modernbert" else {-1}
    assert {call["window_size"] for call in varlen} == {(left, 0 if is_causal else left) for left in lefts}


def test_attention_gets_the_capacity_of_the_batch_and_its_longest_sequence(tiny_config, make_model, batches, varlen):
    model = make_model(tiny_config)
    for batch, longest in [*((batch, batch.longest_sequence) for batch in batches), (batches[0], 0)]:
        varlen.clear()
        model(replace(batch, longest_sequence=longest))
        assert {call["cu_seqlens"].numel() for call in varlen} == {batch.cu_seqlens.numel()}
        assert {call["max_q"] for call in varlen} == {longest or LENGTH}
        assert all(type(call["max_q"]) is int for call in varlen)
        assert all(call["cu_seqlens"][-1] == 2 * LENGTH for call in varlen), "unused entries repeat the total"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "equal"),
    [
        *(("bert", None), ("modernbert", None), ("eurobert", None), ("bert", 0)),
        pytest.param("bert", 3, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_are_whole_graphs_and_documents_of_other_lengths_compile_nothing(
    configs, make_model, batches, varlen, family, equal
):
    """Also where a batch has a bound of as many positions as the number of its sequences' starts."""
    if equal is not None:
        batches[equal] = replace(batches[equal], longest_sequence=batches[equal].cu_seqlens.numel())
    model = make_model(configs[family], next_sentence=False)
    engine = PlainEngine(model, OptimizerSettings(), CPU, torch.bfloat16)
    model.compile_blocks(backend="aot_eager")
    graphs = []
    for batch in batches:
        varlen.clear()
        engine.backward(loss_sum(engine.forward(batch)) / batch.num_masked)
        engine.step()
        graphs.append(counters["stats"]["unique_graphs"])
        assert {call["max_q"] for call in varlen} == {batch.longest_sequence}
    assert not counters["graph_break"]
    assert graphs == [(3 if family == "modernbert" else 1) + 1] * len(batches)


def as_fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    return replace(batch, **{name: mode.from_tensor(getattr(batch, name)) for name in TENSOR_NAMES})


def take_fake_step(config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> StepResult:
    """A whole step in bf16 on tensors that have shapes and no values: whoever asks for one gets an exception."""
    mode, ranks = FakeTensorMode(allow_non_fake_inputs=True), Ranks(0, 1, 0, CPU)
    model = PretrainingModel(config, objectives_of("next_sentence"))
    engine = PlainEngine(model, OptimizerSettings(), CPU, torch.bfloat16, gradient_clipping=1.0)
    monkeypatch.setattr(step_module, "on_device", lambda given, device: [as_fake(batch, mode) for batch in given])
    global_batch = SimpleNamespace(micro_batches=tuple(batches), first_slice=0)
    objectives = all_objectives(model)
    counts = Counting(global_batch, objectives, ranks).counts
    with mode:
        result = take_step(
            engine, global_batch, counts, objectives, 0, 1e-4, 0, ranks, WorkClock(CPU), lambda text: None
        )
    return result


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert"])
def test_nothing_in_a_step_waits_for_a_value_of_the_device(configs, batches, monkeypatch, varlen, family):
    result = take_fake_step(configs[family], batches, monkeypatch)
    assert result.applied and result.grad_norm.shape == ()


def test_a_look_at_a_value_within_the_step_would_be_seen(tiny_config, batches, monkeypatch, varlen):
    score = PretrainingModel.forward

    def looking(self: PretrainingModel, batch: Batch, **options: Any) -> Any:
        output = score(self, batch, **options)
        output["masked_lm"]["loss"].item()
        return output

    monkeypatch.setattr(PretrainingModel, "forward", looking)
    with pytest.raises(DataDependentOutputException):
        take_fake_step(tiny_config, batches, monkeypatch)
