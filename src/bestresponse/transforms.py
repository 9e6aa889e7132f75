"""The monotone maps between raw and natural units, and back; :mod:`bestresponse.space` says which hyper has which."""

from __future__ import annotations

import torch
from torch import Tensor


def from_raw(raw: Tensor, low: float | None, high: float | None) -> Tensor:
    """The value of a hyper that is not log."""
    if low is not None and high is not None:
        return (low + (high - low) * torch.sigmoid(raw)).clamp(low, high)  # rounding may pass a bound
    if low is not None:
        return low + _softplus(raw)
    if high is not None:
        return high - _softplus(-raw)
    return raw


def to_raw(value: Tensor, low: float | None, high: float | None) -> Tensor:
    """The inverse of :func:`from_raw`."""
    if low is not None and high is not None:
        return (value - low).log() - (high - value).log()
    if low is not None:
        return _inverse_softplus(value - low)
    if high is not None:
        return -_inverse_softplus(high - value)
    return value


def log_from_raw(raw: Tensor, low: float | None, high: float | None) -> Tensor:
    """The logarithm of a log hyper's value; the bounds are logarithms too."""
    # Slope one in the middle, so that a step in raw means the same factor whatever the bounds are.
    if low is not None and high is not None:
        middle, half = (low + high) / 2, (high - low) / 2
        return middle + half * torch.tanh((raw - middle) / half)
    if low is not None:
        return low + _softplus(raw - low)
    if high is not None:
        return high - _softplus(high - raw)
    return raw


def log_to_raw(value: Tensor, low: float | None, high: float | None) -> Tensor:
    """The inverse of :func:`log_from_raw`."""
    if low is not None and high is not None:
        middle, half = (low + high) / 2, (high - low) / 2
        return middle + half * torch.atanh((value - middle) / half)
    if low is not None:
        return low + _inverse_softplus(value - low)
    if high is not None:
        return high - _inverse_softplus(high - value)
    return value


def _softplus(raw: Tensor) -> Tensor:
    return torch.logaddexp(raw, torch.zeros_like(raw))  # torch's own softplus jumps to the identity at 20


def _inverse_softplus(value: Tensor) -> Tensor:
    return value + torch.log(-torch.expm1(-value))
