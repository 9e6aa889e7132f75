"""Everything that changes in a run, and how it is saved: generically, so that no method writes checkpoint code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from bestresponse.problem import Params
from bestresponse.space import Raw


@final
@dataclass
class Cost:
    """What a run has used so far. An exact second-derivative product counts as two gradients, as a central one does."""

    train_batches: int = 0
    valid_batches: int = 0
    gradients: int = 0


@dataclass(kw_only=True)
class State:
    """Everything that changes in a run. A method's own state adds fields; saving covers all fields by itself.

    A field may be a tensor, a generator, anything with ``state_dict`` and ``load_state_dict``, plain Python data, and
    dicts, lists and dataclasses of these.
    """

    raw: Raw
    buffers: Params
    generator: torch.Generator
    step: int = 0
    cost: Cost = field(default_factory=Cost)

    def state_dict(self) -> dict[str, Any]:
        """All fields, as tensors and plain Python data. Shares memory with the state."""
        return {f.name: _pack(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Put saved fields back, in place where something else may hold on to them.

        A field with a default may be missing: a later version has added it, and it stays as it is.
        """
        for f in dataclasses.fields(self):
            if f.name not in saved:
                if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING:
                    continue
                raise KeyError(f"the saved state has no {f.name!r}: it was written by another method or version")
            setattr(self, f.name, _unpack(getattr(self, f.name), saved[f.name]))


def _pack(value: Any) -> Any:
    """Plain containers, numbers and tensors only, so that a file of it loads with ``weights_only=True``."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "state_dict"):
        return _pack(dict(value.state_dict()))
    if dataclasses.is_dataclass(value):
        return {f.name: _pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _pack(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_pack(part) for part in value)
    return value


def _unpack(value: Any, saved: Any) -> Any:
    if isinstance(value, torch.Generator):
        value.set_state(saved.cpu())
        return value
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            setattr(value, f.name, _unpack(getattr(value, f.name), saved[f.name]))
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        if value.shape != saved.shape:
            raise ValueError(
                f"the saved state has a tensor of shape {tuple(saved.shape)} where {tuple(value.shape)} is needed: "
                "it was written for another model, space or method"
            )
        with torch.no_grad():
            value.copy_(saved)
        return value
    if isinstance(value, dict) and isinstance(saved, dict) and value.keys() == saved.keys():
        return {key: _unpack(part, saved[key]) for key, part in value.items()}
    return saved
