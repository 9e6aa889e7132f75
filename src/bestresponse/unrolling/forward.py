"""Forward mode: the derivative of the weights in every hyper is carried along with training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from bestresponse import vectors
from bestresponse.space import Raw
from bestresponse.unrolling.course import Course, Mode, Outcome, Place, Tangents
from bestresponse.updates import Update
from bestresponse.vectors import Vector


@final
@dataclass(frozen=True)
class Forward(Mode):
    """Forward mode: dw/dλ is carried along, one tangent as large as the weights for each single number of the hypers.

    Exact, and memory does not grow with the number of updates; but it does with the number of hypers, as the time does:
    for some dozens. Franceschi, Donini, Frasconi and Pontil 2017, https://arxiv.org/abs/1703.01785.

    Args:
        carry: Go on with the tangents from one change of the hypers to the next, rather than from zero: real-time
            hyperparameter optimization, which sees all of training from a few updates at a time. For courses that go
            on from the present weights.
        vectorize: All tangents of an update at once. Switch it off for models with an operation whose backward pass
            has no batching rule (an error says so), or to save memory.
    """

    carry: bool = False
    vectorize: bool = True

    def run(self, course: Course, start: Place, tangents: Tangents | None) -> Outcome:
        """Forth."""
        units, count = _units(course.raw), vectors.numel(course.raw)
        if tangents is None:
            slots = {slot: _zeros(part, count) for slot, part in start.slots.items()}
            tangents = Tangents(_zeros(start.params, count), slots)
        place = start
        for leg in course.legs():
            place, train_loss, tangents = course.along(leg, place, tangents, units, vectorize=self.vectorize)
        objective, adjoint = course.end(place)
        through = torch.stack(
            [part.reshape(count, -1) @ adjoint.params[name].flatten() for name, part in tangents.params.items()]
        ).sum(0)  # (n,)
        raw = vectors.axpy(1.0, vectors.unflatten(through.to(course.problem.raw_dtype), course.raw), adjoint.raw)
        return Outcome(place, train_loss, objective, raw, tangents if self.carry else None)

    def check(self, update: Update, *, restart: bool) -> None:
        """Any rule will do; tangents can be carried on only where training goes on."""
        if self.carry and restart:
            raise ValueError(
                "Forward(carry=True) goes on with the tangents of the weights, so the weights must go on too: give "
                "restart=False"
            )

    def copies(self, steps: int, hypers: int, slots: int) -> float:
        """The tangents before and after an update, and those of the gradient."""
        return hypers * (2 * (1 + slots) + 1)


def _units(raw: Raw) -> Raw:
    """Every direction in raw by itself: ``(n, *shape)``."""
    any_leaf = next(iter(raw.values()))
    eye = torch.eye(vectors.numel(raw), dtype=any_leaf.dtype, device=any_leaf.device)
    return vectors.unflatten(eye, raw)


def _zeros(vector: Vector, count: int) -> Vector:
    return {name: part.new_zeros(count, *part.shape) for name, part in vector.items()}
