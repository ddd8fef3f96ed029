"""The files of a diffusers pipeline on disk or on the Hugging Face hub: configurations, weights, digests.

Each part has a digest of its weights, to check that latents, text embeddings and the run belong together.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.config.networks.pretrained import HUB_ID
from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded

INDEX = "model_index.json"
"""Class of each part of a pipeline."""
_DENOISERS = ("unet", "transformer")
_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")
"""Suffixes of configurations, vocabularies and chat templates."""
_CARD = "README.md"
_LARGEST_CARD = 1 << 20
_LICENSE = re.compile(r"[\w .()+-]{1,100}")
_LARGEST_DESCRIPTION = 64 << 20
"""Maximum size of a JSON file in bytes; the vocabulary of CLIP is one."""
_OF_TRANSFORMERS = (*_TEXT_ENCODERS, "safety_checker", "image_encoder")
"""Parts whose files of weights are named as transformers names them."""
_USUAL_CLASSES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL"}
"""Classes of parts for which neither the pipeline nor their configuration names one, as in old pipelines."""


@dataclass(frozen=True)
class PipelineFiles:
    """A pipeline in the layout of diffusers: ``unet/`` or ``transformer/``, ``vae/``, ``text_encoder/``, ...

    Args:
        path: folder, or id on the Hugging Face hub, which is downloaded into its cache once.
        revision: branch, tag or commit of an id.
        variant: variant of the weight files, for example ``fp16``; parts other than the network fall back to files
            without it.
        flag: that gave the path, for messages.
        max_tokens: of a caption, for text encoders with captions of variable length; None: as the pipeline.

    Raises:
        ConfigError: from every member: unknown pipeline, or a part is missing or of another kind.
    """

    path: str
    revision: str | None = None
    variant: str | None = None
    flag: str = "--pretrained.path"
    max_tokens: int | None = None

    @cached_property
    def folder(self) -> Path:
        """Folder of the pipeline on this machine; weights are downloaded on demand."""
        if self._is_local:
            return Path(self.path)
        return self._download([*(f"*{suffix}" for suffix in DESCRIPTIONS), _CARD], self.revision)

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

    @cached_property
    def denoiser(self) -> str:
        """Folder of its network: ``unet`` or ``transformer``."""
        return next((part for part in _DENOISERS if (self.folder / part).is_dir()), _DENOISERS[0])

    @cached_property
    def text_parts(self) -> tuple[str, ...]:
        """Folders of its text encoders; empty: it has none."""
        return tuple(part for part in _TEXT_ENCODERS if (self.folder / part).is_dir())

    @cached_property
    def pipeline_class(self) -> str:
        """Class of the pipeline that ``model_index.json`` names; empty: none."""
        name = self.json(INDEX).get("_class_name") if (self.folder / INDEX).is_file() else ""
        return name if isinstance(name, str) else ""

    @property
    def license(self) -> str:
        """License that its card names, an identifier or, of one without, its own name; empty: none."""
        from huggingface_hub import ModelCard
        from yaml import YAMLError

        try:
            named = ModelCard(
                read_bounded(self.folder / _CARD, _LARGEST_CARD).decode(), ignore_metadata_errors=True
            ).data
        except (OSError, ValueError, YAMLError):
            return ""
        found = named.get("license_name") or named.get("license")
        return found if isinstance(found, str) and _LICENSE.fullmatch(found) else ""

    def class_of(self, part: str) -> str:
        """Return the class of a part that ``model_index.json`` names, otherwise that of its own ``config.json``."""
        index = self.json(INDEX) if (self.folder / INDEX).is_file() else {}
        match index.get(part):
            case [str(), str(name)]:
                return name
        config = self.json(f"{part}/config.json")
        names = [config.get("_class_name"), *(config.get("architectures") or ()), _USUAL_CLASSES.get(part)]
        return next((name for name in names if isinstance(name, str)), "that nothing names")

    def weights(self, part: str) -> dict[str, Tensor]:
        """Return the tensors of a part by name, fp32 on the CPU."""
        return dict(self.tensors(part))

    def tensors(self, part: str, *, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors of a part one after another, fp32 on the CPU; ``on_meta``: only their shapes."""
        for path in self.weight_files(part):
            yield from tensors_of(path, on_meta=on_meta)

    def tensors_named(self, part: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Read some tensors of a part, fp32 on the CPU, without the others; those that it lacks are absent."""
        found: dict[str, Tensor] = {}
        for path in self.weight_files(part):
            with readable(path), safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name).float() for name in {*names}.intersection(file.keys())}
        return found

    def digest(self, part: str) -> str:
        """Return the sha256 of weights and architecture of ``vae``, ``unet`` or ``text_encoder`` (all of them).

        It covers the names, dtypes, shapes and bytes of the tensors, not their distribution over files.
        """
        total = hashlib.sha256()
        for name in self.text_parts if part == "text_encoder" else (part,):
            if self.folder_of(name).is_dir():
                total.update(self._digest_of(name).encode())
        return total.hexdigest()

    def weight_files(self, part: str, *, required: bool = True) -> list[Path]:
        """Return the safetensors files of a part, downloaded from the hub; ``required``: none is an error."""
        variants = [self.variant] if part == self.denoiser else [self.variant, None]
        for variant in dict.fromkeys(variants):
            if files := self._files_of(part, variant):
                return files
        if not required:
            return []
        folder, stem = self.folder_of(part), _stem(part)
        alone = self.variant and part == self.denoiser
        wanted = f"{stem}.{self.variant}.safetensors" if alone else f"{stem}.safetensors"
        there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise ConfigError(
            f"{folder} has no {wanted}; it has {there}. Use another --pretrained.variant, or save the pipeline "
            "again with safe_serialization=True"
        )

    def has_weights(self, part: str) -> bool:
        """Whether the part is a model, such as ``vae`` but not ``tokenizer``."""
        return (self.folder_of(part) / "config.json").is_file()

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
            raise ConfigError(f"{path} cannot be read ({error}); expected a pipeline as diffusers saves it") from None
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
        folder, stem = self.folder_of(part), _stem(part) + (f".{variant}" if variant else "")
        if not self._is_local:
            place = (folder / stem).relative_to(self.folder)
            self._download([f"{place}.safetensors", f"{place}-*.safetensors"], self.commit)
        name = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors")
        return sorted(path for path in folder.glob("*.safetensors") if name.fullmatch(path.name))

    def load_part(self, kind: Any, part: str, device: torch.device | str, dtype: torch.dtype) -> Any:
        """Load a part, frozen, by ``from_pretrained`` of its class in diffusers or transformers; no pickle is read."""
        import transformers

        files, folder = self.weight_files(part), self.folder_of(part)
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


def _stem(part: str) -> str:
    """Return the name of the part's files of weights, up to the first dot or dash."""
    return "model" if part in _OF_TRANSFORMERS else "diffusion_pytorch_model"


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
    """Turn a library's error into a ConfigError that names the unreadable file or folder."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} cannot be read ({reason}); is it complete? Copy or download it again") from None
