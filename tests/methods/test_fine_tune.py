"""Fine-tuning after a response: both losses after k more updates, against closed forms and finite differences."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD as TorchSGD

import bestresponse as br
from bestresponse import vectors
from bestresponse.testing import Ridge, net_problem
from bestresponse.updates import SGD, Adam


def streams(train, valid) -> tuple[br.Stream, br.Stream]:
    return br.Stream(train, name="train"), br.Stream(valid, name="valid")


def near(actual: Tensor, expected: Tensor, relative: float = 1e-9) -> None:
    relative = relative if expected.dtype == torch.float64 else 1e-3
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max())


def test_many_updates_lead_to_the_best_response_whatever_the_response_is():
    """The hypergradient is then the closed form of ridge, though the response knows nothing."""
    known = Ridge()
    raw = {"decay.weight": 0.5 * torch.randn(1, 5)}
    method = br.BestResponse(fine_tune=br.FineTune(300, SGD(0.1)))
    state = method.init(known.problem)
    state.raw["decay.weight"].copy_(raw["decay.weight"])
    train, valid = streams(known.train, known.valid)
    _, hypergradient = method.hypergradient(known.problem, state, next(valid), train)
    near(hypergradient["decay.weight"][0], known.hypergradient(raw))
    near(method.params(known.problem, state)["weight"], method.respond(state, state.raw)["weight"].detach())
    method.step(known.problem, state, train, valid)
    near(method.params(known.problem, state)["weight"][0], known.best_response(raw))
    assert float((method.respond(state, raw)["weight"][0] - known.best_response(raw)).detach().norm()) > 0.1


@pytest.mark.parametrize("update", [SGD("lr", momentum=0.5), Adam("lr", eps=1e-2)], ids=repr)
def test_the_hypergradient_is_the_slope_of_the_validation_objective(update):
    """Through the response, the updates, and their own learning rates: one for each; a net with everything."""
    torch.set_default_dtype(torch.float64)
    known, train, valid = net_problem()
    space = br.Space(**dict(known.space.items()), lr=br.Hyper(0.1, log=True, shape=(3,)))
    problem = br.Problem(known.model, space, known.train_loss, known.valid_loss)
    method = br.BestResponse(br.Linear(init=0.02), fine_tune=br.FineTune(3, update))
    batch = next(br.Stream(valid, name="valid"))

    def at(raw: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        state = method.init(problem)
        for leaf, part in raw.items():
            state.raw[leaf].copy_(part)
        loss, hypergradient = method.hypergradient(problem, state, batch, br.Stream(train, name="train"))
        return float(loss + space.penalty(raw)), hypergradient

    raw, delta = space.raw(), 1e-5
    _, hypergradient = at(raw)
    for leaf, part in raw.items():
        direction = torch.randn(part.shape)
        ends = [at({**raw, leaf: part + sign * delta * direction})[0] for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * delta)
        assert float((hypergradient[leaf] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9), leaf


@pytest.mark.parametrize("samples", [1, 3])
def test_a_training_update_moves_the_response_along_the_loss_after_the_updates(samples):
    """On ridge, k updates are w ↦ Mᵏ(w − w*) + w*: the gradient in the response's output is (Mᵏ)ᵀ ∂L_T/∂w."""
    known, steps, rate = Ridge(), 4, 0.1
    method = br.BestResponse(
        perturb=br.Gaussian(0.3),
        samples=samples,
        fine_tune=br.FineTune(steps, SGD(rate)),
        optimizer=partial(TorchSGD, lr=0.01),
        hyper_optimizer=partial(TorchSGD, lr=0.0),
    )
    state, twin = method.init(known.problem), method.init(known.problem)
    drawn = method.perturb.sample(twin.raw, samples, twin.generator)
    expected = torch.zeros_like(twin.response.network[0].bias)
    for i in range(samples):
        raw = {"decay.weight": drawn["decay.weight"][i]}
        w = twin.response({"decay.weight": drawn["decay.weight"][i][None]})["weight"][0, 0].detach()
        h, best = known.hessian(raw), known.best_response(raw)
        through = torch.linalg.matrix_power(torch.eye(5) - rate * h, steps)
        expected += through.T @ h @ through @ (w - best) / samples
    before = state.response.network[0].bias.detach().clone()
    method.step(known.problem, state, *streams(known.train, known.valid))
    near((before - state.response.network[0].bias.detach()) / 0.01, expected, 1e-8)


def test_what_is_deployed_are_the_fine_tuned_weights_at_the_last_change_of_raw():
    known = Ridge()
    method = br.BestResponse(fine_tune=br.FineTune(2, SGD(0.1)), schedule=br.Alternate(warmup=1))
    state, data = method.init(known.problem), streams(known.train, known.valid)
    method.step(known.problem, state, *data)
    near(method.params(known.problem, state)["weight"], method.respond(state, state.raw)["weight"].detach())
    raw = vectors.clone(state.raw)
    state.response_updater.optimizer.param_groups[0]["lr"] = 0.0
    w = method.respond(state, raw)["weight"][0].detach()
    method.step(known.problem, state, *data)
    for _ in range(2):
        w = w - 0.1 * known.hessian(raw) @ (w - known.best_response(raw))
    near(method.params(known.problem, state)["weight"][0], w)


def test_costs_are_counted():
    """A training update: k gradients, one more, and k products; a change of raw likewise."""
    known = Ridge()
    method = br.BestResponse(samples=2, fine_tune=br.FineTune(3, SGD(0.1)))
    state, data = method.init(known.problem), streams(known.train, known.valid)
    method.step(known.problem, state, *data)
    assert state.cost.train_batches == (1 + 2 * 3) + 3
    assert state.cost.valid_batches == 1
    assert state.cost.gradients == 2 * (3 + 1 + 2 * 3) + (3 + 1 + 2 * 3)


def test_buffers_move_with_the_training_updates_alone():
    problem, train, valid = net_problem()
    method = br.BestResponse(fine_tune=br.FineTune(3, SGD(0.1)))
    state = method.init(problem)
    method.step(problem, state, *streams(train, valid))
    assert int(state.buffers["norm.num_batches_tracked"]) == 1


def test_a_hyper_that_the_loss_detaches_is_refused_before_the_run():
    known = Ridge()

    def train_loss(model, batch, hyper):
        return known.problem.train_loss(model, batch, {"decay": {"weight": hyper["decay"]["weight"].detach()}})

    problem = br.Problem(known.problem.model, known.problem.space, train_loss, known.problem.valid_loss)
    with pytest.raises(ValueError, match="does not depend on it through torch, and BestResponse needs that derivative"):
        br.tune(problem, br.BestResponse(fine_tune=br.FineTune(2, SGD(0.1))), known.train, known.valid, steps=1)
    assert br.tune(problem, br.BestResponse(), known.train, known.valid, steps=1).status is br.Status.FINISHED


def test_what_cannot_be_is_refused():
    with pytest.raises(TypeError, match=r"update must be an Update, such as br\.updates\.SGD\(0\.1\); got 3"):
        br.FineTune(SGD(0.1), 3)
    with pytest.raises(TypeError, match=r"steps must be a whole number; got 2\.0"):
        br.FineTune(2.0, SGD(0.1))
    with pytest.raises(TypeError, match=r"fine_tune must be a FineTune, .* got 3"):
        br.BestResponse(fine_tune=3)
    with pytest.raises(ValueError, match=r"steps must be at least 1; got 0.*fine_tune=None"):
        br.FineTune(0, SGD(0.1))
    with pytest.raises(ValueError, match="products must be"):
        br.FineTune(1, SGD(0.1), products="forward")
    with pytest.raises(ValueError, match="vectorize=True does not go together with fine_tune"):
        br.BestResponse(samples=2, vectorize=True, fine_tune=br.FineTune(1, SGD(0.1)))
    known = Ridge()
    method = br.BestResponse(fine_tune=br.FineTune(2, SGD("rate")))
    with pytest.raises(KeyError, match="names a hyper that the space does not have: it has decay"):
        br.tune(known.problem, method, known.train, known.valid, steps=1)
    method = br.BestResponse(fine_tune=br.FineTune(2, SGD(0.1)))
    state = method.init(known.problem)
    with pytest.raises(ValueError, match=r"give train, a br\.Stream"):
        method.hypergradient(known.problem, state, next(iter(known.valid)))
    rate = br.Hyper(0.1, low=0.0, high=1.0, sampled=True)

    def loss(model, batch, hyper):
        return (model(batch) * hyper["rate"].mean()).mean()

    problem = br.Problem(nn.Linear(2, 1), br.Space(rate=rate), loss, loss)
    with pytest.raises(ValueError, match="'rate' is declared sampled"):
        br.tune(problem, method, [torch.ones(3, 2)], [torch.ones(3, 2)], steps=1)
