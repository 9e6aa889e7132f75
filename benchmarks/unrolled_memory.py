"""Peak memory and time of each mode of unrolling, against the number of updates T.

Every point is measured in a process of its own. On the CPU memory is the largest resident set, on a GPU what torch's
allocator had handed out at most; in both cases less what plain training of the same model, by the same number of
updates, takes. It is given in copies of the weights. Time is what the process spends on the CPU, the system's part left
out. glibc is told to give memory back at once: by itself it leaves holes between what is kept and what is freed, and a
long ``Reverse()`` took half as much again.

    python benchmarks/unrolled_memory.py [--device cuda] [--out benchmarks/results/unrolled_memory.json]
    python benchmarks/tables.py    # the table in the docs, from the result file
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse.updates import SGD

RESULT = Path(__file__).parent / "results" / "unrolled_memory.json"
UPDATES = (1, 10, 100, 1000)
MODES = {
    "plain training": None,
    "Reverse()": br.Reverse(),
    "Reverse(last=10)": br.Reverse(last=10),
    "Checkpointed()": br.Checkpointed(),
    "Reversible()": br.Reversible(),
    "DrMAD()": br.DrMAD(),
    "Forward()": br.Forward(),
}


def problem(device: torch.device) -> tuple[br.Problem, br.Batches]:
    """About a million weights, one hyper, a hundred minibatches of noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1246), nn.ReLU(), nn.Linear(1246, 17)).to(device)
    x, y = torch.randn(3200, 784, device=device), torch.randint(0, 17, (3200,), device=device)

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + br.functional.l2(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    space = br.Space(decay=br.Hyper(1e-4, low=1e-8, high=1.0, log=True))
    return br.Problem(model, space, train_loss, valid_loss), br.Batches(x, y, size=32)


def point(name: str, updates: int, device: torch.device) -> dict[str, Any]:
    """One measurement, in this process: one step of the method, or as many updates of plain training."""
    mode, (task, data) = MODES[name], problem(device)
    train, valid = br.Stream(data, name="train"), br.Stream(data, name="valid")
    rule = SGD(0.01, momentum=0.9)
    method = br.Unrolled(mode or br.Reverse(last=1), rule, updates)
    warm = br.Unrolled(br.Reverse(last=1), rule, 1)  # what torch sets up at a first double backward
    warm.step(task, warm.init(task), train, valid)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state, began = method.init(task), os.times().user
    if mode is None:
        params, slots, buffers = state.params, state.slots, state.buffers
        for t in range(updates):
            gradient = br.train_gradient(task, params, state.raw, next(train), buffers=buffers)
            params, slots = rule.step(params, slots, gradient.params, {}, index=t, count=t)
        float(gradient.loss)
    else:
        outcome = method.hypergradient(task, state, train, valid)
        float(outcome.raw["decay"])
    seconds = os.times().user - began
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = sum(p.numel() for p in task.model.parameters())
    return {"mode": name, "updates": updates, "bytes": peak, "seconds": seconds, "weights": weights}


def measure(device: str, threads: int) -> dict[str, Any]:
    points = []
    for updates in UPDATES:
        for name in MODES:
            command = [sys.executable, __file__, "--device", device, "--point", name, str(updates)]
            command += ["--threads", str(threads)]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            points.append(json.loads(ran.stdout.splitlines()[-1]))
            print(points[-1], flush=True)
    plain = {p["updates"]: p for p in points if p["mode"] == "plain training"}
    for p in points:
        base = plain[p["updates"]]
        p["copies"] = (p["bytes"] - base["bytes"]) / (4 * p["weights"])
        p["times"] = p["seconds"] / base["seconds"]
    where = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "cpu"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": where,
        "threads": threads,
        "batch": 32,
        "update": "SGD(0.01, momentum=0.9)",
        "hypers": 1,
        "points": points,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--point", nargs=2, metavar=("MODE", "T"), help="one measurement, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.point:
        print(json.dumps(point(options.point[0], int(options.point[1]), torch.device(options.device))))
    else:
        report = measure(options.device, options.threads)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
