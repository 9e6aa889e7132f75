"""The hypergradient of the implicit function theorem, at any weights and hypers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import Products, curvature_product, mixed_product, valid_gradient
from bestresponse.parts import require_part
from bestresponse.problem import Batch, Params, Problem, examples
from bestresponse.reading import require_dependence
from bestresponse.solvers import CG, Solution, Solver, Turn
from bestresponse.space import Hyper, Net, Raw, Space, Values
from bestresponse.vectors import Vector

#: Of torch's generators on the CPU and, where the model is there, on the GPU.
_RandomState = tuple[Tensor, Tensor | None]


@final
class Linearization:
    """The second derivatives of the training loss at one place, as products, averaged over some fixed batches.

    Every product draws the same random numbers on the same batch, so that dropout masks stay: H is then one symmetric
    matrix, that of one function, and not another one at each product. They are torch's next ones at the first product;
    afterwards torch's random numbers stand where one product leaves them, however many were taken.

    Args:
        problem: The problem.
        params: Weights.
        raw: Hypers.
        batches: Training batches; each counts by its examples.
        buffers: Buffers; never changed.
        products: ``"exact"`` or ``"central"``.
    """

    def __init__(
        self,
        problem: Problem,
        params: Params,
        raw: Raw,
        batches: Sequence[Batch],
        *,
        buffers: Params,
        products: Products = "exact",
    ) -> None:
        if products not in ("exact", "central"):
            raise ValueError(f'products must be "exact" or "central"; got {products!r}')
        self.problem, self.params, self.raw, self.buffers = problem, params, raw, buffers
        self.gradients = 0  # what the products have cost so far
        self._products = products
        self._weights = _weights(batches)
        self._batches = batches
        self._random: list[_RandomState] = []  # before the first product on each batch

    def curvature(self, vector: Vector) -> Vector:
        """H v, with H = ∂²L_T/∂w²."""
        return self._mean(curvature_product, vector)

    def mixed(self, vector: Vector) -> Raw:
        """(∂²L_T/∂raw∂w) v."""
        return self._mean(mixed_product, vector)

    def _mean(self, product: Callable[..., Vector], vector: Vector) -> Vector:
        self.gradients += 2 * len(self._batches)
        return _mean(self._weights, (self._on(i, product, vector) for i in range(len(self._batches))))

    def _on(self, i: int, product: Callable[..., Vector], vector: Vector) -> Vector:
        if i < len(self._random):
            _set_random_state(self._random[i], self.problem.device)
        else:
            self._random.append(_random_state(self.problem.device))
        return product(
            self.problem,
            self.params,
            self.raw,
            self._batches[i],
            vector,
            buffers=self.buffers,
            products=self._products,
        )


class Hypergradient(NamedTuple):
    """A hypergradient, and how it was found.

    Attributes:
        valid_loss: On the validation batch.
        gradient: The derivative of the validation objective, in the form of what the hypers were given in.
        solution: x ≈ H⁻¹ ∂L_V/∂w, and how good it is.
    """

    valid_loss: Tensor
    gradient: Any
    solution: Solution


def implicit_hypergradient(
    at: Linearization, solver: Solver, valid_batches: Sequence[Batch], turn: Turn
) -> Hypergradient:
    """∂L_V/∂raw − (∂²L_T/∂raw∂w) x, where x solves H x = ∂L_V/∂w, with L_V averaged over these batches."""
    each = [valid_gradient(at.problem, at.params, at.raw, batch, buffers=at.buffers) for batch in valid_batches]
    weights = _weights(valid_batches)
    loss = _mean(weights, [{"": one.loss} for one in each])[""]
    b = _mean(weights, [one.params for one in each])
    direct = _mean(weights, [one.raw for one in each])
    solution = solver.solve(at.curvature, b, turn)
    if not isinstance(solution, Solution):
        raise TypeError(f"a solver returns br.Solution(x); {type(solver).__name__} returned {type(solution).__name__}")
    return Hypergradient(loss, vectors.axpy(-1.0, at.mixed(solution.x), direct), solution)


def hypergradient(
    problem: Problem,
    params: Mapping[str, Tensor],
    values: Values,
    train_batch: Batch,
    valid_batch: Batch,
    *,
    solver: Solver | None = None,
    products: Products = "exact",
    buffers: Params | None = None,
    turn: Turn | None = None,
) -> Hypergradient:
    """How the validation loss of trained weights changes with the hypers, for a loop of your own.

    dL_V/dλ = ∂L_V/∂λ − (∂²L_T/∂λ∂w) x with H x = ∂L_V/∂w and H = ∂²L_T/∂w², right at weights where the training loss is
    at its minimum. Nothing is changed, neither weights nor BatchNorm statistics.

    Args:
        problem: The problem.
        params: The trained weights, such as ``dict(model.named_parameters())``.
        values: The hypers in natural units, by name: what the losses see. They may stand on a bound.
        train_batch: For the products of the training loss.
        valid_batch: For the validation loss.
        solver: How to solve for x; by default ``CG()``.
        products: ``"exact"`` second derivatives, or ``"central"`` differences of first ones.
        buffers: By default the model's.
        turn: For the solver: the last ``solution.x`` to start from, a generator for a sketch.

    Returns:
        ``(valid_loss, gradient, solution)``. The gradient has the form of ``values``: it is the derivative in natural
        units, priors included. For hypers kept raw, with ``values = problem.space.values(raw)``, call
        ``value.backward(gradient)`` on each value. Look at ``solution.residual`` and ``solution.trouble``.
    """
    if problem.space.sampled:
        raise ValueError(
            f"hyper {problem.space.sampled[0]!r} is sampled: the training loss cannot be differentiated in it, and "
            "this hypergradient needs that derivative. Use br.methods.adjoint()"
        )
    require_part("solver", CG() if solver is None else solver, Solver, "br.CG()")
    natural = _natural(problem, values)
    weights = _weights_of(natural, params)
    place = Linearization(
        natural,
        weights,
        natural.space.raw(dtype=problem.raw_dtype, device=problem.device),
        [train_batch],
        buffers=problem.buffers() if buffers is None else buffers,
        products=products,
    )
    require_dependence(natural, weights, place.raw, train_batch)
    found = implicit_hypergradient(place, solver or CG(), [valid_batch], turn or Turn())
    return found._replace(gradient=natural.space.values(found.gradient))


def _weights_of(problem: Problem, params: Mapping[str, Tensor]) -> Params:
    """The trainable weights among what is given."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dict of weights, dict(model.named_parameters()); got {type(params).__name__}"
        )
    own = problem.params()
    if lacking := sorted(own.keys() - params.keys()):
        raise KeyError(f"params lacks the weights {lacking[0]!r}: give all of them, dict(model.named_parameters())")
    for name, weight in own.items():
        if params[name].shape != weight.shape:
            raise ValueError(
                f"params[{name!r}] must have the shape of the model's, {tuple(weight.shape)}; got "
                f"{tuple(params[name].shape)}"
            )
    return {name: params[name].detach() for name in own}


def _weights(batches: Sequence[Batch]) -> list[float]:
    """How much each batch counts: by its examples."""
    sizes = [examples(batch) or 1 for batch in batches]
    return [size / sum(sizes) for size in sizes]


def _mean(weights: Sequence[float], parts: Iterable[Vector]) -> Vector:
    total: Vector | None = None
    for weight, part in zip(weights, parts, strict=True):
        part = part if weight == 1 else vectors.scale(weight, part)
        total = part if total is None else vectors.axpy(1.0, part, total)
    if total is None:
        raise ValueError("at least one batch is needed")
    return total


def _natural(problem: Problem, values: Values) -> Problem:
    """The same problem with hypers that are free, so that raw and values are one; they start at ``values``."""
    if unknown := sorted(set(values) - set(problem.space)):
        raise KeyError(f"values has {unknown[0]!r}, which is no hyper; the space has {', '.join(problem.space)}")
    free: dict[str, Hyper | Net] = {}
    for name, hyper in problem.space.items():
        if name not in values:
            raise KeyError(f"values lacks hyper {name!r}; the space has {', '.join(problem.space)}")
        prior = None if hyper.prior is None else _in_values(hyper)
        free[name] = Hyper(_detached(values[name]), shape=hyper.shapes.get("", hyper.shapes), prior=prior)
    return Problem(problem.model, Space(**free), problem.train_loss, problem.valid_loss)


def _in_values(hyper: Hyper | Net) -> Callable[[Tensor], Tensor]:
    """The hyper's prior as a function of its value."""
    prior = hyper.prior
    return lambda value: prior(hyper.raw(value)) if prior is not None else value.new_zeros(())


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {part: _detached(tensor) for part, tensor in value.items()}
    return value.detach() if isinstance(value, Tensor) else value


def _random_state(device: torch.device) -> _RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: _RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
