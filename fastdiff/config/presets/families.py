"""Fine-tuning of the families of diffusers' transformers: an adapter, or all weights.

Noise levels and layers are those of diffusers' DreamBooth scripts; other trainers shift more (--timesteps.shift).
"""

from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.qwen_image import QwenImageConfig
from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.config.networks.z_image import ZImageConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.timesteps import Density, TimestepConfig

_FLUX2 = "black-forest-labs/FLUX.2-klein-base-4B"
_Z_IMAGE = "Tongyi-MAI/Z-Image"
_SD35 = "stabilityai/stable-diffusion-3.5-medium"
_QWEN_IMAGE = "Qwen/Qwen-Image"


def flux2_klein_lora() -> RunConfig:
    """A LoRA of Flux.2-klein 4B (base) at 1024 px for ten to some hundred pictures.

    fastdiff encode IMAGES data/photos --pretrained black-forest-labs/FLUX.2-klein-base-4B --resolution 1024
    fastdiff train --preset flux2-klein-lora --data.path data/photos

    The 9B by --pretrained.path black-forest-labs/FLUX.2-klein-base-9B, with its own license. Uniform noise levels
    without a shift, and the attention's and the joint projections of the blocks, as diffusers'
    train_dreambooth_lora_flux2_klein.py; rank 16. The text encoder is read at layers 9, 18 and 27, as the pipeline
    does (the script's default is of another model). License: Apache-2.0 (4B), FLUX non-commercial (9B).

    Not measured yet.
    """
    return _lora("flux2-klein-lora", Flux2Config(), _FLUX2)


def flux2_klein() -> RunConfig:
    """Fine-tune Flux.2-klein 4B (base), all weights.

    fastdiff encode IMAGES data/finetune --pretrained black-forest-labs/FLUX.2-klein-base-4B --resolution 1024
    fastdiff train --preset flux2-klein --data.path data/finetune --deepspeed_config zero3

    Noise levels as flux2-klein-lora. License: Apache-2.0. Not measured yet.
    """
    return _full("flux2-klein", Flux2Config(), _FLUX2)


def z_image_lora() -> RunConfig:
    """A LoRA of Z-Image at 1024 px for ten to some hundred pictures.

    fastdiff encode IMAGES data/photos --pretrained Tongyi-MAI/Z-Image --resolution 1024
    fastdiff train --preset z-image-lora --data.path data/photos

    Uniform noise levels with the shift of the pipeline's scheduler, the projections of every attention, refiners
    included, as diffusers' train_dreambooth_lora_z_image.py; rank 16. License: Apache-2.0. Not measured yet.
    """
    return _lora("z-image-lora", ZImageConfig(), _Z_IMAGE)


def z_image() -> RunConfig:
    """Fine-tune Z-Image, all weights.

    fastdiff encode IMAGES data/finetune --pretrained Tongyi-MAI/Z-Image --resolution 1024
    fastdiff train --preset z-image --data.path data/finetune --deepspeed_config zero3

    Noise levels as z-image-lora. License: Apache-2.0. Not measured yet.
    """
    return _full("z-image", ZImageConfig(), _Z_IMAGE)


def sd35_medium_lora() -> RunConfig:
    """A LoRA of Stable Diffusion 3.5 medium at 1024 px for ten to some hundred pictures.

    fastdiff encode IMAGES data/photos --pretrained stabilityai/stable-diffusion-3.5-medium --resolution 1024
    fastdiff train --preset sd35-medium-lora --data.path data/photos

    Large by --pretrained.path stabilityai/stable-diffusion-3.5-large. Logit-normal noise levels with the shift of the
    pipeline's scheduler, and the projections of every joint attention, as diffusers' train_dreambooth_lora_sd3.py;
    rank 16. License: Stability AI Community License. Not measured yet.
    """
    return _lora("sd35-medium-lora", SD3Config(), _SD35, density="logit_normal")


def sd35_medium() -> RunConfig:
    """Fine-tune Stable Diffusion 3.5 medium, all weights.

    fastdiff encode IMAGES data/finetune --pretrained stabilityai/stable-diffusion-3.5-medium --resolution 1024
    fastdiff train --preset sd35-medium --data.path data/finetune

    Noise levels as sd35-medium-lora. License: Stability AI Community License. Not measured yet.
    """
    return _full("sd35-medium", SD3Config(), _SD35, density="logit_normal")


def qwen_image_lora() -> RunConfig:
    """A LoRA of Qwen-Image at 1024 px for ten to some hundred pictures, on frozen weights in 4 bits.

    fastdiff encode IMAGES data/photos --pretrained Qwen/Qwen-Image --resolution 1024
    fastdiff train --preset qwen-image-lora --data.path data/photos

    Uniform noise levels without a shift, the projections of the attention to the picture, as diffusers'
    train_dreambooth_lora_qwen_image.py; rank 16. --lora.quantize none for GPUs with 80 GB. License: Apache-2.0.

    Not measured yet.
    """
    return _lora("qwen-image-lora", QwenImageConfig(), _QWEN_IMAGE, LoraConfig(rank=16, quantize="4bit"))


def qwen_image() -> RunConfig:
    """Fine-tune Qwen-Image, all weights, on 8 or more GPUs with 80 GB.

    fastdiff encode IMAGES data/finetune --pretrained Qwen/Qwen-Image --resolution 1024
    fastdiff train --preset qwen-image --data.path data/finetune --deepspeed_config zero2

    Noise levels as qwen-image-lora. License: Apache-2.0. Not measured yet.
    """
    return _full("qwen-image", QwenImageConfig(), _QWEN_IMAGE)


def _lora(
    name: str,
    model: DiffusersTransformerConfig,
    pipeline: str,
    lora: LoraConfig | None = None,
    density: Density = "uniform",
) -> RunConfig:
    batch, pictures_every = 8, 50
    return RunConfig(
        samples=300 * batch,
        model=model,
        pretrained=PretrainedConfig(path=pipeline, weights=True),
        lora=lora or LoraConfig(rank=16),
        objective=_objective(model),
        timesteps=TimestepConfig(density=density, shift="pipeline"),
        data=DataConfig(path="data/photos"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=AdamWConfig(lr=1e-4, weight_decay=0.01),
        ema=EmaConfig(rates=()),
        performance=PerformanceConfig(device="cuda", recompute=True),
        validation=ValidationConfig(captions=4, every=pictures_every),
        output=OutputConfig(folder=f"runs/{name}", log_every=10, checkpoint_every=pictures_every),
    )


def _full(name: str, model: DiffusersTransformerConfig, pipeline: str, density: Density = "uniform") -> RunConfig:
    batch = 64
    return RunConfig(
        samples=10_000 * batch,
        model=model,
        pretrained=PretrainedConfig(path=pipeline, weights=True),
        objective=_objective(model),
        timesteps=TimestepConfig(density=density, shift="pipeline"),
        data=DataConfig(path="data/finetune"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=AdamWConfig(name="adamw8bit", lr=1e-5, weight_decay=0.01),
        ema=EmaConfig(warmup=True),
        performance=PerformanceConfig(device="cuda", recompute=True),
        output=OutputConfig(folder=f"runs/{name}"),
    )


def _objective(model: DiffusersTransformerConfig) -> FlowConfig:
    assert model.flow_convention is not None
    return FlowConfig(convention=model.flow_convention)
