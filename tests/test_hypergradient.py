"""The hypergradient for own loops: closed forms, retrained models, fixed random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse import vectors
from bestresponse.hypergradient import Linearization, _set_random_state
from bestresponse.testing import Ridge, net_problem

wide = settings(deadline=None, max_examples=25, derandomize=True)


def precise() -> bool:
    return torch.get_default_dtype() == torch.float64


def normal(seed: int, *shape: int) -> Tensor:
    draw = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def close(actual: Tensor, expected: Tensor, relative: float) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


SOLVERS = [
    br.Dense(),
    br.CG(200, tolerance=0.0),
    br.Neumann(400, 0.1),
    br.Nystrom(100, 1e-8),
]


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=repr)
@given(
    weights=st.integers(1, 6),
    examples=st.integers(3, 25),
    seed=st.integers(0, 10_000),
    spread=st.floats(0.1, 3.0),
    trained=st.booleans(),
)
@wide
def test_ridge_is_its_closed_form(solver, weights, examples, seed, spread, trained):
    """One decay per weight, over orders of magnitude; at trained weights and elsewhere; in natural units."""
    known = Ridge(weights, examples, seed=seed)
    raw = {"decay.weight": spread * normal(seed + 1, 1, weights)}
    decay = raw["decay.weight"].exp()
    w = known.best_response(raw) if trained else 1 + normal(seed + 2, weights)
    loss, gradient, solution = br.hypergradient(
        known.problem,
        {"weight": w[None]},
        {"decay": {"weight": decay}},
        (known.x, known.y),
        (known.xv, known.yv),
        solver=solver,
    )
    expected = known.hypergradient(raw, weights=w) / decay[0]
    close(gradient["decay"]["weight"][0], expected, 1e-7 if precise() else 2e-2)
    assert float(loss) == pytest.approx(float((known.xv @ w - known.yv).square().mean()), rel=1e-5)
    assert not solution.trouble


@pytest.mark.parametrize("products", ["exact", "central"])
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_every_solver_comes_to_the_same(solver, products):
    known = Ridge()
    raw = {"decay.weight": normal(1, 1, 5)}
    if isinstance(solver, br.Nystrom) and not precise():
        solver = br.Nystrom(100, 1e-3)  # b − Cᵀ... cancels to the precision of curvature / damping
    _, gradient, solution = br.hypergradient(
        known.problem,
        {"weight": 1 + normal(2, 1, 5)},
        known.problem.space.values(raw),
        (known.x, known.y),
        (known.xv, known.yv),
        solver=solver,
        products=products,
        turn=br.Turn(generator=torch.Generator("cpu").manual_seed(0)),
    )
    expected = known.hypergradient(raw, weights=1 + normal(2, 5)) / raw["decay.weight"][0].exp()
    exact = 1e-6 if products == "exact" else 1e-5
    close(gradient["decay"]["weight"][0], expected, exact if precise() else 5e-2)
    assert solution.residual is not None
    assert solution.residual < (1e-5 if precise() else 1e-1)


# Against models that were trained again


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))[:, 0]


def trained(problem: br.Problem, raw: dict[str, Tensor], start: Tensor, batch: Any) -> Tensor:
    """The minimum of the training loss nearest to ``start``, by Newton's method on torch's own Hessian."""
    values, shapes = problem.space.values(raw), problem.params()

    def loss(flat: Tensor) -> Tensor:
        return br.evaluate(problem, "train", vectors.unflatten(flat, shapes), values, batch)

    w = start.clone()
    for _ in range(60):
        slope = torch.func.grad(loss)(w)
        if float(slope.norm()) < 1e-13:
            break
        bends, axes = torch.linalg.eigh(torch.func.jacrev(torch.func.grad(loss))(w))
        step = axes @ ((axes.T @ slope) / bends.abs().clamp(min=1e-3))
        size = 1.0
        while float(loss(w - size * step)) > float(loss(w)) and size > 1e-6:
            size /= 2
        w = w - size * step
    assert float(torch.func.grad(loss)(w).norm()) < 1e-10
    assert float(torch.linalg.eigvalsh(torch.func.jacrev(torch.func.grad(loss))(w)).min()) > 1e-3
    return w


@pytest.mark.parametrize("products", ["exact", "central"])
def test_it_is_the_difference_of_retrained_models(products):
    """A net with decays, a weight for each example, and a hyper that both losses read: retrained at λ ± h."""
    torch.set_default_dtype(torch.float64)
    x, xv = normal(1, 12, 2), normal(2, 9, 2)
    y, yv = torch.sin(2 * x[:, 0]) + 0.3 * normal(3, 12), torch.sin(2 * xv[:, 0])
    torch.manual_seed(0)
    model = Mlp()
    space = br.Space(
        decay=br.Hyper(0.02, log=True, shape=br.per_layer(model)),
        weight=br.Hyper(0.5, low=0.0, high=1.0, shape=(12,)),
        shift=br.Hyper(0.1, prior=lambda raw: raw.square().sum()),
    )

    def train_loss(model, batch, hyper):
        loss = (model(batch[0]) - batch[1] - hyper["shift"]).square()
        return hyper["weight"] * loss + br.functional.l2(model, hyper["decay"])

    def valid_loss(model, batch, hyper):
        return (model(batch[0]) - batch[1] + hyper["shift"]).square().mean()

    problem = br.Problem(model, space, train_loss, valid_loss)
    raw = {name: leaf + 0.3 * normal(i, *leaf.shape) for i, (name, leaf) in enumerate(space.raw().items())}
    w = trained(problem, raw, vectors.flatten(problem.params()), (x, y))
    params = vectors.unflatten(w, problem.params())
    values = space.values(vectors.leaves(raw))
    _, gradient, solution = br.hypergradient(
        problem, params, values, (x, y), (xv, yv), solver=br.CG(300, tolerance=1e-12), products=products
    )
    assert not solution.trouble

    def objective(raw: dict[str, Tensor]) -> float:
        best = vectors.unflatten(trained(problem, raw, w, (x, y)), params)
        return float(br.evaluate(problem, "valid", best, space.values(raw), (xv, yv)) + space.penalty(raw))

    flat, differences, h = vectors.flatten(raw), [], 1e-4
    for unit in torch.eye(len(flat)):
        up, down = (objective(vectors.unflatten(flat + sign * h * unit, raw)) for sign in (1, -1))
        differences.append((up - down) / (2 * h))
    expected = torch.tensor(differences)
    # The way a loop that holds raw values goes: the gradient in natural units flows back through the map.
    leaves = vectors.leaves(raw)
    outputs, inward = vectors.flatten(flattened(space.values(leaves))), vectors.flatten(flattened(gradient))
    got = torch.autograd.grad(outputs, list(leaves.values()), inward)
    close(torch.cat([part.reshape(-1) for part in got]), expected, 1e-6)


def flattened(values: dict[str, Any]) -> dict[str, Tensor]:
    flat = {}
    for name, value in values.items():
        flat |= (
            {f"{name}.{part}": tensor for part, tensor in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


# Values


def simple(**space: br.Hyper | br.Net) -> br.Problem:
    return br.Problem(
        nn.Linear(2, 1, bias=False),
        br.Space(**space),
        lambda model, batch, hyper: model(batch).square().mean() + br.functional.l2(model, hyper["decay"]),
        lambda model, batch, hyper: (model(batch) - 1).square().mean(),
    )


def test_values_may_stand_on_their_bounds():
    """At decay 0 the derivative in raw is 0, and that in natural units is not."""
    problem = simple(decay=br.Hyper(1.0, low=0.0))
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    w = torch.tensor([[0.3, -0.4]])
    gradient = br.hypergradient(problem, {"weight": w}, {"decay": torch.tensor(0.0)}, x, x, solver=br.Dense()).gradient
    slope = ((x @ w[0] - 1)[:, None] * x).sum(0)
    expected = -(2 * w[0]) @ torch.linalg.solve(x.T @ x, slope)
    close(gradient["decay"], expected, 1e-9 if precise() else 1e-3)


def test_a_prior_counts_in_natural_units():
    problem = simple(decay=br.Hyper(2.0, log=True, prior=lambda raw: 5 * raw))
    x = torch.ones(1, 2)
    one = br.hypergradient(problem, {"weight": torch.zeros(1, 2)}, {"decay": torch.tensor(2.0)}, x, x)
    assert float(one.gradient["decay"]) == pytest.approx(5 / 2)


def test_a_net_is_given_and_comes_back_by_part():
    net = nn.Linear(2, 1)
    problem = br.Problem(
        nn.Linear(2, 1, bias=False),
        br.Space(teacher=br.Net(net)),
        lambda model, batch, hyper: F.mse_loss(
            model(batch), torch.func.functional_call(net, hyper["teacher"], (batch,))
        ),
        lambda model, batch, hyper: model(batch).mean(),
    )
    x = normal(0, 20, 2)
    values = {"teacher": dict(net.named_parameters())}
    found = br.hypergradient(problem, problem.params(), values, x, x[:5], solver=br.Dense())
    # w* = w_teacher + (xᵀx)⁻¹xᵀ1 · bias
    mean = x[:5].mean(0)
    close(found.gradient["teacher"]["weight"][0], mean, 1e-9 if precise() else 1e-4)
    along = torch.linalg.solve(x.T @ x, x.sum(0))
    close(found.gradient["teacher"]["bias"], (mean @ along)[None], 1e-8 if precise() else 1e-3)
    assert all(tensor.grad is None for tensor in net.parameters())


def test_nothing_of_the_user_is_changed():
    """Neither weights nor BatchNorm statistics nor the mode; the model's own parameters may be given."""
    problem, train, valid = net_problem()
    before = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    values = problem.space.values(problem.space.raw())
    batches = next(iter(train)), next(iter(valid))

    def once() -> Tensor:
        torch.manual_seed(5)
        found = br.hypergradient(
            problem, dict(problem.model.named_parameters()), values, *batches, solver=br.CG(3, damping=10.0)
        )
        return vectors.flatten(flattened(found.gradient))

    assert torch.equal(once(), once())
    for name, tensor in problem.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert problem.model.training
    assert all(p.grad is None for p in problem.model.parameters())


def test_errors_say_what_is_missing():
    problem = simple(decay=br.Hyper(1.0, low=0.0))
    x, values = torch.ones(1, 2), {"decay": torch.tensor(1.0)}
    with pytest.raises(KeyError, match="lacks the weights 'weight'"):
        br.hypergradient(problem, {}, values, x, x)
    with pytest.raises(KeyError, match="lacks hyper 'decay'; the space has decay"):
        br.hypergradient(problem, problem.params(), {}, x, x)
    with pytest.raises(KeyError, match="values has 'typo', which is no hyper; the space has decay"):
        br.hypergradient(problem, problem.params(), {**values, "typo": 1.0}, x, x)
    with pytest.raises(
        ValueError, match=r"params\['weight'\] must have the shape of the model's, \(1, 2\); got \(2, 2\)"
    ):
        br.hypergradient(problem, {"weight": torch.ones(2, 2)}, values, x, x)
    with pytest.raises(TypeError, match=r"dict\(model.named_parameters\(\)\); got Linear"):
        br.hypergradient(problem, problem.model, values, x, x)
    with pytest.raises(TypeError, match=r"solver must be a Solver.* Call it: CG\(...\)"):
        br.hypergradient(problem, problem.params(), values, x, x, solver=br.CG)
    for products in ("forward", None):
        with pytest.raises(ValueError, match=f'products must be "exact" or "central"; got {products!r}'):
            br.hypergradient(problem, problem.params(), values, x, x, products=products)
    sampled = simple(decay=br.Hyper(1.0, low=0.0, sampled=True))
    with pytest.raises(ValueError, match="'decay' is sampled"):
        br.hypergradient(sampled, sampled.params(), values, x, x)


@pytest.mark.parametrize("cut", [Tensor.item, Tensor.detach], ids=["item", "detach"])
def test_a_hyper_that_the_loss_detaches_has_no_hypergradient(cut):
    """Zero would be taken for an optimum."""
    problem = br.Problem(
        nn.Linear(2, 1, bias=False),
        br.Space(decay=br.Hyper(0.1, log=True), scale=br.Hyper(1.0)),
        lambda model, batch, hyper: (
            (hyper["scale"] * model(batch)).square().mean() + br.functional.l2(model, cut(hyper["decay"]))
        ),
        lambda model, batch, hyper: (model(batch) - 1).square().mean(),
    )
    x, random = normal(0, 4, 2), torch.get_rng_state()
    with pytest.raises(ValueError, match="reads hyper 'decay', but does not depend on it through torch"):
        br.hypergradient(problem, problem.params(), {"decay": 0.1, "scale": 1.0}, x, x)
    method = br.methods.luketina2016()
    with pytest.raises(ValueError, match="reads hyper 'decay', but does not depend on it through torch"):
        method.hypergradient(problem, method.init(problem), x, x)
    assert torch.equal(random, torch.get_rng_state())


def test_a_hyper_that_only_the_validation_loss_reads_has_its_direct_hypergradient():
    problem = br.Problem(
        nn.Linear(2, 1, bias=False),
        br.Space(decay=br.Hyper(0.1, log=True), scale=br.Hyper(1.0)),
        lambda model, batch, hyper: model(batch).square().mean() + br.functional.l2(model, hyper["decay"]),
        lambda model, batch, hyper: model(batch).square().mean() + hyper["scale"] ** 2,
    )
    x = normal(0, 4, 2)
    found = br.hypergradient(problem, problem.params(), {"decay": 0.1, "scale": 1.5}, x, x)
    assert float(found.gradient["scale"]) == pytest.approx(3.0)


# One solve is one matrix


def linearization(products: str = "exact", count: int = 1) -> Linearization:
    """Of a net with dropout, and smooth: a difference is as good as a derivative."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 1))
    space = br.Space(decay=br.Hyper(0.1, log=True), scale=br.Hyper(1.0))
    problem = br.Problem(
        model,
        space,
        lambda model, batch, hyper: (
            (model(batch[0]) * hyper["scale"] - batch[1]).square().mean() + br.functional.l2(model, hyper["decay"])
        ),
        lambda model, batch, hyper: model(batch[0]).mean(),
    )
    batches = [(normal(i, 6 + i, 4), normal(10 + i, 6 + i, 1)) for i in range(count)]
    return Linearization(problem, problem.params(), space.raw(), batches, buffers={}, products=products)


@pytest.mark.parametrize("products", ["exact", "central"])
@pytest.mark.parametrize("count", [1, 3])
def test_products_of_one_solve_are_those_of_one_symmetric_matrix(products, count):
    """With dropout: the same vector, the same product; ⟨Hu, v⟩ = ⟨u, Hv⟩; sums go through."""
    at = linearization(products, count)
    u, v = ({name: normal(seed + i, *w.shape) for i, (name, w) in enumerate(at.params.items())} for seed in (100, 200))
    hu, hv = at.curvature(u), at.curvature(v)
    assert torch.equal(vectors.flatten(at.curvature(u)), vectors.flatten(hu))
    error = {"exact": (1e-12, 1e-4), "central": (1e-7, 1e-1)}[products][0 if precise() else 1]
    size = float(vectors.norm(hu) * vectors.norm(v))
    assert float(vectors.dot(hu, v)) == pytest.approx(float(vectors.dot(u, hv)), abs=error * size)
    both = at.curvature(vectors.axpy(2.0, u, v))
    close(vectors.flatten(both), vectors.flatten(vectors.axpy(2.0, hu, hv)), 10 * error)
    assert at.gradients == 2 * count * 4


def test_central_products_are_the_exact_ones_with_the_same_masks():
    got = []
    for products in ("exact", "central"):
        at = linearization(products, 2)
        v = {name: normal(i, *w.shape) for i, (name, w) in enumerate(at.params.items())}
        torch.manual_seed(2)  # the first product takes the masks
        got.append((vectors.flatten(at.curvature(v)), vectors.flatten(at.mixed(v))))
    error = 1e-7 if precise() else 3e-2
    for exact, central in zip(*got, strict=True):
        close(central, exact, error)


def test_mixed_and_curvature_products_share_their_masks():
    """In L = mean((scale · net − y)²) with y = 0, ∂/∂log(scale) at fixed masks and last layer ∂/∂w·w are the same."""
    at = linearization()
    x, y = at._batches[0]
    at._batches = [(x, 0 * y)]
    at.raw["decay"].fill_(-60.0)
    along = {name: w if name.startswith("3.") else torch.zeros_like(w) for name, w in at.params.items()}
    direction = {name: normal(i, *w.shape) for i, (name, w) in enumerate(at.params.items())}
    slope = vectors.dot(at.curvature(along), direction) + _slope(at, direction)
    assert float(at.mixed(direction)["scale"]) == pytest.approx(float(slope), rel=1e-9 if precise() else 1e-3)


def _slope(at: Linearization, direction: dict[str, Tensor]) -> Tensor:
    """⟨∂L/∂w of the last layer, direction⟩ with the masks of the products: L is homogeneous in that layer."""
    last = {name: part if name.startswith("3.") else torch.zeros_like(part) for name, part in direction.items()}
    with torch.random.fork_rng():
        _set_random_state(at._random[0], at.problem.device)
        return vectors.dot(br.train_gradient(at.problem, at.params, at.raw, at._batches[0], buffers={}).params, last)


def test_another_solve_draws_other_masks_and_random_numbers_go_on_as_after_one_product():
    at = linearization(count=2)
    v = {name: torch.ones_like(w) for name, w in at.params.items()}
    first = at.curvature(v)
    after = torch.get_rng_state()
    for _ in range(3):
        assert torch.equal(vectors.flatten(at.curvature(v)), vectors.flatten(first))
        assert torch.equal(torch.get_rng_state(), after)
    other = Linearization(at.problem, at.params, at.raw, at._batches, buffers={})
    assert not torch.equal(vectors.flatten(first), vectors.flatten(other.curvature(v)))


def test_batches_count_by_their_examples():
    """Two unequal batches of ridge are the whole of it."""
    known = Ridge(examples=40)
    raw = {"decay.weight": normal(1, 1, 5)}
    parts = [(known.x[:13], known.y[:13]), (known.x[13:], known.y[13:])]
    at = Linearization(known.problem, {"weight": normal(2, 1, 5)}, raw, parts, buffers={})
    v = normal(3, 5)
    close(at.curvature({"weight": v[None]})["weight"][0], known.hessian(raw) @ v, 1e-12 if precise() else 1e-5)


def test_conjugate_gradients_are_dense_with_dropout():
    at = linearization()
    b = {name: normal(i, *w.shape) for i, (name, w) in enumerate(at.params.items())}
    matrix = br.Dense(damping=10.0).solve(at.curvature, b, br.Turn())
    iterated = br.CG(200, 10.0, 0.0).solve(at.curvature, b)
    assert not iterated.trouble
    close(vectors.flatten(iterated.x), vectors.flatten(matrix.x), 1e-8 if precise() else 1e-3)
