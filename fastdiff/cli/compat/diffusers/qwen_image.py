"""train_dreambooth_lora_qwen_image.py; defaults are theirs."""

from fastdiff.cli.compat.diffusers.dreambooth import NEWER, SHARED, dreambooth
from fastdiff.cli.compat.table import Defaults, Meaning

_LLAMA = "meta-llama/Meta-Llama-3.1-8B-Instruct"
_UNREAD = "it is of the script for HiDream, and this one does not read it"
_DEFAULTS: Defaults = SHARED | NEWER | {
    "output_dir": "hidream-dreambooth-lora", "pretrained_tokenizer_4_name_or_path": _LLAMA,
    "pretrained_text_encoder_4_name_or_path": _LLAMA, "caption_dropout": 0.0,
}  # fmt: skip

QWEN_IMAGE = dreambooth(
    "qwen-image-lora",
    "dreambooth-qwen-image-lora",
    _DEFAULTS,
    posterior="each-step",
    tokens=1024,
    own={
        "pretrained_tokenizer_4_name_or_path": Meaning(told=_UNREAD),
        "pretrained_text_encoder_4_name_or_path": Meaning(told=_UNREAD),
    },
)
