"""Solvers for H x = b, where H is seen only through its products: ``solve(product, b) -> x``."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from bestresponse.vectors import Vector

Product = Callable[[Vector], Vector]


class Solver(abc.ABC):
    """A way to solve H x = b. Final subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def solve(self, product: Product, b: Vector) -> Vector:
        """An x with H x ≈ b, where ``product(v)`` is H v."""


@final
@dataclass(frozen=True)
class Identity(Solver):
    """x = b, as if the curvature were one everywhere. No product is taken."""

    def solve(self, product: Product, b: Vector) -> Vector:
        """``b`` itself."""
        return b
