"""Tables in the docs are those of the result files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def tables():
    path = ROOT / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "<!-- table:" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_result_files(page):
    """Otherwise run ``python benchmarks/tables.py``."""
    text = page.read_text(encoding="utf-8")
    assert tables().renewed(text) == text


def test_a_number_typed_into_a_table_is_found():
    text = PAGES[0].read_text(encoding="utf-8")
    name = tables().PLACE.search(text).group(2)
    changed = text.replace(f"<!-- table: {name} -->\n", f"<!-- table: {name} -->\n0", 1)
    assert changed != text
    assert tables().renewed(changed) == text


def run(seed: int, seconds: float, valid: float, *, to: float | None, error: str = "") -> dict[str, Any]:
    mark = {"seconds": seconds / 2, "updates": 3000, "gradients": 6000, "valid": 2 * valid, "test": 3 * valid}
    end = {"seconds": seconds, "updates": 6000, "gradients": 12345, "valid": valid, "test": 2 * valid}
    return {
        "seed": seed,
        "error": error,
        "end": end,
        "mark": mark,
        "to": {"0.0370": 1.0, "0.0362": to},
        "to_test": {"0.0393": None},
        "exact_at_end": 0.5,
        "curve": {"seconds": [0.0, seconds / 4, seconds], "updates": [0, 2000, 6000]},
    }


def test_a_table_shows_medians_and_says_never() -> None:
    runs = [run(0, 10.0, 0.01, to=None), run(1, 12.0, 0.02, to=3.0), run(2, 10.0, 0.04, to=5.0)]
    rows = {
        "Plain run": {"extra_mb": 0.0, "runs": runs},
        "Slow": {"extra_mb": 1.6, "runs": [{**r, "mark": {**r["mark"], "seconds": r["end"]["seconds"]}} for r in runs]},
        "Fails": {"extra_mb": None, "runs": [runs[0], run(1, 1.0, 0.1, to=None, error="NaN")]},
    }
    facts = {"date": "", "hardware": "", "python": "", "versions": {}, "budget_seconds": 1.0}
    first, *others = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in tables().race({**facts, "steps": 3000, "rows": rows}).splitlines()[4:]
    )
    assert first[:6] == ["Plain run", "0.0200", "0.0400", "1.0", "5.0", "never"]
    assert first[6:] == ["0.0400, 0.0600", "1.11", "12,345", "0.5000", "0"]
    assert others[0][7:] == ["2.00", "12,345", "0.5000", "2"]
    assert others[1] == ["Fails", "NaN", *[""] * 9]
