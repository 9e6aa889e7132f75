"""Torch optimizers, made from factories and applied to vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

#: Makes an optimizer from parameters or parameter groups: ``partial(torch.optim.Adam, lr=1e-3)``.
OptimizerFactory = Callable[[Any], Optimizer]
#: Makes a schedule for an optimizer: ``partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)``.
ScheduleFactory = Callable[[Optimizer], LRScheduler]


def inverse_root(optimizer: Optimizer, after: float = 100.0) -> LambdaLR:
    """A schedule that slows down for ever: lr / √(1 + n / after) at update n.

    Fast while there is far to go, slow when only noise is left to follow; and it need not know how long a run will be.
    """
    return LambdaLR(optimizer, lambda n: (1 + n / after) ** -0.5)


@final
@dataclass
class Updater:
    """An optimizer, its learning-rate schedule, and the vector they change in place."""

    optimizer: Optimizer
    scheduler: LRScheduler | None

    @staticmethod
    def of(
        vector: Mapping[str, Tensor],
        factory: OptimizerFactory,
        schedule: ScheduleFactory | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Updater:
        """An updater for ``vector``; ``rates`` gives hypers, by name or by a leaf's name, their own learning rate."""
        _require_factory("an optimizer", factory, "partial(torch.optim.Adam, lr=1e-3)")
        if schedule is not None:
            _require_factory("a schedule", schedule, "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)")
        if rates is not None and not isinstance(rates, Mapping):
            raise TypeError(
                f"learning rates of single hypers are a dict by name; got {rates!r}. One for all belongs to the "
                "optimizer: partial(torch.optim.Adam, lr=...)"
            )
        groups: list[dict[str, Any]] = [{"params": []}]
        unused = dict(rates or {})
        own: dict[str, dict[str, Any]] = {}
        for leaf, tensor in vector.items():
            name = leaf if rates and leaf in rates else leaf.partition(".")[0]
            if rates and name in rates:
                unused.pop(name, None)
                own.setdefault(name, {"params": [], "lr": rates[name]})["params"].append(tensor)
            else:
                groups[0]["params"].append(tensor)
        if unused:
            raise KeyError(f"a learning rate is given for {sorted(unused)[0]!r}, which no hyper is named")
        optimizer = factory([group for group in [*groups, *own.values()] if group["params"]])
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS asks for the loss again within a step, and gets one gradient: use SGD, Adam or another"
            )
        scheduler = schedule(optimizer) if schedule else None
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau asks for a measured loss, and is told of steps only: use another schedule"
            )
        return Updater(optimizer, scheduler)

    def update(self, vector: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        """One step of the optimizer along ``gradient``."""
        for name, grad in gradient.items():
            vector[name].grad = grad
        self.optimizer.step()
        for name in gradient:
            vector[name].grad = None
        if self.scheduler is not None:
            self.scheduler.step()


@final
class Pace(NamedTuple):
    """How an optimizer moves weights: by lr / D for each unit of a steady gradient.

    Attributes:
        lr: The present learning rate.
        divisor: D: one number, or one a weight; ``None`` where the optimizer's state does not tell it, or not yet.
        decay: The optimizer's own weight decay, as curvature that the training loss does not know of.
    """

    lr: float | Tensor
    divisor: float | Tensor | None
    decay: float | Tensor

    @staticmethod
    def of(optimizer: Optimizer, weight: Tensor) -> Pace:
        """The pace of one tensor of weights, read from the optimizer's own state."""
        group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
        state = optimizer.state.get(weight, {})
        divisor: float | Tensor | None = None
        if "exp_avg_sq" in state and "betas" in group:  # Adam and its family
            second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
            divisor = (second / (1 - group["betas"][1] ** state["step"])).sqrt() + group["eps"]
        elif "square_avg" in state and "acc_delta" not in state:  # RMSprop
            divisor = state["square_avg"].sqrt() + group["eps"]
        elif "sum" in state and "lr_decay" in group:  # Adagrad
            divisor = state["sum"].sqrt() + group["eps"]
        elif isinstance(optimizer, torch.optim.SGD):
            divisor = (1 - group["momentum"]) / (1 - group["dampening"])
        decay = group.get("weight_decay") or 0.0
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
        # A decoupled decay pulls by lr · decay · w, past the divisor: as curvature decay · D would.
        return Pace(group["lr"], divisor, decay * divisor if decoupled and divisor is not None else decay)


def _require_factory(what: str, factory: Any, example: str) -> None:
    if not callable(factory):
        got = f"a {type(factory).__name__} that is made already" if isinstance(factory, Optimizer) else repr(factory)
        raise TypeError(f"{what} is given as a function that makes it, such as {example}; got {got}")
