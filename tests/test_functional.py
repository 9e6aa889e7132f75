"""Pieces of losses: penalties by weight, tensor, layer or for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bestresponse as br


class Net(nn.Module):
    """A layer, a parameter of its own, a frozen and a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, -1.0]))
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


penalties = pytest.mark.parametrize(
    ("penalty", "size"), [(br.functional.l2, lambda w: w * w), (br.functional.l1, abs)], ids=["l2", "l1"]
)


def total(model: nn.Module, decay_of, size) -> float:
    """One number at a time: every trainable weight, tied ones once."""
    numbers = 0.0
    for name, p in trainable(model).items():
        decays = torch.as_tensor(decay_of(name)).expand_as(p).flatten().tolist()
        numbers += sum(d * size(w) for d, w in zip(decays, p.flatten().tolist(), strict=True))
    return numbers


@penalties
def test_one_decay_for_all_trainable_weights(penalty, size):
    model = Net()
    assert penalty(model, torch.tensor(0.3)).item() == pytest.approx(total(model, lambda name: 0.3, size), rel=1e-5)


@penalties
def test_a_decay_per_weight(penalty, size):
    model = Net()
    decay = {name: torch.rand(shape) for name, shape in br.per_weight(model).items()}
    assert penalty(model, decay).item() == pytest.approx(total(model, decay.__getitem__, size), rel=1e-5)


@penalties
def test_a_decay_per_tensor(penalty, size):
    model = Net()
    decay = {name: torch.rand(()) for name in br.per_tensor(model)}
    assert penalty(model, decay).item() == pytest.approx(total(model, decay.__getitem__, size), rel=1e-5)


@penalties
def test_a_decay_per_layer(penalty, size):
    model = Net()
    decay = {"(root)": torch.tensor(0.1), "first": torch.tensor(0.7)}
    assert set(decay) == set(br.per_layer(model))
    by_name = {"scale": 0.1, "first.weight": 0.7, "first.bias": 0.7}
    assert penalty(model, decay).item() == pytest.approx(total(model, by_name.__getitem__, size), rel=1e-5)


@penalties
def test_parameters_that_are_not_named_are_not_penalised(penalty, size):
    model = Net()
    got = penalty(model, {"first.bias": torch.tensor(2.0)})
    assert got.item() == pytest.approx(sum(2 * size(w) for w in model.first.bias.tolist()), rel=1e-5)


def test_a_tensors_own_decay_goes_before_its_layers():
    model = Net()
    nn.init.ones_(model.first.weight)
    nn.init.ones_(model.first.bias)
    got = br.functional.l2(model, {"first": torch.tensor(1.0), "first.bias": torch.tensor(10.0)})
    assert got.item() == 4 * 1 + 2 * 10


def test_slopes_of_weights_and_decays():
    model = Net()
    decay = torch.tensor([0.5, 3.0], requires_grad=True)
    by_w, by_decay = torch.autograd.grad(br.functional.l2(model, {"scale": decay}), [model.scale, decay])
    assert by_w.tolist() == [2 * 0.5 * 2.0, 2 * 3.0 * -1.0]
    assert by_decay.tolist() == [4.0, 1.0]
    by_w, by_decay = torch.autograd.grad(br.functional.l1(model, {"scale": decay}), [model.scale, decay])
    assert by_w.tolist() == [0.5, -3.0]
    assert by_decay.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("shape_of", [br.per_weight, br.per_tensor, br.per_layer])
def test_inside_a_loss_the_weights_being_tried_are_penalised_and_frozen_ones_are_not(shape_of):
    model = Net()
    space = br.Space(decay=br.Hyper(0.2, log=True, shape=shape_of(model)))

    def loss(model, batch, hyper):
        return br.functional.l2(model, hyper["decay"])

    problem = br.Problem(model, space, loss, loss)
    params = {name: torch.randn_like(p) for name, p in problem.params().items()}
    got = br.evaluate(problem, "train", params, space.values(space.raw()), None)
    assert got.item() == pytest.approx(0.2 * sum(float(p.square().sum()) for p in params.values()), rel=1e-5)


@penalties
def test_a_decay_that_names_no_parameter_is_refused_with_both_lists(penalty, size):
    with pytest.raises(KeyError, match=r"it names \['frist'\], and the model has \['scale', 'first.weight'"):
        penalty(Net(), {"frist": torch.tensor(1.0)})


@penalties
def test_a_model_without_trainable_weights_has_nothing_to_penalise(penalty, size):
    with pytest.raises(KeyError, match="the decay names no parameter of the model"):
        penalty(nn.Linear(1, 1).requires_grad_(False), torch.tensor(1.0))
