"""Cross-validation: train from scratch for each trial, compare validation losses."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.evaluation import mean_losses
from bestresponse.gradients import train_gradient
from bestresponse.method import Method, Metrics, require_part
from bestresponse.optimizers import OptimizerFactory, ScheduleFactory, Updater
from bestresponse.problem import Params, Problem
from bestresponse.space import Hyper, Raw, Space
from bestresponse.state import State
from bestresponse.stream import Stream


class Trial(NamedTuple):
    """One finished trial: the hypers it was trained with, and what it is judged by.

    That is its loss on the whole validation data, plus the priors on its hypers.
    """

    raw: Raw
    score: float


class Sampler(abc.ABC):
    """Which hypers to try next. Final subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def count(self) -> int:
        """How many trials there will be."""

    @abc.abstractmethod
    def propose(self, space: Space, past: Sequence[Trial], generator: torch.Generator) -> Raw:
        """The raw hypers of trial number ``len(past)``, in any precision, anywhere. ``generator`` is on the CPU."""


@final
@dataclass(frozen=True)
class Random(Sampler):
    """Independent draws: uniform between the bounds (of the logarithm, for a log hyper).

    A hyper without two bounds is drawn from a Gaussian around its start, in raw units.

    Args:
        trials: How many.
        scale: Standard deviation for hypers without two bounds.
    """

    trials: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.trials < 1 or not self.scale > 0:
            raise ValueError(f"Random needs trials >= 1 and scale > 0; got {self.trials} and {self.scale}")

    def count(self) -> int:
        """``trials``."""
        return self.trials

    def propose(self, space: Space, past: Sequence[Trial], generator: torch.Generator) -> Raw:
        """A fresh draw."""
        start = space.raw(dtype=torch.float64, device="cpu")
        return {leaf: self._draw(space[space.leaves[leaf][0]], raw, generator) for leaf, raw in start.items()}

    def _draw(self, hyper: Any, start: Tensor, generator: torch.Generator) -> Tensor:
        if not isinstance(hyper, Hyper) or hyper.low is None or hyper.high is None:
            return start + self.scale * torch.randn(start.shape, generator=generator, dtype=torch.float64, device="cpu")
        # Away from the very ends, where raw is infinite.
        uniform = torch.rand(start.shape, generator=generator, dtype=torch.float64, device="cpu").clamp(1e-9, 1 - 1e-9)
        if hyper.log:
            low, high = math.log(hyper.low), math.log(hyper.high)
            return hyper.raw((low + (high - low) * uniform).exp())
        return hyper.raw(hyper.low + (hyper.high - hyper.low) * uniform)


@final
@dataclass(frozen=True)
class Grid(Sampler):
    """Every combination of the given values, the last name varying fastest.

    Args:
        values: For each hyper a list of values in natural units; hypers that are not named stay at their start. A
            number given for a hyper with a shape fills it.

    Example:
        >>> Grid({"decay": [1e-4, 1e-2], "dropout": [0.1, 0.3, 0.5]}).count()
        6
    """

    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        lists = self.values.values() if isinstance(self.values, Mapping) else [self.values]
        if not isinstance(self.values, Mapping) or not all(hasattr(values, "__len__") for values in lists):
            raise TypeError(
                f'Grid needs a list of values for each hyper, {{"decay": [1e-4, 1e-2]}}; got {self.values!r}'
            )
        if not self.values or any(len(values) == 0 for values in self.values.values()):
            raise ValueError(f"Grid needs at least one value for each hyper; got {dict(self.values)}")

    def count(self) -> int:
        """The product of the lists' lengths."""
        return math.prod(len(values) for values in self.values.values())

    def propose(self, space: Space, past: Sequence[Trial], generator: torch.Generator) -> Raw:
        """The next combination. The first time, all values are checked: the last may be hours away."""
        if not past:
            for name, values in self.values.items():
                for value in values:
                    space.raw({name: value})
        combination = next(itertools.islice(itertools.product(*self.values.values()), len(past), None))
        return space.raw(dict(zip(self.values, combination, strict=True)), dtype=torch.float64, device="cpu")


@dataclass(kw_only=True)
class BlackBoxState(State):
    """The trial in training, what came of the finished ones, and the weights of the best.

    ``raw`` and ``buffers`` are the best's too.
    """

    trial_raw: Raw
    trial_buffers: Params
    params: Params
    params_updater: Updater
    best_params: Params
    trial_step: int = 0
    tried: list[Raw] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        """The finished trials, in order."""
        return [Trial(raw, score) for raw, score in zip(self.tried, self.scores, strict=True)]


@final
@dataclass(frozen=True)
class BlackBox(Method):
    """Algorithm 1: train each trial from the model's weights with fixed hypers, keep the best on validation data.

    A step is one training update. After ``budget`` of them the trial is scored on one whole pass over the validation
    data; a trial that diverges counts as the worst. Until a first trial has finished, the one in training stands for
    the best.

    Args:
        sampler: Which hypers to try: :class:`Random` or :class:`Grid`.
        budget: Training updates a trial.
        optimizer: For the weights; fresh for each trial.
        lr_schedule: Its learning-rate schedule; fresh for each trial.
    """

    sampler: Sampler
    budget: int
    optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)
    lr_schedule: ScheduleFactory | None = None
    survives_non_finite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_part("sampler", self.sampler, Sampler, "br.Random(20)")
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1 training update; got {self.budget}")

    @property
    def steps(self) -> int:
        """Steps until every trial is finished: what to give ``tune``."""
        return self.sampler.count() * self.budget

    def init(self, problem: Problem, *, seed: int = 0) -> BlackBoxState:
        """The first trial, untrained."""
        generator = torch.Generator().manual_seed(seed)
        raw, params = self._propose(problem, [], generator), problem.params()
        return BlackBoxState(
            raw=raw,
            buffers=problem.buffers(),
            generator=generator,
            trial_raw=vectors.clone(raw),
            trial_buffers=problem.buffers(),
            params=params,
            params_updater=Updater.of(params, self.optimizer, self.lr_schedule),
            best_params=vectors.clone(params),
        )

    def step(self, problem: Problem, state: BlackBoxState, train: Stream, valid: Stream) -> Metrics:
        """One training update of the present trial; at its end, its score."""
        if len(state.scores) == self.sampler.count():
            return Metrics(finished=True)
        if state.trial_step == self.budget:
            self._begin(problem, state)
        gradient = train_gradient(problem, state.params, state.trial_raw, next(train), buffers=state.trial_buffers)
        state.params_updater.update(state.params, gradient.params)
        state.cost.train_batches += 1
        state.cost.gradients += 1
        state.trial_step += 1
        state.step += 1
        metrics = Metrics(train_loss=gradient.loss)
        if state.trial_step == self.budget:
            metrics.valid_loss = self._score(problem, state, valid)
            penalty = problem.space.penalty(state.trial_raw)
            score = metrics.valid_loss if penalty is None else metrics.valid_loss + penalty
            metrics.moved = self._record(state, float(score))
            metrics.finished = len(state.scores) == self.sampler.count()
        return metrics

    def params(self, problem: Problem, state: BlackBoxState) -> Params:
        """The best trial's weights."""
        return vectors.clone(state.best_params if state.scores else state.params)

    def _propose(self, problem: Problem, past: Sequence[Trial], generator: torch.Generator) -> Raw:
        raw = self.sampler.propose(problem.space, past, generator)
        return {name: leaf.to(dtype=problem.raw_dtype, device=problem.device) for name, leaf in raw.items()}

    def _begin(self, problem: Problem, state: BlackBoxState) -> None:
        state.trial_raw = self._propose(problem, state.trials, state.generator)
        state.trial_buffers = problem.buffers()
        state.params = problem.params()
        state.params_updater = Updater.of(state.params, self.optimizer, self.lr_schedule)
        state.trial_step = 0

    def _score(self, problem: Problem, state: BlackBoxState, valid: Stream) -> Tensor:
        losses, batches = mean_losses(
            {"loss": problem}, state.params, state.trial_buffers, state.trial_raw, valid.epoch()
        )
        state.cost.valid_batches += batches
        return losses["loss"]

    def _record(self, state: BlackBoxState, score: float) -> bool:
        """Note a finished trial; if it is the best so far, make it what the state stands for. Did raw change?"""
        first = not state.scores
        better = first or _rank(score) < min(map(_rank, state.scores))
        state.tried.append(vectors.clone(state.trial_raw))
        state.scores.append(score)
        if better:
            for name, leaf in state.raw.items():
                leaf.copy_(state.trial_raw[name])
            state.best_params = vectors.clone(state.params)
            state.buffers = vectors.clone(state.trial_buffers)
        return better and not first  # the first trial's hypers stand in raw from the start


def _rank(score: float) -> float:
    return score if math.isfinite(score) else math.inf
