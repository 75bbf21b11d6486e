"""The guide's build: ``sphinx-build -W -b html docs docs/_build``.

The build needs no network: there is no intersphinx, and the theme loads no remote fonts or
scripts. ``reference.py`` writes the pages of ``reference/`` before Sphinx reads them, so that they
follow from the code. ``docstrings.py`` makes docstrings valid reStructuredText.
``results.py`` writes the tables of benchmarks. The notebooks are MyST Markdown, which jupytext
converts; the build executes them on the demo model.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The kernels of the notebooks import this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
)
from tests.helpers.compiling import SOON  # noqa: E402

# Their time is compiling, as the tests' is.
os.environ.setdefault("XLA_FLAGS", SOON)

import docstrings  # noqa: E402
import reference  # noqa: E402
import results  # noqa: E402

project = "jaxllama"
author = "jaxllama developers"
copyright = "jaxllama developers, Apache-2.0"
release = version = importlib.metadata.version("jaxllama")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# Notebooks are executed once for each change of their text; CI begins without a cache.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds a cell, also on a busy machine
nb_merge_streams = True
smartquotes = False  # they would change --options and code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"jaxllama {version}"
html_static_path = ["_static"]
html_css_files = ["guide.css"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Any) -> None:
    """Write the reference before Sphinx looks for pages, and clean each docstring."""
    app.connect("config-inited", lambda *_: reference.write(HERE / "reference"))
    app.connect("config-inited", lambda *_: results.write(HERE / "benchmarks.md"))
    # Before napoleon, which reads the NumPy sections.
    app.connect("autodoc-process-docstring", docstrings.process, priority=100)
    app.connect("autodoc-process-signature", docstrings.without_flax)
