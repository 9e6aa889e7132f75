"""The papers' names, each as a configured method.

Each function only puts parts together: its keywords are those of the method it returns.
"""

from __future__ import annotations

from typing import Any

from bestresponse.method import ThenTune
from bestresponse.methods.adjoint import Adjoint
from bestresponse.methods.best_response import BestResponse
from bestresponse.methods.black_box import BlackBox, Sampler
from bestresponse.methods.implicit import Implicit
from bestresponse.perturb import Gaussian, Perturbation
from bestresponse.responses import MLP, Linear, Recipe
from bestresponse.solvers import CG, Identity, Neumann, Nystrom
from bestresponse.tolerances import PowerTolerance, Tolerance


def cross_validation(sampler: Sampler, budget: int, **parts: Any) -> BlackBox:
    """Algorithm 1: train every trial from scratch, keep the best on validation data.

    Use it as a yardstick, or for hypers nothing else can move. Costs ``trials · budget`` training updates.
    """
    return BlackBox(sampler, budget, **parts)


def lorraine2018_global(
    train: int, *, response: Recipe | None = None, perturb: Perturbation | None = None, **parts: Any
) -> BestResponse:
    """Algorithm 2: learn the best response over a fixed p(λ), then tune through it.

    Use it for one or two hypers, to see the whole response. Costs ``samples`` gradients a training update; the
    hypernetwork has about 51 times as many numbers as the model.
    Lorraine and Duvenaud 2018, https://arxiv.org/abs/1802.09419.

    Args:
        train: Training updates before the hypers are moved.
        response: By default ``MLP(50)``.
        perturb: The fixed p(λ); by default the paper's N(0, 1.5²).
        parts: Other arguments of :class:`BestResponse`.
    """
    return BestResponse(response or MLP(50), perturb or Gaussian(1.5, mean=0.0), schedule=ThenTune(train), **parts)


def lorraine2018_joint(
    *, response: Recipe | None = None, perturb: Perturbation | None = None, **parts: Any
) -> BestResponse:
    """Algorithm 3: train a small response around the current hypers while tuning them.

    Use it for up to thousands of hypers, in which the training loss need not be differentiable.
    Lorraine and Duvenaud 2018, https://arxiv.org/abs/1802.09419.

    Args:
        response: By default ``Linear()``; ``LowRank(10)`` for thousands of hypers.
        perturb: p(λ|λ̂); by default N(λ̂, 0.1²).
        parts: Other arguments of :class:`BestResponse`.
    """
    return BestResponse(response or Linear(), perturb or Gaussian(0.1), **parts)


def lorraine2018_simplified(*, response: Recipe | None = None, **parts: Any) -> BestResponse:
    """Algorithm 4: as algorithm 3 without sampling; the hypers' own movement is what the response learns from.

    Lorraine and Duvenaud 2018, https://arxiv.org/abs/1802.09419.

    Args:
        response: By default ``Linear()``.
        parts: Other arguments of :class:`BestResponse`.
    """
    return BestResponse(response or Linear(), None, **parts)


def luketina2016(**parts: Any) -> Implicit:
    """T1–T2: the hypergradient of one training update, as if the curvature were one.

    dL_V/dλ ≈ ∂L_V/∂λ − (∂²L_T/∂λ∂w) ∂L_V/∂w. The cheapest hypergradient there is, and a biased one: it is the implicit
    one with the identity for the Hessian. Luketina, Berglund, Greff and Raiko 2016, https://arxiv.org/abs/1511.06727.
    """
    return Implicit(Identity(), **parts)


def hoag2016(*, steps: int = 20, damping: float = 0.0, tolerance: Tolerance | None = None, **parts: Any) -> Implicit:
    """HOAG: conjugate gradients, rough at first and exact at last, each solve started from the one before.

    dL_V/dλ = ∂L_V/∂λ − (∂²L_T/∂λ∂w) x with ‖∂L_V/∂w − Hx‖ ≤ εₖ ‖∂L_V/∂w‖ and εₖ falling; with ``train_tolerance`` the
    training updates of a step end at such a tolerance too. Use it where training is smooth, convex or nearly so, and
    batches are large. Costs at most 2 · ``steps`` + 6 gradients a step. Memory: seven more vectors as large as the
    weights. Pedregosa 2016, https://arxiv.org/abs/1602.02355, where tolerances are absolute, and hypers move by
    gradient descent with a step size found from the progress.

    Args:
        steps: Of conjugate gradients, at most.
        damping: Added to the curvature; for losses that are not convex.
        tolerance: How the tolerance falls; by default as 0.1 / k².
        parts: Other arguments of :class:`Implicit`.
    """
    parts = {"warm_start": True, **parts}
    return Implicit(CG(steps, damping, PowerTolerance() if tolerance is None else tolerance), **parts)


def lorraine2020(terms: int = 20, *, lr: float = 0.1, **parts: Any) -> Implicit:
    """IFT with a Neumann series for the inverse Hessian.

    dL_V/dλ ≈ ∂L_V/∂λ − (∂²L_T/∂λ∂w) lr Σₖ (1 − lr H)ᵏ ∂L_V/∂w, k ≤ ``terms``: what ``terms`` + 1 more updates of SGD
    would make of it. Use it for millions of hypers and large models. Costs 2 · ``terms`` + 4 gradients a step. Memory:
    four more vectors as large as the weights. Lorraine, Vicol and Duvenaud 2020, https://arxiv.org/abs/1911.02590.

    Args:
        terms: Of the series after the first; with 0 it is T1–T2.
        lr: Must be below 2 / (largest curvature); a good one is the learning rate of SGD on the weights.
        parts: Other arguments of :class:`Implicit`.
    """
    return Implicit(Neumann(terms, lr), **parts)


def hataya2023(rank: int = 20, *, damping: float = 0.1, **parts: Any) -> Implicit:
    """The Hessian from some of its columns, inverted exactly.

    dL_V/dλ ≈ ∂L_V/∂λ − (∂²L_T/∂λ∂w) (C W⁺ Cᵀ + damping)⁻¹ ∂L_V/∂w with C = H[:, K] and W = H[K, K], K drawn at random.
    Use it where a few directions carry the curvature. Costs 2 · ``rank`` + 6 gradients a step. Memory: ``rank`` vectors
    as large as the weights. Hataya and Yamada 2023, https://proceedings.mlr.press/v206/hataya23a.html.

    Args:
        rank: How many columns.
        damping: Above 0; about the curvature left outside the sketch.
        parts: Other arguments of :class:`Implicit`.
    """
    return Implicit(Nystrom(rank, damping), **parts)


def adjoint(**parts: Any) -> Adjoint:
    """The flagship: hypergradients from pairs of ordinary training gradients, with a tracked adjoint.

    p ← p − η ∘ ((H + ρ) p − ∂L_V/∂w) for every training update, and dL_V/dλ ≈ ∂L_V/∂λ − (∂²L_T/∂λ∂w) p. Use it for any
    number of hypers, differentiable or sampled, with any model that can be trained. Costs two gradients a training
    update and half a validation gradient; fewer with ``pair_every``. Memory: four more vectors as large as the weights.
    """
    return Adjoint(**parts)
