"""What is tuned: hypers, and the space they form.

Every hyper has two forms. *Raw* is what optimizers and hypernetworks see: an unconstrained number. *Values* are
what losses see: natural units, inside the bounds. Between them stands one monotone map per hyper:

====================  =========================================================  ========================
kind                  value                                                      raw is measured in
====================  =========================================================  ========================
free                  raw                                                        the value itself
positive (one bound)  low + softplus(raw), or high − softplus(−raw)              the value, far from it
bounded               low + (high − low) · sigmoid(raw)                          logits
log                   exp(raw)                                                   nats
log and bounded       exp of raw, bent smoothly into [log low, log high]         nats, away from bounds
====================  =========================================================  ========================
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from bestresponse.transforms import from_raw, log_from_raw, log_to_raw, to_raw

Shape = tuple[int, ...]
Raw = dict[str, Tensor]
#: Hypers by name in natural units: a tensor, or a dict of tensors for a hyper with named parts and for a net.
Values = dict[str, Any]
Prior = Callable[[Tensor], Tensor]

ROOT_LAYER: Final = "(root)"


@final
@dataclass(frozen=True, eq=False)
class Hyper:
    """One declared hyperparameter: where it starts, where it may go, and how it is measured.

    Args:
        start: The value to start from, in natural units: a number, or a tensor of the hyper's shape. For a shape
            with names (:func:`per_weight` and its siblings) also a dict with one number or tensor a name.
        low: The lower bound, never reached; ``None`` for none.
        high: The upper bound, never reached; ``None`` for none.
        log: Move on a logarithmic scale: for anything whose right order of magnitude is unknown.
        shape: ``()`` for one number, any shape for a tensor, or a dict of shapes by name.
        prior: A penalty on the raw tensor (one call a leaf), added to the validation objective.
        sampled: The training loss cannot be differentiated in this hyper (dropout rates, anything rounded). The
            training loss then sees one value per example, of shape ``(batch, *shape)``.

    Example:
        >>> Hyper(1e-4, low=1e-8, high=1.0, log=True).kind
        'log'
    """

    start: float | Tensor | Mapping[str, float | Tensor]
    low: float | None = None
    high: float | None = None
    log: bool = False
    shape: Shape | Mapping[str, Shape] = ()
    prior: Prior | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        _require_shapes(self.shape)
        self._require_bounds()
        _require_prior(self.prior)
        if isinstance(self.start, Mapping):
            if set(self.start) != set(self.shapes):
                lacking, extra = set(self.shapes) - set(self.start), set(self.start) - set(self.shapes)
                raise ValueError(
                    f"start must have the names of shape; it lacks {sorted(lacking)[:3]} and has {sorted(extra)[:3]} "
                    "too many"
                )
            starts = dict(self.start)
        else:
            starts = dict.fromkeys(self.shapes, self.start)
        for part, shape in self.shapes.items():
            self._require_start(starts[part], shape)

    @property
    def kind(self) -> str:
        """``free``, ``positive`` (one bound), ``bounded`` or ``log``."""
        if self.log:
            return "log"
        if self.low is None and self.high is None:
            return "free"
        return "positive" if self.low is None or self.high is None else "bounded"

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every part; a hyper without named parts has one part, named ``""``."""
        if isinstance(self.shape, Mapping):
            return {name: tuple(shape) for name, shape in self.shape.items()}
        return {"": tuple(self.shape)}

    def value(self, raw: Tensor) -> Tensor:
        """Natural units from raw."""
        if not self.log:
            return from_raw(raw, self.low, self.high)
        value = log_from_raw(raw, _log(self.low), _log(self.high)).exp()
        return value if self.low is None and self.high is None else value.clamp(self.low, self.high)

    def raw(self, value: float | Tensor) -> Tensor:
        """Raw from natural units: the inverse of :meth:`value`, in float64 unless ``value`` is a tensor."""
        number = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        self._check(number, "value")
        if self.log:
            return log_to_raw(number.log(), _log(self.low), _log(self.high))
        return to_raw(number, self.low, self.high)

    def _require_bounds(self) -> None:
        bounds: dict[str, Any] = {"low": self.low, "high": self.high}
        for name, bound in bounds.items():
            if bound is not None and not isinstance(bound, numbers.Real):
                raise TypeError(f"{name} must be a number, or None for no bound; got {bound!r}")
            if bound is not None and math.isinf(bound):
                raise ValueError(f"{name} must be a finite number; got {bound}. Leave {name} out for no bound")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"a hyper needs low < high; got low={self.low}, high={self.high}")
        if self.log and self.low is not None and self.low <= 0:
            raise ValueError(
                f"a log hyper is positive, so low must be above 0; got low={self.low}. Give the smallest value that is "
                "worth telling from zero, such as 1e-10, or leave low out"
            )
        if self.log and self.high is not None and self.high <= 0:
            raise ValueError(f"a log hyper is positive, so high must be above 0; got high={self.high}")

    def _require_start(self, start: Any, shape: Shape) -> None:
        try:
            number = torch.as_tensor(start, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"start must be a number, a tensor, or a dict of them by name; got {start!r}") from None
        try:
            torch.broadcast_to(number, shape)
        except RuntimeError:
            raise ValueError(
                f"start must be one number, or have the shape of the hyper, {shape}; got shape {tuple(number.shape)}"
            ) from None
        self._check(number, "start")

    def _check(self, number: Tensor, what: str) -> None:
        low = 0.0 if self.log and self.low is None else self.low
        inside = torch.isfinite(number)
        if low is not None:
            inside &= number > low
        if self.high is not None:
            inside &= number < self.high
        if not bool(inside.all()):
            wrong = number[~inside].flatten()[0].item()
            span = f"{'-inf' if low is None else low} and {'inf' if self.high is None else self.high}"
            raise ValueError(
                f"{what} must lie strictly between {span}; got {wrong}. "
                f"The bounds themselves are never reached: move {what} inside, or widen the bound"
            )


@final
@dataclass(frozen=True, eq=False)
class Net:
    """A network whose weights are hyperparameters: an augmenter, a learned loss, a weighting of examples.

    The loss sees its weights by parameter name and calls it with them::

        def train_loss(model, batch, hyper):
            x, y = batch
            x = torch.func.functional_call(augmenter, hyper["augmenter"], (x,))
            return F.cross_entropy(model(x), y)

    Args:
        module: The network; its present weights are the start. It is never changed.
        prior: As for :class:`Hyper`.
    """

    module: nn.Module
    prior: Prior | None = None
    sampled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"a Net needs a torch.nn.Module; got {self.module!r}")
        _require_prior(self.prior)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(f"a Net needs a module with weights to tune; {type(self.module).__name__} has none")

    @property
    def kind(self) -> str:
        """``net``."""
        return "net"

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every weight by its name."""
        return {name: tuple(p.shape) for name, p in _trainable(self.module)}

    @property
    def start(self) -> dict[str, Tensor]:
        """The module's present weights."""
        return {name: p.detach().clone() for name, p in _trainable(self.module)}

    def value(self, raw: Tensor) -> Tensor:
        """The weights themselves: a net is free."""
        return raw

    def raw(self, value: float | Tensor) -> Tensor:
        """The weights themselves: a net is free."""
        return torch.as_tensor(value)


@final
class Space:
    """The named hypers, in order.

    Example:
        >>> space = Space(decay=Hyper(1e-4, log=True), dropout=Hyper(0.2, low=0.0, high=0.9, shape=(3,)))
        >>> {name: tuple(value.shape) for name, value in space.values(space.raw()).items()}
        {'decay': (), 'dropout': (3,)}
    """

    def __init__(self, **hypers: Hyper | Net) -> None:
        if not hypers:
            raise ValueError("a space needs at least one hyper: br.Space(decay=br.Hyper(1e-4, log=True))")
        for name, hyper in hypers.items():
            if not name.isidentifier():
                raise ValueError(f"a hyper's name must be a Python name, without dots or spaces; got {name!r}")
            if not isinstance(hyper, Hyper | Net):
                raise TypeError(f"{name!r} must be a br.Hyper or a br.Net; got {type(hyper).__name__}")
        self._hypers = dict(hypers)
        # One entry a leaf: the dotted name raw uses -> (hyper's name, part's name, shape).
        self.leaves: dict[str, tuple[str, str, Shape]] = {
            f"{name}.{part}" if part else name: (name, part, shape)
            for name, hyper in hypers.items()
            for part, shape in hyper.shapes.items()
        }

    def __getitem__(self, name: str) -> Hyper | Net:
        return self._hypers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hypers)

    def __len__(self) -> int:
        return len(self._hypers)

    def items(self) -> ItemsView[str, Hyper | Net]:
        """The hypers with their names, in order."""
        return self._hypers.items()

    def __repr__(self) -> str:
        return f"Space({', '.join(f'{name}={kind}' for name, kind in self.describe().items())})"

    @cached_property
    def sampled(self) -> tuple[str, ...]:
        """The names of the sampled hypers."""
        return tuple(name for name, hyper in self.items() if hyper.sampled)

    @property
    def numel(self) -> int:
        """How many numbers are tuned in all."""
        return sum(math.prod(shape) for _, _, shape in self.leaves.values())

    def raw(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Raw:
        """The raw form of ``values``; hypers that are not named there stand at their start.

        A number given for a hyper with a shape fills it. Computed in float64, then rounded to ``dtype``.
        """
        given = dict(values or {})
        if unknown := sorted(set(given) - set(self)):
            raise KeyError(f"no hyper is named {unknown[0]!r}; the space has {', '.join(self)}")
        raw: Raw = {}
        for leaf, (name, part, shape) in self.leaves.items():
            hyper = self[name]
            value: Any = given.get(name, hyper.start)
            if isinstance(value, Mapping):
                if set(value) != set(hyper.shapes) or not part:
                    raise ValueError(
                        f"hyper {name!r} has {_names(hyper.shapes)}, and is given {_names(value)}: name each part once"
                    )
                value = value[part]
            number = torch.as_tensor(value, dtype=torch.float64).detach()
            try:
                full = torch.broadcast_to(number, shape)
                raw[leaf] = hyper.raw(full).to(dtype=dtype or torch.get_default_dtype(), device=device).clone()
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"hyper {leaf!r}, shape {shape}: {error}") from None
        return raw

    def values(self, raw: Mapping[str, Tensor]) -> Values:
        """Natural units from raw, nested by hyper. Differentiable. Leading dimensions of raw are kept."""
        values: Values = {}
        for leaf, (name, part, _) in self.leaves.items():
            value = self[name].value(raw[leaf])
            if part:
                values.setdefault(name, {})[part] = value
            else:
                values[name] = value
        return values

    def penalty(self, raw: Mapping[str, Tensor]) -> Tensor | None:
        """The sum of all priors at ``raw``; ``None`` when no hyper has one."""
        terms = [
            prior(raw[leaf]) for leaf, (name, _, _) in self.leaves.items() if (prior := self[name].prior) is not None
        ]
        return torch.stack([term.sum() for term in terms]).sum() if terms else None

    def describe(self) -> dict[str, str]:
        """One line a hyper: kind, bounds, size. Equal spaces have equal descriptions."""
        lines = {}
        for name, hyper in self.items():
            count = sum(math.prod(shape) for shape in hyper.shapes.values())
            size = "scalar" if hyper.shapes == {"": ()} else f"{count} numbers in {len(hyper.shapes)} parts"
            bounds = "" if isinstance(hyper, Net) else f" in ({_bound(hyper.low, '-inf')}, {_bound(hyper.high, 'inf')})"
            extra = (", prior" if hyper.prior else "") + (", sampled" if hyper.sampled else "")
            lines[name] = f"{hyper.kind}{bounds}, {size}{extra}"
        return lines


def per_weight(model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None = None) -> dict[str, Shape]:
    """The shape of a hyper with one number for every trainable weight of ``model``.

    Args:
        model: Any module. Frozen parameters are left out; tied ones count once.
        where: Keep only parameters for which this is true, such as ``lambda name, p: p.ndim > 1``.
    """
    return {name: tuple(p.shape) for name, p in _trainable(model, where)}


def per_tensor(model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None = None) -> dict[str, Shape]:
    """The shape of a hyper with one number for every trainable parameter tensor of ``model``."""
    return {name: () for name, _ in _trainable(model, where)}


def per_layer(model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None = None) -> dict[str, Shape]:
    """The shape of a hyper with one number for every layer: a module that owns trainable parameters itself.

    Parameters that the model owns outside any layer count as the layer ``(root)``.
    """
    return {layer_of(name): () for name, _ in _trainable(model, where)}


def layer_of(parameter: str) -> str:
    """The name of the layer that owns a parameter: ``"0.weight"`` belongs to ``"0"``."""
    return parameter.rpartition(".")[0] or ROOT_LAYER


def _trainable(
    model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the shape is made from a model, a torch.nn.Module; got {model!r}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (where is None or where(name, parameter)):
            yield name, parameter


def _require_shapes(shape: Any) -> None:
    for part in shape.values() if isinstance(shape, Mapping) else [shape]:
        if not isinstance(part, tuple | list) or not all(isinstance(size, int) for size in part):
            raise TypeError(
                "shape must be a tuple of whole numbers, such as (3,), or a dict of such tuples by name, such as "
                f"br.per_weight(model); got {part!r}"
            )
        if any(size < 1 for size in part):
            raise ValueError(f"shape must hold at least one number; got {tuple(part)}")
    if isinstance(shape, Mapping) and not shape:
        raise ValueError(
            "shape has no parts. If it comes from br.per_weight or one of its siblings: the model has no trainable "
            "parameters, or `where` keeps none of them"
        )


def _require_prior(prior: Any) -> None:
    if prior is not None and not callable(prior):
        raise TypeError(f"prior must be a function of a raw tensor, or None; got {prior!r}")


def _names(parts: Mapping[str, Any]) -> str:
    return "one value, without parts" if "" in parts else f"the parts {', '.join(parts)}"


def _bound(bound: float | None, otherwise: str) -> str:
    return otherwise if bound is None else f"{bound:.12g}"


def _log(bound: float | None) -> float | None:
    return None if bound is None else math.log(bound)
