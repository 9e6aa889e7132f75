"""Learn the best response with a hypernetwork (Lorraine and Duvenaud 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.gradients import Gradient, train_gradient, train_gradients, valid_gradient
from bestresponse.memory import require_memory
from bestresponse.method import Alternate, Method, Metrics, ReadsHypers, Schedule, require_part
from bestresponse.optimizers import OptimizerFactory, ScheduleFactory, Updater
from bestresponse.parts import require_whole
from bestresponse.perturb import Gaussian, Perturbation
from bestresponse.problem import Batch, Params, Problem
from bestresponse.responses import Linear, Recipe, Response
from bestresponse.space import Raw
from bestresponse.state import State
from bestresponse.stream import Stream
from bestresponse.unrolling import FineTune, Place


@dataclass(kw_only=True)
class BestResponseState(State):
    """A response, and the two updaters that train it and move raw; the last fine-tuned weights, if there are any."""

    response: Response
    response_updater: Updater
    raw_updater: Updater
    fine_tuned: Params = field(default_factory=dict)


@final
@dataclass(frozen=True)
class BestResponse(Method, ReadsHypers):
    """Train a hypernetwork w_φ(λ) in place of the weights, and tune the hypers through it.

    A training update moves φ along the gradient of L_T(w_φ(λ), λ) at hypers drawn from p(λ); a change of raw moves λ̂
    along the gradient of L_V(w_φ(λ̂), λ̂). The four algorithms of Lorraine and Duvenaud
    (https://arxiv.org/abs/1802.09419) that use a hypernetwork differ in ``perturb`` and ``schedule`` alone; see
    :mod:`bestresponse.methods.catalog`.

    Args:
        response: What kind of hypernetwork.
        perturb: p(λ), where it is trained; ``None`` trains it at the current hypers only.
        samples: Hypers drawn for each training batch; each costs one gradient.
        centered: Feed the response the distance from the current hypers, λ − λ̂, instead of λ. Its bias is then the
            weights at λ̂, whatever λ̂ is.
        vectorize: Evaluate all samples at once, through ``torch.func.vmap``. Much faster for small models with
            several samples; not for models with BatchNorm.
        fine_tune: Follow the response with a few training updates, and judge it, in both losses, by the weights after
            them. Deployed are the fine-tuned weights of the last change of raw.
        schedule: When to train and when to tune.
        optimizer: For the hypernetwork.
        hyper_optimizer: For raw.
        lr_schedule: Learning-rate schedule of ``optimizer``.
        hyper_lr_schedule: Learning-rate schedule of ``hyper_optimizer``.
        hyper_lr: Learning rates for single hypers, by name.
    """

    response: Recipe = field(default_factory=Linear)
    perturb: Perturbation | None = field(default_factory=Gaussian)
    samples: int = 1
    centered: bool = False
    vectorize: bool = False
    fine_tune: FineTune | None = None
    schedule: Schedule = field(default_factory=Alternate)
    optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)
    hyper_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=3e-2)
    lr_schedule: ScheduleFactory | None = None
    hyper_lr_schedule: ScheduleFactory | None = None
    hyper_lr: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        require_part("response", self.response, Recipe, "br.Linear()")
        require_part("schedule", self.schedule, Schedule, "br.Alternate()")
        if self.perturb is not None:
            require_part("perturb", self.perturb, Perturbation, "br.Gaussian(0.1), or None")
        if self.fine_tune is not None:
            require_part("fine_tune", self.fine_tune, FineTune, "br.FineTune(3, br.updates.SGD(0.1)), or None")
        require_whole("samples", self.samples)
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1; got {self.samples}")
        if getattr(self.perturb, "learn", False):
            raise ValueError("BestResponse does not learn the scale of its perturb: use br.Gaussian(learn=False)")
        if self.perturb is None and self.centered:
            raise ValueError(
                "a centered response sees only the distance from the current hypers, which is always zero without "
                "perturb: it could never learn. Give a perturb, such as br.Gaussian(0.1), or centered=False"
            )
        if self.perturb is None and self.samples > 1:
            raise ValueError(f"without perturb all samples are the same; use samples=1, not {self.samples}")
        if getattr(self.perturb, "antithetic", False) and self.samples % 2:
            raise ValueError(f"antithetic draws come in pairs, so samples must be even; got {self.samples}")
        if self.fine_tune is not None and self.vectorize:
            raise ValueError("vectorize=True does not go together with fine_tune: each sample is trained by itself")

    def reads(self, problem: Problem) -> frozenset[str]:
        """The hypers that are settings of the fine-tuning updates."""
        return self.fine_tune.reads(problem) if self.fine_tune is not None else frozenset()

    @property
    def needs_raw_gradient(self) -> bool:
        """For fine-tuning, whose updates are differentiated."""
        return self.fine_tune is not None

    def init(self, problem: Problem, *, seed: int = 0) -> BestResponseState:
        """The response at the model's weights, the hypers at their starts."""
        self.reads(problem)
        params = problem.params()
        raw = problem.space.raw(dtype=problem.raw_dtype, device=problem.device)
        hypers, weights = vectors.numel(raw), vectors.numel(params)
        numbers = self.response.size(hypers, weights)
        require_memory(
            4 * numbers * torch.finfo(problem.raw_dtype).bits // 8,
            problem.device,
            f"{self.response!r} for {hypers:,} hypers and {weights:,} weights holds {numbers:,} numbers, four times "
            "that with their gradients and Adam's moments",
            "Use br.LowRank(rank) with a small rank, fewer hypers (br.per_layer instead of br.per_weight), or a method "
            "without a hypernetwork, such as br.methods.luketina2016()",
        )
        generator = torch.Generator(device=problem.device).manual_seed(seed)
        response = self.response.build(raw, params, generator)
        return BestResponseState(
            raw=raw,
            buffers=problem.buffers(),
            generator=generator,
            response=response,
            response_updater=Updater.of(dict(response.named_parameters()), self.optimizer, self.lr_schedule),
            raw_updater=Updater.of(raw, self.hyper_optimizer, self.hyper_lr_schedule, self.hyper_lr),
        )

    def step(self, problem: Problem, state: BestResponseState, train: Stream, valid: Stream) -> Metrics:
        """Training updates of the response, then a change of raw through it, as the schedule says."""
        plan, metrics = self.schedule.plan(state.step), Metrics()
        for _ in range(plan.train):
            metrics.train_loss = self._train(problem, state, train)
        if plan.tune:
            metrics.valid_loss = self._tune(problem, state, train, valid)
            metrics.moved = True
        state.step += 1
        return metrics

    def params(self, problem: Problem, state: BestResponseState) -> Params:
        """The response at the current hypers; or the last fine-tuned weights."""
        if state.fine_tuned:
            return vectors.clone(state.fine_tuned)
        with torch.no_grad():
            return self.respond(state, state.raw)

    def respond(self, state: BestResponseState, raw: Raw) -> Params:
        """The weights the response gives for any hypers, differentiable in them."""
        stacked = {name: leaf[None] for name, leaf in raw.items()}
        return {name: part[0] for name, part in state.response(self._seen(state, stacked)).items()}

    def hypergradient(
        self, problem: Problem, state: BestResponseState, batch: Batch, train: Stream | None = None
    ) -> tuple[Tensor, Raw]:
        """The validation loss on one batch, and its derivative in raw through the response.

        With ``fine_tune``, also through its updates, on batches from ``train``. What is deployed stays as it is.
        """
        loss, gradient, _ = self._hypergradient(problem, state, batch, train)
        return loss, gradient

    @torch.enable_grad()
    def _hypergradient(
        self, problem: Problem, state: BestResponseState, batch: Batch, train: Stream | None
    ) -> tuple[Tensor, Raw, Params]:
        """As :meth:`hypergradient`, and the fine-tuned weights."""
        raw = vectors.leaves(state.raw)
        params = self.respond(state, raw)

        def look(place: Place) -> Gradient:
            state.cost.valid_batches += 1
            state.cost.gradients += 1
            return valid_gradient(problem, place.params, state.raw, batch, buffers=state.buffers)

        gradient, fine_tuned = self._after_updates(problem, state, params, state.raw, train, look)
        loss, by_params, by_raw = gradient
        through = torch.autograd.grad(list(params.values()), list(raw.values()), [by_params[name] for name in params])
        return loss, {name: by_raw[name] + part for name, part in zip(raw, through, strict=True)}, fine_tuned

    @torch.enable_grad()
    def _train(self, problem: Problem, state: BestResponseState, train: Stream) -> Tensor:
        batch = next(train)
        if self.perturb is None:
            raw = {name: leaf[None] for name, leaf in state.raw.items()}
        else:
            raw = self.perturb.sample(state.raw, self.samples, state.generator)  # (samples, ...) each
        weights = state.response(self._seen(state, raw))
        losses, by_params = self._sampled_gradients(problem, state, weights, raw, batch, train)
        phi = dict(state.response.named_parameters())
        outer = [by_params[name] / self.samples for name in weights]
        state.response_updater.update(
            phi, dict(zip(phi, torch.autograd.grad(list(weights.values()), list(phi.values()), outer), strict=True))
        )
        state.cost.train_batches += 1
        state.cost.gradients += self.samples
        return losses.mean()

    def _sampled_gradients(
        self, problem: Problem, state: BestResponseState, weights: Params, raw: Raw, batch: Batch, train: Stream
    ) -> tuple[Tensor, Params]:
        """The training loss of each sample, and its derivative in the weights of the response."""
        at = {name: part.detach() for name, part in weights.items()}
        if self.fine_tune is None:
            vectorize = self.vectorize and self.samples > 1
            try:
                losses, by_params, _ = train_gradients(
                    problem, at, raw, batch, buffers=state.buffers, vectorize=vectorize
                )
            except RuntimeError as error:
                if vectorize:
                    error.add_note("in train_loss under torch.func.vmap; with vectorize=False it may do anything")
                raise
            return losses, by_params
        each = []
        for i in range(self.samples):
            own = {name: leaf[i] for name, leaf in raw.items()}

            def look(place: Place, own: Raw = own) -> Gradient:
                return train_gradient(problem, place.params, own, batch, buffers=state.buffers, with_raw=True)

            here = {name: part[i] for name, part in at.items()}
            each.append(self._after_updates(problem, state, here, own, train, look)[0])
        stacked = {name: torch.stack([gradient.params[name] for gradient in each]) for name in weights}
        return torch.stack([gradient.loss for gradient in each]), stacked

    def _after_updates(
        self,
        problem: Problem,
        state: BestResponseState,
        params: Params,
        raw: Raw,
        train: Stream | None,
        look: Callable[[Place], Gradient],
    ) -> tuple[Gradient, Params]:
        """What ``look`` gives at the weights ``params`` are fine-tuned to, as derivatives at ``params``; and those."""
        start = Place({name: part.detach() for name, part in params.items()}, {}, state.buffers)
        if self.fine_tune is None:
            return look(start), {}
        if train is None:
            raise ValueError("fine_tune trains the response's weights a little further: give train, a br.Stream")
        return self.fine_tune.gradient(problem, start, raw, train, look, generator=state.generator, cost=state.cost)

    def _tune(self, problem: Problem, state: BestResponseState, train: Stream, valid: Stream) -> Tensor:
        batch = next(valid)
        loss, hypergradient, state.fine_tuned = self._hypergradient(problem, state, batch, train)
        state.raw_updater.update(state.raw, hypergradient)
        return loss

    def _seen(self, state: BestResponseState, raw: Raw) -> Raw:
        """What the response is fed for these hypers."""
        return {name: leaf - state.raw[name] for name, leaf in raw.items()} if self.centered else raw
