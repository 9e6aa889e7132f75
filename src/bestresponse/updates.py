"""Update rules that can be differentiated: torch's optimizers, written as functions of the hypers too.

Every setting of a rule is a number, or the *name of a hyper*: ``SGD(lr="lr", momentum="momentum")``. Such a hyper may
be

- one number, for all weights and all updates;
- one number by layer or by parameter (``br.per_layer(model)``, ``br.per_tensor(model)``);
- a schedule, of shape ``(T,)``: one number for each of T updates; also by layer or by parameter, each ``(T,)``;
- one number for each weight (``br.per_weight(model)``).

With settings that are numbers, a rule agrees with the torch optimizer of its name, update for update.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from bestresponse.problem import Params
from bestresponse.space import Hyper, Shape, Space, Values, layer_of
from bestresponse.vectors import Vector

#: A number, or the name of the hyper that it is.
Setting = float | str
#: What a rule remembers between updates, by name: a velocity, moments. Each is as large as the weights.
Slots = dict[str, Vector]


class Range(NamedTuple):
    """A setting and where it must lie: from ``low`` to ``high``, or with ``below`` not quite to ``high``."""

    setting: Setting
    low: float = 0.0
    high: float = math.inf
    below: bool = False


class Update(abc.ABC):
    """A rule for one training update. Final subclasses are frozen dataclasses."""

    @property
    @abc.abstractmethod
    def settings(self) -> Mapping[str, Range]:
        """Every setting by its name."""

    @property
    @abc.abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """The names of what is remembered between updates."""

    @abc.abstractmethod
    def step(
        self, params: Params, slots: Slots, gradient: Vector, values: Values, *, index: int, count: int
    ) -> tuple[Params, Slots]:
        """New weights and slots after one update. Differentiable in all that is given.

        Args:
            params: The weights.
            slots: What the last update left.
            gradient: ∂L_T/∂w at the weights.
            values: At least the hypers that settings name, in natural units.
            index: Which value of a schedule to take.
            count: Updates since the slots were zero.
        """

    def slots(self, params: Params) -> Slots:
        """What is remembered before the first update: zeros."""
        return {slot: {name: torch.zeros_like(p) for name, p in params.items()} for slot in self.slot_names}

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the hypers that settings are."""
        names = [part.setting for part in self.settings.values() if isinstance(part.setting, str)]
        return tuple(dict.fromkeys(names))

    def check(self, space: Space, shapes: Mapping[str, Shape], steps: int) -> None:
        """Raise unless every hyper that a setting names is there, and can be that setting.

        Args:
            space: The space.
            shapes: The shape of each parameter.
            steps: How many updates there will be: the length of a schedule.
        """
        for setting, span in self.settings.items():
            if isinstance(name := span.setting, str):
                what = f"{type(self).__name__}({setting}={name!r})"
                if name not in space:
                    raise KeyError(
                        f"{what} names a hyper that the space does not have: it has {', '.join(space)}. Declare it, "
                        "or give a number"
                    )
                hyper = space[name]
                if not isinstance(hyper, Hyper) or hyper.sampled:
                    kind = "sampled" if isinstance(hyper, Hyper) else "a br.Net"
                    raise TypeError(f"{what} needs a br.Hyper that is not sampled, and {name!r} is {kind}")
                _check_bounds(what, name, hyper, span)
                _check_shape(what, hyper, shapes, steps)


@final
@dataclass(frozen=True)
class SGD(Update):
    """Gradient descent with momentum: v ← μv + ∂L_T/∂w + δw, and w ← w − η v. As ``torch.optim.SGD``.

    Args:
        lr: η, the learning rate.
        momentum: μ; the number 0 for none.
        weight_decay: δ, the optimizer's own decay.
        nesterov: Move along ∂L_T/∂w + δw + μv in place of v.

    Example:
        >>> SGD(lr="rate", momentum=0.9).reads
        ('rate',)
    """

    lr: Setting
    momentum: Setting = 0.0
    weight_decay: Setting = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.nesterov and not self.has_momentum:
            raise ValueError("nesterov=True needs a momentum above 0")

    @property
    def has_momentum(self) -> bool:
        """Is there a velocity?"""
        return self.momentum != 0.0

    @property
    def settings(self) -> Mapping[str, Range]:
        """Every setting by its name."""
        return {
            "lr": Range(self.lr),
            "momentum": Range(self.momentum, high=1.0),
            "weight_decay": Range(self.weight_decay),
        }

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The velocity, where there is one."""
        return ("velocity",) if self.has_momentum else ()

    def step(
        self, params: Params, slots: Slots, gradient: Vector, values: Values, *, index: int, count: int
    ) -> tuple[Params, Slots]:
        """One update."""
        moved, velocity = {}, {}
        for name, w in params.items():
            lr, momentum, decay = (
                resolve(setting, values, name, w.shape, index)
                for setting in (self.lr, self.momentum, self.weight_decay)
            )
            direction = gradient[name] if _is_zero(decay) else gradient[name] + decay * w
            if self.has_momentum:
                v = momentum * slots["velocity"][name] + direction
                direction = direction + momentum * v if self.nesterov else v
                velocity[name] = v.to(w.dtype)
            moved[name] = (w - lr * direction).to(w.dtype)
        return moved, ({"velocity": velocity} if self.has_momentum else {})


@final
@dataclass(frozen=True)
class Adam(Update):
    """Adam: w ← w − η m̂ / (√v̂ + ε). As ``torch.optim.Adam``, or with ``decoupled`` as ``torch.optim.AdamW``.

    m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g², with m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ) at update t. Where v is
    zero, the derivative of √v is taken as zero: a weight that never had a gradient gives no NaN.

    Args:
        lr: η, the learning rate.
        betas: β₁ and β₂, below 1.
        eps: ε, above 0.
        weight_decay: The optimizer's own decay δ: added to the gradient as δw.
        decoupled: Shrink the weights by ηδw instead, past the moments.
    """

    lr: Setting
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    eps: Setting = 1e-8
    weight_decay: Setting = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise TypeError(f"betas must be two settings, such as (0.9, 0.999); got {self.betas!r}")
        _check_numbers(self)
        if self.eps == 0.0 or 1.0 in self.betas:
            raise ValueError(f"Adam needs eps above 0 and betas below 1; got eps={self.eps}, betas={self.betas}")

    @property
    def settings(self) -> Mapping[str, Range]:
        """Every setting by its name."""
        return {
            "lr": Range(self.lr),
            "beta1": Range(self.betas[0], high=1.0, below=True),
            "beta2": Range(self.betas[1], high=1.0, below=True),
            "eps": Range(self.eps),
            "weight_decay": Range(self.weight_decay),
        }

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The two moments."""
        return ("first", "second")

    def step(
        self, params: Params, slots: Slots, gradient: Vector, values: Values, *, index: int, count: int
    ) -> tuple[Params, Slots]:
        """One update."""
        moved: Params = {}
        after: Slots = {"first": {}, "second": {}}
        for name, w in params.items():
            lr, beta1, beta2, eps, decay = (
                resolve(part.setting, values, name, w.shape, index) for part in self.settings.values()
            )
            g = gradient[name]
            if not _is_zero(decay):
                g, w = (g, w - lr * decay * w) if self.decoupled else (g + decay * w, w)
            first = beta1 * slots["first"][name] + (1 - beta1) * g
            second = beta2 * slots["second"][name] + (1 - beta2) * g * g
            size = _root(second / (1 - beta2 ** (count + 1))) + eps
            dtype = params[name].dtype
            moved[name] = (w - lr * first / (1 - beta1 ** (count + 1)) / size).to(dtype)
            after["first"][name], after["second"][name] = first.to(dtype), second.to(dtype)
        return moved, after


def resolve(setting: Setting, values: Values, parameter: str, shape: Shape, index: int) -> float | Tensor:
    """A setting for one parameter at one update: a number, one tensor number, or one a weight."""
    if not isinstance(setting, str):
        return setting
    value = values[setting]
    if isinstance(value, Mapping):
        if parameter in value and value[parameter].shape == shape:
            own: Tensor = value[parameter]
            return own
        value = value[parameter] if parameter in value else value[layer_of(parameter)]
    number: Tensor = value[index] if value.ndim else value
    return number


def _root(square: Tensor) -> Tensor:
    """√x, with the derivative 0 at 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _is_zero(setting: float | Tensor) -> bool:
    return not isinstance(setting, Tensor) and setting == 0.0


def _check_numbers(update: Update) -> None:
    for name, (setting, low, high, _) in update.settings.items():
        if isinstance(setting, str):
            continue
        if isinstance(setting, bool) or not isinstance(setting, float | int):
            raise TypeError(f"{name} must be a number or the name of a hyper; got {setting!r}")
        if not low <= setting <= high or math.isinf(setting):
            span = f"between {low:g} and {high:g}" if math.isfinite(high) else f"finite and at least {low:g}"
            raise ValueError(f"{name} must be {span}; got {setting}")


def _check_bounds(what: str, name: str, hyper: Hyper, span: Range) -> None:
    low, high = span.low, span.high
    lowest = 0.0 if hyper.log and hyper.low is None else hyper.low
    finite, highest = math.isfinite(high), math.inf if hyper.high is None else hyper.high
    if lowest is None or lowest < low or (finite and highest > high):
        rule = f"must stay between {low:g} and {high:g}" if finite else f"must not fall below {low:g}"
    elif span.below and highest == high:  # which a hyper reaches when it is rounded, and 1 − β is then 0
        rule = f"must stay below {high:g}"
    else:
        return
    bounds = f"low={low}, high={0.9999 if span.below else high}" if finite else f"log=True or low={low}"
    raise ValueError(
        f"{what} {rule}, and hyper {name!r} may lie between {-math.inf if lowest is None else lowest} and {highest}. "
        f"Declare it with {bounds}"
    )


def _check_shape(what: str, hyper: Hyper, shapes: Mapping[str, Shape], steps: int) -> None:
    if not isinstance(hyper.shape, Mapping):
        if hyper.shapes[""] not in ((), (steps,)):
            raise ValueError(
                f"{what} needs one number, or a schedule with one for each of {steps} updates: shape () or "
                f"({steps},); got shape {hyper.shapes['']}"
            )
        return
    for name, shape in shapes.items():
        part = name if name in hyper.shapes else layer_of(name)
        if part not in hyper.shapes:
            raise ValueError(
                f"{what} must have a part for every parameter or its layer; it has {', '.join(hyper.shapes)}, and none "
                f"is for {name!r}"
            )
        own, per_weight = hyper.shapes[part], part == name and shape != ()
        if own not in ((), (steps,)) and not (per_weight and own == tuple(shape)):
            raise ValueError(
                f"{what}: part {part!r} must be one number, one for each of {steps} updates, or for a parameter one "
                f"for each weight; got shape {own}"
            )
        if per_weight and own == tuple(shape) == (steps,):
            raise ValueError(
                f"{what}: part {part!r} has {steps} numbers, which may be one for each update or one for each weight. "
                "Take another number of updates, or a hyper by layer (br.per_layer)"
            )
