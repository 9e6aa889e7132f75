"""Hypernetworks: guesses at how weights follow hypers.

A *recipe* (``Linear``, ``LowRank``, ``MLP``) is frozen and knows its size before anything is allocated; ``build`` makes
the module that is trained. At the start every recipe outputs the model's own weights, plus a small random dependence
on the hypers: without one, a response at raw = 0 that is not perturbed would never move.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, final

import torch
from torch import nn

from bestresponse import vectors
from bestresponse.problem import Params
from bestresponse.space import Raw


@final
class Response(nn.Module):
    """A trained hypernetwork: raw with a leading dimension ``samples`` in, params with that dimension out.

    It works in the precision of raw, whatever that of the weights is: half precision would not keep its small steps.
    """

    def __init__(self, network: nn.Sequential, params: Params) -> None:
        super().__init__()
        self.network = network
        self.shapes = {name: tuple(p.shape) for name, p in params.items()}
        self.dtypes = {name: p.dtype for name, p in params.items()}

    def forward(self, raw: Raw) -> Params:
        """Weights for each row of raw."""
        flat = self.network(vectors.flatten(raw, batch_dims=1))  # (samples, n) -> (samples, d)
        return {name: part.to(self.dtypes[name]) for name, part in vectors.unflatten(flat, self.shapes).items()}


class Recipe(abc.ABC):
    """How to make a response: fully connected layers from hypers to weights."""

    rectified: ClassVar[bool]  # does a ReLU follow each hidden layer?
    init: float | None

    @abc.abstractmethod
    def hidden_widths(self) -> tuple[int, ...]:
        """The widths of the hidden layers."""

    def size(self, hypers: int, weights: int) -> int:
        """How many numbers the response will hold."""
        return sum(n * m + m for n, m in pairwise((hypers, *self.hidden_widths(), weights)))

    def build(self, raw: Raw, params: Params, generator: torch.Generator) -> Response:
        """The response for these hypers and weights, starting at these weights."""
        start = vectors.flatten(params).to(next(iter(raw.values())).dtype)
        widths = (vectors.numel(raw), *self.hidden_widths(), start.numel())
        layers: list[nn.Module] = []
        for n, m in pairwise(widths):
            if layers and self.rectified:
                layers.append(nn.ReLU())
            # Made without torch's own random numbers, which belong to the run.
            last: nn.Linear = nn.utils.skip_init(nn.Linear, n, m, dtype=start.dtype, device=start.device)  # type: ignore[no-untyped-call]
            for parameter in last.parameters():
                spread = 0.01 / math.sqrt(n) if self.init is None else self.init
                nn.init.normal_(parameter, 0.0, spread, generator=generator)
            layers.append(last)
        with torch.no_grad():
            last.bias.copy_(start)
        return Response(nn.Sequential(*layers), params)


@final
@dataclass(frozen=True)
class Linear(Recipe):
    """w = W·raw + b, with (n + 1)·d numbers: exact for small moves of few hypers.

    Args:
        init: Standard deviation of the first random weights; by default 0.01 / √(inputs).
    """

    init: float | None = None
    rectified: ClassVar[bool] = False

    def hidden_widths(self) -> tuple[int, ...]:
        """None: straight from hypers to weights."""
        return ()


@final
@dataclass(frozen=True)
class LowRank(Recipe):
    """w = U(V·raw + c) + b through a bottleneck of ``rank`` numbers: for thousands of hypers.

    Args:
        rank: The width of the bottleneck, at least 1.
        init: Standard deviation of the first random weights; by default 0.01 / √(inputs).
    """

    rank: int = 10
    init: float | None = None
    rectified: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1; got {self.rank}")

    def hidden_widths(self) -> tuple[int, ...]:
        """The bottleneck."""
        return (self.rank,)


@final
@dataclass(frozen=True)
class MLP(Recipe):
    """A ReLU network with one hidden layer: for a response over a wide range of few hypers.

    Args:
        hidden: The width of the hidden layer, at least 1.
        init: Standard deviation of the first random weights; by default 0.01 / √(inputs).
    """

    hidden: int = 50
    init: float | None = None
    rectified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1; got {self.hidden}")

    def hidden_widths(self) -> tuple[int, ...]:
        """The hidden layer."""
        return (self.hidden,)
