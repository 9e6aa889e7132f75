"""Hypergradients by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import Products, curvature_product, mixed_product, train_gradient, valid_gradient
from bestresponse.method import Alternate, Method, Metrics, Schedule
from bestresponse.optimizers import OptimizerFactory, ScheduleFactory, Updater
from bestresponse.problem import Params, Problem
from bestresponse.solvers import Identity, Solver
from bestresponse.space import Raw
from bestresponse.state import State
from bestresponse.stream import Stream
from bestresponse.vectors import Vector


@dataclass(kw_only=True)
class ImplicitState(State):
    """Ordinary weights in training, and the two updaters that move them and raw."""

    params: Params
    params_updater: Updater
    raw_updater: Updater


@final
@dataclass(frozen=True)
class Implicit(Method):
    """Train the weights as usual, and move the hypers along the hypergradient of the implicit function theorem.

    At trained weights, dL_V/dλ = ∂L_V/∂λ − (∂²L_T/∂λ∂w) x, where x solves H x = ∂L_V/∂w and H = ∂²L_T/∂w².

    Args:
        solver: How to solve for x. ``Identity()`` takes x = ∂L_V/∂w, which is T1–T2.
        products: ``"exact"`` second derivatives, or ``"central"`` differences of first ones.
        schedule: When to train and when to tune.
        optimizer: For the weights.
        hyper_optimizer: For raw.
        lr_schedule: Learning-rate schedule of ``optimizer``.
        hyper_lr_schedule: Learning-rate schedule of ``hyper_optimizer``.
        hyper_lr: Learning rates for single hypers, by name.
    """

    solver: Solver = field(default_factory=Identity)
    products: Products = "exact"
    schedule: Schedule = field(default_factory=Alternate)
    optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)
    hyper_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=3e-2)
    lr_schedule: ScheduleFactory | None = None
    hyper_lr_schedule: ScheduleFactory | None = None
    hyper_lr: Mapping[str, float] | None = None
    needs_raw_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.products not in ("exact", "central"):
            raise ValueError(f'products must be "exact" or "central"; got {self.products!r}')

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
        )

    def step(self, problem: Problem, state: ImplicitState, train: Stream, valid: Stream) -> Metrics:
        """Training updates of the weights, then a change of raw, as the schedule says."""
        plan, metrics = self.schedule.plan(state.step), Metrics()
        for _ in range(plan.train):
            metrics.train_loss = self._train(problem, state, train)
        if plan.tune:
            metrics.valid_loss, hypergradient = self.hypergradient(problem, state, next(train), next(valid))
            state.raw_updater.update(state.raw, hypergradient)
            metrics.moved = True
        state.step += 1
        return metrics

    def params(self, problem: Problem, state: ImplicitState) -> Params:
        """The weights in training."""
        return vectors.clone(state.params)

    def _train(self, problem: Problem, state: ImplicitState, train: Stream) -> Tensor:
        gradient = train_gradient(problem, state.params, state.raw, next(train), buffers=state.buffers)
        state.params_updater.update(state.params, gradient.params)
        state.cost.train_batches += 1
        state.cost.gradients += 1
        return gradient.loss

    def hypergradient(
        self, problem: Problem, state: ImplicitState, train_batch: object, valid_batch: object
    ) -> tuple[Tensor, Raw]:
        """The validation loss on one batch, and the hypergradient with all products on one training batch."""
        loss, b, direct = valid_gradient(problem, state.params, state.raw, valid_batch, buffers=state.buffers)
        state.cost.valid_batches += 1
        state.cost.train_batches += 1
        state.cost.gradients += 1

        def product(vector: Vector) -> Vector:
            state.cost.gradients += 2
            return curvature_product(
                problem, state.params, state.raw, train_batch, vector, buffers=state.buffers, products=self.products
            )

        x = self.solver.solve(product, b)
        state.cost.gradients += 2
        mixed = mixed_product(
            problem, state.params, state.raw, train_batch, x, buffers=state.buffers, products=self.products
        )
        return loss, vectors.axpy(-1.0, mixed, direct)
