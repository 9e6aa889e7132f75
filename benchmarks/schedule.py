"""A learning-rate schedule of 100 values, tuned by three modes of unrolling, against the best constant rate.

A net of 64-32-10 on scikit-learn's digits, 100 updates of momentum SGD from one initialization, batches of 64 in a
fixed order. The constant rate is the best of a grid; the schedule starts from it, and is moved along the hypergradient
of the loss on all validation images. First the three modes' hypergradients are compared at that start.

    python benchmarks/schedule.py [--out benchmarks/results/schedule.json]
    python benchmarks/tables.py    # the table in the docs, from the result file
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse import vectors
from bestresponse.papers.data import digits
from bestresponse.updates import SGD

UPDATES = 100
MOMENTUM = 0.875
MODES = {"reverse": br.Reverse(), "forward": br.Forward(), "reversible": br.Reversible()}


def task(rate: float, shape: tuple[int, ...]) -> tuple[br.Problem, list[Any], list[Any], list[Any]]:
    """The problem with a rate to tune, and its batches: training, validation, test."""
    images = digits(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, br.Space(lr=br.Hyper(rate, log=True, shape=shape)), loss, loss)
    x, y = images.train_x, images.train_y
    train = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 960, 64)]
    return problem, train, [(x[960:], y[960:])], [(images.test_x, images.test_y)]


def method(mode: br.Reverse | br.Forward | br.Reversible, lr: float = 0.05) -> br.Unrolled:
    return br.Unrolled(mode, SGD("lr", momentum=MOMENTUM), UPDATES, hyper_optimizer=partial(torch.optim.Adam, lr=lr))


def ends(problem: br.Problem, train: Any, valid: Any, test: Any) -> dict[str, float]:
    """Validation and test loss after a training with the hypers as they start."""
    state = method(br.Reverse(last=1)).init(problem)
    outcome = method(br.Reverse(last=1)).hypergradient(problem, state, br.Stream(train), br.Stream(valid))
    values = problem.space.values(state.raw)
    on_test = br.evaluate(problem, "valid", outcome.end.params, values, test[0])
    return {"valid": float(outcome.objective), "test": float(on_test)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "schedule.json")
    options = parser.parse_args()
    torch.set_num_threads(1)

    grid = [float(rate) for rate in torch.logspace(-2.5, 0.5, 61, dtype=torch.float64)]
    constant = [{"rate": rate, **ends(*task(rate, ()))} for rate in grid]
    best = min(constant, key=lambda row: row["valid"])
    print(f"best constant rate {best['rate']:.4f}: valid {best['valid']:.4f}, test {best['test']:.4f}", flush=True)

    problem, train, valid, test = task(best["rate"], (UPDATES,))
    gradients = {}
    for name, mode in MODES.items():
        state = method(mode).init(problem)
        gradients[name] = method(mode).hypergradient(problem, state, br.Stream(train), br.Stream(valid)).raw
    size = float(vectors.norm(gradients["reverse"]))
    differences = {
        name: float(vectors.norm(vectors.axpy(-1.0, gradients["reverse"], gradient))) / size
        for name, gradient in gradients.items()
    }
    print(f"relative differences from reverse mode: {differences}", flush=True)

    tuned = {}
    for name, mode in MODES.items():
        result = br.tune(problem, method(mode), train, valid, steps=options.steps, progress=False)
        rates = [float(rate) for rate in result.values["lr"]]
        final = br.Problem(
            problem.model,
            br.Space(lr=br.Hyper(torch.tensor(rates), log=True, shape=(UPDATES,))),
            problem.train_loss,
            problem.valid_loss,
        )
        tuned[name] = {**ends(final, train, valid, test), "rates": rates, "history": result.history["valid_loss"]}
        print(f"schedule by {name} mode: valid {tuned[name]['valid']:.4f}, test {tuned[name]['test']:.4f}", flush=True)

    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "updates": UPDATES,
        "momentum": MOMENTUM,
        "steps": options.steps,
        "constant": constant,
        "best_constant": best,
        "relative_difference_from_reverse": differences,
        "schedule": tuned,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
