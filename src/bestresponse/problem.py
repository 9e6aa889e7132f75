"""The problem: a model, a space and two losses; and the one place where a loss is called.

Legend for shapes: ``batch`` examples in a minibatch, ``n`` hypers, ``d`` weights, ``samples`` hypers drawn at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bestresponse.space import Space, Values
from bestresponse.vectors import Vector

Batch = Any
Params = Vector
#: ``loss(model, batch, hyper)``: one number, or one per example.
Loss = Callable[[Any, Any, Values], Tensor]
Which = Literal["train", "valid"]
T = TypeVar("T")
RECURRENT: Final = (nn.LSTM, nn.GRU, nn.RNN)


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A model, what is tuned about its training, and the two losses.

    Args:
        model: Any ``nn.Module``. It is never changed: runs work on copies of its weights and buffers.
        space: What is tuned.
        train_loss: ``(model, batch, hyper) -> loss`` that the weights minimise. One number, or one per example.
        valid_loss: The same for what the hypers minimise. Called with the model in evaluation mode.

    Both losses must use the ``model`` they are given, which holds the weights being tried, and read hypers by name.
    """

    model: nn.Module
    space: Space
    train_loss: Loss
    valid_loss: Loss
    _calls: dict[str, _Call] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(self.model).__name__}")
        if not isinstance(self.space, Space):
            raise TypeError(f"space must be a br.Space; got {type(self.space).__name__}")
        for name in ("train_loss", "valid_loss"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function (model, batch, hyper) -> loss; got {getattr(self, name)!r}")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError("the model has no trainable weights: every parameter has requires_grad=False")
        calls = {"train": _Call(self.model, self.train_loss), "valid": _Call(self.model, self.valid_loss)}
        object.__setattr__(self, "_calls", calls)

    def params(self) -> Params:
        """A copy of the model's trainable weights."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def buffers(self) -> Params:
        """A copy of the model's buffers, such as BatchNorm statistics."""
        return {name: b.detach().clone() for name, b in self.model.named_buffers()}

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next(p.device for p in self.model.parameters() if p.requires_grad)

    @property
    def raw_dtype(self) -> torch.dtype:
        """The precision of raw, which is that of the weights, and at least float32."""
        dtype = next(p.dtype for p in self.model.parameters() if p.requires_grad)
        return torch.promote_types(dtype, torch.float32)


def evaluate(
    problem: Problem,
    which: Which,
    params: Mapping[str, Tensor],
    values: Values,
    batch: Batch,
    buffers: Params | None = None,
) -> Tensor:
    """A loss at given weights and hypers on one batch, as one number.

    The validation loss is taken in evaluation mode; the training loss in whatever mode the model is in.

    Args:
        problem: The problem.
        which: ``"train"`` or ``"valid"``.
        params: The weights to use, by name; others stay as they are in the model.
        values: The hypers in natural units. For the training loss a ``sampled`` hyper is spread to one value per
            example, unless it has that dimension already.
        batch: Whatever the loss takes.
        buffers: Buffers to use; changes a layer makes to them (BatchNorm statistics) are written back into this
            dict. Left out, the model's own are used and such changes are thrown away.
    """
    return evaluate_then(problem, which, params, values, batch, buffers, lambda loss: loss.mean())


def evaluate_then(
    problem: Problem,
    which: Which,
    params: Mapping[str, Tensor],
    values: Values,
    batch: Batch,
    buffers: Params | None,
    then: Callable[[Tensor], T],
) -> T:
    """What ``then`` makes of a loss, called while the weights being tried still stand in the model.

    A model that computes parts of its forward pass again in the backward one (activation checkpointing) reads its
    weights then: gradients must be taken here. ``then`` gets one number, or one number per example.
    """
    if which == "train" and problem.space.sampled:
        values = _spread(problem.space, values, batch)
    call = problem._calls[which]
    own = {} if buffers is None else buffers
    if len(own) < call.buffer_count:
        own = {**problem.buffers(), **own}
    tensors = {f"model.{name}": tensor for name, tensor in (*params.items(), *own.items())}
    with nullcontext() if which == "train" else _evaluation_mode(problem.model):
        outcome: T = functional_call(
            call, tensors, (batch, values, lambda loss: then(_checked(loss, which))), tie_weights=call.tied
        )
    own = buffers or {}
    for name in own:  # a layer may have replaced a buffer rather than changed it in place
        own[name] = tensors[f"model.{name}"].detach()
    return outcome


def examples(batch: Batch) -> int | None:
    """How many examples a batch holds: the first dimension of the first tensor found in it; ``None`` without one."""
    for part in _parts(batch):
        if isinstance(part, Tensor) and part.ndim > 0:
            return int(part.shape[0])
    return None


@final
class _Call(nn.Module):
    """The loss as a module around the model: ``model(x)`` and ``model.named_parameters()`` both see swapped weights."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        # Looking for tied weights costs time at every call, so it is asked for only where there are some.
        self.buffer_count = len(list(model.buffers()))
        every = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        self.tied = len(every) > len(list(self.named_parameters())) + len(list(self.named_buffers()))

    def forward(self, batch: Batch, values: Values, then: Callable[[Any], Any]) -> Any:
        return then(self.loss(self.model, batch, values))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    # cuDNN gives recurrent layers no gradient in evaluation mode. All that training mode changes in them is dropout.
    recurrent = [(module, module.training, module.dropout) for module in modules if type(module) in RECURRENT]
    training = [module for module in modules if module.training and type(module) not in RECURRENT]
    try:
        for module in training:
            module.training = False
        for module, _, _ in recurrent:
            module.training = True
            setattr(module, "dropout", 0.0)  # noqa: B010 - a number, whatever the type checker takes modules to hold
        yield
    finally:
        for module in training:
            module.training = True
        for module, was_training, dropout in recurrent:
            module.training = was_training
            setattr(module, "dropout", dropout)  # noqa: B010


def _spread(space: Space, values: Values, batch: Batch) -> Values:
    count = examples(batch)
    if count is None:
        raise ValueError(
            f"hyper {space.sampled[0]!r} is sampled, one value per example, so a batch must hold a tensor whose first "
            f"dimension counts the examples; got {type(batch).__name__}. Give tensors, or tuples, lists or dicts"
        )
    spread = dict(values)
    for leaf, (name, part, shape) in space.leaves.items():
        if name not in space.sampled:
            continue
        value = values[name][part] if part else values[name]
        if value.ndim == len(shape):
            value = value.expand(count, *shape)
        elif value.shape[0] != count:
            raise ValueError(f"hyper {leaf!r} must have one value per example, {count}; got {value.shape[0]}")
        spread[name] = {**spread[name], part: value} if part else value
    return spread


def _checked(loss: Any, which: Which) -> Tensor:
    if not isinstance(loss, Tensor):
        advice = "Is a return missing?" if loss is None else "Return the loss itself, without .item()"
        raise TypeError(f"{which}_loss must return a tensor; got {type(loss).__name__}. {advice}")
    if not loss.is_floating_point():
        raise TypeError(
            f"{which}_loss must return floating-point numbers; got {loss.dtype}. Convert it, for instance with .float()"
        )
    if loss.ndim > 1 or loss.numel() == 0:
        raise ValueError(
            f"{which}_loss must return one number, or one per example; got shape {tuple(loss.shape)}. "
            "Reduce the other dimensions, for instance with .mean(dim=1)"
        )
    return loss


def _parts(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for part in batch.values():
            yield from _parts(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _parts(part)
    else:
        yield batch
