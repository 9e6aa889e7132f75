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
from bestresponse.solvers import Identity


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


def adjoint(**parts: Any) -> Adjoint:
    """The flagship: hypergradients from pairs of ordinary training gradients, with a tracked adjoint.

    p ← p − η ∘ ((H + ρ) p − ∂L_V/∂w) for every training update, and dL_V/dλ ≈ ∂L_V/∂λ − (∂²L_T/∂λ∂w) p. Use it for any
    number of hypers, differentiable or sampled, with any model that can be trained. Costs two gradients a training
    update and half a validation gradient; fewer with ``pair_every``. Memory: four more vectors as large as the weights.
    """
    return Adjoint(**parts)
