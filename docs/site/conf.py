"""Sphinx's settings for the documentation site. scripts/site builds it of the pages as they lie in the
repository.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

project = "kvant"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
project_copyright = "the authors of kvant, MIT license"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = [
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        ".github/SECURITY.md",
        "docs/**.md",
        "docs/site/*.rst",
        "scripts/results/README.md",
    ),
    "src/kvant/pocket/MODEL_CARD.md",
]
exclude_patterns = [".[!g]*", ".git", "build", "dist", "tests"]  # nothing is searched there

myst_heading_anchors = 4  # GitHub's, which the pages' links name
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 100
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"kvant {release}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

# What would make a reader's browser ask another machine. A link that a reader may follow is none of it.
OUTSIDE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<(?:link|image|use)\b(?![^>]*rel=["']?canonical)[^>]*\shref=["']?(?:https?:)?//[^>]*>"""
    r"""|@import\s[^;]*//[^;]*;|url\(\s*["']?(?:https?:)?//[^)]*\)|(?:fetch|importScripts)\(\s*["'`](?:https?:)?//.*""",
    re.IGNORECASE,
)


def outside_requests(folder: Path) -> list[str]:
    """Every place in a built site that makes a browser ask another machine, as "file: text"."""
    pages = sorted(path for path in folder.rglob("*") if path.suffix in {".html", ".css", ".js", ".svg"})
    return [
        f"{page.relative_to(folder)}: {found}"
        for page in pages
        for found in OUTSIDE.findall(page.read_text(encoding="utf-8"))
    ]


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Give the front page the list of all pages. Sphinx warns of a page that is not in it."""
    if name == root_doc:
        source[0] += "\n" + (ROOT / "docs/site/contents.txt").read_text(encoding="utf-8")


def finish(app: Any, error: Exception | None) -> None:
    """Name the front page as browsers look for it, and refuse a site that asks other machines."""
    if error is None:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")
        if found := outside_requests(app.outdir):
            sys.exit("the site asks other machines:\n" + "\n".join(found))


def setup(app: Any) -> None:
    """Called by Sphinx. The names of kvant are imported when first asked for; here all of them are listed."""
    import kvant

    vars(kvant).update({name: getattr(kvant, name) for name in kvant.__all__})
    app.connect("source-read", add_contents)
    app.connect("build-finished", finish)
