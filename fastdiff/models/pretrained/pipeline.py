"""A pipeline of diffusers: its network, autoencoder and text encoders, by the records of their classes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastdiff.config.networks.registry import ModelConfig, network_of_class
from fastdiff.errors import ConfigError
from fastdiff.models.encoders.autoencoder import Autoencoder
from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace, TextEncoderFamily
from fastdiff.models.encoders.registry import encoder_of, faults_in, package_of
from fastdiff.models.encoders.text_encoders import TextEncoders
from fastdiff.models.pipeline_files import PipelineFiles


@dataclass(frozen=True)
class Pretrained(PipelineFiles):
    """A pipeline whose parts are loaded on demand, frozen."""

    def network_config(self) -> ModelConfig:
        """Return the shape of its network."""
        part = self.denoiser
        described = self.json(f"{part}/config.json")
        return network_of_class(self.class_of(part), self.path).from_diffusers(described)

    def scheduler_config(self) -> dict[str, Any]:
        """Return the configuration of its scheduler: ``prediction_type``, ``beta_schedule`` and others."""
        return self.json("scheduler/scheduler_config.json")

    @cached_property
    def _autoencoder(self) -> AutoencoderFamily:
        return encoder_of(AutoencoderFamily, (self.class_of("vae"),), self.path)

    @cached_property
    def latent_space(self) -> LatentSpace:
        """The latents of its autoencoder."""
        try:
            return self._autoencoder.space(self)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{self.folder_of('vae')} does not describe the latents of its autoencoder ({error!r}); download or "
                "save the pipeline again"
            ) from None

    def autoencoder(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Autoencoder:
        """Load its autoencoder, frozen."""
        with faults_in(self._autoencoder, f"the autoencoder {self._autoencoder.classes[0]}: load"):
            loaded = self._autoencoder.load(self, device, dtype)
        return Autoencoder(self._autoencoder, self.latent_space, loaded)

    @cached_property
    def text_family(self) -> TextEncoderFamily:
        """The record of its text encoders."""
        names = self.text_parts
        if "text_encoder" not in names:
            alone = f" but {names[0]}, like the refiner of SDXL" if names else ""
            raise ConfigError(f"{self.path} has no text_encoder{alone}; expected a text-to-image pipeline")
        family = encoder_of(TextEncoderFamily, tuple(map(self.class_of, names)), self.path, self.pipeline_class)
        if self.max_tokens is not None and family.tokens is None:
            flag = self.flag.replace("path", "max_tokens") if "." in self.flag else "--max-tokens"
            raise ConfigError(
                f"{flag} {self.max_tokens}: captions of {self.path} have the fixed length of "
                f"{' with '.join(family.classes)}; leave it out"
            )
        return family

    def text(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TextEncoders:
        """Load its text encoders with their tokenizers, frozen."""
        with faults_in(self.text_family, f"the text encoder {' with '.join(self.text_family.classes)}: load"):
            loaded = self.text_family.load(self, device, dtype)
        return TextEncoders(self.text_family, loaded, device, dtype)

    def packages(self, *, text: bool) -> dict[str, str]:
        """Return the packages that provide its encoders, as in ``run.json``; none for those of this package.

        Args:
            text: with the text encoders.
        """
        found = {"plugin.autoencoder": package_of(self._autoencoder)}
        if text:
            found["plugin.text_encoder"] = package_of(self.text_family)
        return {name: package for name, package in found.items() if package is not None}
