"""The contract every method keeps, as one pytest class."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_model

from bestresponse.method import Method
from bestresponse.result import Result, Status, load
from bestresponse.space import Hyper
from bestresponse.stream import Stream
from bestresponse.testing.known import Quadratic, Ridge, TinyNet, net_problem
from bestresponse.tune import Event, tune


@final
@dataclass(frozen=True)
class Ends:
    """Where a method ends on a known problem.

    Args:
        excess: At most this far above the lowest L_V(w*(λ)) there is, as a part of the start's distance; ``None`` for
            a method that promises no optimum.
        distance: The deployed weights are at most this far from w*(λ), relative to its size.
    """

    excess: float | None
    distance: float


@final
@dataclass(frozen=True)
class Case:
    """A method under the contract, and what it is capable of.

    Args:
        name: What tests call it.
        method: The method.
        steps: Steps to the optimum of the known problems.
        ridge: Where it ends on :class:`Ridge` (orthogonal).
        quadratic: Where it ends on :class:`Quadratic`; ``None`` for a method that is biased there, whose end a test
            of its own must then show.
        batch_norm: Can it train nets with BatchNorm?
        short: The method for runs of ``short_steps`` steps, where another setting is needed for raw to move in them.
        short_steps: Steps of the short runs.
    """

    name: str
    method: Method
    steps: int
    ridge: Ends
    quadratic: Ends | None
    batch_norm: bool = True
    short: Method | None = None
    short_steps: int = 12

    def __str__(self) -> str:
        return self.name


class MethodContract:
    """What every method promises. Subclass it, and parametrize ``case``."""

    @pytest.fixture(autouse=True)
    def _dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        yield
        torch.set_default_dtype(before)

    def test_recipe_is_frozen_and_says_what_it_is(self, case: Case) -> None:
        """A recipe can be printed and shared; nothing can change it."""
        recipe: Any = case.method
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, dataclasses.fields(recipe)[0].name, None)
        assert type(case.method).__name__ in repr(case.method)

    def test_leaves_the_users_model_and_random_numbers_alone(self, case: Case) -> None:
        """A run works on copies."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        before, flags = copy.deepcopy(problem.model.state_dict()), [m.training for m in problem.model.modules()]
        random = torch.get_rng_state()
        tune(problem, case.short or case.method, train, valid, steps=case.short_steps)
        assert torch.equal(random, torch.get_rng_state())
        assert flags == [m.training for m in problem.model.modules()]
        assert all(p.grad is None for p in problem.model.parameters())
        for name, tensor in problem.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_own_loop_leaves_the_users_model_alone(self, case: Case) -> None:
        """So do ``init``, ``step`` and ``params`` by themselves."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        before = copy.deepcopy(problem.model.state_dict())
        method = case.short or case.method
        state = method.init(problem, seed=0)
        train_stream, valid_stream = Stream(train), Stream(valid)
        for _ in range(case.short_steps):
            method.step(problem, state, train_stream, valid_stream)
        method.params(problem, state)
        for name, tensor in problem.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_a_loop_without_gradients_tunes_all_the_same(self, case: Case) -> None:
        """What an own loop switches off for itself, ``torch.no_grad()``, does not make derivatives zero."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        ends = []
        for enabled in (True, False):
            method, train_stream, valid_stream = case.short or case.method, Stream(train), Stream(valid)
            with torch.set_grad_enabled(enabled), torch.random.fork_rng():
                torch.manual_seed(0)
                state = method.init(problem, seed=0)
                for _ in range(case.short_steps):
                    method.step(problem, state, train_stream, valid_stream)
                ends.append({**state.raw, **method.params(problem, state)})
        for name, tensor in ends[0].items():
            assert torch.equal(tensor, ends[1][name]), name

    def test_same_seed_same_run_other_seed_other_run(self, case: Case) -> None:
        """The seed decides everything."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        first, second, other = (
            tune(problem, case.short or case.method, train, valid, steps=case.short_steps, seed=s) for s in (1, 1, 2)
        )
        _assert_same(first, second)
        assert first.history["train_loss"] != other.history["train_loss"]

    @pytest.mark.parametrize("crash_after", [1, 8, 11])
    def test_interrupted_is_uninterrupted(self, case: Case, crash_after: int) -> None:
        """Crash and resume equal an undisturbed run, bit for bit."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)

        def crash(event: Event) -> None:
            if event.kind == "step" and event.step == crash_after:
                raise _CrashError

        def run(directory: str, *, resume: bool = False, crashing: bool = False) -> Result:
            return tune(
                problem,
                case.short or case.method,
                train,
                valid,
                steps=case.short_steps,
                run_dir=directory,
                resume=resume,
                checkpoint_every=3,
                callbacks=[crash if crashing else lambda event: None],
            )

        with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
            uninterrupted = run(whole)
            with pytest.raises(_CrashError):
                run(broken, crashing=True)
            resumed = run(broken, resume=True)
        _assert_same(uninterrupted, resumed)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_in_bounds_numbers_finite_dtypes_kept(self, case: Case, dtype: torch.dtype) -> None:
        """What comes out is usable as it is."""
        torch.set_default_dtype(dtype)
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        result = tune(problem, case.short or case.method, train, valid, steps=case.short_steps)
        assert result.status is Status.FINISHED
        for name, hyper in problem.space.items():
            assert isinstance(hyper, Hyper)
            parts = result.values[name].values() if isinstance(result.values[name], dict) else [result.values[name]]
            for value in parts:
                assert value.dtype == dtype
                assert bool((value >= (-math.inf if hyper.low is None else hyper.low)).all())
                assert bool((value <= (math.inf if hyper.high is None else hyper.high)).all())
        for row in result.history.rows():
            assert all(math.isfinite(number) for number in row.values())
        assert all(p.dtype == dtype for p in result.model.parameters())

    def test_cost_is_counted(self, case: Case) -> None:
        """Methods can be compared at equal cost."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        result = tune(problem, case.short or case.method, train, valid, steps=case.short_steps)
        for column in ("train_batches", "valid_batches", "gradients", "seconds"):
            numbers = [number for number in result.history[column] if number is not None]
            assert numbers == sorted(numbers)
            assert numbers[-1] > 0
        assert result.history.row()["gradients"] >= result.history.row()["train_batches"] / 2

    def test_saved_weights_load_strictly(self, case: Case, tmp_path: Path) -> None:
        """The result loads into the user's own class."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        result = tune(problem, case.short or case.method, train, valid, steps=case.short_steps)
        result.save(tmp_path)
        fresh = TinyNet(batch_norm=case.batch_norm)
        values = load(tmp_path, fresh)
        x = train.tensors[0]
        assert torch.equal(fresh.eval()(x), result.model.eval()(x))
        assert torch.equal(values["smooth"].to(x.device), result.values["smooth"])
        load_model(TinyNet(batch_norm=case.batch_norm), str(tmp_path / "model.safetensors"), strict=True)

    def test_frozen_stay_and_tied_stay_tied(self, case: Case) -> None:
        """The model keeps its structure."""
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
        result = tune(problem, case.short or case.method, train, valid, steps=case.short_steps)
        assert isinstance(result.model, TinyNet)
        assert isinstance(problem.model, TinyNet)
        assert result.model.second.weight is result.model.first.weight
        assert torch.equal(result.model.embed.weight, problem.model.embed.weight)
        assert not torch.equal(result.model.first.weight, problem.model.first.weight)

    def test_finds_the_known_optimum_of_ridge(self, case: Case) -> None:
        """It tunes: one decay per weight, orthogonal data."""
        _assert_ends(case, Ridge(orthogonal=True), case.ridge)

    def test_moves_from_raw_zero_to_the_optimum_of_a_quadratic(self, case: Case) -> None:
        """It tunes from raw = 0, where a careless response stands still."""
        quadratic = Quadratic()
        assert not quadratic.problem.space.raw()["shift"].any()
        if case.quadratic is not None:
            _assert_ends(case, quadratic, case.quadratic)


def _assert_ends(case: Case, known: Ridge | Quadratic, ends: Ends) -> None:
    result = tune(known.problem, case.method, known.train, known.valid, steps=case.steps)
    start = known.valid_loss(known.problem.space.raw()) - known.lowest
    if ends.excess is not None:
        assert ends.excess <= 0.2, "a tolerance that hardly asks for an improvement"
        assert (known.valid_loss(result.raw) - known.lowest) / start < ends.excess
    best = known.best_response(result.raw)
    ours = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    assert float((ours - best).norm() / best.norm()) < ends.distance


class _CrashError(Exception):
    pass


def _assert_same(first: Result, second: Result) -> None:
    assert first.step == second.step
    for name, leaf in first.raw.items():
        assert torch.equal(leaf, second.raw[name]), name
    for (name, tensor), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    assert len(first.history) == len(second.history)
    for ours, theirs in zip(first.history.rows(), second.history.rows(), strict=True):
        assert {k: v for k, v in ours.items() if k != "seconds"} == {k: v for k, v in theirs.items() if k != "seconds"}
