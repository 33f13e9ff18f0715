"""Sphinx's configuration of the documentation's site, which `make docs` builds.

The pages are the Markdown files of this folder, which the hosting site of the repository also shows. `index.md` adds
only the navigation to README.md.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "Stoker"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser"]
exclude_patterns = ["README.md"]  # index.md includes it
myst_heading_anchors = 4  # with the hosting site's anchors
smartquotes = False  # they would turn --flag into –flag

#: Address under which a browser shows the repository's files, such as https://HOST/ORG/stoker/blob/main. Empty: the
#: site contains copies of the files outside docs/ to which its pages link.
repository = os.environ.get("REPOSITORY", "").rstrip("/")

html_theme = "furo"
html_title = f"Stoker {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False

linkcheck_retries = 2
linkcheck_timeout = 20


def link_repository(app: Sphinx, doctree: nodes.document) -> None:
    """Resolve the links of a page to files outside docs/."""
    for node in [*doctree.findall(addnodes.pending_xref), *doctree.findall(addnodes.download_reference)]:
        path = outside_file(app.env, node)
        if path is None:
            continue
        link: nodes.Element
        if app.config.repository:
            link = nodes.reference("", "", refuri=f"{app.config.repository}/{path.relative_to(ROOT).as_posix()}")
        else:
            page = app.env.doc2path(app.env.docname)
            link = addnodes.download_reference("", "", reftarget=os.path.relpath(path, Path(page).parent))
        link += node.children
        node.replace_self(link)


def outside_file(env: BuildEnvironment, node: nodes.Element) -> Path | None:
    """Return the repository's file that a node links to; None: it links to something else."""
    if node.get("reftype") != "myst":
        return None
    if node.get("refdomain") == "doc":  # a Markdown file, without its suffix
        path = (DOCS / f"{node['reftarget']}.md").resolve()
    else:
        path = (Path(env.doc2path(env.docname)).parent / node["reftarget"]).resolve()
    inside = path.is_relative_to(DOCS) or not path.is_relative_to(ROOT)
    return None if inside or not path.is_file() else path


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the setting, and the handler of links before Sphinx collects the files to copy."""
    app.add_config_value("repository", "", "env")
    app.connect("doctree-read", link_repository, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
