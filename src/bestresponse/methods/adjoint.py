"""Track the adjoint: hypergradients from ordinary training gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import (
    Pair,
    antithetic_pair,
    slopes_along,
    train_gradient,
    valid_gradient,
    with_same_randomness,
)
from bestresponse.method import Alternate, Method, Metrics, Schedule, require_part
from bestresponse.optimizers import OptimizerFactory, Pace, ScheduleFactory, Updater, inverse_root
from bestresponse.perturb import Gaussian
from bestresponse.problem import Batch, Params, Problem, examples
from bestresponse.space import Raw
from bestresponse.state import State
from bestresponse.stream import Stream
from bestresponse.vectors import Vector

BETAS: Final = (0.9, 0.999)  # of the adjoint's moments, as in Adam
MEMORY: Final = 0.99  # of the powers of signal and noise


@dataclass(kw_only=True)
class AdjointState(State):
    """Weights in training, their adjoint, and what has been gathered since raw last moved.

    Attributes:
        params: The weights in training.
        averaged: Their running mean, which is deployed; empty where the weights in training are.
        live_buffers: The buffers that belong to the weights in training; ``buffers`` belong to what is deployed.
        params_updater: The optimizer of the weights.
        raw_updater: The optimizer of raw.
        adjoint: p ≈ (H + damping)⁻¹ ∂L_V/∂w.
        moments: First and second moment of the adjoint's own gradient.
        squares: Mean squares of the training gradient, for weight optimizers that keep none themselves.
        slope: ∂L_V/∂w, from the newest validation batch.
        direct: ∂L_V/∂raw, likewise.
        gathered: The sum of the hypergradients since raw moved, one a pair.
        gathered_squares: The sum of their squares.
        seen: How many of them were not zero, number by number: a batch says nothing of another batch's example weights.
        powers: Mean squares of single hypergradients, and of their means between two moves: how much is signal.
        pairs: How many that are.
        updates: Training updates so far.
        tracked: Updates of the adjoint so far.
        log_scale: Logarithms of the perturbations' scales, for sampled hypers.
        log_scale_updater: Their optimizer, when they are learned.
        scale_gathered: As ``gathered``, for the scales.
    """

    params: Params
    averaged: Params
    live_buffers: Params
    params_updater: Updater
    raw_updater: Updater
    adjoint: Params
    moments: list[Params]
    squares: Params
    slope: Params
    direct: Raw
    gathered: Raw
    gathered_squares: Raw
    seen: Raw
    powers: list[Raw]
    pairs: int = 0
    updates: int = 0
    tracked: int = 0
    log_scale: Raw
    log_scale_updater: Updater | None
    scale_gathered: Raw


@final
@dataclass(frozen=True)
class Adjoint(Method):
    """Train the weights, and track the one vector that every hypergradient needs.

    The hypergradient is ∂L_V/∂λ − (∂²L_T/∂λ∂w) p with the adjoint p = H⁻¹ ∂L_V/∂w: as large as the weights, however
    many hypers there are, and slow to change. So p takes one stochastic step on ½pᵀ(H + ρ)p − pᵀ∂L_V/∂w for every
    training update, and all that is needed of the training loss comes from one pair of ordinary gradients, at w ± δp
    on one batch with the same random numbers: their mean trains the weights, their difference is Hp, and the
    difference of the gradients in λ is the product above. No second derivative is taken anywhere.

    The damping ρ = D / (lr · horizon) is made of the weight optimizer's own rate lr / D (for Adam D = √v). With it p is
    the adjoint of about ``horizon`` more steps of that optimizer.

    For a ``sampled`` hyper every example is trained at its own raw + σε, and its part of the hypergradient is the
    regression of the examples' slopes along p on ε: no derivative in the hyper is needed.

    Args:
        horizon: Steps of the weight optimizer that a change of the hypers is followed for.
        pair_every: Take the pair every so many training updates, and one plain gradient in between: cheaper, and the
            adjoint follows more slowly.
        valid_every: Pairs between two validation gradients.
        average: Deploy the mean of the weights over about so many last updates, which takes out the noise that a
            constant learning rate leaves in them; 1 to deploy the weights as they are.
        perturb: For sampled hypers: the Gaussian that each example's raw is drawn from.
        schedule: When to train and when to tune. The hypergradient is the mean over all pairs since the last change.
        tracking: How fast the adjoint moves: its largest step, measured against that of the weights.
        difference: ‖δp‖ as a part of ‖w‖.
        optimizer: For the weights.
        hyper_optimizer: For raw.
        lr_schedule: Learning-rate schedule of ``optimizer``.
        hyper_lr_schedule: Learning-rate schedule of ``hyper_optimizer``; by default it falls with the root of the
            number of moves, so that raw neither outruns weights that follow slowly nor wanders where it sees mostly
            noise.
        hyper_lr: Learning rates for single hypers, by name.
    """

    horizon: float = 100.0
    pair_every: int = 1
    valid_every: int = 5
    average: int = 100
    perturb: Gaussian = Gaussian(1.0, antithetic=True)
    schedule: Schedule = field(default_factory=partial(Alternate, train=10, warmup=300))
    tracking: float = 3.0
    difference: float = 1e-2
    optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)
    # Gradients in raw may be tiny in themselves, as exp(λ) is for a small decay: Adam must not take them for zero.
    hyper_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=0.1, eps=1e-16)
    lr_schedule: ScheduleFactory | None = None
    hyper_lr_schedule: ScheduleFactory | None = inverse_root
    hyper_lr: Mapping[str, float] | None = None
    regresses_sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_part("perturb", self.perturb, Gaussian, "br.Gaussian(1.0, antithetic=True)")
        require_part("schedule", self.schedule, Schedule, "br.Alternate(train=10, warmup=300)")
        for name in ("horizon", "pair_every", "valid_every", "average", "tracking", "difference"):
            value = getattr(self, name)
            whole = name in ("pair_every", "valid_every", "average")
            if not value > 0 or (whole and value != int(value)):
                raise ValueError(f"{name} must be a {'whole ' if whole else ''}number above 0; got {value}")
        if self.perturb.mean is not None:
            raise ValueError("perturb must follow the hypers, so it takes no fixed mean: br.Gaussian(scale)")
        if self.perturb.clip is not None:
            raise ValueError("perturb takes no clip here: draws that were moved would bias the regression on them")

    @property
    def needs_raw_gradient(self) -> bool:
        """Always."""
        return True

    def init(self, problem: Problem, *, seed: int = 0) -> AdjointState:
        """The model's weights, the hypers at their starts, and an adjoint of zero."""
        params = problem.params()
        raw = problem.space.raw(dtype=problem.raw_dtype, device=problem.device)
        sampled = {leaf: part for leaf, part in raw.items() if problem.space.leaves[leaf][0] in problem.space.sampled}
        log_scale = {leaf: self.perturb.scale_of(leaf, part).log() for leaf, part in sampled.items()}
        return AdjointState(
            raw=raw,
            buffers=problem.buffers(),
            live_buffers=problem.buffers(),
            generator=torch.Generator(device=problem.device).manual_seed(seed),
            params=params,
            averaged=vectors.clone(params) if self.average > 1 else {},
            params_updater=Updater.of(params, self.optimizer, self.lr_schedule),
            raw_updater=Updater.of(raw, self.hyper_optimizer, self.hyper_lr_schedule, self.hyper_lr),
            adjoint=vectors.zeros_like(params),
            moments=[vectors.zeros_like(params), vectors.zeros_like(params)],
            squares={} if _keeps_its_pace(self.optimizer, next(iter(params.values()))) else vectors.zeros_like(params),
            slope=vectors.zeros_like(params),
            direct=vectors.zeros_like(raw),
            gathered=vectors.zeros_like(raw),
            gathered_squares=vectors.zeros_like(raw),
            seen=vectors.zeros_like(raw),
            powers=[vectors.zeros_like(raw), vectors.zeros_like(raw)],
            log_scale=log_scale,
            log_scale_updater=Updater.of(log_scale, self.hyper_optimizer, self.hyper_lr_schedule)
            if self.perturb.learn and log_scale
            else None,
            scale_gathered=vectors.zeros_like(log_scale),
        )

    def step(self, problem: Problem, state: AdjointState, train: Stream, valid: Stream) -> Metrics:
        """Training updates, each with its pair, then a change of raw along the mean of their hypergradients."""
        plan, metrics = self.schedule.plan(state.step), Metrics()
        # The adjoint forgets what is older than its horizon: no need to follow it earlier in a warm-up.
        ahead = math.ceil(self.horizon / max(plan.train, 1))
        follow = plan.tune or self.schedule.plan(state.step + ahead).tune
        for _ in range(plan.train):
            if not follow or state.updates % self.pair_every:
                metrics.train_loss = self._train(problem, state, next(train))
            else:
                if (state.updates // self.pair_every) % self.valid_every == 0:
                    metrics.valid_loss = self._look(problem, state, next(valid))
                metrics.train_loss = self._train_and_track(problem, state, next(train))
        if plan.tune and state.pairs:
            self._move(state)
            if state.log_scale_updater is not None:
                state.log_scale_updater.update(state.log_scale, vectors.scale(1 / state.pairs, state.scale_gathered))
            metrics.moved = True
        for gathered in (state.gathered, state.gathered_squares, state.seen, state.scale_gathered):
            for part in gathered.values():
                part.zero_()
        state.pairs = 0
        state.step += 1
        return metrics

    def params(self, problem: Problem, state: AdjointState) -> Params:
        """The averaged weights."""
        return vectors.clone(state.averaged or state.params)

    def _move(self, state: AdjointState) -> None:
        """Move raw along the mean of the hypergradients, each number as far as they agree about it.

        An optimizer such as Adam goes as far along noise as along a signal. So its step is multiplied by the root mean
        square of the means over that of single hypergradients: one where all are alike, and one over the root of the
        number of pairs where there is nothing but noise. With one pair a move nothing can be told apart.
        """
        before = vectors.clone(state.raw)
        mean = vectors.scale(1 / state.pairs, state.gathered)
        state.raw_updater.update(state.raw, mean)
        for leaf in mean:
            single, joint = state.powers[0][leaf], state.powers[1][leaf]
            seen = state.seen[leaf].clamp(min=1)
            single.lerp_(state.gathered_squares[leaf] / seen, 1 - MEMORY)
            joint.lerp_((state.gathered[leaf] / seen).square(), 1 - MEMORY)
            signal = torch.where(single > 0, joint / single, 1.0).sqrt()
            state.raw[leaf].copy_(torch.lerp(before[leaf], state.raw[leaf], signal))

    def _look(self, problem: Problem, state: AdjointState, batch: Batch) -> Tensor:
        """The validation gradient at the present weights."""
        loss, state.slope, state.direct = valid_gradient(
            problem, state.params, state.raw, batch, buffers=state.live_buffers
        )
        state.cost.valid_batches += 1
        state.cost.gradients += 1
        return loss

    def _train(self, problem: Problem, state: AdjointState, batch: Batch) -> Tensor:
        """One ordinary training update."""
        gradient = train_gradient(
            problem, state.params, self._draw(state, batch).raw, batch, buffers=state.live_buffers
        )
        self._update(state, gradient.params)
        state.cost.train_batches += 1
        state.cost.gradients += 1
        return gradient.loss

    def _train_and_track(self, problem: Problem, state: AdjointState, batch: Batch) -> Tensor:
        """A training update from a pair; its differences move the adjoint, and estimate the hypergradient."""
        pair, mixed, by_scale = self._measure(problem, state, batch, state.live_buffers)
        for leaf, part in mixed.items():
            estimate = state.direct[leaf] - part
            state.gathered[leaf] += estimate
            state.gathered_squares[leaf] += estimate.square()
            state.seen[leaf] += estimate != 0
        for leaf, part in by_scale.items():
            state.scale_gathered[leaf] -= part + self.perturb.entropy
        state.pairs += 1
        self._track(state, pair.curvature)
        self._update(state, pair.params)
        state.cost.train_batches += 1
        state.cost.gradients += 2
        return pair.loss

    def hypergradient(
        self, problem: Problem, state: AdjointState, train_batch: Batch, valid_batch: Batch
    ) -> tuple[Tensor, Raw]:
        """The validation loss on one batch, and the hypergradient with the present adjoint on one training batch."""
        loss, _, direct = valid_gradient(problem, state.params, state.raw, valid_batch, buffers=state.live_buffers)
        _, mixed, _ = self._measure(problem, state, train_batch, vectors.clone(state.live_buffers))
        state.cost.train_batches += 1
        state.cost.valid_batches += 1
        state.cost.gradients += 3
        return loss, vectors.axpy(-1.0, mixed, direct)

    def _draw(self, state: AdjointState, batch: Batch) -> _Draw:
        """Raw for each example's own value of the sampled hypers."""
        if not state.log_scale:
            return _Draw(state.raw, state.raw, {})
        count = examples(batch) or 0
        noise = {leaf: self.perturb.noise(state.raw[leaf], count, state.generator) for leaf in state.log_scale}
        moves = {leaf: state.log_scale[leaf].exp() * part for leaf, part in noise.items()}
        return _Draw(
            {**state.raw, **{leaf: state.raw[leaf] + move for leaf, move in moves.items()}},
            {**state.raw, **{leaf: state.raw[leaf] - move for leaf, move in moves.items()}},
            noise,
        )

    def _measure(self, problem: Problem, state: AdjointState, batch: Batch, buffers: Params) -> tuple[Pair, Raw, Raw]:
        """A pair, (∂²L_T/∂raw∂w) p, and −dL_V/dlog σ of the sampled hypers.

        For sampled hypers both come from the slope s of each example's loss along p: the derivatives of E[s] in the
        mean and in the logarithm of the scale of a Gaussian are E[s ε] / σ and E[s (ε² − 1)].
        """
        draw, vector, delta = self._draw(state, batch), state.adjoint, self._difference(state)
        if draw.noise and self.perturb.antithetic:
            both: list[Any] = with_same_randomness(
                [
                    lambda: antithetic_pair(problem, state.params, draw.raw, batch, vector, delta, buffers=buffers),
                    lambda: slopes_along(problem, state.params, draw.mirrored, batch, vector, delta, buffers=buffers),
                ],
                problem.device,
            )
            pair, mirrored = both
            odd, even = (pair.slopes - mirrored) / 2, (pair.slopes + mirrored) / 2
            estimates = {leaf: torch.tensordot(odd, part, dims=1) / len(odd) for leaf, part in draw.noise.items()}
        else:
            pair = antithetic_pair(problem, state.params, draw.raw, batch, vector, delta, buffers=buffers)
            even = pair.slopes
            estimates = {leaf: _covariance(even, part) for leaf, part in draw.noise.items()}
        mixed = {leaf: estimate / state.log_scale[leaf].exp() for leaf, estimate in estimates.items()}
        mixed = {leaf: mixed[leaf] if leaf in mixed else pair.mixed[leaf] for leaf in state.raw}
        learnt = draw.noise if self.perturb.learn else {}
        return pair, mixed, {leaf: _covariance(even, part.square() - 1) for leaf, part in learnt.items()}

    def _difference(self, state: AdjointState) -> Tensor:
        """δ, without waiting for the device."""
        w, p = vectors.norm(state.params), vectors.norm(state.adjoint)
        return self.difference * torch.where(w > 0, w, 1.0) / p.clamp(min=torch.finfo(p.dtype).tiny ** 0.5)

    def _track(self, state: AdjointState, curvature: Vector) -> None:
        """One step of Adam on ½pᵀ(H + ρ)p − pᵀ∂L_V/∂w.

        Its gradient is multiplied by the weights' learning rate, which leaves Adam's steps as they are and gives no
        infinity where a schedule brings that rate to zero. The step size is the one with which the weights would move
        if their gradient were ∂L_V/∂w, so that no scale of losses, weights or layers is left in it; but at least a
        tenth of the mean over all tensors, for those that the validation loss does not see and the curvature couples
        to it.
        """
        if state.updates == 0:
            return  # the optimizer knows nothing of its own pace yet
        state.tracked += 1
        correct1, correct2 = (1 - beta**state.tracked for beta in BETAS)
        paces = self._paces(state)
        sizes = {
            name: lr * _root_mean_square(state.slope[name]) / _root_mean_square(divisor)
            for name, (lr, divisor, _) in paces.items()
        }
        least = torch.stack(list(sizes.values())).mean() / 10
        for name, (lr, divisor, decay) in paces.items():
            p, slope = state.adjoint[name], state.slope[name]
            first, second = state.moments[0][name], state.moments[1][name]
            gradient = lr * (curvature[name] + decay * p - slope) + divisor * p / self.horizon
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            smallest = 1e-8 * lr * _root_mean_square(slope) + torch.finfo(p.dtype).tiny
            direction = (first / correct1) / ((second / correct2).sqrt() + smallest)
            p.sub_(self.tracking * torch.maximum(sizes[name], least) * direction)

    def _update(self, state: AdjointState, gradient: Params) -> None:
        """Move the weights."""
        for name, square in state.squares.items():
            square.lerp_(gradient[name].square(), 1 - BETAS[1])
        state.params_updater.update(state.params, gradient)
        state.updates += 1
        weight = 1 / min(state.updates, self.average)
        for name, mean in state.averaged.items():
            mean.lerp_(state.params[name], weight)
        for name, buffer in state.live_buffers.items():
            kept = state.buffers[name]
            if buffer.is_floating_point():  # equal ones stay as they are: a mask of -inf has no mean
                kept.copy_(torch.where(kept == buffer, kept, torch.lerp(kept, buffer, weight)))
            else:
                kept.copy_(buffer)

    def _paces(self, state: AdjointState) -> dict[str, tuple[float | Tensor, float | Tensor, float | Tensor]]:
        """The weight optimizer's rate, divisor and decay; the divisor is estimated where the optimizer has none."""
        paces = {}
        for name, (lr, divisor, decay) in Pace.of_all(state.params_updater.optimizer, state.params).items():
            if divisor is None:
                divisor = (state.squares[name] / (1 - BETAS[1] ** state.updates)).sqrt()
            paces[name] = (lr, divisor, decay)
        return paces


@final
class _Draw(NamedTuple):
    """Raw with sampled hypers moved, one value per example; the same moved the other way; and the moves over σ."""

    raw: Raw
    mirrored: Raw
    noise: Raw


def _covariance(slopes: Tensor, noise: Tensor) -> Tensor:
    """Of ``(batch,)`` and ``(batch, *shape)`` over the batch, without bias: ``shape``."""
    return torch.tensordot(slopes - slopes.mean(), noise, dims=1) / max(len(slopes) - 1, 1)


def _root_mean_square(tensor: float | Tensor) -> Any:
    return tensor.square().mean().sqrt() if isinstance(tensor, Tensor) else abs(tensor)


def _keeps_its_pace(optimizer: OptimizerFactory, like: Tensor) -> bool:
    """Does this optimizer's own state tell how it moves weights? Found out by one step on four of their kind."""
    probe = {"": like.new_zeros(2, 2)}
    updater = Updater.of(probe, optimizer)
    updater.update(probe, {"": like.new_ones(2, 2)})
    return Pace.of_all(updater.optimizer, probe)[""].divisor is not None
