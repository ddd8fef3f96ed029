"""train_dreambooth_lora_flux2_klein.py; defaults are theirs."""

from fastdiff.cli.compat.diffusers.dreambooth import NEWER, SHARED, dreambooth
from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.table import Defaults, Meaning
from fastdiff.cli.compat.translation import Note
from fastdiff.errors import ConfigError

_LAYERS, _OF_DEV = [9, 18, 27], [10, 20, 30]
"""Layers of the text encoder that Flux.2-klein was trained with, and the script's default, those of Flux.2-dev."""
_DEFAULTS: Defaults = SHARED | NEWER | {
    "output_dir": "flux-dreambooth-lora", "do_fp8_training": False, "text_encoder_out_layers": _OF_DEV,
    "caption_dropout": 0.0, "guidance_scale": 3.5, "text_encoder_lr": 5e-6, "adam_weight_decay_text_encoder": 1e-3,
    "prior_generation_precision": None, "enable_npu_flash_attention": False, "fsdp_text_encoder": False,
}  # fmt: skip


def _layers(_: Given, layers: list[int]) -> list[str]:
    if layers not in (_LAYERS, _OF_DEV):
        raise ConfigError(
            f"--text_encoder_out_layers {' '.join(map(str, layers))}: the pipeline reads 9 18 27; leave it out"
        )
    return []


def _differences(given: Given) -> list[Note]:
    return [
        (
            given.flags.text_encoder_out_layers == _OF_DEV,
            "--text_encoder_out_layers 10 20 30, the default of theirs, are the layers of Flux.2-dev; Flux.2-klein was "
            "trained with 9 18 27, and its pipeline draws with them: the run has these",
        )
    ]


FLUX2_KLEIN = dreambooth(
    "flux2-klein-lora",
    "dreambooth-flux2-klein-lora",
    _DEFAULTS,
    posterior="mean",
    tokens=512,
    own={"text_encoder_out_layers": Meaning(int, _layers, several="+")},
    more=_differences,
)
