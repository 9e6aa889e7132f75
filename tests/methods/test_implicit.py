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


# Solvers, batches and starts in a run


def split(known: Ridge, at: int) -> list[tuple[Tensor, Tensor]]:
    return [(known.x[:at], known.y[:at]), (known.x[at:], known.y[at:])]


@products
def test_several_batches_are_their_mean(products):
    """Two batches of unequal size are all of ridge, and the hypergradient is that on all of it."""
    known = Ridge()
    raw, w = {"decay.weight": normal(1, 1, 5)}, 1 + normal(2, 5)
    method = br.Implicit(
        br.CG(50, tolerance=0.0), products, batches=2, optimizer=still, hyper_optimizer=partial(SGD, lr=1.0)
    )
    state = at(method, known, raw, w)
    train = br.Stream([split(known, 13)[0], *split(known, 13)])  # the first is for the training update
    metrics = method.step(known.problem, state, train, br.Stream(known.valid))
    expected = raw["decay.weight"][0] - known.hypergradient(raw, weights=w)
    close(state.raw["decay.weight"][0], expected, 100 * tolerance(products))
    assert metrics.extra["residual"] < (1e-6 if torch.get_default_dtype() == torch.float64 else 1e-2)
    solution_products = 5
    assert state.cost.train_batches == 3
    assert state.cost.gradients >= 2 + 2 * 2 * (solution_products + 1)


def test_dropout_masks_are_the_same_in_all_products_of_a_solve():
    """Conjugate gradients then solve one system: its residual, followed from step to step, is the true one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 1))
    problem = br.Problem(
        model,
        br.Space(decay=br.Hyper(4.0, log=True)),
        lambda model, batch, hyper: model(batch).square().mean() + br.functional.l2(model, hyper["decay"]),
        lambda model, batch, hyper: (model(batch) - 1).square().mean(),
    )
    batch = normal(1, 20, 3)
    exact, dense = br.Implicit(br.CG(200, tolerance=0.0)), br.Implicit(br.Dense())
    got = []
    for method in (exact, dense):
        torch.manual_seed(3)
        got.append(method.hypergradient(problem, method.init(problem), batch, batch)[1]["decay"])
    close(*got, 1e-9 if torch.get_default_dtype() == torch.float64 else 1e-3)


def test_a_warm_start_takes_up_where_the_last_solve_ended():
    """Nothing moves between the steps, so that the second solve has nothing left to do but look."""
    known = Ridge()
    method = br.Implicit(br.CG(30, tolerance=1e-4), warm_start=True, optimizer=still, hyper_optimizer=still)
    cold = br.Implicit(br.CG(30, tolerance=1e-4), optimizer=still, hyper_optimizer=still)
    counts = []
    for each in (method, cold):
        state, data = each.init(known.problem), streams(known)
        for _ in range(2):
            before = state.cost.gradients
            each.step(known.problem, state, *data)
            counts.append(state.cost.gradients - before)
        assert state.solves == 2
    assert counts[0] == counts[2] == counts[3]
    assert counts[1] == 1 + 1 + 2 + 2  # training, slope, one product for the residual, the mixed product
    # A solve after the first starts from x, and is as good as one from zero.
    x = known.valid_slope(torch.zeros(5)) @ torch.linalg.inv(known.hessian(known.problem.space.raw()))
    state = method.init(known.problem)
    for _ in range(3):
        method.step(known.problem, state, *streams(known))
    close(state.x["weight"][0], x, 1e-3)


def test_the_last_solution_is_saved_with_the_state():
    known = Quadratic()
    method = br.methods.hoag2016()
    state, data = method.init(known.problem), streams(known)
    for _ in range(3):
        method.step(known.problem, state, *data)
    other = method.init(known.problem)
    other.load_state_dict(state.state_dict())
    assert torch.equal(other.x["w"], state.x["w"])
    assert state.x["w"].any()
    assert (other.solves, other.troubled) == (3, 0)
    assert br.Implicit().init(known.problem).x == {}


def test_hoag_solves_to_a_tolerance_that_falls():
    """Every solve of a run meets its own tolerance, and the tolerances fall as 1/k²."""
    known = Ridge(12, 60)
    fall = br.PowerTolerance(0.3, 2.0)
    method = br.methods.hoag2016(steps=50, tolerance=fall, warm_start=False, optimizer=partial(SGD, lr=0.05))
    assert method.solver == br.CG(50, 0.0, fall)
    steps = 30 if torch.get_default_dtype() == torch.float64 else 8
    result = br.tune(known.problem, method, known.train, known.valid, steps=steps)
    residuals = result.history["residual"]
    for k, residual in enumerate(residuals):
        assert 0 < residual <= 0.3 / (k + 1) ** 2
    loose = br.methods.hoag2016(steps=50, tolerance=br.PowerTolerance(0.3, 1e-9), optimizer=partial(SGD, lr=0.05))
    rough = br.tune(known.problem, loose, known.train, known.valid, steps=steps)
    assert rough.history["gradients"][-1] < result.history["gradients"][-1]


def test_training_ends_at_its_tolerance():
    """On all data at once: the first solve is rough, so is the training before it, and both are better later."""
    known = Ridge()
    fall = br.GeometricTolerance(0.1, 0.5)
    method = br.methods.hoag2016(
        train_tolerance=fall, schedule=br.Alternate(train=100), optimizer=partial(SGD, lr=0.1), hyper_optimizer=still
    )
    state, data = method.init(known.problem), streams(known)
    raw = state.raw

    def slope() -> float:
        w = state.params["weight"][0]
        decay = raw["decay.weight"][0].exp()
        return float((2 * known.x.T @ (known.x @ w - known.y) / len(known.x) + 2 * decay * w).norm())

    first = slope()
    for k in range(5):
        before = state.cost.train_batches
        method.step(known.problem, state, *data)
        assert slope() <= 0.1 * 0.5**k * first
        assert state.cost.train_batches - before < 101
    assert state.first_slope == pytest.approx(first, rel=1e-5)


def test_nystrom_draws_from_the_state():
    """Its columns depend on the seed of the run alone, and go on where a saved state stopped."""
    known = Ridge()
    method = br.methods.hataya2023(2, damping=5.0, optimizer=partial(SGD, lr=0.1))

    def run(seed: int, steps: int, state=None) -> br.State:
        own = method.init(known.problem, seed=seed)
        if state is not None:
            own.load_state_dict(state.state_dict())
        for _ in range(steps):
            method.step(known.problem, own, *streams(known))
        return own

    whole = run(0, 4).raw["decay.weight"]
    assert torch.equal(run(1, 2, run(0, 2)).raw["decay.weight"], whole)
    assert not torch.equal(run(1, 4).raw["decay.weight"], whole)


# What a solver has to say


def test_trouble_is_said_once_a_run_and_the_residual_at_every_solve():
    known = Ridge()
    method = br.methods.lorraine2020(5, lr=10.0)
    with pytest.warns(RuntimeWarning, match="Neumann series diverges.*This was step 1, and is said once a run") as said:
        result = br.tune(known.problem, method, known.train, known.valid, steps=4)
    assert len(said) == 1
    assert result.state.troubled == 4
    assert result.history["residual"] == [1.0] * 4  # nothing is better than what diverges
    assert result.status is br.Status.FINISHED


def test_there_is_no_residual_without_a_solve():
    known = Ridge()
    seen = []
    method = br.Implicit(br.CG(), schedule=br.Alternate(warmup=2))
    result = br.tune(
        known.problem, method, known.train, known.valid, steps=3, callbacks=[lambda event: seen.append(event.columns)]
    )
    assert result.history["residual"][:2] == [None, None]
    assert result.history["residual"][2] < 1e-2
    assert "residual" in seen[0]
    plain = br.tune(known.problem, br.methods.luketina2016(), known.train, known.valid, steps=3)
    assert "residual" not in plain.history


@pytest.mark.filterwarnings("ignore:no hyper will be changed")
def test_a_hyper_may_not_have_the_columns_name():
    problem = br.Problem(
        torch.nn.Linear(1, 1),
        br.Space(residual=br.Hyper(1.0)),
        lambda model, batch, hyper: (model(batch) - hyper["residual"]).square().mean(),
        lambda model, batch, hyper: model(batch).mean(),
    )
    data = [torch.ones(2, 1)]
    with pytest.raises(ValueError, match="'residual' has the name of a column"):
        br.tune(problem, br.Implicit(), data, data, steps=1)
    br.tune(problem, br.methods.adjoint(), data, data, steps=1)


def test_a_slope_that_is_not_finite_ends_the_run():
    """The validation loss is finite, its gradient is not: the hypers must not go on as if it were zero."""
    problem = br.Problem(
        torch.nn.Linear(1, 1, bias=False),
        br.Space(a=br.Hyper(1.0)),
        lambda model, batch, hyper: (model(batch) - hyper["a"]).square().mean(),
        lambda model, batch, hyper: (model(batch) - model(batch).detach()).square().sum().sqrt(),
    )
    data = [torch.ones(2, 1)]
    with pytest.warns(RuntimeWarning) as said:
        result = br.tune(problem, br.Implicit(br.CG()), data, data, steps=5)
    assert result.status is br.Status.NON_FINITE
    assert any("not finite" in str(warning.message) for warning in said)


def test_a_solver_must_return_a_solution():
    @final
    @dataclass(frozen=True)
    class Old(br.Solver):
        def solve(self, product, b, turn):
            return b

    known = Ridge()
    method = br.Implicit(Old())
    with pytest.raises(TypeError, match=r"a solver returns br.Solution\(x\); Old returned dict"):
        method.hypergradient(known.problem, method.init(known.problem), known.train.tensors, known.valid.tensors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Implicit("cg"), "solver must be a Solver, such as .* got 'cg'"),
        (lambda: br.Implicit(br.CG), r"solver must be a Solver.* Call it: CG\(\.\.\.\)"),
        (lambda: br.Implicit(br.CG(), schedule=5), "schedule must be a Schedule, .* got 5"),
        (lambda: br.Implicit(br.CG(), batches=2.0), r"batches must be a whole number; got 2\.0"),
        (lambda: br.Implicit(train_tolerance=1e-3), "train_tolerance must be a Tolerance, .* got 0.001"),
        (lambda: br.Alternate(train=1.5), r"train must be a whole number; got 1\.5"),
        (lambda: br.ThenTune("3"), "train must be a whole number; got '3'"),
    ],
)
def test_parts_of_another_kind_are_refused_where_they_are_given(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="batches must be at least 1; got 0"):
        br.Implicit(batches=0)


def test_paper_names():
    assert br.methods.luketina2016() == br.Implicit(br.Identity())
    assert br.methods.hoag2016(steps=7, damping=0.1) == br.Implicit(
        br.CG(7, 0.1, br.PowerTolerance(0.1, 2.0)), warm_start=True
    )
    assert br.methods.lorraine2020(5, lr=0.2, batches=2) == br.Implicit(br.Neumann(5, 0.2), batches=2)
    assert br.methods.hataya2023(8, damping=0.3) == br.Implicit(br.Nystrom(8, 0.3))
