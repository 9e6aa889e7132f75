"""Hypergradients through a course of training updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch

from bestresponse import vectors
from bestresponse.gradients import Gradient, Products, train_gradient, valid_gradient
from bestresponse.memory import require_memory
from bestresponse.method import Method, Metrics, ReadsHypers, Retrains
from bestresponse.optimizers import OptimizerFactory, ScheduleFactory, Updater
from bestresponse.parts import require_part, require_whole
from bestresponse.problem import Params, Problem
from bestresponse.state import State
from bestresponse.stream import Stream
from bestresponse.unrolling import Course, Mode, Outcome, Place, Reverse
from bestresponse.unrolling.course import Tangents
from bestresponse.updates import SGD, Slots, Update


@dataclass(kw_only=True)
class UnrolledState(State):
    """Where training stands.

    Attributes:
        params: The weights.
        slots: What the update rule remembers.
        count: Updates since the slots were zero.
        tangent_params: The derivatives of the weights in raw, where the mode carries them on.
        tangent_slots: Those of the slots.
        raw_updater: The optimizer of raw.
    """

    params: Params
    slots: Slots
    count: int = 0
    tangent_params: Params = field(default_factory=dict)
    tangent_slots: Slots = field(default_factory=dict)
    raw_updater: Updater


@final
@dataclass(frozen=True)
class Unrolled(Method, ReadsHypers, Retrains):
    """Train for ``steps`` updates, differentiate the validation loss at the end through all of them, move the hypers.

    With w_T = U(… U(U(w_0, λ), λ) …, λ), the hypergradient is that of L_V(w_T(λ), λ): not of where training would end
    after infinitely many updates, but of the training that is done. So hypers of the update rule, such as a learning
    rate with one value an update, can be tuned too.

    Args:
        mode: How to differentiate: ``Reverse()``, ``Reverse(last=k)``, ``Checkpointed()``, ``Reversible()``,
            ``Forward()``, ``DrMAD()``.
        update: The rule of the training updates; its settings may be hypers.
        steps: T, the training updates of one step, after which the hypers are changed.
        restart: Train from the model's own weights in every step: the hypers are those of one whole training, and the
            weights deployed are those of the last one. Or else go on from the present weights: one run in which
            hypers and weights move together, and T updates are how far it looks.
        products: ``"exact"`` second derivatives, or ``"central"`` differences of first ones.
        hyper_optimizer: For raw.
        hyper_lr_schedule: Learning-rate schedule of ``hyper_optimizer``.
        hyper_lr: Learning rates for single hypers, by name.
    """

    mode: Mode = field(default_factory=Reverse)
    update: Update = field(default_factory=partial(SGD, 0.1))
    steps: int = 100
    restart: bool = True
    products: Products = "exact"
    hyper_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=3e-2)
    hyper_lr_schedule: ScheduleFactory | None = None
    hyper_lr: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        require_part("mode", self.mode, Mode, "br.Reverse()")
        require_part("update", self.update, Update, "br.updates.SGD(0.1)")
        require_whole("steps", self.steps)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1 training update; got {self.steps}")
        if self.products not in ("exact", "central"):
            raise ValueError(f'products must be "exact" or "central"; got {self.products!r}')
        self.mode.check(self.update, restart=self.restart)

    def reads(self, problem: Problem) -> frozenset[str]:
        """The hypers that are settings of the update rule."""
        shapes = {name: tuple(p.shape) for name, p in problem.params().items()}
        self.update.check(problem.space, shapes, self.steps)
        return frozenset(self.update.reads)

    @property
    def needs_raw_gradient(self) -> bool:
        """Always."""
        return True

    def init(self, problem: Problem, *, seed: int = 0) -> UnrolledState:
        """The model's weights, and the hypers at their starts."""
        self.reads(problem)
        params = problem.params()
        raw = problem.space.raw(dtype=problem.raw_dtype, device=problem.device)
        self._require_memory(problem, params, vectors.numel(raw))
        return UnrolledState(
            raw=raw,
            buffers=problem.buffers(),
            generator=torch.Generator().manual_seed(seed),  # on the CPU: its numbers are seeds
            params=params,
            slots=self.update.slots(params),
            raw_updater=Updater.of(raw, self.hyper_optimizer, self.hyper_lr_schedule, self.hyper_lr),
        )

    def step(self, problem: Problem, state: UnrolledState, train: Stream, valid: Stream) -> Metrics:
        """Training updates, then a change of raw along the derivative through them."""
        outcome = self.hypergradient(problem, state, train, valid)
        state.params, state.slots, buffers = outcome.end
        state.buffers.update(buffers)
        state.count = self.steps if self.restart else state.count + self.steps
        if outcome.tangents is not None:
            state.tangent_params, state.tangent_slots = outcome.tangents
        state.raw_updater.update(state.raw, outcome.raw)
        state.step += 1
        return Metrics(train_loss=outcome.train_loss, valid_loss=outcome.objective, moved=True)

    def params(self, problem: Problem, state: UnrolledState) -> Params:
        """The weights at the end of the last training updates."""
        return vectors.clone(state.params)

    def hypergradient(self, problem: Problem, state: UnrolledState, train: Stream, valid: Stream) -> Outcome:
        """Train from where the step begins, on batches from ``train``; the hypergradient on one from ``valid``."""
        start = Place(state.params, state.slots, state.buffers)
        if self.restart:
            params = problem.params()
            start = Place(params, self.update.slots(params), problem.buffers())

        def look(end: Place) -> Gradient:
            state.cost.valid_batches += 1
            state.cost.gradients += 1
            return valid_gradient(problem, end.params, state.raw, next(valid), buffers=end.buffers)

        course = Course(
            problem,
            state.raw,
            self.update,
            self.steps,
            train,
            look,
            state.generator,
            state.cost,
            count=0 if self.restart else state.count,
            products=self.products,
        )
        tangents = Tangents(state.tangent_params, state.tangent_slots) if state.tangent_params else None
        return self.mode.run(course, start, tangents)

    def retrain(self, problem: Problem, state: UnrolledState, train: Stream) -> tuple[int, Params, Params]:
        """``steps`` updates of the rule; without restart, as many as the run has taken."""
        params, buffers, values = problem.params(), problem.buffers(), problem.space.values(state.raw)
        slots = self.update.slots(params)
        for count in range(state.count):
            slope = train_gradient(problem, params, state.raw, next(train), buffers=buffers).params
            params, slots = self.update.step(params, slots, slope, values, index=count % self.steps, count=count)
        return state.count, params, buffers

    def _require_memory(self, problem: Problem, params: Params, hypers: int) -> None:
        weights, slots = vectors.numel(params), len(self.update.slot_names)
        copies = self.mode.copies(self.steps, hypers, slots)
        require_memory(
            int(copies * weights) * torch.finfo(next(iter(params.values())).dtype).bits // 8,
            problem.device,
            f"{self.mode!r} through {self.steps:,} updates of {weights:,} weights with {hypers:,} hypers holds "
            f"{copies:,.0f} numbers for each weight",
            "Use Checkpointed(), which holds about 2√T places, Reversible() or DrMAD(), whose memory hardly grows with "
            "the number of updates, or Reverse(last=k); Forward() is for few hypers",
        )
