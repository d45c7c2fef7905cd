from __future__ import annotations

import pytest
import torch

from trainer.data.batch import Batch
from trainer.model.attention import attend, attention_layout, uses_varlen

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROW_LENGTH = 16
BOUNDARIES = [0, 5, 6, 16, 32, 32, 32]
"""Two rows: sequences of 5, 1 and 10 places, then one that fills its row; two unused entries."""


def make_batch(device: str = "cpu") -> Batch:
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
    ).to(torch.device(device))


def draw_qkv(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, BOUNDARIES[-1], 2, 8, generator=generator, dtype=torch.float64).to(dtype).unbind(0)


def attend_by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v, one sequence and one head at a time."""
    result = torch.zeros_like(query)
    for start, end in zip(BOUNDARIES, BOUNDARIES[1:], strict=False):
        for head in range(query.shape[1]):
            q, k, v = (tensor[start:end, head] for tensor in (query, key, value))
            result[start:end, head] = torch.softmax(q @ k.T / q.shape[-1] ** 0.5, dim=-1) @ v
    return result


def test_reference_agrees_with_attention_computed_sequence_by_sequence():
    query, key, value = draw_qkv()
    attended = attend(query, key, value, attention_layout(make_batch(), torch.float64, varlen=False))
    torch.testing.assert_close(attended, attend_by_hand(query, key, value), rtol=1e-12, atol=1e-12)


def test_a_sequence_of_one_place_attends_to_itself_alone():
    query, key, value = draw_qkv()
    attended = attend(query, key, value, attention_layout(make_batch(), torch.float64, varlen=False))
    torch.testing.assert_close(attended[5], value[5])


def test_the_mask_joins_exactly_the_places_of_one_sequence():
    bias = attention_layout(make_batch(), torch.float32, varlen=False).bias
    assert bias is not None and bias.shape == (2, 1, ROW_LENGTH, ROW_LENGTH)
    sizes = (bias == 0).sum(dim=-1).squeeze(1)  # how many places each place sees
    assert sizes[0].tolist() == [5] * 5 + [1] + [10] * 10
    assert sizes[1].tolist() == [16] * 16


def test_attention_dropout_takes_effect_in_the_reference():
    query, key, value = draw_qkv(torch.float32)
    layout = attention_layout(make_batch(), torch.float32, varlen=False)
    torch.manual_seed(0)
    dropped = attend(query, key, value, layout, dropout=0.5)
    assert not torch.allclose(dropped, attend(query, key, value, layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_takes_the_reference(dtype):
    assert not uses_varlen(torch.device("cpu"), dtype, head_size=64, dropout=0.0)


@needs_gpu
def test_flash_attention_serves_half_precision_without_dropout_only():
    device = torch.device("cuda", 0)
    assert uses_varlen(device, torch.bfloat16, head_size=64, dropout=0.0)
    assert not uses_varlen(device, torch.float32, head_size=64, dropout=0.0)
    assert not uses_varlen(device, torch.bfloat16, head_size=64, dropout=0.1)
    assert not uses_varlen(device, torch.bfloat16, head_size=20, dropout=0.0)


@needs_gpu
def test_flash_attention_agrees_with_the_reference_forward_and_backward():
    """bf16 keeps 8 bits: both sides round inputs alike and results apart by about 2**-8."""
    batch = make_batch("cuda")
    results = []
    for varlen in (True, False):
        qkv = [tensor.cuda().requires_grad_() for tensor in draw_qkv(torch.bfloat16)]
        attended = attend(*qkv, attention_layout(batch, torch.bfloat16, varlen))
        attended.float().square().sum().backward()
        results.append([attended.detach(), *(tensor.grad for tensor in qkv)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-2)
