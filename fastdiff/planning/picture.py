"""Picture of the memory of a rank: one stacked bar per option, and what the GPU has."""

import io
from collections.abc import Sequence
from pathlib import Path

from fastdiff.durations import in_words
from fastdiff.errors import ConfigError
from fastdiff.optional_packages import pip_install
from fastdiff.outputs import write_output
from fastdiff.planning.options import Planned

_CLASSES = {
    "weights": "#2b6cb0",
    "masters": "#63b3ed",
    "gradients": "#2f855a",
    "moments": "#9ae6b4",
    "averages": "#b794f4",
    "buffers": "#718096",
    "graphs": "#9c4221",
    "activations": "#dd6b20",
    "workspace": "#f6ad55",
    "update, save or validation": "#cbd5e0",
}


def parts(planned: Planned) -> dict[str, float]:
    """Return the GiB of each class; they add up to the peak."""
    memory = planned.memory
    found = {name: getattr(memory, name) for name in _CLASSES if hasattr(memory, name)}
    found["update, save or validation"] = memory.peak - sum(found.values())
    return {name: max(size, 0.0) / 2**30 for name, size in found.items()}


def draw(path: Path, best: Sequence[Planned], samples: int) -> None:
    """Write the picture; each bar also says how long the run of ``samples`` takes.

    Raises:
        ConfigError: there is nothing to draw, or no matplotlib.
        OSError: with the path; it cannot be written.
    """
    if not best:
        raise ConfigError(f"--picture {path}: no option fits, so there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"--picture {path} needs matplotlib: {pip_install('matplotlib')}") from None
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(best)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(best)
    for name, colour in _CLASSES.items():
        sizes = [parts(planned)[name] for planned in best]
        axes.barh(range(len(best)), sizes, left=lefts, color=colour, label=name, height=0.65)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    for row, planned in enumerate(best):
        axes.plot([planned.room / 2**30] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="room of a rank")
    axes.set_yticks(range(len(best)), [_label(planned, samples) for planned in best])
    axes.invert_yaxis()
    axes.set_xlabel("GiB of a rank at the peak of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, content.getvalue())


def _label(planned: Planned, samples: int) -> str:
    option = planned.option
    again = ", recomputed" if option.recompute else ""
    again += f" {option.recomputes} blocks" if option.stored_blocks else ""
    moments = "" if option.bits == 32 else f", {option.bits}-bit moments"
    time = in_words(3600 * planned.hours(samples).middle)
    return f"{option.gpus.name}, ZeRO-{option.stage}, {option.micro} samples{again}{moments}: {time}"
