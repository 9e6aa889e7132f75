"""Tables in the docs are those of the result files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
