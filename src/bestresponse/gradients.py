"""Derivatives of the two losses: the only place where a loss is differentiated.

Products with second derivatives come in two ways. ``exact`` differentiates twice. ``central`` takes two ordinary
gradients on the same batch with the same random numbers, at w ± δv, and divides their difference by 2δ; it needs no
second derivative, so fused attention, cuDNN recurrent nets and compiled models keep working.

Buffers are written to (BatchNorm statistics move) only by the training gradient. Every derivative that serves the
hypergradient works on a copy.

Derivatives are taken under ``torch.no_grad()`` too: what a loop switches off for itself would make them zero here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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


@torch.enable_grad()
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
        first, second = kept[0][name], kept[1][name]
        # Equal ones stay as they are: a mask of -inf has no mean.
        mean = torch.where(first == second, first, (first + second) / 2) if buffer.is_floating_point() else first
        buffers[name] = mean
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


@torch.enable_grad()
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


@torch.enable_grad()
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


@torch.enable_grad()
def train_dependence(problem: Problem, params: Params, raw: Raw, batch: Batch) -> dict[str, bool]:
    """Does the training loss depend on each leaf of raw through torch? Nothing is written to the model's buffers."""
    w, r = vectors.leaves(params), vectors.leaves(raw)

    def differentiate(loss: Tensor) -> dict[str, bool]:
        if not loss.requires_grad:
            return dict.fromkeys(r, False)
        grads = torch.autograd.grad(_mean(loss), list(r.values()), allow_unused=True)
        return {leaf: grad is not None for leaf, grad in zip(r, grads, strict=True)}

    return evaluate_then(problem, "train", w, problem.space.values(r), batch, None, differentiate)


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


@torch.enable_grad()
def train_products(
    problem: Problem,
    params: Params,
    raw: Raw,
    batch: Batch,
    vector: Callable[[Params], Vector],
    *,
    buffers: Params,
    products: Products = "exact",
) -> tuple[Vector, Raw]:
    """H v and (∂²L_T/∂raw∂w) v at once, for a v that is made of the gradient: ``vector(∂L_T/∂w)``."""
    if products == "central":
        v: Vector = {}

        def gradient() -> Gradient:
            grad = train_gradient(problem, params, raw, batch, buffers=vectors.clone(buffers))
            v.update(vector(grad.params))
            return grad

        def pair() -> Gradient:
            return _central(problem, params, raw, batch, v, buffers, with_raw=True)

        _, central = with_same_randomness([gradient, pair], problem.device)
        return central.params, central.raw
    w, r = vectors.leaves(params), vectors.leaves(raw)

    def differentiate(loss: Tensor) -> list[Tensor]:
        grads = dict(zip(w, _grad(_mean(loss), w.values(), create_graph=True), strict=True))
        slope = vectors.dot(grads, vector({name: grad.detach() for name, grad in grads.items()}))
        return _grad(slope, [*w.values(), *r.values()])

    own = vectors.clone(buffers)
    both = evaluate_then(problem, "train", w, problem.space.values(r), batch, own, differentiate)
    return dict(zip(w, both, strict=False)), dict(zip(r, both[len(w) :], strict=True))


@torch.enable_grad()
def train_tangents(
    problem: Problem,
    params: Params,
    raw: Raw,
    batch: Batch,
    along: tuple[Vector, Raw],
    *,
    buffers: Params,
    products: Products = "exact",
    vectorize: bool = True,
) -> tuple[Gradient, Vector]:
    """∂L_T/∂w, and how it changes along several directions in (weights, raw). Writes to ``buffers``.

    Second derivatives are symmetric: the change along (p, q) is ∂/∂w of ⟨∂L_T/∂w, p⟩ + ⟨∂L_T/∂raw, q⟩, one double
    backward a direction.

    Args:
        problem: The problem.
        params: The weights.
        raw: The hypers.
        batch: The batch.
        along: The directions: a leading dimension ``directions`` before the shapes of ``params`` and ``raw``.
        buffers: As for :func:`train_gradient`.
        products: Exact, or central differences along each direction.
        vectorize: Exact ones all at once, where every operation of the backward pass has a batching rule.
    """
    p, q = along
    count = next(iter(q.values())).shape[0]
    if products == "central":
        return _central_tangents(problem, params, raw, batch, along, buffers)
    w, r = vectors.leaves(params), vectors.leaves(raw)

    def differentiate(loss: Tensor) -> tuple[Tensor, Params, list[Tensor | None]]:
        loss = _mean(loss)
        grads = _grad(loss, [*w.values(), *r.values()], create_graph=True)
        # Only what depends on the weights has a derivative in them.
        pairs = [pair for pair in zip(grads, [*p.values(), *q.values()], strict=True) if pair[0].requires_grad]
        of_w = {name: grad.detach() for name, grad in zip(w, grads, strict=False)}
        if not pairs:
            return loss.detach(), of_w, [None] * len(w)
        outputs, seeds = zip(*pairs, strict=True)
        changes = _directional(outputs, list(w.values()), seeds, count, vectorize)
        return loss.detach(), of_w, changes

    loss, of_w, changes = evaluate_then(problem, "train", w, problem.space.values(r), batch, buffers, differentiate)
    tangents = {
        name: part.new_zeros(count, *part.shape) if change is None else change
        for (name, part), change in zip(params.items(), changes, strict=True)
    }
    return Gradient(loss, of_w, {}), tangents


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


@torch.enable_grad()
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


def _directional(
    outputs: Sequence[Tensor], inputs: list[Tensor], seeds: Sequence[Tensor], count: int, vectorize: bool
) -> list[Tensor | None]:
    """Σ ∂⟨outputs, seeds[i]⟩/∂inputs for each i, stacked; ``None`` where nothing depends on an input."""
    if vectorize:
        return list(torch.autograd.grad(outputs, inputs, seeds, is_grads_batched=True, allow_unused=True))
    each = [
        torch.autograd.grad(outputs, inputs, [seed[i] for seed in seeds], retain_graph=True, allow_unused=True)
        for i in range(count)
    ]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]


def _central_tangents(
    problem: Problem, params: Params, raw: Raw, batch: Batch, along: tuple[Vector, Raw], buffers: Params
) -> tuple[Gradient, Vector]:
    def at(p: Vector, q: Raw, delta: float) -> Gradient:
        shifted = vectors.axpy(delta, p, params), vectors.axpy(delta, q, raw)
        return train_gradient(problem, *shifted, batch, buffers=vectors.clone(buffers))

    calls: list[Callable[[], Gradient]] = []
    deltas = []
    for i in range(next(iter(along[1].values())).shape[0]):
        p, q = ({name: part[i] for name, part in vector.items()} for vector in along)
        # Small in the weights, and small in raw, whose natural unit is 1.
        delta = torch.finfo(problem.raw_dtype).eps ** (1 / 3) / max(float(vectors.norm(q)), 1e-30)
        delta = min(delta, difference_step(params, p) or delta)
        deltas.append(delta)
        calls += [partial(at, p, q, delta), partial(at, p, q, -delta)]
    calls.append(lambda: train_gradient(problem, params, raw, batch, buffers=buffers))
    grads = with_same_randomness(calls, problem.device)
    changes = [
        vectors.scale(0.5 / delta, vectors.axpy(-1.0, minus.params, plus.params))
        for delta, plus, minus in zip(deltas, grads[::2], grads[1::2], strict=False)
    ]
    return grads[-1], {name: torch.stack([change[name] for change in changes]) for name in params}


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


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers from this seed, and afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


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
