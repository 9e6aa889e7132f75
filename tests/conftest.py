"""Options and defaults of the whole suite: ``--device``, ``--dtype``, ``--slow``; float64 and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors live: cpu, cuda, ...")
    parser.addoption("--dtype", default="float64", choices=["float32", "float64"])
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the problems are tiny; threads would only wait for one another


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(autouse=True)
def _defaults(pytestconfig: pytest.Config) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, pytestconfig.getoption("--dtype")))
    with torch.device(pytestconfig.getoption("--device")), torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)
