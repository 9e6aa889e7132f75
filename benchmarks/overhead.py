"""What the loop costs: one step of ``tune`` with plain training inside, against a bare PyTorch loop.

Both train the same model on the same batches with Adam. They alternate inside one process, and the ratio is taken
round by round, so that other work on the machine falls on both. On a CPU the time is that of the process, which others
cannot take from it; what a run of ``tune`` needs to begin and end is left out, as the difference of two runs.

    python benchmarks/overhead.py [--device cuda] [--out benchmarks/results/overhead.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br


class Case(NamedTuple):
    """A model, the size of its batches, and how many steps a round takes beside the first case's."""

    make: Callable[[], nn.Module]
    batch: int
    share: float


def small() -> nn.Module:
    return nn.Linear(784, 10)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1246), nn.ReLU(), nn.Linear(1246, 17))


CASES = {
    "7,850 weights, batches of 1,000": Case(small, 1000, 0.4),  # the demo's
    "7,850 weights, batches of 128": Case(small, 128, 1.0),
    "1,000,000 weights, batches of 128": Case(large, 128, 0.1),
}


def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + br.functional.l2(model, hyper["decay"])


def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def bare(make: Callable[[], nn.Module], batches: br.Batches, steps: int, device: torch.device) -> float:
    """Seconds a step of an ordinary loop."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    hyper = {"decay": torch.tensor(1e-4, device=device)}
    done, began = 0, clock(device)
    while True:
        for batch in batches:
            optimizer.zero_grad()
            loss = train_loss(model, batch, hyper)
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                return (clock(device) - began) / steps


def tuned(make: Callable[[], nn.Module], batches: br.Batches, steps: int, device: torch.device, *, save: bool) -> float:
    """Seconds a step of ``tune`` while the method only trains."""
    torch.manual_seed(0)
    space = br.Space(decay=br.Hyper(1e-4, low=1e-8, high=1.0, log=True))
    problem = br.Problem(make().to(device), space, train_loss, valid_loss)
    method = br.methods.luketina2016(schedule=br.Alternate(warmup=10**9), optimizer=partial(torch.optim.Adam, lr=1e-3))

    def run(count: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            run_dir = f"{directory}/run" if save else None
            began = clock(device)
            br.tune(problem, method, batches, batches, steps=count, run_dir=run_dir, progress=False)
            return clock(device) - began

    return (run(2 * steps) - run(steps)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "steps": options.steps,
        "threads": options.threads,
        "rows": [],
    }
    print(f"{'model':34s} {'run_dir':8s} {'bare µs':>9s} {'tune µs':>9s} {'ratio':>7s}  ratios of all rounds")
    for name, (make, batch, share) in CASES.items():
        steps = max(1, round(options.steps * share))
        x = torch.randn(10_000, 784, device=device)
        batches = br.Batches(x, torch.randint(0, 10, (10_000,), device=device), size=batch, drop_last=True)
        for save in (False, True):
            bare(make, batches, steps // 5 + 1, device)
            tuned(make, batches, steps // 5 + 1, device, save=save)
            rounds = []
            for i in range(options.rounds):
                if i % 2:
                    inside, outside = tuned(make, batches, steps, device, save=save), bare(make, batches, steps, device)
                else:
                    outside, inside = bare(make, batches, steps, device), tuned(make, batches, steps, device, save=save)
                rounds.append((outside, inside, inside / outside))
            outside, inside, ratio = (statistics.median(column) for column in zip(*rounds, strict=True))
            spread = sorted(round(row[2], 3) for row in rounds)
            report["rows"].append(
                {
                    "model": name,
                    "run_dir": save,
                    "ratio": ratio,
                    "bare_us": outside * 1e6,
                    "tune_us": inside * 1e6,
                    "ratios": spread,
                }
            )
            print(f"{name:34s} {save!s:8s} {outside * 1e6:9.1f} {inside * 1e6:9.1f} {ratio:7.3f}  {spread}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
