"""Names of the scripts that ``fastdiff compat`` translates, and of those that it refuses."""

TITLES = {
    "t2i": "diffusers' train_text_to_image.py",
    "t2i-lora": "diffusers' train_text_to_image_lora.py",
    "train_text_to_image_sdxl": "diffusers' train_text_to_image_sdxl.py",
    "train_text_to_image_lora_sdxl": "diffusers' train_text_to_image_lora_sdxl.py",
    "train_dreambooth_lora_flux2_klein": "diffusers' train_dreambooth_lora_flux2_klein.py",
    "train_dreambooth_lora_z_image": "diffusers' train_dreambooth_lora_z_image.py",
    "train_dreambooth_lora_sd3": "diffusers' train_dreambooth_lora_sd3.py",
    "train_dreambooth_lora_qwen_image": "diffusers' train_dreambooth_lora_qwen_image.py",
    "sdxl_train_network": "sdxl_train_network.py of kohya's sd-scripts",
    "sdxl_train": "sdxl_train.py of kohya's sd-scripts",
    "dit": "facebookresearch/DiT's train.py",
    "iddpm": "openai/improved-diffusion's image_train.py",
    "iddpm-sr": "openai/improved-diffusion's super_res_train.py",
}
"""The scripts in words, by the name in the command."""
ALIASES = {
    "train_text_to_image": "t2i",
    "train_text_to_image_lora": "t2i-lora",
    "train": "dit",
    "image_train": "iddpm",
    "super_res_train": "iddpm-sr",
}
"""Names of the files of scripts that have a shorter name."""
_INVERSION = (
    "textual inversion learns new tokens of a text encoder, and text encoders are not trained here; a LoRA learns a "
    "subject from as few pictures: see `fastdiff compat train_text_to_image_lora_sdxl` and t2i-lora"
)
_CONTROL = (
    "a ControlNet is a second network beside the one that draws, and no network here takes its control images; train "
    "it with that script"
)
_SUBJECT = (
    "no translation of its flags; encode its pictures with `fastdiff encode PHOTOS OUT --pretrained PIPELINE --caption "
    "PROMPT` and train with `fastdiff train --preset {preset}` (docs/recipes/photos-lora.md)"
)
_OF_KOHYA = (
    "no translation of its flags; `fastdiff encode` takes its folders, regularisation and --dataset_config as they are "
    "(docs/how-to/kohya-data.md), and `fastdiff train --preset {preset}` trains on them"
)
_NO_FAMILY = "no network here is of this family; `fastdiff compat --help` lists what is translated"
REFUSED = dict.fromkeys(
    (
        "textual_inversion", "textual_inversion_sdxl", "train_textual_inversion", "train_textual_inversion_XTI",
        "sdxl_train_textual_inversion",
    ),
    _INVERSION,
) | dict.fromkeys(
    (
        "train_controlnet", "train_controlnet_sdxl", "train_controlnet_sd3", "train_controlnet_flux",
        "train_control_net", "sdxl_train_control_net", "sdxl_train_control_net_lllite", "flux_train_control_net",
    ),
    _CONTROL,
) | dict.fromkeys(
    (
        "flux_train", "flux_train_network", "lumina_train", "lumina_train_network", "hunyuan_image_train_network",
        "anima_train", "anima_train_network", "train_dreambooth_flux", "train_dreambooth_lora_flux",
        "train_dreambooth_lora_flux_advanced", "train_dreambooth_lora_flux_kontext", "train_dreambooth_lora_flux2",
        "train_dreambooth_lora_hidream", "train_dreambooth_lora_lumina2",
    ),
    _NO_FAMILY,
) | {
    "train_dreambooth_lora_sdxl": _SUBJECT.format(preset="sdxl-lora"),
    "train_dreambooth_lora_sdxl_advanced": _SUBJECT.format(preset="sdxl-lora"),
    "train_dreambooth_lora": _SUBJECT.format(preset="sd15-lora"),
    "train_dreambooth": _SUBJECT.format(preset="sd15-finetune"),
    "train_network": _OF_KOHYA.format(preset="sd15-lora"),
    "train_db": _OF_KOHYA.format(preset="sd15-finetune"),
    "fine_tune": _OF_KOHYA.format(preset="sd15-finetune"),
    "sd3_train_network": _OF_KOHYA.format(preset="sd35-medium-lora"),
    "sd3_train": _OF_KOHYA.format(preset="sd35-medium"),
}  # fmt: skip
"""Why a script has no counterpart, by the name of its file."""
