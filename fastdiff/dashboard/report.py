"""The page of runs as one file that needs no server, no network and no other file."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastdiff.config.run_record import require_run
from fastdiff.console import log
from fastdiff.dashboard.folders import key_of, names_of
from fastdiff.dashboard.page_files import inlined
from fastdiff.dashboard.pictures import embedded
from fastdiff.dashboard.run_metadata import RunMetadata, glance, unreadable
from fastdiff.outputs import require_output, write_output
from fastdiff.version import __version__

_PARTS = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


def write_report(runs: Sequence[Path], out: Path) -> int:
    """Write the page of ``runs`` as they are now; return its size in bytes.

    Raises:
        ConfigError: a folder has no run.
        OSError: the file cannot be written.
    """
    for run in runs:
        require_run(run)
    require_output(out)
    page = _with_policy(inlined())
    content = page.replace("<!-- metadata -->", _embedded_metadata(runs)).encode()
    write_output(out, content)
    return len(content)


def _embedded_metadata(runs: Sequence[Path]) -> str:
    folders = {key_of(run): run for run in runs}
    found = []
    for run in names_of(folders):
        folder = folders[run["key"]]
        found.append(run | _of_run(folder))
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = json.dumps({"runs": found, "written": written, "version": __version__}, allow_nan=False)
    # Nothing in it ends the element: no text of a run is ever markup.
    return f'<script type="application/json" id="metadata">{text.replace("<", chr(92) + "u003c")}</script>'


def _of_run(folder: Path) -> dict[str, Any]:
    """Return state and sections of a run; whatever its files hold, the other runs are in the report."""
    try:
        metadata = RunMetadata(folder)
        sections = metadata.sections({})
        sections["pictures"] = embedded(metadata.pictures)
        return {"state": glance(folder), "sections": sections}
    except Exception as error:
        log.warning(f"{folder}: left out of the report: {type(error).__name__}: {error}")
        return {"state": unreadable(error), "sections": {}}


def _with_policy(page: str) -> str:
    """Add a policy under which the page runs its own scripts alone and asks for nothing."""
    digests: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _PARTS.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    policy = "; ".join(
        ["default-src 'none'", "img-src data:", *(f"{kind}-src {' '.join(found)}" for kind, found in digests.items())]
    )
    return page.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
