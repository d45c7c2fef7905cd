from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.objectives import loss_sum
from trainer.config.model_settings import ModelSettings
from trainer.model import chunked_loss as module
from trainer.model.chunked_loss import chunked_loss, is_chunked, rows_per_chunk
from trainer.model.sizes import loss_bytes

Loss = Callable[..., torch.Tensor]


def whole_loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By torch, of all logits at once; in float64 the reference."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits if hidden.dtype == torch.float64 else logits.float(), targets, reduction="sum")


def in_chunks_of(rows: int) -> Loss:
    return lambda *inputs: chunked_loss(*inputs, chunk_rows=rows)


def make_inputs(num_rows: int = 150, vocab_size: int = 700, hidden_size: int = 48) -> list[torch.Tensor]:
    """Hidden states, weight, bias, which bfloat16 holds exactly, and targets, of which a seventh is ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, hidden_size), (vocab_size, hidden_size), (vocab_size,))
    values = [0.4 * torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    targets = torch.randint(vocab_size, (num_rows,), generator=generator)
    targets[::7] = -100
    return [*values, targets]


def loss_and_gradients(loss_of: Loss, inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """In float64, after a backward whose factor is no power of two."""
    *values, targets = inputs
    leaves = [value.to(dtype).detach().requires_grad_() for value in values]
    loss = loss_of(*leaves, targets)
    (loss * 0.0123).backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves)
    return [loss.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rows", [150, 64, 1])
def test_loss_and_gradients_are_those_of_all_logits_at_once(rows: int) -> None:
    """Within 1e-6 of them in float32: 150 rows in one chunk, in three of which the last is smaller, and one by one."""
    inputs = make_inputs()
    expected = loss_and_gradients(whole_loss, inputs, torch.float32)
    for found, wanted in zip(loss_and_gradients(in_chunks_of(rows), inputs, torch.float32), expected, strict=True):
        assert error(found, wanted) < 1e-6


@pytest.mark.parametrize("rows", [150, 64])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_weighted_losses_and_their_gradients_are_those_of_all_logits_at_once(rows: int, is_compiled: bool) -> None:
    weights = torch.rand(150, generator=torch.Generator().manual_seed(1)) * 9

    def whole(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none") * weights).sum()

    def in_chunks(*inputs: torch.Tensor) -> torch.Tensor:
        return chunked_loss(*inputs, chunk_rows=rows, weights=weights)

    torch._dynamo.reset()
    ours = torch.compile(in_chunks, backend="aot_eager", dynamic=False) if is_compiled else in_chunks
    inputs = make_inputs()
    expected = loss_and_gradients(whole, inputs, torch.float32)
    for found, wanted in zip(loss_and_gradients(ours, inputs, torch.float32), expected, strict=True):
        assert error(found, wanted) < 1e-6
    torch._dynamo.reset()


@pytest.mark.parametrize("rows", [150, 20])
def test_gradients_in_bfloat16_are_as_close_to_exact_ones_as_those_of_all_logits(rows: int) -> None:
    """The hidden states' are rounded once more (1.04 times the error), and the sums over rows less often."""
    inputs = make_inputs()
    exact = loss_and_gradients(whole_loss, inputs, torch.float64)
    whole, chunked = (loss_and_gradients(way, inputs, torch.bfloat16) for way in (whole_loss, in_chunks_of(rows)))
    for before, now, reference in zip(whole[1:], chunked[1:], exact[1:], strict=True):
        assert error(now, reference) < 1.08 * error(before, reference) < 0.02
    assert error(chunked[0], exact[0]) < 1e-4


def test_the_loss_of_a_token_whose_probability_is_below_the_smallest_number_is_exact() -> None:
    hidden, weight = torch.tensor([[1.0], [-100.0]]), torch.tensor([[200.0], [0.0], [-1.0]])
    targets = torch.tensor([2, 0])
    inputs = [hidden, weight, torch.zeros(3), targets]
    assert chunked_loss(*inputs, chunk_rows=1).item() == 201.0 + 20_100.0
    _, of_hidden, *_ = loss_and_gradients(in_chunks_of(1), inputs, torch.float32)
    assert torch.allclose(of_hidden, 0.0123 * torch.tensor([[201.0], [-201.0]], dtype=torch.float64))


def test_rows_without_targets_give_no_loss_and_no_gradients() -> None:
    *values, targets = make_inputs()
    nothing = [*values, torch.full_like(targets, -100)]
    for found in loss_and_gradients(in_chunks_of(64), nothing, torch.float32):
        assert not found.any()


def test_a_value_that_is_not_finite_gives_gradients_that_are_not() -> None:
    """By which all ranks skip the step."""
    inputs = make_inputs()
    inputs[0][3, 5] = torch.inf
    loss, *gradients = loss_and_gradients(in_chunks_of(64), inputs, torch.float32)
    assert not loss.isfinite() and all(gradient.isnan().any() for gradient in gradients)


def test_without_gradients_the_loss_is_the_same() -> None:
    inputs = [value.requires_grad_() if value.is_floating_point() else value for value in make_inputs()]
    trained = chunked_loss(*inputs, chunk_rows=64)
    with torch.no_grad(), Memory() as memory:
        evaluated = chunked_loss(*inputs, chunk_rows=64)
    assert trained.requires_grad and not evaluated.requires_grad and torch.equal(trained, evaluated)
    logits = 64 * 700 * (2 + 4)
    assert logits <= memory.peak < 1.2 * logits + 4 * inputs[1].numel()


def test_a_second_backward_is_an_error() -> None:
    """The first one multiplies the gradients in their memory."""
    hidden, weight, bias, targets = make_inputs()
    loss = chunked_loss(hidden.requires_grad_(), weight, bias, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Memory(TorchDispatchMode):
    """The most bytes that tensors made within the block have at once."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is(tensor)}
        for tensor in filter(_is, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes and storage._cdata not in known:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def peak_memory(loss_of: Loss, inputs: list[torch.Tensor], dtype: torch.dtype) -> int:
    """Bytes, of a forward and backward, without the inputs."""
    *values, targets = inputs
    leaves = [value.to(dtype).detach().requires_grad_() for value in values]
    with Memory() as memory:
        (loss_of(*leaves, targets) / 1000).backward()
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [24, 64])
def test_the_peak_of_memory_is_a_sixth_at_most_and_what_the_estimate_says(
    hidden_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sizes are a 16th of 4,000 rows, 256,000 tokens and a width of 384 or 1,024: sizes of matrices a 256th."""
    monkeypatch.setattr(module, "LOGITS_OF_CHUNK", module.LOGITS_OF_CHUNK // 256)
    monkeypatch.setattr(module, "LOGITS_IN_ONE", module.LOGITS_IN_ONE // 256)
    inputs = make_inputs(250, 16_000, hidden_size)
    chunked, whole = (peak_memory(way, inputs, dtype) for way in (chunked_loss, whole_loss))
    assert 6 * chunked <= whole
    config = ModelSettings(vocab_size=16_000, hidden_size=hidden_size, num_attention_heads=1)
    waiting = 7 * 16_000 * hidden_size * 2 if dtype == torch.bfloat16 else 0  # where it is compiled
    # Without vectors of numbers per token, and as if all matrices in bfloat16 existed together.
    assert 0.95 * chunked < loss_bytes(config, 250, dtype) - waiting < 1.3 * chunked


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "rows"),
    [(512, 32_768, None), (1_024, 8_192, None), (513, 32_768, 513), (4_096, 262_144, 512), (40_960, 32_768, 5_120)],
)
def test_chunks_begin_at_64_mib_of_logits_and_have_512_mib_or_an_eighth(num_rows, vocab_size, rows) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert is_chunked(num_rows, vocab_size, dtype) == (rows is not None)
    assert not is_chunked(num_rows, vocab_size, torch.float16), "it needs the loss scale before it rounds"
    assert rows is None or rows_per_chunk(num_rows, vocab_size) == rows


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["tiny", "modern", "euro"])
def test_a_model_with_its_loss_in_chunks_learns_the_same(
    tiny_config, modern_config, euro_config, make_model, make_documents, pack, monkeypatch, family, checkpointing
) -> None:
    """The word matrix gets gradients of its two uses, if it is the decoder too."""
    batch = pack(make_documents([9, 6, 12, 16]), 16).batch
    config = {"tiny": tiny_config, "modern": modern_config, "euro": euro_config}[family]
    ways = []
    for largest in (module.LOGITS_IN_ONE, 0):
        monkeypatch.setattr(module, "LOGITS_IN_ONE", largest)
        monkeypatch.setattr(module, "LOGITS_OF_CHUNK", 0)
        model = make_model(config, activation_checkpointing=checkpointing)
        output = model(batch)
        loss_sum(output).backward()
        of_tokens = output["masked_lm"]["loss"]
        ways.append([of_tokens.detach(), *(parameter.grad for parameter in model.parameters())])
        assert ("Chunked" in of_tokens.grad_fn.name()) == (largest == 0)
    for found, expected in zip(*reversed(ways), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("next_sentence", [False, True])
def test_evaluation_in_chunks_scores_every_token_the_same(
    tiny_config, make_model, make_documents, pack, monkeypatch, next_sentence
) -> None:
    batch = pack(make_documents([9, 6, 12, 16]), 16).batch
    model = make_model(tiny_config, next_sentence).eval()
    ranked = model.predict(batch).mlm_logits.argsort(-1, descending=True)
    batch.labels[:3], batch.labels[3:6] = ranked[:3, 0], ranked[3:6, 4]
    calls: list[int] = []
    model.mlm_head.register_forward_hook(lambda module, inputs, logits: calls.append(len(logits)))
    with torch.no_grad():
        expected = model(batch, scored=["masked_lm"])["masked_lm"]
        monkeypatch.setattr(module, "LOGITS_IN_ONE", 0)
        monkeypatch.setattr(module, "LOGITS_OF_CHUNK", 0)
        found = model(batch, scored=["masked_lm"])["masked_lm"]
    whole = len(batch.labels)
    assert calls[0] == sum(calls[1:]) == whole and max(calls[1:]) == -(-whole // 8)
    for name, values in expected.values.items():
        torch.testing.assert_close(found.values[name], values)
    assert found.values["accuracy"][:6].tolist() == [1, 1, 1, 0, 0, 0] and found.values["accuracy_top5"][:6].all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_compiled_it_is_one_graph_with_the_same_numbers(dtype: torch.dtype, has_bias: bool) -> None:
    """In bfloat16 but for a few that round to a neighbor."""
    torch._dynamo.reset()
    counters.clear()
    loss_of, inputs = in_chunks_of(20), make_inputs()
    if not has_bias:
        loss_of = lambda hidden, weight, targets: chunked_loss(hidden, weight, None, targets, 20)  # noqa: E731
        del inputs[2]
    compiled = torch.compile(loss_of, backend="aot_eager", dynamic=False)
    expected = loss_and_gradients(loss_of, inputs, dtype)
    for _ in range(2):
        for found, wanted in zip(loss_and_gradients(compiled, inputs, dtype), expected, strict=True):
            assert error(found, wanted) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()
