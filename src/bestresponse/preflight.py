"""Checks before a run starts: what would go wrong later, said at once and in the user's own names."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bestresponse import vectors
from bestresponse.history import COLUMNS
from bestresponse.method import Alternate, Method, ReadsHypers, require_part
from bestresponse.problem import Loss, Params, Problem, evaluate, evaluate_then
from bestresponse.reading import Watched
from bestresponse.space import Raw
from bestresponse.stream import Stream


def check_arguments(
    problem: Any, method: Any, steps: Any, seed: Any, callbacks: Any, evaluate: Any, metrics: Any
) -> None:
    """Raise where an argument of ``tune`` is of another type than it must be, or contradicts another one."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a br.Problem(model, space, train_loss, valid_loss); got {_short(problem)}")
    require_part("method", method, Method, "br.methods.luketina2016()")
    for name, number in (("steps", steps), ("seed", seed)):
        if not isinstance(number, numbers.Integral):
            raise TypeError(f"{name} must be a whole number; got {number!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks must be a list of functions; got {_short(callbacks)}. Put it in a list")
    for callback in callbacks:
        if not callable(callback) or isinstance(callback, type):
            call = f". Call it: {callback.__name__}(...)" if isinstance(callback, type) else ""
            raise TypeError(f"a callback must be a function of an event; got {_short(callback)}{call}")
    for name, by_name, what in (("evaluate", evaluate, "loaders"), ("metrics", metrics, "functions")):
        if by_name is not None and not isinstance(by_name, Mapping):
            raise TypeError(f"{name} must be a dict of {what} by name; got {_short(by_name)}")
    for name, metric in (metrics or {}).items():
        if not callable(metric):
            raise TypeError(f"the metric {name!r} must be a function (model, batch, hyper); got {_short(metric)}")
    schedule = getattr(method, "schedule", None)
    if isinstance(schedule, Alternate) and schedule.warmup < math.inf and not schedule.plan(steps - 1).tune:
        warnings.warn(
            f"no hyper will be changed: {type(method).__name__} has {schedule!r}, and {steps} steps make "
            f"{steps * schedule.train} training updates, all of them warm-up. Give more steps or a shorter warm-up; "
            "br.Alternate(warmup=math.inf) is for training alone",
            UserWarning,
            stacklevel=3,
        )
    if metrics and not evaluate:
        raise ValueError('metrics needs loaders to be evaluated on: evaluate={"test": test_loader}')


def check(
    problem: Problem,
    method: Method,
    train: Stream,
    valid: Stream,
    watched: Sequence[Stream],
    metrics: Mapping[str, Loss],
    outside: nn.Module,
) -> None:
    """Try all losses and loaders on one batch each; raise what a user can act on. Nothing is left changed.

    ``outside`` is the user's own model, of which the problem here holds a copy.
    """
    for name in problem.space:
        if name in (taken := (*COLUMNS, *method.extras)):
            raise ValueError(
                f"hyper {name!r} has the name of a column that every history has: give it another. Taken are "
                f"{', '.join(taken)}"
            )
    for stream in (train, valid, *watched):
        if getattr(stream.data, "persistent_workers", False):
            warnings.warn(
                f"{stream.name} keeps its workers from pass to pass (persistent_workers=True), and with them random "
                "numbers that no seed reaches: the run cannot be repeated or resumed exactly. Set it to False for that",
                UserWarning,
                stacklevel=3,
            )
    if problem.space.sampled and method.needs_raw_gradient and not method.regresses_sampled:
        raise ValueError(
            f"{type(method).__name__} differentiates the training loss in every hyper, and "
            f"{problem.space.sampled[0]!r} is declared sampled: it cannot be differentiated. Use br.methods.adjoint(), "
            "or a method that only samples, such as br.methods.lorraine2018_joint()"
        )
    reads = method.reads(problem) if isinstance(method, ReadsHypers) else frozenset()
    with torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
        seen = _check_loss(problem, method, "train", train, outside)
        _check_loss(problem, method, "valid", valid, outside)
        values = problem.space.values(problem.space.raw(dtype=problem.raw_dtype, device=problem.device))
        for stream in watched:
            with _noting("valid_loss", stream, problem):
                evaluate(problem, "valid", problem.params(), values, stream.peek())
            for name, metric in metrics.items():
                with _noting(f"the metric {name!r}", stream, problem):
                    measured = dataclasses.replace(problem, valid_loss=metric)
                    evaluate(measured, "valid", problem.params(), values, stream.peek())
    for name in problem.space:
        if name not in seen | reads:
            raise ValueError(
                f"train_loss never reads hyper {name!r}: it could not be tuned. Use hyper[{name!r}] in train_loss, or "
                "take it out of the space"
            )


def check_devices(model: nn.Module) -> None:
    """Raise unless the whole model is in one place."""
    places: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ValueError(f"the model must be on one device; got {listed}. Move it with model.to(device)")


def _check_loss(
    problem: Problem, method: Method, which: Literal["train", "valid"], stream: Stream, outside: nn.Module
) -> set[str]:
    """One loss on one batch; the names of the hypers it read."""
    raw = vectors.leaves(problem.space.raw(dtype=problem.raw_dtype, device=problem.device))
    params = vectors.leaves(problem.params())
    seen: set[str] = set()
    user_loss = problem.train_loss if which == "train" else problem.valid_loss

    def watched(model: Any, batch: Any, hyper: Any) -> Tensor:
        return user_loss(model, batch, Watched(hyper, seen))

    trial = dataclasses.replace(problem, train_loss=watched, valid_loss=watched)
    with _noting(f"{which}_loss", stream, problem):
        loss = evaluate(trial, which, params, problem.space.values(raw), stream.peek())
    if loss.device != problem.device:
        raise ValueError(
            f"{which}_loss returned a tensor on {loss.device}, and the model is on {problem.device}. Make new tensors "
            "inside the loss on the device of its inputs"
        )
    others = [p for p in outside.parameters() if p.requires_grad]
    gradients = _gradients(loss, [*params.values(), *others])
    if all(gradient is None for gradient in gradients[: len(params)]):
        raise ValueError(
            f"{which}_loss does not depend on the weights: no gradient reaches them. Use the model it is given as its "
            "first argument (not one from outside), and do not detach or convert its output"
        )
    if any(gradient is not None for gradient in gradients[len(params) :]):
        raise ValueError(
            f"{which}_loss uses weights of your model from outside, and those are not the ones in training. Take all "
            "weights from the model it is given as its first argument; detach those that are meant to stay as they are"
        )
    if which == "train" and method.needs_raw_gradient:
        _check_raw_gradient(problem, method, params, raw, stream, seen)
    return seen


def _check_raw_gradient(
    problem: Problem, method: Method, params: Params, raw: Raw, stream: Stream, seen: set[str]
) -> None:
    # A little away from the start: weights at zero hide what a penalty depends on.
    near = {name: w.detach() + 0.01 * torch.randn_like(w) for name, w in params.items()}
    each = evaluate_then(
        problem, "train", vectors.leaves(near), problem.space.values(raw), stream.peek(), None, lambda loss: loss
    )
    if problem.space.sampled and each.ndim == 0:
        raise ValueError(
            f"hyper {problem.space.sampled[0]!r} is sampled, and {type(method).__name__} learns about it from the loss "
            "of each example: train_loss must return one number per example, not their mean"
        )
    loss = each.mean()
    for leaf, gradient in zip(raw, _gradients(loss, list(raw.values())), strict=True):
        name = problem.space.leaves[leaf][0]
        if name not in seen or name in problem.space.sampled:
            continue
        advice = (
            f"{type(method).__name__} needs that derivative. Keep it a tensor (no .item(), round or comparison); "
            "if that is not possible, declare it sampled=True and use a method that samples"
        )
        if gradient is None:
            raise ValueError(
                f"train_loss reads hyper {leaf!r}, but does not depend on it through torch, and {advice}. For a hyper "
                "with named parts, leave out of its shape the parts that the loss does not use"
            )
        if not gradient.any():
            warnings.warn(
                f"the derivative of train_loss in hyper {leaf!r} is zero on the first batch, and {advice}",
                UserWarning,
                stacklevel=5,
            )


def _gradients(loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not loss.requires_grad:
        return (None,) * len(inputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@contextmanager
def _noting(what: str, stream: Stream, problem: Problem) -> Iterator[None]:
    """An error of the user's own code keeps its type and message, and is told where it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}, on the first batch of {stream.name}: {_describe(stream.peek())}")
        missing = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(missing, str) and missing not in problem.space:
            error.add_note(f"the space has the hypers {', '.join(problem.space)}")
        if problem.space.sampled and what == "train_loss":
            error.add_note(f"one value per example is given of the sampled {', '.join(problem.space.sampled)}")
        raise


def _describe(batch: Any) -> str:
    """What a batch holds, without its numbers."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, tuple | list) and len(batch) <= 10:
        return f"{type(batch).__name__} of {', '.join(map(_describe, batch)) or 'nothing'}"
    if isinstance(batch, Mapping) and len(batch) <= 10:
        return f"dict of {', '.join(f'{name}: {_describe(part)}' for name, part in batch.items()) or 'nothing'}"
    return type(batch).__name__


def _short(thing: Any) -> str:
    """A thing in an error: as it prints, if that is short."""
    return text if len(text := repr(thing)) <= 80 else f"a {type(thing).__name__}"
