"""Algebra on vectors kept as a dict of tensors.

Params, raw hypers, gradients and adjoints are all ``dict[str, Tensor]``. Keeping them in parts, rather than
as one flat copy, costs nothing and stays true when the parts live on several devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Vector = dict[str, Tensor]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The inner product ⟨a, b⟩, summed over all parts."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def norm(a: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean length ‖a‖ over all parts."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in a.values()]))


def scale(alpha: float | Tensor, a: Mapping[str, Tensor]) -> Vector:
    """Alpha · a."""
    return {name: alpha * part for name, part in a.items()}


def axpy(alpha: float | Tensor, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Vector:
    """Alpha · x + y, a new vector."""
    return {name: y[name] + alpha * x[name] for name in y}


def zeros_like(a: Mapping[str, Tensor]) -> Vector:
    """The zero vector with the parts of ``a``."""
    return {name: torch.zeros_like(part) for name, part in a.items()}


def clone(a: Mapping[str, Tensor]) -> Vector:
    """A copy that shares nothing with ``a``, outside any graph."""
    return {name: part.detach().clone() for name, part in a.items()}


def leaves(a: Mapping[str, Tensor]) -> Vector:
    """The same numbers as new leaves that gradients can be asked of."""
    return {name: part.detach().requires_grad_() for name, part in a.items()}


def numel(a: Mapping[str, Tensor]) -> int:
    """How many numbers the vector holds."""
    return sum(part.numel() for part in a.values())


def flatten(a: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:
    """All parts behind one another: ``(*batch, numel)``. The first ``batch_dims`` dimensions are kept."""
    return torch.cat(
        [part.flatten(batch_dims) if part.ndim > batch_dims else part[..., None] for part in a.values()], -1
    )


def unflatten(flat: Tensor, like: Mapping[str, Tensor | tuple[int, ...]]) -> Vector:
    """The inverse of :func:`flatten`: views of ``flat`` in the shapes of ``like`` (tensors, or shapes)."""
    shapes = {name: tuple(part.shape) if isinstance(part, Tensor) else tuple(part) for name, part in like.items()}
    parts = torch.split_with_sizes(flat, [math.prod(shape) for shape in shapes.values()], -1)
    return {
        name: part.view((*flat.shape[:-1], *shape)) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }
