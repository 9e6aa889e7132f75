"""Hypergradients by the implicit function theorem."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import Products, train_gradient
from bestresponse.hypergradient import Hypergradient, Linearization, implicit_hypergradient
from bestresponse.method import Alternate, Method, Metrics, Schedule
from bestresponse.optimizers import OptimizerFactory, ScheduleFactory, Updater
from bestresponse.parts import require_part, require_whole
from bestresponse.problem import Batch, Params, Problem
from bestresponse.reading import require_dependence
from bestresponse.solvers import Identity, Solution, Solver, Turn
from bestresponse.space import Raw
from bestresponse.state import State
from bestresponse.stream import Stream
from bestresponse.tolerances import Tolerance


@dataclass(kw_only=True)
class ImplicitState(State):
    """Ordinary weights in training, the two updaters that move them and raw, and the last solution.

    Attributes:
        params: The weights in training.
        params_updater: The optimizer of the weights.
        raw_updater: The optimizer of raw.
        x: The last solution of H x = ∂L_V/∂w, to start the next one from; empty without warm start.
        solves: Systems solved so far.
        troubled: How many of them the solver had trouble with.
        first_slope: ‖∂L_T/∂w‖ at the first training update, for ``train_tolerance``.
    """

    params: Params
    params_updater: Updater
    raw_updater: Updater
    x: Params = field(default_factory=dict)
    solves: int = 0
    troubled: int = 0
    first_slope: float = 0.0


@final
@dataclass(frozen=True)
class Implicit(Method):
    """Train the weights as usual, and move the hypers along the hypergradient of the implicit function theorem.

    At trained weights, dL_V/dλ = ∂L_V/∂λ − (∂²L_T/∂λ∂w) x, where x solves H x = ∂L_V/∂w and H = ∂²L_T/∂w². All
    products of one solve are those of the same batches with the same random numbers.

    The history's column ``residual`` has ‖∂L_V/∂w − Hx‖ / ‖∂L_V/∂w‖ for every solve, where the solver knows it. When a
    solver has trouble (it diverges, or meets negative curvature) the best x it found is used, and a warning says so:
    once a run.

    Args:
        solver: How to solve for x. ``Identity()`` takes x = ∂L_V/∂w, which is T1–T2.
        products: ``"exact"`` second derivatives, or ``"central"`` differences of first ones.
        schedule: When to train and when to tune.
        warm_start: Start each solve from the last x, which is kept with the state. Costs one product a solve.
        batches: Training batches that the products are averaged over; each product costs as many times more.
        train_tolerance: End the training updates of a step early, once the gradient is below this part of the run's
            first one: for training on all data at once. Reads a number at every update.
        optimizer: For the weights.
        hyper_optimizer: For raw.
        lr_schedule: Learning-rate schedule of ``optimizer``.
        hyper_lr_schedule: Learning-rate schedule of ``hyper_optimizer``.
        hyper_lr: Learning rates for single hypers, by name.
    """

    solver: Solver = field(default_factory=Identity)
    products: Products = "exact"
    schedule: Schedule = field(default_factory=Alternate)
    warm_start: bool = False
    batches: int = 1
    train_tolerance: Tolerance | None = None
    optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)
    hyper_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=3e-2)
    lr_schedule: ScheduleFactory | None = None
    hyper_lr_schedule: ScheduleFactory | None = None
    hyper_lr: Mapping[str, float] | None = None
    extras: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        require_part("solver", self.solver, Solver, "br.CG()")
        require_part("schedule", self.schedule, Schedule, "br.Alternate()")
        if self.train_tolerance is not None:
            require_part("train_tolerance", self.train_tolerance, Tolerance, "br.PowerTolerance(0.1), or None")
        require_whole("batches", self.batches)
        if self.products not in ("exact", "central"):
            raise ValueError(f'products must be "exact" or "central"; got {self.products!r}')
        if self.batches < 1:
            raise ValueError(f"batches must be at least 1; got {self.batches}")

    @property
    def needs_raw_gradient(self) -> bool:
        """Always."""
        return True

    def init(self, problem: Problem, *, seed: int = 0) -> ImplicitState:
        """The model's weights, and the hypers at their starts."""
        params = problem.params()
        raw = problem.space.raw(dtype=problem.raw_dtype, device=problem.device)
        return ImplicitState(
            raw=raw,
            buffers=problem.buffers(),
            generator=torch.Generator(device=problem.device).manual_seed(seed),
            params=params,
            params_updater=Updater.of(params, self.optimizer, self.lr_schedule),
            raw_updater=Updater.of(raw, self.hyper_optimizer, self.hyper_lr_schedule, self.hyper_lr),
            x=vectors.zeros_like(params) if self.warm_start else {},
        )

    def step(self, problem: Problem, state: ImplicitState, train: Stream, valid: Stream) -> Metrics:
        """Training updates of the weights, then a change of raw, as the schedule says."""
        plan, metrics = self.schedule.plan(state.step), Metrics()
        for _ in range(plan.train):
            metrics.train_loss, trained = self._train(problem, state, next(train))
            if trained:
                break
        if plan.tune:
            found = self._solve(problem, state, [next(train) for _ in range(self.batches)], next(valid))
            metrics.valid_loss = found.valid_loss
            self._note(state, metrics, found.solution)
            state.raw_updater.update(state.raw, found.gradient)
            metrics.moved = True
        state.step += 1
        return metrics

    def params(self, problem: Problem, state: ImplicitState) -> Params:
        """The weights in training."""
        return vectors.clone(state.params)

    def hypergradient(
        self, problem: Problem, state: ImplicitState, train_batch: Batch, valid_batch: Batch
    ) -> tuple[Tensor, Raw]:
        """The validation loss on one batch, and the hypergradient with all products on one training batch.

        It counts its costs, and may draw from the state's generator; nothing else is changed.
        """
        found = self._solve(problem, state, [train_batch], valid_batch)
        if not all(bool(part.any()) for part in found.gradient.values()):  # so it may be; or the loss detaches a hyper
            require_dependence(problem, state.params, state.raw, train_batch)
        return found.valid_loss, found.gradient

    def _train(self, problem: Problem, state: ImplicitState, batch: Batch) -> tuple[Tensor, bool]:
        """One training update, unless the weights are trained as well as is asked; the loss, and whether they are."""
        gradient = train_gradient(problem, state.params, state.raw, batch, buffers=state.buffers)
        state.cost.train_batches += 1
        state.cost.gradients += 1
        if self.train_tolerance is not None:
            slope = float(vectors.norm(gradient.params))
            state.first_slope = state.first_slope or slope
            if slope <= self.train_tolerance.at(state.solves) * state.first_slope:
                return gradient.loss, True
        state.params_updater.update(state.params, gradient.params)
        return gradient.loss, False

    def _solve(
        self, problem: Problem, state: ImplicitState, train_batches: Sequence[Batch], valid_batch: Batch
    ) -> Hypergradient:
        """The hypergradient on these batches."""
        at = Linearization(
            problem, state.params, state.raw, train_batches, buffers=state.buffers, products=self.products
        )
        start = state.x if self.warm_start and state.solves else None
        found = implicit_hypergradient(at, self.solver, [valid_batch], Turn(state.solves, start, state.generator))
        state.cost.valid_batches += 1
        state.cost.train_batches += len(train_batches)
        state.cost.gradients += 1 + at.gradients
        return found

    def _note(self, state: ImplicitState, metrics: Metrics, solution: Solution) -> None:
        """Keep the solution for the next one, and say what was wrong with it."""
        if solution.residual is not None:
            metrics.extra["residual"] = solution.residual
        if solution.trouble:
            state.troubled += 1
            if state.troubled == 1:
                warnings.warn(
                    f"{solution.trouble}. This was step {state.step + 1}, and is said once a run; the history's column "
                    "'residual' tells how good each solution was",
                    RuntimeWarning,
                    stacklevel=3,
                )
        if self.warm_start:
            state.x = vectors.clone(solution.x)
        state.solves += 1
