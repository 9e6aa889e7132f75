"""Fine-tuning: a few training updates after a guess at the weights, differentiated through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from bestresponse.gradients import Gradient, Products
from bestresponse.parts import require_part, require_whole
from bestresponse.problem import Params, Problem
from bestresponse.space import Raw
from bestresponse.state import Cost
from bestresponse.stream import Stream
from bestresponse.unrolling.course import Course, Place
from bestresponse.unrolling.reverse import Reverse
from bestresponse.updates import Update


@final
@dataclass(frozen=True)
class FineTune:
    """``steps`` training updates from the weights that a response guesses.

    Each takes a batch of its own. The training loss must be differentiable in all hypers, as no hyper may be
    ``sampled``.

    Args:
        steps: How many.
        update: Their rule, which starts anew each time; its settings may be hypers.
        products: ``"exact"`` second derivatives, or ``"central"`` differences of first ones.
    """

    steps: int
    update: Update
    products: Products = "exact"

    def __post_init__(self) -> None:
        require_part("update", self.update, Update, "br.updates.SGD(0.1)")
        require_whole("steps", self.steps)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}. For no fine-tuning use fine_tune=None")
        if self.products not in ("exact", "central"):
            raise ValueError(f'products must be "exact" or "central"; got {self.products!r}')

    def reads(self, problem: Problem) -> frozenset[str]:
        """The hypers that are settings of the update rule. Raises where they or others cannot be tuned so."""
        if problem.space.sampled:
            raise ValueError(
                f"fine_tune differentiates training updates in every hyper, and {problem.space.sampled[0]!r} is "
                "declared sampled: it cannot be differentiated. Use fine_tune=None"
            )
        self.update.check(problem.space, {n: tuple(p.shape) for n, p in problem.params().items()}, self.steps)
        return frozenset(self.update.reads)

    def gradient(
        self,
        problem: Problem,
        start: Place,
        raw: Raw,
        train: Stream,
        look: Callable[[Place], Gradient],
        *,
        generator: torch.Generator,
        cost: Cost,
    ) -> tuple[Gradient, Params]:
        """What ``look`` gives after the updates, as derivatives before them; and the fine-tuned weights."""
        course = Course(problem, raw, self.update, self.steps, train, look, generator, cost, products=self.products)
        start = Place(start.params, self.update.slots(start.params), start.buffers)
        outcome, adjoint = Reverse().there_and_back(course, start)
        return Gradient(outcome.objective, adjoint.params, adjoint.raw), outcome.end.params
