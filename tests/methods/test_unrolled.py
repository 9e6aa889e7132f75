"""Unrolling: every mode against closed forms, finite differences of whole trainings, and the other modes."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD as TorchSGD
from torch.optim import Adam as TorchAdam

import bestresponse as br
from bestresponse import vectors
from bestresponse.testing import Ridge, TinyNet, net_problem
from bestresponse.unrolling.reversible import RATIO, _Remainder
from bestresponse.updates import SGD, Adam

wide = settings(deadline=None, max_examples=20, derandomize=True)
modes = pytest.mark.parametrize(
    "mode", [br.Reverse(), br.Checkpointed(), br.Forward(), br.Forward(vectorize=False)], ids=repr
)


def double() -> bool:
    return torch.get_default_dtype() == torch.float64


@pytest.fixture
def in_double():
    """For finite differences, which single precision is too coarse for. The suite's own fixture puts it back."""
    torch.set_default_dtype(torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def close(actual: Tensor, expected: Tensor, relative: float = 1e-9, single: float = 1e-3) -> None:
    """Relative to the largest number."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= (relative if double() else single) * float(expected.abs().max())


def near(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-9, single: float = 1e-3) -> None:
    """Leaf by leaf."""
    assert list(actual) == list(expected)
    for leaf, part in expected.items():
        close(actual[leaf], part, relative, single)


def hypergradient(method: br.Unrolled, problem: br.Problem, train, valid, raw=None, seed: int = 0):
    """The outcome of a first step's training, at other hypers than the starts."""
    state = method.init(problem, seed=seed)
    for leaf, part in (raw or {}).items():
        state.raw[leaf].copy_(part)
    return method.hypergradient(problem, state, br.Stream(train, name="train"), br.Stream(valid, name="valid"))


# Gradient descent on ridge, where everything is matrices


class Descent:
    """w⁺ = w − η(Hw − 2c) from zero on ridge, so that w_t = (1 − Mᵗ)w* with M = 1 − ηH."""

    def __init__(self, weights: int = 4, examples: int = 12, seed: int = 0, rate: float = 0.05) -> None:
        self.known, self.rate = Ridge(weights, examples, seed=seed), rate
        self.raw = {"decay.weight": 0.5 * normal(seed + 1, 1, weights)}
        self.h, self.best = self.known.hessian(self.raw), self.known.best_response(self.raw)
        self.m = torch.eye(weights) - rate * self.h

    def weights(self, t: int) -> Tensor:
        return self.best - torch.linalg.matrix_power(self.m, t) @ self.best

    def hypergradient(self, steps: int, last: int | None = None, at=None) -> Tensor:
        """dw_T/dλᵢ = −η Σ_t M^(T−1−t) 2dᵢ wᵢ eᵢ, over all updates or the last ones, with weights ``at(t)``."""
        decay = self.raw["decay.weight"][0].exp()
        through = torch.zeros_like(self.m)
        for t in range(steps - (last or steps), steps):
            w = (at or self.weights)(t)
            through -= self.rate * torch.linalg.matrix_power(self.m, steps - 1 - t) @ torch.diag(2 * decay * w)
        return through.T @ self.known.valid_slope(self.weights(steps))

    def of(self, mode, steps: int, **parts) -> Tensor:
        method = br.Unrolled(mode, SGD(self.rate), steps, **parts)
        known = self.known
        return hypergradient(method, known.problem, known.train, known.valid, self.raw).raw["decay.weight"][0]


@modes
@given(weights=st.integers(1, 5), steps=st.integers(1, 9), seed=st.integers(0, 10_000))
@settings(wide, max_examples=10)
def test_on_ridge_it_is_the_closed_form(mode, weights, steps, seed):
    descent = Descent(weights, 12, seed)
    close(descent.of(mode, steps), descent.hypergradient(steps), 1e-10)


@pytest.mark.parametrize("last", [1, 2, 5])
def test_truncated_is_the_last_terms_of_the_closed_form(last):
    descent = Descent()
    close(descent.of(br.Reverse(last=last), 5), descent.hypergradient(5, last), 1e-10)
    assert last == 5 or float((descent.hypergradient(5, last) - descent.hypergradient(5)).abs().max()) > 1e-3


def test_truncated_to_more_updates_than_there_are_is_full():
    descent = Descent()
    assert torch.equal(descent.of(br.Reverse(last=7), 5), descent.of(br.Reverse(), 5))


def test_after_many_updates_it_is_that_of_the_best_response():
    descent = Descent(rate=0.1)
    known = descent.known
    close(descent.of(br.Reverse(), 400), known.hypergradient(descent.raw), 1e-9)
    assert float((descent.hypergradient(3) - known.hypergradient(descent.raw)).norm()) > 0.1


def test_drmad_goes_along_the_line_and_gives_every_hyper_its_own_number():
    descent = Descent()

    def line(t: int) -> Tensor:
        return t / 6 * descent.weights(6)

    got = descent.of(br.DrMAD(), 6)
    close(got, descent.hypergradient(6, at=line), 1e-10)
    assert len({round(float(number), 6) for number in got}) == len(got)
    assert float((got - descent.hypergradient(6)).abs().max()) > 1e-3


def test_drmad_takes_velocities_from_the_line_too():
    """With momentum, a rate for each update and decays, against a recursion on matrices."""
    steps, start, a, b = 4, normal(1, 3), normal(2, 6, 3), normal(3, 6)
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(start[None])
    space = br.Space(
        decay=br.Hyper(0.3, log=True, shape=(3,)),
        rate=br.Hyper(0.1, log=True, shape=(steps,)),
        momentum=br.Hyper(0.6, low=0.0, high=1.0),
    )
    problem = br.Problem(
        model,
        space,
        lambda model, batch, hyper: (
            (a @ model.weight[0] - b).square().mean() + (hyper["decay"] * model.weight[0].square()).sum()
        ),
        lambda model, batch, hyper: (model.weight[0] - 1).square().sum(),
    )
    got = hypergradient(br.Unrolled(br.DrMAD(), SGD("rate", "momentum"), steps), problem, [0], [0]).raw
    decay, rate, momentum = torch.full((3,), 0.3), torch.full((steps,), 0.1), 0.6

    def slope(w: Tensor) -> Tensor:
        return 2 * a.T @ (a @ w - b) / 6 + 2 * decay * w

    w, v = start, torch.zeros(3)
    for t in range(steps):
        v = momentum * v + slope(w)
        w = w - rate[t] * v
    last, fast = w, v
    of_w, of_v, h = 2 * (last - 1), torch.zeros(3), 2 * a.T @ a / 6 + 2 * torch.diag(decay)
    of_decay, of_rate, of_momentum = torch.zeros(3), torch.zeros(steps), torch.tensor(0.0)
    for t in reversed(range(steps)):
        w, v = (1 - t / steps) * start + t / steps * last, t / steps * fast
        of_rate[t] = -of_w @ (momentum * v + slope(w))
        through = of_v - rate[t] * of_w
        of_momentum, of_decay = of_momentum + through @ v, of_decay + 2 * w * through
        of_w, of_v = of_w + h @ through, momentum * through
    expected = {"decay": of_decay * decay, "rate": of_rate * rate, "momentum": of_momentum * momentum * (1 - momentum)}
    near(got, expected, 1e-11)


@pytest.mark.parametrize("update", [SGD(0.1), SGD("rate")], ids=repr)
def test_drmad_is_exact_where_the_weights_go_straight(update):
    """A training loss that is linear in the weights."""
    slope = normal(1, 3)
    problem = br.Problem(
        nn.Linear(3, 1, bias=False),
        br.Space(tilt=br.Hyper(0.5, shape=(3,)), rate=br.Hyper(0.1, log=True)),
        lambda model, batch, hyper: (model.weight[0] @ (slope + hyper["tilt"].sin())) + 0 * hyper["rate"],
        lambda model, batch, hyper: (model.weight[0] - 1).square().sum(),
    )
    outcomes = [
        hypergradient(br.Unrolled(mode, update, 7), problem, [0], [0]).raw for mode in (br.DrMAD(), br.Reverse())
    ]
    near(*outcomes, 1e-12)
    assert outcomes[0]["tilt"].all()


# Nets with everything, and hypers of every kind, against finite differences of whole trainings

T = 5
UPDATES = {
    "plain": (SGD(0.3), {}),
    "momentum": (SGD(0.3, momentum=0.875), {}),
    "rates": (
        SGD("lr", momentum="momentum", weight_decay="own"),
        {
            "lr": br.Hyper(0.2, log=True, shape=(T,)),
            "momentum": br.Hyper(0.8, low=0.0, high=1.0),
            "own": br.Hyper(0.05, low=0.0),
        },
    ),
    "by layer": (
        SGD("lr", momentum="momentum"),
        {
            "lr": br.Hyper(0.2, log=True, shape=br.per_layer(TinyNet())),
            "momentum": br.Hyper(0.7, low=0.0, high=1.0, shape=(T,)),
        },
    ),
    "scheduled by layer": (
        SGD("lr", momentum=0.5, nesterov=True),
        {"lr": br.Hyper(0.2, log=True, shape=dict.fromkeys(br.per_layer(TinyNet()), (T,)))},
    ),
    "by weight": (SGD("lr"), {"lr": br.Hyper(0.2, low=1e-4, high=1.0, log=True, shape=br.per_weight(TinyNet()))}),
    "adam": (
        Adam("lr", betas=("beta1", "beta2"), eps="eps", weight_decay="own"),
        {
            "lr": br.Hyper(0.05, log=True, shape=br.per_tensor(TinyNet())),
            "beta1": br.Hyper(0.8, low=0.0, high=0.999),
            "beta2": br.Hyper(0.9, low=0.0, high=0.999, shape=(T,)),
            "eps": br.Hyper(1e-2, log=True),
            "own": br.Hyper(0.05, low=0.0),
        },
    ),
    "adamw": (Adam("lr", eps=1e-2, weight_decay="own", decoupled=True), {
        "lr": br.Hyper(0.05, log=True), "own": br.Hyper(0.05, low=0.0)}),
}  # fmt: skip
REVERSIBLE = ["momentum", "rates", "by layer"]


def with_hypers(kind: str):
    """The net with BatchNorm, dropout, tied and frozen weights, with the hypers of an update rule."""
    update, hypers = UPDATES[kind]
    problem, train, valid = net_problem()
    space = br.Space(**dict(problem.space.items()), **hypers)
    return br.Problem(problem.model, space, problem.train_loss, problem.valid_loss), update, train, valid


@pytest.mark.parametrize("kind", UPDATES)
def test_reverse_is_finite_differences_of_the_whole_training(in_double, kind):
    """Along one direction in each leaf of raw. Statistics of BatchNorm count as constants."""
    problem, update, train, valid = with_hypers(kind)
    method = br.Unrolled(br.Reverse(), update, T)
    raw = problem.space.raw()
    nominal = hypergradient(method, problem, train, valid, raw)
    valid_batch = next(br.Stream(valid, name="valid"))

    def objective(leaf: str, direction: Tensor, delta: float) -> float:
        there = {**raw, leaf: raw[leaf] + delta * direction}
        end = hypergradient(replace(method, mode=br.Reverse(last=1)), problem, train, valid, there).end
        loss = br.evaluate(
            problem, "valid", end.params, problem.space.values(there), valid_batch, vectors.clone(nominal.end.buffers)
        )
        return float(loss + problem.space.penalty(there))

    delta = 1e-5
    for i, (leaf, part) in enumerate(raw.items()):
        direction = normal(i, *part.shape) if part.ndim else torch.tensor(1.0)
        slope = (objective(leaf, direction, delta) - objective(leaf, direction, -delta)) / (2 * delta)
        assert float((nominal.raw[leaf] * direction).sum()) == pytest.approx(slope, rel=2e-6, abs=1e-9), leaf
        assert nominal.raw[leaf].any(), leaf


@pytest.mark.parametrize("kind", UPDATES)
def test_all_exact_modes_agree(kind):
    problem, update, train, valid = with_hypers(kind)
    full = hypergradient(br.Unrolled(br.Reverse(), update, T), problem, train, valid)
    others = [br.Reverse(last=T), br.Checkpointed(), br.Checkpointed(every=1), br.Checkpointed(every=T), br.Forward()]
    for mode in others:
        other = hypergradient(br.Unrolled(mode, update, T), problem, train, valid)
        near(other.raw, full.raw, 1e-11)
        for ours, theirs in zip(other.end, full.end, strict=True):
            assert str(ours) == str(theirs)
        assert torch.equal(other.objective, full.objective)
        assert torch.equal(other.train_loss, full.train_loss)


class Scaled(nn.Module):
    """With a weight that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


@pytest.mark.parametrize("mode", [br.Forward(), br.Forward(vectorize=False), br.Checkpointed()], ids=repr)
def test_a_weight_may_be_a_single_number(mode):
    def loss(model, batch, hyper):
        return (model(batch[0]) - batch[1]).square().mean() + br.functional.l2(model, hyper["decay"])

    model = Scaled()
    problem = br.Problem(model, br.Space(decay=br.Hyper(0.1, log=True, shape=br.per_tensor(model))), loss, loss)
    data = [(normal(1, 8, 3), normal(2, 8, 1))]
    full, other = (
        hypergradient(br.Unrolled(m, SGD(0.1, 0.5), 3), problem, data, data).raw for m in (br.Reverse(), mode)
    )
    assert full["decay.scale"].any()
    near(other, full, 1e-11)


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_reversible_agrees_to_what_rounding_to_fixed_point_allows(in_double, kind):
    """Weights are rounded to 2⁻⁴⁰ ≈ 1e-12 and momenta to 2⁻³⁰ ≈ 1e-9, in each of a few updates."""
    problem, update, train, valid = with_hypers(kind)
    full = hypergradient(br.Unrolled(br.Reverse(), update, T), problem, train, valid)
    other = hypergradient(br.Unrolled(br.Reversible(), update, T), problem, train, valid)
    near(other.raw, full.raw, 1e-10 if kind == "momentum" else 1e-7)
    near(other.end.params, full.end.params, 1e-10 if kind == "momentum" else 1e-7)


@modes
def test_central_products_agree_with_exact_ones(in_double, mode):
    problem, update, train, valid = with_hypers("rates")
    if isinstance(mode, br.Forward):
        problem = replace(problem, space=br.Space(**{n: problem.space[n] for n in ("smooth", "lr", "momentum", "own")}),
                          train_loss=without_decay(problem))  # fmt: skip
    method = br.Unrolled(mode, update, T)
    exact = hypergradient(method, problem, train, valid).raw
    near(hypergradient(replace(method, products="central"), problem, train, valid).raw, exact, 1e-6)


def without_decay(problem: br.Problem):
    zero = torch.tensor(0.0)
    return lambda model, batch, hyper: problem.train_loss(model, batch, {**hyper, "decay": zero, "layer": zero})


@modes
def test_the_net_is_trained_as_torch_trains_it(mode):
    """Without dropout: weights, loss and statistics of BatchNorm after some updates of an ordinary loop."""
    problem, train, valid = net_problem()
    problem.model.dropout.p = 0.0
    outcome = hypergradient(br.Unrolled(mode, Adam(0.05), T), problem, train, valid)
    values = problem.space.values(problem.space.raw())
    optimizer = TorchAdam([p for p in problem.model.parameters() if p.requires_grad], 0.05)
    stream = br.Stream(train, name="train")
    for _ in range(T):
        optimizer.zero_grad()
        loss = problem.train_loss(problem.model, next(stream), values).mean()
        loss.backward()
        optimizer.step()
    near(outcome.end.params, problem.params(), 1e-9)
    near({n: b.to(torch.get_default_dtype()) for n, b in outcome.end.buffers.items()},
         {n: b.to(torch.get_default_dtype()) for n, b in problem.buffers().items()}, 1e-9)  # fmt: skip
    close(outcome.train_loss, loss.detach())


def test_truncated_reverse_is_full_reverse_from_where_it_begins():
    problem, update, train, valid = with_hypers("momentum")
    truncated = hypergradient(br.Unrolled(br.Reverse(last=2), update, 5), problem, train, valid).raw
    # The same training in two courses: three updates, and from there two.
    method = br.Unrolled(br.Reverse(), update, 3, restart=False, hyper_optimizer=partial(TorchSGD, lr=0.0))
    state = method.init(problem)
    streams = br.Stream(train, name="train"), br.Stream(valid, name="valid")
    first = br.Stream(valid, name="other")
    method.step(problem, state, streams[0], first)
    rest = replace(method, steps=2).hypergradient(problem, state, *streams)
    near(truncated, rest.raw, 1e-12)


# Forward mode that carries its tangents on


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_carried_tangents_see_all_of_training(kind):
    """With hypers that stand still, the third step of two updates gives the derivative through six."""
    still = partial(TorchSGD, lr=0.0)
    update = {"momentum": SGD(0.3, momentum=0.5), "adam": Adam(0.05, eps=1e-2)}[kind]
    problem, train, valid = net_problem()
    method = br.Unrolled(br.Forward(carry=True), update, 2, restart=False, hyper_optimizer=still)
    state = method.init(problem)
    streams = br.Stream(train, name="train"), br.Stream(valid, name="valid")
    for _ in range(2):
        method.step(problem, state, streams[0], br.Stream(valid, name="valid"))
    got = method.hypergradient(problem, state, *streams)
    whole = hypergradient(br.Unrolled(br.Reverse(), update, 6), problem, train, valid)
    near(got.end.params, whole.end.params, 1e-12)
    near(got.raw, whole.raw, 1e-11)
    short = replace(method, mode=br.Forward()).hypergradient(problem, state, *streams)
    assert float((short.raw["smooth"] - whole.raw["smooth"]).abs()) > 1e-3 * float(whole.raw["smooth"].abs())


# Reversible training


ratios = st.one_of(
    st.sampled_from([1, 2, 2**RATIO - 1, 2**RATIO, 2 ** (RATIO - 1), 966367642]), st.integers(1, 2**RATIO)
)


@given(
    start=st.lists(st.integers(-(2**61), 2**61), min_size=1, max_size=4),
    factors=st.lists(ratios, min_size=1, max_size=60),
    seed=st.integers(0, 1000),
)
@wide
def test_multiplying_rounds_down_and_is_undone_bit_for_bit(start, factors, seed):
    """Against Python's whole numbers; with additions in between, as training makes them."""
    numbers = torch.tensor(start, dtype=torch.int64)
    added = (1e12 * normal(seed, len(factors), len(start))).long()
    remainder = _Remainder(torch.zeros_like(numbers))
    now, way = numbers, []
    for t, n in enumerate(factors):
        way.append(now)
        scaled = remainder.multiply(now, torch.tensor(n), t)
        assert scaled.tolist() == [math.floor(Fraction(n * number, 2**RATIO)) for number in now.tolist()]
        now = scaled + added[t]
    for t, n in reversed(list(enumerate(factors))):
        now = remainder.divide(now - added[t], torch.tensor(n), t)
        assert torch.equal(now, way[t])
    assert not remainder.now.any()
    assert not remainder.full


def test_what_multiplying_cuts_off_takes_little_memory():
    """μ = 0.9: far below the one bit a number and update that may be lost, and below the 32 of a float32 copy."""
    numbers = torch.randint(-(2**40), 2**40, (10_000,))
    remainder = _Remainder(torch.zeros_like(numbers))
    n = torch.tensor(round(0.9 * 2**RATIO))
    for t in range(1000):
        numbers = remainder.multiply(numbers, n, t) + torch.randint(-(2**38), 2**38, (10_000,))
    assert 64 * len(remainder.full) / 1000 < 0.45


class Watched(nn.Module):
    """A net that notes the weights it is trained at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 1))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(self.layers[0].weight.detach().clone())
        return self.layers(x)


def watched(decay: float = 1e-3) -> tuple[br.Problem, br.Batches]:
    space = br.Space(decay=br.Hyper(decay, log=True))
    model = Watched()

    def train_loss(model, batch, hyper):
        return (model(batch[0]) - batch[1]).square().mean() + br.functional.l2(model, hyper["decay"])

    def valid_loss(model, batch, hyper):
        return (model(batch[0]) - batch[1]).square().mean()

    return br.Problem(model, space, train_loss, valid_loss), br.Batches(normal(1, 20, 3), normal(2, 20, 1), size=5)


@pytest.mark.parametrize("mode", [br.Reversible(), br.Reverse(), br.Checkpointed(every=3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_on_the_way_back_are_those_of_the_way_forth_bit_for_bit(dtype, mode):
    torch.set_default_dtype(dtype)
    problem, data = watched()
    hypergradient(br.Unrolled(mode, SGD(0.1, momentum=0.5), 150), problem, data, data)
    forth, back = problem.model.seen[:150], problem.model.seen[:149:-1]
    assert len({tuple(w.flatten().tolist()) for w in forth}) == 150
    met = {tuple(w.flatten().tolist()) for w in back}
    assert met == {tuple(w.flatten().tolist()) for w in forth}
    if not isinstance(mode, br.Checkpointed):
        each = len(back) // 150
        assert all(torch.equal(back[i * each], forth[i]) for i in range(150))


@pytest.mark.parametrize("mode", [br.Reverse(), br.Checkpointed(), br.Reversible(), br.Forward()], ids=repr)
def test_every_update_has_random_numbers_of_its_own_and_the_same_on_the_way_back(mode):
    drawn: list[float] = []

    def train_loss(model, batch, hyper):
        drawn.append(float(torch.rand(())))
        return hyper["decay"] * model(batch).square().mean()

    problem = br.Problem(nn.Linear(2, 1), br.Space(decay=br.Hyper(0.1, log=True)), train_loss, train_loss)
    method = br.Unrolled(mode, SGD(0.1, momentum=0.5), 4)
    outside = torch.get_rng_state()
    hypergradient(method, problem, [torch.ones(3, 2)], [torch.ones(3, 2)])
    forth = drawn[:4]
    assert len(set(forth)) == 4
    assert {number for number in drawn if number not in forth} == {drawn[4]}, "the validation loss's own"
    assert isinstance(mode, br.Forward) or drawn[-1] == forth[0]
    again, drawn[:] = list(drawn), []
    torch.set_rng_state(outside)
    hypergradient(method, problem, [torch.ones(3, 2)], [torch.ones(3, 2)])
    assert drawn == again
    drawn.clear()
    hypergradient(method, problem, [torch.ones(3, 2)], [torch.ones(3, 2)], seed=1)
    assert not set(drawn[:4]) & set(forth)


def test_a_gradient_that_comes_out_differently_the_second_time_is_noticed():
    problem, data = watched()
    numbers = random.Random(0)
    moody = replace(problem, train_loss=lambda *a: problem.train_loss(*a) * (1 + 1e-6 * numbers.random()))
    method = br.Unrolled(br.Reversible(), SGD(0.1, momentum=0.5), 4)
    with pytest.raises(RuntimeError, match=r"did not come back to its first weights.*use_deterministic_algorithms"):
        hypergradient(method, moody, data, data)


@pytest.mark.parametrize("rate", [1e5, 1e30])
def test_a_reversible_training_that_leaves_its_range_counts_as_diverged(rate):
    problem, data = watched(decay=1.0)
    method = br.Unrolled(br.Reversible(), SGD(rate, momentum=0.5), 40)
    outcome = hypergradient(method, problem, data, data)
    assert outcome.objective.isnan()
    with pytest.warns(RuntimeWarning, match="loss became nan at step 1"):
        result = br.tune(problem, method, data, data, steps=3)
    assert result.status is br.Status.NON_FINITE


# Memory


@pytest.fixture
def only_new():
    """The collector sees only what has been made since: fast enough to be asked at every update."""
    Descent().of(br.Reverse(), 1)  # what torch imports late
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live(shape: tuple[int, ...] | None = None) -> int:
    """How many tensors there are, of this shape."""
    gc.collect()
    return sum(type(x) is Tensor and shape in (None, x.shape) for x in gc.get_objects())


@pytest.mark.parametrize(
    ("mode", "grows"),
    [
        (br.Reverse(), lambda steps: steps),
        (br.Reverse(last=3), lambda steps: 3),
        (br.Checkpointed(), lambda steps: 2 * math.sqrt(steps)),
        (br.Forward(), lambda steps: 0),
        (br.DrMAD(), lambda steps: 0),
        (br.Reversible(), lambda steps: 0),
    ],
    ids=lambda part: "" if callable(part) else repr(part),
)
def test_no_more_is_kept_than_is_promised(mode, grows, only_new):
    """The largest number of live tensors with the weights' shape, weights and velocity, at any moment of training."""
    shape, counts = (1, 7), []

    def train_loss(model, batch, hyper):
        counts.append(live(shape))
        return (model(batch).square() + hyper["decay"] * model.weight.square().sum()).mean()

    problem = br.Problem(
        nn.Linear(7, 1, bias=False),
        br.Space(decay=br.Hyper(0.1, log=True)),
        train_loss,
        lambda model, batch, hyper: model(batch).square().mean(),
    )
    peaks = {}
    for steps in (9, 36):
        counts.clear()
        hypergradient(br.Unrolled(mode, SGD(0.1, momentum=0.5), steps), problem, [normal(1, 5, 7)], [normal(2, 5, 7)])
        peaks[steps] = max(counts)
    assert peaks[36] - peaks[9] <= 2 * (grows(36) - grows(9)) + 1
    assert peaks[9] >= 2 * grows(9)


def test_nothing_is_left_from_step_to_step(only_new):
    problem, update, train, valid = with_hypers("rates")
    for mode in (br.Reverse(), br.Forward(), br.Reversible(), br.Checkpointed(), br.DrMAD()):
        method = br.Unrolled(mode, update, T)
        state = method.init(problem)
        streams = br.Stream(train), br.Stream(valid)  # a pass takes one step, and two steps
        counts = []
        for _ in range(6):
            method.step(problem, state, *streams)
            counts.append(live())
            assert not [x for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None]
        assert counts[1] == counts[3] == counts[5], mode


# Steps


def test_a_step_trains_from_the_models_weights_and_moves_raw_along_the_hypergradient():
    descent = Descent()
    known = descent.known
    method = br.Unrolled(br.Reverse(), SGD(descent.rate), 6, hyper_optimizer=partial(TorchSGD, lr=0.5))
    state = method.init(known.problem)
    streams = br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")
    for _ in range(2):
        state.raw["decay.weight"].copy_(descent.raw["decay.weight"])
        metrics = method.step(known.problem, state, *streams)
        close(state.params["weight"][0], descent.weights(6))
        close(state.raw["decay.weight"][0], descent.raw["decay.weight"][0] - 0.5 * descent.hypergradient(6))
    assert metrics.moved
    residual = known.xv @ descent.weights(6) - known.yv
    assert float(metrics.valid_loss) == pytest.approx(float(residual.square().mean()), rel=1e-5)
    w = descent.weights(5)
    penalty = (descent.raw["decay.weight"][0].exp() * w * w).sum()
    assert float(metrics.train_loss) == pytest.approx(
        float((known.x @ w - known.y).square().mean() + penalty), rel=1e-5
    )
    method.params(known.problem, state)["weight"].add_(1)
    close(state.params["weight"][0], descent.weights(6))


def test_without_restart_training_goes_on_with_what_the_rule_remembers():
    """Two steps of three updates with hypers that stand still, against one of six; also the buffers."""
    problem, train, valid = net_problem()
    still = partial(TorchSGD, lr=0.0)
    ends = []
    for steps, count in ((3, 2), (6, 1)):
        method = br.Unrolled(br.Reverse(last=1), Adam(0.05), steps, restart=False, hyper_optimizer=still)
        state = method.init(problem)
        streams = br.Stream(train, name="train"), br.Stream(valid, name="valid")
        for _ in range(count):
            method.step(problem, state, *streams)
        assert state.count == 6
        ends.append(state)
    assert torch.equal(vectors.flatten(ends[0].params), vectors.flatten(ends[1].params))
    for slot, parts in ends[0].slots.items():
        assert torch.equal(vectors.flatten(parts), vectors.flatten(ends[1].slots[slot]))
    for name, buffer in ends[0].buffers.items():
        assert torch.equal(buffer, ends[1].buffers[name])
    assert not torch.equal(ends[0].buffers["norm.running_mean"], problem.buffers()["norm.running_mean"])


@pytest.mark.parametrize(
    ("mode", "gradients"),
    [
        (br.Reverse(), 9 + 9 * 2 + 1),
        (br.Reverse(last=2), 9 + 2 * 2 + 1),
        (br.Checkpointed(), 9 + 6 + 9 * 2 + 1),  # in each of three stretches, two places between
        (br.Forward(), 9 * (1 + 2 * 4) + 1),
        (br.Reversible(), 9 + 9 + 9 * 2 + 1),
        (br.DrMAD(), 9 + 9 * 2 + 1),
    ],
    ids=lambda part: "" if callable(part) else repr(part),
)
def test_costs_are_counted(mode, gradients):
    known = Ridge(4)
    method = br.Unrolled(mode, SGD(0.05, momentum=0.5), 9)
    state = method.init(known.problem)
    streams = br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")
    for i in (1, 2):
        method.step(known.problem, state, *streams)
        assert (state.cost.train_batches, state.cost.valid_batches, state.cost.gradients) == (9 * i, i, gradients * i)


def test_batches_of_any_loader_are_the_same_on_the_way_back():
    """A list, Batches and a DataLoader of the same batches; shuffled ones are drawn once."""
    problem, train, valid = net_problem()
    listed = list(train)
    loader = torch.utils.data.DataLoader(listed, batch_size=None)
    method = br.Unrolled(br.Checkpointed(), SGD(0.3), 7)
    got = [hypergradient(method, problem, data, valid).raw for data in (listed, loader)]
    near(got[1], got[0], 1e-12)


def test_a_schedule_of_rates_ends_lower_than_the_best_constant_rate():
    """Eight rates of gradient descent on ridge, against the best constant one of a fine grid."""
    known, steps = Ridge(4, 12, seed=3, start=1e-3), 8
    raw = known.problem.space.raw()
    h, best = known.hessian(raw), known.best_response(raw)

    def excess(rates: Tensor) -> float:
        """How far above its lowest the loss ends. The weights begin at zero."""
        w = torch.zeros(4)
        for rate in rates:
            w = w - rate * h @ (w - best)
        return float((w - best) @ h @ (w - best))

    constant = min(excess(rate.expand(steps)) for rate in torch.linspace(0.01, 1.0, 200))
    # All rates equal is a saddle: their order does not matter, so each has the same derivative. They begin apart.
    rates = br.Hyper(torch.linspace(0.1, 0.3, steps), low=0.0, shape=(steps,))
    problem = br.Problem(
        known.model,
        br.Space(lr=rates),
        lambda model, batch, hyper: known.problem.train_loss(model, batch, {"decay": torch.tensor(1e-3)}),
        lambda model, batch, hyper: known.problem.train_loss(model, batch, {"decay": torch.tensor(1e-3)}),
    )
    method = br.Unrolled(br.Reverse(), SGD("lr"), steps, hyper_optimizer=partial(TorchAdam, lr=0.1))
    result = br.tune(problem, method, known.train, known.train, steps=60)
    assert excess(result.values["lr"]) < 0.3 * constant


# What cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Unrolled("reverse"), "mode must be a Mode, such as .* got 'reverse'"),
        (lambda: br.Unrolled(br.Reverse), r"mode must be a Mode.* Call it: Reverse\(\.\.\.\)"),
        (lambda: br.Unrolled(SGD(0.1), br.Reverse(), 5), r"mode must be a Mode.* got SGD\(lr=0\.1"),
        (lambda: br.Unrolled(br.Reverse(), 0.1, 5), "update must be an Update, such as .* got 0.1"),
        (lambda: br.Unrolled(br.Reverse(), TorchSGD, 5), "update must be an Update, .* got <class 'torch.optim[^(]*$"),
        (lambda: br.Unrolled(br.Reverse(), SGD(0.1), 5.0), r"steps must be a whole number; got 5\.0"),
        (lambda: br.Reverse(last=2.0), r"last must be a whole number; got 2\.0"),
        (lambda: br.Checkpointed(every=True), "every must be a whole number; got True"),
    ],
)
def test_parts_of_another_kind_are_refused_where_they_are_given(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_what_cannot_be_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="steps must be at least 1 training update; got 0"):
        br.Unrolled(br.Reverse(), SGD(0.1), 0)
    with pytest.raises(ValueError, match="products must be"):
        br.Unrolled(br.Reverse(), SGD(0.1), 1, products="forward")
    with pytest.raises(ValueError, match="last must be at least 1"):
        br.Reverse(last=0)
    with pytest.raises(ValueError, match="every must be at least 1"):
        br.Checkpointed(every=0)
    with pytest.raises(ValueError, match=r"Forward\(carry=True\).*restart=False"):
        br.Unrolled(br.Forward(carry=True), SGD(0.1), 1)
    for update in (SGD(0.1), SGD(0.1, momentum=0.9, nesterov=True), Adam(0.1)):
        with pytest.raises(ValueError, match=r"Reversible\(\) runs SGD with momentum .* got .*Checkpointed\(\)"):
            br.Unrolled(br.Reversible(), update, 1)


def refuse(problem, train, valid, method, error, match, tmp_path) -> None:
    for call in (
        lambda: br.tune(problem, method, train, valid, steps=1, run_dir=tmp_path / "run"),
        lambda: method.init(problem),
    ):
        with pytest.raises(error, match=match):
            call()
    assert not (tmp_path / "run").exists()


def test_a_setting_that_no_hyper_can_be_is_refused_before_the_run(tmp_path):
    problem, train, valid = net_problem()
    for update, error, match in (
        (SGD("rate"), KeyError, "names a hyper that the space does not have: it has decay, layer, smooth"),
        (SGD(0.1, momentum="layer"), ValueError, "must stay between 0 and 1"),
    ):
        refuse(problem, train, valid, br.Unrolled(br.Reverse(), update, 3), error, match, tmp_path)
    space = br.Space(**dict(problem.space.items()), rate=br.Hyper(0.1, log=True, shape=(4,)))
    scheduled = br.Problem(problem.model, space, problem.train_loss, problem.valid_loss)
    method = br.Unrolled(br.Reverse(), SGD("rate"), 3)
    refuse(scheduled, train, valid, method, ValueError, r"one for each of 3 updates.*got shape \(4,\)", tmp_path)
    assert br.tune(scheduled, replace(method, steps=4), train, valid, steps=1).status is br.Status.FINISHED


def test_a_hyper_that_neither_loss_nor_rule_reads_is_refused(tmp_path):
    problem, train, valid = net_problem()
    space = br.Space(**dict(problem.space.items()), rate=br.Hyper(0.1, log=True))
    idle = br.Problem(problem.model, space, problem.train_loss, problem.valid_loss)
    with pytest.raises(ValueError, match="train_loss never reads hyper 'rate'"):
        br.tune(idle, br.Unrolled(br.Reverse(), SGD(0.1), 3), train, valid, steps=1)
    with pytest.raises(ValueError, match="train_loss never reads hyper 'rate'"):
        br.tune(idle, br.methods.luketina2016(), train, valid, steps=1)
    both = br.Space(**dict(space.items()), other=br.Hyper(0.1, log=True))
    beside = br.Problem(problem.model, both, problem.train_loss, problem.valid_loss)
    with pytest.raises(ValueError, match="train_loss never reads hyper 'other'"):
        br.tune(beside, br.Unrolled(br.Reverse(), SGD("rate"), 3), train, valid, steps=1)


def test_more_memory_than_there_is_is_refused_before_the_run(monkeypatch):
    known = Ridge(5)
    size = torch.finfo(torch.get_default_dtype()).bits // 8
    for mode, copies in (
        (br.Reverse(), 2 * 100),
        (br.Reverse(last=4), 2 * 4),
        (br.Checkpointed(), 2 * 20),
        (br.Forward(), 5 * 5),
    ):
        method = br.Unrolled(mode, SGD(0.1, momentum=0.9), 100)
        needed = copies * 5 * size
        monkeypatch.setattr("bestresponse.memory.total_memory", lambda device, needed=needed: needed)
        method.init(known.problem)
        monkeypatch.setattr("bestresponse.memory.total_memory", lambda device, needed=needed: needed - 1)
        with pytest.raises(MemoryError, match=rf"5 weights with 5 hypers holds {copies} numbers.*Checkpointed"):
            method.init(known.problem)


def test_the_remainders_of_a_long_reversible_training_are_counted_before_the_run(monkeypatch):
    """A 76th of a copy an update, beside three times 64 bits for each weight."""
    known = Ridge(5)
    size = torch.finfo(torch.get_default_dtype()).bits // 8
    monkeypatch.setattr("bestresponse.memory.total_memory", lambda device: 10 * 5 * size - 1)
    br.Unrolled(br.Reversible(), SGD(0.1, momentum=0.9), 76).init(known.problem)
    with pytest.raises(MemoryError, match="through 304 updates of 5 weights with 5 hypers holds 10 numbers"):
        br.Unrolled(br.Reversible(), SGD(0.1, momentum=0.9), 4 * 76).init(known.problem)
