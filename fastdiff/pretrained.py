"""A Stable Diffusion pipeline on disk or on the Hugging Face hub, opened part by part.

Only what is asked for is loaded. Each part has a digest of its weights, so that latents, text embeddings and the run
that uses them can be told to belong together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.model_config import UNetConfig

_ENCODERS = ("text_encoder", "text_encoder_2")
_DESCRIPTIONS = ("*.json", "*.txt")
_WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}


@dataclass(frozen=True)
class Pretrained:
    """A pipeline in the layout of diffusers: ``unet/``, ``vae/``, ``text_encoder/``, ``tokenizer/``, ``scheduler/``.

    Args:
        path: folder, or id on the Hugging Face hub, which is downloaded into its cache once.
        revision: branch, tag or commit of an id.
        variant: variant of the weight files, for example ``fp16``.

    Raises:
        ConfigError: from every member: no such pipeline, or a part of it is missing or of another kind.
    """

    path: str
    revision: str | None = None
    variant: str | None = None

    @cached_property
    def folder(self) -> Path:
        """Where the pipeline lies on this machine; weights come when they are asked for."""
        if Path(self.path).is_dir():
            return Path(self.path)
        return self._download(_DESCRIPTIONS)

    @property
    def is_autoencoder(self) -> bool:
        """Whether this is an autoencoder alone and no pipeline, such as stabilityai/sd-vae-ft-ema."""
        return not (self.folder / "vae").is_dir() and (self.folder / "config.json").is_file()

    def unet_config(self) -> UNetConfig:
        """Shape of its UNet."""
        return UNetConfig.from_diffusers(self.json("unet/config.json"))

    def unet_weights(self) -> dict[str, Tensor]:
        """Parameters of its UNet, fp32 on the CPU."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = {}
        for path in self.weight_files("unet"):
            found.update(load_file(path))
        return {name: value.float() for name, value in found.items()}

    def scheduler_config(self) -> dict[str, Any]:
        """What its scheduler says of the noise: ``prediction_type``, ``beta_schedule`` and others."""
        return self.json("scheduler/scheduler_config.json")

    def vae(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """Its autoencoder (diffusers' ``AutoencoderKL``), frozen."""
        from diffusers import AutoencoderKL

        return self._frozen(AutoencoderKL, "vae", device, dtype)

    def text(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TextEncoder:
        """Its one or two text encoders with their tokenizers, frozen."""
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        encoders, tokenizers = [], []
        for name in _ENCODERS:
            if (self.folder / name).is_dir():
                kind = CLIPTextModelWithProjection if name == "text_encoder_2" else CLIPTextModel
                encoders.append(self._frozen(kind, name, device, dtype))
                tokenizers.append(
                    CLIPTokenizer.from_pretrained(self.folder, subfolder=name.replace("text_encoder", "tokenizer"))
                )
        if not encoders:
            raise ConfigError(f"{self.path} has no text_encoder; expected a Stable Diffusion pipeline")
        zeros = bool(self.json("model_index.json").get("force_zeros_for_empty_prompt"))
        return TextEncoder(tokenizers, encoders, torch.device(device), null_is_zero=zeros)

    def digest(self, part: str) -> str:
        """Sha256 of the weights and the architecture of ``vae``, ``unet`` or ``text_encoder`` (both, if there are two).

        The names, dtypes, shapes and bytes of the tensors count, not how they are spread over files.
        """
        total = hashlib.sha256()
        for name in _ENCODERS if part == "text_encoder" else (part,):
            if self.folder_of(name).is_dir():
                total.update(self._digest_of(name).encode())
        return total.hexdigest()

    def weight_files(self, part: str) -> list[Path]:
        """The safetensors files of a part, in the chosen variant."""
        stem, folder = _WEIGHTS[part.removesuffix("_2")], self.folder_of(part)
        if not Path(self.path).is_dir():
            self._download([str((folder / f"{stem}*.safetensors").relative_to(self.folder))])
        # Without a variant neither model.fp16.safetensors nor model.non_ema.safetensors is meant.
        ending = rf"\.{re.escape(self.variant)}" if self.variant else ""
        name = re.compile(rf"{stem}{ending}(-\d+-of-\d+)?\.safetensors")
        files = sorted(path for path in folder.glob(f"{stem}*.safetensors") if name.fullmatch(path.name))
        if not files:
            wanted = f"{stem}.{self.variant}.safetensors" if self.variant else f"{stem}.safetensors"
            there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
            raise ConfigError(
                f"{folder} has no {wanted}; it has {there}. Use another --pretrained.variant, or save the pipeline "
                "again with safe_serialization=True"
            )
        return files

    def folder_of(self, part: str) -> Path:
        """Where the files of a part lie."""
        return self.folder if part == "vae" and self.is_autoencoder else self.folder / part

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the pipeline, or of one of its parts: ``model_index.json``, ``vae/config.json``."""
        part, _, rest = name.rpartition("/")
        path = self.folder_of(part) / rest
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); expected a Stable Diffusion pipeline as diffusers saves it"
            ) from None
        return dict(content)

    def _digest_of(self, part: str) -> str:
        from safetensors import safe_open

        found: dict[str, str] = {}
        for path in self.weight_files(part):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    value = file.get_tensor(name).contiguous()
                    digest = hashlib.sha256(value.view(-1).view(torch.uint8).numpy().data)
                    found[name] = f"{value.dtype} {tuple(value.shape)} {digest.hexdigest()}"
        config = {k: v for k, v in self.json(f"{part}/config.json").items() if not k.startswith(("_", "transformers_"))}
        return hashlib.sha256(json.dumps([config, found], sort_keys=True).encode()).hexdigest()

    def _frozen(self, kind: Any, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        import transformers

        self.weight_files(part)  # downloads them, and its message is clearer than the library's
        transformers.utils.logging.disable_progress_bar()
        model = kind.from_pretrained(self.folder_of(part), variant=self.variant, torch_dtype=dtype)
        return model.to(device).requires_grad_(False).eval()

    def _download(self, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=list(patterns)))
        except (OSError, ValueError, HFValidationError) as error:
            raise ConfigError(
                f"--pretrained.path {self.path}: neither a folder on this machine nor a pipeline on the Hugging Face "
                f"hub that can be reached ({str(error).splitlines()[0]})"
            ) from None


class TextEncoder:
    """Captions to the embeddings that the UNet is conditioned on, as the pipelines of diffusers make them.

    Args:
        tokenizers: one per encoder.
        encoders: CLIP text models; with two, as in SDXL, the last layers but one are joined and the second gives the
            pooled embedding (Podell et al. 2023, arXiv:2307.01952, section 2).
        device: where the encoders are.
        null_is_zero: whether "no caption" is a tensor of zeros (SDXL) and not the embedding of the empty caption.
    """

    def __init__(
        self, tokenizers: Sequence[Any], encoders: Sequence[Any], device: torch.device, *, null_is_zero: bool = False
    ) -> None:
        self._tokenizers, self._encoders, self._device = tokenizers, encoders, device
        self._null_is_zero = null_is_zero

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """``context [N, L, D]`` and, with two encoders, ``pooled [N, P]``, in the encoders' dtype.

        A caption with more tokens than the encoder has room for (77) is cut off.
        """
        outputs = [
            encoder(self._tokens(tokenizer, captions), output_hidden_states=True)
            for tokenizer, encoder in zip(self._tokenizers, self._encoders, strict=True)
        ]
        if len(outputs) == 1:
            return {"context": outputs[0].last_hidden_state}
        return {
            "context": torch.cat([output.hidden_states[-2] for output in outputs], dim=-1),
            "pooled": outputs[-1].text_embeds,
        }

    def null(self) -> dict[str, Tensor]:
        """The condition of no caption, ``context [L, D]`` and ``pooled [P]``: what guidance starts from."""
        empty = {name: value[0] for name, value in self([""]).items()}
        return {name: torch.zeros_like(value) for name, value in empty.items()} if self._null_is_zero else empty

    def _tokens(self, tokenizer: Any, captions: Sequence[str]) -> Tensor:
        tokens: Mapping[str, Tensor] = tokenizer(
            list(captions),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        return tokens["input_ids"].to(self._device)
