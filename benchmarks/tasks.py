"""The problems that the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse.papers.data import Images, fashion_mnist, mnist, one_hot


@dataclass(frozen=True)
class Task:
    """A problem with its batches."""

    problem: br.Problem
    train: br.Batches
    valid: br.Batches
    evaluate: dict[str, br.Batches]
    metrics: dict[str, Any] = field(default_factory=dict)


def network(*widths: int) -> nn.Sequential:
    """Fully connected layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def decays(
    widths: tuple[int, ...],
    *,
    start: float,
    batch: int,
    seed: int,
    shape: Callable[[nn.Module], Any] = br.per_weight,
    images: Images | None = None,
    device: str = "cpu",
) -> Task:
    """MNIST, squared error on one-hot targets, 10,000 images to train on and the last 10,000 to tune on.

    Training: the sum over outputs plus Σ exp(λᵢ) wᵢ². Validation and test: the mean over outputs.
    """
    images = images or mnist()
    torch.manual_seed(seed)
    model = network(*widths).to(device)
    space = br.Space(decay=br.Hyper(start, log=True, shape=shape(model)))

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum(1).mean() + br.functional.l2(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def batches(x: Tensor, y: Tensor, size: int, **kwargs: Any) -> br.Batches:
        return br.Batches(x.to(device), one_hot(y).to(device), size=size, **kwargs)

    x, y = images.train_x, images.train_y
    valid = batches(x[-10_000:], y[-10_000:], 5000, shuffle=False)
    test = batches(images.test_x, images.test_y, 5000, shuffle=False)
    return Task(
        br.Problem(model, space, train_loss, valid_loss),
        batches(x[:10_000], y[:10_000], batch, drop_last=True),
        batches(x[-10_000:], y[-10_000:], batch, drop_last=True),
        {"valid": valid, "test": test},
    )


class DropoutNet(nn.Module):
    """784-400-400-10 with dropout before each layer, at rates that are given: one row of three for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(784, 400), nn.Linear(400, 400), nn.Linear(400, 10)])

    def forward(self, x: Tensor, rates: Tensor | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if rates is not None:
                keep = 1 - rates[:, i, None]  # (batch, 1)
                x = x * (torch.rand_like(x) < keep) / keep  # no derivative in the rate, but for the scale: detached
            x = layer(x)
            x = x.relu() if i < 2 else x
        return x


def dropout(*, start: float | tuple[float, ...], seed: int, images: Images | None = None, device: str = "cpu") -> Task:
    """Fashion-MNIST, 5,000 training images, three dropout rates in which nothing is differentiable."""
    images = images or fashion_mnist()
    torch.manual_seed(seed)
    model = DropoutNet().to(device)
    rate = br.Hyper(torch.as_tensor(start).expand(3).clone(), low=0.0, high=0.95, shape=(3,), sampled=True)

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x, hyper["rate"].detach()), y, reduction="none")

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def batches(x: Tensor, y: Tensor, size: int, **kwargs: Any) -> br.Batches:
        return br.Batches(x.to(device), y.to(device), size=size, **kwargs)

    x, y = images.train_x, images.train_y
    return Task(
        br.Problem(model, br.Space(rate=rate), train_loss, valid_loss),
        batches(x[:5000], y[:5000], 128, drop_last=True),
        batches(x[-10_000:], y[-10_000:], 128, drop_last=True),
        {
            "valid": batches(x[-10_000:], y[-10_000:], 5000, shuffle=False),
            "test": batches(images.test_x, images.test_y, 5000, shuffle=False),
        },
    )


def cleaning(*, start: float, seed: int, images: Images | None = None, device: str = "cpu") -> Task:
    """MNIST with half of 5,000 training labels drawn at random, and one weight for each example; 5,000 to tune on.

    A linear classifier with cross-entropy. ``error`` is the part of wrong answers.
    """
    images = images or mnist()
    torch.manual_seed(seed)
    model = nn.Linear(784, 10).to(device)
    space = br.Space(weight=br.Hyper(start, low=0.0, high=1.0, shape=(5000,)))

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y, index = batch
        return hyper["weight"][index] * F.cross_entropy(model(x), y, reduction="none")

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def error(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return (model(x).argmax(1) != y).float()

    x, y = images.train_x[:5000], images.train_y[:5000].clone()
    wrong = torch.randperm(5000)[:2500]
    y[wrong] = torch.randint(0, 10, (2500,))
    valid = images.train_x[5000:10_000].to(device), images.train_y[5000:10_000].to(device)
    test = images.test_x.to(device), images.test_y.to(device)
    return Task(
        br.Problem(model, space, train_loss, valid_loss),
        br.Batches(x.to(device), y.to(device), size=500, index=True),
        br.Batches(*valid, size=500),
        {"valid": br.Batches(*valid, size=5000, shuffle=False), "test": br.Batches(*test, size=5000, shuffle=False)},
        {"error": error},
    )
