"""Pieces of losses that take hypers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bestresponse.space import layer_of


def l2(model: nn.Module, decay: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Σ decayᵢ wᵢ²: one number for all trainable weights, or by parameter or layer name.

    Args:
        model: The model the loss was given.
        decay: One decay for every weight; or the value of a hyper of shape ``per_weight``, ``per_tensor`` or
            ``per_layer``. Parameters that it does not name are not penalised.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 3.0)
        >>> l2(model, torch.tensor(0.5)).item()
        9.0
    """
    return _penalty(model, decay, torch.square)


def l1(model: nn.Module, decay: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Σ decayᵢ |wᵢ|, with ``decay`` as in :func:`l2`."""
    return _penalty(model, decay, torch.abs)


def _penalty(model: nn.Module, decay: Tensor | Mapping[str, Tensor], size: Callable[[Tensor], Tensor]) -> Tensor:
    terms = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
            continue  # frozen; weights being tried are plain tensors here
        own = decay.get(name, decay.get(layer_of(name))) if isinstance(decay, Mapping) else decay
        if own is not None:
            terms.append((own * size(parameter)).sum())
    if not terms:
        names = list(decay) if isinstance(decay, Mapping) else decay
        raise KeyError(
            f"the decay names no parameter of the model: it names {names}, and the model has "
            f"{[name for name, _ in model.named_parameters()]}"
        )
    return torch.stack(terms).sum()
