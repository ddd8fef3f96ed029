"""A run of trackio, on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastdiff import sanitize
from fastdiff.config.run_record import as_json
from fastdiff.config.trackers import PROJECT
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.background import FINISH_S
from fastdiff.training.trackers.identity import run_id

TRACKIO_ID = "trackio-id"
"""File of the run folder with the end of the run's name in trackio, which a resumed run continues."""


class TrackioRun:
    """A run in the project of ``--output.project``, or ``trackers.PROJECT``, named after the run folder and its id.

    ``trackio show`` draws it; trackio keeps its data in TRACKIO_DIR. ConfigError: trackio refuses the run.
    """

    finish_s = FINISH_S

    def __init__(self, state: TrainState) -> None:
        import trackio

        self._trackio: Any = trackio
        name = f"{state.folder.name}-{run_id(state, TRACKIO_ID)[:6]}"
        project = state.config.output.project or PROJECT
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # twelve lines about itself
                self._run: Any = trackio.init(
                    project=project, name=name, resume="allow", embed=False, auto_log_gpu=False,
                    auto_log_cpu=False, config=sanitize.tree(as_json(state.config)),
                )  # fmt: skip
        except Exception as error:  # of its own classes and of the hub's
            said = sanitize.message(" ".join(str(error).split()))
            raise ConfigError(f"trackio refuses the run: {said}; leave it out of --output.report_to") from None
        log.info(f"trackio: run {name}; `trackio show --project {project}` draws it")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        self._run.log(dict(values), step=step)

    def images(self, images: Mapping[str, Tensor], step: int, section: str) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""
        shown = {
            f"{section}/{caption}" + (f" {number}" if len(pixels) > 1 else ""): self._trackio.Image(
                image.permute(1, 2, 0).numpy(), caption=caption
            )
            for caption, pixels in images.items()
            for number, image in enumerate(pixels)
        }
        self._run.log(shown, step=step)

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Write the rest."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
