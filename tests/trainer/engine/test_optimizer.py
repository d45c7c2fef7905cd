from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from data_prep.base.errors import UserError
from tests.support import toy_optimizers
from tests.support.error_codes import coded
from trainer.config.training_settings import OptimizerSettings
from trainer.engine.engine import Engine
from trainer.engine.fragments import undivided
from trainer.engine.optimizer import (
    build_optimizer,
    check_states,
    explain_failure,
    parameter_groups,
    settings_of_groups,
)
from trainer.engine.whole_parameters import WholeParameters


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

    def hidden_matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        return {self.gated.weight: (3, 3), self.frozen.weight: (4,)}


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


MODULE = "tests.support.toy_optimizers"


def stepped(optimizer_of, learning_rate: float = 0.0, gradient: float = 0.0):
    """An optimizer of one matrix after a step, and what its groups held before."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = optimizer_of([{"params": [weight], "weight_decay": 0.1}], OptimizerSettings())
    groups = settings_of_groups(optimizer)
    weight.grad = torch.full((3, 2), gradient)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    return optimizer, groups


def test_a_function_gets_the_groups_and_the_settings():
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimizerSettings(name=f"{MODULE}:lion", learning_rate=0.5, weight_decay=0.25))
    assert type(optimizer).__name__ == "Lion"
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.25), (0.5, 0.0)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("no.such.module:lion", "optimizer-not-importable"),
        (f"{MODULE}:tiger", "optimizer-not-importable"),
        (f"{MODULE}:A_NUMBER", "not-an-optimizer"),
        (f"{MODULE}:nothing", "not-an-optimizer"),
        ("torch.optim:SGD", "optimizer-failed"),  # takes a rate where the settings are
        ("json:dumps", "optimizer-failed"),
    ],
)
def test_an_object_that_is_no_optimizer_is_refused(name, code):
    with pytest.raises(UserError, match=name, check=coded(code)):
        build_optimizer(torch.nn.Linear(3, 2), OptimizerSettings(name=name))


def test_an_error_in_attach_or_a_step_names_the_users_file_and_other_errors_pass():
    with (
        pytest.raises(
            UserError, match=r"toy_optimizers\.py:\d+ \(RuntimeError: no shapes\)", check=coded("optimizer-failed")
        ),
        explain_failure(f"{MODULE}:normalized_momentum"),
    ):
        toy_optimizers.fail()
    with pytest.raises(ZeroDivisionError), explain_failure(f"{MODULE}:normalized_momentum"):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), explain_failure("muon"):
        toy_optimizers.fail()


def test_a_function_of_whole_parameters_is_attached_also_outside_deepspeed():
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimizerSettings(name=f"{MODULE}:normalized_momentum", learning_rate=0.5))
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((2, 3), 7.0)
    optimizer.step()
    torch.testing.assert_close(before * (1 - 0.5 * 0.01) - model.weight.detach(), torch.full((2, 3), 0.5 / 6**0.5))


def test_results_for_whole_parameters_have_one_dtype_and_as_many_elements():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = WholeParameters(undivided(model, optimizer), ["weight"])
    ((_, update),) = whole.apply(model.weight, torch.ones(2, 3), lambda _, value: value.double() * 2)
    assert update.dtype == torch.float32 and torch.equal(update, torch.full((6,), 2.0))
    with pytest.raises(ValueError, match=r"the result for weight has the shape \(\), not \(2, 3\)"):
        whole.apply(model.weight, torch.ones(2, 3), lambda _, value: value.norm())


def test_states_that_a_checkpoint_gives_back_are_accepted():
    for optimizer_of in (toy_optimizers.lion, lambda groups, _: torch.optim.AdamW(groups)):
        optimizer, groups = stepped(optimizer_of)
        check_states(optimizer, "a:b", groups)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        toy_optimizers.adafactor,
        lambda groups, _: torch.optim.NAdam(groups),  # a running product of betas
        lambda groups, _: torch.optim.Rprop(groups),  # step sizes that are not 0 at the start
    ],
)
def test_states_that_a_checkpoint_would_lose_are_refused(optimizer_of):
    optimizer, groups = stepped(optimizer_of)
    with pytest.raises(UserError, match="a:b has the state", check=coded("optimizer-state")):
        check_states(optimizer, "a:b", groups)


def test_a_count_in_the_groups_is_refused():
    optimizer, groups = stepped(toy_optimizers.lion)
    optimizer.param_groups[0]["steps"] = 1
    with pytest.raises(UserError, check=coded("optimizer-state")):
        check_states(optimizer, "a:b", groups)
