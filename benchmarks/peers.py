"""Other libraries' published packages beside this one, on the problem and in the frame of ``fig3_top.py``.

Each way to use a peer is tuned over a few settings, on a seed of its own. The setting with the lowest validation loss
at the end of the budget goes into the race, and beside it the one that reached the second target earliest, where that
is another. ``Adjoint`` runs with its defaults, and in its sparse mode.

In an environment of their own, made from the repository's root::

    python3.11 -m venv .venv-peers && .venv-peers/bin/pip install -c constraints.txt torch==2.13.0 -e '.[plots]'
    .venv-peers/bin/pip install --no-deps -r benchmarks/peers-requirements.txt

and then::

    .venv-peers/bin/python benchmarks/peers.py [--budget 4] [--seeds 0 1 2] [--out benchmarks/results/peers.json]
"""

from __future__ import annotations

import argparse
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fig3_top import contestants
from frame import Contestant, Watch, race, unit
from peer_methods import boat, higher_unrolled, hippotrainer_implicit, torchopt_implicit, torchopt_unrolled
from report import compete, record, time_to, write
from tables import TARGETS
from tables import race as table

from bestresponse.papers.data import Images, mnist

PACKAGES = ("boat-torch", "higher", "hippotrainer", "torchopt")


def grid(run: Any, **settings: Sequence[Any]) -> Iterator[Contestant]:
    """A way to use a peer, with every combination of the settings."""
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        words = ", ".join(f"{name}={value}" for name, value in chosen.items())
        yield Contestant(partial(run, **chosen), words)


def ways() -> dict[str, list[Contestant]]:
    """Every way to use a peer, in all its settings. What every setting shares is said in ``peer_methods.Course``."""
    rates, sgd = (
        [0.1, 0.2],
        {"rule": ["sgd"], "weight_rate": [0.01]},
    )  # twice that, and plain descent is near to diverging
    return {
        "TorchOpt, CG": [*grid(torchopt_implicit, iterations=[10, 20], warm_start=[False, True], rate=rates)],
        "TorchOpt, unrolled": [
            *grid(torchopt_unrolled, rule=["adam"], every=[5, 10, 20], rate=rates),
            *grid(torchopt_unrolled, rule=["adam"], accelerated=[True]),
            *grid(torchopt_unrolled, **sgd),
        ],
        "higher, unrolled": [
            *grid(higher_unrolled, rule=["adam"], every=[5, 10, 20], rate=rates),
            *grid(higher_unrolled, **sgd),
        ],
        "HippoTrainer, HOAG": [
            *grid(hippotrainer_implicit, rule=["HOAG"], cg_max_iter=[10, 20], rate=rates),
            *grid(hippotrainer_implicit, rule=["HOAG"], cg_max_iter=[10, 20], epsilon=[1e-12], scale=[1e4], rate=rates),
        ],
        "HippoTrainer, Neumann": [
            *grid(hippotrainer_implicit, rule=["Neumann"], num_terms=[1, 10], rate=rates),
        ],
        "HippoTrainer, T1–T2": [*grid(hippotrainer_implicit, rule=["T1T2"], rate=[0.03, *rates])],
        "BOAT, CG": [
            *grid(boat, operation=["CG"], k=[10, 20], every=[10, 30], cosine=[False, True]),
            *grid(boat, operation=["CG"], **sgd),
        ],
        "BOAT, unrolled": [*grid(boat, operation=["RAD"], every=[10, 20], cosine=[False, True])],
    }


def tuned(name: str, settings: Sequence[Contestant], seconds: float, images: Images, seed: int) -> dict[str, Any]:
    """All settings of one way in a race of their own: the rows of the report, by what is set."""
    watches = race({setting.settings: setting for setting in settings}, seed, seconds, images)
    rows = {}
    for words, watch in watches.items():
        rows[words] = {name: part for name, part in record(watch).items() if name != "curve"}
        print(f"{name:24s} {words:60s} {watch.error or watch.points[-1]}", flush=True)
    return {"rows": rows, "chosen": sorted(chosen(watches))}


def chosen(watches: Mapping[str, Watch]) -> set[str]:
    """The best setting at the end, and the fastest to the second target."""

    def end(words: str) -> float:
        return watches[words].points[-1].valid if not watches[words].error else math.inf

    def soon(words: str) -> tuple[float, float]:
        seconds = time_to(watches[words], TARGETS[1])
        return (math.inf if seconds is None or watches[words].error else seconds, end(words))

    return {min(watches, key=end), min(watches, key=soon)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=4.0, help="CPU time of each contestant, in plain runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tuning-seed", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[], help="peers whose name begins so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # TorchOpt's import of functorch, at every step
    torch.set_num_threads(1)
    images = mnist()
    seconds = options.budget * unit(images)
    taking_part, tuning = contestants(["adjoint"]), {}
    for name, settings in ways().items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        tuning[name] = tuned(name, settings, seconds, images, options.tuning_seed)
        for setting in settings:
            if setting.settings in tuning[name]["chosen"]:
                taking_part[f"{name} ({setting.settings})"] = setting
    report = compete(taking_part, options.seeds, seconds, images, *PACKAGES)
    report["tuning"] = {"seed": options.tuning_seed, "budget_seconds": seconds, "ways": tuning}
    print(table(report))
    if options.out:
        write(options.out, report)


if __name__ == "__main__":
    main()
