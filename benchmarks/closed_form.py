"""The comparisons' problem in closed form: its best response, and the floor that no method can get below."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from frame import START, Contestant, Seen, Watch
from tasks import Task
from torch import Tensor

import bestresponse as br


class Exact:
    """Best response and hypergradient in closed form: least squares with its own decay on every weight.

    For output c with the decays d_c: (XᵀX/n + diag d_c) w_c = Xᵀy_c/n, with a column of ones in X for the bias.
    """

    def __init__(self, task: Task) -> None:
        self.train, self.valid = (self._moments(getattr(task, name)) for name in ("train", "valid"))

    @staticmethod
    def _moments(batches: br.Batches) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batches.tensors
        x = torch.cat([x, torch.ones(len(x), 1)], 1)
        n = len(x)
        return (x.T @ x / n).double(), (x.T @ y / n).double(), y.square().sum(1).mean().double()

    def solve(self, decay: Tensor, b: Tensor) -> Tensor:
        """(XᵀX/n + diag d_c)⁻¹ b_c for each column: ``(785, 10)``."""
        matrices = self.train[0] + torch.diag_embed(decay.T)  # (10, 785, 785)
        return torch.cholesky_solve(b.T[..., None], torch.linalg.cholesky(matrices))[..., 0].T

    def weights(self, decay: Tensor) -> Tensor:
        """The best response to decays of ``(785, 10)``."""
        return self.solve(decay, self.train[1])

    def valid_loss(self, weights: Tensor) -> Tensor:
        """The mean over examples and outputs."""
        xx, xy, yy = self.valid
        return ((weights * (xx @ weights)).sum() - 2 * (weights * xy).sum() + yy) / weights.shape[1]

    def validation(self, decay: Tensor | Mapping[str, Tensor]) -> float:
        """The best response's validation loss at decays as the losses see them."""
        if isinstance(decay, Mapping):
            weight, bias = decay.values()
            stacked = torch.cat([weight.T, bias[None]])
        else:
            stacked = decay.expand(785, 10)
        return float(self.valid_loss(self.weights(stacked.detach().double())))


def exact(watch: Watch, rate: float = 0.2) -> None:
    """Adam on the exact hypergradient at the exact best response: what no method for other models can beat."""
    closed, names = Exact(watch.task), list(watch.task.problem.params())
    raw = torch.full((785, 10), START, dtype=torch.float64)
    optimizer = torch.optim.Adam([raw], lr=rate, eps=1e-16)
    weights = closed.weights(raw.exp())
    steps = 0

    def seen() -> Seen:
        parts = [{names[0]: t[:-1].T, names[1]: t[-1]} for t in (weights.float(), raw.exp())]
        return Seen(*parts)

    while watch.look(seen, updates=0, gradients=0):
        slope = 2 * (closed.valid[0] @ weights - closed.valid[1]) / 10
        raw.grad = -raw.exp() * weights * closed.solve(raw.exp(), slope)  # the mixed product at (2A)⁻¹ slope
        optimizer.step()
        weights = closed.weights(raw.exp())
        steps += 1


EXACT = Contestant(exact, "Adam 0.2 on λ")
