"""Images of the prompts of a run, drawn while it trains."""

from __future__ import annotations

from torch import Tensor

from fastdiff.backends import DTYPES
from fastdiff.boards import Boards
from fastdiff.callbacks import Callback, averaged_model, draw_together, memory_beside_training
from fastdiff.model_config import UNetConfig
from fastdiff.network import pretrained
from fastdiff.progress import Every
from fastdiff.state import TrainState
from fastdiff.text_to_image import as_bytes, decode, encode_prompts, repeated, save_grid


class PromptImages(Callback):
    """Draws ``samples/step-N.png`` with the averaged weights: one column per prompt, on all ranks together.

    What it costs: between drawings the autoencoder on the CPU of rank 0 and the embeddings of the prompts; while
    drawing, on each rank's device, a copy of the whole network in the precision of the training, under any ZeRO stage,
    and the activations of one forward pass of at most ``--batch.micro`` samples; then, on rank 0's, the autoencoder in
    fp32 and the decoding of one image. The text encoder is in memory once, at the start, on the CPU of rank 0.

    Args:
        state: a run of a UNet with a pretrained pipeline; all ranks make this together.
        boards: show the images too.

    Raises:
        FastdiffError: on every rank: the pipeline cannot be read.
    """

    def __init__(self, state: TrainState, boards: Boards) -> None:
        self._every = Every(state.config.validation.every)
        self._boards = boards
        self._drawn = -1
        self._pipeline = pretrained(state.config)
        self._condition, self._null = state.world.on_first(
            lambda: encode_prompts(self._pipeline, state.config.validation.prompts, _network(state))
        )
        state.world.on_first(self._load_autoencoder)

    def on_step(self, state: TrainState) -> None:
        """Draw when due."""
        if self._every.due(state.progress):
            self._draw(state)

    def on_end(self, state: TrainState) -> None:
        """Draw the last images, unless they are drawn."""
        if self._drawn != state.progress.steps:
            self._draw(state)

    def _load_autoencoder(self) -> None:
        self._vae = self._pipeline.vae()

    def _draw(self, state: TrainState) -> None:
        self._drawn = state.progress.steps
        config, network = state.config, _network(state)
        latents = draw_together(
            state,
            averaged_model(state, DTYPES[config.performance.precision]),
            repeated(self._condition, config.validation.images_per_prompt),
            null=self._null,
            shape=(network.channels, network.size, network.size),
            steps=config.validation.steps,
            cfg=config.validation.guidance_scale,
            clip=False,
            batch=max(1, config.batch.per_rank(state.world.size) // 2),  # guidance doubles it
        )
        state.world.on_first(lambda: self._show(latents, state))

    def _show(self, latents: Tensor, state: TrainState) -> None:
        prompts, device = state.config.validation.prompts, state.world.device
        with memory_beside_training(device):
            try:
                pixels = decode(self._vae.to(device), latents)
            finally:
                self._vae.to("cpu")
        rows = state.config.validation.images_per_prompt
        save_grid(state.folder / "samples" / f"step-{state.progress.steps:08d}.png", pixels, rows=rows)
        shown = {prompt: as_bytes(pixels[column :: len(prompts)]) for column, prompt in enumerate(prompts)}
        self._boards.images(shown, state.progress.steps)


def _network(state: TrainState) -> UNetConfig:
    assert isinstance(state.config.model, UNetConfig)
    return state.config.model
