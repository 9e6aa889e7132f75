"""Reversible training: momentum that forgets nothing, so that the way back needs no record of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.problem import Params
from bestresponse.unrolling.course import Course, Leg, Mode, Outcome, Place, Tangents
from bestresponse.updates import SGD, Update, resolve
from bestresponse.vectors import Vector

FRACTION: Final = 40  # bits behind the point: weights and velocities are multiples of 2⁻⁴⁰, about 1e-12
RATIO: Final = 30  # momenta are multiples of 2⁻³⁰
GROWTH: Final = 76  # updates in which full remainders grow by one float32 copy of many weights, for μ = 0.9
LIMIT: Final = 2.0**61  # whole numbers below it can be added without overflow


@final
@dataclass(frozen=True)
class Reversible(Mode):
    """Reverse mode that runs training backwards, bit for bit: memory hardly grows with the number of updates.

    Weights w and velocities v are whole multiples of 2⁻⁴⁰, so that additions can be undone exactly. The one step that
    loses information is v ← ⌊μv⌋, with μ a multiple of 2⁻³⁰: c numbers, one or two for μ = 0.9, lead to the same. Which
    of them it was, i, goes into a remainder r ← cr + i, a whole number per weight, from which it can be had again.
    How fast remainders grow is decided by the weight that needs most, as all are put away together: measured for
    μ = 0.9, 0.23 bits an update with 10 weights, 0.32 with 10⁴ and 0.41 with 3·10⁵, which is a 76th of a float32 copy
    of the weights; for μ = 0.99 0.12 bits.
    On the way back every update is undone with its own gradient, computed again; whether training came back to its
    first weights, bit for bit, is checked at the end. A training in which a number leaves ±2 million counts as
    diverged: its loss is NaN.

    The derivative is that of :class:`Reverse` at the weights of this rounded training. Only for ``SGD`` with momentum
    above zero and without Nesterov's change; needs gradients that come out the same, bit for bit, when computed twice.
    Maclaurin, Duvenaud and Adams 2015, https://arxiv.org/abs/1502.03492. Their v takes gradients times 1 − μ, where
    torch's convention holds here; and their way to multiply fills the low digits of v from the remainder, which packs
    it a little tighter and makes v far less exact.
    """

    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Forth, and back the same way."""
        rule, buffers = course.update, start.buffers
        if not isinstance(rule, SGD):
            raise TypeError(_ONLY.format(rule))
        track = _Track.at(start, rule, course)
        way: list[tuple[Leg, Params]] = []
        for leg in course.legs():
            way.append((leg, buffers))
            place = track.place(buffers)
            gradient, buffers = course.gradient(leg, place)
            track.forth(leg, place.params, gradient.params)
        end = track.place(buffers)
        if track.left_range():
            lost = torch.full_like(gradient.loss, math.nan)
            return Outcome(end, lost, lost, vectors.scale(math.nan, course.raw))
        objective, adjoint = course.end(end)
        while way:
            leg, buffers = way.pop()
            track.back(leg, buffers)
            adjoint = course.back(leg, track.place(buffers), adjoint)
        if not track.is_at(start):
            raise RuntimeError(
                "training run backwards did not come back to its first weights, so the hypergradient would be wrong: a "
                "gradient computed twice has come out differently. Call torch.use_deterministic_algorithms(True), take "
                "random numbers that are not torch's out of the loss, or use Checkpointed()"
            )
        return Outcome(end, gradient.loss, objective, adjoint.raw)

    def check(self, update: Update, *, restart: bool) -> None:
        """Only momentum can be run backwards."""
        if not isinstance(update, SGD) or not update.has_momentum or update.nesterov:
            raise ValueError(_ONLY.format(update))

    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """Weights, velocities and remainders in 64 bits each; and full remainders, as measured for μ = 0.9."""
        return 6 + steps / GROWTH


_ONLY: Final = (
    "Reversible() runs SGD with momentum backwards, without nesterov: SGD(lr, momentum=0.9); got {!r}. Checkpointed() "
    "takes any rule and needs little memory too"
)


@final
@dataclass
class _Track:
    """Training in whole numbers: weights and velocities as multiples of 2⁻⁴⁰, and what the momentum has cut off."""

    rule: SGD
    course: Course
    weights: Vector  # int64
    velocities: Vector  # int64
    remainders: dict[str, _Remainder]
    dtypes: dict[str, torch.dtype]
    largest: Tensor  # of all numbers so far

    @staticmethod
    def at(start: Place, rule: SGD, course: Course) -> _Track:
        """Standing at a place, rounded."""
        weights, velocities = _whole(start.params), _whole(start.slots["velocity"])
        track = _Track(
            rule,
            course,
            weights,
            velocities,
            {name: _Remainder(torch.zeros_like(w)) for name, w in weights.items()},
            {name: w.dtype for name, w in start.params.items()},
            torch.zeros((), dtype=torch.float64, device=course.problem.device),
        )
        for number in (*start.params.values(), *start.slots["velocity"].values()):
            track._note(number * 2.0**FRACTION)
        return track

    def place(self, buffers: Params) -> Place:
        """Where training stands, as weights that a model can have."""
        params = {name: _real(w).to(self.dtypes[name]) for name, w in self.weights.items()}
        return Place(
            params, {"velocity": {n: _real(v).to(self.dtypes[n]) for n, v in self.velocities.items()}}, buffers
        )

    def forth(self, leg: Leg, params: Params, gradient: Vector) -> None:
        """One update, from the gradient at the present weights."""
        for name, w in self.weights.items():
            rate, ratio, decay = self._settings(leg, name, w)
            kept = self.remainders[name].multiply(self.velocities[name], ratio, leg.number)
            velocity = kept + self._rounded(gradient[name].double() + decay * params[name].double())
            self.velocities[name] = velocity
            self.weights[name] = w - self._rounded(rate * _real(velocity))
            self._note(velocity)
            self._note(self.weights[name])

    def back(self, leg: Leg, buffers: Params) -> None:
        """The same update undone: first the weights, then their gradient again, and with it the velocities."""
        for name, w in self.weights.items():
            rate, _, _ = self._settings(leg, name, w)
            self.weights[name] = w + self._rounded(rate * _real(self.velocities[name]))
        place = self.place(buffers)
        gradient, _ = self.course.gradient(leg, place)
        for name, w in self.weights.items():
            _, ratio, decay = self._settings(leg, name, w)
            slope = gradient.params[name].double() + decay * place.params[name].double()
            kept = self.velocities[name] - self._rounded(slope)
            self.velocities[name] = self.remainders[name].divide(kept, ratio, leg.number)

    def left_range(self) -> bool:
        """Has a number become too large, or not a number?"""
        return not bool(self.largest < LIMIT)

    def is_at(self, start: Place) -> bool:
        """Is this the place, bit for bit?"""
        weights, velocities = _whole(start.params), _whole(start.slots["velocity"])
        return all(
            torch.equal(own[name], part)
            for own, parts in ((self.weights, weights), (self.velocities, velocities))
            for name, part in parts.items()
        )

    def _settings(self, leg: Leg, name: str, weight: Tensor) -> tuple[float | Tensor, Tensor, float | Tensor]:
        """The learning rate; n of the momentum n/2³⁰; the rule's own decay."""
        rate, momentum, decay = (
            resolve(setting, self.course.values, name, weight.shape, leg.number)
            for setting in (self.rule.lr, self.rule.momentum, self.rule.weight_decay)
        )
        ratio = torch.as_tensor(momentum, dtype=torch.float64, device=weight.device) * 2.0**RATIO
        return _double(rate), ratio.round().clamp(1, 2**RATIO).long(), _double(decay)

    def _rounded(self, number: Tensor) -> Tensor:
        scaled = number * 2.0**FRACTION
        self._note(scaled)
        return scaled.round().long()

    def _note(self, number: Tensor) -> None:
        self.largest = torch.maximum(self.largest, number.detach().abs().max().double())


@final
@dataclass
class _Remainder:
    """Which of the whole numbers that ⌊nv/2³⁰⌋ could have come from it was, for all updates: one whole number a weight.

    Numbers that are full are put away, and new ones are begun.
    """

    now: Tensor  # int64
    bound: int = 0  # no entry of it is larger
    full: list[tuple[int, Tensor]] = field(default_factory=list)  # the update before which it was put away

    def multiply(self, number: Tensor, n: Tensor, index: int) -> Tensor:
        """⌊n · number / 2³⁰⌋."""
        most = -(-(2**RATIO) // int(n.min()))  # numbers that lead to one and the same
        if (self.bound + 1) * most >= 2**62:
            self.bound = int(self.now.max())  # the truth, which is far below what might have been
        if (self.bound + 1) * most >= 2**62:
            self.full.append((index, self.now))
            self.now, self.bound = torch.zeros_like(self.now), 0
        self.bound = (self.bound + 1) * most
        whole, low = number >> RATIO, number & (2**RATIO - 1)
        part = low * n >> RATIO
        first, count = _origins(part, n)
        self.now = self.now * count + (low - first)
        return whole * n + part

    def divide(self, smaller: Tensor, n: Tensor, index: int) -> Tensor:
        """The number that :meth:`multiply` was given."""
        whole = torch.div(smaller, n, rounding_mode="floor")
        first, count = _origins(smaller - whole * n, n)
        rest = torch.div(self.now, count, rounding_mode="floor")
        number = (whole << RATIO) + first + (self.now - rest * count)
        self.now = rest
        if self.full and self.full[-1][0] == index:
            self.now = self.full.pop()[1]
        return number


def _origins(part: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """The least whole x with ⌊nx/2³⁰⌋ = part, and how many there are, for 0 ≤ part < n."""
    first = torch.div((part << RATIO) + n - 1, n, rounding_mode="floor")
    fewest = torch.div(2**RATIO, n, rounding_mode="floor")
    return first, fewest + (n * (first + fewest) < (part + 1) << RATIO)


def _whole(vector: Vector) -> Vector:
    return {name: (part.double() * 2.0**FRACTION).round().long() for name, part in vector.items()}


def _real(number: Tensor) -> Tensor:
    return number.double() * 2.0**-FRACTION


def _double(setting: float | Tensor) -> float | Tensor:
    return setting.double() if isinstance(setting, Tensor) else setting
