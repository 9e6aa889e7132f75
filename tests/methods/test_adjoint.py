"""The adjoint method: the pair in closed form, where p settles, regression for sampled hypers, and what it costs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.optim import SGD, Adam

import bestresponse as br
from bestresponse import vectors
from bestresponse.gradients import antithetic_pair, curvature_product, mixed_product, slopes_along, train_gradient
from bestresponse.optimizers import Pace, Updater
from bestresponse.testing import Ridge, net_problem

still = br.Alternate(warmup=10**9)


def tolerance(double: float, single: float) -> float:
    return double if torch.get_default_dtype() == torch.float64 else single


def close(actual: Tensor, expected: Tensor, relative: float) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def like(params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    return {name: normal(seed + i, *part.shape) for i, (name, part) in enumerate(params.items())}


def streams(problem: br.Problem, train: object, valid: object) -> tuple[br.Stream, br.Stream]:
    return br.Stream(train, name="train"), br.Stream(valid, name="valid")


# The pair


def test_a_pair_on_ridge_is_its_closed_form():
    """The loss is quadratic in the weights, so that central differences are exact."""
    known = Ridge()
    raw, w, p = {"decay.weight": normal(1, 1, 5)}, normal(2, 1, 5), normal(3, 1, 5)
    pair = antithetic_pair(
        known.problem, {"weight": w}, raw, (known.x, known.y), {"weight": p}, torch.tensor(0.1), buffers={}
    )
    decay, m = raw["decay.weight"].exp(), len(known.x)
    error = known.x @ w[0] - known.y
    relative = tolerance(1e-11, 1e-4)
    close(pair.params["weight"], (2 * known.x.T @ error / m)[None] + 2 * decay * w, relative)
    close(pair.curvature["weight"], (known.hessian(raw) @ p[0])[None], relative)
    close(pair.mixed["decay.weight"], 2 * decay * w * p, relative)
    close(pair.slopes, 2 * error * (known.x @ p[0]) + 2 * (decay * w * p).sum(), relative)
    close(
        slopes_along(
            known.problem, {"weight": w}, raw, (known.x, known.y), {"weight": p}, torch.tensor(0.1), buffers={}
        ),
        pair.slopes,
        relative,
    )


def test_a_pair_on_a_net_agrees_with_second_derivatives_and_moves_buffers_once():
    """BatchNorm, dropout of the same units, tied and frozen weights, three kinds of hyper."""
    problem, train, _ = net_problem()
    batch, raw = next(iter(train)), problem.space.raw()
    params = vectors.axpy(0.3, like(problem.params(), 9), problem.params())  # away from the kink of |w| at zero
    p = like(params, 5)
    before, exact_buffers, pair_buffers = problem.buffers(), problem.buffers(), problem.buffers()
    delta = torch.tensor(tolerance(1e-5, 1e-3))
    torch.manual_seed(3)
    pair = antithetic_pair(problem, params, raw, batch, p, delta, buffers=pair_buffers)
    torch.manual_seed(3)
    gradient = train_gradient(problem, params, raw, batch, buffers=exact_buffers)
    torch.manual_seed(3)
    curvature = curvature_product(problem, params, raw, batch, p, buffers=before)
    torch.manual_seed(3)
    mixed = mixed_product(problem, params, raw, batch, p, buffers=before)
    relative = tolerance(1e-7, 2e-2)
    close(vectors.flatten(pair.params), vectors.flatten(gradient.params), relative)
    close(vectors.flatten(pair.curvature), vectors.flatten(curvature), relative)
    close(vectors.flatten(pair.mixed), vectors.flatten(mixed), relative)
    close(pair_buffers["norm.running_var"], exact_buffers["norm.running_var"], relative)
    assert int(pair_buffers["norm.num_batches_tracked"]) == 1
    assert not int(before["norm.num_batches_tracked"])


# Where the adjoint settles


@pytest.mark.parametrize(("horizon", "momentum"), [(5.0, 0.0), (1000.0, 0.9)])
def test_the_adjoint_settles_at_the_damped_solution(horizon: float, momentum: float):
    """p = (H + (1 − momentum) / (lr · horizon))⁻¹ ∂L_V/∂w, with weights that stay at the best response."""
    known = Ridge()
    raw = {"decay.weight": normal(1, 1, 5)}
    method = br.Adjoint(
        horizon=horizon, schedule=still, optimizer=partial(SGD, lr=0.1, momentum=momentum), average=1, tracking=0.1
    )
    state = method.init(known.problem)
    state.raw["decay.weight"].copy_(raw["decay.weight"])
    w = known.best_response(raw)
    state.params["weight"].copy_(w[None])
    data = streams(known.problem, known.train, known.valid)
    for _ in range(1000):
        method.step(known.problem, state, *data)
    damped = known.hessian(raw) + torch.eye(5) * (1 - momentum) / (0.1 * horizon)
    close(state.adjoint["weight"][0], torch.linalg.solve(damped, known.valid_slope(w)), tolerance(1e-4, 1e-2))
    loss, hypergradient = method.hypergradient(known.problem, state, *(next(stream) for stream in data))
    expected = known.hypergradient(raw, inverse=torch.linalg.inv(damped))
    close(hypergradient["decay.weight"][0], expected, tolerance(1e-4, 1e-2))
    assert float(loss) == pytest.approx(known.valid_loss(raw), rel=1e-4)


@pytest.mark.parametrize(
    "factory",
    [
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1, momentum=0.9),
        partial(SGD, lr=0.1, momentum=0.5, dampening=0.2),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(Adam, lr=0.1),
        partial(Adam, lr=0.1, amsgrad=True),
        partial(torch.optim.NAdam, lr=0.1),
        partial(torch.optim.RMSprop, lr=0.1),
    ],
    ids=lambda factory: f"{factory.func.__name__} {factory.keywords}",
)
def test_pace_is_how_far_an_optimizer_goes_along_a_steady_gradient(factory):
    """The optimizer itself says: so many steps along one gradient, and how far the weights have come."""
    w, gradient = {"w": torch.zeros(3)}, {"w": torch.tensor([0.5, -2.0, 3.0])}
    updater = Updater.of(w, factory)
    for _ in range(4000):
        updater.update(w, vectors.clone(gradient))  # Nesterov's momentum on a GPU writes into it
    before = w["w"].clone()
    updater.update(w, vectors.clone(gradient))
    lr, divisor, _ = Pace.of(updater.optimizer, w["w"])
    assert divisor is not None
    close(before - w["w"], lr * gradient["w"] / divisor, 2e-2)


@pytest.mark.parametrize("decoupled", [True, False])
def test_pace_knows_the_weight_decay_of_the_optimizer(decoupled: bool):
    """With a gradient of zero, SGD's and AdamW's decay are what moves the weights: by lr · decay · w / D."""
    w = {"w": torch.tensor([1.0, 2.0])}
    updater = Updater.of(w, partial(torch.optim.AdamW if decoupled else SGD, lr=0.1, weight_decay=0.3))
    updater.update(w, {"w": torch.tensor([1.0, 1.0])})
    before = w["w"].clone()
    lr, divisor, decay = Pace.of(updater.optimizer, w["w"])
    moved = lr * torch.as_tensor(decay) * before / torch.as_tensor(divisor)
    close(moved, 0.1 * 0.3 * before, tolerance(1e-9, 1e-5))


def test_an_optimizer_that_keeps_no_squares_is_measured():
    """Rprop's state tells nothing of a pace; root mean squares of the gradient stand in."""
    known = Ridge()
    method = br.Adjoint(optimizer=partial(torch.optim.Rprop, lr=1e-3), schedule=still)
    state = method.init(known.problem)
    data = streams(known.problem, known.train, known.valid)
    for _ in range(5):
        method.step(known.problem, state, *data)
    assert state.squares["weight"].all()
    assert state.adjoint["weight"].isfinite().all()
    assert state.adjoint["weight"].any()


def test_dead_weights_stay_out_of_it():
    """Pixels that are always black have no gradient: nothing divides by their zeros."""
    x = torch.cat([normal(1, 20, 2), torch.zeros(20, 2)], 1)
    problem = br.Problem(
        nn.Linear(4, 1, bias=False),
        br.Space(decay=br.Hyper(1.0, log=True)),
        lambda model, batch, hyper: (
            (model(batch) - 1).square().mean() + hyper["decay"] * model.weight[0, :2].square().sum()
        ),
        lambda model, batch, hyper: (model(batch) + 1).square().mean(),
    )
    data = br.Batches(x, size=5)
    result = br.tune(problem, br.Adjoint(schedule=br.Alternate(10, 20)), [b[0] for b in data], [x], steps=30)
    assert result.status is br.Status.FINISHED
    assert not result.state.adjoint["weight"][0, 2:].any()
    assert result.state.adjoint["weight"][0, :2].all()


# Sampled hypers


def shifted(rounded: bool = False, start: float = 0.3) -> br.Problem:
    """ℓᵢ = (xᵢ·w − aᵢ)², with every example's own a."""

    def train_loss(model: nn.Module, batch: Tensor, hyper: br.space.Values) -> Tensor:
        a = hyper["a"].detach().round() if rounded else hyper["a"].detach()
        return (model(batch)[:, 0] - a).square()

    return br.Problem(
        nn.Linear(3, 1, bias=False),
        br.Space(a=br.Hyper(start, sampled=True)),
        train_loss,
        lambda model, batch, hyper: model(batch).square().mean(),
    )


def at(problem: br.Problem, **kwargs):
    """A method, and a state whose adjoint is not zero."""
    method = br.Adjoint(**kwargs)
    state = method.init(problem, seed=1)
    state.adjoint["weight"].copy_(normal(4, 1, 3))
    return method, state


@pytest.mark.parametrize("antithetic", [True, False])
def test_the_regression_is_a_covariance_with_the_noise(antithetic: bool):
    """In closed form for the noise drawn; mirrored, all that is even in it cancels."""
    problem, x = shifted(), normal(2, 8, 3)
    method, state = at(problem, perturb=br.Gaussian(0.5, antithetic=antithetic))
    generator = torch.Generator(device=state.generator.device)
    generator.set_state(state.generator.get_state())
    noise = torch.randn(8, generator=generator, dtype=x.dtype, device=x.device)
    _, hypergradient = method.hypergradient(problem, state, x, x)
    along = x @ state.adjoint["weight"][0]
    slopes = -along * noise if antithetic else 2 * (x @ state.params["weight"][0] - 0.3 - 0.5 * noise) * along
    expected = -((slopes - slopes.mean()) * (noise - noise.mean())).sum() / 7 / 0.5
    close(hypergradient["a"], expected, tolerance(1e-9, 1e-3))


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("rounded", [True, False])
def test_the_regression_is_the_derivative_of_the_smoothed_loss(rounded: bool, antithetic: bool):
    """−2 mean(x·p) times the slope of E[round(a + σε)], a sum of Gaussian densities; within its sampling error."""
    problem, count, scale = shifted(rounded), 200_000, 0.5
    x = normal(2, count, 3) + 1
    method, state = at(problem, perturb=br.Gaussian(scale, antithetic=antithetic))
    _, hypergradient = method.hypergradient(problem, state, x, x)
    steepness = 1.0
    if rounded:
        edges = torch.arange(-20, 21) + 0.5
        steepness = float(torch.exp(-(((edges - 0.3) / scale) ** 2) / 2).sum() / math.sqrt(2 * math.pi) / scale)
    expected = 2 * float((x @ state.adjoint["weight"][0]).mean()) * steepness
    spread = 20 / scale / math.sqrt(count)  # of (slope · noise) / σ, whose standard deviation is below 20
    assert abs(expected) > 5 * spread
    assert float(hypergradient["a"]) == pytest.approx(expected, abs=spread)


def test_mirrored_losses_take_out_most_of_the_noise():
    """Of slopes 2 (xᵢ·w − a − σεᵢ) xᵢ·p with a = 4, the part that is odd in ε is a small one."""
    problem, x = shifted(start=4.0), normal(2, 64, 3) + 1
    spread = {}
    for antithetic in (True, False):
        method, state = at(problem, perturb=br.Gaussian(0.5, antithetic=antithetic))
        estimates = [method.hypergradient(problem, state, x, x)[1]["a"] for _ in range(200)]
        spread[antithetic] = float(torch.stack(estimates).std())
    assert spread[True] < 0.3 * spread[False]


@pytest.mark.parametrize("antithetic", [True, False])
def test_a_learnt_scale_follows_the_derivative_in_its_logarithm(antithetic: bool):
    """ℓᵢ = (xᵢ·w) aᵢ², so that −dL_V/dlog σ = mean(x·p) · 2σ² and the entropy adds a constant."""
    problem = br.Problem(
        nn.Linear(3, 1, bias=False),
        br.Space(a=br.Hyper(0.0, sampled=True)),
        lambda model, batch, hyper: model(batch)[:, 0] * hyper["a"].detach().square(),
        lambda model, batch, hyper: model(batch).square().mean(),
    )
    x = normal(2, 200_000, 3) + 1
    perturb = br.Gaussian(0.5, antithetic=antithetic, learn=True, entropy=0.25)
    method, state = at(
        problem,
        perturb=perturb,
        schedule=br.Alternate(),
        hyper_optimizer=partial(SGD, lr=1.0),
        optimizer=partial(SGD, lr=0.0),
        tracking=1e-12,
    )
    method.step(problem, state, br.Stream([x], name="train"), br.Stream([x], name="valid"))
    expected = 2 * 0.5**2 * float((x @ normal(4, 1, 3)[0]).mean()) + 0.25
    assert float(state.log_scale["a"]) - math.log(0.5) == pytest.approx(expected, abs=0.02)


def test_one_run_tunes_differentiable_sampled_and_net_hypers_together():
    """The differentiable part is the exact product at the same draws; all parts move and stay finite."""
    weigher = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1), nn.Softplus())
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    space = br.Space(
        decay=br.Hyper(1e-2, log=True, shape=br.per_weight(model)),
        rate=br.Hyper(0.2, low=0.0, high=0.9, shape=(2,), sampled=True),
        weigher=br.Net(weigher),
    )

    def train_loss(model: nn.Module, batch: tuple[Tensor, Tensor], hyper: br.space.Values) -> Tensor:
        x, y = batch
        keep = torch.rand(len(x), 2, 3) > hyper["rate"][:, :, None]  # (batch, 2, 3)
        each = (model(x * keep.prod(1)) - y).square()[:, 0]
        weight = torch.func.functional_call(weigher, hyper["weigher"], (y,))[:, 0]
        return weight * each + br.functional.l2(model, hyper["decay"])

    x, y = normal(1, 64, 3), normal(2, 64, 1)
    problem = br.Problem(model, space, train_loss, lambda model, batch, hyper: F.mse_loss(model(batch[0]), batch[1]))
    train, valid = br.Batches(x[:48], y[:48], size=16), br.Batches(x[48:], y[48:], size=16)
    method = br.Adjoint(schedule=br.Alternate(5, 10), difference=tolerance(1e-6, 1e-3))
    state = method.init(problem)
    state.adjoint = like(state.params, 7)
    torch.manual_seed(4)
    _, hypergradient = method.hypergradient(problem, state, (x, y), (x, y))

    state.generator.manual_seed(0)
    draw = method.perturb.noise(state.raw["rate"], 64, state.generator)
    raw = {**state.raw, "rate": state.raw["rate"] + draw}
    torch.manual_seed(4)
    mixed = mixed_product(problem, state.params, raw, (x, y), state.adjoint, buffers={})
    leaves = [leaf for leaf in raw if leaf != "rate"]
    got, expected = ({leaf: side[leaf] for leaf in leaves} for side in (hypergradient, mixed))
    close(vectors.flatten(got), -vectors.flatten(expected), tolerance(1e-6, 2e-2))

    result = br.tune(problem, method, train, valid, steps=20)
    assert result.status is br.Status.FINISHED
    start = space.raw()
    assert all(not torch.equal(leaf, start[name]) for name, leaf in result.raw.items())


# First order only


class OnceOnly(torch.autograd.Function):
    """A tanh that refuses to be differentiated twice."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh().square())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    """A transformer layer with scaled_dot_product_attention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x))[:, -1])


class Once(nn.Module):
    def __init__(self, activation) -> None:
        super().__init__()
        self.first, self.head, self.activation = nn.Linear(3, 6), nn.Linear(6, 1), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.first(x[:, -1])))


def regression(model: nn.Module, autocast: bool = False) -> tuple[br.Problem, tuple[Tensor, Tensor]]:
    space = br.Space(decay=br.Hyper(1e-2, log=True, shape=br.per_tensor(model)), width=br.Hyper(1.0, low=0.0))
    place = torch.get_default_device().type

    def train_loss(model: nn.Module, batch: tuple[Tensor, Tensor], hyper: br.space.Values) -> Tensor:
        with torch.autocast(place, torch.bfloat16, enabled=autocast):
            prediction = model(batch[0])
        error = (prediction.to(batch[1]) - batch[1])[:, 0] / hyper["width"]
        return torch.log1p(error.square()) + br.functional.l2(model, hyper["decay"])

    problem = br.Problem(
        model, space, train_loss, lambda model, batch, hyper: (model(batch[0]) - batch[1]).square().mean()
    )
    return problem, (normal(1, 32, 5, 3), normal(2, 32, 1))


@pytest.mark.parametrize("make", [Recurrent, Attentive, partial(Once, OnceOnly.apply)], ids=["lstm", "sdpa", "once"])
def test_the_hypergradient_is_the_exact_one_on_nets_without_second_derivatives(make):
    """The reference is differentiated twice: the same net with plain parts."""
    torch.manual_seed(0)
    problem, batch = regression(make())
    plain, _ = regression(Once(torch.tanh)) if make not in (Recurrent, Attentive) else (problem, None)
    method = br.Adjoint(difference=tolerance(1e-6, 1e-3))
    state = method.init(problem)
    state.adjoint = like(state.params, 7)
    with torch.backends.cudnn.flags(allow_tf32=False):  # a GPU's rounding of products, divided by 2δ
        _, hypergradient = method.hypergradient(problem, state, batch, batch)
        pair = antithetic_pair(
            problem, state.params, state.raw, batch, state.adjoint, method._difference(state), buffers={}
        )
    with torch.backends.cudnn.flags(enabled=False), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        exact = mixed_product(plain, state.params, state.raw, batch, state.adjoint, buffers={})
        curvature = curvature_product(plain, state.params, state.raw, batch, state.adjoint, buffers={})
    relative = tolerance(1e-6, 2e-2)
    close(vectors.flatten(hypergradient), -vectors.flatten(exact), relative)
    close(vectors.flatten(pair.curvature), vectors.flatten(curvature), relative)


def test_under_bf16_autocast_the_hypergradient_keeps_its_direction():
    """At the default step: the weights' own rounding in bfloat16 is part of the noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(15, 64), nn.Tanh(), nn.Linear(64, 1))
    problem, batch = regression(model, autocast=True)
    exact_problem, _ = regression(model)
    method = br.Adjoint()
    state = method.init(problem)
    state.adjoint = like(state.params, 7)
    _, hypergradient = method.hypergradient(problem, state, batch, batch)
    exact = mixed_product(exact_problem, state.params, state.raw, batch, state.adjoint, buffers={})
    ours, truth = vectors.flatten(hypergradient), -vectors.flatten(exact)
    assert float(F.cosine_similarity(ours, truth, dim=0)) > 0.99


# Steps


def test_costs_are_counted():
    """Two gradients a pair, one a plain update, one a validation batch; and that many batches."""
    known = Ridge()
    method = br.Adjoint(pair_every=3, valid_every=2, schedule=br.Alternate(12))
    state = method.init(known.problem)
    method.step(known.problem, state, *streams(known.problem, known.train, known.valid))
    # Pairs at updates 0, 3, 6, 9; validation batches before the first and the third of them.
    assert (state.cost.train_batches, state.cost.valid_batches, state.cost.gradients) == (12, 2, 8 + 4 * 2 + 2)


def test_raw_moves_along_the_mean_of_the_pairs_as_far_as_they_agree():
    """Two batches of unequal products: their mean, times the mean over the root mean square."""
    problem = br.Problem(
        nn.Linear(1, 1, bias=False),
        br.Space(a=br.Hyper(2.0)),
        lambda model, batch, hyper: (model(batch) - hyper["a"] * batch).square().mean(),
        lambda model, batch, hyper: (model(batch) - 1).square().mean(),
    )
    method = br.Adjoint(
        schedule=br.Alternate(2), optimizer=partial(SGD, lr=0.0), hyper_optimizer=partial(SGD, lr=1.0), tracking=1e-12
    )
    state = method.init(problem)
    state.adjoint["weight"].fill_(0.5)
    first, second = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    method.step(problem, state, br.Stream([first, second]), br.Stream([first]))
    # ∂²L_T/∂a∂w = −2x², so the two hypergradients are 2x²p: 1 and 9.
    expected = 2.0 - 5.0 * 5.0 / math.sqrt((1 + 81) / 2)
    assert float(state.raw["a"]) == pytest.approx(expected, rel=tolerance(1e-6, 5e-3))


def test_noise_alone_hardly_moves_raw():
    """Of pure noise the mean over n pairs has 1/√n of the size, and the step shrinks by that; a signal's does not."""
    moved = {}
    for signal in (True, False):
        problem = shifted()
        method = br.Adjoint(
            schedule=br.Alternate(25),
            optimizer=partial(SGD, lr=0.0),
            hyper_optimizer=partial(SGD, lr=1.0),
            hyper_lr_schedule=None,
        )
        state = method.init(problem)
        noise = normal(3, 40, 25)
        steps = []
        for row in noise:
            estimates = 1 + 0.01 * row if signal else row
            state.pairs, before = 25, state.raw["a"].clone()
            state.gathered["a"].copy_(estimates.sum())
            state.gathered_squares["a"].copy_(estimates.square().sum())
            method._move(state)
            steps.append(float((state.raw["a"] - before) / estimates.mean()))
        moved[signal] = abs(sum(steps[10:]) / 30)
    assert moved[True] == pytest.approx(1.0, abs=0.01)
    assert moved[False] == pytest.approx(1 / 5, abs=0.07)


def test_the_averaged_weights_are_deployed():
    known = Ridge()
    method = br.Adjoint(average=4, optimizer=partial(SGD, lr=0.05), schedule=still)
    state, data = method.init(known.problem), streams(known.problem, known.train, known.valid)
    mean = torch.zeros(1, 5)
    for t in range(1, 8):
        method.step(known.problem, state, *data)
        mean += (state.params["weight"] - mean) / min(t, 4)
    close(method.params(known.problem, state)["weight"], mean, tolerance(1e-12, 1e-5))
    alone = br.Adjoint(average=1)
    state = alone.init(known.problem)
    assert torch.equal(alone.params(known.problem, state)["weight"], state.params["weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 0.0}, "horizon must be a number above 0; got 0.0"),
        ({"pair_every": 0}, "pair_every must be a whole number above 0; got 0"),
        ({"valid_every": 1.5}, "valid_every must be a whole number above 0; got 1.5"),
        ({"average": 0}, "average must be a whole number above 0"),
        ({"difference": -1.0}, "difference must be a number above 0"),
        ({"perturb": br.Gaussian(1.0, mean=0.0)}, "takes no fixed mean"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        br.Adjoint(**arguments)
