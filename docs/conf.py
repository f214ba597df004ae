"""Sphinx's settings for the site of these pages and the README (`make docs`, into build/docs).

The source folder is the repository, so that the links between pages are those that a code host follows.
"""

from __future__ import annotations

import re
from html import escape
from importlib.metadata import files
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]

#: The navigation: the titles of the sidebar, and the pages. A page that it leaves out is a warning.
NAVIGATION = {
    "Use": {
        "Getting started": "self",
        "Models": "docs/models",
        "Clients": "docs/clients",
        "API": "docs/http",
        "How many workers": "docs/advise",
        "Troubleshooting": "docs/troubleshooting",
    },
    "Operate": {
        "Parts by hand": "docs/running",
        "Several hosts": "docs/hosts",
        "Certificates": "docs/certificates",
        "Transports": "docs/transports",
        "Operating": "docs/operating",
        "Metrics": "docs/metrics",
        "Upgrading": "docs/upgrading",
        "Security": "docs/security",
    },
    "Combine": {
        "Embedding": "docs/embedding",
        "The library alone": "docs/package",
        "With vLLM": "docs/vllm",
        "With SGLang": "docs/sglang",
        "Behind other routers": "docs/routers",
        "On Kubernetes": "docs/kubernetes",
        "With llm-d": "docs/llm-d",
        "With Ray": "docs/ray",
    },
    "How it works": {
        "The life of a request": "docs/life-of-a-request",
        "Protocol": "docs/protocol",
        "Sessions and registry": "docs/registry",
        "Simulator": "docs/simulator",
        "Lessons": "docs/lessons",
        "Decisions": "docs/decisions",
    },
    "Results": {"Results": "docs/results"},
    "Project": {"Contributing": "CONTRIBUTING", "Changes": "CHANGELOG", "Security reports": "SECURITY"},
}

project = "segue"
root_doc = "README"
extensions = ["myst_parser"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name != "docs" and path.suffix != ".md"]
myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
# A block without a language is commands.
highlight_language = "sh"
html_theme = "furo"
html_title = "segue"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_css_files = ["site.css"]
MERMAID = [str(path.locate()) for path in files("mermaidx") or [] if path.name == "mermaid.js"]
html_static_path = ["site.css", *MERMAID]

DRAW = """
const chosen = localStorage.getItem("theme"), system = matchMedia("(prefers-color-scheme: dark)").matches;
const dark = chosen === "dark" || (chosen !== "light" && system);
mermaid.initialize({startOnLoad: true, theme: dark ? "dark" : "default"});
"""

LINK = re.compile(r"\[([^\]\n]*)\]\(([\w./-]+)\)")


class Diagram(SphinxDirective):
    """A block of Mermaid, drawn by the browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        text = escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """The navigation is not in the README, where a code host would show it as text. A site has no folders of
    sources: a link to one becomes its words."""
    folder = (ROOT / page).parent
    source[0] = LINK.sub(lambda m: m[1] if (folder / m[2]).is_dir() else m[0], source[0])
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            lines = "\n".join(f"{title} <{name}>" for title, name in pages.items())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def draw(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Pages with diagrams load what draws them."""
    if 'class="mermaid"' in context.get("body", ""):
        app.add_js_file("mermaid.js")
        app.add_js_file(None, body=DRAW)


def begin_at_readme(app: Sphinx, error: Exception | None) -> None:
    """Servers and people open index.html first."""
    to = f"{root_doc}.html"
    (app.outdir / "index.html").write_text(
        f'<!doctype html><title>segue</title><meta http-equiv="refresh" content="0; url={to}">'
        f'<a href="{to}">segue</a>\n'
    )


def setup(app: Sphinx) -> None:
    app.add_directive("mermaid", Diagram)
    app.connect("source-read", adapt)
    app.connect("html-page-context", draw)
    app.connect("build-finished", begin_at_readme)
