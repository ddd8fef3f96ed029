"""A Stable Diffusion pipeline on disk or on the Hugging Face hub, opened part by part.

Parts are loaded on demand. Each part has a digest of its weights, to check that latents, text embeddings and the run
belong together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.config.networks.pretrained import HUB_ID
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
_DESCRIPTIONS = ("*.json", "*.txt", "*.model")
_LARGEST_DESCRIPTION = 64 << 20
"""Maximum size of a JSON file in bytes; the vocabulary of CLIP is one."""
_WEIGHTS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
    "safety_checker": "model",
    "image_encoder": "model",
}
"""Parts with weights, and the names of their files up to the first dot or dash."""


@dataclass(frozen=True)
class Pretrained:
    """A pipeline in the layout of diffusers: ``unet/``, ``vae/``, ``text_encoder/``, ``tokenizer/``, ``scheduler/``.

    Args:
        path: folder, or id on the Hugging Face hub, which is downloaded into its cache once.
        revision: branch, tag or commit of an id.
        variant: variant of the weight files, for example ``fp16``; parts other than the UNet fall back to files without
            it.
        flag: that gave the path, for messages.

    Raises:
        ConfigError: from every member: unknown pipeline, or a part is missing or of another kind.
    """

    path: str
    revision: str | None = None
    variant: str | None = None
    flag: str = "--pretrained.path"

    @cached_property
    def folder(self) -> Path:
        """Folder of the pipeline on this machine; weights are downloaded on demand."""
        if self._is_local:
            return Path(self.path)
        return self._download(_DESCRIPTIONS, self.revision)

    @property
    def commit(self) -> str | None:
        """Current commit of ``revision``; None for a folder on this machine."""
        return None if self._is_local else self.folder.name

    @property
    def _is_local(self) -> bool:
        return Path(self.path).is_dir()

    @property
    def is_autoencoder(self) -> bool:
        """Whether this is only an autoencoder, such as stabilityai/sd-vae-ft-ema."""
        return not (self.folder / "vae").is_dir() and (self.folder / "config.json").is_file()

    def unet_config(self) -> UNetConfig:
        """Return the shape of its UNet."""
        return UNetConfig.from_diffusers(self.json("unet/config.json"))

    def unet_weights(self) -> dict[str, Tensor]:
        """Return the parameters of its UNet, fp32 on the CPU."""
        return dict(self.unet_parts())

    def unet_parts(self, *, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Read the parameters of its UNet one after another, fp32 on the CPU; ``on_meta``: only their shapes."""
        for path in self.weight_files("unet"):
            yield from tensors_of(path, on_meta=on_meta)

    def scheduler_config(self) -> dict[str, Any]:
        """Return the configuration of its scheduler: ``prediction_type``, ``beta_schedule`` and others."""
        return self.json("scheduler/scheduler_config.json")

    def vae(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """Load its autoencoder (diffusers' ``AutoencoderKL``), frozen."""
        from diffusers import AutoencoderKL

        return self._frozen(AutoencoderKL, "vae", device, dtype)

    def text(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TextEncoder:
        """Load its one or two text encoders with their tokenizers, frozen."""
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        kinds = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
        names = [name for name in TEXT_ENCODERS if (self.folder / name).is_dir()]
        if "text_encoder" not in names:
            alone = " but text_encoder_2, like the refiner of SDXL" if names else ""
            raise ConfigError(f"{self.path} has no text_encoder{alone}; expected a Stable Diffusion pipeline")
        encoders = [self._frozen(kinds[name], name, device, dtype) for name in names]
        tokenizers = [
            self._tokenizer(name.replace("text_encoder", "tokenizer"), encoder.config.max_position_embeddings)
            for name, encoder in zip(names, encoders, strict=True)
        ]
        zeros = bool(self.json("model_index.json").get("force_zeros_for_empty_prompt"))
        return TextEncoder(tokenizers, encoders, torch.device(device), null_is_zero=zeros)

    def digest(self, part: str) -> str:
        """Return the sha256 of weights and architecture of ``vae``, ``unet`` or ``text_encoder`` (one or two).

        It covers the names, dtypes, shapes and bytes of the tensors, not their distribution over files.
        """
        total = hashlib.sha256()
        for name in TEXT_ENCODERS if part == "text_encoder" else (part,):
            if self.folder_of(name).is_dir():
                total.update(self._digest_of(name).encode())
        return total.hexdigest()

    def weight_files(self, part: str, *, required: bool = True) -> list[Path]:
        """Return the safetensors files of a part in the chosen variant; downloads them if the pipeline is on the hub.

        Args:
            part: folder of the part; see ``has_weights``.
            required: whether missing files are an error.
        """
        variants = [self.variant] if part == "unet" else [self.variant, None]
        for variant in dict.fromkeys(variants):
            if files := self._files_of(part, variant):
                return files
        if not required:
            return []
        folder, stem = self.folder_of(part), _WEIGHTS[part]
        wanted = f"{stem}.{self.variant}.safetensors" if self.variant and part == "unet" else f"{stem}.safetensors"
        there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise ConfigError(
            f"{folder} has no {wanted}; it has {there}. Use another --pretrained.variant, or save the pipeline "
            "again with safe_serialization=True"
        )

    @staticmethod
    def has_weights(part: str) -> bool:
        """Whether the part, such as ``vae`` but not ``tokenizer``, has weights."""
        return part in _WEIGHTS

    def folder_of(self, part: str) -> Path:
        """Return the folder with the files of a part."""
        return self.folder if part == "vae" and self.is_autoencoder else self.folder / part

    def json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the pipeline, or of one of its parts: ``model_index.json``, ``vae/config.json``."""
        part, _, rest = name.rpartition("/")
        path = self.folder_of(part) / rest
        try:
            content = json.loads(read_bounded(path, _LARGEST_DESCRIPTION))
            if not isinstance(content, dict):
                raise ValueError("it holds no object")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); expected a Stable Diffusion pipeline as diffusers saves it"
            ) from None
        return content

    def _digest_of(self, part: str) -> str:
        found: dict[str, str] = {}
        for path in self.weight_files(part):
            with readable(path), safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    value = file.get_tensor(name).contiguous()
                    digest = hashlib.sha256(value.view(-1).view(torch.uint8).numpy().data)
                    found[name] = f"{value.dtype} {tuple(value.shape)} {digest.hexdigest()}"
        config = {k: v for k, v in self.json(f"{part}/config.json").items() if not k.startswith(("_", "transformers_"))}
        return hashlib.sha256(json.dumps([config, found], sort_keys=True).encode()).hexdigest()

    def _files_of(self, part: str, variant: str | None) -> list[Path]:
        folder, stem = self.folder_of(part), _WEIGHTS[part] + (f".{variant}" if variant else "")
        if not self._is_local:
            place = (folder / stem).relative_to(self.folder)
            self._download([f"{place}.safetensors", f"{place}-*.safetensors"], self.commit)
        name = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors")
        return sorted(path for path in folder.glob("*.safetensors") if name.fullmatch(path.name))

    def _frozen(self, kind: Any, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        import transformers

        files, folder = self.weight_files(part), self.folder_of(part)
        if part in TEXT_ENCODERS and (found := self.json(f"{part}/config.json").get("model_type")) != "clip_text_model":
            raise ConfigError(f"{folder / 'config.json'} has model_type {found}, expected clip_text_model: CLIP's text")
        has_variant = self.variant is not None and any(f".{self.variant}" in path.name for path in files)
        transformers.utils.logging.disable_progress_bar()
        with readable(folder):
            model, report = kind.from_pretrained(
                folder,
                variant=self.variant if has_variant else None,
                torch_dtype=dtype,
                use_safetensors=True,  # otherwise it would also load pickles
                local_files_only=True,
                output_loading_info=True,
            )
        # transformers and diffusers only log missing weights and leave them random.
        missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        if missing:
            raise ConfigError(
                f"{folder}: {missing[0]} is missing in {files[0].name} or has another shape than config.json says "
                f"({len(missing)} of the weights); download or save the pipeline again"
            )
        return model.to(device).requires_grad_(False).eval()

    def _tokenizer(self, name: str, length: int) -> Any:
        from transformers import CLIPTokenizer

        folder = self.folder / name
        if not any((folder / file).is_file() for file in ("vocab.json", "tokenizer.json")):
            raise ConfigError(f"{folder} has no vocab.json and no tokenizer.json; expected a tokenizer of CLIP")
        with readable(folder):
            tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.model_max_length > length:
            raise ConfigError(
                f"{folder}/tokenizer_config.json has model_max_length {tokenizer.model_max_length}, the text encoder "
                f"has room for {length}; expected at most that"
            )
        return tokenizer

    def _download(self, patterns: Sequence[str], revision: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        if not re.fullmatch(HUB_ID, self.path):
            raise ConfigError(
                f"{self.flag} {self.path}: neither a folder on this machine nor an id of the Hugging Face hub, such as "
                "stabilityai/stable-diffusion-2-base; check the path"
            )
        try:
            return Path(snapshot_download(self.path, revision=revision, allow_patterns=list(patterns)))
        except (OSError, ValueError, HFValidationError) as error:
            raise ConfigError(
                f"{self.flag} {self.path}: neither a folder on this machine nor a pipeline on the Hugging Face "
                f"hub that can be reached ({str(error).splitlines()[0]})"
            ) from None


def tensors_of(path: Path, *, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a safetensors file one after another, fp32 on the CPU; ``on_meta``: only their shapes."""
    with readable(path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            if on_meta:
                yield name, torch.empty(file.get_slice(name).get_shape(), device="meta")
            else:
                yield name, file.get_tensor(name).float()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a library's error into one that names the unreadable file or folder.

    Raises:
        ConfigError: instead of the library's error.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} cannot be read ({reason}); is it complete? Copy or download it again") from None


class TextEncoder:
    """Text encoder of a pipeline: captions to embeddings for the UNet, as in the pipelines of diffusers.

    Args:
        tokenizers: one per encoder.
        encoders: CLIP text models; with two, as in SDXL, the penultimate layers are concatenated and the second encoder
            gives the pooled embedding (Podell et al. 2023, arXiv:2307.01952, section 2).
        device: device of the encoders.
        null_is_zero: whether "no caption" is a tensor of zeros (SDXL) and not the embedding of the empty caption.
    """

    def __init__(
        self, tokenizers: Sequence[Any], encoders: Sequence[Any], device: torch.device, *, null_is_zero: bool = False
    ) -> None:
        self._tokenizers, self._encoders, self._device = tokenizers, encoders, device
        self._null_is_zero = null_is_zero

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights of all encoders."""
        for encoder in self._encoders:
            yield from encoder.parameters()

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, L, D]`` and, with two encoders, ``pooled [N, P]``, in the encoders' dtype.

        A caption that is longer than the encoder's limit (77 tokens) is truncated.
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

    def cut(self, captions: Sequence[str]) -> int | None:
        """Return how many tokens an encoder reads of a caption, if one of these has more; None: all are read whole."""
        for tokenizer in self._tokenizers:
            limit = int(tokenizer.model_max_length)
            # A token has at least one byte, and two mark the ends: most captions need not be tokenized.
            long = [caption for caption in captions if len(caption.encode()) + 2 > limit]
            if any(len(tokenizer(caption, verbose=False)["input_ids"]) > limit for caption in long):
                return limit
        return None

    def null(self) -> dict[str, Tensor]:
        """Return the null condition of classifier-free guidance, ``context [L, D]`` and ``pooled [P]``."""
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
