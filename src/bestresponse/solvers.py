"""Solvers for H x = b, where H is symmetric and seen only through its products: ``solve(product, b) -> Solution``.

A solver never prints, warns or raises at a system it cannot solve: it returns the best x it has, and says in
``Solution.trouble`` what was wrong, by how much, and what to try. Who asked for the solution passes that on.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.parts import require_whole
from bestresponse.tolerances import Tolerance
from bestresponse.vectors import Vector

Product = Callable[[Vector], Vector]


@final
@dataclass(frozen=True, eq=False)
class Solution:
    """What a solver found.

    Attributes:
        x: H x ≈ b.
        residual: ‖b − H x‖ / ‖b‖, with the H of the products: a damping counts as error. ``None`` where a solver does
            not know it.
        products: How many products it took.
        trouble: A sentence or two where the system could not be solved as asked; else empty.
    """

    x: Vector
    residual: float | None = None
    products: int = 0
    trouble: str = ""


@final
@dataclass(frozen=True, eq=False)
class Turn:
    """What a solver is told besides the system.

    Attributes:
        number: How many systems of this run were solved before, for tolerances that fall.
        start: An x to start from, such as the last solution. One that is worse than zero is not used.
        generator: The only source of random numbers.
    """

    number: int = 0
    start: Vector | None = None
    generator: torch.Generator | None = None


class Solver(abc.ABC):
    """A way to solve H x = b. Final subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def solve(self, product: Product, b: Vector, turn: Turn) -> Solution:
        """An x with H x ≈ b, where ``product(v)`` is H v."""


@final
@dataclass(frozen=True)
class Identity(Solver):
    """x = b, as if the curvature were one everywhere. No product is taken."""

    def solve(self, product: Product, b: Vector, turn: Turn = Turn()) -> Solution:
        """``b`` itself."""
        return Solution(b)


@final
@dataclass(frozen=True)
class Neumann(Solver):
    """The Neumann series x = lr · Σₖ (1 − lr H)ᵏ b, k from 0 to ``terms``: so many steps of gradient descent.

    Computed as x ← x + lr (b − H x), which from x = 0 is the same series and can start anywhere else. It converges if
    lr times the largest curvature is below 2, and ignores curvatures below 1 / (lr · terms).
    Lorraine, Vicol and Duvenaud 2020, https://arxiv.org/abs/1911.02590.

    The residual is that of x before its last term, which needs no further product; the last term only lowers it. A
    series that diverges is cut before the term after which the residual grew. Numbers are read from the device once.

    Args:
        terms: Terms after the first; also the products taken. With 0, x = lr · b. A start costs one product more.
        lr: The step; that of the weights' SGD makes x the adjoint of as many more training updates.
    """

    terms: int = 10
    lr: float = 0.1

    def __post_init__(self) -> None:
        require_whole("terms", self.terms)
        _require(self, self.terms >= 0 and self.lr > 0, "terms >= 0 and lr > 0")

    def solve(self, product: Product, b: Vector, turn: Turn = Turn()) -> Solution:
        """The truncated series."""
        x, residual, products = _begin(product, b, turn.start)
        sizes = [vectors.norm(residual)]
        best, least = x, sizes[0]
        for _ in range(self.terms):
            x = vectors.axpy(self.lr, residual, x)
            residual = vectors.axpy(-1.0, product(x), b)
            sizes.append(vectors.norm(residual))
            better = sizes[-1] <= least  # not where it is NaN
            best = {name: torch.where(better, part, best[name]) for name, part in x.items()}
            least = torch.where(better, sizes[-1], least)
        x = vectors.axpy(self.lr, residual, x)
        length, last, lowest = torch.stack([vectors.norm(b), sizes[-1], least]).tolist()
        if simple := _simple(b, length, products + self.terms):
            return simple
        if last <= length:
            return Solution(x if last <= lowest else best, lowest / length, products + self.terms)
        return Solution(
            best,
            lowest / length,
            products + self.terms,
            f"The Neumann series diverges: after {self.terms} terms ‖b − Hx‖ is {last / length:.3g} times ‖b‖; it is "
            f"used up to its best term, with {lowest / length:.3g}. Lower lr = {self.lr:g}, which must be below "
            "2 / (largest curvature); where curvature is negative, take fewer terms or average over more batches",
        )


@final
@dataclass(frozen=True)
class CG(Solver):
    """Conjugate gradients on (H + damping) x = b, for positive curvature. Few steps where curvatures come in groups.

    Hestenes and Stiefel 1952. With a falling tolerance and a start it is the solver of Pedregosa 2016,
    https://arxiv.org/abs/1602.02355.

    Along a direction of negative curvature there is no solution to move to: the steps end there. Then, and where the
    residual ends above ‖b‖, x is the iterate with the smallest residual so far. Every step waits for the device once,
    to read the curvature and the residual.

    Args:
        steps: At most so many, each with one product. A start costs one product more.
        damping: Added to the curvature. Where minibatches or the training so far leave it negative, a value above the
            largest negative one makes the system solvable, at the price of a bias.
        tolerance: Stop at ‖b − (H + damping) x‖ ≤ tolerance · ‖b‖; a number, or a :class:`Tolerance` that falls from
            solve to solve. Never below the precision of the weights.
    """

    steps: int = 20
    damping: float = 0.0
    tolerance: float | Tolerance = 1e-3

    def __post_init__(self) -> None:
        require_whole("steps", self.steps)
        if not isinstance(self.tolerance, Tolerance | float | int):
            raise TypeError(f"tolerance must be a number or a Tolerance, such as 1e-3; got {self.tolerance!r}")
        fine = isinstance(self.tolerance, Tolerance) or self.tolerance >= 0
        _require(self, self.steps >= 1 and self.damping >= 0 and fine, "steps >= 1, damping >= 0 and tolerance >= 0")

    def solve(self, product: Product, b: Vector, turn: Turn = Turn()) -> Solution:
        """The iterate that meets the tolerance, or the last one."""

        def damped(v: Vector) -> Vector:
            return vectors.axpy(self.damping, v, product(v)) if self.damping else product(v)

        tolerance = self.tolerance.at(turn.number) if isinstance(self.tolerance, Tolerance) else self.tolerance
        tolerance = max(tolerance, torch.finfo(next(iter(b.values())).dtype).eps)
        x, residual, products = _begin(damped, b, turn.start)
        direction, square = residual, vectors.dot(residual, residual)
        whole, now = torch.stack([vectors.dot(b, b), square]).tolist()
        if simple := _simple(b, whole, products):
            return simple
        trouble, best, least = "", (x, residual), now
        for step in range(self.steps):
            if now <= tolerance**2 * whole:
                break
            moved = damped(direction)
            products += 1
            curvature = vectors.dot(direction, moved)
            rate = square / curvature
            next_residual = vectors.axpy(-rate, moved, residual)
            next_square = vectors.dot(next_residual, next_residual)
            bend, after, length = torch.stack([curvature, next_square, vectors.dot(direction, direction)]).tolist()
            if trouble := self._wrong(step, bend, after, length):
                break
            x = vectors.axpy(rate, direction, x)
            direction = vectors.axpy(next_square / square, direction, next_residual)
            residual, square, now = next_residual, next_square, after
            if now <= least:
                best, least = (x, residual), now
        if not trouble and now > whole:
            trouble = (
                f"After {products} products of conjugate gradients ‖b − (H + damping) x‖ is "
                f"{math.sqrt(now / whole):.3g} times ‖b‖. Give more steps than {self.steps}, or a damping"
            )
        if trouble:
            x, residual = best
        return Solution(x, _size(vectors.axpy(self.damping, x, residual), b)[0], products, trouble)

    def _wrong(self, step: int, bend: float, after: float, length: float) -> str:
        if not (math.isfinite(bend) and math.isfinite(after)):
            return f"The product of step {step + 1} of conjugate gradients is not finite. What was found before is used"
        if bend <= 0:
            return (
                f"Conjugate gradients met the negative curvature {bend / length:.3g} in step {step + 1}, and stopped "
                f"before it. Give a damping above {self.damping - bend / length:.3g} (now {self.damping:g}), average "
                "over more batches, or train longer before tuning"
            )
        return ""


@final
@dataclass(frozen=True)
class Nystrom(Solver):
    """x = (C W⁺ Cᵀ + damping)⁻¹ b, from ``rank`` columns C of H and W, the rows of C with the same numbers.

    One sketch, then an exact solution with it (Woodbury's formula): the products do not follow one another, and x is
    never more than ‖b‖ / damping, so that nothing can diverge. With all columns it is (H + damping)⁻¹ b; with fewer the
    curvature outside the sketch counts as the damping alone. Negative curvature in the sketch is left out.
    Hataya and Yamada 2023, https://proceedings.mlr.press/v206/hataya23a.html.

    Memory: ``rank`` vectors as large as the weights. Takes ``rank`` products, and one for the residual.

    Args:
        rank: How many columns, drawn anew each time.
        damping: Above 0. About the curvature that is left outside the sketch; in float32 not below a millionth of the
            largest curvature, where rounding is multiplied by the ratio of the two.
    """

    rank: int = 20
    damping: float = 0.1

    def __post_init__(self) -> None:
        require_whole("rank", self.rank)
        _require(self, self.rank >= 1 and self.damping > 0, "rank >= 1 and damping > 0")

    def solve(self, product: Product, b: Vector, turn: Turn = Turn()) -> Solution:
        """The solution with a fresh sketch."""
        if turn.generator is None:
            raise ValueError(
                "Nystrom draws columns at random, and needs a generator: "
                "br.Turn(generator=torch.Generator().manual_seed(0))"
            )
        device = turn.generator.device
        chosen = torch.randperm(vectors.numel(b), generator=turn.generator, device=device)[: self.rank].tolist()
        columns = {name: part.new_empty((len(chosen), *part.shape)) for name, part in b.items()}
        for i, unit in enumerate(_units(b, chosen)):
            for name, part in product(unit).items():
                columns[name][i] = part
        rows = torch.stack([_inner(columns, unit) for unit in _units(b, chosen)])  # (rank, rank): W
        flat = [part.reshape(len(chosen), -1) for part in columns.values()]
        gram = torch.stack([part @ part.T for part in flat]).sum(0)
        eps = torch.finfo(rows.dtype).eps
        small = self._woodbury(eps, *(part.cpu().double() for part in (rows, gram, _inner(columns, b))))
        inside = {name: torch.tensordot(small.to(part), part, dims=1) for name, part in columns.items()}
        x = vectors.scale(1 / self.damping, vectors.axpy(-1.0, inside, b))
        residual, length = _size(vectors.axpy(-1.0, product(x), b), b)
        if simple := _simple(b, length, len(chosen) + 1):
            return simple
        trouble = ""
        if not math.isfinite(residual):
            trouble = f"{_NOT_FINITE}, and neither is x"
        elif residual > 1:
            trouble = (
                f"With this sketch ‖b − Hx‖ is {residual:.3g} times ‖b‖: there is more curvature outside the "
                f"{len(chosen)} columns than damping = {self.damping:g}. Raise the damping or the rank"
            )
        return Solution(x, residual, len(chosen) + 1, trouble)

    def _woodbury(self, eps: float, rows: Tensor, gram: Tensor, seen: Tensor) -> Tensor:
        """T (damping + TᵀCᵀCT)⁻¹ Tᵀ Cᵀb with T Tᵀ = W⁺, which is all that is ``(rank, rank)``."""
        if not bool(torch.isfinite(gram).all()):
            return torch.full_like(seen, math.nan)  # nothing to fall back on: x is not finite either
        sizes, axes = torch.linalg.eigh((rows + rows.T) / 2)
        kept = sizes > sizes.abs().max() * len(sizes) * eps  # the rest is negative, or rounding of the products
        root = axes[:, kept] / sizes[kept].sqrt()
        inner = root.T @ gram @ root
        return root @ torch.linalg.solve(
            inner + self.damping * torch.eye(len(inner), device="cpu").to(inner), root.T @ seen
        )


@final
@dataclass(frozen=True)
class Dense(Solver):
    """The whole matrix, one product a column, and an exact solution: the reference for small problems.

    Args:
        damping: Added to the curvature.
        largest: More weights than this are refused: the matrix has the square of their number.
    """

    damping: float = 0.0
    largest: int = 3000

    def __post_init__(self) -> None:
        _require(self, self.damping >= 0 and self.largest >= 1, "damping >= 0 and largest >= 1")

    def solve(self, product: Product, b: Vector, turn: Turn = Turn()) -> Solution:
        """The exact solution; that of least squares where the matrix is singular."""
        count = vectors.numel(b)
        if count > self.largest:
            raise ValueError(
                f"Dense takes one product for each weight and forms a {count:,} × {count:,} matrix: it is meant for at "
                f"most {self.largest:,} weights. Use br.CG(), or raise largest"
            )
        matrix = torch.stack([vectors.flatten(product(unit)) for unit in _units(b, range(count))], 1)
        flat = vectors.flatten(b)
        wide, trouble = matrix.cpu().double(), ""
        if bool(torch.isfinite(wide).all()):
            solved, trouble = self._solve(wide, flat.cpu().double(), torch.finfo(matrix.dtype).eps)
            x = solved.to(flat)
        else:
            x, trouble = torch.full_like(flat, math.nan), f"{_NOT_FINITE}, and neither is x"
        residual, length = _size(vectors.unflatten(flat - matrix @ x, b), b)
        if simple := _simple(b, length, count):
            return simple
        if not trouble and not residual <= 1:
            trouble = f"‖b − Hx‖ is {residual:.3g} times ‖b‖: H + damping is close to singular. Give another damping"
        return Solution(vectors.unflatten(x, b), residual, count, trouble)

    def _solve(self, matrix: Tensor, b: Tensor, eps: float) -> tuple[Tensor, str]:
        """x, and what was wrong. ``eps`` is the precision that the products have."""
        count = len(b)
        system = (matrix + matrix.T) / 2 + self.damping * torch.eye(count, device="cpu").to(matrix)
        bends, axes = torch.linalg.eigh(system)
        sizes = bends.abs()
        # Rounding of the products alone makes curvatures of this size out of zeros.
        kept = sizes > 4 * math.sqrt(count) * eps * sizes.max()
        if bool(kept.all()):
            return torch.linalg.solve(system, b), ""
        inverse = torch.where(kept, 1 / bends, 0.0)
        return axes @ (inverse * (axes.T @ b)), (
            f"H is singular, to its precision, along {int((~kept).sum())} of {count} directions: x is the shortest "
            "solution in least squares. Give a damping"
        )


_NOT_FINITE: Final = "A product of H is not finite"


def _begin(product: Product, b: Vector, start: Vector | None) -> tuple[Vector, Vector, int]:
    """Where to begin, the residual there, and the products that took: at ``start``, unless zero is better."""
    zero = vectors.zeros_like(b)
    if start is None:
        return zero, b, 0
    residual = vectors.axpy(-1.0, product(start), b)
    better = vectors.norm(residual) <= vectors.norm(b)
    x = {name: torch.where(better, start[name], part) for name, part in zero.items()}
    return x, {name: torch.where(better, residual[name], part) for name, part in b.items()}, 1


def _simple(b: Vector, length: float, products: int) -> Solution | None:
    """What needs no solving: b = 0, and a b that is not finite, which nobody should overlook."""
    if length == 0:
        return Solution(vectors.zeros_like(b), 0.0, products)
    if not math.isfinite(length):
        return Solution(b, None, products, "b, the slope of the validation loss, is not finite: x is the same")
    return None


def _size(residual: Vector, b: Vector) -> tuple[float, float]:
    """‖residual‖ / ‖b‖, and ‖b‖."""
    size, length = torch.stack([vectors.norm(residual), vectors.norm(b)]).tolist()
    return size / (length or 1.0), length


def _units(like: Vector, places: Iterable[int]) -> Iterator[Vector]:
    """The unit vectors with these numbers, counted through all parts."""
    for place in places:
        unit, before = {}, 0
        for name, part in like.items():
            flat = part.new_zeros(part.numel())  # not zeros_like, whose strides may be others (channels_last)
            if before <= place < before + part.numel():
                flat[place - before] = 1.0
            unit[name] = flat.view(part.shape)
            before += part.numel()
        yield unit


def _inner(columns: Vector, b: Vector) -> Tensor:
    """⟨column, b⟩ for each column, ``(rank,)``."""
    return torch.stack([part.reshape(len(part), -1) @ b[name].reshape(-1) for name, part in columns.items()]).sum(0)


def _require(part: Solver, fine: bool, rule: str) -> None:
    if not fine:
        raise ValueError(f"{type(part).__name__} needs {rule}; got {part!r}")
