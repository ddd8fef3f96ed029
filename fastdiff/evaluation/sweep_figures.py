"""Table and picture of a sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdiff.evaluation.figures import figure_for
from fastdiff.tables import table

_FIGURES = {"fid": "FID", "kid": "KID", "precision": "precision", "recall": "recall"}
_DIGITS = {"fid": ".2f", "kid": ".5f", "precision": ".3f", "recall": ".3f"}
_COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"


def as_table(rows: Sequence[dict[str, Any]], room: int | None = None) -> str:
    """Return a line per row; columns without values are left out. ``room``: columns of the terminal."""
    columns = {
        "EMA std": [_number(row["width"]) for row in rows],
        "cfg": [_number(row["cfg"]) for row in rows],
        "interval": [_interval(row["cfg_interval"]) for row in rows],
        "images": [f"{row['images']:,}" for row in rows],
        **{title: [_figure(row, name) for row in rows] for name, title in _FIGURES.items()},
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return table([list(shown), *map(list, zip(*shown.values(), strict=True))], left=(), room=room)


def draw(path: Path, rows: Sequence[dict[str, Any]], best: dict[str, Any]) -> None:
    """Write the FID over guidance scales, or over widths if these alone vary; a curve per width and interval.

    Args:
        path: picture to write.
        rows: of equally many images each.
        best: the row of the best combination with all images, which is a point of its own.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    over = "cfg" if len({row["cfg"] for row in rows}) > 1 else "width"
    title = {"cfg": "guidance scale", "width": "relative std of the average"}[over]
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for interval in _intervals(row, rows):
            of_width = [] if over == "width" or row["width"] is None else [f"EMA std {row['width']:g}"]
            of_interval = [] if interval is None else [f"interval {_interval(interval)}"]
            name = ", ".join([*of_width, *of_interval]) or f"{row['images']:,} images each"
            curves.setdefault(name, []).append((_place(row, over), row["fid"]))
    with figure_for(path, (7.0, 4.5)) as figure:
        axes = figure.subplots()
        for number, (name, points) in enumerate(curves.items()):
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=_COLOURS[number % len(_COLOURS)], label=name)
        label = f"best, {best['images']:,} images: {best['fid']:.2f}"
        axes.plot(_place(best, over), best["fid"], "*", color="black", markersize=13, label=label, linestyle="none")
        axes.set(xlabel=title, ylabel="FID", title=f"FID of {rows[0]['images']:,} images by {title}")
        axes.legend()


def _intervals(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the intervals of the curves that have a row: without guidance it is a point of all of its width."""
    if row["cfg"] != 1.0:
        return [row["cfg_interval"]]
    guided = [each["cfg_interval"] for each in rows if each["width"] == row["width"] and each["cfg"] != 1.0]
    return [interval for number, interval in enumerate(guided) if interval not in guided[:number]] or [None]


def _place(row: dict[str, Any], over: str) -> float:
    return float(row[over] or 0.0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _interval(value: Sequence[float] | None) -> str:
    return "" if value is None else "{:g}-{:g}".format(*value)


def _figure(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else format(value, _DIGITS[name])
