"""Tune 7,850 hyperparameters in one training run: one weight decay for each weight of a linear model on MNIST.

The adjoint method does so; beside it plain training with a default decay, a random search over one shared decay at a
larger cost, the hypernetwork of Lorraine and Duvenaud (2018) and T1–T2. Prints one table and draws one figure.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import bestresponse as br
from bestresponse.papers.data import Images, mnist_or_digits, one_hot


@dataclass(frozen=True)
class Data:
    """Batches on which the methods meet."""

    images: Images
    train: br.Batches
    valid: br.Batches
    test: br.Batches


def load() -> Data:
    images = mnist_or_digits()
    x, y = images.train_x, one_hot(images.train_y)
    total = len(x)
    small, held_out = (total // 6, total // 6) if images.name == "MNIST" else (total * 2 // 3, total // 3)
    train = br.Batches(x[:small], y[:small], size=small // 10)
    valid = br.Batches(x[-held_out:], y[-held_out:], size=held_out // 10)
    test = br.Batches(images.test_x, one_hot(images.test_y), size=2000, shuffle=False)
    return Data(images, train, valid, test)


def problem(pixels: int, decay: float, *, per_weight: bool) -> br.Problem:
    """Least squares on one-hot targets, with one decay for all weights or one for each."""
    torch.manual_seed(0)
    model = nn.Linear(pixels, 10)
    shape = br.per_weight(model) if per_weight else ()
    space = br.Space(decay=br.Hyper(decay, low=1e-10, high=1e3, log=True, shape=shape))

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum(1) + br.functional.l2(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean(1)

    return br.Problem(model, space, train_loss, valid_loss)


def contenders(pixels: int, steps: int) -> dict[str, tuple[br.Problem, br.Method, int]]:
    """Name -> problem, method, steps."""
    shared, each = partial(problem, pixels, per_weight=False), partial(problem, pixels, per_weight=True)

    def trained(length: int, rate: float) -> dict[str, Any]:
        return {"optimizer": partial(Adam, lr=rate), "lr_schedule": partial(CosineAnnealingLR, T_max=length)}

    plain = br.methods.cross_validation(br.Grid({"decay": [1e-4]}), steps, **trained(steps, 1e-3))
    search = br.methods.cross_validation(br.Random(20), steps // 6, **trained(steps // 6, 3e-3))
    hypernetwork = br.methods.lorraine2018_joint(
        response=br.LowRank(10, init=1e-6),
        hyper_optimizer=partial(Adam, lr=0.01),
        hyper_lr_schedule=partial(CosineAnnealingLR, T_max=steps),
        **trained(steps, 1e-3),
    )
    t1t2 = br.methods.luketina2016(
        schedule=br.Alternate(train=5, warmup=steps // 10),
        hyper_optimizer=partial(Adam, lr=0.1),
        **trained(steps, 1e-3),
    )
    adjoint = br.methods.adjoint(
        schedule=br.Alternate(train=10, warmup=steps // 10),
        hyper_lr_schedule=partial(CosineAnnealingLR, T_max=steps // 10),
        **trained(steps, 1e-3),
    )
    return {
        "plain training, decay 1e-4": (shared(1e-4), plain, plain.steps),
        "random search, 1 decay, 20 trials": (shared(1e-4), search, search.steps),
        f"hypernetwork, {10 * pixels + 10:,} decays": (each(0.0067), hypernetwork, steps),
        f"T1–T2, {10 * pixels + 10:,} decays": (each(0.0067), t1t2, steps // 5),
        f"adjoint, {10 * pixels + 10:,} decays": (each(0.0067), adjoint, steps // 10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="training updates of the plain run")
    parser.add_argument("--figure", type=Path, default=Path("runs/demo.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # for a model this small more threads wait for one another, on a busy machine for minutes

    data = load()
    pixels = data.images.train_x.shape[1]
    print(
        f"{data.images.name} from {data.images.source}: {len(data.train.tensors[0]):,} images to train on, "
        f"{len(data.valid.tensors[0]):,} to tune on, {len(data.test.tensors[0]):,} to test on\n"
    )
    results: dict[str, br.Result] = {}
    rows = []
    for name, (task, method, steps) in contenders(pixels, options.steps).items():
        began = time.perf_counter()
        results[name] = br.tune(
            task,
            method,
            data.train,
            data.valid,
            steps=steps,
            evaluate={"valid": data.valid, "test": data.test},
            evaluate_every=max(1, steps // 30),
        )
        last = results[name].history.row()
        rows.append((name, results[name].metrics, last["seconds"], int(last["gradients"])))
        print(f"  {name}: {time.perf_counter() - began:.0f} s with its evaluations", flush=True)

    print(f"\n{'mean squared error':36s} {'valid':>8s} {'test':>8s} {'seconds':>8s} {'gradients':>10s}")
    for name, metrics, seconds, gradients in rows:
        print(f"{name:36s} {metrics['valid/loss']:8.5f} {metrics['test/loss']:8.5f} {seconds:8.1f} {gradients:10,d}")
    if data.images.name == "MNIST":
        print(
            "\nFor scale, in closed form: the best single decay .03808 / .03965; the floor of 7,850 decays about .0356."
        )
    print("One seed. Seconds are of this machine, without evaluations; gradients count every gradient of a minibatch.")

    options.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(results, options.figure)
    print(f"\nFigure: {options.figure}")


def draw(results: dict[str, br.Result], path: Path) -> None:
    """Left, validation and test error against cost; right, the decay that each pixel's weight was given."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(12, 4.4), layout="constrained")
    axes = figure.subplot_mosaic([["valid", "test", "decays"]], width_ratios=[1, 1, 1.65])

    colours = ["0.55", "#c47f17", "#7a4fb5", "#0b6e99", "#b3202c"]
    ends = [result.metrics[f"{which}/loss"] for result in results.values() for which in ("valid", "test")]
    for which, title in (("valid", "validation"), ("test", "test")):
        axis = axes[which]
        for (name, result), colour in zip(results.items(), colours, strict=True):
            frame = [row for row in result.history.rows() if f"{which}/loss" in row]
            cost = [row["gradients"] for row in frame]
            error = [row[f"{which}/loss"] for row in frame]
            axis.plot(cost, error, color=colour, label=name, lw=1.8)
            axis.plot(cost[-1:], error[-1:], "o", color=colour, ms=5)
        axis.set(title=title, xlabel="gradients of minibatches")
        axis.set_ylim(min(ends) - 0.1 * (max(ends) - min(ends)), max(ends) + 0.5 * (max(ends) - min(ends)))
        axis.grid(alpha=0.25)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(3))
    axes["valid"].set(ylabel="mean squared error")
    axes["test"].set(yticklabels=[])
    axes["test"].legend(loc="lower right", fontsize=8)

    decay = list(results.values())[-1].values["decay"]["weight"].log10()  # (10, pixels)
    side = int(decay.shape[1] ** 0.5)
    low, high = decay.quantile(0.02).item(), decay.quantile(0.98).item()
    mosaic = torch.full((2 * side + 1, 5 * side + 4), torch.nan)
    for digit in range(10):
        top, left = (digit // 5) * (side + 1), (digit % 5) * (side + 1)
        mosaic[top : top + side, left : left + side] = decay[digit].view(side, side)
        axes["decays"].text(left + side * 0.06, top + side * 0.13, str(digit), color="white", weight="bold")
    picture = axes["decays"].imshow(mosaic, cmap="magma", vmin=low, vmax=high)
    axes["decays"].set(xticks=[], yticks=[], title="what the adjoint method chose: one decay per pixel and digit")
    axes["decays"].spines[:].set_visible(False)
    figure.colorbar(picture, ax=axes["decays"], shrink=0.6, label="log10 of the decay", pad=0.02)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
