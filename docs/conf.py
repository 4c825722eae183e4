"""How the documentation is built: `make docs`, with every warning an error, and without the network."""

import os
import re
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

project = "loom_django"
author = "The loom_django authors"
copyright = f"2026, {author}"
release = re.search(r'^__version__ = "(.+)"', (root / "loom_django/__init__.py").read_text(), re.M)[1]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"loom_django {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Names of other projects cannot be looked up: the build works without the network, hence without intersphinx.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(django|collections|contextlib|dataclasses|datetime|decimal|enum|types|typing|uuid|zoneinfo)\..*",
    ),
]
