"""An export format that only the toy network has: the names of its weights."""

from pathlib import Path

from fastdiff.export.card_text import python
from fastdiff.export.formats import Exported, ExportFormat


def _write(folder: Path, exported: Exported) -> None:
    (folder / "names.txt").write_text("\n".join(exported.weights.shapes))


NAMES = ExportFormat(write=_write, use=lambda config, place, step: python(f"open({place.file('names.txt')})"))
