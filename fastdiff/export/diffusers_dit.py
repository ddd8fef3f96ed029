"""A DiT as diffusers' ``DiTTransformer2DModel``, with its scheduler; for latents, a whole ``DiTPipeline``.

The network is equivalent except for the timestep frequencies: diffusers computes ``10000^(-k / 127)``, the published
DiT ``10000^(-k / 128)``. No weight can compensate for that. The frequencies are an attribute of the timestep embeddings
and not part of the configuration; ``SAME_TIMES`` sets them.
"""

import importlib.metadata
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.data.shards.format import INFO_FILE
from fastdiff.errors import ConfigError, require
from fastdiff.export.card_text import Place, conventions, python
from fastdiff.export.diffusers_model import Source, Sources, layer, projections, write_model
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.pipeline import copy_part
from fastdiff.export.schedulers import drawing_loop, sampler_config, told, write_json, write_sampler
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.sampling.pixels import IDENTITY, autoencoder_of, pipeline_of, warn_of_another

FOLDER = "transformer"
"""Subfolder that diffusers' pipeline expects."""
_NULL_OF_PIPELINE = 1000
"""The null class of diffusers' ``DiTPipeline``, for any network."""
SAME_TIMES = "for block in model.transformer_blocks:\n    block.norm1.emb.time_proj.downscale_freq_shift = 0\n"
"""Code that makes ``model`` equivalent to ours."""


def to_diffusers(model: DiTConfig, classes: int | None = None) -> dict[str, Any]:
    """Return the arguments of ``DiTTransformer2DModel``.

    Args:
        model: of the run.
        classes: of the class in diffusers, at least those of the run; None: as many.

    Raises:
        ConfigError: it has no network of this shape.
    """
    require(
        int(model.hidden * model.mlp_ratio) == 4 * model.hidden,
        f"--format diffusers: DiTTransformer2DModel has an MLP ratio of 4, the run has --model.mlp_ratio "
        f"{model.mlp_ratio}; use dit or safetensors",
    )
    return {
        "num_attention_heads": model.heads,
        "attention_head_dim": model.hidden // model.heads,
        "in_channels": model.channels,
        "out_channels": model.channels * (2 if model.learn_sigma else 1),
        "num_layers": model.depth,
        "sample_size": model.size,
        "patch_size": model.patch,
        "num_embeds_ada_norm": model.classes if classes is None else classes,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
    }


def write_transformer(
    folder: Path, weights: ExportedWeights, model: DiTConfig, dtype: torch.dtype, classes: int | None = None
) -> None:
    """Write ``transformer/``; see ``diffusers_model.write_model``.

    Args:
        folder: exists.
        weights: of the run.
        model: of the run.
        dtype: of the files.
        classes: see ``to_diffusers``; the further classes are the null class.

    Raises:
        ConfigError: diffusers has no equivalent network.
    """
    config = to_diffusers(model, classes)
    log.warning(
        "DiTTransformer2DModel has other timestep frequencies; the code in the model card, README.md, sets those of DiT"
    )
    sources = _sources(model, 0 if classes is None else classes - model.classes)
    write_model(folder / FOLDER, "DiTTransformer2DModel", config, sources, weights, dtype)


def _sources(model: DiTConfig, further: int) -> Sources:
    found = {
        **layer("pos_embed.proj", "x_embedder.proj"),
        **layer("proj_out_1", "final_layer.adaLN_modulation.1"),
        **layer("proj_out_2", "final_layer.linear"),
    }
    for number in range(model.depth):
        found |= _block(f"transformer_blocks.{number}", f"blocks.{number}", model.heads, further)
    return found


def _block(theirs: str, ours: str, heads: int, further: int) -> Sources:
    """Map one block; diffusers has embeddings in each block, and all blocks get the same ones.

    The last embedding is that of the null class; ``further`` copies of it follow.
    """

    def repeated(table: Tensor) -> Tensor:
        return torch.cat([table, table[-1:].expand(further, -1)])

    condition = f"{theirs}.norm1.emb"
    return {
        **layer(f"{condition}.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        **layer(f"{condition}.timestep_embedder.linear_2", "t_embedder.mlp.2"),
        f"{condition}.class_embedder.embedding_table.weight": Source("y_embedder.embedding_table.weight", repeated),
        **layer(f"{theirs}.norm1.linear", f"{ours}.adaLN_modulation.1"),
        **projections(f"{theirs}.attn1", f"{ours}.attn.qkv", heads, ("qkv", "heads")),
        **layer(f"{theirs}.attn1.to_out.0", f"{ours}.attn.proj"),
        **layer(f"{theirs}.ff.net.0.proj", f"{ours}.mlp.fc1"),
        **layer(f"{theirs}.ff.net.2", f"{ours}.mlp.fc2"),
    }


def _write(folder: Path, exported: Exported) -> None:
    model, config = cast(DiTConfig, exported.config.model), exported.config
    classes = _NULL_OF_PIPELINE if (vae := _autoencoder(config)) is not None else None
    write_transformer(folder, exported.weights, model, exported.dtype, classes)
    scheduler = write_sampler(folder, config)
    if vae is not None and scheduler is not None:
        copy_part(vae, "vae", folder / "vae")
        if exported.saved is not None:
            warn_of_another(vae.path, vae.digest("vae"), exported.saved.manifest.get("autoencoder"))
        write_json(folder / "model_index.json", _index(scheduler, exported))
    if words := told(config):
        log.info(words.strip())


def _autoencoder(config: RunConfig) -> Pretrained | None:
    """Return the autoencoder for a ``DiTPipeline`` that draws the right images; None if there is no such pipeline.

    It takes class 1000 for the null class, decodes latents by a factor alone, and has timesteps.
    """
    name, model = autoencoder_of(config), config.model
    if name is None and config.data.path and not (Path(config.data.path) / INFO_FILE).is_file():
        log.warning(
            f"the run is older than the record of its autoencoder, and its data set {config.data.path} is not here: "
            "the export has network and scheduler, and is no whole pipeline; export where the data set is"
        )
    if name in (None, IDENTITY) or model.classes > _NULL_OF_PIPELINE or sampler_config(config) is None:
        return None
    found = pipeline_of(config.pretrained, str(name))
    try:
        space = found.latent_space
        found.weight_files("vae")
    except ConfigError as error:
        log.warning(f"without its autoencoder the export is no whole pipeline: {error}")
        return None
    by_factor = not any(space.shift) and len({*space.scale}) == 1 and found.class_of("vae") == "AutoencoderKL"
    return found if by_factor and space.channels == model.channels else None


def _index(scheduler: str, exported: Exported) -> dict[str, Any]:
    names = exported.saved.manifest.get("class_names") if exported.saved is not None else None
    labels = {str(number): name for number, name in enumerate(names)} if isinstance(names, list) else None
    return {
        "_class_name": "DiTPipeline",
        "_diffusers_version": importlib.metadata.version("diffusers"),
        **({"id2label": labels} if labels else {}),
        "scheduler": ["diffusers", scheduler],
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def _use(config: RunConfig, place: Place, step: int) -> str:
    model, whole = config.model, _autoencoder(config) is not None
    same = SAME_TIMES.rstrip()
    if whole:
        load = f'pipeline = DiTPipeline.from_pretrained("{place}")\nmodel = pipeline.transformer\n{same}\n'
        own = config.sampling
        steps = "" if own.steps is None else f", num_inference_steps={own.steps}"
        draw = f"image = pipeline([0], guidance_scale={4.0 if own.cfg is None else own.cfg}{steps}).images[0]"
        draw += '\nimage.save("image.png")'
        code = f"from diffusers import DiTPipeline\n\n{load}\n{draw}"
    else:
        load = f'model = DiTTransformer2DModel.from_pretrained("{place}", subfolder="{FOLDER}")\n{same}'
        draw, scheduler = drawing_loop(config, place, classes=True)
        code = f"import torch\nfrom diffusers import DiTTransformer2DModel{scheduler}\n\n{load}{draw}"
    null = f"Class {model.classes} is the null class" + (", and those above it are, too.\n" if whole else ".\n")
    times = (
        "\nThe loop over the blocks sets the timestep frequencies of the published DiT, with which this model was "
        f"trained; those of diffusers differ. {null}"
    )
    return python(code) + times + told(config) + conventions(config.model, config.objective, diffusers=True)


DIFFUSERS = ExportFormat(write=_write, use=_use, library="diffusers")
