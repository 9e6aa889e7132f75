"""Torch optimizers, made from factories and applied to vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

#: Makes an optimizer from parameters or parameter groups: ``partial(torch.optim.Adam, lr=1e-3)``.
OptimizerFactory = Callable[[Any], Optimizer]
#: Makes a schedule for an optimizer: ``partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)``.
ScheduleFactory = Callable[[Optimizer], LRScheduler]


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
        return Updater(optimizer, schedule(optimizer) if schedule else None)

    def update(self, vector: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        """One step of the optimizer along ``gradient``."""
        for name, grad in gradient.items():
            vector[name].grad = grad
        self.optimizer.step()
        for name in gradient:
            vector[name].grad = None
        if self.scheduler is not None:
            self.scheduler.step()
