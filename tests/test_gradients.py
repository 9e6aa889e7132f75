"""Derivatives of the losses against finite differences, dense matrices of a loss written by hand, and closed forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.functional import hessian
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse import gradients, vectors
from bestresponse.gradients import difference_step, train_gradients
from bestresponse.testing import Ridge

wide = settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**31)
products = pytest.mark.parametrize("products", ["exact", "central"])

#: Largest error of a central difference, relative to the largest number: its step is the third root of the precision.
CENTRAL = {torch.float64: 1e-7, torch.float32: 2e-2}


def same(actual, expected, rtol: float = 1e-9) -> None:
    exact = torch.get_default_dtype() == torch.float64
    torch.testing.assert_close(actual, expected, rtol=rtol if exact else 1e-3, atol=1e-11 if exact else 1e-5)


def near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for the error of a central difference."""
    assert list(actual) == list(expected)
    a, b = vectors.flatten(actual), vectors.flatten(expected)
    assert float((a - b).abs().max()) <= CENTRAL[a.dtype] * float(b.abs().max())


def noise(like: dict[str, Tensor], seed: int, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return {
        name: size * torch.randn(part.shape, generator=generator, dtype=torch.float64, device="cpu").to(part)
        for name, part in like.items()
    }


@pytest.fixture
def double():
    """For finite differences, which single precision is too coarse for. The suite's own fixture puts it back."""
    torch.set_default_dtype(torch.float64)


class Smooth:
    """A smooth net with hypers of several kinds, and the same two losses written out on flat vectors."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.x, self.y, self.xv, self.yv = torch.randn(8, 3), torch.randn(8, 2), torch.randn(6, 3), torch.randn(6, 2)
        space = br.Space(
            decay=br.Hyper(0.1, log=True, shape=br.per_tensor(self.model)),
            smooth=br.Hyper(0.1, low=0.0, high=0.5),
            tilt=br.Hyper(0.2, shape=(2,), prior=lambda raw: 0.7 * raw.pow(4)),
            idle=br.Hyper(1.0, shape=(3,)),
        )
        self.problem = br.Problem(self.model, space, self.train_loss, self.valid_loss)
        self.batch, self.valid_batch = (self.x, self.y), (self.xv, self.yv)
        self.params = vectors.axpy(1.0, noise(self.problem.params(), 1), self.problem.params())
        self.raw = vectors.axpy(1.0, noise(space.raw(), 2, 0.3), space.raw())
        self.buffers: dict[str, Tensor] = {}
        self.vector = noise(self.params, 3)

    def train_loss(self, model, batch, hyper):
        x, y = batch
        target = (1 - hyper["smooth"]) * y + hyper["smooth"] * hyper["tilt"]
        return (model(x) - target).square().sum(dim=1) + br.functional.l2(model, hyper["decay"])

    def valid_loss(self, model, batch, hyper):
        x, y = batch
        return (model(x) - y - hyper["tilt"].sin()).square().mean()

    # The same by hand: w is (26,), raw (10,).

    def net(self, w: Tensor, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w[:12].view(4, 3).T + w[12:16])
        return hidden @ w[16:24].view(2, 4).T + w[24:]

    def train_by_hand(self, w: Tensor, raw: Tensor) -> Tensor:
        decay, smooth, tilt = raw[:4].exp(), 0.5 / (1 + (-raw[4]).exp()), raw[5:7]
        target = self.y + smooth * (tilt - self.y)
        each = torch.repeat_interleave(decay, torch.tensor([12, 4, 8, 2]))
        return ((self.net(w, self.x) - target) ** 2).sum() / 8 + (each * w * w).sum()

    def valid_by_hand(self, w: Tensor, raw: Tensor) -> Tensor:
        return ((self.net(w, self.xv) - self.yv - torch.sin(raw[5:7])) ** 2).sum() / 12

    def objective_by_hand(self, w: Tensor, raw: Tensor) -> Tensor:
        return self.valid_by_hand(w, raw) + 0.7 * (raw[5:7] ** 4).sum()

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        return vectors.flatten(self.params), vectors.flatten(self.raw)

    def arguments(self, batch=None) -> tuple:
        return self.problem, self.params, self.raw, self.batch if batch is None else batch


def differences(f: Callable[[Tensor, Tensor], Tensor], w: Tensor, raw: Tensor, step: float = 1e-5) -> list[Tensor]:
    """The gradient of a function of two flat vectors by finite differences of its values."""
    result = []
    for i, size in enumerate((len(w), len(raw))):
        moves = [torch.zeros(len(w)), torch.zeros(len(raw))]
        grad = torch.zeros(size)
        for j in range(size):
            moves[i] = torch.zeros(size)
            moves[i][j] = step
            grad[j] = (f(w + moves[0], raw + moves[1]) - f(w - moves[0], raw - moves[1])) / (2 * step)
        result.append(grad)
    return result


# First derivatives


@pytest.mark.parametrize("which", ["train", "valid"])
def test_gradients_are_finite_differences_of_evaluate(double, which):
    s = Smooth()
    batch = s.batch if which == "train" else s.valid_batch

    def loss(w: Tensor, raw: Tensor) -> Tensor:
        values = s.problem.space.values(vectors.unflatten(raw[None], s.raw))
        values = {n: {k: v[0] for k, v in x.items()} if isinstance(x, dict) else x[0] for n, x in values.items()}
        total = br.evaluate(s.problem, which, vectors.unflatten(w, s.params), values, batch)
        return total + (0.7 * raw[5:7].pow(4).sum() if which == "valid" else 0)

    by_w, by_raw = differences(loss, *s.flat)
    if which == "train":
        grad = br.train_gradient(*s.arguments(), buffers={}, with_raw=True)
    else:
        grad = br.valid_gradient(*s.arguments(s.valid_batch), buffers={})
    torch.testing.assert_close(vectors.flatten(grad.params), by_w, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(vectors.flatten(grad.raw), by_raw, rtol=1e-6, atol=1e-8)


def test_train_gradient_is_that_of_the_loss_by_hand():
    s = Smooth()
    w, raw = (part.requires_grad_() for part in s.flat)
    loss = s.train_by_hand(w, raw)
    by_w, by_raw = torch.autograd.grad(loss, [w, raw])
    grad = br.train_gradient(*s.arguments(), buffers={}, with_raw=True)
    same(grad.loss, loss.detach())
    same(vectors.flatten(grad.params), by_w)
    same(vectors.flatten(grad.raw), by_raw)
    assert not grad.loss.requires_grad


def test_the_prior_enters_the_validation_gradient_but_not_its_loss():
    s = Smooth()
    w, raw = (part.requires_grad_() for part in s.flat)
    by_w, by_raw = torch.autograd.grad(s.objective_by_hand(w, raw), [w, raw])
    grad = br.valid_gradient(*s.arguments(s.valid_batch), buffers={})
    same(grad.loss, s.valid_by_hand(w, raw).detach())
    same(vectors.flatten(grad.params), by_w)
    same(vectors.flatten(grad.raw), by_raw)
    without = torch.autograd.grad(s.valid_by_hand(w, raw), raw)[0]
    same(grad.raw["tilt"] - without[5:7], 0.7 * 4 * s.raw["tilt"] ** 3)
    assert not grad.loss.requires_grad


def test_a_prior_alone_gives_a_gradient():
    """The validation loss does not read the hyper at all."""
    space = br.Space(a=br.Hyper(3.0, prior=lambda raw: raw.square()))
    problem = br.Problem(nn.Linear(1, 1), space, lambda m, b, h: m(b).mean() * h["a"], lambda m, b, h: m(b).mean())
    grad = br.valid_gradient(problem, problem.params(), space.raw(), torch.ones(1, 1), buffers={})
    assert float(grad.raw["a"]) == pytest.approx(6.0)


def test_raw_is_left_out_unless_it_is_asked_for():
    s = Smooth()
    assert br.train_gradient(*s.arguments(), buffers={}).raw == {}


def test_a_hyper_that_a_loss_does_not_see_has_a_zero_gradient():
    s = Smooth()
    zero = torch.zeros(3)
    assert torch.equal(br.train_gradient(*s.arguments(), buffers={}, with_raw=True).raw["idle"], zero)
    assert torch.equal(br.valid_gradient(*s.arguments(s.valid_batch), buffers={}).raw["idle"], zero)
    assert torch.equal(br.mixed_product(*s.arguments(), s.vector, buffers={})["idle"], zero)
    assert torch.equal(br.mixed_product(*s.arguments(), s.vector, buffers={}, products="central")["idle"], zero)


def test_a_loss_without_any_dependence_has_zero_gradients():
    problem = br.Problem(nn.Linear(2, 1), br.Space(a=br.Hyper(1.0)), *(lambda m, b, h: b.sum(),) * 2)
    params, raw = problem.params(), problem.space.raw()
    grad = br.train_gradient(problem, params, raw, torch.ones(2), buffers={}, with_raw=True)
    assert float(grad.loss) == 2
    assert not any(part.any() for part in (*grad.params.values(), *grad.raw.values()))


# Products with second derivatives


def product_of(name: str, products: str, s: Smooth, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    function = {"curvature": br.curvature_product, "mixed": br.mixed_product}[name]
    return function(*s.arguments(), vector, buffers=s.buffers, products=products)


def test_exact_products_are_those_of_the_dense_matrices():
    s = Smooth()
    (by_ww, _), (by_rw, _) = hessian(s.train_by_hand, s.flat)
    v = vectors.flatten(s.vector)
    same(vectors.flatten(product_of("curvature", "exact", s, s.vector)), by_ww @ v)
    same(vectors.flatten(product_of("mixed", "exact", s, s.vector)), by_rw @ v)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", ["curvature", "mixed"])
def test_central_products_are_close_to_exact_ones_whatever_the_vectors_length(name, size):
    s = Smooth()
    vector = vectors.scale(size, s.vector)
    near(product_of(name, "central", s, vector), product_of(name, "exact", s, vector))


@products
@given(weights=st.integers(1, 6), seed=seeds)
@wide
def test_products_of_ridge_are_its_closed_form(products, weights, seed):
    ridge = Ridge(weights, 12, seed=seed % 1000)
    raw = noise(ridge.problem.space.raw(), seed)
    params, vector = noise(ridge.problem.params(), seed + 1), noise(ridge.problem.params(), seed + 2)
    arguments = ridge.problem, params, raw, (ridge.x, ridge.y), vector
    curvature = br.curvature_product(*arguments, buffers={}, products=products)["weight"][0]
    mixed = br.mixed_product(*arguments, buffers={}, products=products)["decay.weight"][0]
    v, w, decay = vector["weight"][0], params["weight"][0], raw["decay.weight"][0].exp()
    compare = same if products == "exact" else lambda a, b: near({"": a}, {"": b})
    compare(curvature, 2 * (ridge.x.T @ (ridge.x @ v) / 12 + decay * v))
    compare(mixed, 2 * decay * w * v)


@given(seed=seeds)
@wide
def test_the_curvature_is_symmetric(seed):
    s = Smooth()
    u, v = noise(s.params, seed), noise(s.params, seed + 1)
    left = vectors.dot(product_of("curvature", "exact", s, u), v)
    same(left, vectors.dot(u, product_of("curvature", "exact", s, v)))


@pytest.mark.parametrize("name", ["curvature", "mixed"])
@given(seed=seeds, a=st.floats(-3, 3), b=st.floats(-3, 3))
@wide
def test_products_are_linear(name, seed, a, b):
    s = Smooth()
    u, v = noise(s.params, seed), noise(s.params, seed + 1)
    together = product_of(name, "exact", s, vectors.axpy(a, u, vectors.scale(b, v)))
    apart = vectors.axpy(a, product_of(name, "exact", s, u), vectors.scale(b, product_of(name, "exact", s, v)))
    same(vectors.flatten(together), vectors.flatten(apart))


@products
def test_a_loss_linear_in_the_weights_has_no_curvature(products):
    problem = br.Problem(
        nn.Linear(2, 1), br.Space(a=br.Hyper(3.0)), lambda m, b, h: h["a"] * m(b).mean(), lambda m, b, h: m(b).mean()
    )
    params, vector = problem.params(), noise(problem.params(), 0)
    arguments = problem, params, problem.space.raw(), torch.ones(1, 2), vector
    curvature = br.curvature_product(*arguments, buffers={}, products=products)
    assert float(vectors.norm(curvature)) == pytest.approx(0, abs=1e-9 if products == "exact" else 1e-4)
    mixed = br.mixed_product(*arguments, buffers={}, products=products)["a"]
    slope = float(vector["weight"].sum() + vector["bias"].sum())
    assert float(mixed) == pytest.approx(slope, rel=1e-5 if products == "exact" else 1e-3)


# The step of a central difference


def test_the_step_balances_rounding_and_curvature():
    w, v = {"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([0.0, 2.0])}
    step = torch.finfo(torch.get_default_dtype()).eps ** (1 / 3)
    assert difference_step(w, v) == pytest.approx(step * 5 / 2, rel=1e-6)
    assert difference_step(w, {"a": torch.zeros(2)}) == 0.0
    assert difference_step({"a": torch.zeros(2)}, v) == pytest.approx(step / 2, rel=1e-6)


@products
def test_the_zero_vector_gives_zeros_of_the_right_shapes(products):
    s = Smooth()
    zero = vectors.zeros_like(s.params)
    for name, like in (("curvature", s.params), ("mixed", s.raw)):
        got = product_of(name, products, s, zero)
        torch.testing.assert_close(got, vectors.zeros_like(like), rtol=0, atol=0)


@products
def test_products_at_zero_weights(products):
    ridge = Ridge(3, 12)
    zero, vector = ridge.problem.params(), noise(ridge.problem.params(), 0)
    raw = ridge.problem.space.raw()
    got = br.curvature_product(ridge.problem, zero, raw, (ridge.x, ridge.y), vector, buffers={}, products=products)[
        "weight"
    ][0]
    near({"": got}, {"": ridge.hessian(raw) @ vector["weight"][0]})


# Random numbers, buffers, and what must not change


class Noisy(Smooth):
    """The same with dropout, which the losses by hand do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, nn.Dropout(0.5))
        self.problem = br.Problem(self.model, self.problem.space, self.plain_loss, self.plain_loss)
        self.params = noise(self.problem.params(), 1)
        self.raw = self.problem.space.raw()
        self.vector = noise(self.params, 3)

    def plain_loss(self, model, batch, hyper):
        x, y = batch
        loss = (model(x) - y * hyper["smooth"]).square().sum(dim=1)
        return loss + hyper["tilt"].sum() * sum(p.pow(3).sum() for p in model.parameters())


@pytest.mark.parametrize("name", ["curvature", "mixed"])
def test_both_sides_of_a_central_difference_drop_the_same_units(name):
    s, got = Noisy(), {}
    for products in ("central", "exact"):
        torch.manual_seed(7)
        got[products] = product_of(name, products, s, s.vector)
    near(got["central"], got["exact"])
    torch.manual_seed(8)
    other = product_of(name, "exact", s, s.vector)
    assert not torch.allclose(vectors.flatten(other), vectors.flatten(got["exact"]))


def test_a_central_difference_uses_as_many_random_numbers_as_one_gradient(device):
    s = Noisy()
    states = []
    for call in (
        lambda: br.train_gradient(*s.arguments(), buffers={}),
        lambda: product_of("mixed", "central", s, s.vector),
    ):
        torch.manual_seed(7)
        call()
        states.append(torch.rand(3, device=device))
    assert torch.equal(*states)


class Normed(Noisy):
    """With BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        self.problem = br.Problem(self.model, self.problem.space, self.plain_loss, self.plain_loss)
        self.params = noise(self.problem.params(), 1)
        self.vector = noise(self.params, 3)
        self.buffers = self.problem.buffers()


CALLS = {
    "train": lambda s: br.train_gradient(*s.arguments(), buffers=s.buffers, with_raw=True),
    "valid": lambda s: br.valid_gradient(*s.arguments(), buffers=s.buffers),
    "curvature exact": lambda s: product_of("curvature", "exact", s, s.vector),
    "curvature central": lambda s: product_of("curvature", "central", s, s.vector),
    "mixed exact": lambda s: product_of("mixed", "exact", s, s.vector),
    "mixed central": lambda s: product_of("mixed", "central", s, s.vector),
}


@pytest.mark.parametrize("call", CALLS)
def test_only_the_training_gradient_moves_buffers_and_nothing_else_changes(call):
    s = Normed()
    s.model.train()
    kept = copy.deepcopy((s.params, s.raw, s.vector, dict(s.model.named_parameters()), dict(s.model.named_buffers())))
    buffers = copy.deepcopy(s.buffers)
    CALLS[call](s)
    now = (s.params, s.raw, s.vector, dict(s.model.named_parameters()), dict(s.model.named_buffers()))
    for before, after in zip(kept, now, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(part.requires_grad or part.grad is not None for part in (*s.params.values(), *s.raw.values()))
    moved = [name for name in buffers if not torch.equal(buffers[name], s.buffers[name])]
    assert moved == (list(buffers) if call == "train" else [])


class Counting(nn.Module):
    """Writes to its buffer in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.weight * x


def test_the_validation_gradient_works_on_copies_whatever_a_layer_does():
    problem = br.Problem(Counting(), br.Space(a=br.Hyper(1.0)), *(lambda m, b, h: m(b).sum() * h["a"],) * 2)
    buffers = problem.buffers()
    br.valid_gradient(problem, problem.params(), problem.space.raw(), torch.ones(2), buffers=buffers)
    assert buffers["calls"].item() == 0
    br.train_gradient(problem, problem.params(), problem.space.raw(), torch.ones(2), buffers=buffers)
    assert buffers["calls"].item() == 1


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


def test_central_products_need_no_second_derivative():
    def loss(model, batch, hyper):
        return (hyper["a"] * OnceOnly.apply(model(batch))).sum()

    problem = br.Problem(nn.Linear(2, 1, bias=False), br.Space(a=br.Hyper(3.0)), loss, loss)
    x, w = torch.tensor([[1.0, 2.0]]), {"weight": torch.tensor([[0.5, -1.0]])}
    v = {"weight": torch.tensor([[2.0, 1.0]])}
    arguments = problem, w, problem.space.raw(), x, v
    central = {"buffers": {}, "products": "central"}
    # a (x·w)²: H v = 2 a x (x·v), and the mixed product is 2 (x·w) (x·v).
    near(br.curvature_product(*arguments, **central), {"weight": 2 * 3 * x * 4})
    near(br.mixed_product(*arguments, **central), {"a": torch.tensor(2 * -1.5 * 4)})


@pytest.mark.parametrize("name", ["curvature", "mixed"])
def test_central_is_close_to_exact_through_batch_norm(name):
    s = Normed()
    near(product_of(name, "central", s, s.vector), product_of(name, "exact", s, s.vector))


# Several samples at once


def sampled_problem() -> tuple[br.Problem, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    space = br.Space(
        decay=br.Hyper(0.1, log=True, shape=br.per_layer(model)),
        rate=br.Hyper(0.3, low=0.0, high=1.0, sampled=True),
        shift=br.Hyper(0.3, shape=(2,), sampled=True),
    )

    def train_loss(model, batch, hyper):
        x, y = batch
        error = model(x * hyper["rate"][:, None]) - y - hyper["shift"]
        return error.square().sum(dim=1) + br.functional.l2(model, hyper["decay"])

    problem = br.Problem(model, space, train_loss, train_loss)
    return problem, (torch.randn(5, 3), torch.randn(5, 2))


def several(like: dict[str, Tensor], count: int, seed: int) -> dict[str, Tensor]:
    return noise({name: torch.stack([part] * count) for name, part in like.items()}, seed)


@pytest.mark.parametrize("vectorize", [False, True])
def test_gradients_of_several_samples_are_those_of_each(vectorize):
    problem, batch = sampled_problem()
    params, raw = several(problem.params(), 3, 1), several(problem.space.raw(), 3, 2)
    together = train_gradients(problem, params, raw, batch, buffers={}, vectorize=vectorize)
    assert together.loss.shape == (3,)
    assert together.raw == {}
    for i in range(3):
        w, r = ({name: part[i] for name, part in vector.items()} for vector in (params, raw))
        alone = br.train_gradient(problem, w, r, batch, buffers={})
        same(together.loss[i], alone.loss)
        same({name: part[i] for name, part in together.params.items()}, alone.params)


def test_a_vectorized_loss_draws_other_dropout_for_each_sample():
    problem = br.Problem(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), br.Space(a=br.Hyper(1.0)), *(lambda m, b, h: m(b).sum(),) * 2
    )
    params = {name: torch.stack([part] * 8) for name, part in problem.params().items()}
    grad = train_gradients(problem, params, {"a": torch.ones(8)}, torch.ones(20, 2), buffers={}, vectorize=True)
    assert len(set(grad.loss.tolist())) > 4


def test_buffers_take_part_in_a_vectorized_loss_and_stay():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x + self.shift

    problem = br.Problem(Shifted(), br.Space(a=br.Hyper(1.0)), *(lambda m, b, h: m(b).square().sum() * h["a"],) * 2)
    buffers = {"shift": torch.tensor([1.0, 2.0])}
    params, raw = {"weight": torch.tensor([[1.0, 1.0], [2.0, 3.0]])}, {"a": torch.tensor([1.0, 10.0])}
    for vectorize in (True, False):
        grad = train_gradients(problem, params, raw, torch.ones(2), buffers=buffers, vectorize=vectorize)
        assert grad.loss.tolist() == [4 + 9, 10 * (9 + 25)]
        assert grad.params["weight"].tolist() == [[4, 6], [60, 100]]
        assert buffers["shift"].tolist() == [1, 2]


def test_the_loop_over_samples_moves_batch_norm_once_for_each():
    s = Normed()
    params, raw = several(s.params, 3, 1), several(s.raw, 3, 2)
    one_by_one = s.problem.buffers()
    for i in range(3):
        w, r = ({name: part[i] for name, part in vector.items()} for vector in (params, raw))
        br.train_gradient(s.problem, w, r, s.batch, buffers=one_by_one)
    train_gradients(s.problem, params, raw, s.batch, buffers=s.buffers, vectorize=False)
    assert int(s.buffers["1.num_batches_tracked"]) == 3
    same(s.buffers, one_by_one)


# A central difference is second order


def test_the_error_of_a_central_difference_falls_with_the_square_of_its_step(double, monkeypatch):
    s = Smooth()
    exact = vectors.flatten(product_of("curvature", "exact", s, s.vector))
    errors = []
    for step in (4e-3, 2e-3, 1e-3):
        monkeypatch.setattr(gradients, "difference_step", lambda params, vector, step=step: step)
        errors.append(float((vectors.flatten(product_of("curvature", "central", s, s.vector)) - exact).norm()))
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(2.0, abs=0.05)


# Activation checkpointing: parts of the forward pass are computed again during the backward one


class Stack(torch.nn.Module):
    """Two layers, the first computed again in the backward pass if so wished."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.second, self.recompute = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return self.second(checkpoint(self.layer, x, use_reentrant=False))
        return self.second(self.layer(x))

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


def test_checkpointed_layers_are_differentiated_at_the_weights_being_tried():
    x, y = torch.randn(5, 3), torch.randn(5, 1)

    def train_loss(model, batch, hyper):
        return (model(x) - y).square().mean() + br.functional.l2(model, hyper["decay"])

    plain, again = Stack(recompute=False), Stack(recompute=True)
    again.load_state_dict(plain.state_dict())
    space = br.Space(decay=br.Hyper(0.1, log=True))
    problems = [br.Problem(model, space, train_loss, train_loss) for model in (plain, again)]
    w = {name: torch.randn_like(p) for name, p in plain.named_parameters()}  # not the model's own
    v = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    raw = space.raw()

    def all_derivatives(problem):
        products = [
            product(problem, w, raw, None, v, buffers={}, products=way)
            for product in (br.curvature_product, br.mixed_product)
            for way in ("exact", "central")
        ]
        train = br.train_gradient(problem, w, raw, None, buffers={}, with_raw=True)
        valid = br.valid_gradient(problem, w, raw, None, buffers={})
        return [*products, train.params, train.raw, valid.params, valid.raw]

    for expected, ours in zip(*map(all_derivatives, problems), strict=True):
        for name, part in expected.items():
            torch.testing.assert_close(ours[name], part)


def test_derivatives_are_the_same_without_gradients():
    """``torch.no_grad()`` around them must not make them zero."""
    s = Smooth()

    def all_derivatives() -> list[dict[str, Tensor]]:
        train = br.train_gradient(*s.arguments(), buffers={}, with_raw=True)
        valid = br.valid_gradient(*s.arguments(s.valid_batch), buffers={})
        along = {name: part[None] for name, part in s.vector.items()}, {n: part[None] for n, part in s.raw.items()}
        products = [
            product(*s.arguments(), s.vector, buffers={}, products=way)
            for product in (br.curvature_product, br.mixed_product)
            for way in ("exact", "central")
        ]
        both = gradients.train_products(*s.arguments(), lambda grad: grad, buffers={})
        tangents = gradients.train_tangents(*s.arguments(), along, buffers={})
        several = train_gradients(s.problem, *along, s.batch, buffers={}, vectorize=True)
        return [train.params, train.raw, valid.params, *products, *both, tangents[1], several.params]

    expected = all_derivatives()
    with torch.no_grad():
        ours = all_derivatives()
    for one, other in zip(ours, expected, strict=True):
        same(one, other)
        assert any(part.any() for part in one.values())
