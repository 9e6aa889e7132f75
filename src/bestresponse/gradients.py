"""Derivatives of the two losses: the only place where a loss is differentiated.

Products with second derivatives come in two ways. ``exact`` differentiates twice. ``central`` takes two ordinary
gradients on the same batch with the same random numbers, at w ± δv, and divides their difference by 2δ; it needs no
second derivative, so fused attention, cuDNN recurrent nets and compiled models keep working.

Buffers are written to (BatchNorm statistics move) only by the training gradient. Every derivative that serves the
hypergradient works on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.problem import Batch, Params, Problem, T, evaluate, evaluate_then
from bestresponse.space import Raw
from bestresponse.vectors import Vector

Products = Literal["exact", "central"]


class Gradient(NamedTuple):
    """A loss and its derivative in the weights and in raw (empty when it was not asked for)."""

    loss: Tensor
    params: Params
    raw: Raw


def train_gradient(
    problem: Problem, params: Params, raw: Raw, batch: Batch, *, buffers: Params, with_raw: bool = False
) -> Gradient:
    """∂L_T/∂w, and with ``with_raw`` also ∂L_T/∂raw, on one batch. Writes to ``buffers``."""
    return _train(problem, params, raw, batch, buffers, list(raw) if with_raw else [])[0]


def _train(
    problem: Problem, params: Params, raw: Raw, batch: Batch, buffers: Params, in_raw: Collection[str]
) -> tuple[Gradient, Tensor]:
    """The training gradient, in these leaves of raw too; and the loss as it is returned, one number an example."""
    w, r = vectors.leaves(params), vectors.leaves({name: raw[name] for name in in_raw})

    def differentiate(loss: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loss.detach(), _grad(_mean(loss), [*w.values(), *r.values()])

    each, grads = evaluate_then(problem, "train", w, problem.space.values({**raw, **r}), batch, buffers, differentiate)
    of_w, of_r = dict(zip(w, grads, strict=False)), dict(zip(r, grads[len(w) :], strict=True))
    return Gradient(_mean(each), of_w, of_r), each


class Pair(NamedTuple):
    """What two training gradients at w ± δp on one batch give.

    Attributes:
        loss: The training loss.
        params: Their mean: ∂L_T/∂w.
        curvature: Their difference: H p.
        mixed: The difference in raw: (∂²L_T/∂raw∂w) p, for hypers that are not sampled.
        slopes: The slope of each example's loss along p, ``(batch,)``; or of the one loss there is, ``()``.
    """

    loss: Tensor
    params: Params
    curvature: Params
    mixed: Raw
    slopes: Tensor


def antithetic_pair(
    problem: Problem, params: Params, raw: Raw, batch: Batch, vector: Vector, delta: Tensor, *, buffers: Params
) -> Pair:
    """The training gradients at w ± δp with the same random numbers, and all that they tell. First order only.

    ``raw`` may hold one value per example for a sampled hyper. Writes the mean of what both leave to ``buffers``.
    """
    differentiable = [leaf for leaf, (name, _, _) in problem.space.leaves.items() if name not in problem.space.sampled]
    kept = [vectors.clone(buffers), vectors.clone(buffers)]

    def at(sign: float, own: Params) -> tuple[Gradient, Tensor]:
        return _train(problem, vectors.axpy(sign * delta, vector, params), raw, batch, own, differentiable)

    (plus, each_plus), (minus, each_minus) = with_same_randomness(
        [lambda: at(1.0, kept[0]), lambda: at(-1.0, kept[1])], problem.device
    )
    for name, buffer in buffers.items():
        buffers[name] = (kept[0][name] + kept[1][name]) / 2 if buffer.is_floating_point() else kept[0][name]
    return Pair(
        (plus.loss + minus.loss) / 2,
        {name: (part + minus.params[name]) / 2 for name, part in plus.params.items()},
        {name: (part - minus.params[name]) / (2 * delta) for name, part in plus.params.items()},
        {name: (part - minus.raw[name]) / (2 * delta) for name, part in plus.raw.items()},
        (each_plus - each_minus) / (2 * delta),
    )


def slopes_along(
    problem: Problem, params: Params, raw: Raw, batch: Batch, vector: Vector, delta: Tensor, *, buffers: Params
) -> Tensor:
    """The slope of each example's training loss along ``vector``, ``(batch,)``, from the losses at w ± δ·vector.

    No gradient is taken, and nothing is written to ``buffers``.
    """
    values = problem.space.values(raw)

    def losses_at(sign: float) -> Tensor:
        shifted = vectors.axpy(sign * delta, vector, params)
        with torch.no_grad():
            return evaluate_then(problem, "train", shifted, values, batch, vectors.clone(buffers), lambda loss: loss)

    plus, minus = with_same_randomness([lambda: losses_at(1.0), lambda: losses_at(-1.0)], problem.device)
    return (plus - minus) / (2 * delta)


def train_gradients(
    problem: Problem, params: Params, raw: Raw, batch: Batch, *, buffers: Params, vectorize: bool
) -> Gradient:
    """∂L_T/∂w at several (weights, raw) pairs on one batch: every tensor has a leading dimension ``samples``.

    Vectorized, all are computed at once through ``torch.func.vmap``: much faster for small models, and not possible
    for layers that write to buffers (BatchNorm in training mode).
    """
    samples = next(iter(params.values())).shape[0]
    if not vectorize:
        each = [
            train_gradient(
                problem,
                {name: part[i] for name, part in params.items()},
                {name: part[i] for name, part in raw.items()},
                batch,
                buffers=buffers,
            )
            for i in range(samples)
        ]
        stacked = {name: torch.stack([g.params[name] for g in each]) for name in params}
        return Gradient(torch.stack([g.loss for g in each]), stacked, {})

    def loss_at(w: Params, r: Raw) -> Tensor:
        return evaluate(problem, "train", w, problem.space.values(r), batch, dict(buffers))

    # One backward pass through the summed losses gives every pair its own gradient: pair i enters only loss i.
    w = vectors.leaves(params)
    losses = torch.func.vmap(loss_at, randomness="different")(w, raw)
    grads = _grad(losses.sum(), w.values())
    return Gradient(losses.detach(), dict(zip(w, grads, strict=True)), {})


def valid_gradient(problem: Problem, params: Params, raw: Raw, batch: Batch, *, buffers: Params) -> Gradient:
    """∂/∂w and ∂/∂raw of the validation objective: the validation loss plus the priors on raw.

    ``loss`` is the validation loss alone. The derivative in raw is the direct one: it is zero for hypers that neither
    the validation loss nor a prior depends on.
    """
    w, r = vectors.leaves(params), vectors.leaves(raw)

    def differentiate(loss: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss, penalty = loss.mean(), problem.space.penalty(r)
        return loss.detach(), _grad(loss if penalty is None else loss + penalty, [*w.values(), *r.values()])

    own = vectors.clone(buffers)
    loss, grads = evaluate_then(problem, "valid", w, problem.space.values(r), batch, own, differentiate)
    return Gradient(loss, dict(zip(w, grads, strict=False)), dict(zip(r, grads[len(w) :], strict=True)))


def curvature_product(
    problem: Problem,
    params: Params,
    raw: Raw,
    batch: Batch,
    vector: Vector,
    *,
    buffers: Params,
    products: Products = "exact",
) -> Vector:
    """H v, with H = ∂²L_T/∂w² on one batch."""
    if products == "central":
        return _central(problem, params, raw, batch, vector, buffers, with_raw=False).params
    return _exact(problem, params, raw, batch, vector, buffers, of="params")


def mixed_product(
    problem: Problem,
    params: Params,
    raw: Raw,
    batch: Batch,
    vector: Vector,
    *,
    buffers: Params,
    products: Products = "exact",
) -> Raw:
    """(∂²L_T/∂raw∂w) v: how the slope of the training loss along v changes with each hyper. As large as raw."""
    if products == "central":
        return _central(problem, params, raw, batch, vector, buffers, with_raw=True).raw
    return _exact(problem, params, raw, batch, vector, buffers, of="raw")


def difference_step(params: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> float:
    """The δ of a central difference along ``vector``: ε^⅓ · ‖w‖ / ‖v‖, where rounding and curvature errors balance."""
    dtype = next(iter(params.values())).dtype
    length, size = float(vectors.norm(vector)), float(vectors.norm(params))
    return torch.finfo(dtype).eps ** (1 / 3) * (size or 1.0) / length if length > 0 else 0.0


def _exact(
    problem: Problem,
    params: Params,
    raw: Raw,
    batch: Batch,
    vector: Vector,
    buffers: Params,
    *,
    of: Literal["params", "raw"],
) -> Vector:
    """The derivative of ⟨∂L_T/∂w, v⟩ in the weights or in raw."""
    w, r = vectors.leaves(params), (vectors.leaves(raw) if of == "raw" else raw)
    inputs = w if of == "params" else r

    def differentiate(loss: Tensor) -> Vector:
        grads = dict(zip(w, _grad(loss.mean(), w.values(), create_graph=True), strict=True))
        return dict(zip(inputs, _grad(vectors.dot(grads, vector), inputs.values()), strict=True))

    return evaluate_then(problem, "train", w, problem.space.values(r), batch, vectors.clone(buffers), differentiate)


def _central(
    problem: Problem, params: Params, raw: Raw, batch: Batch, vector: Vector, buffers: Params, *, with_raw: bool
) -> Gradient:
    delta = difference_step(params, vector)
    if delta == 0.0:
        return Gradient(torch.zeros(()), vectors.zeros_like(params), vectors.zeros_like(raw))

    def at(sign: float) -> Gradient:
        shifted = vectors.axpy(sign * delta, vector, params)
        return train_gradient(problem, shifted, raw, batch, buffers=vectors.clone(buffers), with_raw=with_raw)

    plus, minus = with_same_randomness([lambda: at(1.0), lambda: at(-1.0)], problem.device)
    return Gradient(
        (plus.loss + minus.loss) / 2,
        vectors.scale(0.5 / delta, vectors.axpy(-1.0, minus.params, plus.params)),
        vectors.scale(0.5 / delta, vectors.axpy(-1.0, minus.raw, plus.raw)),
    )


def with_same_randomness(calls: Iterable[Callable[[], T]], device: torch.device) -> list[T]:
    """Run each call from the same state of torch's random generators, so that dropout masks agree."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    results = []
    for call in calls:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        results.append(call())
    return results


def _mean(loss: Tensor) -> Tensor:
    """One number, without work where it is one already."""
    return loss.mean() if loss.ndim else loss


def _grad(output: Tensor, inputs: Iterable[Tensor], create_graph: bool = False) -> list[Tensor]:
    inputs = list(inputs)
    if not output.requires_grad:
        return [torch.zeros_like(tensor) for tensor in inputs]
    return list(
        torch.autograd.grad(output, inputs, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    )
