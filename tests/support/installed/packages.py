"""Packages with entry points, as pip leaves them in a folder for PYTHONPATH."""

import shutil
from pathlib import Path

from tests.support.processes import ROOT


def install(site: Path, package: str, entries: dict[str, str]) -> Path:
    """Install a package of ``tests/support``.

    Args:
        site: the folder, which is created.
        package: its name.
        entries: entry points, ``NAME = module:OBJECT``, by group.
    """
    shutil.copytree(ROOT / "tests" / "support" / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n")
    points = "".join(f"[{group}]\n{entry}\n" for group, entry in entries.items())
    (metadata / "entry_points.txt").write_text(points)
    return site
