"""Images of the prompts by the base model of a fine-tuning, drawn once and kept in the run folder."""

import io
import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.load import build_network, pretrained
from fastdiff.models.lora import switch, unchanging
from fastdiff.run_files import read_inside
from fastdiff.sampling.captioned_grid import pictures_of_grid, plain_grid
from fastdiff.sampling.image_grid import encoded
from fastdiff.training.callbacks.previews import averaged_model, memory_beside_training, watched
from fastdiff.training.callbacks.shared_base import SharedBase, shares_base
from fastdiff.training.state import TrainState

_FILE = "samples/base.png"
_IDENTITY = "fastdiff-base"
"""Keyword of the text in the file that says of what these images are a function."""
_MOST_BYTES = 2**30
_FIELDS = {
    "prompts": "--validation.prompts",
    "images_per_prompt": "--validation.images_per_prompt",
    "references": "their references",
}


class BasePictures:
    """Images of the prompts by the base model: with the adapter off, or by the weights before the first step.

    They are a function of prompts, sampler with its seed, and base weights. A resumed run takes those of its folder.
    If they are missing, or something of this has changed, they are drawn anew: with an adapter from its base, otherwise
    from the pretrained weights, which are the first ones of the run.

    Args:
        sampler: of the images, resolved.
        references: latents of the pictures that the prompts refer to; None: they refer to none.
    """

    def __init__(self, sampler: SamplerConfig, references: Tensor | None = None) -> None:
        self._sampler = sampler
        self._references = None if references is None else sha256(references.contiguous().numpy().tobytes()).hexdigest()
        self._identity: dict[str, Any] = {}
        self._first: str | None = None
        """Digest of the base weights of the pictures in the run folder; None: there are none."""
        self.pictures: Tensor | None = None
        """``[N, 3, H, W]`` uint8 on the CPU of rank 0; None: there are none, or not yet."""

    @staticmethod
    def path(state: TrainState) -> Path:
        """Return their file in the run folder."""
        return state.folder / _FILE

    def are_kept(self, state: TrainState) -> bool:
        """Return whether the run folder has them, on every rank; then they are read on rank 0."""
        return state.world.on_rank0(lambda: self._read(state))

    def model(self, state: TrainState) -> nn.Module | None:
        """Return the base model on every rank's device; None: its weights cannot be had, which is told."""
        dtype = DTYPES[state.config.performance.precision]
        if shares_base(state, dtype):
            device = state.world.device
            off = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in state.engine.shapes.items()}
            off |= {name: value.to(dtype) for name, value in unchanging(state.engine.module, state.config.lora).items()}
            return watched(state, SharedBase(state.engine.module, off))
        if state.config.lora.rank:
            model = averaged_model(state, dtype)
            switch(model, on=False)
            return model
        if not state.progress.steps:
            return averaged_model(state, dtype, averaged=False)
        try:
            state.world.on_rank0(lambda: self._check_pretrained(state))
            return state.world.on_all_ranks(lambda: self._pretrained(state, dtype))
        except (ConfigError, StorageError) as error:
            if state.world.is_first:
                log.warning(
                    f"the pictures have no column of the base model, because {self.path(state)} has none of these "
                    f"prompts and sampler, and the weights before the first step cannot be read: {error}"
                )
            return None

    def keep(self, pictures: Tensor, state: TrainState) -> None:
        """Keep ``[N, 3, H, W]`` uint8, in the run folder as well; called by rank 0."""
        self.pictures = pictures.cpu()
        grid = plain_grid(self.pictures, len(state.config.validation.prompts))
        state.files.write(self.path(state), encoded(grid, ".png", {_IDENTITY: json.dumps(self._identity)}))

    def _check_pretrained(self, state: TrainState) -> None:
        """Refuse pretrained weights that differ from those of the earlier pictures, as far as there are some."""
        now = self._identity["base"] = _digest(state)
        require(self._first in (None, now), f"{state.config.pretrained.path} has changed since then")

    def _pretrained(self, state: TrainState, dtype: torch.dtype) -> nn.Module:
        with memory_beside_training(state):
            return watched(state, build_network(state.config).to(state.world.device, dtype).eval())

    def _read(self, state: TrainState) -> bool:
        now = self._identity = _identity(state, self._sampler, self._references)
        found = _stored(state)
        if found is None:
            return False
        known, pictures = found
        self._first = known.get("base")
        changed = sorted(name for name in {*now, *known} - {"base"} if now.get(name) != known.get(name))
        # The base of an adapter is compared when a run is resumed, and that of full tuning is gone by then.
        if changed or (not state.progress.steps and known.get("base") != now["base"]):
            what = ", ".join(_FIELDS.get(name, name) for name in changed) or "the pretrained weights"
            log.info(f"the pictures of the base model are drawn anew: {what} changed")
            return False
        self.pictures = pictures
        return True


def _identity(state: TrainState, sampler: SamplerConfig, references: str | None) -> dict[str, Any]:
    """Return everything that determines the images, except versions and hardware."""
    config = state.config
    how = {f"sampler.{name}": value for name, value in asdict(sampler).items() if value is not None}
    identity = {
        "prompts": config.validation.prompts,
        "images_per_prompt": config.validation.images_per_prompt,
        "size": config.model.size,
        "quantize": config.lora.quantize,
        "base": _base_digest(state),
        **how,
    }
    if references is not None:
        identity["references"] = references
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found


def _base_digest(state: TrainState) -> str | None:
    """Return the digest of the base weights; None: they cannot be read, or only the first step needs it."""
    known: str | None = state.metadata.get("base")
    if known is not None or state.progress.steps:
        return known
    return _digest(state)


def _digest(state: TrainState) -> str:
    pipeline = pretrained(state.config.pretrained)
    return pipeline.digest(pipeline.denoiser)


def _stored(state: TrainState) -> tuple[dict[str, Any], Tensor] | None:
    """Return what determined the images in the run folder, and them; None: there are none, or no intact ones."""
    from PIL import Image

    count = len(state.config.validation.prompts)
    try:
        content = read_inside(state.folder, _FILE, _MOST_BYTES)
        with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
            known = json.loads(picture.text[_IDENTITY])  # type: ignore[attr-defined]  # of a PNG
            levels = torch.from_numpy(np.array(picture.convert("RGB")))
            columns, rows = len(known["prompts"]), int(known["images_per_prompt"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, SyntaxError) as error:
        log.warning(f"{state.folder / _FILE}: no pictures of the base model ({error}); they are drawn anew")
        return None
    if columns != count:
        return known, torch.empty(0)  # of other prompts
    side = levels.shape[1] // columns
    if (side * rows, side * columns) != tuple(levels.shape[:2]):
        log.warning(f"{state.folder / _FILE}: {levels.shape[1]} x {levels.shape[0]} pixels are no grid; drawn anew")
        return None
    return known, pictures_of_grid(levels, (3, side, side))
