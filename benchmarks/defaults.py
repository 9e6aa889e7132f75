"""``Adjoint`` with its defaults untouched, over a range of problems, beside fixed settings trained the same way.

Fixed settings are trained as often, with the same optimizer and the same averaging of the last weights, by the very
same method with raw kept still. Every run is a process of its own.

    python benchmarks/defaults.py [--jobs 2] [--seeds 0 1 2] [--only linear dropout] [--device cuda]
        [--out benchmarks/results/defaults.json]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tasks import Task, cleaning, decays, dropout

import bestresponse as br
from bestresponse.papers.data import fashion_mnist, mnist

UPDATES = 3000
SHARED = tuple(10.0**power for power in range(-9, 1))  # decays of the fixed settings
#: A plain run: no pairs, raw never moves.
FIXED = br.Adjoint(schedule=br.Alternate(train=10, warmup=math.inf))


@dataclass(frozen=True)
class Job:
    """One run: a problem at a start, and whether it is tuned or kept there."""

    problem: str
    start: Any
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.problem} {self.method} from {self.start}, seed {self.seed}"


def _decays(images: Callable[[], Any], widths: tuple[int, ...], batch: int) -> Callable[..., Task]:
    def make(start: float, seed: int, device: str) -> Task:
        return decays(widths, start=start, batch=batch, seed=seed, images=images(), device=device)

    return make


def _dropout(start: Any, seed: int, device: str) -> Task:
    return dropout(start=start, seed=seed, device=device)


def _cleaning(start: float, seed: int, device: str) -> Task:
    return cleaning(start=start, seed=seed, device=device)


@dataclass(frozen=True)
class Range:
    """A problem: how to make it, where tuning starts, the fixed settings beside it, and training updates."""

    make: Callable[..., Task]
    starts: tuple[Any, ...]
    fixed: tuple[Any, ...]
    updates: int = UPDATES


PROBLEMS = {
    "linear": Range(_decays(mnist, (784, 10), 1000), (math.exp(-5),), SHARED),
    "one hidden layer": Range(_decays(mnist, (784, 100, 10), 256), (math.exp(-12),), SHARED),
    "two hidden layers": Range(_decays(mnist, (784, 100, 100, 10), 256), (math.exp(-12),), SHARED),
    "linear, Fashion": Range(_decays(fashion_mnist, (784, 10), 1000), (math.exp(-5),), SHARED),
    "one hidden layer, Fashion": Range(_decays(fashion_mnist, (784, 100, 10), 256), (math.exp(-12),), SHARED),
    "dropout": Range(_dropout, (0.05, 0.5), (), 4000),  # fixed rates: dropout_grid.py
    "cleaning": Range(_cleaning, (0.5,), (0.5,)),
}
METHODS = {
    "adjoint": br.methods.adjoint(),
    "adjoint, sparse": br.methods.adjoint(pair_every=3),
    "T1-T2": br.methods.luketina2016(schedule=br.Alternate(train=10, warmup=300)),
    "fixed": FIXED,
}


def run(job: Job, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    problem, method = PROBLEMS[job.problem], METHODS[job.method]
    task = problem.make(job.start, job.seed, device)
    if job.method == "T1-T2" and task.problem.space.sampled:
        raise ValueError("T1-T2 needs a derivative that this problem has not")
    began = time.process_time()
    result = br.tune(
        task.problem,
        method,
        task.train,
        task.valid,
        steps=problem.updates // 10,
        seed=job.seed,
        evaluate=task.evaluate,
        metrics=task.metrics,
        progress=False,
    )
    seconds = result.history.row()["seconds"]
    small = {
        name: value.flatten().tolist()
        for name, value in result.values.items()
        if isinstance(value, torch.Tensor) and value.numel() < 20
    }
    return {
        "problem": job.problem,
        "method": job.method,
        "start": job.start,
        "seed": job.seed,
        **result.metrics,
        "torch": torch.__version__,
        "gradients": result.state.cost.gradients,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - began,
        "values": small,
    }


def jobs(only: list[str] | None, methods: list[str] | None, seeds: list[int]) -> list[Job]:
    wanted = []
    for name, problem in PROBLEMS.items():
        if only and name not in only:
            continue
        for method in methods or list(METHODS):
            if method == "T1-T2" and name == "dropout":
                continue
            starts = problem.fixed if method == "fixed" else problem.starts
            wanted += [Job(name, start, method, seed) for start in starts for seed in seeds]
    return wanted


def table(rows: list[dict[str, Any]]) -> str:
    """One line a problem and method: mean ± spread over seeds; of the fixed settings the best on validation."""
    lines = [f"{'problem':26s} {'method':16s} {'start':>9s} {'valid':>16s} {'test':>16s} {'gradients':>9s}"]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
        for row in rows:
            if row["problem"] == problem:
                groups.setdefault((row["method"], str(row["start"])), []).append(row)
        fixed = [key for key in groups if key[0] == "fixed"]
        best = min(fixed, key=lambda key: statistics.mean(r["valid/loss"] for r in groups[key]), default=None)
        for key, members in groups.items():
            if key[0] == "fixed" and key != best:
                continue
            cells = []
            for column in ("valid/loss", "test/loss"):
                numbers = [r[column] for r in members]
                spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
                cells.append(f"{statistics.mean(numbers):.5f} ± {spread:.5f}")
            label = "best fixed" if key[0] == "fixed" else key[0]
            start = f"{float(key[1]):.3g}"
            lines.append(
                f"{problem:26s} {label:16s} {start:>9s} {cells[0]:>16s} {cells[1]:>16s} {members[0]['gradients']:9d}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, help="fewer training updates, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.updates:
        for name, problem in PROBLEMS.items():
            PROBLEMS[name] = replace(problem, updates=options.updates)
    todo, rows = jobs(options.only, options.methods, options.seeds), []
    context = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    with context.Pool(options.jobs, maxtasksperchild=4) as pool:
        for row in pool.imap_unordered(partial(run, device=options.device), todo):
            rows.append(row)
            print(
                f"{len(rows)}/{len(todo)} {row['problem']}, {row['method']}, {row['start']}, seed {row['seed']}: "
                f"{row['valid/loss']:.5f} {row['test/loss']:.5f} {row['values']}",
                flush=True,
            )
            if options.out:
                report = {
                    "date": datetime.now(UTC).date().isoformat(),
                    "python": platform.python_version(),
                    "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
                    "rows": sorted(rows, key=lambda r: (r["problem"], r["method"], str(r["start"]), r["seed"])),
                }
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
