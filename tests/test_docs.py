"""Every Python block of README and docs runs: the blocks of one page after one another, in one namespace.

Where a line is an expression and its comment a Python literal, the comment must be true: ``space.numel  # 3``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if page.exists()]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"  # (.*)$")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page: how many lines stand before each one, and its source."""
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in FENCE.finditer(text)]


def run(text: str, name: str) -> dict[str, Any]:
    """Run a page; an error points to the page's own line."""
    lines = text.splitlines()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for before, source in blocks(text):
        for node in ast.parse("\n" * before + source, name).body:
            line = lines[(node.end_lineno or 1) - 1]
            if not isinstance(node, ast.Expr) or (said := literal(line)) is None:
                exec(compile(ast.Module([node], []), name, "exec"), namespace)
                continue
            value = eval(compile(ast.Expression(node.value), name, "eval"), namespace)
            value = value.item() if isinstance(value, torch.Tensor) else value
            wanted = pytest.approx(said, rel=1e-5) if isinstance(said, float) else said
            assert value == wanted, f"{name}, line {node.lineno}, says {said!r}, and it is {value!r}"
    return namespace


def literal(line: str) -> object:
    """The value a comment states, if it does nothing else."""
    try:
        return ast.literal_eval(COMMENT.findall(line)[0])
    except (IndexError, SyntaxError, ValueError):
        return None


@each_page
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)  # what a reader has; conftest puts the suite's own back
    run(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


@each_page
def test_no_block_is_overlooked(page: Path) -> None:
    """A Python block in a spelling that the expression above does not know would never run."""
    text = page.read_text(encoding="utf-8")
    assert len(blocks(text)) == len(
        re.findall(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*\{?.*py", text, re.MULTILINE | re.IGNORECASE)
    )


def test_blocks_share_a_namespace_and_errors_name_the_line() -> None:
    page = "# Page\n\n```python\nx = 1\n```\ntext\n```bash\nrm -r x\n```\n```python\ny = x + 1\n```\n"
    assert run(page, "page.md")["y"] == 2
    with pytest.raises(ZeroDivisionError) as error:
        run(page + "```python\nz = 1\nz / 0\n```\n", "page.md")
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == ("page.md", 15)


def test_a_comment_that_is_not_true_is_found() -> None:
    run('```python\n1 + 1  # 2\n"a"  # "a"\n0.1 + 0.2  # 0.3\n1 + 1  # in words\n```\n', "page.md")
    with pytest.raises(AssertionError, match="line 2"):
        run("```python\n1 + 1  # 3\n```\n", "page.md")
