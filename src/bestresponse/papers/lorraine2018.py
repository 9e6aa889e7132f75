"""Lorraine and Duvenaud 2018, *Stochastic Hyperparameter Optimization through Hypernetworks*.

https://arxiv.org/abs/1802.09419. Where the paper's text and the authors' released code differ, this follows the code:

- the prediction loss is the mean negative log-likelihood of a Gaussian with standard deviation 0.1, not the mean
  squared error: 50 · MSE − 1.383646;
- the regulariser is exp(λ)·‖θ‖₂, the norm itself and not its square, over weights and biases;
- every weight and bias starts at 0.01 · randn, from NumPy's generator with seed 7;
- the local experiment (``fig_exp2``) is algorithm 4, without sampling; its optimizer for λ is Adam with the bias
  correction left at step one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from bestresponse import vectors
from bestresponse.extras import require
from bestresponse.methods import BestResponse, BlackBox, Grid
from bestresponse.methods.catalog import lorraine2018_global, lorraine2018_simplified
from bestresponse.papers.data import Images, one_hot
from bestresponse.perturb import Gaussian
from bestresponse.problem import Params, Problem
from bestresponse.responses import MLP, Linear
from bestresponse.space import Hyper, Space, Values
from bestresponse.tune import Event

#: The paper's losses are 50 · MSE plus this: log σ + ½ log 2π at σ = 0.1.
OFFSET: Final = math.log(0.1) + 0.5 * math.log(2 * math.pi)


def released_draws(inputs: int, *, count: int, seed: int = 7) -> list[Params]:
    """The released code's first random numbers, ``count`` times as many as the linear model has weights.

    The first draw starts the models of cross-validation. A linear hypernetwork takes the first for its slope, and the
    second for its bias.
    """
    random = require("numpy", "plots").random.RandomState(seed)
    draws = []
    for _ in range(count):
        weight, bias = (torch.from_numpy(0.01 * random.randn(*shape)) for shape in ((inputs, 10), (10,)))
        draws.append({"weight": weight.T, "bias": bias})
    return draws


@final
class Rows(NamedTuple):
    """A batch of inputs and one-hot targets."""

    x: Tensor  # (batch, in)
    y: Tensor  # (batch, out)

    def error(self, model: nn.Linear) -> Tensor:
        """The mean squared error, over examples and outputs."""
        return (model(self.x) - self.y).square().mean()


@final
@dataclass(frozen=True)
class Squares:
    """The same error over many examples, from sums of squares: exact, in a time that does not grow with them.

    For weights V = [W, b] with inputs extended by a one: MSE = (tr V S Vᵀ − 2 tr V Cᵀ + t) / (n · outputs).
    """

    inputs: Tensor  # S = XᵀX, (in + 1, in + 1)
    products: Tensor  # C = YᵀX, (out, in + 1)
    targets: Tensor  # t = ‖Y‖²
    count: int  # n · out

    @staticmethod
    def of(x: Tensor, y: Tensor) -> Squares:
        """The sums for inputs ``(n, in)`` and targets ``(n, out)``."""
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return Squares(x.T @ x, y.T @ x, y.square().sum(), y.numel())

    def error(self, model: nn.Linear) -> Tensor:
        """The mean squared error of a linear model."""
        v = torch.cat([model.weight, model.bias[:, None]], 1)
        return (((v @ self.inputs) * v).sum() - 2 * (v * self.products).sum() + self.targets) / self.count


@final
@dataclass(frozen=True)
class TenImages:
    """Figures 1 and 2: a linear model of ten MNIST images, one λ for the size of all its weights.

    Attributes:
        problem: Its hyper is called ``log_decay``, and is the paper's λ itself.
        train: One batch of the ten training images.
        valid: One batch of the 10,000 validation images, as sums of squares.
    """

    problem: Problem
    train: list[Rows]
    valid: list[Squares]


def ten_images(images: Images, *, start: float, weights: Params | None = None) -> TenImages:
    """The problem of figures 1 and 2, as released, in float64.

    Args:
        images: MNIST, or anything like it with at least 10,010 training images.
        start: The first λ.
        weights: Of the linear model; by default the first ones of :func:`released_draws`.
    """
    x, y = images.train_x.double(), one_hot(images.train_y, dtype=torch.float64)
    model = nn.Linear(x.shape[1], 10, dtype=torch.float64)
    model.load_state_dict(released_draws(x.shape[1], count=1)[0] if weights is None else weights)

    def predict(model: nn.Linear, batch: Rows | Squares, hyper: Values) -> Tensor:
        return 50 * batch.error(model) + OFFSET

    def train_loss(model: nn.Linear, batch: Rows, hyper: Values) -> Tensor:
        size = torch.cat([p.flatten() for p in model.parameters()]).norm()
        return predict(model, batch, hyper) + hyper["log_decay"].exp() * size

    problem = Problem(model, Space(log_decay=Hyper(start)), train_loss, predict)
    return TenImages(problem, [Rows(x[:10], y[:10])], [Squares.of(x[10:10010], y[10:10010])])


def released_cross_validation(log_decay: float, steps: int = 1000) -> BlackBox:
    """One cross of figures 1 and 2: Adam at 1e-4 for 1,000 steps, which has not converged where λ is small."""
    return BlackBox(Grid({"log_decay": [log_decay]}), steps, optimizer=partial(Adam, lr=1e-4))


def released_global(steps: int = 100_000) -> BestResponse:
    """Figure 1's method: algorithm 2, 400,450 numbers, ten λ a step from N(1, 3²) cut off at 4."""
    return lorraine2018_global(
        steps,
        response=MLP(50, init=0.01),
        perturb=Gaussian(3.0, mean=1.0, clip=(-100.0, 4.0)),
        samples=10,
        vectorize=True,
        optimizer=partial(Adam, lr=1e-4),
        hyper_optimizer=partial(Adam, lr=1e-2),
    )


def released_local() -> BestResponse:
    """Figure 2's method: algorithm 4, 15,700 numbers, plain SGD for them, Adam with a stuck bias correction for λ."""
    return lorraine2018_simplified(
        response=Linear(init=0.01),
        optimizer=partial(SGD, lr=1e-4),
        hyper_optimizer=partial(Adam, lr=1e-2),
        hyper_lr_schedule=_stuck_bias_correction,
    )


def released_slope(slope: Params) -> Callable[[Event], None]:
    """A callback that starts a linear response at a given slope."""

    def callback(event: Event) -> None:
        if event.kind == "start" and event.step == 0:
            state: Any = event.state
            with torch.no_grad():
                state.response.network[0].weight.copy_(vectors.flatten(slope)[:, None])

    return callback


def _stuck_bias_correction(optimizer: Optimizer) -> LambdaLR:
    """Undo Adam's bias correction at step t and apply that of step one, through the learning rate."""

    def factor(step: int) -> float:
        t = step + 1
        return (1 - 0.9**t) / (1 - 0.9) * math.sqrt((1 - 0.999) / (1 - 0.999**t))

    return LambdaLR(optimizer, factor)
