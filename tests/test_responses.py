"""Hypernetworks: their sizes, where they start, and the functions they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bestresponse as br
from bestresponse import vectors


def same(actual, expected) -> None:
    exact = torch.get_default_dtype() == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12 if exact else 1e-5, atol=1e-13 if exact else 1e-6)


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def some_raw(samples: int | None = None) -> dict[str, Tensor]:
    batch = () if samples is None else (samples,)
    return {"decay.weight": torch.randn(*batch, 2, 2), "rate": torch.randn(batch), "shift": torch.randn(*batch, 3)}


def some_params() -> dict[str, Tensor]:
    return {"weight": torch.randn(3, 2), "scale": torch.randn(()), "bias": torch.randn(4)}


RECIPES = [br.Linear(), br.LowRank(3), br.MLP(6)]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=repr)


# Sizes

#: The four set-ups of Lorraine and Duvenaud (2018) on MNIST: a linear model has 784 · 10 + 10 = 7,850 weights.
PAPER = [
    (br.MLP(50), 1, 400_450),
    (br.Linear(), 1, 15_700),
    (br.Linear(), 10, 86_350),
    (br.LowRank(10), 7_850, 164_860),
]


@pytest.mark.parametrize(("recipe", "hypers", "numbers"), PAPER, ids=str)
def test_sizes_are_the_papers(recipe, hypers, numbers, device):
    model = nn.Linear(784, 10)
    params = {name: p.detach() for name, p in model.named_parameters()}
    assert vectors.numel(params) == 7_850
    assert recipe.size(hypers, 7_850) == numbers
    built = recipe.build({"a": torch.zeros(hypers)}, params, generator(device))
    assert sum(p.numel() for p in built.parameters()) == numbers


@every_recipe
@pytest.mark.parametrize(("hypers", "weights"), [(1, 1), (3, 7), (20, 4)])
def test_size_is_what_is_built(recipe, hypers, weights, device):
    built = recipe.build({"a": torch.zeros(hypers)}, {"w": torch.zeros(weights)}, generator(device))
    assert sum(p.numel() for p in built.parameters()) == recipe.size(hypers, weights)


# The functions


def test_linear_is_a_matrix_and_the_models_weights(device):
    raw, params = some_raw(5), some_params()
    response = br.Linear().build(some_raw(), params, generator(device))
    slope = response.network[0].weight  # (11, 8)
    got = response(raw)
    for i in range(5):
        row = torch.cat([raw["decay.weight"][i].flatten(), raw["rate"][i][None], raw["shift"][i]])
        w = vectors.flatten(params) + slope @ row
        same(got["weight"][i], w[:6].view(3, 2))
        same(got["scale"][i], w[6])
        same(got["bias"][i], w[7:])


def test_linear_at_raw_zero_is_exactly_the_models_weights(device):
    params = some_params()
    response = br.Linear(init=5.0).build(some_raw(), params, generator(device))
    got = response({name: torch.zeros_like(leaf) for name, leaf in some_raw(1).items()})
    for name, part in params.items():
        assert torch.equal(got[name][0], part), name


def test_low_rank_is_the_product_of_its_matrices(device):
    raw, params = some_raw(5), some_params()
    response = br.LowRank(3, init=0.5).build(some_raw(), params, generator(device))
    down, up = response.network
    assert down.weight.shape == (3, 8)
    x = vectors.flatten(raw, batch_dims=1)
    slope, base = up.weight @ down.weight, up.weight @ down.bias
    assert torch.linalg.matrix_rank(slope) == 3
    same(vectors.flatten(response(raw), batch_dims=1), x @ slope.T + base + vectors.flatten(params))


def test_mlp_by_hand(device):
    raw, params = some_raw(5), some_params()
    response = br.MLP(6, init=0.5).build(some_raw(), params, generator(device))
    first, second = (layer for layer in response.network if isinstance(layer, nn.Linear))
    got = vectors.flatten(response(raw), batch_dims=1)
    silent = 0
    for i, x in enumerate(vectors.flatten(raw, batch_dims=1).tolist()):
        hidden = [
            max(0.0, sum(w * a for w, a in zip(row, x, strict=True)) + b)
            for row, b in zip(first.weight.tolist(), first.bias.tolist(), strict=True)
        ]
        silent += hidden.count(0.0)
        out = [
            sum(w * h for w, h in zip(row, hidden, strict=True)) + b
            for row, b in zip(second.weight.tolist(), vectors.flatten(params).tolist(), strict=True)
        ]
        same(got[i], torch.tensor(out))
    assert 0 < silent < 5 * 6  # the ReLU took part, on both sides


@every_recipe
def test_shapes_names_and_precision_are_the_models(recipe, device):
    params = some_params()
    got = recipe.build(some_raw(), params, generator(device))(some_raw(4))
    assert {name: part.shape for name, part in got.items()} == {n: (4, *p.shape) for n, p in params.items()}
    assert {part.dtype for part in got.values()} == {torch.get_default_dtype()}


@every_recipe
def test_a_response_for_weights_in_half_precision_works_in_that_of_raw(recipe, device):
    params = some_params()
    params["mixed"] = torch.full((2,), 0.1, dtype=torch.bfloat16, device=device)
    response = recipe.build(some_raw(), params, generator(device))
    assert {p.dtype for p in response.parameters()} == {torch.get_default_dtype()}
    got = response(some_raw(4))
    assert {name: part.dtype for name, part in got.items()} == {name: part.dtype for name, part in params.items()}
    sum(part.float().sum() for part in got.values()).backward()
    assert all(p.grad is not None and p.grad.any() for p in response.parameters())


# Where they start


@every_recipe
def test_the_start_is_near_the_models_weights_and_depends_on_raw(recipe, device):
    """Without that, a response at raw = 0 that is not perturbed would never move."""
    raw, params = some_raw(1), some_params()
    response = recipe.build(some_raw(), params, generator(device))
    change = vectors.axpy(-1.0, params, {name: part[0].detach() for name, part in response(raw).items()})
    assert 0 < float(vectors.norm(change)) < 0.1 * float(vectors.norm(params))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in raw.items()}
    by_raw = torch.autograd.grad(vectors.flatten(response(leaves)).sum(), list(leaves.values()))
    assert all(bool(grad.any()) for grad in by_raw)


@pytest.mark.parametrize("make", [br.Linear, br.LowRank, br.MLP])
@pytest.mark.parametrize("init", [None, 0.3])
def test_first_random_weights_have_the_spread_asked_for(make, init, device):
    hypers, weights = 400, 300
    built = make(init=init).build({"a": torch.zeros(hypers)}, {"w": torch.zeros(weights)}, generator(device))
    slope = built.network[0].weight
    expected = 0.01 / hypers**0.5 if init is None else init
    error = expected * 5 / (2 * slope.numel()) ** 0.5  # five standard errors of a standard deviation
    assert float(slope.detach().std()) == pytest.approx(expected, abs=error)
    assert float(slope.detach().mean()) == pytest.approx(0, abs=expected * 5 / slope.numel() ** 0.5)


@every_recipe
def test_the_generator_decides_the_start(recipe, device):
    params, raw = some_params(), some_raw()
    first, second, other = (recipe.build(raw, params, generator(device, seed)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["network.0.weight"], other["network.0.weight"])


@every_recipe
def test_building_takes_none_of_torchs_own_random_numbers(recipe, device):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    recipe.build({"a": torch.zeros(3)}, {"w": torch.zeros(4)}, generator(device))
    assert torch.equal(torch.rand(3), expected)


@every_recipe
def test_training_a_response_leaves_the_weights_it_started_at(recipe, device):
    params = some_params()
    before = vectors.clone(params)
    response = recipe.build(some_raw(), params, generator(device))
    with torch.no_grad():
        for parameter in response.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(params[name], before[name]) for name in params)


@every_recipe
def test_every_tensor_of_a_response_is_trained(recipe, device):
    response = recipe.build(some_raw(), some_params(), generator(device))
    grads = torch.autograd.grad(vectors.flatten(response(some_raw(20))).sum(), list(response.parameters()))
    assert all(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.LowRank(0), "rank must be at least 1; got 0"),
        (lambda: br.MLP(-2), "hidden must be at least 1; got -2"),
    ],
)
def test_a_width_below_one_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
