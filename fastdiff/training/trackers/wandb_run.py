"""A run of Weights & Biases."""

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from fastdiff import sanitize
from fastdiff.config.run_record import as_json
from fastdiff.config.trackers import PROJECT
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.background import FINISH_S
from fastdiff.training.trackers.identity import keep_run_id, run_id

INIT_S = 30.0
"""Timeout in seconds for the first answer of a server."""
_UNANSWERED = re.compile(
    "timed out|timeout|deadline exceeded|giving up|connection refused|unreachable|no such host", re.IGNORECASE
)
"""Messages of wandb about a slow or unreachable server; all its errors have one class."""

WANDB_ID = "wandb-id"
"""File of the run folder with the wandb id that a resumed run continues."""


class WandbRun:
    """A wandb run named after the run folder, with its files there.

    What the user has set for wandb goes before these defaults, by a variable such as WANDB_NAME or in a settings file.
    wandb accepts each step once: after a resume it keeps the first values of repeated steps. ConfigError: wandb refuses
    the run, or a variable of it has a wrong value.
    """

    def __init__(self, state: TrainState) -> None:
        import wandb

        self._wandb: Any = wandb
        sys.argv[1:] = map(sanitize.argument, sys.argv[1:])  # which wandb records, whenever it looks
        if state.config.output.failed_saves:
            logging.raiseExceptions = False  # a full disk fails wandb's own log, with a traceback for every line
        if os.environ.get("WANDB_DISABLED"):
            log.warning("wandb does not read WANDB_DISABLED; WANDB_MODE=disabled switches it off")
        try:
            settings = wandb.setup().settings
            options = _options(state, settings)
            timeouts = _timeouts(settings)
            self.finish_s = timeouts["finish_timeout"]
            self._run: Any = self._begin({**options, "settings": wandb.Settings(**timeouts)})
        except ValidationError as error:
            raise ConfigError(_wrong_setting(error)) from None
        except wandb.errors.Error as error:
            said = sanitize.message(" ".join(str(error).split()))
            raise ConfigError(
                f"wandb refuses the run: {said}; log in with `wandb login`, set WANDB_MODE=offline, or "
                "leave it out of --output.report_to"
            ) from None
        if "id" not in options and settings.mode != "disabled":
            keep_run_id(state, WANDB_ID, self._run.id)

    def _begin(self, options: dict[str, Any]) -> Any:
        try:
            return self._wandb.init(**options)
        except self._wandb.errors.CommError as error:
            if not _UNANSWERED.search(str(error)):  # the server has answered and refuses
                raise
        folder = options.get("dir") or self._wandb.setup().settings.root_dir
        log.warning(
            f"wandb's server does not answer within {options['settings'].init_timeout:g} s; the run is recorded in "
            f"{folder}/wandb, from where `wandb sync` uploads it"
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


def _options(state: TrainState, settings: Any) -> dict[str, Any]:
    """Return the arguments of ``wandb.init``: those of the run, and defaults for what the user leaves open."""
    given = _given(settings)
    of_fields = {
        "project": ("project", PROJECT),
        "run_name": ("name", state.folder.name),
        "root_dir": ("dir", str(state.folder)),
    }
    options: dict[str, Any] = {name: value for field, (name, value) in of_fields.items() if field not in given}
    if state.config.output.project is not None:
        options["project"] = state.config.output.project
    if not given & {"run_id", "resume_from"}:
        options["id"] = run_id(state, WANDB_ID)
    if not given & {"resume", "resume_from", "fork_from"}:  # wandb takes one of them
        options["resume"] = "allow"
    return {**options, "config": sanitize.tree(as_json(state.config))}


def _timeouts(settings: Any) -> dict[str, float]:
    """Return the timeouts in seconds: the user's, or ours."""
    ours = {"init_timeout": INIT_S, "finish_timeout": FINISH_S}
    return {name: getattr(settings, name) if name in _given(settings) else value for name, value in ours.items()}


def _given(settings: Any) -> set[str]:
    """Return the fields of wandb's settings that a variable or a settings file gives; an empty variable gives none."""
    return {name for name in settings.model_fields_set if getattr(settings, name) not in (None, "")}


def _wrong_setting(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    where = f"its setting {name}, WANDB_{name.upper()} or in a settings file" if name else "its settings"
    return f"wandb refuses {where}: {first['msg']}; correct it"
