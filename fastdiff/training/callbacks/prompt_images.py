"""Images of prompts during the training, for a fine-tuning beside those of the base model."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from fastdiff.conditions import REFERENCE
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.loading.training_set import references_of_captions
from fastdiff.errors import require
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.load import pretrained
from fastdiff.progress import Every
from fastdiff.sampling.captioned_grid import LAYOUT, captioned_grid
from fastdiff.sampling.image_grid import encoded, image_grid
from fastdiff.sampling.latent_statistics import open_autoencoder, statistics_in
from fastdiff.sampling.pipeline_sampler import is_fine_tuned, pipeline_sampler, usual_negative, with_scheduler
from fastdiff.sampling.references import encode_references
from fastdiff.sampling.text import as_bytes, encode_prompts, repeated
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.base_pictures import BasePictures
from fastdiff.training.callbacks.previews import (
    as_tensor,
    averaged_model,
    draw_together,
    memory_beside_training,
    path_of,
)
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers


class PromptImages(Callback):
    """Images of prompts in ``samples/step-N.png``, drawn by all ranks with the averaged weights.

    A fine-tuning has the prompts above them and, beside each, the image that the base model draws from the same noise
    (``BasePictures``); another run has one column per prompt.

    Prompts of an edit model have the references of ``--validation.references``, or, as captions of the data, those of
    their pictures.

    Memory between previews: the autoencoder, the embeddings and references of the prompts, and the images of the base
    model, on the CPU of rank 0. During a preview, on each rank's device: a copy of the whole network in the training
    precision, under any ZeRO stage, and the activations of one forward pass of at most ``--batch.micro`` samples. Then
    on the device of rank 0: the autoencoder in fp32 and the decoding of one image. The text encoder is in memory once,
    at the start, on the CPU of rank 0.

    Args:
        state: a run of a text-to-image network with a pretrained pipeline; all ranks construct this together.
        trackers: trackers that show the images too.

    Raises:
        FastdiffError: on every rank: the pipeline or a reference cannot be read.
    """

    account = "sampling"

    def __init__(self, state: TrainState, trackers: Trackers) -> None:
        self._every = Every(state.config.validation.every, state.config.validation.first)
        self._trackers = trackers
        self._drawn = -1
        self._pipeline = pretrained(state.config.pretrained)
        self._condition, self._null = state.world.on_rank0(
            lambda: encode_prompts(
                self._pipeline,
                state.config.validation.prompts,
                state.config.model,
                negative=usual_negative(state.config),
                references=self._references(state),
            )
        )
        self._sampler = _sampler(state.config)
        refers_to = self._condition.get(REFERENCE)
        self._base = BasePictures(self._sampler, refers_to) if is_fine_tuned(state.config) else None
        state.world.on_rank0(lambda: self._load_autoencoder(state))

    def on_start(self, state: TrainState) -> None:
        """Draw the images of the base model, unless they exist."""
        if self._base is None or self._base.are_kept(state):
            return
        model = self._base.model(state)
        if model is not None:
            latents = self._drawn_latents(state, model, self._sampler, base=True)
            base = self._base
            state.world.on_rank0(lambda: base.keep(as_bytes(self._decoded(latents, state)), state))

    def on_step(self, state: TrainState) -> None:
        """Draw when due."""
        if self._every.due(state.progress):
            self._draw(state)

    def rehearse(self, state: TrainState) -> None:
        """Draw with a single denoising step and decode, and keep nothing."""
        sampler = with_scheduler(replace(self._sampler, steps=1), state.config)
        latents = self._drawn_latents(state, self._model(state), sampler)
        state.world.on_rank0(lambda: self._decoded(latents[:1], state))

    def on_end(self, state: TrainState) -> None:
        """Draw the last images, unless they exist."""
        if self._drawn != state.progress.steps:
            self._draw(state)

    def _references(self, state: TrainState) -> Tensor | None:
        """Return what the prompts refer to, ``[prompts, N, C, h, w]``; None: nothing."""
        config, files = state.config, state.config.validation.references
        if not files:
            return references_of_captions(config, state.reader)
        each, prompts = config.model.references, len(config.validation.prompts)
        require(
            len(files) in (each, each * prompts),
            f"{len(files)} files of --validation.references: expected {each}, the references of each picture of the "
            f"data, for all prompts, or {each * prompts}, for the {prompts} prompts one after another",
        )
        paths, statistics = [Path(file) for file in files], statistics_in(state.metadata)
        found = encode_references(self._pipeline, paths, config.model.size, statistics, "--validation.references")
        return found.view(-1, each, *found.shape[1:])

    def _load_autoencoder(self, state: TrainState) -> None:
        self._autoencoder = open_autoencoder(self._pipeline, "cpu", statistics_in(state.metadata))

    def _draw(self, state: TrainState) -> None:
        self._drawn = state.progress.steps
        latents = self._drawn_latents(state, self._model(state), self._sampler)
        state.world.on_rank0(lambda: self._show(latents, state))

    def _model(self, state: TrainState) -> nn.Module:
        return averaged_model(state, DTYPES[state.config.performance.precision])

    def _drawn_latents(
        self, state: TrainState, model: nn.Module, sampler: SamplerConfig, *, base: bool = False
    ) -> Tensor:
        network = state.config.model
        return draw_together(
            state,
            model,
            repeated(self._condition, state.config.validation.images_per_prompt),
            sampler,
            null=self._null,
            shape=(network.channels, network.size, network.size),
            path=BasePictures.path(state) if base else None,
        )

    def _decoded(self, latents: Tensor, state: TrainState) -> Tensor:
        """Return pixels ``[N, 3, H, W]``, decoded on the device."""
        with memory_beside_training(state):
            try:
                return self._autoencoder.to(state.world.device).decode(latents)
            finally:
                self._autoencoder.to("cpu")

    def _show(self, latents: Tensor, state: TrainState) -> None:
        pixels = self._decoded(latents, state)
        shown = self._plain(pixels, state) if self._base is None else self._captioned(as_bytes(pixels), state)
        self._trackers.images(shown, state.progress.steps)

    def _plain(self, pixels: Tensor, state: TrainState) -> dict[str, Tensor]:
        """Write one column per prompt; return the images of each prompt."""
        prompts, rows = state.config.validation.prompts, state.config.validation.images_per_prompt
        state.files.write(path_of(state), encoded(image_grid(pixels, rows=rows), ".png"))
        return {prompt: as_bytes(pixels[column :: len(prompts)]) for column, prompt in enumerate(prompts)}

    def _captioned(self, now: Tensor, state: TrainState) -> dict[str, Tensor]:
        """Write the images under the prompts and beside those of the base model; return a picture of each prompt."""
        prompts, base = state.config.validation.prompts, None if self._base is None else self._base.pictures
        columns = {} if base is None else {"base": base.to(now.device)}
        columns[f"step {state.progress.steps:,}"] = now
        picture, layout = captioned_grid(prompts, columns)
        state.files.write(path_of(state), encoded(picture, ".png", {LAYOUT: layout.as_text()}))
        shown = {}
        for place, prompt in enumerate(prompts):
            own = {label: images[place :: len(prompts)] for label, images in columns.items()}
            shown[prompt] = as_tensor(captioned_grid([prompt], own)[0])
        return shown


def _sampler(config: RunConfig) -> SamplerConfig:
    """Return the sampler of the images: the pipeline's for a fine-tuned network, otherwise DPM-Solver++."""
    usual, steps = pipeline_sampler(config), config.validation.steps
    if usual is None:
        usual, steps = SamplerConfig(scheduler="dpmsolver++", cfg=7.5), 20 if steps is None else steps
    usual = replace(usual, clip=False, seed=config.seed)
    return with_scheduler(config.sampler(usual, steps=steps, cfg=config.validation.guidance_scale), config)
