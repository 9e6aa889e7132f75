"""Packages that are needed only here and there, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import ``module``; where it is missing, say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ModuleNotFoundError(
            f"this needs {module.partition('.')[0]}, which is not installed: pip install 'bestresponse[{extra}]'",
            name=error.name,
        ) from None
