"""The implicit hypergradient: T1–T2 in closed form, where it ends, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import SGD

import bestresponse as br
from bestresponse import vectors
from bestresponse.testing import Quadratic, Ridge, net_problem

wide = settings(deadline=None, max_examples=30, derandomize=True)
still = partial(SGD, lr=0.0)
products = pytest.mark.parametrize("products", ["exact", "central"])


def tolerance(products: str) -> float:
    """Relative to the largest number."""
    double = torch.get_default_dtype() == torch.float64
    return {"exact": 1e-10 if double else 1e-4, "central": 1e-7 if double else 3e-2}[products]


def close(actual: Tensor, expected: Tensor, relative: float) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


def streams(known: Quadratic | Ridge) -> tuple[br.Stream, br.Stream]:
    return br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def at(method: br.Implicit, known: Quadratic | Ridge, raw: dict[str, Tensor], weights: Tensor):
    """A state that stands there."""
    state = method.init(known.problem)
    for name, leaf in state.raw.items():
        leaf.copy_(raw[name])
    for part in state.params.values():
        part.copy_(weights.view_as(part))
    return state


@final
@dataclass(frozen=True)
class Wasteful(br.Solver):
    """The identity, after some products for nothing."""

    count: int

    def solve(self, product, b, turn):
        for _ in range(self.count):
            product(b)
        return br.Solution(b)


# The hypergradient


@products
@given(weights=st.integers(1, 6), examples=st.integers(3, 20), seed=st.integers(0, 10_000))
@wide
def test_t1_t2_on_ridge_is_its_closed_form(products, weights, examples, seed):
    """With the identity for the inverse Hessian, at any hypers and at weights that are not trained."""
    known = Ridge(weights, examples, seed=seed)
    raw = {"decay.weight": normal(seed + 1, 1, weights)}
    w = 1 + normal(seed + 2, weights)
    method = br.Implicit(br.Identity(), products=products)
    loss, hypergradient = method.hypergradient(
        known.problem, at(method, known, raw, w), (known.x, known.y), (known.xv, known.yv)
    )
    expected = known.hypergradient(raw, inverse=torch.eye(weights), weights=w)
    close(hypergradient["decay.weight"][0], expected, tolerance(products))
    assert float(loss) == pytest.approx(float((known.xv @ w - known.yv).square().mean()), rel=1e-5)


@products
@pytest.mark.parametrize("seed", [0, 1])
def test_with_an_exact_solver_it_is_the_true_hypergradient_of_ridge(products, seed):
    known = Ridge(seed=seed)
    raw = {"decay.weight": normal(seed + 1, 1, 5)}
    method = br.Implicit(br.Dense(), products=products)
    state = at(method, known, raw, known.best_response(raw))
    _, hypergradient = method.hypergradient(known.problem, state, (known.x, known.y), (known.xv, known.yv))
    close(hypergradient["decay.weight"][0], known.hypergradient(raw), 100 * tolerance(products))


@products
def test_on_the_quadratic_it_has_the_curvature_that_t1_t2_leaves_in(products):
    """∂/∂λ = Jᵀ H x with x = w − t: the products are those of the training loss."""
    known = Quadratic()
    raw, w = {"shift": normal(1, 2)}, normal(2, 4)
    method = br.Implicit(br.Identity(), products=products)
    _, hypergradient = method.hypergradient(known.problem, at(method, known, raw, w), known.train[0], known.valid[0])
    close(hypergradient["shift"], known.jacobian.T @ known.h @ (w - known.target), tolerance(products))


def test_central_agrees_with_exact_on_a_net():
    """With BatchNorm, tied and frozen weights, dropout of the same units, a prior, and three kinds of hyper."""
    problem, train, valid = net_problem()
    train_batch, valid_batch = next(iter(train)), next(iter(valid))
    got = {}
    for products in ("exact", "central"):
        method = br.Implicit(products=products)
        state = method.init(problem)
        torch.manual_seed(1)
        _, got[products] = method.hypergradient(problem, state, train_batch, valid_batch)
    close(vectors.flatten(got["central"]), vectors.flatten(got["exact"]), 10 * tolerance("central"))


class OnceOnly(torch.autograd.Function):
    """A square that cannot be differentiated twice: its second derivative comes out as zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def one_weight(square) -> tuple[br.Problem, Tensor, Tensor]:
    """L_T = mean((w − a)² x²) and L_V = mean((w x − 1)²), whose products depend on the batch."""
    problem = br.Problem(
        torch.nn.Linear(1, 1, bias=False),
        br.Space(a=br.Hyper(2.0)),
        lambda model, batch, hyper: square(model(batch) - hyper["a"] * batch).mean(),
        lambda model, batch, hyper: (model(batch) - 1).square().mean(),
    )
    return problem, torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [0.5]])


@products
@pytest.mark.parametrize("solver", [br.Identity(), br.Dense()], ids=repr)
def test_products_are_taken_on_the_training_batch_and_the_slope_on_the_validation_batch(solver, products):
    problem, train, valid = one_weight(torch.square)
    method = br.Implicit(solver, products=products)
    state = method.init(problem)
    w = state.params["weight"].fill_(0.7)
    _, hypergradient = method.hypergradient(problem, state, train, valid)
    slope, curvature = 2 * ((w * valid - 1) * valid).mean(), 2 * train.square().mean()
    # H is the curvature and the mixed derivative is its negative, so that an exact solver leaves the slope alone.
    expected = slope * (curvature if isinstance(solver, br.Identity) else 1)
    close(hypergradient["a"], expected, tolerance(products))


def test_central_needs_no_second_derivative_at_all():
    problem, train, valid = one_weight(OnceOnly.apply)
    plain, *_ = one_weight(torch.square)
    for solver in (Wasteful(0), Wasteful(1)):
        method = br.Implicit(solver, products="central")
        state = method.init(problem)
        got = method.hypergradient(problem, state, train, valid)[1]["a"]
        expected = br.Implicit(solver).hypergradient(plain, state, train, valid)[1]["a"]
        close(got, expected, tolerance("central"))


def test_the_direct_gradient_counts():
    """A validation loss that reads the hyper, and a prior on it: the training loss does not depend on it."""
    space = br.Space(a=br.Hyper(2.0, prior=lambda raw: 10 * raw), b=br.Hyper(1.0))
    problem = br.Problem(
        torch.nn.Linear(1, 1),
        space,
        lambda model, batch, hyper: (model(batch) - hyper["b"]).square().mean(),
        lambda model, batch, hyper: hyper["a"].pow(3) + 0 * model(batch).sum(),
    )
    method = br.Implicit()
    _, hypergradient = method.hypergradient(problem, method.init(problem), torch.ones(1, 1), torch.ones(1, 1))
    assert hypergradient["a"].item() == pytest.approx(3 * 4 + 10)
    assert hypergradient["b"].item() == 0


# Steps


def test_one_step_trains_then_tunes():
    """By hand on ridge: one gradient step of the weights, then the hypergradient at the new ones."""
    known = Ridge()
    method = br.Implicit(optimizer=partial(SGD, lr=0.1), hyper_optimizer=partial(SGD, lr=0.5))
    raw, w = {"decay.weight": normal(1, 1, 5)}, 1 + normal(2, 5)
    state = at(method, known, raw, w)
    metrics = method.step(known.problem, state, *streams(known))
    decay = raw["decay.weight"][0].exp()
    slope = 2 * known.x.T @ (known.x @ w - known.y) / len(known.x) + 2 * decay * w
    after = w - 0.1 * slope
    close(state.params["weight"][0], after, tolerance("exact"))
    hypergradient = known.hypergradient(raw, inverse=torch.eye(5), weights=after)
    close(state.raw["decay.weight"][0], raw["decay.weight"][0] - 0.5 * hypergradient, tolerance("exact"))
    assert metrics.moved
    train_loss = (known.x @ w - known.y).square().mean() + (decay * w * w).sum()
    assert float(metrics.train_loss) == pytest.approx(float(train_loss), rel=1e-5)
    assert float(metrics.valid_loss) == pytest.approx(float((known.xv @ after - known.yv).square().mean()), rel=1e-5)


def test_params_are_a_copy_of_the_weights_in_training():
    known = Ridge()
    method = br.Implicit()
    state = method.init(known.problem)
    method.params(known.problem, state)["weight"].add_(1)
    assert not state.params["weight"].any()


@pytest.mark.parametrize(
    ("solver", "gradients"), [(br.Identity(), 3), (Wasteful(0), 3), (Wasteful(4), 3 + 2 * 4)], ids=repr
)
@products
def test_costs_are_counted(solver, gradients, products):
    """One validation gradient, and two for the mixed product and for each product of the solver."""
    known = Ridge()
    method = br.Implicit(solver, products=products, schedule=br.Alternate(train=3, warmup=3))
    state, data = method.init(known.problem), streams(known)
    costs = []
    for _ in range(3):
        method.step(known.problem, state, *data)
        costs.append((state.cost.train_batches, state.cost.valid_batches, state.cost.gradients))
    assert costs == [(3, 0, 3), (7, 1, 6 + gradients), (11, 2, 9 + 2 * gradients)]


def test_warmup_leaves_raw_where_it_is():
    known = Ridge()
    method = br.Implicit(schedule=br.Alternate(warmup=3))
    state, data = method.init(known.problem), streams(known)
    moved = [method.step(known.problem, state, *data).moved for _ in range(5)]
    assert moved == [False, False, False, True, True]


def test_hyper_lr_gives_a_hyper_its_own_rate():
    known = Quadratic()
    w = normal(1, 4)
    method = br.Implicit(optimizer=still, hyper_optimizer=still, hyper_lr={"shift": 0.5})
    state = at(method, known, {"shift": torch.zeros(2)}, w)
    method.step(known.problem, state, *streams(known))
    close(state.raw["shift"], -0.5 * known.jacobian.T @ known.h @ (w - known.target), tolerance("exact"))


# Where it ends


@products
def test_t1_t2_ends_on_the_quadratic_at_its_biased_fixed_point(products):
    """JᵀH(Jλ + j − t) = 0, which is not the optimum Jᵀ(Jλ + j − t) = 0."""
    known = Quadratic()
    jh = known.jacobian.T @ known.h
    biased = torch.linalg.solve(jh @ known.jacobian, jh @ (known.target - known.offset))
    best = known.best_raw
    assert float((biased - best).norm()) > 0.1
    method = br.Implicit(products=products, optimizer=partial(SGD, lr=0.3), hyper_optimizer=partial(SGD, lr=0.03))
    result = br.tune(known.problem, method, known.train, known.valid, steps=400)
    error = max(1e-9, 10 * tolerance(products))
    assert float((result.raw["shift"] - biased).norm()) < error
    w = result.model.w.detach()
    assert float((w - known.jacobian @ biased - known.offset).norm()) < 10 * error


def test_with_an_exact_solver_it_ends_at_the_optimum_of_the_quadratic():
    known = Quadratic()
    method = br.Implicit(br.Dense(), optimizer=partial(SGD, lr=0.3), hyper_optimizer=partial(SGD, lr=0.1))
    result = br.tune(known.problem, method, known.train, known.valid, steps=400)
    error = max(1e-9, 10 * tolerance("exact"))
    assert float((result.raw["shift"] - known.best_raw).norm()) < error


def test_products_of_an_unknown_kind_are_refused():
    with pytest.raises(ValueError, match='products must be "exact" or "central"; got \'forward\''):
        br.Implicit(products="forward")
