"""Tables of the docs that are made from result files: written between two comments, so that nobody types a number.

    python benchmarks/tables.py    # after a benchmark has written a new result

In the docs: ``<!-- table: unrolled_memory -->``, the table, ``<!-- end -->``. A test compares them with the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def unrolled_memory(report: dict[str, Any]) -> str:
    """A row a mode, a column for each number of updates."""
    points = report["points"]
    names = dict.fromkeys(p["mode"] for p in points if p["mode"] != "plain training")
    updates = sorted({p["updates"] for p in points})
    lines = [
        f"Peak memory above plain training, in copies of {points[0]['weights']:,} float32 weights, and the time of 100 "
        "updates",
        f"with plain training as 1; one hyper, `{report['update']}`, batches of {report['batch']} "
        f"({report['device']}, torch {report['torch']}, {report['date']}):",
        "",
        "| mode | " + " | ".join(f"T = {t:,}" for t in updates) + " | time |",
        "|---|" + "---|" * (len(updates) + 1),
    ]
    for name in names:
        row = {p["updates"]: p for p in points if p["mode"] == name}
        copies = " | ".join(f"{row[t]['copies']:,.0f}" for t in updates)
        lines.append(f"| `{name}` | {copies} | {row[100]['times']:.1f} |")
    return "\n".join(lines)


def schedule(report: dict[str, Any]) -> str:
    """The best constant rate, and the schedules of the three modes."""
    best, tuned = report["best_constant"], report["schedule"]
    lines = [
        f"{report['updates']} updates of `SGD(momentum={report['momentum']})` on a net of 64-32-10 and scikit-learn's "
        f"digits, in float64; the schedule starts at",
        f"the best constant rate and is moved {report['steps']} times ({report['date']}):",
        "",
        "| | validation loss | test loss | first hypergradient, relative to reverse mode's |",
        "|---|---|---|---|",
        f"| best of {len(report['constant'])} constant rates, {best['rate']:.3f} "
        f"| {best['valid']:.4f} | {best['test']:.4f} | |",
    ]
    for name, row in tuned.items():
        difference = report["relative_difference_from_reverse"][name]
        lines.append(f"| schedule, {name} mode | {row['valid']:.4f} | {row['test']:.4f} | {difference:.0e} off |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"unrolled_memory": unrolled_memory, "schedule": schedule}


def renewed(page: str) -> str:
    """A page with its tables as the result files have them."""

    def fill(place: re.Match[str]) -> str:
        name = place.group(2)
        report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return place.group(1) + TABLES[name](report) + place.group(3)

    return PLACE.sub(fill, page)


def main() -> None:
    for path in sorted(ROOT.glob("docs/**/*.md")):
        page = path.read_text(encoding="utf-8")
        path.write_text(renewed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
