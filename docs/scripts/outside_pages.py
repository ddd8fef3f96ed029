"""Hook of mkdocs: pages that lie beside the code join the site, and links to code become plain text.

The links are those of the repository, so that every page also works there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = ("deepspeed_configs/README.md", "kernels/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages beside the code, at the same paths in the site."""
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of the folder of the documentation."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of the repository to the pages of the site."""
    source = page.file.src_uri
    place = source if source in OUTSIDE else f"docs/{source}"
    return _LINK.sub(lambda link: _led(link, place, source), markdown)


def _led(link: re.Match[str], place: str, source: str) -> str:
    target, sign, anchor = link["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    inside = path.removeprefix("docs/") if path.startswith("docs/") else path if path in OUTSIDE else None
    if inside is None:
        if not (ROOT / path).exists():
            return link[0]  # for mkdocs to complain about
        return link["text"] or f"`{path}`"
    relative = posixpath.relpath(inside, posixpath.dirname(source) or ".")
    return f"{link['mark']}[{link['text']}]({relative}{sign}{anchor})"
