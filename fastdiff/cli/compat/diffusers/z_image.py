"""train_dreambooth_lora_z_image.py; defaults are theirs."""

from fastdiff.cli.compat.diffusers.dreambooth import NEWER, SHARED, captioned, dreambooth
from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.table import Defaults
from fastdiff.cli.compat.translation import Note

_DEFAULTS: Defaults = SHARED | NEWER | {
    "output_dir": "z-image-dreambooth-lora", "do_fp8_training": False, "guidance_scale": 3.5, "text_encoder_lr": 5e-6,
    "adam_weight_decay_text_encoder": 1e-3, "prior_generation_precision": None, "enable_npu_flash_attention": False,
    "fsdp_text_encoder": False,
}  # fmt: skip


def _differences(given: Given) -> list[Note]:
    flags = given.flags
    return [
        (
            flags.train_batch_size > 1 and not captioned(flags),
            f"--train_batch_size {flags.train_batch_size} with --instance_prompt: theirs repeats its list of "
            "embeddings at every step, which grows until the memory is full; here each picture has its one",
        ),
        (
            flags.with_prior_preservation,
            "--with_prior_preservation: theirs ends with an error, because it joins lists as tensors; here class "
            "pictures are trained",
        ),
        (
            flags.cache_latents and captioned(flags),
            "--cache_latents: latents and embeddings of a picture stay together; theirs numbers both by step, and "
            "draws the sizes of the batches again",
        ),
    ]


Z_IMAGE = dreambooth(
    "z-image-lora", "dreambooth-z-image-lora", _DEFAULTS, posterior="mean", tokens=512, more=_differences
)
