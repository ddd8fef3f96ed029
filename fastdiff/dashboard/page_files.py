"""The files of the page, which lie beside this module, also in a wheel."""

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_LINKED = re.compile(r'<link rel="stylesheet" href="page/(?P<style>[a-z_]+\.css)">|'
                     r'<script src="page/(?P<script>[a-z_]+\.js)"></script>')  # fmt: skip


def page_file(name: str) -> str | None:
    """Return a file of the page; None: it has none of this name."""
    return (_FOLDER / name).read_text() if name in _names() else None


@cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in TYPES)


def inlined() -> str:
    """Return the page as one file, with its style and its scripts in it."""
    return _LINKED.sub(_inline, page_file("index.html") or "")


def _inline(link: re.Match[str]) -> str:
    tag = "style" if link["style"] else "script"
    return f"<{tag}>{page_file(link['style'] or link['script'])}</{tag}>"
