"""A real Chromium without a screen, and ``fastdiff watch`` in a process of its own."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.processes import BIN, start, stop
from tests.support.waiting import LIMIT_S, wait_until

_LEFT = "net::ERR_ABORTED"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
"""What ``fastdiff watch`` prints."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium.

    Raises:
        RuntimeError: it is not installed.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise RuntimeError("tests of the page need Chromium: bash tests/slurm/install.sh, or apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=1000 * LIMIT_S)
        try:
            yield browser
        finally:
            browser.close()


def watch(*arguments: str | Path, cwd: Path) -> tuple[subprocess.Popen[str], str]:
    """Start ``fastdiff watch``; return the process and the address that it prints."""
    process = start([BIN / "fastdiff", "watch", *arguments], cwd)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = ADDRESS.search(line)
    assert found is not None, line + process.stdout.read()
    return process, found[0]


@contextmanager
def watched(*arguments: str | Path, cwd: Path) -> Iterator[str]:
    """Serve the page while the context lasts; yields its address."""
    process, address = watch(*arguments, cwd=cwd)
    try:
        yield address
    finally:
        stop(process)


def problems_of(page: Page) -> list[str]:
    """Return a list that grows by every error of the scripts, and every request to elsewhere or that fails.

    A request that the page itself breaks off, as when it is left, is none of them.
    """
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: found.append(request.url) if not _is_own(request.url) else None)
    page.on("response", lambda answer: found.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.on(
        "requestfailed",
        lambda request: found.append(f"{request.failure} {request.url}") if request.failure != _LEFT else None,
    )
    return found


def _is_own(address: str) -> bool:
    return address.startswith(("http://127.0.0.1:", "data:", "file:", "blob:"))


def until(page: Page, expression: str) -> None:
    """Return when an expression of the page is true (the page allows no ``eval``, with which Playwright would wait)."""
    wait_until(lambda: bool(page.evaluate(expression)), expression)


def wide_parts(page: Page) -> Sequence[str]:
    """Return the elements that reach beyond the right edge of the page, except within parts that scroll."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((node) => {
            const scrolls = (one) => one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
            return !(node instanceof SVGElement) && node.offsetParent && !scrolls(node)
                && node.getBoundingClientRect().right > innerWidth + 1;
        }).map((node) => `${node.tagName} ${node.className} ${node.textContent.slice(0, 40)}`)"""
    )
    return found
