"""Where the numbers and images of a run are shown while it goes on: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.launch import as_json
from fastdiff.state import TrainState

WANDB_ID = "wandb-id"
"""File of the run folder with the run's id, under which wandb goes on after a resume."""


class Board(Protocol):
    """One place to look at."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""

    def close(self, *, failed: bool) -> None:
        """Write what is left, and whether the run ended in an error."""


class Boards:
    """All boards of a run, open on rank 0; on the other ranks there is none and nothing is shown.

    Leaving the context closes them.

    Args:
        state: the run; all ranks make this together.

    Raises:
        ConfigError: on every rank: wandb refuses the run.
    """

    def __init__(self, state: TrainState) -> None:
        self._boards: list[Board] = []
        state.world.on_first(lambda: self._open(state))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        for board in self._boards:
            board.scalars(values, step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""
        for board in self._boards:
            board.images(images, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for board in self._boards:
            with suppress(OSError):  # what could not be written has been reported when it was tried
                board.close(failed=kind is not None)

    def _open(self, state: TrainState) -> None:
        for name in state.config.output.report_to:
            self._boards.append(_TensorBoard(state) if name == "tensorboard" else _Wandb(state))


def require_installed(report_to: Sequence[str]) -> None:
    """Refuse a board whose package is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    if "wandb" in report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--output.report_to wandb needs wandb, which is not installed: pip install 'fastdiff[wandb]'; or leave it "
            "out"
        )


class _TensorBoard:
    """Events in ``tensorboard/`` of the run folder; what was shown after the step of a resume is hidden."""

    def __init__(self, state: TrainState) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only rank 0 needs it, and it takes a second

        self._writer = SummaryWriter(str(state.folder / "tensorboard"), purge_step=state.progress.steps + 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        for caption, pixels in images.items():
            self._writer.add_images(f"validation/{caption}", pixels, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """A run in wandb, called as the run folder, with its files there.

    wandb takes no step twice: after a resume it shows the first values of the steps that were done again.
    """

    def __init__(self, state: TrainState) -> None:
        import wandb

        self._wandb: Any = wandb
        try:
            self._run: Any = wandb.init(
                project=state.config.output.project,
                name=state.folder.name,
                dir=str(state.folder),
                id=_wandb_id(state.folder),
                resume="allow",
                config=as_json(state.config),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"wandb refuses the run: {' '.join(str(error).split())}; log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave it out of --output.report_to"
            ) from None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        shown = [
            self._wandb.Image(image.permute(1, 2, 0).numpy(), caption=caption)
            for caption, pixels in images.items()
            for image in pixels
        ]
        self._run.log({"validation": shown}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _wandb_id(folder: Path) -> str:
    """The id that the run has in wandb, new for a new folder."""
    path = folder / WANDB_ID
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
