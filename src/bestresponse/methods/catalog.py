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
from bestresponse.methods.unrolled import Unrolled
from bestresponse.perturb import Gaussian, Perturbation
from bestresponse.responses import MLP, Linear, Recipe
from bestresponse.solvers import CG, Identity, Neumann, Nystrom
from bestresponse.tolerances import PowerTolerance, Tolerance
from bestresponse.unrolling import DrMAD, FineTune, Forward, Reverse, Reversible
from bestresponse.updates import SGD, Update


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
    update and half a validation gradient; fewer with ``pair_every``. Memory: six more vectors as large as the weights
    than training with Adam takes: the adjoint, its two moments, averaged weights, the validation slope, the pair's
    second gradient.
    """
    return Adjoint(**parts)


def domke2012(update: Update, steps: int, **parts: Any) -> Unrolled:
    """Reverse mode through a whole training, from the model's first weights: exact for that training.

    dL_V/dλ = ∂L_V/∂λ + Σ_t (∂w_{t+1}/∂λ)ᵀ a_{t+1}, with a_t = (∂w_{t+1}/∂w_t)ᵀ a_{t+1} and a_T = ∂L_V/∂w. Use it for
    short trainings and any number of hypers, those of the update rule among them. Costs three gradients an update, and
    keeps weights and slots of every one. The paper unrolls gradient descent, heavy ball and LBFGS.
    Domke 2012, https://proceedings.mlr.press/v22/domke12.html.

    Args:
        update: The rule of the training updates, such as ``br.updates.SGD(0.1, momentum=0.9)``.
        steps: T, the updates of one training.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(Reverse(), update, steps, **parts)


def maclaurin2015(update: SGD, steps: int, **parts: Any) -> Unrolled:
    """Reverse mode that runs momentum SGD backwards, bit for bit, instead of keeping its weights.

    The derivative of :func:`domke2012`, with memory that hardly grows with T. Use it for long trainings, and for
    schedules with one learning rate and momentum an update. Costs four gradients an update, and arithmetic in whole
    numbers for each weight. Maclaurin, Duvenaud and Adams 2015, https://arxiv.org/abs/1502.03492.

    Args:
        update: ``br.updates.SGD`` with momentum.
        steps: T, the updates of one training.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(Reversible(), update, steps, **parts)


def drmad2016(update: Update, steps: int, **parts: Any) -> Unrolled:
    """Reverse mode along the straight line from the first weights to the last, which is all it keeps.

    As :func:`domke2012`, with w̃_t = (1 − t/T) w_0 + (t/T) w_T for w_t: biased. Use it for long trainings when an
    approximate hypergradient will do. Costs three gradients an update.
    Fu, Luo, Feng, Low and Chua 2016, https://arxiv.org/abs/1601.00917.

    Args:
        update: The rule of the training updates.
        steps: T, the updates of one training.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(DrMAD(), update, steps, **parts)


def franceschi2017_reverse(update: Update, steps: int, **parts: Any) -> Unrolled:
    """Reverse mode through a whole training, seen as a dynamical system of weights and slots: :func:`domke2012`.

    Franceschi, Donini, Frasconi and Pontil 2017, https://arxiv.org/abs/1703.01785.

    Args:
        update: The rule of the training updates.
        steps: T, the updates of one training.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(Reverse(), update, steps, **parts)


def franceschi2017_forward(update: Update, steps: int, **parts: Any) -> Unrolled:
    """Forward mode in real time: tangents are carried along one training, in which hypers move every few updates.

    Z_{t+1} = A_t Z_t + B_t with Z = dw/dλ, A = ∂w_{t+1}/∂w_t, B = ∂w_{t+1}/∂λ; every ``steps`` updates
    dL_V/dλ = ∂L_V/∂λ + Zᵀ ∂L_V/∂w. Use it for up to some dozens of hypers. Costs 1 + 2n gradients an update and keeps
    n tangents. ``mode=Forward()`` with ``restart=True`` is forward mode through whole trainings.
    Franceschi, Donini, Frasconi and Pontil 2017, https://arxiv.org/abs/1703.01785.

    Args:
        update: The rule of the training updates.
        steps: Updates between two changes of the hypers.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(**{"mode": Forward(carry=True), "update": update, "steps": steps, "restart": False, **parts})


def shaban2019(update: Update, steps: int, last: int, **parts: Any) -> Unrolled:
    """Truncated reverse mode: train for ``steps`` updates, and go back through the last few.

    The sum of :func:`domke2012` over t ≥ T − last. What it leaves out shrinks exponentially with ``last`` where the
    training loss is strongly convex around the end. Use it when full reverse takes too much memory or time. Costs one
    gradient an update, and two more for each of the last ones.
    Shaban, Cheng, Hatch and Boots 2019, https://arxiv.org/abs/1810.10667.

    Args:
        update: The rule of the training updates.
        steps: T, the updates of one training.
        last: How many to go back through.
        parts: Other arguments of :class:`Unrolled`.
    """
    return Unrolled(Reverse(last=last), update, steps, **parts)


def lorraine2018_fine_tuned(
    update: Update, steps: int, *, response: Recipe | None = None, perturb: Perturbation | None = None, **parts: Any
) -> BestResponse:
    """Algorithm 3 and unrolling together: the response's weights are trained a little further in both losses.

    L(U^k(w_φ(λ), λ), λ) stands for L(w_φ(λ), λ): the response has to come near the best weights only, and its error
    shrinks with every update. The paper proposes it for future work, and does not try it. Costs 3k + 1 gradients, where
    algorithm 3 takes one. Lorraine and Duvenaud 2018, https://arxiv.org/abs/1802.09419.

    Args:
        update: The rule of the updates.
        steps: k, how many.
        response: By default ``Linear()``.
        perturb: p(λ|λ̂); by default N(λ̂, 0.1²).
        parts: Other arguments of :class:`BestResponse`.
    """
    fine_tune = FineTune(steps, update)
    return BestResponse(response or Linear(), perturb or Gaussian(0.1), fine_tune=fine_tune, **parts)
