"""Problems whose answers are known."""

from __future__ import annotations

import math
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bestresponse import functional
from bestresponse.problem import Problem
from bestresponse.space import Hyper, Raw, Space, Values, per_layer, per_weight
from bestresponse.stream import Batches


def _default(tensor: Tensor) -> Tensor:
    """In the default precision, on the default device. Numbers are drawn in float64 on the CPU, so that all agree."""
    return tensor.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


@final
class Ridge:
    """Least squares with one decay per weight, on all data at once: everything about it is known in closed form.

    L_T(w, λ) = mean((Xw − y)²) + Σ exp(λᵢ) wᵢ² and L_V(w) = mean((X'w − y')²), so that with A = XᵀX/m, c = Xᵀy/m:
    w*(λ) = (A + D)⁻¹c with D = diag(exp λ), H = 2(A + D), and dL_V/dλ = −2 exp(λ) ∘ w* ∘ H⁻¹∇L_V(w*).

    Args:
        weights: How many weights, and so hypers.
        examples: Rows of X and of X'.
        orthogonal: Make XᵀX/m and X'ᵀX'/m the identity. The weights then do not interact, and the best decays, drawn
            from [0.2, 2], are known: see :attr:`best_raw`.
        start: The decay everything starts at.
        seed: Of the data.
    """

    def __init__(
        self, weights: int = 5, examples: int = 40, *, orthogonal: bool = False, start: float = 1.0, seed: int = 0
    ) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        x, xv = _normal(generator, examples, weights), _normal(generator, examples, weights)
        truth = _normal(generator, weights)
        if orthogonal:
            x, xv = (torch.linalg.qr(matrix).Q * math.sqrt(examples) for matrix in (x, xv))
        y, yv = x @ truth + 0.5 * _normal(generator, examples), xv @ truth + 0.5 * _normal(generator, examples)
        self._best_decay: Tensor | None = None
        if orthogonal:
            # w*ᵢ = cᵢ/(1 + dᵢ), and L_V is least at the validation data's own solution: make that one reachable.
            self._best_decay = 0.2 + 1.8 * torch.rand(weights, generator=generator, dtype=torch.float64, device="cpu")
            c, cv = x.T @ y / examples, xv.T @ yv / examples
            yv = yv + xv @ (c / (1 + self._best_decay) - cv)
        self.x, self.y, self.xv, self.yv = (_default(tensor) for tensor in (x, y, xv, yv))
        self.model = nn.Linear(weights, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        decay = Hyper(start, log=True, shape=per_weight(self.model))
        self.problem = Problem(self.model, Space(decay=decay), self._train_loss, self._valid_loss)
        self.train = Batches(self.x, self.y, size=examples, shuffle=False)
        self.valid = Batches(self.xv, self.yv, size=examples, shuffle=False)

    def _train_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], hyper: Values) -> Tensor:
        x, y = batch
        return (model(x)[:, 0] - y).square() + functional.l2(model, hyper["decay"])  # one number per example

    def _valid_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], hyper: Values) -> Tensor:
        x, y = batch
        return (model(x)[:, 0] - y).square().mean()

    def best_response(self, raw: Raw) -> Tensor:
        """w*(λ), ``(weights,)``."""
        m = len(self.x)
        return torch.linalg.solve(
            self.x.T @ self.x / m + torch.diag(raw["decay.weight"][0].exp()), self.x.T @ self.y / m
        )

    def hessian(self, raw: Raw) -> Tensor:
        """∂²L_T/∂w², ``(weights, weights)``."""
        return 2 * (self.x.T @ self.x / len(self.x) + torch.diag(raw["decay.weight"][0].exp()))

    def valid_slope(self, weights: Tensor) -> Tensor:
        """∂L_V/∂w, ``(weights,)``."""
        return 2 * self.xv.T @ (self.xv @ weights - self.yv) / len(self.xv)

    def hypergradient(self, raw: Raw, inverse: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """dL_V/draw at the best response, ``(weights,)``.

        Args:
            raw: Where.
            inverse: What stands for H⁻¹: the identity gives what T1–T2 should give.
            weights: Other weights than the best response.
        """
        w = self.best_response(raw) if weights is None else weights
        inverse = torch.linalg.inv(self.hessian(raw)) if inverse is None else inverse
        return -2 * raw["decay.weight"][0].exp() * w * (inverse @ self.valid_slope(w))

    def valid_loss(self, raw: Raw) -> float:
        """L_V at the best response."""
        residual = self.xv @ self.best_response(raw) - self.yv
        return float(residual.square().mean())

    @cached_property
    def best_raw(self) -> Tensor:
        """The raw decays with the lowest L_V(w*), ``(weights,)``; for an orthogonal problem."""
        if self._best_decay is None:
            raise ValueError("the best decays are known only for Ridge(orthogonal=True)")
        return self._best_decay.log().to(self.x)

    @cached_property
    def lowest(self) -> float:
        """The lowest L_V(w*) there is; for an orthogonal problem."""
        return self.valid_loss({"decay.weight": self.best_raw[None]})


@final
class Quadratic:
    """Weights that follow the hypers exactly linearly: what a linear response must learn without error.

    L_T(w, λ) = ½ (w − Jλ − j)ᵀ H (w − Jλ − j) and L_V(w) = ½‖w − t‖², so that w*(λ) = Jλ + j, dw*/dλ = J and
    dL_V/dλ = Jᵀ(Jλ + j − t).

    Args:
        weights: How many weights.
        hypers: How many hypers, fewer than weights; they start at 0.
        seed: Of the matrices.
    """

    def __init__(self, weights: int = 4, hypers: int = 2, *, seed: int = 0) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        root = _normal(generator, weights, weights)
        hessian = root @ root.T / weights + torch.eye(weights, dtype=torch.float64, device="cpu")
        tensors = (
            hessian,
            _normal(generator, weights, hypers),
            _normal(generator, weights),
            _normal(generator, weights),
        )
        self.h, self.jacobian, self.offset, self.target = (_default(tensor) for tensor in tensors)
        self.model = _Weights(weights)
        space = Space(shift=Hyper(0.0, shape=(hypers,)))
        self.problem = Problem(self.model, space, self._train_loss, self._valid_loss)
        self.train = self.valid = [torch.zeros(1)]

    def _train_loss(self, model: nn.Module, batch: Tensor, hyper: Values) -> Tensor:
        distance = model(batch) - self.jacobian @ hyper["shift"] - self.offset
        return distance @ self.h @ distance / 2

    def _valid_loss(self, model: nn.Module, batch: Tensor, hyper: Values) -> Tensor:
        distance = model(batch) - self.target
        return distance.square().sum() / 2

    def best_response(self, raw: Raw) -> Tensor:
        """w*(λ), ``(weights,)``."""
        return self.jacobian @ raw["shift"] + self.offset

    def valid_loss(self, raw: Raw) -> float:
        """L_V at the best response."""
        return float((self.best_response(raw) - self.target).square().sum() / 2)

    def hypergradient(self, raw: Raw) -> Tensor:
        """dL_V/dλ at the best response."""
        return self.jacobian.T @ (self.best_response(raw) - self.target)

    @cached_property
    def best_raw(self) -> Tensor:
        """The λ with the lowest L_V(w*): least squares."""
        return torch.linalg.solve(self.jacobian.T @ self.jacobian, self.jacobian.T @ (self.target - self.offset))

    @cached_property
    def lowest(self) -> float:
        """The lowest L_V(w*) there is."""
        return self.valid_loss({"shift": self.best_raw})


@final
class _Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count))

    def forward(self, batch: Tensor) -> Tensor:
        return self.w


@final
class TinyNet(nn.Module):
    """A small net with one of everything that trips libraries up: BatchNorm, dropout, tied and frozen weights."""

    def __init__(self, features: int = 4, classes: int = 3, *, batch_norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features, bias=False)
        self.embed.weight.requires_grad_(False)
        self.first = nn.Linear(features, features)
        self.norm = nn.BatchNorm1d(features) if batch_norm else nn.LayerNorm(features)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(features, features)
        self.second.weight = self.first.weight
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        hidden = self.dropout(torch.relu(self.norm(self.first(self.embed(x)))))
        return self.head(torch.tanh(self.second(hidden)))


def net_problem(*, batch_norm: bool = True, seed: int = 0) -> tuple[Problem, Batches, Batches]:
    """A small classification with a :class:`TinyNet`, three kinds of hyper, and shuffled minibatches."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = _default(_normal(generator, 60, 4))
    y = torch.randint(0, 3, (60,), generator=generator, device="cpu").to(x.device)
    model = TinyNet(batch_norm=batch_norm)
    space = Space(
        decay=Hyper(1e-3, low=1e-8, high=10.0, log=True, shape=per_weight(model)),
        layer=Hyper(0.1, low=0.0, shape=per_layer(model), prior=lambda raw: 1e-3 * raw.square().sum()),
        smooth=Hyper(0.1, low=0.0, high=0.5),
    )

    def train_loss(model: nn.Module, batch: tuple[Tensor, Tensor], hyper: Values) -> Tensor:
        scores = model(batch[0])
        target = F.one_hot(batch[1], 3).to(scores) * (1 - hyper["smooth"]) + hyper["smooth"] / 3
        loss = -(target * scores.log_softmax(-1)).sum(-1)
        penalty = functional.l2(model, hyper["decay"]) + 1e-3 * functional.l1(model, hyper["layer"])
        return loss + penalty

    def valid_loss(model: nn.Module, batch: tuple[Tensor, Tensor], hyper: Values) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = Problem(model, space, train_loss, valid_loss)
    return problem, Batches(x[:40], y[:40], size=8), Batches(x[40:], y[40:], size=10)
