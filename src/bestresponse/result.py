"""What comes out of a run."""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from bestresponse.checkpoint import FORMAT, write_atomically
from bestresponse.history import History
from bestresponse.method import Method
from bestresponse.problem import Params, Problem
from bestresponse.space import Raw, Values
from bestresponse.state import State

#: Hypers with at most so many numbers are written out in hyperparameters.json.
READABLE: Final = 100


class Status(enum.Enum):
    """How a run ended."""

    FINISHED = "Every step was done."
    STOPPED = "A callback stopped the run."
    INTERRUPTED = "The run was interrupted and can be resumed."
    NON_FINITE = "A loss or a hyper became NaN or infinite; the result is the last state known to be good."


@final
@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights, buffers and hypers that belong together."""

    step: int
    params: Params
    buffers: Params
    raw: Raw


@final
@dataclass(frozen=True, eq=False)
class Result:
    """A tuned model, the hypers it was tuned with, and how it got there.

    Attributes:
        status: How the run ended; ``status.value`` is a sentence.
        message: Details, such as why a callback stopped, or which hyper became NaN.
        values: The hypers in natural units, by name.
        model: The user's class with the tuned weights and buffers, on the device of the run.
        history: One row a step.
        metrics: Full evaluation of this result on each loader given to ``tune(evaluate=...)``.
        step: The step whose weights and hypers these are.
        raw: The hypers in raw units, by the dotted name of each leaf.
        state: The method's state after the last step: a black box's trials, a hypernetwork, optimizers.
        problem: What was tuned, with the run's own copy of the model as it started.
        method: How.
    """

    status: Status
    message: str
    values: Values
    model: nn.Module
    history: History
    metrics: dict[str, float]
    step: int
    raw: Raw
    state: State
    problem: Problem
    method: Method

    @staticmethod
    def of(
        problem: Problem,
        method: Method,
        snapshot: Snapshot,
        state: State,
        status: Status,
        message: str,
        history: History,
        metrics: dict[str, float],
    ) -> Result:
        """The result a snapshot stands for."""
        model = copy.deepcopy(problem.model)
        with torch.no_grad():
            own = dict(model.named_parameters())
            for name, param in snapshot.params.items():
                own[name].copy_(param)
        for name, buffer in snapshot.buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer.detach().clone())
        values = _map(lambda tensor: tensor.detach().clone(), problem.space.values(snapshot.raw))
        return Result(
            status, message, values, model, history, metrics, snapshot.step, snapshot.raw, state, problem, method
        )

    def __repr__(self) -> str:
        shown = {
            name: value.item() for name, value in self.values.items() if isinstance(value, Tensor) and value.ndim == 0
        }
        hypers = "".join(f", {name}={value:.4g}" for name, value in shown.items())
        metrics = "".join(f", {name}={value:.4g}" for name, value in self.metrics.items())
        return f"Result({self.status.name}, step={self.step}{hypers}{metrics})"

    def save(self, directory: Path | str) -> None:
        """Write ``model.safetensors``, ``hyperparameters.safetensors`` and a readable ``hyperparameters.json``.

        The model's file holds its ``state_dict``; it loads into the user's own class, here with :func:`load` or
        anywhere with ``safetensors.torch.load_model``.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        _save_with(path / "model.safetensors", lambda file: save_model(self.model, str(file)))
        flat = _flat(self.values)
        _save_with(path / "hyperparameters.safetensors", lambda file: save_file(flat, str(file)))
        readable = {
            "format": FORMAT,
            "status": self.status.name,
            "step": self.step,
            "metrics": self.metrics,
            "hyperparameters": _map(_readable, self.values),
        }
        text = json.dumps(readable, indent=2) + "\n"
        write_atomically(path / "hyperparameters.json", lambda file: file.write(text.encode()))


def load(directory: Path | str, model: nn.Module) -> Values:
    """Put saved weights into ``model``, which must be of the saved class, and return the hypers in natural units."""
    path = Path(directory)
    load_model(model, str(path / "model.safetensors"), strict=True)
    values: Values = {}
    for name, tensor in load_file(str(path / "hyperparameters.safetensors")).items():
        hyper, _, part = name.partition(".")
        if part:
            values.setdefault(hyper, {})[part] = tensor
        else:
            values[hyper] = tensor
    return values


def _flat(values: Values) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for name, value in values.items():
        parts = (
            {f"{name}.{part}": tensor for part, tensor in value.items()}
            if isinstance(value, Mapping)
            else {name: value}
        )
        flat.update({leaf: tensor.contiguous() for leaf, tensor in parts.items()})
    return flat


def _map(function: Any, values: Values) -> dict[str, Any]:
    return {
        name: {part: function(tensor) for part, tensor in value.items()}
        if isinstance(value, Mapping)
        else function(value)
        for name, value in values.items()
    }


def _readable(value: Tensor) -> Any:
    if value.numel() <= READABLE:
        return value.tolist()
    return {
        "shape": list(value.shape),
        "min": value.min().item(),
        "mean": value.double().mean().item(),
        "max": value.max().item(),
    }


def _save_with(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
