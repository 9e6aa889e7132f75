"""What the comparisons leave behind: dated JSON files, and the tables made of them."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from closed_form import Exact
from frame import STEPS, Contestant, Watch, extra_memory, race, unit

from bestresponse.papers.data import Images

TARGETS = (0.0370, 0.0362)  # of the mean squared error on validation data
POINTS = 60  # of a curve
COLUMNS = ("seconds", "updates", "gradients", "valid", "test")


def circumstances(*packages: str) -> dict[str, Any]:
    """When, with what and on what."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("bestresponse", "torch", *packages)},
        "hardware": f"{processor()}, {os.cpu_count()} cores, one thread used",
    }


def processor() -> str:
    """The processor's model, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def compete(
    contestants: Mapping[str, Contestant], seeds: Sequence[int], plain_runs: float, images: Images, *packages: str
) -> dict[str, Any]:
    """The report on a race of all contestants for each seed, ``plain_runs`` plain runs long."""
    torch.set_num_threads(1)
    seconds = plain_runs * unit(images)
    # Long enough for raw to be moved, and short: memory does not grow with time.
    memory = {name: extra_memory(contestant, seconds / 5, images) for name, contestant in contestants.items()}
    rows = {name: {"settings": c.settings, "extra_mb": memory[name], "runs": []} for name, c in contestants.items()}
    for seed in seeds:
        for name, watch in race(contestants, seed, seconds, images).items():
            rows[name]["runs"].append(record(watch))
            print(f"seed {seed}  {name:40s} {watch.error or watch.points[-1]}", flush=True)
    return {**circumstances(*packages), "steps": STEPS, "budget_seconds": seconds, "seeds": list(seeds), "rows": rows}


def record(watch: Watch) -> dict[str, Any]:
    """One contestant's run."""
    points = watch.points
    return {
        "seed": watch.seed,
        "error": watch.error,
        "end": points[-1]._asdict() if points else None,
        "mark": watch.mark._asdict() if watch.mark else None,
        "to": {f"{target:.4f}": time_to(watch, target) for target in TARGETS},
        "exact_at_end": Exact(watch.task).validation(watch.decay) if watch.decay is not None else None,
        "curve": {name: [short(point[i]) for point in thin(points)] for i, name in enumerate(COLUMNS)},
    }


def time_to(watch: Watch, target: float) -> float | None:
    """CPU seconds until the validation loss was first seen at the target or below."""
    return next((point.seconds for point in watch.points if point.valid <= target), None)


def thin(points: Sequence[Any], count: int = POINTS) -> list[Any]:
    """At most ``count`` of the points, evenly, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    return [points[round(i * (len(points) - 1) / (count - 1))] for i in range(count)]


def short(number: float) -> float:
    """Five significant digits."""
    return float(f"{number:.5g}") if isinstance(number, float) else number


def rounded(value: Any) -> Any:
    """The same with five significant digits everywhere: files that people can read and compare."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return short(value)


def median(numbers: Iterable[float | None]) -> float:
    """The median, where ``None`` stands for never."""
    return statistics.median([math.inf if number is None else number for number in numbers] or [math.nan])


def write(path: Path, report: Mapping[str, Any]) -> None:
    """The report as JSON; a list of numbers stays on one line."""
    text = json.dumps(rounded(dict(report)), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(flat_lists(text) + "\n", encoding="utf-8")


def flat_lists(text: str) -> str:
    """Indented JSON with each list of plain numbers on one line."""
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), text)


def table(report: Mapping[str, Any]) -> str:
    """The report's rows in Markdown: medians over its seeds."""
    unit = median(run["mark"]["seconds"] for run in report["rows"]["Plain run"]["runs"])
    lines = [
        f"| method | valid | test | CPU-s to ≤ {TARGETS[0]:.4f} | to ≤ {TARGETS[1]:.4f} "
        f"| at {report['steps']:,} updates: valid, test | CPU time / plain | gradients | extra MB |",
        "|---" + "|---:" * 8 + "|",
    ]
    for name, row in report["rows"].items():
        runs = row["runs"]
        if any(run["error"] for run in runs) or not runs:
            lines.append(f"| {name} | {'; '.join(sorted({run['error'] for run in runs}))} |" + " |" * 7)
            continue
        cells = [number(median(run["end"][part] for run in runs), ".4f") for part in ("valid", "test")]
        cells += [number(median(run["to"][target] for run in runs), ".1f") for target in runs[0]["to"]]
        marks = [run["mark"] for run in runs]
        if all(marks):
            cells.append(", ".join(f"{median(mark[part] for mark in marks):.4f}" for part in ("valid", "test")))
            cells.append(f"{median(mark['seconds'] for mark in marks) / unit:.2f}")
        else:
            cells += ["", ""]
        cells += [f"{median(run['end']['gradients'] for run in runs):,.0f}", number(row["extra_mb"], ".0f")]
        lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    """A cell."""
    if value is None or math.isnan(value):
        return "–"
    return "never" if math.isinf(value) else format(value, form)
