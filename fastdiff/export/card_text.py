"""Parts of a model card that several formats share: loading code, parameter names, and conventions of the network."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig, FlowConfig, ObjectiveConfig, Prediction
from fastdiff.errors import ConfigError
from fastdiff.models.family import PublishedClass, family_of
from fastdiff.models.pretrained.transport import sampler
from fastdiff.sampling.pipeline_sampler import settings_of

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of the model in the examples of a card."""

    out: Path
    """Folder of the model."""
    repo_id: str | None = None
    """Id on the Hugging Face hub, if the model is uploaded; the examples then use it."""

    def __str__(self) -> str:
        return self.repo_id or str(self.out)

    @property
    def imports(self) -> str:
        """Imports that ``file`` needs."""
        return "from huggingface_hub import hf_hub_download\n" if self.repo_id else ""

    def file(self, name: str) -> str:
        """Return code for the path of one of its files."""
        return f'hf_hub_download("{self.repo_id}", "{name}")' if self.repo_id else f'"{self.out / name}"'


def python(code: str) -> str:
    """Return a Markdown code block."""
    return f"```python\n{code}\n```\n"


def base_is_local(base: PretrainedConfig) -> bool:
    """Whether the pretrained pipeline is a folder or a file of this machine, and no id of the hub."""
    return not _HUB_ID.fullmatch(base.path) or base.is_file or Path(base.path).exists()


def base_name(base: PretrainedConfig) -> str:
    """Return the pretrained pipeline's name for a card: its hub id, or the last part of a local path."""
    return Path(base.path).resolve().name if base_is_local(base) else base.path


def where_base_is(base: PretrainedConfig) -> str:
    """Say in Markdown that a reader needs a copy of a local base model; empty for one of the hub."""
    if not base_is_local(base):
        return ""
    return f"\n`{base_name(base)}` is a folder of the machine that trained the model: put your copy in its place.\n"


def from_pretrained(path: str, options: str = "") -> str:
    """Return code that loads ``pipeline`` from a folder or an id of the hub."""
    load = f'DiffusionPipeline.from_pretrained("{path}"{options})'
    return f"from diffusers import DiffusionPipeline\n\npipeline = {load}\n"


def drawing(config: RunConfig) -> str:
    """Return code that draws an image with ``pipeline``, of a prompt of the run, as the pipeline is meant to draw."""
    prompt = next(iter(config.validation.prompts), "a caption like those of the training")
    options: dict[str, bool | float] = dict(config.model.diffusers_call)
    with suppress(ConfigError):  # of a card alone, without the pipeline
        settings = settings_of(config)
        if settings.steps == settings.distilled_steps:
            options |= {"num_inference_steps": settings.steps, "guidance_scale": settings.guidance}
    given = "".join(f", {name}={value}" for name, value in options.items())
    # By its name: the first argument of an edit model is a picture.
    return (
        f'image = pipeline(prompt={json.dumps(prompt, ensure_ascii=False)}{given}).images[0]\nimage.save("image.png")'
    )


def load_safetensors(network: ModelConfig, objective: ObjectiveConfig, place: Place, name: str) -> str:
    """Return Markdown that loads a plain state dict, with the class that takes it."""
    code = f"{place.imports}from safetensors.torch import load_file\n\nweights = load_file({place.file(name)})"
    return python(code) + names(network) + conventions(network, objective)


def load_pickle(
    network: ModelConfig,
    objective: ObjectiveConfig,
    place: Place,
    name: str,
    entry: str = "",
    *,
    namespace: bool = False,
) -> str:
    """Return Markdown that loads a ``.pt`` file, with the class that takes it."""
    load = f"torch.load({place.file(name)}, weights_only=True){entry}"
    code = f"{place.imports}import torch\n\nstate_dict = {load}"
    if namespace:
        code = (
            f"{place.imports}from argparse import Namespace\n\nimport torch\n\n"
            f"with torch.serialization.safe_globals([Namespace]):\n    state_dict = {load}"
        )
    return python(code) + names(network) + conventions(network, objective)


def names(model: ModelConfig) -> str:
    """Return the call that creates the published class for these weights; empty if there is none."""
    if (published := family_of(model).published(model)) is None:
        return ""
    called = f"\nThe parameter names match {published.owner}; create its class with `{published.call}`.\n"
    return called + (f"\n{published.note}\n" if published.note else "")


def conventions(model: ModelConfig, objective: ObjectiveConfig, *, diffusers: bool = False) -> str:
    """Time and output conventions that differ from those of the sampler of the published class."""
    if (published := family_of(model).published(model)) is None:
        return ""
    where = " in the first half of its channels" if model.learn_sigma else ""
    if isinstance(objective, DdpmConfig):
        rescaled = objective.rescale_timesteps and objective.timesteps != 1000
        time = f"\nIts time input is t * 1000 / {objective.timesteps} (`rescale_timesteps`), not the timestep t.\n"
        return (time if rescaled else "") + _returned(objective.predicted, where, published, diffusers)
    returned = {"flow": "the velocity dx/dt", "x0": "x0", "epsilon": "the noise", "score": "the score"}
    use = f"the sampler that comes with {published.sampler} cannot use it"
    if isinstance(objective, FlowConfig):
        time, returns = f"x and {objective.time.words}", returned.get(objective.predicted)
    else:
        time, returns = "c_in x and ln(sigma) / 4", "F of the denoiser c_skip x + c_out F (Karras et al. 2022)"
    if (theirs := sampler(objective)) and not diffusers:  # their network returns an object, and samplers take a tensor
        use += f", {theirs}"
    return f"\nIts inputs are {time}; it returns {returns}{where}: {use}.\n"


def _returned(predicted: Prediction, where: str, published: PublishedClass, diffusers: bool) -> str:
    """Return the output convention of a discrete-time model that does not predict the noise, and a sampler for it."""
    if predicted == "epsilon":
        return ""
    returns = "the mean of the previous step" if predicted == "previous_x" else predicted
    sampler = f"the sampler that comes with {published.sampler}"
    use = f"{sampler} cannot use it"
    if diffusers:
        name = PREDICTION_TYPES.get(predicted)
        needed = f'`prediction_type="{name}"`, which `scheduler/` has'
        use = f"a scheduler needs {needed}" if name else "no scheduler of diffusers can use it"
    elif predicted == "x0":
        use = f"create {sampler} with `predict_xstart=True`"
    elif predicted == "previous_x" and published.samples_previous_x:
        use = f"create {sampler} with `model_mean_type=ModelMeanType.PREVIOUS_X`"
    return f"\nIt returns {returns}{where}: {use}.\n"
