"""Reverse modes: from the end of training back through its updates, one by one.

Each keeps, or finds again, where training stood before every update. Nothing else is kept: each update's own graph is
built when the way back comes to it, and freed before the next. So no graph ever spans two updates.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import final

from bestresponse.parts import require_whole
from bestresponse.unrolling.course import Adjoint, Course, Leg, Mode, Outcome, Place, Tangents
from bestresponse.updates import Update
from bestresponse.vectors import Vector


@final
@dataclass(frozen=True)
class Reverse(Mode):
    """Full reverse mode: where training stood before each update is kept. The derivative is exact.

    Domke 2012, https://proceedings.mlr.press/v22/domke12.html; Franceschi, Donini, Frasconi and Pontil 2017,
    https://arxiv.org/abs/1703.01785; with ``last``: Shaban, Cheng, Hatch and Boots 2019,
    https://arxiv.org/abs/1810.10667.

    Args:
        last: Go back through the last so many updates only: less memory and time, and what earlier updates owe to the
            hypers is left out. ``None`` for all.
    """

    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None:
            require_whole("last", self.last)
        if self.last is not None and self.last < 1:
            raise ValueError(f"last must be at least 1 update, or None for all; got {self.last}")

    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Forth, and back."""
        return self.there_and_back(course, start)[0]

    def there_and_back(self, course: Course, start: Place) -> tuple[Outcome, Adjoint]:
        """As :meth:`run`; and the derivative of the objective in where the way back ends: all of the course's start."""
        place, tape = start, deque[tuple[Leg, Place]](maxlen=self.last)
        for leg in course.legs():
            tape.append((leg, place))
            place, train_loss = course.forward(leg, place)
        objective, adjoint = course.end(place)
        while tape:
            adjoint = course.back(*tape.pop(), adjoint)
        return Outcome(place, train_loss, objective, adjoint.raw), adjoint

    def check(self, update: Update, *, restart: bool) -> None:
        """Any rule will do."""

    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """Weights and slots, once an update."""
        return min(steps, self.last or steps) * (1 + slots)


@final
@dataclass(frozen=True)
class Checkpointed(Mode):
    """Reverse mode that keeps every ``every``-th place and finds those between by training again.

    The same derivative as :class:`Reverse`, for one more gradient an update. The second time, batches, dropout masks
    and statistics are those of the first.

    Args:
        every: Updates between two places that are kept; by default √T, which keeps about 2√T places in all.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            require_whole("every", self.every)
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 update, or None for √T; got {self.every}")

    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Forth; then back, stretch by stretch, each of which is run forth again first."""
        every, place = self._every(course.steps), start
        stretches: list[tuple[list[Leg], Place]] = []
        for leg in course.legs():
            if leg.number % every == 0:
                stretches.append(([], place))
            stretches[-1][0].append(leg)
            place, train_loss = course.forward(leg, place)
        objective, adjoint = course.end(place)
        while stretches:
            adjoint = self._back(course, *stretches.pop(), adjoint)
        return Outcome(place, train_loss, objective, adjoint.raw)

    def check(self, update: Update, *, restart: bool) -> None:
        """Any rule will do."""

    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """The places that are kept, and those of one stretch."""
        every = self._every(steps)
        return (math.ceil(steps / every) + every) * (1 + slots)

    def _every(self, steps: int) -> int:
        return self.every or math.ceil(math.sqrt(steps))

    def _back(self, course: Course, legs: list[Leg], place: Place, adjoint: Adjoint) -> Adjoint:
        places = [place]
        for leg in legs[:-1]:
            places.append(course.forward(leg, places[-1])[0])
        while places:
            adjoint = course.back(legs.pop(), places.pop(), adjoint)
        return adjoint


@final
@dataclass(frozen=True)
class DrMAD(Mode):
    """Reverse mode along the straight line between the first and the last weights, instead of the way training took.

    Before update t the weights are taken to be (1 − t/T) w₀ + (t/T) w_T; the slots of the update rule likewise, which
    the paper, where only the training loss has hypers, does not need. Memory does not grow with the number of updates.
    The derivative is exact where the weights did go straight, at even speed.

    Fu, Luo, Feng, Low and Chua 2016, https://arxiv.org/abs/1601.00917.
    """

    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Forth, and back along the line."""
        place, legs = start, []
        for leg in course.legs():
            legs.append(leg)
            place, train_loss = course.forward(leg, place)
        objective, adjoint = course.end(place)
        while legs:
            leg = legs.pop()
            adjoint = course.back(leg, _between(start, place, leg.number / course.steps), adjoint)
        return Outcome(place, train_loss, objective, adjoint.raw)

    def check(self, update: Update, *, restart: bool) -> None:
        """Any rule will do."""

    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """The two ends and the place between."""
        return 3 * (1 + slots)


def _between(start: Place, end: Place, part: float) -> Place:
    def mean(a: Vector, b: Vector) -> Vector:
        return {name: tensor.lerp(b[name], part) for name, tensor in a.items()}

    slots = {slot: mean(own, end.slots[slot]) for slot, own in start.slots.items()}
    return Place(mean(start.params, end.params), slots, end.buffers)
