"""How Sphinx builds the site from these pages: `make docs`."""

from __future__ import annotations

import shardplan

project = "shardplan"
author = "The shardplan maintainers"
copyright = author  # noqa: A001 - Sphinx reads this name
version = release = shardplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# links to the headings of a page, as on GitHub
myst_heading_anchors = 4
# indented blocks hold commands, tables and listings as well as Python
highlight_language = "none"

# docstrings are plain text: names stand in single backticks and link nowhere
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "sphinx_book_theme"
html_title = "shardplan"
