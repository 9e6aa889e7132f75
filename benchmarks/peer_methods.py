"""The peers' own ways to tune one decay per weight, each used as its documentation shows; see ``peers.py``.

Of this library they take the data and the clock. All of them get the same care: weights by Adam, raw by Adam with an
epsilon that suits tiny gradients, both rates on a cosine to zero at the end of the budget where that is set.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import higher
import hippotrainer
import torch
import torchopt
from boat_torch import Problem as BoatProblem
from frame import START, Seen, Watch
from torch import Tensor, nn


def penalty(weights: Sequence[Tensor], raw: Sequence[Tensor]) -> Tensor:
    """Σ exp(λᵢ) wᵢ²."""
    return sum((part.exp() * weight.square()).sum() for weight, part in zip(weights, raw, strict=True))


def train_loss(prediction: Tensor, y: Tensor, weights: Sequence[Tensor], raw: Sequence[Tensor]) -> Tensor:
    """Summed over outputs, with the penalty."""
    return (prediction - y).square().sum(1).mean() + penalty(weights, raw)


def valid_loss(prediction: Tensor, y: Tensor) -> Tensor:
    """The mean over examples and outputs."""
    return (prediction - y).square().mean()


class Course:
    """What every peer's loop has: a model, raw, their optimizers, batches, and the count of what was done.

    Args:
        watch: The clock.
        rate: Of Adam on raw.
        every: Training updates between two changes of raw.
        warmup: Training updates before the first.
        cosine: Bring the rates of both optimizers to zero at the end of the budget.
        weight_rate: Of the optimizer of the weights.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        rate: float = 0.1,
        every: int = 10,
        warmup: int = 300,
        cosine: bool = False,
        weight_rate: float = 1e-3,
    ) -> None:
        self.watch, self.every, self.warmup, self.cosine = watch, every, warmup, cosine
        self.model: nn.Module = copy.deepcopy(watch.task.problem.model)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.raw = [torch.full_like(weight, START).requires_grad_() for weight in self.model.parameters()]
        self.raw_optimizer = torch.optim.Adam(self.raw, lr=rate, eps=1e-16)
        self.rates = (rate, weight_rate)
        self.train, self.valid = watch.stream("train"), watch.stream("valid")
        self.updates = self.gradients = 0

    @property
    def weights(self) -> list[Tensor]:
        """The model's weights as they are now."""
        return list(self.model.parameters())

    @property
    def warm(self) -> bool:
        """May raw be moved?"""
        return self.updates >= self.warmup

    @property
    def fade(self) -> float:
        """What the rates are multiplied with."""
        return (1 + math.cos(math.pi * self.watch.part)) / 2 if self.cosine else 1.0

    def goes_on(self, weights: Callable[[], Sequence[Tensor]] | None = None) -> bool:
        """Ask the clock; ``weights`` gives those to deploy, by default the model's."""

        def seen() -> Seen:
            now, decay = (weights or (lambda: self.weights))(), [part.detach().exp() for part in self.raw]
            parts = [part.detach() for part in now]
            return Seen(dict(zip(self.names, parts, strict=True)), dict(zip(self.names, decay, strict=True)))

        return self.watch.look(seen, updates=self.updates, gradients=self.gradients)

    def ordinary(self, optimizer: torch.optim.Optimizer) -> None:
        """``every`` ordinary training updates of the model."""
        optimizer.param_groups[0]["lr"] = self.rates[1] * self.fade
        for _ in range(self.every):
            x, y = next(self.train)
            optimizer.zero_grad()
            train_loss(self.model(x), y, self.weights, self.raw).backward(inputs=self.weights)
            optimizer.step()
        self.count(updates=self.every, gradients=self.every)

    def move_raw(self, gradient: Sequence[Tensor] | None = None) -> None:
        """One step of Adam along the hypergradient, by default the one in ``.grad``."""
        for part, slope in zip(self.raw, gradient or [part.grad for part in self.raw], strict=True):
            part.grad = slope
        self.raw_optimizer.param_groups[0]["lr"] = self.rates[0] * self.fade
        self.raw_optimizer.step()
        self.raw_optimizer.zero_grad()

    def count(self, *, updates: int = 0, gradients: int = 0) -> None:
        """Note work done: a product with second derivatives counts as two gradients."""
        self.updates += updates
        self.gradients += gradients


def torchopt_implicit(watch: Watch, *, iterations: int, warm_start: bool = False, **course: Any) -> None:
    """``torchopt.diff.implicit.custom_root`` around ordinary training, with its conjugate gradients."""
    now = Course(watch, **course)
    optimizer = torch.optim.Adam(now.model.parameters(), lr=1e-3)
    last: Any = None

    def objective(weights: Sequence[Tensor], raw: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return train_loss(x @ weights[0].T + weights[1], y, weights, raw)

    def linear_solve(product: Callable[[Any], Any], b: Any) -> Any:
        nonlocal last

        def counted(vector: Any) -> Any:
            now.count(gradients=2)
            return product(vector)

        solve = torchopt.linear_solve.solve_cg(maxiter=iterations, init=last if warm_start else None)
        last = solve(counted, b)
        return last

    @torchopt.diff.implicit.custom_root(torch.func.grad(objective), argnums=1, solve=linear_solve)
    def solution(weights: Any, raw: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            now.ordinary(optimizer)
        return tuple(weight.detach().clone() for weight in now.weights)

    while now.goes_on():
        if not now.warm:
            now.ordinary(optimizer)
            continue
        weights = solution(tuple(now.weights), tuple(now.raw), *next(now.train))
        x, y = next(now.valid)
        now.move_raw(torch.autograd.grad(valid_loss(x @ weights[0].T + weights[1], y), now.raw))
        now.count(gradients=3)


def torchopt_unrolled(watch: Watch, *, rule: str, accelerated: bool = False, **course: Any) -> None:
    """``torchopt.MetaAdam`` or ``MetaSGD``: ``every`` differentiable updates, one change of raw, and cut."""
    now = Course(watch, **course)
    rates: list[float] = [now.rates[1]]

    def schedule(count: Any) -> float:
        return rates[0]

    optimizer: Any
    if rule == "adam":
        optimizer = torchopt.MetaAdam(now.model, lr=schedule, use_accelerated_op=accelerated)
    else:
        optimizer = torchopt.MetaSGD(now.model, lr=schedule)

    def weights() -> list[Tensor]:
        return [now.model[0].weight, now.model[0].bias]

    while now.goes_on(weights):
        rates[0] = now.rates[1] * now.fade
        for _ in range(now.every):
            x, y = next(now.train)
            optimizer.step(train_loss(now.model(x), y, weights(), now.raw))
        now.count(updates=now.every, gradients=now.every)
        if now.warm:
            x, y = next(now.valid)
            now.move_raw(torch.autograd.grad(valid_loss(now.model(x), y), now.raw))
            now.count(gradients=1 + 2 * now.every)
        torchopt.stop_gradient(now.model)
        torchopt.stop_gradient(optimizer)


def higher_unrolled(watch: Watch, *, rule: str, **course: Any) -> None:
    """``higher.innerloop_ctx``: ``every`` differentiable updates, whose end the model and its optimizer go on from."""
    now = Course(watch, **course)
    optimizer: torch.optim.Optimizer
    if rule == "adam":
        optimizer = torch.optim.Adam(now.model.parameters(), lr=now.rates[1])
    else:
        optimizer = torch.optim.SGD(now.model.parameters(), lr=now.rates[1])
    while now.goes_on():
        optimizer.param_groups[0]["lr"] = now.rates[1] * now.fade
        if not now.warm:
            now.ordinary(optimizer)
            continue
        with higher.innerloop_ctx(now.model, optimizer) as (fast, unrolled):
            for _ in range(now.every):
                x, y = next(now.train)
                unrolled.step(train_loss(fast(x), y, list(fast.parameters()), now.raw))
            x, y = next(now.valid)
            now.move_raw(torch.autograd.grad(valid_loss(fast(x), y), now.raw))
            now.count(updates=now.every, gradients=1 + 3 * now.every)
            with torch.no_grad():
                for i, (weight, end) in enumerate(zip(now.weights, fast.parameters(), strict=True)):
                    weight.copy_(end)
                    optimizer.state[weight] = {
                        name: part.detach() if isinstance(part, Tensor) else part
                        for name, part in unrolled.state[0][i].items()
                    }


def hippotrainer_implicit(watch: Watch, *, rule: str, scale: float = 1.0, **course: Any) -> None:
    """``hippotrainer.HOAG``, ``Neumann`` or ``T1T2``: their hypergradient, and Adam along it.

    Their own step is plain gradient descent at one rate for all hypers.
    """
    settings = {name: course.pop(name) for name in ("cg_max_iter", "epsilon", "num_terms") if name in course}
    now = Course(watch, **course)
    optimizer = torch.optim.Adam(now.model.parameters(), lr=now.rates[1])
    hypers = dict(zip(now.names, now.raw, strict=True))
    peer = getattr(hippotrainer, rule)(hypers, model=now.model, optimizer=optimizer, **settings)
    peer._hyperparams_requires_grad_(True)
    while now.goes_on():
        now.ordinary(optimizer)
        if now.warm:
            (x, y), (u, v) = next(now.train), next(now.valid)
            loss = train_loss(now.model(x), y, now.weights, now.raw)
            # The absolute tolerance and safeguards of its solver are made for losses that are not so small.
            judged = scale * valid_loss(now.model(u), v) + 0 * sum(part.sum() for part in now.raw)
            now.move_raw(peer.hyper_grad(loss, judged))
            now.count(gradients=4 + 2 * getattr(peer, "cg_max_iter", getattr(peer, "num_terms", 0)))


def boat_train_loss(feed: dict[str, Any], upper: Any, lower: Any, params: Any = None) -> Tensor:
    """BOAT's lower objective: each call draws a batch, so that its inner loop sees more than one."""
    x, y = next(feed["stream"])
    prediction = lower(x) if params is None else lower(x, params=params)
    return train_loss(prediction, y, list(params or lower.parameters()), list(upper.parameters()))


def boat_valid_loss(feed: dict[str, Any], upper: Any, lower: Any, params: Any = None) -> Tensor:
    """BOAT's upper objective."""
    x, y = next(feed["stream"])
    return valid_loss(lower(x) if params is None else lower(x, params=params), y)


def boat(watch: Watch, *, operation: str, k: int = 10, rule: str = "adam", **course: Any) -> None:
    """``boat_torch.Problem`` with naive gradient dynamics below and ``CG``, ``NS`` or ``RAD`` above."""
    now = Course(watch, **course)
    upper = nn.ParameterList([nn.Parameter(part.detach()) for part in now.raw])
    now.raw = list(upper)
    now.raw_optimizer = torch.optim.Adam(now.raw, lr=now.rates[0], eps=1e-16)
    make = torch.optim.Adam if rule == "adam" else torch.optim.SGD
    optimizer = make(now.model.parameters(), lr=now.rates[1])
    with tempfile.TemporaryDirectory() as directory:
        configuration = {
            "fo_op": None,
            "gm_op": ["NGD"],
            "na_op": [operation],
            "lower_level_model": now.model,
            "upper_level_model": upper,
            "lower_level_var": list(now.model.parameters()),
            "upper_level_var": now.raw,
            "lower_level_opt": optimizer,
            "upper_level_opt": now.raw_optimizer,
            "lower_iters": now.every,
            "device": "cpu",
            "GDA": {"alpha_init": 0.0, "alpha_decay": 1.0},
            "CG": {"tolerance": 1e-10, "k": k},
            "RGT": {"truncate_iter": 0},
            "accumulate_grad": False,
            "copy_last_param": True,
            "return_grad": False,
            "loss_log_path": str(Path(directory) / "losses.json"),
        }
        losses = {
            f"{level}_level_loss": {"function": f"{__name__}.boat_{name}_loss", "params": {}}
            for level, name in (("lower", "train"), ("upper", "valid"))
        }
        problem = BoatProblem(configuration, losses).build_ll_solver().build_ul_solver()
        feeds = {"stream": now.train}, {"stream": now.valid}
        steps = 0
        while now.goes_on():
            optimizer.param_groups[0]["lr"] = now.rates[1] * now.fade
            now.raw_optimizer.param_groups[0]["lr"] = now.rates[0] * now.fade
            problem.run_iter(*feeds, current_iter=steps)
            steps += 1
            now.count(updates=now.every, gradients=now.every + (2 * now.every + 1 if operation == "RAD" else 2 * k + 3))
