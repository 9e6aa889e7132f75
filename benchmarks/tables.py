"""Tables of the docs that are made from result files: written between two comments, so that nobody types a number.

    python benchmarks/tables.py    # after a benchmark has written a new result

In the docs: ``<!-- table: unrolled_memory -->``, the table, ``<!-- end -->``. A test compares them with the files.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (0.0370, 0.0362)  # of the mean squared error on validation data in fig3_top and peers
TEST_TARGET = 0.0393  # 7,850 hypers can overfit the validation data, so also: how soon is it good on test data?
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
        "| | validation loss | test loss | first hypergradient, relative difference from reverse mode's |",
        "|---|---|---|---|",
        f"| best of {len(report['constant'])} constant rates, {best['rate']:.3f} "
        f"| {best['valid']:.4f} | {best['test']:.4f} | |",
    ]
    for name, row in tuned.items():
        difference = report["relative_difference_from_reverse"][name]
        lines.append(f"| schedule, {name} mode | {row['valid']:.4f} | {row['test']:.4f} | {difference:.0e} |")
    return "\n".join(lines)


def defaults(report: dict[str, Any]) -> str:
    """Each problem: tuned in one run, and the fixed setting that is best on validation."""
    rows = report["rows"]
    lines = [
        f"Mean and standard deviation over seeds {seeds(rows)} ({report['date']}); *best fixed* is the best on "
        "validation of all settings of a grid, each trained as often:",
        "",
        "| problem | | valid | test | gradients |",
        "|---|---|---|---|---|",
    ]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        groups = grouped([row for row in rows if row["problem"] == problem], "method", "start")
        fixed = [members for (method, _), members in groups.items() if method == "fixed"]
        best = min(fixed, key=lambda members: mean(members, "valid/loss"), default=None)
        shown = [(method, start, members) for (method, start), members in groups.items() if method != "fixed"]
        if best is not None:
            total = sum(len(members) for members in fixed) // len(best) * best[0]["gradients"]
            shown.append(
                (f"best fixed of {len(fixed)}", best[0]["start"], [{**row, "gradients": total} for row in best])
            )
        for method, start, members in shown:
            lines.append(
                f"| {problem} | {method}, {'at' if 'fixed' in method else 'from'} {start:.3g} "
                f"| {spread(members, 'valid/loss')} | {spread(members, 'test/loss')} | {members[0]['gradients']:,} |"
            )
    return "\n".join(lines)


def dropout_grid(report: dict[str, Any]) -> str:
    """Of all fixed settings the best on validation, the best on test, and the tuned runs."""
    rows, tuned = report["rows"], report["tuned"]
    lines = [
        f"{report['updates']:,} training updates; weights averaged over the last 100, or as they are "
        f"({report['date']}):",
        "",
        "| | rates | valid | test |",
        "|---|---|---|---|",
    ]
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        for kind in ("averaged", "final"):
            best = min(own, key=lambda row: row[f"valid/{kind}"])
            lowest = min(row[f"test/{kind}"] for row in own)
            lines.append(
                f"| seed {seed}, best of {len(own)}, {kind} | {rates(best['rates'])} | {best[f'valid/{kind}']:.4f} "
                f"| {best[f'test/{kind}']:.4f} (lowest of all {lowest:.4f}) |"
            )
        lines += [
            f"| seed {seed}, tuned from {row['start']} | {rates(row['rates'])} | {row['valid']:.4f} "
            f"| {row['test']:.4f} |"
            for row in tuned
            if row["seed"] == seed
        ]
    return "\n".join(lines)


def first_order(report: dict[str, Any]) -> str:
    """A row a model: how close the pair comes to second derivatives, and whether torch has them."""
    lines = [
        f"On {report['device']}, torch {report['torch']}, {report['date']}:",
        "",
        "| model | mixed product, relative error | curvature product, relative error | twice differentiable |",
        "|---|---|---|---|",
    ]
    for row in report["rows"]:
        twice = "yes" if row["twice"] is True else "no"
        lines.append(f"| {row['model']} | {row['mixed error']:.1e} | {row['curvature error']:.1e} | {twice} |")
    return "\n".join(lines)


def hypers(report: dict[str, Any]) -> str:
    """A row for each number of hypers, two columns a method."""
    rows = report["rows"]
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "plain"]
    lines = [
        f"Time of a training update and memory at the peak, plain training as 1; ten million weights, batches of "
        f"{report['batch']}, raw moved every ten updates ({report['device']}, torch {report['torch']}, "
        f"{report['date']}):",
        "",
        "| hypers | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for count in dict.fromkeys(row["hypers"] for row in rows):
        own = {row["method"]: row for row in rows if row["hypers"] == count}
        cells = " | ".join(f"{own[n]['times']:.2f}, {own[n]['memory']:.2f}" if n in own else "" for n in names)
        lines.append(f"| {count:,} | {cells} |")
    return "\n".join(lines)


def methods(report: dict[str, Any]) -> str:
    """A row a method: bias, cost, memory."""
    lines = [
        f"Measured {report['date']} with torch {report['torch']}. *Direction* and *size* compare the hypergradient on "
        "ridge, after training with raw kept still, with the closed form. *Time* (of a training update) and *memory* "
        f"(at the peak) are multiples of plain training, for {report['weights']:,} weights, {report['hypers']} hypers "
        f"and batches of {report['batch']}, on {report['device']}:",
        "",
        "| method | direction (cosine) | size | time | memory | hypers | of the training loss it needs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cost = "not measured | " if row.get("failed") else f"{row['times']:.1f} | {row['memory']:.1f}"
        lines.append(
            f"| `{row['method']}` | {row['cosine']:.4f} | {row['size']:.2f} | {cost} | {row['count']} "
            f"| {row['needs']} |"
        )
    return "\n".join(lines)


def seeds(rows: list[dict[str, Any]]) -> str:
    return ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))


def rates(numbers: list[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def grouped(rows: list[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def mean(rows: list[dict[str, Any]], column: str) -> float:
    return statistics.mean(row[column] for row in rows)


def spread(rows: list[dict[str, Any]], column: str) -> str:
    numbers = [row[column] for row in rows]
    return f"{statistics.mean(numbers):.5f} ± {statistics.stdev(numbers) if len(numbers) > 1 else 0:.5f}"


def race(report: Mapping[str, Any]) -> str:
    """A row a method: medians over the seeds."""
    plain = report["rows"]["Plain run"]["runs"]
    steps = f"{report['steps']:,} updates"
    targets = f"CPU-s to valid ≤ {TARGETS[0]:.4f} | to ≤ {TARGETS[1]:.4f} | to test ≤ {TEST_TARGET:.4f}"
    lines = [
        circumstances(report),
        "",
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


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "unrolled_memory": unrolled_memory,
    "schedule": schedule,
    "defaults": defaults,
    "dropout_grid": dropout_grid,
    "first_order_cpu": first_order,
    "first_order_cuda": first_order,
    "hypers": hypers,
    "methods": methods,
    "fig3_top": race,
    "peers": race,
}


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
