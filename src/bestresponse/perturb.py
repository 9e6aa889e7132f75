"""p(λ): where a hypernetwork is trained. All numbers are in raw units."""

from __future__ import annotations

import abc
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bestresponse.space import Raw


class Perturbation(abc.ABC):
    """A distribution of raw hypers, given the current ones."""

    @abc.abstractmethod
    def sample(self, raw: Raw, count: int, generator: torch.Generator) -> Raw:
        """``count`` draws: every leaf gets a leading dimension ``samples``."""


@final
@dataclass(frozen=True)
class Gaussian(Perturbation):
    """A Gaussian: around the current hypers, p(λ|λ̂) = N(λ̂, scale²), or around a fixed ``mean``, p(λ) = N(mean, scale²).

    Args:
        scale: The standard deviation, in raw units: one number, or one by the dotted name of a leaf.
        mean: ``None`` to follow the current hypers, or the fixed centre: one number, or one by the name of a leaf.
        clip: Draws outside ``(low, high)`` are moved to the nearer end.
        antithetic: Draw mirrored pairs, centre ± ε, which takes the odd orders out of the sampling noise.
        learn: Let the method tune the scale too, one for each number, starting from ``scale``.
        entropy: With ``learn``: the weight of the entropy that keeps the scale from shrinking to nothing.
    """

    scale: float | Mapping[str, float] = 0.1
    mean: float | Mapping[str, float] | None = None
    clip: tuple[float, float] | None = None
    antithetic: bool = False
    learn: bool = False
    entropy: float = 1e-3

    def __post_init__(self) -> None:
        scales: list[Any] = list(self.scale.values()) if isinstance(self.scale, Mapping) else [self.scale]
        if not all(isinstance(scale, numbers.Real) for scale in scales):
            raise TypeError(f"scale must be a number, or a dict of numbers by the name of a leaf; got {self.scale!r}")
        if any(not scale > 0 for scale in scales):
            raise ValueError(f"scale must be above 0; got {self.scale}. For no perturbation at all use perturb=None")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip needs (low, high) with low < high; got {self.clip}")

    def sample(self, raw: Raw, count: int, generator: torch.Generator) -> Raw:
        """``count`` draws around the centre."""
        drawn = {}
        for name, leaf in raw.items():
            centre = leaf if self.mean is None else torch.full_like(leaf, _of(self.mean, name))
            scale = _of(self.scale, name)
            sample = centre + scale * _mirrored(torch.randn, leaf, count, generator, self.antithetic)
            drawn[name] = sample if self.clip is None else sample.clamp(*self.clip)
        return drawn

    def scale_of(self, name: str, leaf: Tensor) -> Tensor:
        """The scale of a leaf, as large as the leaf."""
        return torch.full_like(leaf, _of(self.scale, name))

    def noise(self, leaf: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Standard noise for ``count`` examples, ``(count, *leaf.shape)``; independent, so without mirror images."""
        return _mirrored(torch.randn, leaf, count, generator, antithetic=False)


@final
@dataclass(frozen=True)
class Box(Perturbation):
    """The uniform distribution on ``(low, high)`` for every hyper, wherever the current hypers are.

    Args:
        low: The lower end, in raw units.
        high: The upper end.
        antithetic: Draw pairs mirrored in the middle of the box.
    """

    low: float
    high: float
    antithetic: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"Box needs low < high; got low={self.low}, high={self.high}")

    def sample(self, raw: Raw, count: int, generator: torch.Generator) -> Raw:
        """``count`` draws from the box."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return {
            name: middle + half * _mirrored(_symmetric, leaf, count, generator, self.antithetic)
            for name, leaf in raw.items()
        }


def _of(number: float | Mapping[str, float], leaf: str) -> float:
    if not isinstance(number, Mapping):
        return number
    if leaf not in number:
        raise KeyError(f"numbers are given for {list(number)}, and the space has a leaf {leaf!r}")
    return number[leaf]


def _mirrored(
    draw: Callable[..., Tensor], leaf: Tensor, count: int, generator: torch.Generator, antithetic: bool
) -> Tensor:
    """Noise that is symmetric about zero, ``(count, *leaf.shape)``; the second half mirrors the first if antithetic."""
    if antithetic and count % 2:
        raise ValueError(f"antithetic draws come in pairs, so their number must be even; got {count}")
    noise = draw(
        count // 2 if antithetic else count, *leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device
    )
    return torch.cat([noise, -noise]) if antithetic else noise


def _symmetric(*shape: int, **kwargs: Any) -> Tensor:
    return torch.rand(*shape, **kwargs) * 2 - 1
