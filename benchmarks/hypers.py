"""Time and memory of a training update against the number of hypers, from one to one for each of ten million weights.

One model; the decay of its weights is shared by ever smaller groups of them. Every point is a process of its own.
Time and memory are told as multiples of plain training of the same model on the same batches; on a CPU, memory is the
process's largest resident set beyond what it held before training.

    python benchmarks/hypers.py [--device cuda] [--out benchmarks/results/hypers-cpu.json]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse.updates import SGD, Adam

COUNTS = (1, 1_000, 100_000, 1_000_000, 10_000_000)
WIDTHS = (784, 2752, 2752, 10)  # ten million weights
TRAIN = 10  # training updates for each move of raw

every_ten = br.Alternate(train=TRAIN)
METHODS: dict[str, Callable[[], br.Method]] = {
    "plain": lambda: br.methods.luketina2016(schedule=br.Alternate(train=TRAIN, warmup=math.inf)),
    "adjoint": lambda: br.methods.adjoint(schedule=every_ten),
    "adjoint, pair_every=3": lambda: br.methods.adjoint(schedule=every_ten, pair_every=3),
    "luketina2016": lambda: br.methods.luketina2016(schedule=every_ten),
    "lorraine2020": lambda: br.methods.lorraine2020(schedule=every_ten),
    "hoag2016": lambda: br.methods.hoag2016(schedule=every_ten),
    "hataya2023": lambda: br.methods.hataya2023(schedule=every_ten),
    "lorraine2018_joint": lambda: br.methods.lorraine2018_joint(schedule=every_ten),
    "lorraine2018_joint, LowRank(10)": lambda: br.methods.lorraine2018_joint(
        response=br.LowRank(10), schedule=every_ten
    ),
    "lorraine2018_simplified": lambda: br.methods.lorraine2018_simplified(schedule=every_ten),
    "lorraine2018_fine_tuned": lambda: br.methods.lorraine2018_fine_tuned(SGD(0.1), 3, schedule=every_ten),
    "domke2012, franceschi2017_reverse": lambda: br.methods.franceschi2017_reverse(Adam(1e-3), TRAIN),
    "shaban2019": lambda: br.methods.shaban2019(Adam(1e-3), TRAIN, TRAIN // 2),
    "maclaurin2015": lambda: br.methods.maclaurin2015(SGD(0.1, momentum=0.9), TRAIN),
    "drmad2016": lambda: br.methods.drmad2016(SGD(0.1, momentum=0.9), TRAIN),
    "franceschi2017_forward": lambda: br.methods.franceschi2017_forward(SGD(0.1, momentum=0.9), TRAIN),
}
SCALING = ("plain", "adjoint", "adjoint, pair_every=3", "luketina2016", "lorraine2020")


def size(widths: Sequence[int]) -> int:
    """How many weights a network has."""
    return sum(n * m + m for n, m in pairwise(widths))


def network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def problem(count: int, device: torch.device, batch: int, widths: Sequence[int]) -> tuple[br.Problem, br.Batches]:
    torch.manual_seed(0)
    model = network(widths).to(device)
    weights = size(widths)
    shape: Any = br.per_weight(model) if count >= weights // 2 else (count,)
    group = math.ceil(weights / count)

    def penalty(model: nn.Module, decay: Any) -> Tensor:
        if not isinstance(decay, Tensor):
            return br.functional.l2(model, decay)
        squares = torch.cat([p.flatten() for p in model.parameters()]).square()
        return (decay * F.pad(squares, (0, group * count - weights)).view(count, group).sum(1)).sum()

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) + penalty(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    space = br.Space(decay=br.Hyper(1e-6, low=1e-12, high=1.0, log=True, shape=shape))
    x, y = torch.randn(4 * batch, widths[0], device=device), torch.randint(0, 10, (4 * batch,), device=device)
    return br.Problem(model, space, train_loss, valid_loss), br.Batches(x, y, size=batch)


def measure(name: str, count: int, options: argparse.Namespace, results: Any) -> None:
    """One point: seconds a training update, and bytes at the peak."""
    torch.set_num_threads(options.threads)
    place, steps = torch.device(options.device), options.steps
    if place.type == "cuda":
        torch.zeros((), device=place)
    steps_of(METHODS[name](), *problem(4, place, options.batch, (784, 16, 10)))  # what torch itself takes, once
    task, data = problem(count, place, options.batch, options.widths)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    method = METHODS[name]()
    state = method.init(task, seed=0)
    train, valid = br.Stream(data, name="train"), br.Stream(data, name="valid")
    method.step(task, state, train, valid)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        method.step(task, state, train, valid)
    if place.type == "cuda":
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - wall, torch.cuda.max_memory_allocated()
    else:
        seconds, peak = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    results.put({"seconds": seconds / steps / TRAIN, "bytes": peak, "hypers": task.space.numel})


def steps_of(method: br.Method, task: br.Problem, data: br.Batches) -> None:
    """Two steps, for what comes once a process."""
    state = method.init(task, seed=0)
    train, valid = br.Stream(data, name="train"), br.Stream(data, name="valid")
    for _ in range(2):
        method.step(task, state, train, valid)


def point(name: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    # Or glibc keeps what is freed, in pieces, and the resident set tells of those.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(name, count, options, results))
    process.start()
    while process.is_alive() and results.empty():
        time.sleep(0.05)
    row = {"method": name, **(results.get() if not results.empty() else {"failed": True})}
    process.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2, help="moves of raw that are timed")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'hypers':>12s} {'method':24s} {'ms an update':>13s} {'x plain':>8s} {'GB':>7s} {'x plain':>8s}")
    for count in options.counts:
        plain: dict[str, Any] = {}
        for name in SCALING:
            row = point(name, count, options)
            if row.get("failed"):
                print(f"{count:12,d} {name:24s} failed", flush=True)
                continue
            plain = plain or row
            row |= {"times": row["seconds"] / plain["seconds"], "memory": row["bytes"] / plain["bytes"]}
            rows.append(row)
            print(
                f"{row['hypers']:12,d} {name:24s} {row['seconds'] * 1e3:13.2f} {row['times']:8.2f}"
                f" {row['bytes'] / 1e9:7.3f} {row['memory']:8.2f}",
                flush=True,
            )
    if options.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
            "batch": options.batch,
            "threads": options.threads,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
