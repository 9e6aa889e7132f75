"""The shape every method has: a frozen recipe, and a state that holds all that changes in a run."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor

from bestresponse.parts import require_part as require_part
from bestresponse.parts import require_whole
from bestresponse.problem import Params, Problem
from bestresponse.state import State
from bestresponse.stream import Stream


@final
@dataclass
class Metrics:
    """What one step reports. Tensors stay on the device: reading them is the loop's business."""

    train_loss: Tensor | None = None
    valid_loss: Tensor | None = None
    moved: bool = False  # did raw change?
    finished: bool = False  # has the method nothing left to do?
    extra: dict[str, float | Tensor] = field(default_factory=dict)  # further numbers for the history


class Method(abc.ABC):
    """A way to tune a problem. Final subclasses are frozen dataclasses; what changes lives in the state.

    An own loop needs no more than this::

        state = method.init(problem, seed=0)
        train, valid = br.Stream(train_loader), br.Stream(valid_loader)
        for _ in range(1000):
            method.step(problem, state, train, valid)
        weights = method.params(problem, state)
    """

    #: If it needs the raw gradient: does it do without that of sampled hypers, given one loss per example?
    regresses_sampled: ClassVar[bool] = False
    #: Is a loss that becomes NaN or infinite the method's own business, rather than the end of the run?
    survives_non_finite: ClassVar[bool] = False
    #: The names that ``Metrics.extra`` may have: columns of the history.
    extras: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_raw_gradient(self) -> bool:
        """Does the method need the derivative of the training loss in every hyper?"""
        return False

    @abc.abstractmethod
    def init(self, problem: Problem, *, seed: int = 0) -> State:
        """A fresh state at the model's weights and the hypers' starts."""

    @abc.abstractmethod
    def step(self, problem: Problem, state: Any, train: Stream, valid: Stream) -> Metrics:
        """Train, then change raw at most once."""

    @abc.abstractmethod
    def params(self, problem: Problem, state: Any) -> Params:
        """Ordinary weights to deploy at ``state.raw``."""


class ReadsHypers(abc.ABC):
    """A method that makes use of hypers itself, such as a learning rate. The training loss need not read those."""

    @abc.abstractmethod
    def reads(self, problem: Problem) -> frozenset[str]:
        """Their names. Raises where a hyper cannot be what the method takes it for."""


class Retrains(abc.ABC):
    """A method whose hypers are those of its own training updates, and not of any training to the end."""

    @abc.abstractmethod
    def retrain(self, problem: Problem, state: Any, train: Stream) -> tuple[int, Params, Params]:
        """Train anew from the model's start, as the run was, with the present hypers: updates, weights, buffers."""


class Plan(NamedTuple):
    """What one step does: so many training updates, then a change of raw or none."""

    train: int
    tune: bool


class Schedule(abc.ABC):
    """When to train and when to tune."""

    @abc.abstractmethod
    def plan(self, step: int) -> Plan:
        """What step number ``step`` (from 0) does."""


@final
@dataclass(frozen=True)
class Alternate(Schedule):
    """``train`` training updates, then one change of raw, again and again.

    Args:
        train: Training updates a step.
        warmup: The first so many training updates leave raw where it is; ``math.inf`` for training alone.
    """

    train: int = 1
    warmup: float = 0

    def __post_init__(self) -> None:
        require_whole("train", self.train)
        if self.train < 1 or self.warmup < 0:
            raise ValueError(
                f"Alternate needs train >= 1 and warmup >= 0; got train={self.train}, warmup={self.warmup}"
            )

    def plan(self, step: int) -> Plan:
        """Train always; tune once warm."""
        return Plan(self.train, (step + 1) * self.train > self.warmup)


@final
@dataclass(frozen=True)
class ThenTune(Schedule):
    """``train`` steps of one training update each; after them only raw is changed.

    Args:
        train: Steps before the first change of raw.
    """

    train: int

    def __post_init__(self) -> None:
        require_whole("train", self.train)
        if self.train < 1:
            raise ValueError(f"ThenTune needs at least one training step; got {self.train}")

    def plan(self, step: int) -> Plan:
        """Train first, then tune."""
        return Plan(1, False) if step < self.train else Plan(0, True)
