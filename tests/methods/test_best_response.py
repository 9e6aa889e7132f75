"""The hypernetwork method: its hypergradient in closed form, and its training step against finite differences."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import bestresponse as br
from bestresponse import vectors
from bestresponse.testing import Quadratic, Ridge

still = partial(SGD, lr=0.0)


def same(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    exact = torch.get_default_dtype() == torch.float64
    torch.testing.assert_close(actual, expected, rtol=rtol if exact else 1e-4, atol=1e-12 if exact else 1e-5)


@pytest.fixture
def double():
    """For finite differences, which single precision is too coarse for. The suite's own fixture puts it back."""
    torch.set_default_dtype(torch.float64)


def streams(known: Quadratic | Ridge) -> tuple[br.Stream, br.Stream]:
    return br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")


def set_raw(state: br.State, raw: dict[str, Tensor]) -> None:
    for name, leaf in state.raw.items():
        leaf.copy_(raw[name])


def set_linear(state, slope: Tensor, bias: Tensor) -> None:
    """Make the response w = slope · (what it is fed) + bias."""
    layers = list(state.response.network)
    with torch.no_grad():
        if len(layers) == 2:  # low rank: the bottleneck is as wide as raw
            layers[0].weight.copy_(torch.eye(slope.shape[1]))
            layers[0].bias.zero_()
        layers[-1].weight.copy_(slope)
        layers[-1].bias.copy_(bias)


# The hypergradient, with the response set to the exact best response


@pytest.mark.parametrize("response", [br.Linear(), br.LowRank(2)], ids=repr)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_hypergradient_of_a_quadratic_is_its_closed_form(response, centered, seed):
    known = Quadratic(seed=seed)
    method = br.BestResponse(response, centered=centered)
    state = method.init(known.problem)
    raw = {"shift": torch.randn(2)}
    set_raw(state, raw)
    set_linear(state, known.jacobian, known.offset + (known.jacobian @ raw["shift"] if centered else 0))
    loss, hypergradient = method.hypergradient(known.problem, state, known.valid[0])
    same(hypergradient["shift"], known.hypergradient(raw))
    assert float(loss) == pytest.approx(known.valid_loss(raw), rel=1e-5)
    same(method.params(known.problem, state)["w"], known.best_response(raw))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_hypergradient_of_ridge_is_its_closed_form(seed):
    """The response is the tangent of w*: dw*/draw = −H⁻¹ diag(2 exp(raw) w*)."""
    known = Ridge(seed=seed)
    method = br.BestResponse(br.Linear())
    state = method.init(known.problem)
    raw = {"decay.weight": torch.randn(1, 5)}
    set_raw(state, raw)
    best, decay = known.best_response(raw), raw["decay.weight"][0].exp()
    slope = -torch.linalg.solve(known.hessian(raw), torch.diag(2 * decay * best))
    set_linear(state, slope, best - slope @ raw["decay.weight"][0])
    loss, hypergradient = method.hypergradient(known.problem, state, (known.xv, known.yv))
    same(hypergradient["decay.weight"][0], known.hypergradient(raw), rtol=1e-9)
    assert float(loss) == pytest.approx(known.valid_loss(raw), rel=1e-5)


@pytest.mark.parametrize("response", [br.Linear(), br.LowRank(3, init=0.5), br.MLP(7, init=0.5)], ids=repr)
def test_the_hypergradient_is_the_slope_of_the_validation_objective(double, response):
    """Through any response, with a direct dependence and a prior: finite differences."""
    model = torch.nn.Linear(2, 1)
    space = br.Space(a=br.Hyper(0.3, shape=(2,)), b=br.Hyper(0.5, low=0.0, high=2.0, prior=lambda raw: raw.pow(2)))

    def valid_loss(model, batch, hyper):
        return (model(batch) * hyper["b"] - hyper["a"].sum()).square().mean()

    problem = br.Problem(model, space, valid_loss, valid_loss)
    method = br.BestResponse(response)
    state = method.init(problem)
    set_raw(state, {"a": torch.tensor([0.7, -0.4]), "b": torch.tensor(1.1)})  # no longer at the start
    batch = torch.randn(4, 2)
    _, hypergradient = method.hypergradient(problem, state, batch)

    def objective(raw: dict[str, Tensor]) -> float:
        w = {name: part.detach() for name, part in method.respond(state, raw).items()}
        loss = br.evaluate(problem, "valid", w, space.values(raw), batch)
        return float(loss + raw["b"].pow(2))

    step = 1e-6
    for name, grad in hypergradient.items():
        for i in range(grad.numel()):
            both = []
            for sign in (1, -1):
                raw = vectors.clone(state.raw)
                raw[name].view(-1)[i] += sign * step
                both.append(objective(raw))
            assert float(grad.flatten()[i]) == pytest.approx((both[0] - both[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_one_tuning_step_moves_raw_along_the_hypergradient():
    known = Quadratic()
    method = br.BestResponse(schedule=br.ThenTune(1), optimizer=still, hyper_optimizer=partial(SGD, lr=0.1))
    state, (train, valid) = method.init(known.problem), streams(known)
    assert not method.step(known.problem, state, train, valid).moved
    assert not state.raw["shift"].any()
    set_linear(state, known.jacobian, known.offset)
    metrics = method.step(known.problem, state, train, valid)
    start = {"shift": torch.zeros(2)}
    same(state.raw["shift"], -0.1 * known.hypergradient(start))
    assert metrics.moved
    assert metrics.train_loss is None
    assert float(metrics.valid_loss) == pytest.approx(known.valid_loss(start), rel=1e-5)


# Training the response


def sampled_loss(known: Quadratic, state, raw: dict[str, Tensor], fed: dict[str, Tensor]) -> Tensor:
    """The mean over samples of L_T(w_φ(what it is fed), λ), written out."""
    losses = []
    for i in range(len(raw["shift"])):
        w = state.response({"shift": fed["shift"][i][None]})["w"][0]
        distance = w - known.jacobian @ raw["shift"][i] - known.offset
        losses.append(distance @ known.h @ distance / 2)
    return torch.stack(losses).mean()


def draws(method: br.BestResponse, state, known: Quadratic) -> dict[str, Tensor]:
    """What the next training update will draw."""
    if method.perturb is None:
        return {"shift": state.raw["shift"][None].clone()}
    generator = torch.Generator(known.problem.device)
    generator.set_state(state.generator.get_state())
    return method.perturb.sample(vectors.clone(state.raw), method.samples, generator)


@pytest.mark.parametrize("response", [br.Linear(), br.LowRank(2, init=0.5), br.MLP(5, init=0.5)], ids=repr)
@pytest.mark.parametrize(
    "parts",
    [
        {"perturb": None},
        {"perturb": br.Gaussian(0.3)},
        {"perturb": br.Gaussian(0.3), "samples": 3},
        {"perturb": br.Gaussian(0.3), "samples": 3, "vectorize": True},
        {"perturb": br.Gaussian(0.3, antithetic=True), "samples": 4, "centered": True},
        {"perturb": br.Box(-1.0, 1.0), "samples": 2, "centered": True, "vectorize": True},
        {"perturb": br.Gaussian(1.5, mean=0.0), "samples": 2},
    ],
    ids=str,
)
def test_one_training_step_is_the_chain_rule(double, response, parts):
    """φ moves along the gradient of the sampled loss in φ: finite differences."""
    known = Quadratic()
    method = br.BestResponse(response, optimizer=partial(SGD, lr=1.0), hyper_optimizer=still, **parts)
    state, (train, valid) = method.init(known.problem, seed=3), streams(known)
    set_raw(state, {"shift": torch.tensor([0.7, -0.4])})
    raw = draws(method, state, known)
    fed = {"shift": raw["shift"] - state.raw["shift"]} if method.centered else raw
    phi = dict(state.response.named_parameters())
    expected = {name: torch.zeros_like(p) for name, p in phi.items()}
    step = 1e-6
    with torch.no_grad():
        loss = sampled_loss(known, state, raw, fed)
        for name, p in phi.items():
            numbers, slopes = p.view(-1), expected[name].view(-1)
            for i in range(p.numel()):
                middle = numbers[i].item()
                both = []
                for sign in (1, -1):
                    numbers[i] = middle + sign * step
                    both.append(sampled_loss(known, state, raw, fed))
                numbers[i] = middle
                slopes[i] = (both[0] - both[1]) / (2 * step)
    before = vectors.clone(phi)
    metrics = method.step(known.problem, state, train, valid)
    for name, p in phi.items():
        torch.testing.assert_close(before[name] - p.detach(), expected[name], rtol=1e-6, atol=1e-7, msg=name)
    assert float(metrics.train_loss) == pytest.approx(float(loss), rel=1e-9)


@pytest.mark.parametrize("vectorize", [False, True])
def test_vectorized_samples_share_one_call_of_the_loss(vectorize):
    known, calls = Ridge(), []

    def train_loss(model, batch, hyper):
        calls.append(1)
        return known.problem.train_loss(model, batch, hyper)

    problem = br.Problem(known.model, known.problem.space, train_loss, known.problem.valid_loss)
    method = br.BestResponse(samples=4, vectorize=vectorize, schedule=br.ThenTune(3))
    state, (train, valid) = method.init(problem), streams(known)
    for _ in range(3):
        method.step(problem, state, train, valid)
    assert len(calls) == 3 * (1 if vectorize else 4)


def test_a_loss_that_cannot_be_vectorized_is_told_what_to_do():
    known = Ridge()

    def train_loss(model, batch, hyper):
        return known.problem.train_loss(model, batch, hyper) * hyper["decay"]["weight"].sum().sign().item()

    problem = br.Problem(known.model, known.problem.space, train_loss, known.problem.valid_loss)
    one_by_one = br.BestResponse(samples=2)
    one_by_one.step(problem, one_by_one.init(problem), *streams(known))
    at_once = br.BestResponse(samples=2, vectorize=True)
    with pytest.raises(RuntimeError, match="vmap") as caught:
        at_once.step(problem, at_once.init(problem), *streams(known))
    assert "with vectorize=False it may do anything" in caught.value.__notes__[0]


def test_a_centered_response_has_the_weights_at_the_present_hypers_as_its_bias():
    known = Quadratic()
    method = br.BestResponse(perturb=br.Gaussian(0.1), centered=True)
    state = method.init(known.problem)
    set_linear(state, torch.randn(4, 2), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    for shift in ([0.0, 0.0], [5.0, -7.0]):
        set_raw(state, {"shift": torch.tensor(shift)})
        assert method.params(known.problem, state)["w"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("centered", [False, True])
def test_respond_is_a_guess_for_other_hypers(centered):
    known = Quadratic()
    method = br.BestResponse(perturb=br.Gaussian(0.1), centered=centered)
    state = method.init(known.problem)
    here, there = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 0.5])
    set_raw(state, {"shift": here})
    set_linear(state, known.jacobian, known.offset)
    got = method.respond(state, {"shift": there})["w"].detach()
    same(got, known.offset + known.jacobian @ (there - here if centered else there))


def test_the_start_is_the_models_weights_at_raw_zero():
    known = Quadratic()
    with torch.no_grad():
        known.model.w.copy_(torch.arange(4.0))
    method = br.BestResponse()
    assert method.params(known.problem, method.init(known.problem))["w"].tolist() == [0, 1, 2, 3]


# Costs, and what is kept apart


@pytest.mark.parametrize(
    ("parts", "steps", "cost"),
    [
        ({}, 3, (3, 3, 6)),
        ({"perturb": None}, 3, (3, 3, 6)),
        ({"samples": 4}, 3, (3, 3, 15)),
        ({"schedule": br.Alternate(train=5)}, 2, (10, 2, 12)),
        ({"schedule": br.Alternate(train=2, warmup=4), "samples": 2}, 5, (10, 3, 23)),
        ({"schedule": br.ThenTune(3)}, 5, (3, 2, 5)),
    ],
)
def test_costs_are_counted(parts, steps, cost):
    known = Quadratic()
    method = br.BestResponse(**parts)
    state, (train, valid) = method.init(known.problem), streams(known)
    for _ in range(steps):
        method.step(known.problem, state, train, valid)
    assert (state.cost.train_batches, state.cost.valid_batches, state.cost.gradients) == cost
    assert state.step == steps


def test_then_tune_trains_the_response_first_and_raw_after_it():
    known = Quadratic()
    method = br.BestResponse(schedule=br.ThenTune(2))
    state, (train, valid) = method.init(known.problem), streams(known)
    moved = []
    for _ in range(4):
        phi = vectors.clone(dict(state.response.named_parameters()))
        raw = vectors.clone(state.raw)
        metrics = method.step(known.problem, state, train, valid)
        trained = any(not torch.equal(phi[name], p) for name, p in state.response.named_parameters())
        tuned = not torch.equal(raw["shift"], state.raw["shift"])
        assert tuned is metrics.moved
        moved.append((trained, tuned))
    assert moved == [(True, False), (True, False), (False, True), (False, True)]


def test_hyper_lr_gives_a_hyper_its_own_rate():
    known = Quadratic()
    method = br.BestResponse(optimizer=still, hyper_optimizer=partial(SGD, lr=0.0), hyper_lr={"shift": 0.5})
    state, (train, valid) = method.init(known.problem), streams(known)
    set_linear(state, known.jacobian, known.offset)
    method.step(known.problem, state, train, valid)
    same(state.raw["shift"], -0.5 * known.hypergradient({"shift": torch.zeros(2)}))
    with pytest.raises(KeyError, match="'shfit'"):
        br.BestResponse(hyper_lr={"shfit": 0.5}).init(known.problem)


# Memory


def test_a_response_that_cannot_fit_is_refused_before_it_is_allocated(monkeypatch):
    known = Ridge(weights=30)
    numbers = (30 + 1) * 30
    size = 4 * numbers * torch.finfo(torch.get_default_dtype()).bits // 8

    def build(*_):
        pytest.fail("it was built all the same")

    monkeypatch.setattr(br.Linear, "build", build)
    monkeypatch.setattr("bestresponse.memory.total_memory", lambda device: size - 1)
    with pytest.raises(
        MemoryError, match=r"Linear\(init=None\) for 30 hypers and 30 weights holds 930 numbers"
    ) as caught:
        br.BestResponse(br.Linear()).init(known.problem)
    assert "LowRank" in str(caught.value)
    assert "0.0 GB" in str(caught.value)


@pytest.mark.parametrize("there", ["enough", "unknown"])
def test_a_response_that_just_fits_is_built(monkeypatch, there):
    size = 4 * 31 * 30 * torch.finfo(torch.get_default_dtype()).bits // 8
    monkeypatch.setattr("bestresponse.memory.total_memory", lambda device: size if there == "enough" else None)
    known = Ridge(weights=30)
    state = br.BestResponse(br.Linear()).init(known.problem)
    assert sum(p.numel() for p in state.response.parameters()) == 31 * 30


def test_a_response_far_larger_than_any_machine_is_refused_with_its_size():
    """3 · 10⁶ weights with a decay each: a Linear response would hold 9 · 10¹² numbers."""
    model = torch.nn.Linear(3000, 1000, bias=False)
    space = br.Space(decay=br.Hyper(1e-4, log=True, shape=br.per_weight(model)))
    problem = br.Problem(model, space, lambda m, b, h: m(b).mean(), lambda m, b, h: m(b).mean())
    with pytest.raises(
        MemoryError, match=r"3,000,000 hypers and 3,000,000 weights holds 9,000,003,000,000 numbers.*GB"
    ):
        br.BestResponse(br.Linear()).init(problem)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples must be at least 1; got 0"),
        ({"perturb": None, "centered": True}, "a centered response sees only the distance .* Give a perturb"),
        ({"perturb": None, "samples": 2}, "without perturb all samples are the same; use samples=1, not 2"),
        ({"perturb": br.Gaussian(antithetic=True), "samples": 3}, "samples must be even; got 3"),
        ({"perturb": br.Box(-1, 1, antithetic=True)}, "samples must be even; got 1"),
        ({"perturb": br.Gaussian(learn=True)}, "does not learn the scale of its perturb"),
    ],
)
def test_a_best_response_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        br.BestResponse(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"response": "linear"}, r"response must be a Recipe, such as br.Linear\(\); got 'linear'$"),
        ({"response": br.LowRank}, r"response must be a Recipe.*Call it: LowRank\(\.\.\.\)"),
        ({"perturb": 0.1}, r"perturb must be a Perturbation, such as br.Gaussian\(0.1\), or None; got 0.1"),
        ({"schedule": 5}, r"schedule must be a Schedule, such as br.Alternate\(\); got 5"),
    ],
)
def test_a_best_response_refuses_what_is_of_another_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        br.BestResponse(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Alternate(train=0), "Alternate needs train >= 1 and warmup >= 0; got train=0, warmup=0"),
        (lambda: br.Alternate(warmup=-1), "got train=1, warmup=-1"),
        (lambda: br.ThenTune(0), "ThenTune needs at least one training step; got 0"),
    ],
)
def test_a_schedule_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
