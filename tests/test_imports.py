"""The house rules that a parser can check: who may import whom, public torch API only, no ``assert`` for users."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

#: From low to high: a module imports only from layers above its own line. A name with ``.*`` stands for a package's
#: modules. A new module is added here.
LAYERS = """
    transforms  parts
    space
    vectors  extras  memory  tolerances
    problem  history
    stream  gradients  checkpoint  functional  state  optimizers  watch  console
    solvers  reading  perturb  responses  updates
    unrolling.course
    unrolling.reverse  unrolling.forward  unrolling.reversible
    unrolling.fine_tune
    unrolling
    method  hypergradient
    evaluation  result  preflight
    methods.adjoint  methods.best_response  methods.implicit  methods.black_box  methods.unrolled
    methods.catalog
    methods
    tune  audit
    callbacks  testing.known
    testing.contract
    testing
    bestresponse
    papers  papers.data
    papers.*
"""

#: Here ``assert`` is how a failed check is said.
MAY_ASSERT = {"testing.contract"}


def _dotted(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _short(dotted: str) -> str:
    return dotted.removeprefix("bestresponse.")


def _is_own(dotted: str) -> bool:
    return dotted.split(".")[0] == "bestresponse"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _chain(node: ast.expr) -> str:
    """``a.b.c`` as written; empty where it does not begin with a name."""
    if isinstance(node, ast.Attribute):
        owner = _chain(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def layers() -> dict[str, int]:
    return {module: i for i, line in enumerate(LAYERS.split("\n")) for module in line.split()}


def modules() -> dict[str, str]:
    """The source of each module by its name below the package; the package itself is ``bestresponse``."""
    return {_short(_dotted(path)): path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")}


MODULES = modules()
each_module = pytest.mark.parametrize("module", sorted(MODULES))


def layer_of(module: str) -> int | None:
    of_package = f"{module.rpartition('.')[0]}.*"
    return layers().get(module, layers().get(of_package))


def imports(source: str) -> Iterator[str]:
    """The names of the package's modules that are imported anywhere in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (_short(alias.name) for alias in node.names if _is_own(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")  # no layer is named so: relative imports are not used here
        elif isinstance(node, ast.ImportFrom) and node.module and _is_own(node.module):
            for alias in node.names:
                inner = _short(f"{node.module}.{alias.name}")
                yield inner if inner in MODULES else _short(node.module)


def wrong_imports(module: str, source: str) -> list[str]:
    here = layer_of(module)
    if here is None:
        raise LookupError(f"{module} is in no layer: add it to LAYERS")
    return sorted({name for name in imports(source) if (there := layer_of(name)) is None or there >= here})


def private_torch(source: str) -> list[str]:
    """Uses of torch's private names, and of functorch, which is private by now."""
    tree, found = ast.parse(source), []
    from_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("torch", "functorch"):
                    from_torch.add(alias.asname or alias.name.split(".")[0])
                    found.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "functorch"):
            for alias in node.names:
                from_torch.add(alias.asname or alias.name)
                found.append(f"{node.module}.{alias.name}")
    chains = [_chain(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found += [chain for chain in chains if chain.split(".")[0] in from_torch]
    return sorted({name for name in found if "functorch" in name or any(_is_private(p) for p in name.split("."))})


def asserts(source: str) -> list[int]:
    """The lines with an ``assert``."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


@each_module
def test_imports_point_downwards(module: str) -> None:
    assert wrong_imports(module, MODULES[module]) == []


@each_module
def test_only_public_torch(module: str) -> None:
    assert private_torch(MODULES[module]) == []


@each_module
def test_no_assert_for_users(module: str) -> None:
    if module not in MAY_ASSERT:
        assert asserts(MODULES[module]) == []


def test_every_listed_module_exists() -> None:
    assert [name for name in layers() if not name.endswith(".*") and name not in MODULES] == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("solvers", "from bestresponse.methods import Implicit", ["methods"]),
        ("solvers", "from bestresponse.methods.implicit import Implicit", ["methods.implicit"]),
        ("solvers", "from bestresponse import tune", ["tune"]),
        ("solvers", "import bestresponse.tune", ["tune"]),
        ("solvers", "import bestresponse as br", ["bestresponse"]),
        ("solvers", "def late():\n    from bestresponse.tune import tune", ["tune"]),
        ("solvers", "from bestresponse.responses import Linear", ["responses"]),  # its own layer
        ("solvers", "from .vectors import dot", [".vectors"]),
        ("methods.implicit", "from bestresponse.methods.black_box import BlackBox", ["methods.black_box"]),
        ("tune", "from bestresponse.papers.data import digits", ["papers.data"]),
        ("solvers", "from bestresponse.vectors import dot\nimport torch", []),
        ("methods.catalog", "from bestresponse.methods.implicit import Implicit", []),
        ("papers.data", "import bestresponse as br", []),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, found: list[str]) -> None:
    assert wrong_imports(module, source) == found


def test_a_module_without_a_layer_is_found() -> None:
    with pytest.raises(LookupError, match="utils is in no layer"):
        wrong_imports("utils", "")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C", ["torch._C"]),
        ("import torch\ntorch.nn.Module._call_impl(1)", ["torch.nn.Module._call_impl"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._functorch import vmap", ["torch._functorch.vmap"]),
        ("from torch.nn import functional as F\nF._pad", ["F._pad"]),
        ("import functorch", ["functorch"]),
        ("import torch\ntorch.Tensor.__add__\nself._own", []),
        ("from torch.func import functional_call\nfunctional_call.x", []),
    ],
)
def test_private_torch_is_found(source: str, found: list[str]) -> None:
    assert private_torch(source) == found


def test_an_assert_is_found() -> None:
    assert asserts("x = 1\nassert x") == [2]
