"""How Sphinx builds the site from these pages: `make docs`."""

from __future__ import annotations

from typing import Any

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


def setup(app: Any) -> None:
    """Registers `show_code`, before napoleon reads the sections of a docstring."""
    app.connect("autodoc-process-docstring", show_code, priority=400)


def show_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes indented paragraphs of a docstring literal, as Sphinx asks for it."""
    for n in reversed(range(1, len(lines))):
        begins = lines[n].startswith("    ") and not lines[n - 1] and not in_section(lines[:n])
        if begins and not next((line for line in reversed(lines[:n]) if line), "").startswith("    "):
            lines[n:n] = ["::", ""]


def in_section(before: list[str]) -> bool:
    """Whether a line belongs to a section such as "Raises:", by the lines before it."""
    heads = [line for line in before if line and not line.startswith(" ")]
    return bool(heads) and heads[-1] in ("Args:", "Raises:")
