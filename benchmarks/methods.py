"""Every method beside every other: how biased its hypergradient is, what it costs, what it keeps in memory.

Bias: on ridge with one decay per weight the hypergradient is known. Each method is left to train with raw kept still,
long enough to settle, and what it then hands to the optimizer of raw is compared with the closed form. Cost and memory
are those of ``hypers.py``, at ten million weights and few hypers.

    python benchmarks/methods.py [--out benchmarks/results/methods.json]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import hypers
import torch
from torch import Tensor
from torch.nn import functional as F

import bestresponse as br
from bestresponse.testing import Ridge
from bestresponse.updates import SGD

HYPERS = 6
still = {"hyper_optimizer": partial(torch.optim.SGD, lr=0.0)}
trains = {"optimizer": partial(torch.optim.SGD, lr=0.1), "schedule": br.Alternate(train=10), **still}
learns = {"optimizer": partial(torch.optim.Adam, lr=3e-3), **still}

#: For the ridge problem: the method, and its steps until it has settled.
SETTLED: dict[str, tuple[Any, int]] = {
    "adjoint": (br.methods.adjoint(**trains), 600),
    "adjoint, pair_every=3": (br.methods.adjoint(pair_every=3, **trains), 600),
    "luketina2016": (br.methods.luketina2016(**trains), 200),
    "lorraine2020": (br.methods.lorraine2020(**trains), 200),
    "hoag2016": (br.methods.hoag2016(**trains), 200),
    "hataya2023": (br.methods.hataya2023(**trains), 200),
    "lorraine2018_joint": (br.methods.lorraine2018_joint(**learns), 6000),
    "lorraine2018_joint, LowRank(10)": (br.methods.lorraine2018_joint(response=br.LowRank(10), **learns), 6000),
    "lorraine2018_fine_tuned": (br.methods.lorraine2018_fine_tuned(SGD(0.1), 3, **learns), 3000),
    "domke2012, franceschi2017_reverse": (br.methods.domke2012(SGD(0.1), 100, **still), 1),
    "shaban2019": (br.methods.shaban2019(SGD(0.1), 100, 50, **still), 1),
    "maclaurin2015": (br.methods.maclaurin2015(SGD(0.1, momentum=0.5), 100, **still), 1),
    "drmad2016": (br.methods.drmad2016(SGD(0.1), 100, **still), 1),
    "franceschi2017_forward": (br.methods.franceschi2017_forward(SGD(0.1), 10, **still), 40),
}


class Recorder:
    """Stands where raw's optimizer does, and keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, vector: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        self.seen.append(gradient["decay.weight"][0].clone())


def bias(name: str, draws: int = 20) -> dict[str, float]:
    """The cosine and the size of the method's mean hypergradient beside the true one."""
    torch.set_default_dtype(torch.float64)
    known = Ridge(10, 60, start=0.03, seed=1)
    method, steps = SETTLED[name]
    state: Any = method.init(known.problem, seed=0)
    train, valid = br.Stream(known.train, name="train"), br.Stream(known.valid, name="valid")
    for _ in range(steps):
        method.step(known.problem, state, train, valid)
    state.raw_updater = recorder = Recorder()
    for _ in range(draws):
        method.step(known.problem, state, train, valid)
    mean, truth = torch.stack(recorder.seen).mean(0), known.hypergradient(state.raw)
    torch.set_default_dtype(torch.float32)
    return {"cosine": float(F.cosine_similarity(mean, truth, dim=0)), "size": float(mean.norm() / truth.norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-bias", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    plain = {} if options.only_bias else hypers.point("plain", HYPERS, options)
    for name in SETTLED:
        row: dict[str, Any] = {"method": name, **bias(name)}
        if plain:
            cost = hypers.point(name, HYPERS, options)
            row["failed"] = cost.get("failed", False)
            if not row["failed"]:
                row |= {"times": cost["seconds"] / plain["seconds"], "memory": cost["bytes"] / plain["bytes"]}
        rows.append(row)
        print(row, flush=True)
    if options.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
            "weights": hypers.WEIGHTS,
            "hypers": HYPERS,
            "batch": options.batch,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
