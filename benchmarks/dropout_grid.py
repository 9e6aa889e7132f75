"""Every fixed setting of a 4 x 4 x 4 grid of dropout rates, on the problem that ``tasks.dropout`` tunes.

All settings and seeds are trained side by side, as one batched product a layer, on the batches that a tuned run with
that seed sees. They are deployed as ``Adjoint`` deploys, as the mean of the last 100 updates, and as they are. Then
``Adjoint`` tunes the rates, with its defaults, from two starts.

    python benchmarks/dropout_grid.py [--device cuda] [--out benchmarks/results/dropout_grid.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from defaults import jobs, run
from tasks import Task, dropout
from torch import Tensor
from torch.nn import functional as F

import bestresponse as br

RATES = (0.05, 0.2, 0.4, 0.6)
AVERAGE = 100


def forward(params: list[Tensor], x: Tensor, rates: Tensor | None) -> Tensor:
    """Scores ``(settings, batch, classes)`` of inputs ``(batch, in)``."""
    for i in range(3):
        if rates is not None:
            keep = 1 - rates[:, i, None, None]  # (settings, 1, 1)
            mask = torch.rand((len(rates), *x.shape[-2:]), device=x.device) < keep
            x = x * mask / keep
        x = params[2 * i + 1][:, None] + (x @ params[2 * i].mT)
        x = x.relu() if i < 2 else x
    return x


def losses(params: list[Tensor], batches: br.Batches) -> Tensor:
    """The cross-entropy of every setting on a whole set."""
    total, count = torch.zeros((), device=params[0].device), 0
    with torch.no_grad():
        for x, y in batches:
            scores = forward(params, x, None)
            each = F.cross_entropy(scores.flatten(0, 1), y.repeat(len(scores)), reduction="none")
            total, count = total + each.view(len(scores), -1).sum(1), count + len(y)
    return total / count


def train(task: Task, grid: Tensor, seed: int, updates: int) -> tuple[list[Tensor], list[Tensor]]:
    """Final and averaged weights of all settings, all from the task's own first weights; Adam at 1e-3."""
    count = len(grid)
    params = [w.expand(count, *w.shape).clone().requires_grad_() for w in task.problem.params().values()]
    mean = [w.detach().clone() for w in params]
    optimizer = torch.optim.Adam(params, lr=1e-3)
    stream = br.Stream(task.train, name="train", seed=seed)
    torch.manual_seed(seed)
    for t in range(1, updates + 1):
        x, y = next(stream)
        scores = forward(params, x, grid)
        # The sum over settings: each has the gradient of its own mean loss.
        loss = F.cross_entropy(scores.flatten(0, 1), y.repeat(count), reduction="none").view(count, -1).mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for kept, w in zip(mean, params, strict=True):
            kept.lerp_(w.detach(), 1 / min(t, AVERAGE))
    return [w.detach() for w in params], mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = list(itertools.product(RATES, repeat=3))
    grid = torch.tensor(settings, device=options.device)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        began = time.perf_counter()
        task = dropout(start=0.5, seed=seed, device=options.device)
        final, averaged = train(task, grid, seed, options.updates)
        measured = {
            f"{where}/{kind}": losses(params, task.evaluate[where]).tolist()
            for where in ("valid", "test")
            for kind, params in (("final", final), ("averaged", averaged))
        }
        for i, rates in enumerate(settings):
            rows.append({"seed": seed, "rates": rates, **{name: column[i] for name, column in measured.items()}})
        best = min(rows[-len(settings) :], key=lambda row: row["valid/averaged"])
        print(f"seed {seed}, {time.perf_counter() - began:.0f} s, the best on validation: {best}", flush=True)
    tuned = []
    for job in jobs(["dropout"], ["adjoint"], options.seeds):
        row = run(job, options.device)
        tuned.append(
            {"seed": job.seed, "start": job.start, "valid": row["valid/loss"], "test": row["test/loss"]}
            | {"rates": row["values"]["rate"]}
        )
        print(f"tuned: {tuned[-1]}", flush=True)
    if options.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
            "updates": options.updates,
            "rows": rows,
            "tuned": tuned,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
