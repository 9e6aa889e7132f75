"""Checks before a run starts: what would go wrong later, said at once and in the user's own names."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.method import Method
from bestresponse.problem import Problem, evaluate
from bestresponse.stream import Stream


def check(problem: Problem, method: Method, train: Stream, valid: Stream) -> None:
    """Try both losses on one batch each; raise what a user can act on. Random numbers and buffers are left alone."""
    _check_devices(problem)
    for stream in (train, valid):
        if getattr(stream.data, "persistent_workers", False):
            warnings.warn(
                f"{stream.name} keeps its workers from pass to pass (persistent_workers=True), and with them random "
                "numbers that no seed reaches: the run cannot be repeated or resumed exactly. Set it to False for that",
                UserWarning,
                stacklevel=3,
            )
    with torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
        seen = _check_loss(problem, method, "train", train)
        _check_loss(problem, method, "valid", valid)
    for name in problem.space:
        if name not in seen:
            raise ValueError(
                f"train_loss never reads hyper {name!r}: it could not be tuned. Use hyper[{name!r}] in train_loss, or "
                "take it out of the space"
            )


def _check_devices(problem: Problem) -> None:
    places: dict[torch.device, str] = {}
    for name, tensor in (*problem.model.named_parameters(), *problem.model.named_buffers()):
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ValueError(f"the model must be on one device; got {listed}. Move it with model.to(device)")


def _check_loss(problem: Problem, method: Method, which: Literal["train", "valid"], stream: Stream) -> set[str]:
    raw = vectors.leaves(problem.space.raw(dtype=problem.raw_dtype, device=problem.device))
    params = vectors.leaves(problem.params())
    seen: set[str] = set()
    user_loss = problem.train_loss if which == "train" else problem.valid_loss

    def watched(model: Any, batch: Any, hyper: Any) -> Tensor:
        return user_loss(model, batch, _Watched(hyper, seen))

    trial = dataclasses.replace(problem, train_loss=watched, valid_loss=watched)
    try:
        loss = evaluate(trial, which, params, problem.space.values(raw), stream.peek())
    except KeyError as error:
        missing = error.args[0] if error.args else None
        if isinstance(missing, str) and missing not in problem.space:
            error.add_note(f"in {which}_loss; the space has the hypers {', '.join(problem.space)}")
        raise
    if loss.device != problem.device:
        raise ValueError(
            f"{which}_loss returned a tensor on {loss.device}, and the model is on {problem.device}. Make new tensors "
            "inside the loss on the device of its inputs"
        )
    gradients = _gradients(loss, [*params.values(), *raw.values()])
    if all(gradient is None for gradient in gradients[: len(params)]):
        raise ValueError(
            f"{which}_loss does not depend on the weights: no gradient reaches them. Use the model it is given as its "
            "first argument (not one from outside), and do not detach or convert its output"
        )
    if which == "train" and method.needs_raw_gradient:
        for leaf, gradient in zip(raw, gradients[len(params) :], strict=True):
            name = problem.space.leaves[leaf][0]
            if problem.space[name].sampled:
                raise ValueError(
                    f"{type(method).__name__} differentiates the training loss in every hyper, and {name!r} is "
                    "declared sampled: it cannot be differentiated. Use a method that only samples, such as "
                    "br.methods.lorraine2018_joint()"
                )
            if gradient is None and name in seen:
                raise ValueError(
                    f"train_loss reads hyper {leaf!r}, but its gradient does not depend on it, and "
                    f"{type(method).__name__} needs that derivative. Keep it a tensor (no .item(), round or "
                    "comparison); if that is not possible, declare it sampled=True and use a method that samples. "
                    "For a hyper with named parts, leave out of its shape the parts that the loss does not use"
                )
    return seen


def _gradients(loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not loss.requires_grad:
        return (None,) * len(inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@final
class _Watched(dict[str, Any]):
    """Values that note which hypers are read."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self._seen = seen

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._seen.add(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return super().get(name, default)

    def values(self) -> Any:
        self._seen.update(self)
        return super().values()

    def items(self) -> Any:
        self._seen.update(self)
        return super().items()
