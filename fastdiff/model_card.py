"""``README.md`` of an exported model: what it is made of, and how it is used."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config import RunConfig
from fastdiff.export_weights import ExportedWeights
from fastdiff.model_config import DiTConfig, PretrainedConfig
from fastdiff.objective_config import DiffusionConfig
from fastdiff.saved import Saved
from fastdiff.timestep_config import TimestepConfig
from fastdiff.trained import config_of
from fastdiff_kernels.weights import GAMMA

_SAMPLES = "samples.png"
_NORMAL = {"logit_normal": (0.0, 1.0), "log_normal": (-1.2, 1.2)}
"""Mean and standard deviation, where none are given."""
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
    picture = _newest_picture(run, int(saved.manifest["progress"]["steps"]))
    if picture is not None:
        shutil.copyfile(picture, folder / _SAMPLES)
    facts = "\n".join(f"| {name} | {value} |" for name, value in _facts(config, saved, weights, dtype).items())
    shown = f"![samples drawn in the training]({_SAMPLES})\n\n" if picture is not None else ""
    text = (
        f"---\n{_front_matter(config, format_)}---\n\n"
        f"# {run.resolve().name}\n\n"
        f"{_subject(config, format_)}, trained with fastdiff.\n\n"
        f"{shown}## Training\n\n| | |\n| --- | --- |\n{facts}\n\n"
        f"## Use\n\n{use_of(config, format_, place)}\n"
        "## License\n\nNot stated yet: it is for the owner of this model to choose, and the licenses of the base model "
        "and of the data bind it.\n"
    )
    (folder / "README.md").write_text(text)


def _newest_picture(run: Path, step: int) -> Path | None:
    pictures = {int(path.stem.removeprefix("step-")): path for path in (run / "samples").glob("step-*[0-9].png")}
    return pictures[max(known)] if (known := [number for number in pictures if number <= step]) else None


def _front_matter(config: RunConfig, format_: str) -> str:
    lines = ["tags:", "- fastdiff", *(["- dit"] if isinstance(config.model, DiTConfig) else [])]
    if not isinstance(config.model, DiTConfig):
        lines += [*(["- lora"] if format_ == "lora" else []), "pipeline_tag: text-to-image", "library_name: diffusers"]
    if config.pretrained.weights and _base_name(config) == config.pretrained.path:  # the hub knows no local folder
        lines.append(f"base_model: {config.pretrained.path}")
    return "".join(line + "\n" for line in lines)


def _subject(config: RunConfig, format_: str) -> str:
    network = (
        "A class-conditional diffusion transformer" if isinstance(config.model, DiTConfig) else "A text-to-image UNet"
    )
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


def use_of(config: RunConfig, format_: str, place: Place) -> str:
    """The code, in Markdown, that uses an exported model."""
    dit = isinstance(config.model, DiTConfig)
    shape = _shape(config.model, config.objective) if isinstance(config.model, DiTConfig) else ""
    if format_ == "dit":
        load = f"torch.load({place.file('dit.pt')}, weights_only=True)"
        return _python(f'{place.imports}import torch\n\nstate_dict = {load}["ema"]') + shape
    if format_ == "safetensors" or dit:
        file = place.file("pytorch_lora_weights.safetensors" if format_ == "lora" else "model.safetensors")
        code = f"{place.imports}from safetensors.torch import load_file\n\nweights = load_file({file})"
        return _python(code) + shape
    draw = 'image = pipeline("a photograph of a cat").images[0]\nimage.save("image.png")'
    if format_ == "lora":
        load = f'pipeline.load_lora_weights("{place}")\n'
        return _python(f"{_start(_base_name(config), _version(config.pretrained))}{load}{draw}")
    if config.pretrained.path:
        return _python(_start(str(place)) + draw)
    code = f'unet = UNet2DConditionModel.from_pretrained("{place}", subfolder="unet")'
    return _python(f"from diffusers import UNet2DConditionModel\n\n{code}")


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


def _shape(model: DiTConfig, objective: DiffusionConfig) -> str:
    """How the class of the published models is called for these weights."""
    return (
        "\nThe names are those of the published DiT, whose class takes them as "
        f"`DiT(input_size={model.size}, patch_size={model.patch}, in_channels={model.channels}, "
        f"hidden_size={model.hidden}, depth={model.depth}, num_heads={model.heads}, mlp_ratio={model.mlp_ratio}, "
        f"num_classes={model.classes}, learn_sigma={model.learn_sigma})`.\n"
        f"{_told(objective, doubled=model.learn_sigma)}"
    )


def _told(objective: DiffusionConfig, *, doubled: bool) -> str:
    """What a model without discrete timesteps is told and returns, which the sampler of its class does not know.

    Args:
        objective: what it was trained for.
        doubled: it has outputs for a variance, which is of ddpm alone.
    """
    if objective.process == "ddpm":
        return ""
    returned = {"flow": "the velocity dx/dt", "epsilon": "the noise", "score": "the score"}
    told, returns = {
        "flow": ("x and 1000 t (t = 0: the data, 1: noise)", returned.get(objective.predicted)),
        "edm": ("c_in x and ln(sigma) / 4", "F of the denoiser c_skip x + c_out F (Karras et al. 2022)"),
    }[objective.process]
    where = " in the first half of its channels" if doubled else ""
    return f"\nIt is told {told} and returns {returns}{where}: the sampler that comes with DiT cannot use it.\n"
