"""Schedulers of diffusers with the noise of a run, and a sampler for networks without a text-to-image pipeline.

``fastdiff sample`` clamps the estimate of x0 of a model of pixels, and takes the noise from the clamped estimate.
DDIMScheduler does so only if each step is called with ``use_clipped_model_output=True``, which no file can say. The
first order of DPMSolverMultistepScheduler is the same method (Lu et al. 2022, arXiv:2211.01095, section 4.1), always
takes the noise from x0, and clamps by its thresholds.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig
from fastdiff.diffusion.schedules import betas
from fastdiff.export.card_text import Place
from fastdiff.sampling.pixels import IDENTITY, autoencoder_of

FOLDER = "scheduler"
_FILE = "scheduler_config.json"
_SAVING = """
levels = (127.5 * image[0].clamp(-1, 1) + 127.5).round().byte().permute(1, 2, 0)
Image.fromarray(levels.squeeze(2).numpy()).save("image.png")"""
_NO_SIGNAL = 2.0**-24
"""Abar of a level without signal; at 0 its log SNR would be infinite."""


def noise_of(objective: DdpmConfig) -> dict[str, Any]:
    """Return the betas of a run (``diffusion.schedules.betas``): diffusers' name of the schedule and its ends, or all.

    In diffusers only DDPMScheduler has sigmoid and laplace; the other schedulers refuse an unknown name. The scheduler
    itself applies zero-terminal SNR.
    """
    known = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
    scale = 1000.0 / objective.timesteps
    start, end = (0.00085, 0.012) if objective.schedule == "scaled_linear" else (1e-4 * scale, 0.02 * scale)
    table = None if objective.schedule in known else betas(replace(objective, zero_terminal_snr=False)).tolist()
    kind = known.get(objective.schedule, "linear")
    return {"beta_schedule": kind, "beta_start": start, "beta_end": end, "trained_betas": table}


def sampler_config(config: RunConfig) -> dict[str, Any] | None:
    """Return a ``scheduler_config.json`` with which diffusers draws as ``fastdiff sample`` does by default (ddim).

    The levels are the same where their number divides that of the training.

    Returns:
        None for a run whose process or prediction diffusers' samplers do not have.
    """
    objective = config.objective
    if not isinstance(objective, DdpmConfig) or objective.predicted not in PREDICTION_TYPES:
        return None
    of_pixels = autoencoder_of(config) == IDENTITY
    own = (
        {"_class_name": "DPMSolverMultistepScheduler", "solver_order": 1, "algorithm_type": "dpmsolver++"}
        | {"thresholding": True, "dynamic_thresholding_ratio": 1.0, "sample_max_value": 1.0}
        if of_pixels
        else {"_class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": True}
    )
    return {
        "_diffusers_version": importlib.metadata.version("diffusers"),
        "num_train_timesteps": objective.timesteps,
        **(_with_signal(objective) if of_pixels and objective.ends_in_noise else noise_of(objective)),
        "rescale_betas_zero_snr": objective.zero_terminal_snr and not of_pixels,
        "prediction_type": PREDICTION_TYPES[objective.predicted],
        "timestep_spacing": "trailing",
        **own,
    }


def write_sampler(folder: Path, config: RunConfig) -> str | None:
    """Write ``scheduler/`` for a run, and return the class of the scheduler; None if diffusers has none for it."""
    if (content := sampler_config(config)) is None:
        return None
    (folder / FOLDER).mkdir()
    write_json(folder / FOLDER / _FILE, content)
    return str(content["_class_name"])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration as diffusers does."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def told(config: RunConfig) -> str:
    """Say in Markdown what the scheduler does, and what others need; empty without a sampler."""
    if (content := sampler_config(config)) is None:
        return ""
    own = config.sampling.scheduler or "ddim"
    other = "" if own == "ddim" else f" The run's own sampler is {own}, which `fastdiff sample` draws with."
    if not content.get("thresholding"):
        noise = f"\n`{FOLDER}/` has the noise and the prediction of the run; x0 is not clamped (`clip_sample=False`)."
        return f"{noise}{other}\n"
    return (
        "\nEach step clamps its estimate of the image, and takes the noise from the clamped estimate. "
        f"`{FOLDER}/` does so: it is DDIM, as the first order of DPM-Solver++. DDIMScheduler needs "
        f"`step(..., use_clipped_model_output=True)` for it: without it most pixels differ.{other}\n"
    )


def drawing_loop(config: RunConfig, place: Place, classes: bool) -> tuple[str, str]:
    """Return code that draws one ``image`` with ``model``, and its imports after a class of diffusers.

    Images of pixels are saved. Both are empty without a sampler.
    """
    if (content := sampler_config(config)) is None:
        return "", ""
    model, kind = config.model, str(content["_class_name"])
    given = ", torch.tensor([0])" if classes else ""
    code = (
        f'\n\nscheduler = {kind}.from_pretrained("{place}", subfolder="{FOLDER}")\n'
        f"scheduler.set_timesteps({config.sampler().steps})\n"
        f"image = torch.randn(1, {model.channels}, {model.size}, {model.size})\nwith torch.no_grad():\n"
        "    for time in scheduler.timesteps:\n"
        f"        predicted = model(image, time.expand(1){given}).sample[:, :{model.channels}]\n"
        "        image = scheduler.step(predicted, time, image).prev_sample"
    )
    if content.get("thresholding"):  # of pixels
        return code + _SAVING, f", {kind}\nfrom PIL import Image"
    return code, f", {kind}"


def _with_signal(objective: DdpmConfig) -> dict[str, Any]:
    """Return the betas of a run that ends in pure noise, with a negligible signal at its last level."""
    table = betas(objective)
    before = float((1 - table[:-1]).prod())
    table[-1] = 1 - _NO_SIGNAL / before
    return {"trained_betas": table.tolist()}
