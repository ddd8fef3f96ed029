"""``README.md`` of an exported model: what it is made of, and how it is used."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config import RunConfig
from fastdiff.diffusers_dit import FOLDER, SAME_TIMES
from fastdiff.export_weights import ExportedWeights
from fastdiff.model_config import AdmConfig, DiTConfig, ModelConfig, PretrainedConfig, UNetConfig
from fastdiff.noise.levels import GAMMA
from fastdiff.objective_config import PREDICTION_TYPES, DiffusionConfig, Prediction
from fastdiff.saved import Saved, constant_name
from fastdiff.timestep_config import TimestepConfig
from fastdiff.trained import config_of

_SAMPLES = "samples.png"
_NORMAL = {"logit_normal": (0.0, 1.0), "log_normal": (-1.2, 1.2)}
"""Mean and standard deviation, where none are given."""
_GROUPS = 32
"""Of every group norm in the classes of improved-diffusion and guided-diffusion, which have no argument for it."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the examples of a card find the model."""

    out: Path
    """Its folder."""
    repo_id: str | None = None
    """Its id on the Hugging Face hub, if it goes there; the examples then use that."""

    def __str__(self) -> str:
        return self.repo_id or str(self.out)

    @property
    def imports(self) -> str:
        """What ``file`` needs."""
        return "from huggingface_hub import hf_hub_download\n" if self.repo_id else ""

    def file(self, name: str) -> str:
        """Code for the path of one of its files."""
        return f'hf_hub_download("{self.repo_id}", "{name}")' if self.repo_id else f'"{self.out / name}"'


def write_card(
    folder: Path, run: Path, saved: Saved, weights: ExportedWeights, format_: str, dtype: str, place: Place
) -> None:
    """Write the card, and copy the newest picture of the run that is not newer than the checkpoint.

    Args:
        folder: of the exported files.
        run: run folder.
        saved: the checkpoint that was exported.
        weights: which of its weights.
        format_: of the exported files.
        dtype: of the exported weights.
        place: where the examples find the model.
    """
    config = config_of(saved)
    step = int(saved.manifest["progress"]["steps"])
    picture = _newest_picture(run, step)
    if picture is not None:
        shutil.copyfile(picture, folder / _SAMPLES)
    facts = "\n".join(f"| {name} | {value} |" for name, value in _facts(config, saved, weights, dtype).items())
    shown = f"![samples drawn in the training]({_SAMPLES})\n\n" if picture is not None else ""
    text = (
        f"---\n{_front_matter(config, format_)}---\n\n"
        f"# {run.resolve().name}\n\n"
        f"{_subject(config, format_)}, trained with fastdiff.\n\n"
        f"{shown}## Training\n\n| | |\n| --- | --- |\n{facts}\n\n"
        f"## Use\n\n{use_of(config, format_, place, step)}\n"
        "## License\n\nNot stated yet: it is for the owner of this model to choose, and the licenses of the base model "
        "and of the data bind it.\n"
    )
    (folder / "README.md").write_text(text)


def _newest_picture(run: Path, step: int) -> Path | None:
    pictures = {int(path.stem.removeprefix("step-")): path for path in (run / "samples").glob("step-*[0-9].png")}
    return pictures[max(known)] if (known := [number for number in pictures if number <= step]) else None


def _front_matter(config: RunConfig, format_: str) -> str:
    kind = config.model.kind
    tags = ["fastdiff", *([kind] if kind != "unet" else []), *(["lora"] if format_ == "lora" else [])]
    lines = ["tags:", *(f"- {tag}" for tag in tags)]
    if kind == "unet":
        lines.append("pipeline_tag: text-to-image")
    if kind == "unet" or format_ == "diffusers":
        lines.append("library_name: diffusers")
    if config.pretrained.weights and _base_name(config) == config.pretrained.path:  # the hub knows no local folder
        lines.append(f"base_model: {config.pretrained.path}")
    return "".join(line + "\n" for line in lines)


def _subject(config: RunConfig, format_: str) -> str:
    model = config.model
    network = "A text-to-image UNet"
    if isinstance(model, DiTConfig):
        network = "A class-conditional diffusion transformer"
    if isinstance(model, AdmConfig):
        condition = "A class-conditional" if model.classes else "An unconditional"
        network = f"{condition} {'super-resolution ' if model.low_res_size else ''}UNet in pixel space"
    return f"A LoRA adapter of {network[0].lower()}{network[1:]}" if format_ == "lora" else network


def _facts(config: RunConfig, saved: Saved, weights: ExportedWeights, dtype: str) -> dict[str, object]:
    manifest, optim = saved.manifest, config.optim
    pretrained, lora = config.pretrained, config.lora
    facts: dict[str, object] = {"Steps": manifest["progress"]["steps"], "Samples seen": manifest["progress"]["samples"]}
    if pretrained.path:
        facts["Base model" if pretrained.weights else "Text encoder and autoencoder"] = f"`{_base_name(config)}`"
    if lora.rank:
        facts["LoRA"] = f"rank {lora.rank}, alpha {lora.numerator:g}, base weights in {_bits(config)}"
    return facts | {
        "Data set (sha256)": f"`{manifest['dataset']}`",
        "Samples per step": config.batch.samples,
        "Optimizer": f"{optim.name}, betas {optim.betas}, decay {optim.weight_decay:g}, clipped at {optim.clip:g}",
        "Learning rate": f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} steps of warm-up",
        **objective_facts(config.objective, config.timesteps),
        "Precision": config.performance.precision,
        "Weights": f"{weights.description}, in {dtype}",
        "Software": ", ".join(f"{name} {manifest['versions'][name]}" for name in ("fastdiff", "torch", "deepspeed")),
    }


def _bits(config: RunConfig) -> str:
    return "full precision" if config.lora.quantize == "none" else config.lora.quantize.replace("bit", " bits")


def objective_facts(objective: DiffusionConfig, timesteps: TimestepConfig) -> dict[str, str]:
    """What was learned, from which noise, in words."""
    process = {
        "ddpm": f"{objective.schedule} schedule of {objective.timesteps} steps"
        + (", zero terminal SNR" if objective.zero_terminal_snr else ""),
        "flow": f"flow matching, {objective.path} path",
        "edm": f"EDM, sigma of the data {objective.sigma_data:g}",
    }[objective.process]
    changes = {
        f", offset {objective.noise_offset:g}": objective.noise_offset,
        f", {objective.multires_noise_iterations} coarser resolutions": objective.multires_noise_iterations,
        f", input perturbation {objective.input_perturbation:g}": objective.input_perturbation,
        ", DREAM": objective.dream,
    }
    weighting = objective.weighted
    given = objective.p2_gamma if weighting == "p2" else objective.min_snr_gamma
    number = GAMMA.get(weighting) if given is None else given
    gamma = "" if number is None else f", gamma {number:g}"
    cosine = f", cosine distance times {objective.cosine_weight:g}" if objective.cosine_weight else ""
    variance = f", {objective.variance} variance" if objective.process == "ddpm" else ""
    return {
        "Noise": process + "".join(words for words, given in changes.items() if given),
        "Prediction": objective.predicted + variance,
        "Loss": f"{objective.loss}, weighting {weighting}{gamma}{cosine}",
        "Timesteps": _drawn(timesteps, objective),
        "Conditions dropped": f"{objective.condition_dropout:g}",
    }


def _drawn(drawn: TimestepConfig, objective: DiffusionConfig) -> str:
    density, biased = drawn.of(objective), drawn.biased(objective.timesteps)
    usual = _NORMAL.get(density, (0.0, 1.0))
    mean, std = (known if given is None else given for given, known in zip((drawn.mean, drawn.std), usual, strict=True))
    details = {
        f"mean {mean:g}, standard deviation {std:g}": density in _NORMAL,
        f"scale {drawn.mode_scale:g}": density == "mode",
        f"shift {drawn.shift:g}": drawn.shift != 1.0,
        f"{drawn.bias_multiplier:g} times as often": density in ("earlier", "later", "range"),
        f"{drawn.bias_portion:g} of them": density in ("earlier", "later"),
        f"{biased.start} to {biased.stop}": density == "range",
        "stratified": drawn.stratified,
    }
    return ", ".join([density, *(words for words, given in details.items() if given)])


def use_of(config: RunConfig, format_: str, place: Place, step: int = 0) -> str:
    """The code, in Markdown, that uses an exported model; ``step`` is in the names of published checkpoints."""
    model = config.model
    told = "" if isinstance(model, UNetConfig) else _told(model, config.objective, format_)
    average = f"ema_{constant_name(config.ema.rates[0])}_" if config.ema.rates else "model"
    published = {
        "dit": ("dit.pt", '["ema"]'),
        "dit-training": (f"{step:07d}.pt", '["ema"]'),
        "iddpm": (f"{average}{step:06d}.pt", ""),
    }
    if format_ in published:
        name, entry = published[format_]
        return _python(_load_pickle(place, name, entry, namespace=format_ == "dit-training")) + _shape(model) + told
    if format_ == "diffusers" and not isinstance(model, UNetConfig):
        return _network_of_diffusers(model, place) + told
    if format_ == "safetensors" or not isinstance(model, UNetConfig):
        file = place.file("pytorch_lora_weights.safetensors" if format_ == "lora" else "model.safetensors")
        code = f"{place.imports}from safetensors.torch import load_file\n\nweights = load_file({file})"
        return _python(code) + _shape(model) + told
    draw = 'image = pipeline("a photograph of a cat").images[0]\nimage.save("image.png")'
    if format_ == "lora":
        load = f'pipeline.load_lora_weights("{place}")\n'
        return _python(f"{_start(_base_name(config), _version(config.pretrained))}{load}{draw}")
    if config.pretrained.path:
        return _python(_start(str(place)) + draw)
    code = f'unet = UNet2DConditionModel.from_pretrained("{place}", subfolder="unet")'
    return _python(f"from diffusers import UNet2DConditionModel\n\n{code}")


def _load_pickle(place: Place, name: str, entry: str, *, namespace: bool) -> str:
    load = f"torch.load({place.file(name)}, weights_only=True){entry}"
    if not namespace:
        return f"{place.imports}import torch\n\nstate_dict = {load}"
    return (
        f"{place.imports}from argparse import Namespace\n\nimport torch\n\n"
        f"with torch.serialization.safe_globals([Namespace]):\n    state_dict = {load}"
    )


def _network_of_diffusers(model: DiTConfig | AdmConfig, place: Place) -> str:
    """A class of diffusers that is not one of text to image."""
    dit = isinstance(model, DiTConfig)
    kind, subfolder = ("DiTTransformer2DModel", FOLDER) if dit else ("UNet2DModel", "unet")
    code = f'from diffusers import {kind}\n\nmodel = {kind}.from_pretrained("{place}", subfolder="{subfolder}")\n'
    if not dit:
        none = f"\nClass {model.classes} stands for no class.\n" if model.classes else ""
        return _python(code.rstrip()) + none
    return (
        _python(code + SAME_TIMES.rstrip()) + "\nThe last two lines set the frequencies of the timesteps that DiT was "
        f"published with and this one trained with; those of diffusers are others. Class {model.classes} stands for no "
        "class.\n"
    )


def _start(path: str, options: str = "") -> str:
    load = f'DiffusionPipeline.from_pretrained("{path}"{options})'
    return f"from diffusers import DiffusionPipeline\n\npipeline = {load}\n"


def _version(pretrained: PretrainedConfig) -> str:
    """Arguments that choose the version of a pipeline."""
    given = {"revision": pretrained.revision, "variant": pretrained.variant}
    return "".join(f', {name}="{value}"' for name, value in given.items() if value is not None)


def _base_name(config: RunConfig) -> str:
    """What the card calls the pretrained pipeline: its id on the hub, or the last part of a path on this machine."""
    path = config.pretrained.path
    is_id = _HUB_ID.fullmatch(path) and not config.pretrained.is_file and not Path(path).exists()
    return path if is_id else Path(path).resolve().name


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def _shape(model: ModelConfig) -> str:
    """How the class of the published models is called for these weights."""
    if isinstance(model, UNetConfig):
        return ""
    whose, called = _of_dit(model) if isinstance(model, DiTConfig) else _of_adm(model)
    other = "" if isinstance(model, DiTConfig) else other_norms(model)
    return f"\nThe names are those of {whose}, whose class takes them as `{called}`.\n" + (other and f"\n{other}\n")


def other_norms(model: AdmConfig) -> str:
    """A sentence about group norms that the published classes do not have; empty where they have the same.

    No shape tells the groups, so that their class loads the weights as well as its own.
    """
    if model.norm_num_groups == _GROUPS:
        return ""
    whose, _ = _of_adm(model)
    return (
        f"Each group norm of this network has {model.norm_num_groups} groups, and in the class of {whose} {_GROUPS}: "
        "unless that is changed there, the class cannot be made, or computes something else with these weights."
    )


def _of_dit(model: DiTConfig) -> tuple[str, str]:
    return "the published DiT", (
        f"DiT(input_size={model.size}, patch_size={model.patch}, in_channels={model.channels}, "
        f"hidden_size={model.hidden}, depth={model.depth}, num_heads={model.heads}, mlp_ratio={model.mlp_ratio}, "
        f"num_classes={model.classes}, learn_sigma={model.learn_sigma})"
    )


def _of_adm(model: AdmConfig) -> tuple[str, str]:
    """Whose class, and its call.

    That of guided-diffusion alone has a size of the heads, blocks that change sizes, a second order of qkv, multiples
    that are no integers, and a finest level of another width than that of the network.
    """
    multiples = tuple(int(each) if each == int(each) else each for each in model.channel_mult)  # floats, when read
    whole = all(isinstance(each, int) for each in multiples) and multiples[0] == 1
    guided = bool(model.head_channels or model.resblock_updown or model.qkv_order == "qkv_major" or not whole)
    more = {
        "image_size": model.size,
        "num_head_channels": model.head_channels or -1,
        "resblock_updown": model.resblock_updown,
        "use_new_attention_order": model.qkv_order == "qkv_major",
    }
    arguments = {
        **(more if guided else {}),
        "in_channels": model.channels,
        "model_channels": model.width,
        "out_channels": model.channels * (2 if model.learn_sigma else 1),
        "num_res_blocks": model.res_blocks,
        "attention_resolutions": tuple(model.size // size for size in model.attention_resolutions),
        "dropout": model.dropout,
        "channel_mult": multiples,
        "num_classes": model.classes or None,
        "num_heads": model.heads,
        "use_scale_shift_norm": model.scale_shift_norm,
    }
    kind = "SuperResModel" if model.low_res_size else "UNetModel"
    called = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return ("guided-diffusion" if guided else "improved-diffusion"), f"{kind}({called})"


def _told(model: DiTConfig | AdmConfig, objective: DiffusionConfig, format_: str) -> str:
    """What a model is told and returns where the sampler of its class takes it for something else."""
    where = " in the first half of its channels" if model.learn_sigma else ""
    whose = "DiT" if isinstance(model, DiTConfig) else "its class"
    if objective.process == "ddpm":
        rescaled = objective.rescale_timesteps and objective.timesteps != 1000
        told = f"\nIt is told t * 1000 / {objective.timesteps} (`rescale_timesteps`) instead of the timestep t.\n"
        return (told if rescaled else "") + _returned(objective.predicted, where, whose, format_)
    returned = {"flow": "the velocity dx/dt", "epsilon": "the noise", "score": "the score"}
    told, returns = {
        "flow": ("x and 1000 t (t = 0: the data, 1: noise)", returned.get(objective.predicted)),
        "edm": ("c_in x and ln(sigma) / 4", "F of the denoiser c_skip x + c_out F (Karras et al. 2022)"),
    }[objective.process]
    return f"\nIt is told {told} and returns {returns}{where}: the sampler that comes with {whose} cannot use it.\n"


def _returned(predicted: Prediction, where: str, whose: str, format_: str) -> str:
    """What a model of discrete steps returns, if not the noise, and which sampler knows it."""
    if predicted == "epsilon":
        return ""
    returns = "the mean of the step before" if predicted == "previous_x" else predicted
    sampler = f"the sampler that comes with {whose}"
    use = f"{sampler} cannot use it"
    if format_ == "diffusers":
        name = PREDICTION_TYPES.get(predicted)
        use = f'give the scheduler `prediction_type="{name}"`' if name else "no scheduler of diffusers can use it"
    elif predicted == "x0":
        use = f"create {sampler} with `predict_xstart=True`"
    elif predicted == "previous_x" and whose != "DiT":
        use = f"create {sampler} with `model_mean_type=ModelMeanType.PREVIOUS_X`"
    return f"\nIt returns {returns}{where}: {use}.\n"
