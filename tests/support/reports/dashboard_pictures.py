"""Pictures of the page for docs/dashboard.md: ``python -m tests.support.reports.dashboard_pictures RUN [RUN ...]``."""

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser

from fastdiff.dashboard.report import write_report
from tests.support.processes import ROOT
from tests.support.servers.browser import chromium, until, watched

_DESKTOP = {"viewport": {"width": 1280, "height": 900}}
LOOKS: dict[str, dict[str, Any]] = {
    "desktop": _DESKTOP,
    "dark": {**_DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5},
    "print": {"viewport": {"width": 794, "height": 1123}},
}
"""By name, the windows; the paper is A4 at 96 pixels per inch."""
_MOST_BYTES = 300_000


def take(browser: Browser, address: str, look: str) -> bytes:
    """Return a PNG of the whole page, with as many colours as fit ``_MOST_BYTES``."""
    context = browser.new_context(**LOOKS[look])
    page = context.new_page()
    if look == "print":
        page.emulate_media(media="print")
    page.goto(address)
    page.locator("#loss .line").first.wait_for()
    until(page, "shownRuns().length === Store.runs.length && !Live.reading.size")
    page.evaluate("for (const image of document.images) image.loading = 'eager'")
    until(page, "[...document.images].every((image) => image.complete)")
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True, animations="disabled"))).convert("RGB")
    context.close()
    for colours in (256, 128, 64, 32):
        buffer = io.BytesIO()
        picture.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
        if buffer.tell() <= _MOST_BYTES:
            return buffer.getvalue()
    raise SystemExit(f"{look}: {buffer.tell()} bytes in 32 colours; take shorter runs")


def main(runs: Sequence[Path], out: Path) -> None:
    """Take all pictures, of the live page and of the report."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        report = Path(folder) / "report.html"
        write_report(runs, report)
        with watched(*runs, cwd=ROOT) as live:
            for kind, address in (("watch", live), ("report", report.as_uri())):
                for look in LOOKS:
                    path = out / f"dashboard-{kind}-{look}.png"
                    path.write_bytes(take(browser, address, look))
                    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main([Path(run).absolute() for run in sys.argv[1:]], ROOT / "docs")
