"""Cross-validation: its training by hand, what its samplers propose, and which trial it keeps."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import bestresponse as br
from bestresponse.testing import Ridge

RATE = 0.05
MANY = 20_000
slow_descent = partial(SGD, lr=RATE)


def same(actual: Tensor, expected: Tensor) -> None:
    exact = torch.get_default_dtype() == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-10 if exact else 1e-4, atol=1e-12 if exact else 1e-5)


def number(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()


class Loop:
    """An own loop, one step at a time."""

    def __init__(self, method: br.BlackBox, known: Any, seed: int = 0) -> None:
        self.method, self.problem = method, known.problem
        self.state = method.init(self.problem, seed=seed)
        self.train, self.valid = br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")

    def step(self) -> Any:
        return self.method.step(self.problem, self.state, self.train, self.valid)

    def steps(self, count: int) -> list:
        return [self.step() for _ in range(count)]

    @property
    def weights(self) -> Tensor:
        return self.method.params(self.problem, self.state)["weight"][0]


def descend(known: Ridge, decay: float, count: int, rates: list[float] | None = None) -> tuple[Tensor, list[float]]:
    """Gradient descent on ridge from zero, written out; the losses are those before each step."""
    w, losses, m = torch.zeros_like(known.x[0]), [], len(known.x)
    for i in range(count):
        losses.append(float((known.x @ w - known.y).square().mean() + decay * w @ w))
        w = w - (rates[i] if rates else RATE) * (2 * known.x.T @ (known.x @ w - known.y) / m + 2 * decay * w)
    return w, losses


def score_of(known: Ridge, w: Tensor) -> float:
    return float((known.xv @ w - known.yv).square().mean())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


# Training and choosing


def test_a_trial_is_plain_training_from_the_models_weights():
    known, decays = Ridge(), [3.0, 0.3, 0.01]
    loop = Loop(br.BlackBox(br.Grid({"decay": decays}), 6, slow_descent), known)
    trained = []
    for decay in decays:
        w, losses = descend(known, decay, 6)
        metrics = loop.steps(6)
        assert [number(m.train_loss) for m in metrics] == pytest.approx(losses, rel=1e-5)
        assert [m.valid_loss for m in metrics[:5]] == [None] * 5
        assert number(metrics[5].valid_loss) == pytest.approx(score_of(known, w), rel=1e-5)
        trained.append(w)
    scores = [score_of(known, w) for w in trained]
    assert loop.state.scores == pytest.approx(scores, rel=1e-5)
    best = min(range(3), key=scores.__getitem__)
    assert best != 0
    same(loop.weights, trained[best])
    same(loop.state.raw["decay.weight"].exp(), torch.full((1, 5), decays[best]))
    for trial, decay in zip(loop.state.trials, decays, strict=True):
        same(trial.raw["decay.weight"].exp(), torch.full((1, 5), decay))


def test_the_learning_rates_schedule_begins_anew_for_each_trial():
    known = Ridge()
    schedule = partial(StepLR, step_size=1, gamma=0.5)
    loop = Loop(br.BlackBox(br.Grid({"decay": [1.0, 0.1]}), 3, slow_descent, schedule), known)
    loop.steps(6)
    rates = [RATE, RATE / 2, RATE / 4]
    scores = [score_of(known, descend(known, decay, 3, rates)[0]) for decay in (1.0, 0.1)]
    assert loop.state.scores == pytest.approx(scores, rel=1e-5)


@final
@dataclass(frozen=True)
class Scripted(br.methods.Sampler):
    """Proposes given decays, and keeps what it was shown."""

    decays: tuple[float, ...]
    shown: list

    def count(self):
        return len(self.decays)

    def propose(self, space, past, generator):
        self.shown.append([trial.score for trial in past])
        return space.raw({"decay": self.decays[len(past)]})


def test_a_sampler_sees_the_trials_that_are_finished():
    known, shown = Ridge(), []
    loop = Loop(br.BlackBox(Scripted((1.0, 0.1, 0.5), shown), 2, slow_descent), known)
    loop.steps(6)
    scores = loop.state.scores
    assert shown == [[], scores[:1], scores[:2]]


def test_the_best_trial_is_kept_and_only_a_better_one_moves_raw():
    known = Ridge()
    decays = (1.0, 30.0, 0.3, 3.0, 0.01)  # scores fall and rise
    loop = Loop(br.BlackBox(Scripted(decays, []), 40, slow_descent), known)
    scores = [score_of(known, descend(known, decay, 40)[0]) for decay in decays]
    best, moved = math.inf, []
    for i, decay in enumerate(decays):
        last = loop.steps(40)[-1]
        better = scores[i] < best
        assert last.moved is (better and i > 0)
        moved.append(last.moved)
        if better:
            best, kept = scores[i], decay
        same(loop.state.raw["decay.weight"].exp(), torch.full((1, 5), kept))
        same(loop.weights, descend(known, kept, 40)[0])
    assert True in moved
    assert False in moved[1:]


def test_until_a_trial_has_finished_the_one_in_training_is_the_best():
    known = Ridge()
    loop = Loop(br.BlackBox(br.Grid({"decay": [2.0, 0.1]}), 5, slow_descent), known)
    same(loop.weights, torch.zeros(5))
    loop.steps(3)
    same(loop.weights, descend(known, 2.0, 3)[0])
    same(loop.state.raw["decay.weight"].exp(), torch.full((1, 5), 2.0))
    loop.steps(4)  # two into the second trial: the first stands
    same(loop.weights, descend(known, 2.0, 5)[0])


def test_it_finishes_after_its_last_trial_and_then_does_nothing():
    known = Ridge()
    loop = Loop(br.BlackBox(br.Grid({"decay": [2.0, 0.1]}), 3, slow_descent), known)
    assert loop.method.steps == 6
    assert [m.finished for m in loop.steps(6)] == [False] * 5 + [True]
    before = loop.state.cost.train_batches
    again = loop.step()
    assert (again.finished, again.moved, again.train_loss, again.valid_loss) == (True, False, None, None)
    assert (loop.state.cost.train_batches, loop.state.step) == (before, 6)


def test_tune_stops_when_it_has_finished():
    known = Ridge()
    method = br.BlackBox(br.Grid({"decay": [2.0, 0.1]}), 3, slow_descent)
    assert br.tune(known.problem, method, known.train, known.valid, steps=100).step == 6


def test_costs_are_counted():
    known = Ridge()
    known.valid = br.Batches(known.xv, known.yv, size=15)  # three batches a pass
    loop = Loop(br.BlackBox(br.Grid({"decay": [2.0, 0.1]}), 4, slow_descent), known)
    loop.steps(8)
    cost = loop.state.cost
    assert (cost.train_batches, cost.valid_batches, cost.gradients) == (8, 6, 8)


def test_a_trial_is_scored_on_all_validation_examples_equally():
    """Also when the last batch of a pass is smaller; and the place in the stream does not matter."""
    known = Ridge()
    known.valid = br.Batches(known.xv, known.yv, size=15)
    loop = Loop(br.BlackBox(br.Grid({"decay": [2.0]}), 4, slow_descent), known)
    next(loop.valid)
    loop.steps(4)
    assert loop.state.scores == pytest.approx([score_of(known, descend(known, 2.0, 4)[0])], rel=1e-6)


def test_the_prior_enters_the_score():
    """Without it the smaller decay would win."""
    known = Ridge()
    plain = [score_of(known, descend(known, decay, 40)[0]) for decay in (0.3, 3.0)]
    assert plain[0] < plain[1]
    prior = {0.3: 7.0, 3.0: 0.5}

    def penalty(raw: Tensor) -> Tensor:
        return torch.tensor(prior[round(float(raw.exp()[0, 0]), 3)])

    decay = br.Hyper(1.0, log=True, shape=br.per_weight(known.model), prior=penalty)
    known.problem = br.Problem(known.model, br.Space(decay=decay), known.problem.train_loss, known.problem.valid_loss)
    loop = Loop(br.BlackBox(br.Grid({"decay": list(prior)}), 40, slow_descent), known)
    last = loop.steps(80)[-1]
    assert loop.state.scores == pytest.approx([plain[0] + 7.0, plain[1] + 0.5], rel=1e-5)
    assert last.moved
    assert number(last.valid_loss) == pytest.approx(plain[1], rel=1e-5)  # the loss alone
    same(loop.state.raw["decay.weight"].exp(), torch.full((1, 5), 3.0))


# Trials that diverge


INFINITE, NOT_A_NUMBER = 1e3, 1e6  # decays whose loss is so after 100 steps


@pytest.mark.parametrize(
    ("decays", "best"),
    [
        ((INFINITE, 1.0, 0.5), 0.5),
        ((NOT_A_NUMBER, 1.0, 0.5), 0.5),
        ((1.0, NOT_A_NUMBER, 0.5), 0.5),
        ((0.5, 1.0, NOT_A_NUMBER), 0.5),
        ((NOT_A_NUMBER, INFINITE), NOT_A_NUMBER),
    ],
    ids=["infinite", "first", "middle", "last", "all"],
)
def test_a_trial_that_diverges_counts_as_the_worst(decays, best):
    known = Ridge()
    loop = Loop(br.BlackBox(br.Grid({"decay": list(decays)}), 100, slow_descent), known)
    loop.steps(100 * len(decays))
    for decay, score in zip(decays, loop.state.scores, strict=True):
        assert math.isfinite(score) is (decay < INFINITE)
        assert math.isnan(score) is (decay == NOT_A_NUMBER) or torch.get_default_dtype() == torch.float32
    same(loop.state.raw["decay.weight"].exp(), torch.full((1, 5), best))


def test_a_trial_that_diverges_does_not_stop_a_run():
    known = Ridge()
    method = br.BlackBox(br.Grid({"decay": [INFINITE, 1.0, NOT_A_NUMBER, 0.5]}), 100, slow_descent)
    result = br.tune(known.problem, method, known.train, known.valid, steps=method.steps)
    assert result.status is br.Status.FINISHED
    assert result.step == 400
    same(result.model.weight.detach()[0], descend(known, 0.5, 100)[0])


# Batch statistics


def test_each_trial_has_statistics_of_its_own():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    x, y = torch.randn(12, 2) + 5, torch.randn(12, 1)

    def loss(model, batch, hyper):
        return (model(batch[0]) - batch[1]).square().mean() * hyper["a"]

    class Known:
        problem = br.Problem(model, br.Space(a=br.Hyper(1.0)), loss, loss)
        train = valid = br.Batches(x, y, size=12, shuffle=False)

    loop = Loop(br.BlackBox(br.Grid({"a": [3.0, 1.0, 2.0]}), 4, slow_descent), Known)
    loop.steps(12)
    expected = torch.zeros(2)
    for _ in range(4):
        expected = 0.9 * expected + 0.1 * x.mean(dim=0)
    assert int(loop.state.buffers["0.num_batches_tracked"]) == 4
    same(loop.state.buffers["0.running_mean"], expected)
    same(loop.state.trial_buffers["0.running_mean"], expected)
    assert int(model[0].num_batches_tracked) == 0


# Samplers


def proposals(sampler: br.methods.Sampler, space: br.Space, seed: int = 0) -> list[dict[str, Any]]:
    shared, past = generator(seed), []
    for _ in range(sampler.count()):
        past.append(br.methods.Trial(sampler.propose(space, past, shared), 0.0))
    return [space.values(trial.raw) for trial in past]


def test_a_grid_is_every_combination_with_the_last_name_fastest():
    space = br.Space(
        a=br.Hyper(1.0), b=br.Hyper(0.5, low=0.0, high=1.0), c=br.Hyper(9.0), d=br.Hyper(1.0, log=True, shape=(2,))
    )
    grid = br.Grid({"d": [1e-3, 1.0, 1e3], "b": [0.1, 0.9], "a": [5.0]})
    assert grid.count() == 6
    got = [(v["d"].tolist(), v["b"].item(), v["a"].item(), v["c"].item()) for v in proposals(grid, space)]
    for values, (d, b) in zip(got, itertools.product([1e-3, 1.0, 1e3], [0.1, 0.9]), strict=True):
        assert values[0] == pytest.approx([d, d], rel=1e-9)
        assert values[1:] == pytest.approx((b, 5.0, 9.0), rel=1e-9)


def test_a_grid_refuses_a_name_that_no_hyper_has():
    with pytest.raises(KeyError, match="no hyper is named 'decy'; the space has decay"):
        Loop(br.BlackBox(br.Grid({"decy": [1.0]}), 1), Ridge())


def largest_gap(sample: Tensor, shares: Tensor) -> float:
    """Kolmogorov and Smirnov's distance, in units of 1 / √n: above 2.2 in one of 8,000 samples that do fit."""
    n = sample.numel()
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    ordered = shares.flatten().sort().values
    return float(torch.maximum((ordered - ranks).abs(), (ordered - ranks + 1 / n).abs()).max() * n**0.5)


def drawn(hyper: br.Hyper, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    space = br.Space(a=hyper)
    raw = br.Random(1, scale).propose(space, [], generator())
    return raw["a"], space.values(raw)["a"]


def test_random_is_uniform_between_two_bounds():
    _, values = drawn(br.Hyper(0.0, low=-1.0, high=3.0, shape=(MANY,)))
    assert bool(((values > -1.0) & (values < 3.0)).all())
    assert largest_gap(values, (values + 1) / 4) < 2.2


def test_random_is_uniform_in_the_logarithm_for_a_log_hyper():
    _, values = drawn(br.Hyper(1e-4, low=1e-6, high=1e2, log=True, shape=(MANY,)))
    assert bool(((values > 1e-6) & (values < 1e2)).all())
    assert largest_gap(values, (values.log10() + 6) / 8) < 2.2
    assert float((values < 1e-2).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / MANY**0.5)


@pytest.mark.parametrize(
    "hyper",
    [
        br.Hyper(3.0, shape=(MANY,)),
        br.Hyper(3.0, low=0.0, shape=(MANY,)),
        br.Hyper(1e-3, log=True, shape=(MANY,)),
        br.Hyper(1e-3, low=1e-9, log=True, shape=(MANY,)),
    ],
    ids=["free", "positive", "log", "log low"],
)
def test_random_is_gaussian_around_the_start_in_raw_without_two_bounds(hyper):
    raw, values = drawn(hyper, scale=0.5)
    start = hyper.raw(torch.tensor(hyper.start, dtype=torch.float64))
    assert largest_gap(raw, (1 + torch.erf((raw - start) / (0.5 * 2**0.5))) / 2) < 2.2
    assert hyper.low is None or bool((values > hyper.low).all())


def test_random_draws_the_weights_of_a_net_around_their_start():
    net = nn.Linear(100, 200, bias=False).double()
    raw = br.Random(1, 0.1).propose(br.Space(net=br.Net(net)), [], generator())["net.weight"]
    assert largest_gap(raw, (1 + torch.erf((raw - net.weight.detach()) / (0.1 * 2**0.5))) / 2) < 2.2


def test_random_trials_differ_and_the_seed_decides_them():
    space = br.Space(a=br.Hyper(0.5, low=0.0, high=1.0), b=br.Hyper(1.0))
    first, again, other = (proposals(br.Random(6), space, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({values["a"].item() for values in first + other}) == 12
    assert len({values["b"].item() for values in first + other}) == 12


def test_random_covers_every_part_of_a_hyper():
    space = br.Space(a=br.Hyper(0.5, low=0.0, high=1.0, shape={"x": (), "y": (2,)}))
    raw = br.Random(1).propose(space, [], generator())
    assert {name: leaf.shape for name, leaf in raw.items()} == {"a.x": (), "a.y": (2,)}
    assert len({*raw["a.y"].tolist(), raw["a.x"].item()}) == 3


# Saving


@pytest.mark.parametrize("already", [1, 5, 7, 20])
def test_a_trial_that_is_saved_in_its_middle_goes_on(already):
    """In a state that stands at its beginning, at the end of a trial, in another, and at the very end."""
    known = Ridge()
    method = br.BlackBox(br.Random(4), 5, partial(SGD, lr=RATE, momentum=0.9), partial(StepLR, step_size=2))
    loop, other = Loop(method, known, seed=1), Loop(method, known, seed=2)
    loop.steps(8)  # three into the second trial
    other.steps(already)
    file = io.BytesIO()
    torch.save(loop.state.state_dict(), file)
    file.seek(0)
    other.state.load_state_dict(torch.load(file, weights_only=True))
    assert other.state.trial_step == 3
    same(other.weights, loop.weights)
    assert [number(m.train_loss) for m in loop.steps(12)] == [number(m.train_loss) for m in other.steps(12)]
    assert loop.state.scores == other.state.scores
    assert torch.equal(loop.weights, other.weights)
    assert torch.equal(loop.state.raw["decay.weight"], other.state.raw["decay.weight"])
    for ours, theirs in zip(loop.state.trials, other.state.trials, strict=True):
        assert torch.equal(ours.raw["decay.weight"], theirs.raw["decay.weight"])


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.BlackBox(br.Random(1), 0), "budget must be at least 1 training update; got 0"),
        (lambda: br.Random(0), "Random needs trials >= 1 and scale > 0; got 0 and 1.0"),
        (lambda: br.Random(3, scale=0.0), "got 3 and 0.0"),
        (lambda: br.Grid({}), "Grid needs at least one value for each hyper; got {}"),
        (lambda: br.Grid({"a": [1.0], "b": []}), "Grid needs at least one value for each hyper; got"),
    ],
)
def test_cross_validation_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.BlackBox(20, 100), r"sampler must be a Sampler, such as br.Random\(20\); got 20"),
        (lambda: br.Grid([1.0, 2.0]), r"Grid needs a list of values for each hyper, \{.*; got \[1.0, 2.0\]"),
        (lambda: br.Grid({"decay": 1.0}), "Grid needs a list of values for each hyper"),
    ],
)
def test_cross_validation_refuses_what_is_of_another_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()
