"""What the comparisons leave behind: dated JSON files, of which ``tables.py`` makes tables."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from closed_form import Exact
from frame import STEPS, Contestant, Watch, extra_memory, race
from tables import TARGETS, TEST_TARGET

from bestresponse.papers.data import Images

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
    contestants: Mapping[str, Contestant], seeds: Sequence[int], seconds: float, images: Images, *packages: str
) -> dict[str, Any]:
    """The report on a race of all contestants for each seed, ``seconds`` of CPU time long."""
    # Long enough for raw to be moved, and short: memory does not grow with time.
    memory = {name: extra_memory(contestant, seconds / 5, images) for name, contestant in contestants.items()}
    rows = {name: {"settings": c.settings, "extra_mb": memory[name], "runs": []} for name, c in contestants.items()}
    for seed in seeds:
        for name, watch in race(contestants, seed, seconds, images).items():
            rows[name]["runs"].append(record(watch))
            print(f"seed {seed}  {name:40s} {watch.error or watch.points[-1]}", flush=True)
    return {**circumstances(*packages), "steps": STEPS, "budget_seconds": seconds, "rows": rows}


def record(watch: Watch) -> dict[str, Any]:
    """One contestant's run."""
    points = watch.points
    return {
        "seed": watch.seed,
        "error": watch.error,
        "end": points[-1]._asdict() if points else None,
        "mark": watch.mark._asdict() if watch.mark else None,
        "to": {f"{target:.4f}": time_to(watch, target) for target in TARGETS},
        "to_test": {f"{TEST_TARGET:.4f}": time_to(watch, TEST_TARGET, "test")},
        "exact_at_end": Exact(watch.task).validation(watch.decay) if watch.decay is not None else None,
        "curve": {name: [short(point[i]) for point in thin(points)] for i, name in enumerate(COLUMNS)},
    }


def time_to(watch: Watch, target: float, on: str = "valid") -> float | None:
    """CPU seconds until the loss was first seen at the target or below."""
    return next((point.seconds for point in watch.points if getattr(point, on) <= target), None)


def thin(points: Sequence[Any], count: int = POINTS) -> list[Any]:
    """At most ``count`` of the points, evenly, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    return [points[round(i * (len(points) - 1) / (count - 1))] for i in range(count)]


def short(number: float) -> float | None:
    """Five significant digits; ``None`` for what JSON has no word for."""
    if not isinstance(number, float):
        return number
    return float(f"{number:.5g}") if math.isfinite(number) else None


def rounded(value: Any) -> Any:
    """The same with five significant digits everywhere: files that people can read and compare."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return short(value)


def write(path: Path, report: Mapping[str, Any]) -> None:
    """The report as JSON; a list of numbers stays on one line."""
    text = json.dumps(rounded(dict(report)), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(flat_lists(text) + "\n", encoding="utf-8")


def flat_lists(text: str) -> str:
    """Indented JSON with each list of plain numbers on one line."""
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), text)
