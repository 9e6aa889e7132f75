"""Tolerances that fall as a run goes on: rough answers while the hypers are far off, good ones near the end.

With a sequence whose sum is finite, as all of these with ``power`` above 1, gradient descent on the inexact
hypergradients converges as on exact ones: Pedregosa 2016, https://arxiv.org/abs/1602.02355.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final


class Tolerance(abc.ABC):
    """A tolerance that falls from one solve to the next."""

    @abc.abstractmethod
    def at(self, number: int) -> float:
        """The tolerance of solve number ``number`` (from 0)."""


@final
@dataclass(frozen=True)
class GeometricTolerance(Tolerance):
    """``first · ratioᵏ`` for solve number k."""

    first: float = 0.1
    ratio: float = 0.9

    def __post_init__(self) -> None:
        if not (self.first > 0 and 0 < self.ratio < 1):
            raise ValueError(f"GeometricTolerance needs first > 0 and 0 < ratio < 1; got {self!r}")

    def at(self, number: int) -> float:
        """The tolerance of solve number ``number`` (from 0)."""
        return self.first * self.ratio**number


@final
@dataclass(frozen=True)
class PowerTolerance(Tolerance):
    """``first / (k + 1)^power`` for solve number k: quadratic with 2, cubic with 3."""

    first: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        if not (self.first > 0 and self.power > 0):
            raise ValueError(f"PowerTolerance needs first > 0 and power > 0; got {self!r}")

    def at(self, number: int) -> float:
        """The tolerance of solve number ``number`` (from 0)."""
        return self.first / (number + 1) ** self.power
