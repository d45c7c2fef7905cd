from __future__ import annotations

import math

import torch

from trainer.config.model_settings import ModelSettings
from trainer.model.positions import SinusoidalPositions, rotate, rotation


def test_a_rotation_turns_each_pair_by_position_times_frequency():
    heads = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])  # (1, 1, 4): the pairs (1, 0) and (1, 0)
    turned = rotate(heads, rotation(torch.tensor([3]), head_size=4, theta=100.0))[0, 0]
    angles = (3.0, 3.0 / 10.0)  # frequencies 100 ** 0 and 100 ** (-2 / 4)
    expected = [math.cos(angles[0]), math.cos(angles[1]), math.sin(angles[0]), math.sin(angles[1])]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned = [
            rotate(heads, rotation(torch.tensor([position]), 8, 10_000.0))
            for heads, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score(5, 2), score(5, 3))


def test_a_rotation_in_bfloat16_is_rounded_once():
    """Angles in bfloat16 would be whole steps apart at such positions."""
    heads = torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(0))
    turning = rotation(torch.arange(1000, 1064), 8, 10_000.0)
    turned = rotate(heads.bfloat16(), turning)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(heads.bfloat16().float(), turning).bfloat16(), rtol=0, atol=0)


def test_sinusoids_are_the_published_ones_at_the_deviation_of_word_vectors():
    config = ModelSettings(family="custom", position_embedding="sinusoidal", hidden_size=48, num_attention_heads=2)
    vectors = SinusoidalPositions(config)(torch.arange(7))
    assert vectors.shape == (7, 48)
    for place, number in ((0, 0), (5, 1), (6, 23)):
        angle = place / 10_000 ** (2 * number / 48)
        expected = torch.tensor([math.sin(angle), math.cos(angle)]) * math.sqrt(2) * 0.02
        torch.testing.assert_close(vectors[place, 2 * number : 2 * number + 2], expected)
    torch.testing.assert_close(vectors.square().mean().sqrt(), torch.tensor(0.02))
