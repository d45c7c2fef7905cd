from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from trainer.config.training_settings import OptimizerSettings
from trainer.engine.engine import Engine
from trainer.engine.optimizer import build_optimizer, parameter_groups


def make_model() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "decoder": nn.Linear(4, 7)})
    model["decoder"].weight = model["embedding"].weight
    return model


def test_only_matrices_decay_and_each_parameter_is_in_one_group_once():
    model = make_model()
    decaying, steady = parameter_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1 and steady["weight_decay"] == 0.0
    assert [id(p) for p in decaying["params"]] == [id(model["embedding"].weight)]
    assert {id(p) for p in steady["params"]} == {
        id(model["norm"].weight),
        id(model["norm"].bias),
        id(model["decoder"].bias),
    }


def test_frozen_parameters_are_left_out():
    model = make_model()
    model["norm"].requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == 2


def test_a_model_without_biases_has_one_group():
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_with_zero_gradients_only_matrices_move():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["embedding.weight"], before["embedding.weight"] * 0.95)
    assert all(torch.equal(after[name], before[name]) for name in before if "norm" in name or "bias" in name)


class Blocks(nn.Module):
    """Two linear layers inside a block, one of two stacked matrices, and others with two dimensions outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.gated = nn.Linear(4, 6)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.decoder = nn.Linear(4, 7)

    def hidden_matrices(self) -> dict[torch.Tensor, int]:
        return {self.gated.weight: 2, self.frozen.weight: 1}


def test_muon_has_the_matrices_inside_the_blocks_and_adamw_the_rest():
    model = Blocks()
    optimizer = build_optimizer(model, OptimizerSettings(name="muon", weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        (group["orthogonal"], group["weight_decay"], [names[id(parameter)] for parameter in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [
        (True, 0.1, ["gated.weight"]),
        (False, 0.1, ["embedding.weight", "decoder.weight"]),
        (False, 0.0, ["gated.bias", "decoder.bias"]),
    ]


def test_a_stage_changes_the_decay_of_matrices_alone() -> None:
    model = torch.nn.Linear(3, 2)
    engine = object.__new__(Engine)
    engine.zero_stage, engine._engine = 0, SimpleNamespace(optimizer=build_optimizer(model, OptimizerSettings()))
    for weight_decay in (0.5, 0.0, 0.25):
        engine.set_weight_decay(weight_decay)
        decays = [group["weight_decay"] for group in engine._engine.optimizer.param_groups]
        assert decays == [weight_decay, 0.0]
