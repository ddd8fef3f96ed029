"""A run of Weights & Biases."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastdiff import sanitize
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.output import OutputConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.identity import run_id

INIT_S, FINISH_S = 30.0, 60.0
"""Timeouts in seconds for the first answer of a server, and for the remaining uploads at the end."""
_UNANSWERED = re.compile(
    "timed out|timeout|deadline exceeded|giving up|connection refused|unreachable|no such host", re.IGNORECASE
)
"""Messages of wandb about a slow or unreachable server; all its errors have one class."""

WANDB_ID = "wandb-id"
"""File of the run folder with the wandb id that a resumed run continues."""


class WandbRun:
    """A wandb run named after the run folder, with its files there, unless WANDB_PROJECT, _NAME or _DIR say otherwise.

    wandb accepts each step once: after a resume it keeps the first values of repeated steps.
    """

    def __init__(self, state: TrainState) -> None:
        import wandb

        self._wandb: Any = wandb
        if state.config.output.failed_saves:
            logging.raiseExceptions = False  # a full disk fails wandb's own log, with a traceback for every line
        options = {
            "id": run_id(state, WANDB_ID),
            "resume": "allow",
            "config": sanitize.tree(as_json(state.config)),
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }
        project = state.config.output.project
        if project != OutputConfig.__dataclass_fields__["project"].default or not os.environ.get("WANDB_PROJECT"):
            options["project"] = project
        for name, value in (("name", state.folder.name), ("dir", str(state.folder))):
            if not os.environ.get(f"WANDB_{name.upper()}"):  # which wandb reads itself
                options[name] = value
        try:
            self._run: Any = self._begin(options)
        except wandb.errors.Error as error:
            said = sanitize.message(" ".join(str(error).split()))
            raise ConfigError(
                f"wandb refuses the run: {said}; log in with `wandb login`, set WANDB_MODE=offline, or "
                "leave it out of --output.report_to"
            ) from None

    def _begin(self, options: dict[str, Any]) -> Any:
        try:
            return self._wandb.init(**options)
        except self._wandb.errors.CommError as error:
            if not _UNANSWERED.search(str(error)):  # the server has answered and refuses
                raise
        log.warning(
            f"wandb's server does not answer within {INIT_S:g} s; the run is recorded in "
            f"{options.get('dir') or os.environ['WANDB_DIR']}/wandb, from where `wandb sync` uploads it"
        )
        self._wandb.teardown()  # otherwise the failed run would still be active
        return self._wandb.init(**options, mode="offline")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        self._run.log(dict(values), step=step)

    def images(self, images: Mapping[str, Tensor], step: int, section: str) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""
        shown = [
            self._wandb.Image(image.permute(1, 2, 0).numpy(), caption=caption)
            for caption, pixels in images.items()
            for image in pixels
        ]
        self._run.log({section: shown}, step=step)

    def close(self, *, failed: bool, patience_s: float) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))
