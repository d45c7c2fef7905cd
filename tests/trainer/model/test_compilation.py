"""torch.compile of the blocks: whole graphs, made once. But for one slow test without a code generator or compiler."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.benchmarks.kernel_trace import Kernel, count, in_bfloat16, shapes
from tests.support.toy_processes import finish, start_ranks
from trainer.config.model_settings import ModelSettings
from trainer.data.batch import IGNORED, Batch
from trainer.model import encoder
from trainer.model.attention import attention_layout
from trainer.model.encoder import build_block
from trainer.model.positions import rotation

LENGTH = 16
BATCHES = ([9, 6, 12], [16, 2, 1, 13], [1, 15, 16], [5, 5, 5, 16])
"""Sequences of two rows each, other ones in every batch."""


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph yet; attention by sequence at these short rows too, as longer ones take it."""
    monkeypatch.setattr(encoder, "choose_kernel", lambda *arguments: "by_sequence")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def with_capacity(batch: Batch, num_sequences: int) -> Batch:
    """As the loader makes them: fixed shapes, but for the room for sequences, which differs within a stage."""
    unused = torch.full((num_sequences + 1 - batch.cu_seqlens.numel(),), batch.input_ids.numel(), dtype=torch.int32)
    spare = (0, 2 * LENGTH - batch.labels.numel())
    return replace(
        batch,
        cu_seqlens=torch.cat([batch.cu_seqlens, unused]),
        masked_positions=F.pad(batch.masked_positions, spare),
        labels=F.pad(batch.labels, spare, value=IGNORED),
    )


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *(("bert", False), ("modernbert", True), ("eurobert", True)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("bert", True), ("modernbert", False))),
    ],
)
def test_blocks_are_one_graph_each_kind_and_never_compiled_again(
    tiny_config, modern_config, euro_config, make_model, make_documents, pack, family, checkpointing
):
    config = {"bert": tiny_config, "modernbert": modern_config, "eurobert": euro_config}[family]
    model = make_model(config, next_sentence=family == "bert", activation_checkpointing=checkpointing)
    plain = make_model(config, next_sentence=family == "bert", activation_checkpointing=checkpointing)
    model.compile_blocks(backend="aot_eager")
    after_first = 0
    for number, lengths in enumerate(BATCHES):
        batch = with_capacity(pack(make_documents(lengths, seed=number), LENGTH).batch, 12 + 4 * number)
        assert batch.num_rows == 2
        losses = []
        for trained in (model, plain):
            trained.zero_grad()
            loss = trained(batch)["masked_lm"]["loss"]
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)
        after_first = after_first or num_graphs()
    assert not counters["graph_break"]
    assert num_graphs() == after_first
    # ModernBERT's first block has no attention norm, and local blocks see a window: three kinds. And the MLM head.
    assert after_first == (3 if family == "modernbert" else 1) + 1


@pytest.mark.long
def test_a_causal_stage_has_graphs_of_its_own_and_the_masked_one_finds_its_again(
    modern_config, make_model, make_documents, pack
):
    model, plain = (make_model(modern_config, next_sentence=False) for _ in range(2))
    model.compile_blocks(backend="aot_eager")
    masked = with_capacity(pack(make_documents(BATCHES[0]), LENGTH).batch, 12)
    graphs = []
    for batch in (masked, replace(masked, is_causal=True)) * 2:
        losses = []
        for trained in (model, plain):
            trained.zero_grad()
            losses.append(trained(batch)["masked_lm"]["loss"])
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)
        graphs.append(num_graphs())
    assert graphs == [3 + 1, 3 + 1 + 3, 3 + 1 + 3, 3 + 1 + 3] and not counters["graph_break"]


@pytest.mark.long
def test_stages_and_evaluation_find_their_own_graphs_and_nothing_falls_back(
    modern_config, make_model, make_documents, pack
):
    """More graphs than torch's default limit for one function, beyond which it would silently run uncompiled."""
    model = make_model(modern_config, next_sentence=False)
    model.compile_blocks(backend="eager")
    lengths = (8, 16)
    for round_number in range(2):
        for length in lengths:
            packed = pack(make_documents([length, length - 1], seed=length), length)
            batch = with_capacity(packed.batch, 8 + round_number)
            model.train()(batch)["masked_lm"]["loss"].backward()
            with torch.no_grad():
                model.eval()(batch)
        if round_number == 0:
            graphs = num_graphs()
    assert graphs == num_graphs() == (3 + 1) * 2 * len(lengths)


BLOCKS = {
    "bert": ModelSettings(hidden_size=64, num_attention_heads=2, intermediate_size=96),
    "modernbert": ModelSettings(family="modernbert", hidden_size=64, num_attention_heads=2, intermediate_size=96),
}


@functools.cache
def elementwise_kernels(family: str, compiled: bool) -> list[Kernel]:
    """Of a block's forward and backward: what is neither a product nor attention."""
    config = BLOCKS[family]
    with FakeTensorMode():
        batch = shapes(2, 64, 8, 0.15)
        block = in_bfloat16(lambda: build_block(config, 1)).train()
        turning = rotation(batch.position_ids, config.head_size, 1e4) if family == "modernbert" else None
        layout = attention_layout(batch, torch.bfloat16, "varlen", rotation=turning)
        hidden = torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty_like(hidden)
        kernels = count(block, lambda: block(hidden, layout).backward(gradient), compiled)
    return [kernel for kernel in kernels if kernel.kind == "elementwise"]


def words(kernel: Kernel) -> set[str]:
    return set(kernel.name.split("+"))


@pytest.mark.long
@pytest.mark.parametrize(("family", "eager", "compiled"), [("bert", 25, 17), ("modernbert", 63, 12)])
def test_compiled_blocks_have_few_kernels_between_their_products(family: str, eager: int, compiled: int) -> None:
    """Counted in Inductor's scheduler, for the CPU, whose `cat` is a kernel for each of its parts."""
    before, after = (elementwise_kernels(family, way) for way in (False, True))
    assert [len(before), len(after)] == [eager, compiled]


@pytest.mark.long
def test_rotations_and_the_gated_feed_forward_are_one_kernel_each_way() -> None:
    """As of commit c025165 the rotation's halves were joined in float32 first: five kernels forward, three backward."""
    compiled = elementwise_kernels("modernbert", True)
    rotary = [kernel for kernel in compiled if "mul" in words(kernel) and not {"sum", "erf", "rsqrt"} & words(kernel)]
    one, angles = 128 * 64 * 2, 2 * 128 * 16 * 4  # bytes: queries, keys or values in bf16; cosine and sine in float32
    assert [kernel.num_bytes for kernel in rotary] == [3 * one + angles + 2 * one, 2 * one + angles + 2 * one]
    gated = [kernel.num_bytes for kernel in compiled if "erf" in words(kernel)]
    values_and_gates, product = 128 * 2 * 96 * 2, 128 * 96 * 2
    assert gated == [values_and_gates + product, 2 * values_and_gates + product]


@pytest.mark.long
@pytest.mark.parametrize("next_sentence", [False, True])
def test_the_content_of_a_micro_batch_compiles_no_new_graph(
    tiny_config, make_model, make_documents, pack, next_sentence
):
    """Rows that only fill up, as at the end of an evaluation; one segment or two; with and without labels."""
    model = make_model(tiny_config, next_sentence=next_sentence)
    model.compile_blocks(backend="eager")
    full = with_capacity(pack(make_documents(BATCHES[0], seed=0), LENGTH).batch, 12)
    two_segments = torch.arange(full.input_ids.numel()) % 2
    empty_rows = torch.tensor([0, LENGTH, *[2 * LENGTH] * 20], dtype=torch.int32)
    batches = (
        replace(full, has_segment_b=False),
        replace(full, token_type_ids=two_segments),
        replace(full, labels=torch.full_like(full.labels, IGNORED), num_unreadable_rows=1),
        replace(full, input_ids=torch.zeros_like(full.input_ids), cu_seqlens=empty_rows, pad_token_id=0),
    )
    for number, batch in enumerate([*batches, *batches]):
        model.train()(batch)["masked_lm"]["loss"].backward()
        with torch.no_grad():
            model.eval()(batch, scored=model.objectives)
        # Block and head in training, the block in evaluation, which scores each prediction by itself.
        assert num_graphs() == 3, f"micro-batch {number}"


WORKER = Path(__file__).with_name("compiled_worker.py")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""Inductor sums fp32 in another order; 4 steps at a learning rate of 0.01 make little of it."""


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("backend", "stages"), [("aot_eager", ["2"]), pytest.param("inductor", ["1", "2"], marks=pytest.mark.slow)]
)
def test_through_deepspeed_compiled_blocks_train_as_eager_ones_in_one_graph_each(tmp_path, backend, stages):
    """`training.compile` makes exactly this call, with inductor; that one needs a C++ compiler and minutes."""
    (finished,) = finish(start_ranks([str(WORKER), str(tmp_path), backend, *stages], world_size=1), timeout=550)
    status, stdout, stderr = finished
    assert status == 0, stderr
    for found in json.loads(stdout.splitlines()[-1]).values():
        eager, compiled = found["eager"], found["compiled"]
        for name in ("losses", "norms"):
            torch.testing.assert_close(torch.tensor(compiled[name]), torch.tensor(eager[name]), **TOLERANCE)
        assert len(set(eager["losses"])) == len(eager["losses"]) and min(eager["norms"]) > 0.0
        assert eager["graphs"] == [0] * len(eager["graphs"])
        assert compiled["graphs"] == [2] * len(eager["graphs"]) and compiled["graph_breaks"] == 0
