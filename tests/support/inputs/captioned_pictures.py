"""Reading of the pictures that a captioned grid shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fastdiff.sampling.captioned_grid import LAYOUT


def in_grid(path: Path) -> dict[str, npt.NDArray[np.int64]]:
    """The pictures of each column of a PNG by its label, ``[N * P, H, W, 3]``, prompts fastest."""
    with Image.open(path) as file:
        layout: dict[str, Any] = json.loads(file.text[LAYOUT])  # type: ignore[attr-defined]
        whole = np.asarray(file, int)
    (width, height), (right, down) = layout["side"], layout["pitch"]
    first = layout["first"]
    # The last line of prompts is cut by the bottom, the others by the next one.
    below = [y for _, y in first if y > first[0][1]]
    rows = ((below[0] if below else len(whole)) - first[0][1]) // down
    return {
        label: np.stack(
            [
                whole[y + row * down : y + row * down + height, x + column * right : x + column * right + width]
                for row in range(rows)
                for x, y in first
            ]
        )
        for column, label in enumerate(layout["columns"])
    }
