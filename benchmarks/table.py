"""Markdown tables from the files in ``results/``, put into the documentation pages of the same names.

python benchmarks/table.py
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
TARGETS = (0.0370, 0.0362)  # of the mean squared error on validation data
BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- until here -->"
TEST_TARGET = 0.0393  # 7,850 hypers can overfit the validation data, so also: how soon is it good on test data?


def table(report: Mapping[str, Any]) -> str:
    """The report's rows in Markdown: medians over its seeds."""
    plain = report["rows"]["Plain run"]["runs"]
    steps = f"{report['steps']:,} updates"
    targets = f"CPU-s to valid ≤ {TARGETS[0]:.4f} | to ≤ {TARGETS[1]:.4f} | to test ≤ {TEST_TARGET:.4f}"
    lines = [
        f"| method | valid | test | {targets} | after {steps}: valid, test | CPU time, plain = 1 "
        "| gradients | exact valid | extra MB |",
        "|---" + "|---:" * 10 + "|",
    ]
    for name, row in report["rows"].items():
        runs = row["runs"]
        if errors := sorted({run["error"] for run in runs if run["error"]}):
            lines.append(f"| {name} | {'; '.join(errors)} |" + " |" * 9)
            continue
        cells = [number(median(run["end"][part] for run in runs), ".4f") for part in ("valid", "test")]
        cells += [number(median(run["to"][target] for run in runs), ".1f") for target in runs[0]["to"]]
        cells += [number(median(run["to_test"][target] for run in runs), ".1f") for target in runs[0]["to_test"]]
        marks = [run["mark"] for run in runs if run["mark"]]
        if len(marks) == len(runs):
            cells.append(", ".join(f"{median(mark[part] for mark in marks):.4f}" for part in ("valid", "test")))
            ratios = [cost(mark, beside["curve"]) for mark, beside in zip(marks, plain, strict=True)]
            cells.append(f"{median(ratios):.2f}")
        else:
            cells += ["–", "–"]
        cells.append(f"{median(run['end']['gradients'] for run in runs):,.0f}")
        cells += [number(median(run["exact_at_end"] for run in runs), ".4f"), number(row["extra_mb"], ".0f")]
        lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines)


def cost(mark: Mapping[str, float], plain: Mapping[str, list[float]]) -> float:
    """What as many updates cost, in those that the plain run of the same race made in the same CPU time.

    All that run side by side are at the same CPU time together, so that a machine that is slower for a while is slower
    for both.
    """
    seconds, updates = plain["seconds"], plain["updates"]
    after = min(bisect_left(seconds, mark["seconds"]), len(seconds) - 1)
    part = (mark["seconds"] - seconds[after - 1]) / (seconds[after] - seconds[after - 1])
    return (updates[after - 1] + part * (updates[after] - updates[after - 1])) / mark["updates"]


def median(numbers: Iterable[float | None]) -> float:
    """The median, where ``None`` stands for never."""
    return statistics.median([math.inf if number is None else number for number in numbers] or [math.nan])


def number(value: float | None, form: str) -> str:
    """A cell."""
    if value is None or math.isnan(value):
        return "–"
    return "never" if math.isinf(value) else format(value, form)


def circumstances(report: Mapping[str, Any]) -> str:
    """When, with what and on what, in a line."""
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    seeds = ", ".join(str(run["seed"]) for run in report["rows"]["Plain run"]["runs"])
    return (
        f"{report['date']}, {report['hardware']}; Python {report['python']}, {versions}; medians over seeds {seeds}; "
        f"{report['budget_seconds']:.1f} CPU seconds for each method."
    )


def renewed(text: str, report: Mapping[str, Any]) -> str:
    """A page with what stands between its two marks made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{circumstances(report)}\n\n{table(report)}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Every page that shows a result, as it should read."""
    found = {PAGES / f"{path.stem}.md": json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    return {page: renewed(page.read_text(encoding="utf-8"), report) for page, report in found.items() if page.exists()}


def main() -> None:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
