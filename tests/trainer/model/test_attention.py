from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, Kernel, attend, attention_layout, choose_kernel, split_qkv

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROW_LENGTH = 16
BOUNDARIES = [0, 5, 6, 16, 32, 32, 32]
"""Two rows: sequences of 5, 1 and 10 positions, then one that fills its row; two unused entries."""
CPU_KERNELS: tuple[Kernel, ...] = ("masked", "by_sequence")
REACHES = (None, 0, 1, 4, 100)


def make_batch(device: str = "cpu", is_causal: bool = False) -> Batch:
    num_tokens = BOUNDARIES[-1]
    nothing = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.zeros(num_tokens, dtype=torch.int64),
        token_type_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor(BOUNDARIES, dtype=torch.int32),
        masked_positions=nothing,
        labels=nothing,
        cls_positions=nothing,
        next_sentence_labels=nothing,
        sequence_length=ROW_LENGTH,
        is_causal=is_causal,
    ).to(torch.device(device))


def draw_qkv(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, BOUNDARIES[-1], 2, 8, generator=generator, dtype=torch.float64).to(dtype).unbind(0)


def attend_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: int | None = None, is_causal: bool = False
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v, one position of one head at a time."""
    result = torch.zeros_like(query)
    for start, end in zip(BOUNDARIES, BOUNDARIES[1:], strict=False):
        for position in range(start, end):
            left, right = (start, end) if reach is None else (position - reach, position + reach + 1)
            seen = slice(max(start, left), min(end, position + 1 if is_causal else right))
            for head in range(query.shape[1]):
                scores = key[seen, head] @ query[position, head] / query.shape[-1] ** 0.5
                result[position, head] = torch.softmax(scores, dim=-1) @ value[seen, head]
    return result


def layout_of(
    kernel: Kernel, reach: int | None = None, dtype: torch.dtype = torch.float64, is_causal: bool = False
) -> AttentionLayout:
    return attention_layout(make_batch(is_causal=is_causal), dtype, kernel, reach)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_each_place_attends_to_its_sequence_as_far_as_it_sees(kernel, reach, is_causal):
    query, key, value = draw_qkv()
    attended = attend(query, key, value, layout_of(kernel, reach, is_causal=is_causal))
    torch.testing.assert_close(attended, attend_by_hand(query, key, value, reach, is_causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", [None, 4])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_gradients_are_those_of_attention_by_hand(kernel, reach, is_causal):
    gradients = []
    for function in (
        lambda *qkv: attend(*qkv, layout_of(kernel, reach, is_causal=is_causal)),
        lambda *qkv: attend_by_hand(*qkv, reach, is_causal),
    ):
        qkv = [tensor.clone().requires_grad_() for tensor in draw_qkv()]
        weights = torch.arange(qkv[0].numel(), dtype=torch.float64).view_as(qkv[0]).sin()
        (function(*qkv) * weights).sum().backward()
        gradients.append([tensor.grad for tensor in qkv])
    for ours, by_hand in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_sequence_of_one_place_attends_to_itself_alone(kernel):
    query, key, value = draw_qkv()
    torch.testing.assert_close(attend(query, key, value, layout_of(kernel))[5], value[5])


@pytest.mark.long
def test_the_operator_for_sequences_keeps_torchs_contract():
    """Schema, fake tensors and autograd, which torch.compile relies on."""
    qkv = [tensor.requires_grad_() for tensor in draw_qkv(torch.float32)]
    operator = torch.ops.clozeworks.attend_by_sequence.default
    for reach, is_causal in ((None, False), (4, False), (None, True)):
        layout = layout_of("by_sequence", reach, torch.float32)
        torch.library.opcheck(operator, (*qkv, layout.cu_seqlens, layout.bias, is_causal))


def test_the_mask_joins_exactly_the_places_of_one_sequence():
    bias = layout_of("masked").bias
    assert bias is not None and bias.shape == (2, 1, ROW_LENGTH, ROW_LENGTH)
    sizes = (bias == 0).sum(dim=-1).squeeze(1)  # how many positions each position sees
    assert sizes[0].tolist() == [5] * 5 + [1] + [10] * 10
    assert sizes[1].tolist() == [16] * 16


def test_a_window_of_128_reaches_64_places_to_each_side():
    """Both ends are seen, as in ModernBERT: 129 positions with the position itself."""
    length = 200
    batch = replace(make_batch(), input_ids=torch.zeros(length), cu_seqlens=torch.tensor([0, length]))
    layout = attention_layout(replace(batch, sequence_length=length), torch.float32, "masked", reach=64)
    seen = layout.bias[0, 0, 100] == 0
    assert seen.sum() == 129 and seen[36] and seen[164] and not seen[35] and not seen[165]


def test_attention_dropout_takes_effect_in_the_masked_way():
    query, key, value = draw_qkv(torch.float32)
    layout = layout_of("masked", dtype=torch.float32)
    torch.manual_seed(0)
    dropped = attend(query, key, value, layout, dropout=0.5)
    assert not torch.allclose(dropped, attend(query, key, value, layout))


@pytest.mark.parametrize(
    ("dtype", "sequence_length", "dropout", "expected"),
    [
        (torch.float32, 64, 0.0, "masked"),
        (torch.float32, 65, 0.0, "by_sequence"),
        (torch.bfloat16, 16, 0.0, "by_sequence"),
        (torch.bfloat16, 512, 0.0, "by_sequence"),
        (torch.float32, 512, 0.1, "masked"),
        (torch.bfloat16, 512, 0.1, "masked"),
    ],
)
def test_on_the_cpu_dtype_row_length_and_dropout_choose_the_kernel(dtype, sequence_length, dropout, expected):
    assert choose_kernel(torch.device("cpu"), dtype, 64, dropout, sequence_length) == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", REACHES)
def test_gradients_in_bfloat16_are_the_exact_ones_rounded(reach, is_causal):
    """On the CPU, of the same rounded inputs; the result that the backward starts from is rounded too."""

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        qkv = [tensor.to(dtype).requires_grad_() for tensor in draw_qkv(torch.bfloat16)]
        attended = attend(*qkv, layout_of("by_sequence", reach, dtype, is_causal))
        upstream = draw_qkv(torch.bfloat16)[1]
        return list(torch.autograd.grad(attended, qkv, upstream.to(dtype)))

    for rounded, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.double(), exact, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@needs_gpu
def test_flash_attention_serves_half_precision_without_dropout_only():
    device = torch.device("cuda", 0)
    assert choose_kernel(device, torch.bfloat16, head_size=64, dropout=0.0, sequence_length=512) == "varlen"
    assert choose_kernel(device, torch.float32, head_size=64, dropout=0.0, sequence_length=512) == "masked"
    assert choose_kernel(device, torch.bfloat16, head_size=64, dropout=0.1, sequence_length=512) == "masked"
    assert choose_kernel(device, torch.bfloat16, head_size=20, dropout=0.0, sequence_length=512) == "masked"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("reach", [None, 4])
def test_a_nearer_bound_of_the_longest_sequence_changes_no_bit_of_flash_attention(reach):
    """128 and 1,024 positions of grid over the same sequences; deterministic, for the backward adds atomically else."""
    batch, results = replace(make_batch("cuda"), sequence_length=1024), []
    torch.use_deterministic_algorithms(True)
    try:
        for bound in (128, 1024):
            qkv = [tensor.cuda().requires_grad_() for tensor in draw_qkv(torch.bfloat16)]
            layout = attention_layout(replace(batch, longest_sequence=bound), torch.bfloat16, "varlen", reach)
            attended = attend(*qkv, layout)
            attended.backward(torch.ones_like(attended))
            results.append([attended.detach(), *(tensor.grad for tensor in qkv)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", [None, 4])
def test_flash_attention_agrees_with_the_mask_forward_and_backward(reach, is_causal):
    """bf16 keeps 8 bits: both sides round inputs alike and results apart by about 2**-8."""
    batch = make_batch("cuda", is_causal)
    results = []
    for kernel in ("varlen", "masked"):
        qkv = [tensor.cuda().requires_grad_() for tensor in draw_qkv(torch.bfloat16)]
        attended = attend(*qkv, attention_layout(batch, torch.bfloat16, kernel, reach))
        attended.float().square().sum().backward()
        results.append([attended.detach(), *(tensor.grad for tensor in qkv)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-2)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernel", "num_stacks"), [("by_sequence", 0), ("masked", 1)])
def test_the_gradient_of_queries_keys_and_values_is_one_tensor(kernel: Kernel, num_stacks: int) -> None:
    gradients = []
    for split in (split_qkv, lambda qkv: qkv.unbind(1)):
        qkv = torch.stack(draw_qkv(), dim=1).requires_grad_()
        attended = attend(*split(qkv), layout_of(kernel))
        with Operators() as seen:
            attended.square().sum().backward()
        gradients.append(qkv.grad)
        assert seen.names.count("stack") == (num_stacks if split is split_qkv else 1)
    assert torch.equal(*gradients)


def test_parts_of_one_tensor_that_are_not_its_queries_keys_and_values_are_stacked() -> None:
    qkv = torch.zeros(4, 3, 2, 8, requires_grad=True)
    whole = torch.randn(4, 3, 2, 8)
    longer = torch.randn(5, 3, 2, 8)
    parts = whole.unbind(1)
    for given in (parts[::-1], (parts[0], parts[0], parts[2]), [part[1:] for part in longer.unbind(1)], parts):
        (gradient,) = torch.autograd.grad(split_qkv(qkv), qkv, list(given))
        assert torch.equal(gradient, torch.stack(list(given), dim=1))
