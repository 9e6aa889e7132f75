"""How the documentation is built. Nothing is fetched while building: no intersphinx."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "bestresponse"
author = "The bestresponse authors"
copyright = author
release = version_of("bestresponse")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bestresponse {release}"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # signatures stay readable; docstrings say what arguments are
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of a dataclass are described once
python_maximum_signature_line_length = 100


def setup(app: Sphinx) -> None:
    """Register what follows."""
    app.connect("autodoc-process-docstring", _keep_bars)


def _keep_bars(app: Sphinx, what: str, name: str, about: object, options: object, lines: list[str]) -> None:
    """Absolute values in docstrings, |w|, would be read as substitutions."""
    lines[:] = [re.sub(r"\|(\w+)\|", r"\\|\1\\|", line) for line in lines]
