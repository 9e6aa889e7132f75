"""What changes in a run: updaters move vectors in place, and a state is saved whole, whatever method it belongs to."""

from __future__ import annotations

import copy
import io
import runpy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import bestresponse as br
from bestresponse.optimizers import Updater
from bestresponse.testing import net_problem

CASES = runpy.run_path(str(Path(__file__).parent / "methods" / "cases.py"))["CASES"]


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Updaters


def vector() -> dict[str, Tensor]:
    return {"lr": torch.tensor(1.0), "decay.a": torch.tensor([1.0, 2.0]), "decay.b": torch.tensor(3.0)}


def ones(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones_like(part) for name, part in of.items()}


def moves(updater: Updater, raw: dict[str, Tensor]) -> dict[str, float]:
    """How far one update along a gradient of ones moves each leaf."""
    before = copy.deepcopy(raw)
    updater.update(raw, ones(raw))
    distances = {name: (before[name] - part).flatten().tolist() for name, part in raw.items()}
    assert all(len({round(d, 6) for d in part}) == 1 for part in distances.values())
    return {name: part[0] for name, part in distances.items()}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (None, {"lr": 0.5, "decay.a": 0.5, "decay.b": 0.5}),
        ({}, {"lr": 0.5, "decay.a": 0.5, "decay.b": 0.5}),
        ({"decay": 0.25}, {"lr": 0.5, "decay.a": 0.25, "decay.b": 0.25}),
        ({"decay.b": 0.25}, {"lr": 0.5, "decay.a": 0.5, "decay.b": 0.25}),
        ({"decay": 0.25, "decay.a": 0.125}, {"lr": 0.5, "decay.a": 0.125, "decay.b": 0.25}),
        ({"lr": 2.0, "decay": 4.0}, {"lr": 2.0, "decay.a": 4.0, "decay.b": 4.0}),
    ],
)
def test_hypers_have_their_own_learning_rates_by_name_and_by_leaf(rates, expected):
    raw = vector()
    updater = Updater.of(raw, partial(SGD, lr=0.5), rates=rates)
    assert moves(updater, raw) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["deca", "decay.c", "lr.x"])
def test_a_learning_rate_for_nothing_is_refused_by_name(name):
    with pytest.raises(KeyError, match=f"a learning rate is given for '{name}', which no hyper is named"):
        Updater.of(vector(), partial(SGD, lr=0.5), rates={"decay": 1.0, name: 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factory": "adam"}, r"an optimizer is given as a function that makes it, such as partial\(.*; got 'adam'"),
        ({"factory": SGD([torch.zeros(1)], lr=0.5)}, "an optimizer is given as a function.*; got a SGD that is made"),
        ({"factory": partial(SGD, lr=0.5), "schedule": 0.1}, "a schedule is given as a function .*; got 0.1"),
        ({"factory": torch.optim.LBFGS}, "LBFGS asks for the loss again"),
        (
            {"factory": partial(SGD, lr=0.5), "schedule": ReduceLROnPlateau},
            "ReduceLROnPlateau asks for a measured loss",
        ),
        (
            {"factory": partial(SGD, lr=0.5), "rates": 0.1},
            "learning rates of single hypers are a dict by name; got 0.1",
        ),
    ],
)
def test_what_does_not_make_an_optimizer_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Updater.of(vector(), **arguments)


def test_a_schedule_moves_all_learning_rates_after_each_update():
    raw = vector()
    schedule = partial(StepLR, step_size=2, gamma=0.5)
    updater = Updater.of(raw, partial(SGD, lr=1.0), schedule, {"decay.b": 8.0})
    steps = [moves(updater, raw) for _ in range(5)]
    assert [step["lr"] for step in steps] == pytest.approx([1, 1, 0.5, 0.5, 0.25])
    assert [step["decay.b"] for step in steps] == pytest.approx([8, 8, 4, 4, 2])


def test_an_update_changes_the_vector_in_place_and_leaves_no_gradient():
    raw = vector()
    held = dict(raw)
    updater = Updater.of(raw, partial(SGD, lr=0.5, momentum=0.9))
    gradient = ones(raw)
    for _ in range(3):
        updater.update(raw, gradient)
    assert all(raw[name] is held[name] for name in raw)
    assert all(part.grad is None for part in raw.values())
    assert all(bool((part == 1).all()) for part in gradient.values())
    assert raw["lr"].item() == pytest.approx(1.0 - 0.5 * (1 + 1.9 + 2.71))


def test_parts_without_a_gradient_stay():
    raw = vector()
    Updater.of(raw, partial(Adam, lr=0.5)).update(raw, {"lr": torch.tensor(3.0)})
    assert raw["lr"].item() == pytest.approx(0.5)
    assert raw["decay.a"].tolist() == [1.0, 2.0]


# Saving


def assert_same(first: Any, second: Any, where: str = "state") -> None:
    """Equal bit for bit, all the way down."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert list(first) == list(second), where
        for name, part in first.items():
            assert_same(part, second[name], f"{where}[{name!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, part in enumerate(first):
            assert_same(part, second[i], f"{where}[{i}]")
    elif isinstance(first, Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def number(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()


class Run:
    """An own loop over a small net, which can be saved and gone on with."""

    def __init__(self, method: br.Method, problem: br.Problem, train: Any, valid: Any, seed: int) -> None:
        self.method, self.problem = method, problem
        self.state = method.init(problem, seed=seed)
        self.streams = [br.Stream(data, name=name) for name, data in (("train", train), ("valid", valid))]

    def steps(self, count: int) -> list[tuple]:
        metrics = [self.method.step(self.problem, self.state, *self.streams) for _ in range(count)]
        return [(number(m.train_loss), number(m.valid_loss), m.moved, m.finished) for m in metrics]

    def save(self) -> dict[str, Any]:
        streams = [stream.state_dict() for stream in self.streams]
        saved = {"state": self.state.state_dict(), "streams": streams, "random": torch.get_rng_state()}
        if self.problem.device.type == "cuda":
            saved["cuda"] = torch.cuda.get_rng_state(self.problem.device)
        return through_a_file(saved)

    def load(self, saved: dict[str, Any]) -> None:
        self.state.load_state_dict(saved["state"])
        for stream, place in zip(self.streams, saved["streams"], strict=True):
            stream.load_state_dict(place)
        torch.set_rng_state(saved["random"])
        if "cuda" in saved:
            torch.cuda.set_rng_state(saved["cuda"], self.problem.device)


def goes_on(method: br.Method, *, before: int, after: int, batch_norm: bool = True) -> None:
    """A run that is saved and taken up by a fresh state, of another seed, equals one that was not."""
    problem, train, valid = net_problem(batch_norm=batch_norm)
    other = Run(method, problem, train, valid, seed=2)
    other.steps(1)
    run = Run(method, problem, train, valid, seed=1)
    run.steps(before)
    saved = run.save()
    expected = run.steps(after)
    other.load(saved)
    assert_same(other.save()["state"], saved["state"])
    assert other.steps(after) == expected
    assert_same(other.state.state_dict(), run.state.state_dict())
    assert_same(other.method.params(problem, other.state), run.method.params(problem, run.state))


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_saved_state_goes_on_bit_for_bit(case, before):
    goes_on(case.short or case.method, before=before, after=5, batch_norm=case.batch_norm)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(MultiStepLR, milestones=[2, 4, 7, 9]),
        partial(OneCycleLR, max_lr=0.1, total_steps=40),
        partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, total_iters=4), StepLR(optimizer, 3)], milestones=[6]
        ),
    ],
    ids=["MultiStepLR", "OneCycleLR", "LambdaLR", "SequentialLR"],
)
def test_schedules_go_on_where_they_were(schedule):
    method = br.Implicit(optimizer=partial(SGD, lr=0.1, momentum=0.9), lr_schedule=schedule, hyper_lr_schedule=schedule)
    goes_on(method, before=5, after=5)


def test_saving_takes_no_part_of_the_run():
    problem, train, valid = net_problem()
    runs = [Run(br.methods.luketina2016(), problem, train, valid, seed=1) for _ in range(2)]
    losses = []
    for run, saving in zip(runs, (False, True), strict=True):
        torch.manual_seed(0)
        steps = []
        for _ in range(4):
            if saving:
                run.save()
            steps += run.steps(1)
        losses.append(steps)
    assert losses[0] == losses[1]


@dataclass
class Note:
    text: str
    counts: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class OwnState(br.State):
    """One field of everything a state may hold."""

    params: dict[str, Tensor]
    updater: Updater
    module: nn.Module
    note: Note
    scores: list[float]
    tried: list[dict[str, Tensor]]
    pair: tuple[int, Tensor]
    nothing: Tensor | None = None
    flag: bool = False


def own_state(seed: int, *, used: bool = False) -> OwnState:
    torch.manual_seed(seed)
    params = {"w": torch.randn(3)}
    state = OwnState(
        raw={"a": torch.randn(())},
        buffers={"mean": torch.randn(2)},
        generator=torch.Generator("cpu").manual_seed(seed),
        params=params,
        updater=Updater.of(params, partial(Adam, lr=0.1), partial(StepLR, step_size=2)),
        module=nn.Linear(2, 1),
        note=Note("fresh"),
        scores=[],
        tried=[],
        pair=(0, torch.zeros(1)),
    )
    if used:
        state.updater.update(params, {"w": torch.ones(3)})
        torch.rand(5, generator=state.generator, device="cpu")
        state.step, state.cost.gradients = 7, 11
        state.note.text, state.note.counts = "used", [1, 2]
        state.scores, state.tried = [0.5, float("inf")], [{"a": torch.tensor(2.0)}]
        state.pair, state.nothing, state.flag = (3, torch.ones(1)), torch.ones(2), True
    return state


def test_every_kind_of_field_comes_back():
    used, fresh = own_state(1, used=True), own_state(2)
    fresh.load_state_dict(through_a_file(used.state_dict()))
    assert_same(fresh.state_dict(), used.state_dict())
    assert (fresh.step, fresh.cost.gradients, fresh.note, fresh.flag) == (7, 11, Note("used", [1, 2]), True)
    assert fresh.scores == [0.5, float("inf")]
    assert isinstance(fresh.cost, type(used.cost))
    assert torch.equal(*(torch.rand(3, generator=state.generator, device="cpu") for state in (fresh, used)))
    for state in (fresh, used):
        state.updater.update(state.params, {"w": torch.ones(3)})
    assert torch.equal(fresh.params["w"], used.params["w"])


def test_tensors_are_put_back_in_place_where_an_updater_holds_them():
    state = own_state(2)
    held = state.raw["a"], state.params["w"], state.buffers["mean"], state.module.weight, state.generator
    state.load_state_dict(through_a_file(own_state(1, used=True).state_dict()))
    now = state.raw["a"], state.params["w"], state.buffers["mean"], state.module.weight, state.generator
    assert all(before is after for before, after in zip(held, now, strict=True))


def test_a_missing_field_is_refused_by_name():
    saved = own_state(1).state_dict()
    del saved["scores"]
    with pytest.raises(KeyError, match="the saved state has no 'scores': it was written by another method or version"):
        own_state(2).load_state_dict(saved)


def test_a_missing_field_with_a_default_was_added_since_and_stays_as_it_is():
    method, (problem, _, _) = br.Implicit(warm_start=True), net_problem()
    saved = method.init(problem).state_dict()
    for name in ("solves", "x"):
        del saved[name]
    state = method.init(problem)
    state.solves = 3
    state.load_state_dict(saved)
    assert state.solves == 3
    assert state.x.keys() == state.params.keys()


def test_the_state_of_another_method_is_refused():
    problem, _, _ = net_problem()
    saved = br.methods.lorraine2018_joint().init(problem).state_dict()
    with pytest.raises(KeyError, match="the saved state has no 'params'"):
        br.methods.luketina2016().init(problem).load_state_dict(saved)


def test_a_tensor_of_another_shape_is_refused():
    """Put in silently, it would be one that the optimizer does not hold: the run would go on without moving."""
    saved = own_state(1).state_dict()
    saved["params"] = {"w": torch.zeros(4)}
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        own_state(2).load_state_dict(saved)
