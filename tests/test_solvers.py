"""Solvers against dense algebra; and the wrong ones of this field, which the same checks must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bestresponse as br
from bestresponse import vectors
from bestresponse.vectors import Vector

wide = settings(deadline=None, max_examples=25, derandomize=True)


def precise() -> bool:
    return torch.get_default_dtype() == torch.float64


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    draw = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


class System:
    """A random symmetric system in three parts, with curvatures between two bounds, and its dense algebra."""

    def __init__(self, size: int = 8, low: float = 1.0, high: float = 10.0, seed: int = 0, bends: Any = None) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        axes, _ = torch.linalg.qr(normal(generator, size, size))
        self.bends = torch.logspace(0, 1, size).log10() * (high - low) + low if bends is None else torch.tensor(bends)
        self.matrix = axes @ torch.diag(self.bends) @ axes.T
        self.matrix = (self.matrix + self.matrix.T) / 2
        self.b = self.parts(normal(generator, size))
        self.other = self.parts(normal(generator, size))
        self.products = 0

    def parts(self, flat: Tensor) -> Vector:
        """A scalar, a matrix and the rest."""
        return {"scalar": flat[0], "matrix": flat[1:5].view(2, 2), "rest": flat[5:]}

    def product(self, vector: Vector) -> Vector:
        self.products += 1
        return self.parts(self.matrix @ vectors.flatten(vector))

    def dense(self, damping: float = 0.0, b: Vector | None = None) -> Tensor:
        flat = vectors.flatten(self.b if b is None else b)
        return torch.linalg.solve(self.matrix + damping * torch.eye(len(flat)), flat)

    def residual(self, x: Vector) -> float:
        b = vectors.flatten(self.b)
        return float((b - self.matrix @ vectors.flatten(x)).norm() / b.norm())


def turn(**given: Any) -> br.Turn:
    return br.Turn(generator=torch.Generator("cpu").manual_seed(3), **given)


def close(actual: Vector | Tensor, expected: Tensor, relative: float) -> None:
    flat = actual if isinstance(actual, Tensor) else vectors.flatten(actual)
    assert flat.shape == expected.shape
    assert float((flat - expected).norm()) <= relative * float(expected.norm())


# What every solver must do, given what it needs to converge


def it_solves(solver: br.Solver, system: System, damping: float = 0.0) -> None:
    solution = solver.solve(system.product, system.b, turn())
    close(solution.x, system.dense(damping), 1e-9 if precise() else 1e-3)


def it_is_linear(solver: br.Solver, system: System, damping: float = 0.0) -> None:
    """The solution of 3a − 2b is 3 times that of a minus 2 times that of b."""
    both = vectors.axpy(-2.0, system.other, vectors.scale(3.0, system.b))
    a, b, of_both = (
        vectors.flatten(solver.solve(system.product, of, turn()).x) for of in (system.b, system.other, both)
    )
    close(of_both, 3 * a - 2 * b, 1e-8 if precise() else 3e-3)


def its_inverse_is_symmetric(solver: br.Solver, system: System, damping: float = 0.0) -> None:
    """⟨H⁻¹a, b⟩ = ⟨a, H⁻¹b⟩."""
    a, b = (solver.solve(system.product, of, turn()).x for of in (system.b, system.other))
    size = float(vectors.norm(a) * vectors.norm(system.other))
    error = 1e-9 if precise() else 1e-3
    assert float(vectors.dot(a, system.other)) == pytest.approx(float(vectors.dot(b, system.b)), abs=error * size)


def its_residual_is_true(solver: br.Solver, system: System, damping: float = 0.0) -> None:
    solution = solver.solve(system.product, system.b, turn())
    assert solution.residual == pytest.approx(system.residual(solution.x), rel=1e-3, abs=1e-9 if precise() else 1e-4)


def its_products_are_counted(solver: br.Solver, system: System, damping: float = 0.0) -> None:
    before = system.products
    assert solver.solve(system.product, system.b, turn()).products == system.products - before


CHECKS = [it_solves, it_is_linear, its_inverse_is_symmetric, its_residual_is_true, its_products_are_counted]
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
RIGHT: list[tuple[br.Solver, float]] = [
    (br.Dense(), 0.0),
    (br.Dense(damping=0.7), 0.7),
    (br.CG(200, tolerance=0.0), 0.0),
    (br.CG(200, 0.7, tolerance=0.0), 0.7),
    (br.Neumann(600, 0.15), 0.0),
    (br.Nystrom(50, damping=0.7), 0.7),
]


@each_check
@pytest.mark.parametrize(("solver", "damping"), RIGHT, ids=str)
def test_right_solvers(solver: br.Solver, damping: float, check: Callable[..., None]) -> None:
    for seed in range(3):
        check(solver, System(seed=seed), damping)


@given(
    size=st.integers(6, 12),
    seed=st.integers(0, 10_000),
    low=st.floats(0.1, 1.0),
    ratio=st.floats(1.0, 100.0),
    solver=st.sampled_from([br.Dense(0.1), br.CG(300, 0.1, 0.0), br.Nystrom(50, 0.1)]),
)
@wide
def test_the_direct_and_the_iterative_agree_with_dense_algebra(
    size: int, seed: int, low: float, ratio: float, solver: br.Solver
) -> None:
    system = System(size, low, low * ratio, seed)
    close(solver.solve(system.product, system.b, turn()).x, system.dense(0.1), 1e-8 if precise() else 1e-2)


# Wrong solvers that have been published


@final
@dataclass(frozen=True)
class ForgetsTheScale(br.Solver):
    """Conjugate gradients whose residual moves by Hd, and not by rate · Hd."""

    steps: int = 200

    def solve(self, product: Any, b: Vector, turn: br.Turn) -> br.Solution:
        x, residual, direction = vectors.zeros_like(b), b, b
        for step in range(self.steps):
            square, moved = vectors.dot(residual, residual), product(direction)
            if square < 1e-25 or not torch.isfinite(square):
                return br.Solution(x, float(square.sqrt() / vectors.norm(b)), step + 1)
            rate = square / vectors.dot(direction, moved)
            x = vectors.axpy(rate, direction, x)
            residual = vectors.axpy(-1.0, moved, residual)
            direction = vectors.axpy(vectors.dot(residual, residual) / square, direction, residual)
        return br.Solution(x, float(vectors.norm(residual) / vectors.norm(b)), self.steps)


@final
@dataclass(frozen=True)
class BuildsOnTheOldResidual(br.Solver):
    """Conjugate gradients whose new direction starts from the residual before."""

    steps: int = 20

    def solve(self, product: Any, b: Vector, turn: br.Turn) -> br.Solution:
        x, residual, direction = vectors.zeros_like(b), b, b
        for _ in range(self.steps):
            square, moved = vectors.dot(residual, residual), product(direction)
            rate = square / vectors.dot(direction, moved)
            x = vectors.axpy(rate, direction, x)
            after = vectors.axpy(-rate, moved, residual)
            direction = vectors.axpy(vectors.dot(after, after) / square, direction, residual)
            residual = after
        return br.Solution(x, float(vectors.norm(residual) / vectors.norm(b)), self.steps)


@final
@dataclass(frozen=True)
class TakesTheRateAtEachTerm(br.Solver):
    """A Neumann series that is multiplied by lr at every term, not once."""

    terms: int = 600
    lr: float = 0.15

    def solve(self, product: Any, b: Vector, turn: br.Turn) -> br.Solution:
        term = x = vectors.scale(self.lr, b)
        for _ in range(self.terms):
            term = vectors.scale(self.lr, vectors.axpy(-self.lr, product(term), term))
            x = vectors.axpy(1.0, term, x)
        return br.Solution(x, float(vectors.norm(term) / vectors.norm(b)), self.terms)


@final
@dataclass(frozen=True)
class SketchesWithoutItsMiddle(br.Solver):
    """The sketch C Cᵀ, without W⁺ between them."""

    damping: float = 0.7

    def solve(self, product: Any, b: Vector, turn: br.Turn) -> br.Solution:
        count = vectors.numel(b)
        columns = torch.stack([vectors.flatten(product(vectors.unflatten(row, b))) for row in torch.eye(count)], 1)
        x = torch.linalg.solve(columns @ columns.T + self.damping * torch.eye(count), vectors.flatten(b))
        return br.Solution(vectors.unflatten(x, b), None, count)


WRONG = [(ForgetsTheScale(), 0.0), (BuildsOnTheOldResidual(), 0.0), (TakesTheRateAtEachTerm(), 0.0)]
WRONG.append((SketchesWithoutItsMiddle(), 0.7))


@pytest.mark.parametrize(("solver", "damping"), WRONG, ids=str)
def test_wrong_solvers_are_found(solver: br.Solver, damping: float) -> None:
    for seed in range(3):
        with pytest.raises(AssertionError):
            it_solves(solver, System(seed=seed), damping)


@pytest.mark.parametrize("solver", [ForgetsTheScale(), TakesTheRateAtEachTerm()], ids=str)
def test_a_residual_that_is_not_true_is_found(solver: br.Solver) -> None:
    for seed in range(3):
        with pytest.raises(AssertionError):
            its_residual_is_true(solver, System(seed=seed))


@pytest.mark.parametrize("wrong", [ForgetsTheScale(), BuildsOnTheOldResidual()], ids=repr)
def test_where_the_wrong_ones_are_right(wrong: br.Solver) -> None:
    """With H = 1 they solve the system at once, so that a test with such an H says nothing."""
    system = System(bends=[1.0] * 8)
    one = type(wrong)(steps=1)  # type: ignore[call-arg]
    close(one.solve(system.product, system.b, turn()).x, system.dense(), 1e-9 if precise() else 1e-5)


# Each by its own formula


def test_identity_takes_no_product() -> None:
    system = System()
    solution = br.Identity().solve(system.product, system.b)
    assert solution.x is system.b
    assert (solution.residual, solution.products, system.products) == (None, 0, 0)


@pytest.mark.parametrize("terms", [0, 1, 2, 7, 40])
def test_a_truncated_neumann_series_is_its_polynomial(terms: int) -> None:
    """lr Σ_{k ≤ terms} (1 − lr H)ᵏ b; and the residual it reports is that without the last term."""
    system, lr = System(), 0.15
    shrink, b = torch.eye(8) - lr * system.matrix, vectors.flatten(system.b)
    polynomial = lr * sum((torch.linalg.matrix_power(shrink, k) for k in range(terms + 1)), torch.zeros(8, 8))
    solution = br.Neumann(terms, lr).solve(system.product, system.b)
    close(solution.x, polynomial @ b, 1e-12 if precise() else 1e-5)
    before = float((torch.linalg.matrix_power(shrink, terms) @ b).norm() / b.norm())
    assert solution.residual == pytest.approx(before, rel=1e-6 if precise() else 1e-3)
    assert solution.products == terms
    assert not solution.trouble


def test_t1_t2_is_a_neumann_series_without_terms() -> None:
    system = System()
    x = br.Neumann(0, 0.3).solve(system.product, system.b).x
    close(x, 0.3 * vectors.flatten(br.Identity().solve(system.product, system.b).x), 1e-12 if precise() else 1e-6)


def test_a_neumann_series_nears_the_solution_as_terms_grow() -> None:
    """At least by (1 − lr · lowest curvature) a term."""
    system = System(low=1.0, high=10.0)
    exact = system.dense()
    errors = [
        float((vectors.flatten(br.Neumann(terms, 0.15).solve(system.product, system.b).x) - exact).norm())
        for terms in (5, 10, 20, 40)
    ]
    for before, after, terms in zip(errors, errors[1:], (5, 10, 20), strict=False):
        assert after <= before * 0.85**terms * (1 + (1e-6 if precise() else 1e-2))


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cg_is_best_in_its_krylov_space(steps: int, damping: float, warm: bool) -> None:
    """x₀ + the combination of r, Ar, A²r, ... that solves the system projected on them."""
    system = System(9)
    start = vectors.scale(0.05, system.other) if warm else None
    a = system.matrix + damping * torch.eye(9)
    at = vectors.flatten(start) if start else torch.zeros(9)
    residual = vectors.flatten(system.b) - a @ at
    assert float(residual.norm()) <= float(vectors.norm(system.b))
    basis, _ = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(a, k) @ residual for k in range(steps)], 1))
    expected = at + basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ residual)
    solution = br.CG(steps, damping, 0.0).solve(system.product, system.b, br.Turn(start=start))
    close(solution.x, expected, 1e-10 if precise() else 1e-4)
    assert solution.products == steps + warm


def test_cg_stops_at_its_tolerance_and_not_before() -> None:
    system = System(40, 0.1, 100.0)
    for tolerance in (0.3, 1e-2, 1e-4):
        solution = br.CG(200, tolerance=tolerance).solve(system.product, system.b)
        assert solution.residual is not None
        assert solution.residual <= tolerance
        shorter = br.CG(solution.products - 1, tolerance=0.0).solve(system.product, system.b)
        assert shorter.residual is not None
        assert shorter.residual > tolerance


def test_cg_takes_its_tolerance_from_the_turn() -> None:
    system = System(40, 0.1, 100.0)
    solver = br.CG(200, tolerance=br.PowerTolerance(0.5, 2.0))
    for number, tolerance in ((0, 0.5), (3, 0.5 / 16), (9, 0.5 / 100)):
        falling = solver.solve(system.product, system.b, br.Turn(number))
        fixed = br.CG(200, tolerance=tolerance).solve(system.product, system.b)
        assert falling.products == fixed.products
        close(falling.x, vectors.flatten(fixed.x), 0.0)


def test_tolerances_fall_as_they_say() -> None:
    assert [br.GeometricTolerance(0.5, 0.1).at(k) for k in range(3)] == pytest.approx([0.5, 0.05, 0.005])
    assert [br.PowerTolerance(0.1, 3).at(k) for k in range(3)] == pytest.approx([0.1, 0.1 / 8, 0.1 / 27])


@pytest.mark.parametrize("rank", [1, 3, 7])
@pytest.mark.parametrize("damping", [0.1, 2.0])
def test_nystrom_is_its_closed_formula(rank: int, damping: float) -> None:
    """(C W⁻¹ Cᵀ + damping)⁻¹ b with the columns that its generator draws."""
    system = System()
    solution = br.Nystrom(rank, damping).solve(system.product, system.b, turn())
    chosen = torch.randperm(8, generator=torch.Generator("cpu").manual_seed(3), device="cpu")[:rank]
    columns = system.matrix[:, chosen]
    sketch = columns @ torch.linalg.inv(columns[chosen]) @ columns.T
    expected = torch.linalg.solve(sketch + damping * torch.eye(8), vectors.flatten(system.b))
    close(solution.x, expected, 1e-9 if precise() else 1e-3)
    assert solution.products == rank + 1
    assert solution.residual == pytest.approx(system.residual(solution.x), rel=1e-3)


def test_nystrom_leaves_out_what_is_rounding_in_its_sketch() -> None:
    """Ten columns of a matrix of rank two, in float32: the other eight curvatures of W are rounding, some above 0."""
    worst = 0.0
    for seed in range(60):
        draws = torch.Generator("cpu").manual_seed(seed)
        rows = torch.randn(2, 12, generator=draws, dtype=torch.float32, device="cpu")
        matrix = rows.T @ rows
        b = rows.T @ torch.randn(2, generator=draws, dtype=torch.float32, device="cpu")
        x = br.Nystrom(10, 1e-2).solve(lambda v, m=matrix: {"w": m @ v["w"]}, {"w": b}, br.Turn(generator=draws)).x["w"]
        damped = matrix.double() + 1e-2 * torch.eye(12, dtype=torch.float64, device="cpu")
        expected = torch.linalg.solve(damped, b.double())
        worst = max(worst, float((x.double() - expected).norm() / expected.norm()))
    assert worst < 1e-3  # rounding times (curvature / damping), and no more


def test_nystrom_draws_from_its_generator_alone() -> None:
    system, solver = System(), br.Nystrom(3, 5.0)
    generator = torch.Generator("cpu").manual_seed(7)
    first, second = (solver.solve(system.product, system.b, br.Turn(generator=generator)).x for _ in range(2))
    torch.manual_seed(123)
    again = solver.solve(system.product, system.b, br.Turn(generator=torch.Generator("cpu").manual_seed(7))).x
    assert torch.equal(vectors.flatten(first), vectors.flatten(again))
    assert not torch.equal(vectors.flatten(first), vectors.flatten(second))
    with pytest.raises(ValueError, match="needs a generator"):
        solver.solve(system.product, system.b)


def test_nystrom_bears_dead_weights_and_negative_curvature() -> None:
    """Columns of zeros, and a negative direction that the sketch leaves out."""
    system = System(bends=[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, -1.0, 5.0])
    system.matrix = torch.diag(system.bends)
    solution = br.Nystrom(8, 0.5).solve(system.product, system.b, turn())
    expected = vectors.flatten(system.b) / (system.bends.clamp(min=0) + 0.5)
    close(solution.x, expected, 1e-9 if precise() else 1e-4)


# Starts


@pytest.mark.parametrize("solver", [br.CG(200, tolerance=0.0), br.Neumann(600, 0.15)], ids=repr)
def test_a_converged_solution_does_not_depend_on_its_start(solver: br.Solver) -> None:
    system = System()
    for start in (vectors.scale(0.1, system.other), vectors.scale(100.0, system.other)):
        close(
            solver.solve(system.product, system.b, br.Turn(start=start)).x, system.dense(), 1e-9 if precise() else 1e-4
        )


@pytest.mark.parametrize("solver", [br.CG(3, tolerance=1e-6), br.Neumann(3, 0.15)], ids=repr)
def test_a_good_start_helps_and_a_bad_one_is_not_used(solver: br.Solver) -> None:
    system = System()
    near = system.parts(system.dense() + 1e-4 * vectors.flatten(system.other))
    far = vectors.scale(-5.0, near)
    cold = solver.solve(system.product, system.b)
    warm = solver.solve(system.product, system.b, br.Turn(start=near))
    assert warm.residual is not None
    assert cold.residual is not None
    assert warm.residual < 0.1 * cold.residual
    close(solver.solve(system.product, system.b, br.Turn(start=far)).x, vectors.flatten(cold.x), 1e-12)


# Trouble


def test_a_diverging_series_is_said_and_cut_at_its_best_term() -> None:
    """lr · 10 = 2.5: the part along the highest curvature grows by 1.5 a term, the others shrink."""
    system = System(bends=[1.0, 1.2, 1.5, 2.0, 2.0, 2.0, 2.0, 10.0])
    b = torch.linalg.eigh(system.matrix).eigenvectors @ torch.tensor([1.0] * 7 + [0.05])
    system.b, lr = system.parts(b), 0.25
    solution = br.Neumann(30, lr).solve(system.product, system.b)
    shrink = torch.eye(8) - lr * system.matrix
    sizes = [float((torch.linalg.matrix_power(shrink, k) @ b).norm() / b.norm()) for k in range(31)]
    assert solution.residual == pytest.approx(min(sizes), rel=1e-4)
    assert 1 <= sizes.index(min(sizes)) < 30
    assert system.residual(solution.x) == pytest.approx(min(sizes), rel=1e-4)
    assert f"diverges: after 30 terms ‖b − Hx‖ is {sizes[-1]:.3g} times ‖b‖" in solution.trouble
    assert "Lower lr = 0.25" in solution.trouble


def test_a_series_that_has_begun_to_diverge_is_cut_before_it_is_worse_than_nothing() -> None:
    system = System(bends=[1.0] * 7 + [10.0])
    system.b = system.parts(torch.linalg.eigh(system.matrix).eigenvectors @ torch.tensor([1.0] * 7 + [1e-3]))
    solution = br.Neumann(12, 0.25).solve(system.product, system.b)
    assert not solution.trouble
    assert solution.residual == pytest.approx(system.residual(solution.x), rel=1e-3)


def test_negative_curvature_is_said_and_not_stepped_along() -> None:
    system = System(bends=[3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, -0.5])
    solution = br.CG(20, tolerance=0.0).solve(system.product, system.b)
    taken = solution.products - 1
    assert taken >= 1
    before = br.CG(taken, tolerance=0.0).solve(system.product, system.b)
    assert not before.trouble
    close(solution.x, vectors.flatten(before.x), 0.0)
    assert "negative curvature" in solution.trouble
    assert f"in step {taken + 1}" in solution.trouble
    # A damping above the one it asks for is enough here: no curvature along any direction is lower than the lowest.
    cured = br.CG(20, 0.6, tolerance=0.0).solve(system.product, system.b)
    assert not cured.trouble
    close(cured.x, system.dense(0.6), 1e-8 if precise() else 1e-2)


def test_negative_curvature_at_once_leaves_the_start() -> None:
    system = System(bends=[-1.0, -2.0] * 4)
    solution = br.CG(20).solve(system.product, system.b)
    assert not vectors.flatten(solution.x).any()
    assert solution.residual == 1.0
    bend = float(vectors.dot(system.b, system.product(system.b)) / vectors.dot(system.b, system.b))
    assert f"negative curvature {bend:.3g} in step 1" in solution.trouble
    assert f"damping above {-bend:.3g}" in solution.trouble


def test_a_residual_that_has_grown_is_said_and_the_iterate_before_it_is_used() -> None:
    """Curvature 1e-3 makes a step of a thousand, and a small part along curvature 1 is then multiplied by it."""
    system = System(bends=[1e-3] * 4 + [1.0] * 4)
    axes = torch.linalg.eigh(system.matrix).eigenvectors
    system.b = system.parts(axes @ torch.tensor([1.0, 1.0, 1.0, 1.0, 0.05, 0.05, 0.05, 0.05]))
    b = vectors.flatten(system.b)
    first = b * (b @ b) / (b @ system.matrix @ b)
    grown = system.residual(system.parts(first))
    assert grown > 1
    solution = br.CG(1).solve(system.product, system.b)
    assert f"{grown:.3g} times ‖b‖" in solution.trouble
    assert not vectors.flatten(solution.x).any()
    assert solution.residual == 1.0
    enough = br.CG(20, tolerance=1e-6 if precise() else 1e-2).solve(system.product, system.b)
    assert not enough.trouble


def test_too_little_damping_for_a_sketch_is_said() -> None:
    solution = br.Nystrom(2, 1e-3).solve(System().product, System().b, turn())
    assert solution.residual is not None
    assert solution.residual > 100
    assert f"{solution.residual:.3g} times ‖b‖: there is more curvature outside the 2 columns" in solution.trouble


@pytest.mark.parametrize("solver", [br.Dense(damping=0.1), br.Nystrom(60, 0.1)], ids=repr)
def test_weights_may_be_laid_out_in_any_order(solver: br.Solver) -> None:
    """A net in channels_last: numbers are counted in the order of the shape, not of the memory."""
    matrix = System(48).matrix
    laid = normal(torch.Generator("cpu").manual_seed(1), 2, 3, 4, 2)
    b = {"w": laid.to(memory_format=torch.channels_last)}
    assert not b["w"].is_contiguous()

    def product(v: Vector) -> Vector:
        return {"w": (matrix @ v["w"].flatten()).view(b["w"].shape).to(memory_format=torch.channels_last)}

    solution = solver.solve(product, b, turn())
    close(solution.x, torch.linalg.solve(matrix + 0.1 * torch.eye(48), laid.flatten()), 1e-9 if precise() else 1e-3)
    assert not solution.trouble


def test_dense_refuses_large_problems_and_says_what_is_singular() -> None:
    with pytest.raises(ValueError, match=r"5,000 × 5,000 matrix: it is meant for at most 3,000 weights. Use br.CG\(\)"):
        br.Dense().solve(lambda v: v, {"w": torch.ones(5000)})
    solution = br.Dense().solve(lambda v: {"w": v["w"] * torch.tensor([2.0, 0.0])}, {"w": torch.tensor([4.0, 3.0])})
    assert "singular" in solution.trouble
    close(solution.x, torch.tensor([2.0, 0.0]), 1e-6)
    assert solution.residual == pytest.approx(3 / 5)


@pytest.mark.parametrize("count", [12, 60])
def test_dense_is_least_squares_where_rounding_hides_that_the_system_is_singular(count: int) -> None:
    """AᵀA of rank 5: the zeros among its curvatures come out as rounding errors, and not as zeros."""
    a = normal(torch.Generator("cpu").manual_seed(0), 5, count)
    within = a.T @ normal(torch.Generator("cpu").manual_seed(1), 5)
    beyond = normal(torch.Generator("cpu").manual_seed(2), count)
    beyond = beyond - torch.linalg.pinv(a) @ (a @ beyond)
    inverse = a.T @ torch.linalg.inv(a @ a.T) @ torch.linalg.inv(a @ a.T) @ a
    for b in (within, within + beyond):
        solution = br.Dense().solve(lambda v: {"w": a.T @ (a @ v["w"])}, {"w": b})
        close(solution.x, inverse @ within, 1e-9 if precise() else 1e-2)
        assert f"singular, to its precision, along {count - 5} of {count} directions" in solution.trouble
        size = float((b - within).norm() / b.norm())
        assert solution.residual == pytest.approx(size, abs=1e-9 if precise() else 1e-4)
    damped = br.Dense(damping=0.1).solve(lambda v: {"w": a.T @ (a @ v["w"])}, {"w": within})
    assert not damped.trouble


def test_dense_bears_negative_and_widely_spread_curvature() -> None:
    """Neither is singular."""
    bends = torch.tensor([-3.0, 1.0, 1e4, 2e-1])
    solution = br.Dense().solve(lambda v: {"w": bends * v["w"]}, {"w": torch.ones(4)})
    close(solution.x, 1 / bends, 1e-9 if precise() else 1e-4)
    assert not solution.trouble


def test_a_damping_that_meets_a_negative_curvature_is_said() -> None:
    solution = br.Dense(damping=1.0).solve(lambda v: {"w": torch.tensor([-1.01, 2.0]) * v["w"]}, {"w": torch.ones(2)})
    assert solution.residual is not None
    assert solution.residual > 50
    assert "H + damping is close to singular" in solution.trouble


@pytest.mark.parametrize("solver", [br.Dense(), br.Nystrom(3)], ids=repr)
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_said(solver: br.Solver, worst: float) -> None:
    system = System()
    solution = solver.solve(lambda v: vectors.scale(worst, system.product(v)), system.b, turn())
    assert "A product of H is not finite" in solution.trouble
    assert not torch.isfinite(vectors.flatten(solution.x)).any()


SOLVERS = [br.CG(), br.Neumann(), br.Nystrom(), br.Dense()]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_nothing_to_solve_and_what_is_not_finite(solver: br.Solver) -> None:
    system = System()
    zero = solver.solve(system.product, vectors.zeros_like(system.b), turn())
    assert not vectors.flatten(zero.x).any()
    assert (zero.residual, zero.trouble) == (0.0, "")
    bad = solver.solve(system.product, vectors.scale(float("inf"), system.b), turn())
    assert not torch.isfinite(vectors.flatten(bad.x)).any()
    assert "not finite" in bad.trouble


@pytest.mark.parametrize("solver", [br.CG(20, tolerance=0.0), br.Neumann(20, 0.1)], ids=repr)
def test_a_product_that_is_not_finite_is_said_and_what_was_found_before_it_is_kept(solver: br.Solver) -> None:
    system, calls = System(), 0

    def product(v: Vector) -> Vector:
        nonlocal calls
        calls += 1
        return vectors.scale(float("nan") if calls > 3 else 1.0, system.product(v))

    solution = solver.solve(product, system.b)
    assert torch.isfinite(vectors.flatten(solution.x)).all()
    assert solution.trouble
    assert system.residual(solution.x) < 0.9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.CG(0), "CG needs steps >= 1"),
        (lambda: br.CG(damping=-1.0), "damping >= 0"),
        (lambda: br.Neumann(-1), "Neumann needs terms >= 0"),
        (lambda: br.Neumann(lr=0.0), "lr > 0"),
        (lambda: br.Nystrom(0), "Nystrom needs rank >= 1"),
        (lambda: br.Nystrom(damping=0.0), "damping > 0"),
        (lambda: br.Dense(damping=-1.0), "Dense needs damping >= 0"),
        (lambda: br.GeometricTolerance(ratio=1.0), "ratio < 1"),
        (lambda: br.PowerTolerance(power=0.0), "power > 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.CG(5.0), r"steps must be a whole number; got 5\.0"),
        (lambda: br.CG(tolerance="small"), "tolerance must be a number or a Tolerance, such as 1e-3; got 'small'"),
        (lambda: br.Neumann(2.0), "terms must be a whole number"),
        (lambda: br.Nystrom(2.0), "rank must be a whole number"),
    ],
)
def test_settings_of_another_kind_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
