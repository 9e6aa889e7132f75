"""A course of training updates, and the derivatives of its single updates: what all modes of unrolling are made of."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import Gradient, Products, seeded, train_gradient, train_products, train_tangents
from bestresponse.problem import Params, Problem
from bestresponse.space import Raw, Space, Values
from bestresponse.state import Cost
from bestresponse.stream import Draw, Stream
from bestresponse.updates import Slots, Update
from bestresponse.vectors import Vector


class Leg(NamedTuple):
    """One update of a course: its number (from 0), its batch and its random numbers."""

    number: int
    draw: Draw
    seed: int


class Place(NamedTuple):
    """Where training stands before an update. Nothing in it is ever changed in place."""

    params: Params
    slots: Slots
    buffers: Params


class Adjoint(NamedTuple):
    """The derivative of an objective at the end of a course in a place on it; and in raw, for all updates after it."""

    params: Params
    slots: Slots
    raw: Raw


class Tangents(NamedTuple):
    """The derivative of a place in each single number of raw: the first dimension of every tensor counts them."""

    params: Params
    slots: Slots


@final
@dataclass
class Outcome:
    """What a mode of unrolling gives.

    Attributes:
        end: Where training stands at the end.
        train_loss: Of the last update.
        objective: The validation loss at the end.
        raw: The hypergradient.
        tangents: Those of the end, where a mode carries them on.
    """

    end: Place
    train_loss: Tensor
    objective: Tensor
    raw: Raw
    tangents: Tangents | None = None


class Mode(abc.ABC):
    """A way to differentiate through a course of training updates. Final subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Train from ``start`` to the end of the course; the derivative of the objective there in raw."""

    @abc.abstractmethod
    def check(self, update: Update, *, restart: bool) -> None:
        """Raise where an update rule cannot be unrolled so."""

    @abc.abstractmethod
    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """How many numbers are held at most for each weight, beside one gradient's."""


@final
@dataclass(frozen=True)
class Course:
    """``steps`` training updates, one after another, that derivatives are taken of.

    Buffers count as constants: statistics that a layer gathers move with the updates, and nothing is differentiated
    through them.

    Args:
        problem: The problem.
        raw: The hypers.
        update: The rule of one update.
        steps: How many.
        train: Where batches come from.
        look: The objective at the end: its value, and its derivatives in weights and raw.
        generator: Gives each update the seed of its own random numbers.
        cost: What is used is added here.
        count: Updates before this course since the slots were zero.
        products: Of second derivatives.
    """

    problem: Problem
    raw: Raw
    update: Update
    steps: int
    train: Stream
    look: Callable[[Place], Gradient]
    generator: torch.Generator
    cost: Cost
    count: int = 0
    products: Products = "exact"
    _own: Space | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        reads = self.update.reads
        own = Space(**{name: self.problem.space[name] for name in reads}) if reads else None
        object.__setattr__(self, "_own", own)

    def legs(self) -> Iterator[Leg]:
        """The updates to come; each batch is drawn when it is its turn."""
        for number in range(self.steps):
            seed = torch.randint(2**63 - 1, (), generator=self.generator, device=self.generator.device)
            self.cost.train_batches += 1
            yield Leg(number, self.train.draw(), int(seed))

    def gradient(self, leg: Leg, place: Place) -> tuple[Gradient, Params]:
        """The training gradient of an update, and the buffers that it leaves."""
        buffers = vectors.clone(place.buffers)
        with seeded(leg.seed, self.problem.device):
            gradient = train_gradient(self.problem, place.params, self.raw, leg.draw(), buffers=buffers)
        self.cost.gradients += 1
        return gradient, buffers

    def forward(self, leg: Leg, place: Place) -> tuple[Place, Tensor]:
        """Where an update leads, and the training loss."""
        gradient, buffers = self.gradient(leg, place)
        return Place(
            *self._update(leg, place.params, place.slots, gradient.params, self.values), buffers
        ), gradient.loss

    def back(self, leg: Leg, place: Place, adjoint: Adjoint) -> Adjoint:
        """The adjoint at ``place``, from the one after the update there.

        With the update (w⁺, s⁺) = U(w, s, g, λ), g = ∂L_T/∂w(w, λ), and the adjoint a of (w⁺, s⁺): all derivatives of
        ⟨a, U⟩ are taken with g held, and the one in g is the vector v of the products Hv and (∂²L_T/∂λ∂w)v.
        """
        through: list[Adjoint] = []

        def by_gradient(gradient: Vector) -> Vector:
            of_gradient, rest = self._back_through_rule(leg, place, gradient, adjoint)
            through.append(rest)
            return of_gradient

        with seeded(leg.seed, self.problem.device):
            curvature, mixed = train_products(
                self.problem,
                place.params,
                self.raw,
                leg.draw(),
                by_gradient,
                buffers=place.buffers,
                products=self.products,
            )
        self.cost.gradients += 2 if self.products == "exact" else 3
        (rest,) = through
        raw = vectors.axpy(1.0, mixed, adjoint.raw)
        for leaf, part in rest.raw.items():
            raw[leaf] = raw[leaf] + part
        return Adjoint(vectors.axpy(1.0, curvature, rest.params), rest.slots, raw)

    def along(
        self, leg: Leg, place: Place, tangents: Tangents, units: Raw, *, vectorize: bool
    ) -> tuple[Place, Tensor, Tangents]:
        """As :meth:`forward`, with the tangents carried along. ``units`` are the directions in raw, ``(n, *shape)``."""
        buffers = vectors.clone(place.buffers)
        with seeded(leg.seed, self.problem.device):
            gradient, changes = train_tangents(
                self.problem,
                place.params,
                self.raw,
                leg.draw(),
                (tangents.params, units),
                buffers=buffers,
                products=self.products,
                vectorize=vectorize,
            )
        self.cost.gradients += 1 + 2 * next(iter(units.values())).shape[0]

        after = self._update(leg, place.params, place.slots, gradient.params, self.values)
        moved = self._along_rule(leg, place, gradient.params, tangents, changes, units)
        return Place(*after, buffers), gradient.loss, moved

    def end(self, place: Place) -> tuple[Tensor, Adjoint]:
        """The objective at the end of the course, and the adjoint there."""
        objective, slope, direct = self.look(place)
        slots = {slot: vectors.zeros_like(part) for slot, part in place.slots.items()}
        return objective, Adjoint(slope, slots, direct)

    @cached_property
    def values(self) -> Values:
        """The hypers that the update rule reads, in natural units."""
        return self._own.values(self.raw) if self._own else {}

    def _update(self, leg: Leg, params: Params, slots: Slots, gradient: Vector, values: Values) -> tuple[Params, Slots]:
        return self.update.step(params, slots, gradient, values, index=leg.number, count=self.count + leg.number)

    def _back_through_rule(self, leg: Leg, place: Place, gradient: Vector, adjoint: Adjoint) -> tuple[Vector, Adjoint]:
        """The derivative of ⟨adjoint, U⟩ in the gradient; and in the weights, the slots and raw, with it held."""
        rule = self._rule(leg, place, gradient)
        cotangents = _parts(adjoint.params, adjoint.slots)
        grads = iter(
            torch.autograd.grad(rule.after, rule.inputs, cotangents, allow_unused=True, materialize_grads=True)
        )
        of_w = {name: next(grads) for name in place.params}
        of_slots = {slot: {name: next(grads) for name in parts} for slot, parts in place.slots.items()}
        of_g = {name: next(grads) for name in gradient}
        return of_g, Adjoint(of_w, of_slots, {leaf: next(grads) for leaf in rule.leaves})

    def _along_rule(
        self, leg: Leg, place: Place, gradient: Vector, tangents: Tangents, changes: Vector, units: Raw
    ) -> Tangents:
        """How weights and slots after an update change, when those before, the gradient and raw change so."""
        rule = self._rule(leg, place, gradient)
        # The derivative along x of U is the derivative in u of ⟨∂⟨u, U⟩/∂x, change of x⟩: backward passes do for both.
        u = [torch.zeros_like(part, requires_grad=True) for part in rule.after]
        back = torch.autograd.grad(
            rule.after, rule.inputs, u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        along = [*_parts(tangents.params, tangents.slots), *changes.values(), *(units[leaf] for leaf in rule.leaves)]
        pairs = [pair for pair in zip(back, along, strict=True) if pair[0].requires_grad]
        outputs, directions = zip(*pairs, strict=True)
        moved = iter(torch.autograd.grad(outputs, u, directions, is_grads_batched=True))
        params = {name: next(moved) for name in place.params}
        return Tangents(params, {slot: {name: next(moved) for name in parts} for slot, parts in place.slots.items()})

    def _rule(self, leg: Leg, place: Place, gradient: Vector) -> _Rule:
        """One update by itself, with a graph of its own."""
        with torch.enable_grad():
            w, g = vectors.leaves(place.params), vectors.leaves(gradient)
            slots = {slot: vectors.leaves(parts) for slot, parts in place.slots.items()}
            raw = vectors.leaves({leaf: self.raw[leaf] for leaf in (self._own.leaves if self._own else ())})
            after = self._update(leg, w, slots, g, self._own.values(raw) if self._own else {})
        return _Rule(_parts(*after), [*_parts(w, slots), *g.values(), *raw.values()], list(raw))


class _Rule(NamedTuple):
    """An update: weights and slots after it; the weights, slots, gradient and raw it is made of; raw's leaves."""

    after: list[Tensor]
    inputs: list[Tensor]
    leaves: list[str]


def _parts(params: Vector, slots: Slots) -> list[Tensor]:
    return [*params.values(), *(part for slot in slots.values() for part in slot.values())]
