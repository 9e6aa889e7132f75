"""Which hypers a loss reads, and which of them it depends on through torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from bestresponse.gradients import train_dependence
from bestresponse.problem import Batch, Params, Problem
from bestresponse.space import Raw


def require_dependence(problem: Problem, params: Params, raw: Raw, batch: Batch) -> None:
    """Raise where the training loss reads a hyper without depending on it through torch: derivatives would be zero."""
    seen: set[str] = set()

    def watched(model: Any, batch: Any, hyper: Any) -> Tensor:
        return problem.train_loss(model, batch, Watched(hyper, seen))

    trial = dataclasses.replace(problem, train_loss=watched)
    with torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
        depends = train_dependence(trial, params, raw, batch)
    for leaf, (name, _, _) in problem.space.leaves.items():
        if name in seen and not depends[leaf]:
            raise ValueError(
                f"train_loss reads hyper {leaf!r}, but does not depend on it through torch, and the hypergradient "
                "needs that derivative. Keep it a tensor (no float(), .item(), round or comparison). For a hyper with "
                "named parts, leave out of its shape the parts that the loss does not use"
            )


@final
class Watched(dict[str, Any]):
    """Values that note which hypers are read."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self._seen = seen

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._seen.add(name)
        return value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"hypers are read by name from a dict: hyper[{name!r}]")

    def __iter__(self) -> Iterator[str]:
        # Not idle: a dict whose __iter__ is its own is copied item by item, through __getitem__, by dict() and **.
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> dict[str, Any]:
        """All of them, read."""
        return dict(self)

    def get(self, name: str, default: Any = None) -> Any:
        """One, read."""
        self._seen.add(name)
        return super().get(name, default)

    def values(self) -> Any:
        """All of them, read."""
        self._seen.update(self)
        return super().values()

    def items(self) -> Any:
        """All of them, read."""
        self._seen.update(self)
        return super().items()
