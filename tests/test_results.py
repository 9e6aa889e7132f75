"""The results pages say what the result files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_as_made_from_the_files(tables: ModuleType) -> None:
    """After a new result: ``python benchmarks/table.py``."""
    pages = tables.pages()
    assert {page.name for page in pages} >= {"fig3_top.md", "peers.md"}
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text


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


def test_a_table_shows_medians_and_says_never(tables: ModuleType) -> None:
    runs = [run(0, 10.0, 0.01, to=None), run(1, 12.0, 0.02, to=3.0), run(2, 10.0, 0.04, to=5.0)]
    rows = {
        "Plain run": {"extra_mb": 0.0, "runs": runs},
        "Slow": {"extra_mb": 1.6, "runs": [{**r, "mark": {**r["mark"], "seconds": r["end"]["seconds"]}} for r in runs]},
        "Fails": {"extra_mb": None, "runs": [runs[0], run(1, 1.0, 0.1, to=None, error="NaN")]},
    }
    lines = tables.table({"steps": 3000, "rows": rows}).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "Plain run",
        "0.0200",
        "0.0400",
        "1.0",
        "5.0",
        "never",
        "0.0400, 0.0600",
        "1.11",
        "12,345",
        "0.5000",
        "0",
    ]
    assert [cell.strip() for cell in lines[3].split("|")][8:] == ["2.00", "12,345", "0.5000", "2", ""]
    assert lines[4].startswith("| Fails | NaN |")
    assert len({line.count("|") for line in lines}) == 1
