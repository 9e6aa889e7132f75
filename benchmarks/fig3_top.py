"""Every method of the library on the problem of Lorraine and Duvenaud's figure 3 (top), at equal CPU time.

MNIST, 10,000 training and 10,000 validation images, a linear model, one decay for each of its 7,850 weights. The unit
of cost is a plain training run of 3,000 updates (Adam, batches of 1,000). All methods run side by side on one thread;
see ``frame.py``. ``Adjoint`` runs with its defaults, untouched; the others with raw moved every 10 training updates by
the same Adam where they leave that open.

    python benchmarks/fig3_top.py [--budget 4] [--seeds 0 1 2] [--only adjoint] [--out benchmarks/results/fig3_top.json]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from closed_form import EXACT
from frame import PLAIN, Contestant, Seen, Watch, unit
from report import compete, write
from tables import race as table

import bestresponse as br
from bestresponse.papers.data import mnist
from bestresponse.updates import SGD, Adam


class Entry(NamedTuple):
    """A method of the catalog, by the name of its function, with settings."""

    catalog: str
    settings: Mapping[str, Any] = {}
    shared: bool = False  # one decay for all weights


hyper_optimizer = {"hyper_optimizer": partial(torch.optim.Adam, lr=0.1, eps=1e-16)}  # as Adjoint has it
same = {"schedule": br.Alternate(train=10, warmup=300), **hyper_optimizer}  # likewise
ahead = {"update": Adam(1e-3), "restart": False, **hyper_optimizer}  # from the present weights, in one run
whole = {"update": Adam(3e-3), "steps": 300, **hyper_optimizer}  # one training after another, each from the start

#: All methods, by the name they have in the table. A new one is a line here.
ENTRIES: Mapping[str, Entry] = {
    "Adjoint": Entry("adjoint"),
    "Adjoint, a pair every 3rd update": Entry("adjoint", {"pair_every": 3}),
    "T1–T2": Entry("luketina2016", same),
    "HOAG": Entry("hoag2016", same),
    "Neumann, 20 terms": Entry("lorraine2020", {"lr": 0.01, **same}),  # the largest curvature is 80
    "Nyström, rank 20": Entry("hataya2023", same),
    "Reverse through the next 10 updates": Entry("franceschi2017_reverse", {"steps": 10, **ahead}),
    "Reverse through whole trainings of 300": Entry("domke2012", whole),
    "The same, its last 20 updates": Entry("shaban2019", {"last": 20, **whole}),
    "DrMAD": Entry("drmad2016", whole),
    "Reversible": Entry("maclaurin2015", {**whole, "update": SGD(0.01, momentum=0.9)}),
    "Hypernetwork, rank 10": Entry("lorraine2018_joint", {"response": br.LowRank(10)}),
    "The same, fine-tuned by 3 updates": Entry(
        "lorraine2018_fine_tuned", {"update": SGD(0.01), "steps": 3, "response": br.LowRank(10)}
    ),
    "Random search, one decay": Entry(
        "cross_validation", {"sampler": br.Random(1000, scale=3.0), "budget": 1000}, True
    ),
}


def ours(entry: Entry) -> Contestant | None:
    """A method in ``tune``, or ``None`` where the library has no such function yet."""
    function: Callable[..., br.Method] | None = getattr(br.methods, entry.catalog, None)
    if function is None:
        return None
    method = function(**entry.settings)

    def run(watch: Watch) -> None:
        def look(event: br.Event) -> None:
            cost, problem, state = event.state.cost, event.problem, event.state

            def seen() -> Seen:
                return Seen(method.params(problem, state), problem.space.values(state.raw)["decay"])

            if event.kind == "step" and not watch.look(seen, updates=cost.train_batches, gradients=cost.gradients):
                event.stop("the budget is spent")

        problem, train, valid = watch.task.problem, watch.task.train, watch.task.valid
        result = br.tune(problem, method, train, valid, steps=10**9, seed=watch.seed, callbacks=[look], progress=False)
        if result.status is br.Status.NON_FINITE:
            raise FloatingPointError(result.message)

    return Contestant(run, re.sub(r" at 0x[0-9a-f]+", "", repr(method)), entry.shared)


def contestants(only: Sequence[str]) -> dict[str, Contestant]:
    """All that take part, the plain run and the closed form with them."""
    found = {"Plain run": PLAIN, "Closed form, for linear models alone": EXACT}
    for name, entry in ENTRIES.items():
        if only and entry.catalog not in only:
            continue
        contestant = ours(entry)
        if contestant is None:
            print(f"{name}: left out, as there is no br.methods.{entry.catalog}", flush=True)
        else:
            found[name] = contestant
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=4.0, help="CPU time of each method, in plain runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], help="names of catalog functions")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = mnist()
    report = compete(contestants(options.only), options.seeds, options.budget * unit(images), images)
    print(table(report))
    if options.out:
        write(options.out, report)


if __name__ == "__main__":
    main()
