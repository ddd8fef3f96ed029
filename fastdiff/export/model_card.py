"""Model card (``README.md``) of an exported model: its training and its use."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.sampler import SamplingConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.console import log
from fastdiff.diffusion.levels import GAMMA
from fastdiff.errors import ConfigError
from fastdiff.export.card_text import Place, base_is_local, base_name
from fastdiff.export.formats import Exported, format_of
from fastdiff.files import read_bounded
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.family import family_of
from fastdiff.models.load import pretrained
from fastdiff.run_files import names_inside, read_inside
from fastdiff.sampling.latent_statistics import STATISTICS, statistics_in

_CARD, _SAMPLES = "README.md", "samples.png"
_LISTED = re.compile(r"^<!-- fastdiff export\n(.*?)\n-->$", re.MULTILINE | re.DOTALL)
"""The files of an export, at the end of its card: ``export --overwrite`` deletes these and no others."""
_PICTURE = re.compile(r"step-([0-9]{8,})\.png")
_MOST = 2**27
"""Bytes of the largest picture that is copied."""
_LARGEST_CARD = 4 << 20
_PLUGINS = {
    "plugin.network": "Network of the user",
    "plugin.objective": "Loss of the user",
    "plugin.optimizer": "Optimizer of a package",
    "plugin.autoencoder": "Autoencoder of a package",
    "plugin.text_encoder": "Text encoder of a package",
}
"""Code of users by its name among the versions (``run_record.plugins``)."""
_LATENTS = f"(z - shift) * scale of the autoencoder's z, both in `{STATISTICS}`; undo it before decoding"
_NORMAL = {"logit_normal": (0.0, 1.0), "log_normal": (-1.2, 1.2)}
"""Default mean and standard deviation."""


def write_card(folder: Path, run: Path, exported: Exported, format_: str, dtype: str, place: Place) -> None:
    """Write the card, and copy the newest sample picture up to the step of the checkpoint."""
    config, saved = exported.config, exported.saved
    step = 0 if saved is None else int(saved.manifest["progress"]["steps"])
    title, origin, heading = (
        (run.stem, f"converted from `{run.name}` by fastdiff", "Model")
        if saved is None
        else (run.resolve().name, "trained with fastdiff", "Training")
    )
    picture = _newest_picture(run, step)
    if picture is not None:
        (folder / _SAMPLES).write_bytes(picture)
    metadata = "\n".join(f"| {name} | {value} |" for name, value in _metadata(exported, dtype).items())
    shown = f"![samples drawn during the training]({_SAMPLES})\n\n" if picture is not None else ""
    text = (
        f"---\n{_front_matter(config.model, config.pretrained, format_)}---\n\n"
        f"# {title}\n\n"
        f"{_subject(config, format_)}, {origin}.\n\n"
        f"{shown}## {heading}\n\n| | |\n| --- | --- |\n{metadata}\n\n"
        f"## Use\n\n{use_of(config, format_, place, step)}\n"
        f"## License\n\n{_license(config)}\n"
    )
    listed = "\n".join(files_in(folder))
    (folder / _CARD).write_text(f"{text}\n<!-- fastdiff export\n{listed}\n-->\n")


def files_of_export(folder: Path) -> frozenset[str] | None:
    """Return the relative paths that an earlier ``write_card`` listed, the card included; None: it wrote none here."""
    try:
        card = read_bounded(folder / _CARD, _LARGEST_CARD).decode()
    except (OSError, ValueError):
        return None
    if not card.startswith("---\n") or "\n- fastdiff\n" not in card.partition("\n---\n")[0]:
        return None
    listed = _LISTED.search(card)
    return frozenset([_CARD, *(listed[1].split("\n") if listed else ())])


def files_in(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files and links in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _newest_picture(run: Path, step: int) -> bytes | None:
    """Return the content of the newest picture up to a step; None without one that can be read."""
    try:
        found = filter(None, map(_PICTURE.fullmatch, names_inside(run, "samples")))
        known = [(int(name[1]), name[0]) for name in found if int(name[1]) <= step]
        return read_inside(run, f"samples/{max(known)[1]}", _MOST) if known else None
    except (OSError, ValueError) as error:
        log.warning(f"{run}: the card has no picture of the training: {error}")
        return None


def _front_matter(model: ModelConfig, pretrained: PretrainedConfig, format_: str) -> str:
    form = format_of(model, format_)
    tags = ["fastdiff", *([] if model.text_conditional else [model.kind]), *(["lora"] if form.adapter else [])]
    lines = ["tags:", *(f"- {tag}" for tag in tags)]
    if model.text_conditional:
        lines.append("pipeline_tag: text-to-image")
    family = family_of(model)
    if library := form.library or ("" if family.options(model) else family.library):
        lines.append(f"library_name: {library}")
    if pretrained.weights and not base_is_local(pretrained):
        lines.append(f"base_model: {pretrained.path}")
    return "".join(line + "\n" for line in lines)


def _license(config: RunConfig) -> str:
    text = "Not stated yet: the owner of this model chooses it, within the licenses of the base model and of the data."
    of_base = _license_of_base(config)
    return f"{text} The base model, as published, has the license {of_base}." if of_base else text


def _license_of_base(config: RunConfig) -> str:
    """Return the license on the card of the base model, or else that of the published weights of its family."""
    base, found = config.pretrained, ""
    if base.weights and not base.is_file:
        with suppress(ConfigError):  # the card has a license without the pipeline, too
            found = pretrained(base).license
    return found or (family_of(config.model).license(config.model) if base.weights else "")


def _subject(config: RunConfig, format_: str) -> str:
    model = config.model
    network, adapter = family_of(model).subject(model), format_of(model, format_).adapter
    return f"A {kind_of(config.lora).title} adapter of {network[0].lower()}{network[1:]}" if adapter else network


def _metadata(exported: Exported, dtype: str) -> dict[str, object]:
    config = exported.config
    weights = f"{exported.weights.description}, in {dtype}"
    if exported.saved is None:  # of its training no more is known
        known = objective_facts(config.objective, config.drawn_levels)
        return {"Noise": known["Noise"], "Prediction": known["Prediction"], "Weights": weights}
    manifest, optim = exported.saved.manifest, config.optim
    pretrained, lora = config.pretrained, config.lora
    metadata: dict[str, object] = {
        "Steps": manifest["progress"]["steps"],
        "Samples seen": manifest["progress"]["samples"],
    }
    if pretrained.path:
        metadata["Base model" if pretrained.weights else "Text encoder and autoencoder"] = f"`{base_name(pretrained)}`"
    if lora.rank:
        metadata[kind_of(lora).title] = f"{kind_of(lora).size(lora)}, base weights in {_bits(lora)}"
    if lora.init:
        without = ", without its text encoders" if lora.skip_text_encoders else ""
        metadata["Started from"] = f"`{Path(lora.init).name}` (sha256 `{manifest.get('adapter')}`){without}"
    return metadata | {
        "Data set (sha256)": f"`{manifest['dataset']}`",
        "Samples per step": config.batch.samples,
        "Optimizer": f"{optim.name}, {_options(optim)}, clipped at {optim.clip:g}",
        "Learning rate": f"{optim.lr:g}, {optim.schedule}, {optim.warmup_steps} steps of warm-up",
        **objective_facts(config.objective, config.drawn_levels),
        **routing_facts(config.model),
        **dropped_by_set(manifest, config.objective.condition_dropout),
        **sampling_facts(config.sampling),
        **({"Latents": _LATENTS} if statistics_in(manifest) is not None else {}),
        "Precision": config.performance.precision,
        "Weights": weights,
        "Software": ", ".join(
            f"{name} {manifest['versions'].get(name, 'unknown')}" for name in ("fastdiff", "torch", "deepspeed")
        ),
        **{_PLUGINS[name]: f"`{code}`" for name, code in manifest["versions"].items() if name in _PLUGINS},
    }


def dropped_by_set(manifest: Mapping[str, Any], of_run: float) -> dict[str, str]:
    """Return the shares of dropped conditions of data sets, in place of that of the run; empty: none has its own."""
    sets = {name: facts.get("condition_dropout") for name, facts in (manifest.get("datasets") or {}).items()}
    own = [f"{name} {share:g}" for name, share in sets.items() if share is not None]
    others = [f"others {of_run:g}"] if len(own) < len(sets) else []
    return {"Conditions dropped": ", ".join([*own, *others])} if own else {}


def _bits(lora: LoraConfig) -> str:
    return "full precision" if lora.quantize == "none" else lora.quantize.replace("bit", " bits")


def objective_facts(objective: ObjectiveConfig, timesteps: TimestepConfig) -> dict[str, str]:
    """Describe the objective in words: noise, prediction, loss and timesteps."""
    changes = {
        f", offset {objective.noise_offset:g}": objective.noise_offset,
        f", {objective.multires_noise_iterations} coarser resolutions": objective.multires_noise_iterations,
        f", input perturbation {objective.input_perturbation:g}": objective.input_perturbation,
        ", DREAM": objective.takes_two_passes,
    }
    process, variance, loss, cosine = _of_process(objective)
    return {
        "Noise": process + "".join(words for words, given in changes.items() if given),
        "Prediction": objective.predicted + variance,
        "Loss": f"{loss}, weighting {_weighting(objective)}{cosine}",
        "Timesteps": _drawn(timesteps, objective),
        "Conditions dropped": f"{objective.condition_dropout:g}",
    }


def routing_facts(model: ModelConfig) -> dict[str, str]:
    """Describe the tokens that the training left out, in words; empty: none."""
    route = model.route
    if route is None:
        return {}
    path = f", without these blocks in {route.path_drop:.3g} of the steps" if route.path_drop else ""
    dense = f", all in the last {route.dense_share:.3g} of the run" if route.dense_share else ""
    blocks = f"blocks {route.blocks.start} to {route.blocks[-1]}"
    return {"Tokens in training": f"{route.kept} of {route.tokens} in {blocks}{path}{dense}"}


def sampling_facts(sampling: SamplingConfig) -> dict[str, str]:
    """Describe the sampler that belongs to the run, in words; empty if it names none."""
    if sampling == SamplingConfig():
        return {}
    low, high = sampling.cfg_interval or (0.0, 1.0)
    shift = f"shift {sampling.shift if isinstance(sampling.shift, str) else f'{sampling.shift or 1:g}'}"
    parts = {
        str(sampling.scheduler): sampling.scheduler,
        f"{sampling.steps} steps": sampling.steps,
        shift: sampling.shift,
        f"guidance {sampling.cfg or 0:g}": sampling.cfg is not None,
        f"of the first {sampling.cfg_channels} channels": sampling.cfg_channels,
        f"at noise levels {low:g} to {high:g}": sampling.cfg_interval,
        "estimates clamped": sampling.clip,
        "estimates not clamped": sampling.clip is False,
        f"{sampling.labels} classes": sampling.labels != SamplingConfig().labels,
        f"reference of {sampling.protocol}": sampling.protocol,
    }
    # The scheduler of an export, where there is one, has the noise and the prediction alone.
    return {"Sampler (`fastdiff sample`)": ", ".join(words for words, given in parts.items() if given)}


def _of_process(objective: ObjectiveConfig) -> tuple[str, str, str, str]:
    """Process, what the prediction has besides its name, loss and what is added to it, in words."""
    match objective:
        case DdpmConfig():
            terminal = ", zero terminal SNR" if objective.zero_terminal_snr else ""
            steps = f"{objective.schedule} schedule of {objective.timesteps} steps{terminal}"
            return steps, f", {objective.variance} variance", objective.loss, ""
        case FlowConfig():
            cosine = f", cosine distance times {objective.cosine_weight:g}" if objective.cosine_weight else ""
            if objective.contrastive_weight:
                cosine += f", less {objective.contrastive_weight:g} times that against the target of another sample"
            owner = objective.time.owner
            convention = f", time and velocity of {owner}" if owner else ""
            floor = f", velocity clamped at sigma {objective.velocity_floor:g}" if objective.predicted == "x0" else ""
            return f"flow matching, {objective.path} path{convention}", floor, "mse", cosine
        case EdmConfig():
            return f"EDM, sigma of the data {objective.sigma_data:g}", "", "mse", ""


def _weighting(objective: ObjectiveConfig) -> str:
    weighting, given = objective.weighted, objective.min_snr_gamma
    if isinstance(objective, DdpmConfig) and weighting == "p2":
        given = objective.p2_gamma
    number = GAMMA.get(weighting) if given is None else given
    return weighting if number is None else f"{weighting}, gamma {number:g}"


def _drawn(drawn: TimestepConfig, objective: ObjectiveConfig) -> str:
    density = drawn.of(objective)
    biased = drawn.biased(objective.timesteps) if isinstance(objective, DdpmConfig) else range(0)
    usual = _NORMAL.get(density, (0.0, 1.0))
    mean, std = (known if given is None else given for given, known in zip((drawn.mean, drawn.std), usual, strict=True))
    details = {
        f"mean {mean:g}, standard deviation {std:g}": density in _NORMAL,
        f"scale {drawn.mode_scale:g}": density == "mode",
        f"truncated to {drawn.truncation:g} from its ends": drawn.truncation,
        f"shift {drawn.shift if isinstance(drawn.shift, str) else f'{drawn.shift:g}'}": drawn.shift != 1.0,
        f"{drawn.bias_multiplier:g} times as often": density in ("earlier", "later", "range"),
        f"{drawn.bias_portion:g} of them": density in ("earlier", "later"),
        f"{biased.start} to {biased.stop}": density == "range",
        "stratified": drawn.stratified,
    }
    return ", ".join([density, *(words for words, given in details.items() if given)])


def use_of(config: RunConfig, format_: str, place: Place, step: int = 0) -> str:
    """Return Markdown code that uses an exported model; file names of original checkpoints contain ``step``."""
    return format_of(config.model, format_).use(config, place, step)


def _options(optim: OptimConfig) -> str:
    """Return the hyper-parameters of an optimizer in words, without the learning rate."""
    given = {name: value for name, value in optim.hyper_parameters().items() if name != "lr"}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
