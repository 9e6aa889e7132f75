"""The audit against closed forms of ridge: cosines, sizes and the error of the best response."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import bestresponse as br
from bestresponse.testing import Ridge, net_problem
from bestresponse.updates import SGD as Descent

pytestmark = pytest.mark.filterwarnings("ignore:no hyper will be changed")  # the audit's own step does

still = partial(SGD, lr=0.0)
steep = partial(SGD, lr=0.1)
late = br.Alternate(warmup=200)  # only the audit's own step tunes


def precise() -> bool:
    return torch.get_default_dtype() == torch.float64


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def trained(known: Ridge, method: br.Method, steps: int) -> br.Result:
    return br.tune(known.problem, method, known.train, known.valid, steps=steps)


def test_t1_t2_on_ridge_has_the_bias_it_is_known_for():
    known = Ridge(start=0.3)
    method = br.Implicit(schedule=late, optimizer=steep, hyper_optimizer=still)
    result = trained(known, method, 200)
    found = br.audit(result, known.train, known.valid, draws=2, updates=0)
    raw = result.raw
    own, truth = known.hypergradient(raw, inverse=torch.eye(5)), known.hypergradient(raw)
    assert found.overall is not None
    error = 1e-4 if precise() else 1e-2
    assert found.overall.cosine == pytest.approx(cosine(own, truth), abs=error)
    assert found.overall.of_one == pytest.approx(cosine(own, truth), abs=error)
    assert found.overall.cosine < 0.999
    assert found.overall.size == pytest.approx(float(own.norm() / truth.norm()), rel=10 * error)
    assert found.length == pytest.approx(float(truth.norm()), rel=10 * error)
    assert found.hypers == {"decay": found.overall}
    assert found.residual is not None
    assert found.residual <= 1e-4
    assert (found.step, found.draws, found.retraining, found.left_out) == (200, 2, None, {})


@pytest.mark.parametrize(
    "method",
    [
        br.Implicit(br.CG(20, tolerance=1e-6), schedule=late, optimizer=steep, hyper_optimizer=still),
        br.Implicit(br.Dense(), "central", late, batches=3, optimizer=steep, hyper_optimizer=still),
    ],
    ids=["cg", "dense central"],
)
def test_an_exact_hypergradient_is_found_to_be_one(method):
    known = Ridge()
    found = br.audit(trained(known, method, 200), known.train, known.valid, draws=1, updates=0)
    assert found.overall is not None
    assert found.overall.cosine == pytest.approx(1, abs=1e-6 if precise() else 1e-3)
    assert found.overall.size == pytest.approx(1, abs=1e-3 if precise() else 1e-2)


def test_adjoint_and_hypernetworks_are_judged_too():
    """Their hypergradient is what their own step gives to the optimizer of raw."""
    known = Ridge(orthogonal=True)
    adjoint = br.methods.adjoint(
        horizon=1e4, schedule=br.Alternate(train=1, warmup=300), average=1, optimizer=steep, hyper_optimizer=still
    )
    found = br.audit(trained(known, adjoint, 300), known.train, known.valid, draws=2, updates=0)
    assert found.overall is not None
    assert found.overall.cosine > 0.99
    joint = br.methods.lorraine2018_joint(
        perturb=br.Gaussian(0.3), optimizer=partial(torch.optim.Adam, lr=3e-2), hyper_optimizer=still
    )
    found = br.audit(trained(known, joint, 500), known.train, known.valid, draws=1, updates=0)
    assert found.overall is not None
    assert found.overall.cosine > 0.9


def test_the_error_of_the_best_response_is_the_distance_to_the_closed_form():
    known = Ridge()
    method = br.Implicit(optimizer=steep, hyper_optimizer=steep)
    result = trained(known, method, 5)
    found = br.audit(result, known.train, known.valid, draws=1, updates=600).retraining
    assert found is not None
    w, best = result.model.weight.detach()[0], known.best_response(result.raw)
    error = 1e-6 if precise() else 1e-3
    assert found.distance == pytest.approx(float((w - best).norm() / best.norm()), rel=error)
    assert found.distance > 0.01
    assert found.retrained_valid_loss == pytest.approx(known.valid_loss(result.raw), rel=error)
    assert found.valid_loss == pytest.approx(float((known.xv @ w - known.yv).square().mean()), rel=error)

    def train_loss(w: Tensor) -> float:
        decay = result.raw["decay.weight"][0].exp()
        return float((known.x @ w - known.y).square().mean() + (decay * w * w).sum())

    assert found.train_loss == pytest.approx(train_loss(w), rel=error)
    assert found.retrained_train_loss == pytest.approx(train_loss(best), rel=error)
    assert found.updates == 600


def test_the_reference_is_on_all_batches_and_reads_as_a_table():
    """Shuffled minibatches: single hypergradients are noisy, and the reference is that on all data."""
    known = Ridge(start=0.3)
    nn.init.ones_(known.model.weight)
    train = br.Batches(known.x, known.y, size=8)
    method = br.Implicit(br.Dense(), optimizer=still, hyper_optimizer=still)
    result = br.tune(known.problem, method, train, known.valid, steps=1)
    found = br.audit(result, train, known.valid, draws=40, updates=3)
    truth = known.hypergradient(result.raw, weights=torch.ones(5))
    assert found.length == pytest.approx(float(truth.norm()), rel=1e-3 if precise() else 1e-2)
    assert found.overall is not None
    assert 0 < found.overall.of_one < found.overall.cosine
    text = str(found)
    assert "after step 1: 40 of the run's own beside one reference" in text
    assert f"{found.overall.cosine:10.3f}{found.overall.of_one:10.3f}" in text
    assert "trained anew for 3 updates" in text
    assert "A cosine of 1 is the right direction" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_nothing_is_changed_by_it():
    problem, train, valid = net_problem()
    result = br.tune(problem, br.methods.luketina2016(), train, valid, steps=3)
    before = copy.deepcopy((result.state.state_dict(), dict(result.model.state_dict()), dict(result.raw)))
    random = torch.get_rng_state()
    first = br.audit(result, train, valid, draws=2, batches=2, solver=br.CG(2, damping=20.0), updates=4)
    second = br.audit(result, train, valid, draws=2, batches=2, solver=br.CG(2, damping=20.0), updates=4)
    assert first == second
    assert torch.equal(random, torch.get_rng_state())
    after = (result.state.state_dict(), dict(result.model.state_dict()), dict(result.raw))
    assert_equal(before, after)


def assert_equal(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    elif isinstance(a, Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def test_sampled_hypers_are_left_out_and_named():
    def train_loss(model, batch, hyper):
        x, y = batch
        noisy = x * (torch.rand(x.shape) > hyper["drop"][:, None])
        return (model(noisy) - y).square().mean(1) + br.functional.l2(model, hyper["decay"])

    problem = br.Problem(
        nn.Linear(3, 1),
        br.Space(decay=br.Hyper(0.1, log=True), drop=br.Hyper(0.2, low=0.0, high=0.9, sampled=True)),
        train_loss,
        lambda model, batch, hyper: (model(batch[0]) - batch[1]).square().mean(),
    )
    data = br.Batches(torch.randn(20, 3), torch.randn(20, 1), size=10)
    result = br.tune(problem, br.methods.adjoint(schedule=br.Alternate(train=2)), data, data, steps=5)
    found = br.audit(result, data, data, draws=2, updates=5)
    assert list(found.left_out) == ["drop"]
    assert list(found.hypers) == ["decay"]
    assert "Not judged: drop, as it is sampled, and no derivative in it exists." in str(found)


def with_rate(known: Ridge, restart: bool) -> tuple[br.Problem, br.Unrolled]:
    """A rate for each of three updates, which the loss does not read; hypers that stay where they are."""
    rate = br.Hyper(0.05, log=True, shape=(3,))
    space = br.Space(**dict(known.problem.space.items()), rate=rate)
    problem = br.Problem(known.problem.model, space, known.problem.train_loss, known.problem.valid_loss)
    return problem, br.Unrolled(br.Reverse(), Descent("rate"), 3, restart=restart, hyper_optimizer=still)


@pytest.mark.parametrize(("restart", "updates"), [(True, 3), (False, 12)])
def test_an_unrolled_run_is_retrained_by_its_own_rule_and_its_rule_is_not_judged(restart, updates):
    """w⁺ = w − η(Hw − 2c) from the model's zeros, on all data at once: just what the run did."""
    known = Ridge(start=0.3)
    problem, method = with_rate(known, restart)
    result = br.tune(problem, method, known.train, known.valid, steps=4)
    found = br.audit(result, known.train, known.valid, draws=1)
    assert found.left_out == {"rate": "Unrolled reads it itself, and the reference sees the losses alone"}
    assert list(found.hypers) == ["decay"]
    assert found.overall == found.hypers["decay"]
    assert "Not judged: rate, as Unrolled reads it itself" in str(found)
    w, h = torch.zeros(5), known.hessian(result.raw)
    for _ in range(updates):
        w = w - 0.05 * h @ (w - known.best_response(result.raw))
    again = found.retraining
    assert again is not None
    assert again.updates == updates
    error = 1e-9 if precise() else 1e-4
    assert again.retrained_valid_loss == pytest.approx(float((known.xv @ w - known.yv).square().mean()), rel=error)
    assert again.distance == pytest.approx(0, abs=error)
    # In dense algebra: the course's derivative, its decays alone, beside the implicit one at its end.
    truth = known.hypergradient(result.raw, weights=w)
    assert found.length == pytest.approx(float(truth.norm()), rel=1e-3)


def test_a_run_with_hypers_of_its_rule_alone_has_nothing_to_compare():
    known = Ridge()
    rate = br.Space(rate=br.Hyper(0.05, log=True))
    loss = known.problem.valid_loss
    problem = br.Problem(known.problem.model, rate, loss, loss)
    method = br.Unrolled(br.Reverse(), Descent("rate"), 3)
    found = br.audit(br.tune(problem, method, known.train, known.valid, steps=2), known.train, known.valid, draws=1)
    assert (found.overall, found.hypers, found.length) == (None, {}, 0.0)
    assert found.retraining is not None
    with pytest.raises(ValueError, match="Unrolled is retrained by its own rule for as many updates as it tunes for"):
        br.audit(br.tune(problem, method, known.train, known.valid, steps=2), known.train, known.valid, updates=5)


def test_by_default_it_retrains_for_as_many_updates_as_the_run_had_batches():
    known = Ridge()
    result = trained(known, br.Implicit(schedule=br.Alternate(train=3), optimizer=steep), 5)
    assert result.state.cost.train_batches == 5 * (3 + 1)
    found = br.audit(result, known.train, known.valid, draws=1).retraining
    assert found is not None
    assert found.updates == 20
    assert br.audit(result, known.train, known.valid, draws=1, updates=0).retraining is None


def test_generators_of_other_devices_are_left_alone(monkeypatch):
    """``torch.manual_seed`` seeds every device there is, and those that the model is not on would stay so."""
    known = Ridge()
    result = trained(known, br.Implicit(optimizer=steep), 2)

    def everywhere(seed: int) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "manual_seed", everywhere)
    br.audit(result, known.train, known.valid, draws=1, updates=2)


def test_what_cannot_be_audited_is_said():
    known = Ridge()
    search = trained(known, br.methods.cross_validation(br.Random(1), 2), 2)
    with pytest.raises(ValueError, match="BlackBox takes no hypergradient: there is nothing to audit"):
        br.audit(search, known.train, known.valid)
    warm = trained(known, br.Implicit(schedule=br.Alternate(warmup=1000)), 1)
    with pytest.raises(ValueError, match="it ended within its warm-up"):
        br.audit(warm, known.train, known.valid)
    with pytest.raises(ValueError, match="draws=0"):
        br.audit(warm, known.train, known.valid, draws=0)
