"""Objectives that make no sense are refused with the reason, and those of the published recipes are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastdiff.config.command_line import parse
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.objective import PREDICTIONS, DiffusionConfig
from fastdiff.config.run import OutputConfig, RunConfig, ValidationConfig
from fastdiff.config.timesteps import DENSITIES, TimestepConfig
from fastdiff.errors import ConfigError

LEARNED = {"variance": "learned_range"}
FLOW, EDM = {"process": "flow"}, {"process": "edm"}
ZERO = {"zero_terminal_snr": True}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        # Processes.
        ({**FLOW, "prediction": "v"}, "--objective.process flow predicts flow, epsilon, score"),
        ({**EDM, "prediction": "epsilon"}, "--objective.process edm predicts edm"),
        ({"prediction": "score"}, "--objective.process ddpm predicts epsilon, v, x0, previous_x"),
        ({**FLOW, "schedule": "cosine"}, "--objective.schedule cosine is for --objective.process ddpm, given flow"),
        ({**EDM, "timesteps": 500}, "--objective.timesteps 500 is for --objective.process ddpm, given edm"),
        ({**FLOW, **ZERO}, "--objective.zero_terminal_snr True is for --objective.process ddpm, given flow; "
         "set --objective.no_zero_terminal_snr"),
        ({"path": "vp"}, "--objective.path vp is for --objective.process flow, given ddpm; "
         "set --objective.path linear, its default"),
        ({"sigma_data": 0.9}, "--objective.sigma_data 0.9 is for --objective.process edm, given ddpm"),
        ({**EDM, "sigma_data": 0.0}, "--objective.sigma_data 0.0: from 0.001 to 1000"),
        ({**EDM, "sigma_data": 1e4}, "--objective.sigma_data 10000.0: from 0.001 to 1000"),
        ({"timesteps": 1}, "--objective.timesteps 1: at least 2"),
        ({"timesteps": 20}, "the linear schedule needs more than 20"),
        ({"timesteps": 20, "schedule": "warmup50"}, "the warmup50 schedule needs more than 20"),
        # The bound and its variance.
        ({**FLOW, **LEARNED}, "steps back of ddpm, which flow and edm do not have"),
        ({**EDM, "variance": "learned"}, "steps back of ddpm, which flow and edm do not have"),
        ({**FLOW, "variance": "fixed_large"}, "steps back of ddpm, which flow and edm do not have"),
        ({**FLOW, "loss": "kl"}, "steps back of ddpm, which flow and edm do not have"),
        ({**EDM, "loss": "rescaled_mse"}, "steps back of ddpm, which flow and edm do not have"),
        ({"loss": "kl", "min_snr_gamma": 5.0}, "with --objective.weighting min_snr: the bound has weights of its own"),
        ({"loss": "rescaled_kl", "weighting": "p2"}, "with --objective.weighting p2: the bound has weights of its own"),
        ({"loss": "kl", **ZERO}, "is infinite when the noise is predicted; use --objective.prediction v or x0"),
        ({**LEARNED, **ZERO, "prediction": "epsilon"}, "is infinite when the noise is predicted"),
        ({**LEARNED, "schedule": "jsd"}, "a schedule that ends in pure noise"),
        ({"loss": "rescaled_kl", "dream": True}, "--objective.dream, which changes input and target"),
        ({**LEARNED, "dream": True}, "--objective.dream, which changes input and target"),
        ({**LEARNED, "noise_offset": 0.1}, "for which the variational bound does not hold"),
        ({"loss": "kl", "multires_noise_iterations": 6}, "for which the variational bound does not hold"),
        ({**LEARNED, "loss": "rescaled_mse", "input_perturbation": 0.1}, "the variational bound does not hold"),
        # Weightings.
        ({"min_snr_gamma": 0.0}, "--objective.min_snr_gamma 0.0: above 0"),
        ({"min_snr_gamma": -5.0}, "--objective.min_snr_gamma -5.0: above 0"),
        ({"min_snr_gamma": NAN}, "--objective.min_snr_gamma nan: above 0"),
        ({"min_snr_gamma": 5.0, "weighting": "p2"}, "--objective.weighting p2 has no such clamp"),
        ({"p2_gamma": 0.0, "weighting": "p2"}, "--objective.p2_gamma 0.0: above 0"),
        ({"p2_gamma": NAN, "weighting": "p2"}, "--objective.p2_gamma nan: above 0"),
        ({"p2_gamma": 0.5}, "--objective.weighting auto has no such exponent"),
        ({"p2_gamma": 0.5, "weighting": "debiased"}, "set --objective.weighting p2, or --objective.p2_gamma 1"),
        ({"weighting": "velocity"}, "--objective.process ddpm has none, min_snr"),
        ({"weighting": "cosmap"}, "--objective.process ddpm has none, min_snr"),
        ({**FLOW, "weighting": "p2"}, "--objective.process flow has none, min_snr"),
        ({**EDM, "weighting": "snr"}, "--objective.process edm has none, min_snr"),
        ({**FLOW, "weighting": "likelihood"}, "weighs the error of epsilon or score"),
        ({**FLOW, "prediction": "score", "weighting": "sigma_sqrt"}, "weighs the error of the velocity"),
        ({**FLOW, "path": "gvp", "weighting": "cosmap"}, "of the linear path"),
        ({"prediction": "previous_x", "min_snr_gamma": 5.0}, "--objective.weighting min_snr with --objective"),
        ({"prediction": "previous_x", "weighting": "debiased"}, "with --objective.prediction previous_x"),
        # The other terms.
        ({"cosine_weight": 1.0}, "because it compares the directions of velocities"),
        ({**FLOW, "prediction": "epsilon", "cosine_weight": 1.0}, "because it compares the directions of velocities"),
        ({**FLOW, "cosine_weight": -1.0}, "--objective.cosine_weight -1.0: 0, or above"),
        ({"dream": True, "prediction": "v"}, "--objective.dream needs --objective.process ddpm and"),
        ({**FLOW, "dream": True}, "given flow and flow"),
        ({"dream_detail_preservation": -1.0}, "--objective.dream_detail_preservation -1.0: 0 or a finite number above"),
        ({"noise_offset": -0.1}, "--objective.noise_offset -0.1: 0 or a finite"),
        ({"input_perturbation": INF}, "--objective.input_perturbation inf: 0 or a finite"),
        ({"multires_noise_iterations": -1}, "--objective.multires_noise_iterations -1"),
        ({"multires_noise_discount": 0.0}, "--objective.multires_noise_discount 0.0: above 0, at most 1"),
        ({"condition_dropout": 1.5}, "--objective.condition_dropout 1.5: a share"),
    ],
)  # fmt: skip
def test_an_impossible_objective_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        DiffusionConfig(**given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"density": "uniform", "mean": 0.5}, "they belong to logit_normal and log_normal"),
        ({"density": "mode", "std": 0.5}, "they belong to logit_normal and log_normal"),
        ({"density": "logit_normal", "std": 0.0}, "--timesteps.std 0.0: above 0"),
        ({"density": "logit_normal", "std": 10.5}, "--timesteps.std 10.5: above 0, at most 10"),
        ({"density": "logit_normal", "mean": INF}, "--timesteps.mean inf: from -20 to 20"),
        ({"density": "log_normal", "mean": -20.5}, "--timesteps.mean -20.5: from -20 to 20"),
        ({"density": "mode", "mode_scale": 1.8}, "--timesteps.mode_scale 1.8: from -1 to 1.75"),
        ({"density": "mode", "mode_scale": -1.1}, "--timesteps.mode_scale -1.1: from -1 to 1.75"),
        ({"mode_scale": 0.8}, "--timesteps.mode_scale 0.8 is for --timesteps.density mode, given auto"),
        ({"shift": 0.0}, "--timesteps.shift 0.0: above 0"),
        ({"density": "earlier", "bias_multiplier": 0.0}, "--timesteps.bias_multiplier 0.0: above 0"),
        (
            {"bias_multiplier": 2.0},
            "is for --timesteps.density earlier, later, range, given auto; set",
        ),
        ({"density": "later", "bias_portion": 1.5}, "--timesteps.bias_portion 1.5: above 0, at most 1"),
        ({"density": "range", "bias_portion": 0.5}, "--timesteps.bias_portion 0.5 is for --timesteps.density earlier"),
        ({"density": "later", "bias_end": 10}, "--timesteps.bias_end 10 is for --timesteps.density range, given later"),
        ({"density": "range", "bias_begin": 9, "bias_end": 9}, "the begin below the end"),
        ({"density": "range", "bias_begin": -1}, "the begin below the end"),
        ({"density": "later"}, "--timesteps.bias_multiplier 1 draws all timesteps alike; set the multiplier to 2"),
        ({"density": "range", "bias_end": 100}, "with --timesteps.bias_multiplier 1 draws all timesteps alike"),
    ],
)
def test_impossible_timesteps_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        TimestepConfig(**given)


@pytest.mark.parametrize(
    ("objective", "timesteps", "reason"),
    [
        (FLOW, {"density": "importance"}, "draws discrete timesteps by the past losses of each, and "
         "--objective.process flow has a time from 0 to 1; use uniform, logit_normal, mode, cosmap"),
        (EDM, {"density": "importance"}, "--objective.process edm has sigma; use log_normal"),
        (FLOW, {"density": "later", "bias_multiplier": 2.0}, "--timesteps.density later draws discrete timesteps, and"),
        (EDM, {"density": "uniform"}, "--timesteps.density uniform draws a time from 0 to 1, and --objective"),
        ({}, {"density": "log_normal"}, "--timesteps.density log_normal draws sigma, and --objective.process ddpm has"),
        ({}, {"mean": 0.5}, "--timesteps.mean and --timesteps.std with --objective.process ddpm"),
        ({}, {"shift": 3.0}, "--timesteps.shift 3.0 is for --objective.process flow, given ddpm"),
        (EDM, {"shift": 3.0}, "--timesteps.shift 3.0 is for --objective.process flow, given edm"),
        ({"timesteps": 500}, {"density": "range", "bias_multiplier": 2.0, "bias_end": 501},
         "--timesteps.bias_begin 0 to --timesteps.bias_end 501: within --objective.timesteps 500"),
        ({"timesteps": 500}, {"density": "range", "bias_multiplier": 2.0, "bias_begin": 500},
         "--timesteps.bias_begin 500 to --timesteps.bias_end 500: within --objective.timesteps 500"),
        ({"timesteps": 50}, {"density": "later", "bias_multiplier": 2.0, "bias_portion": 0.01},
         "bias_portion 0.01 of --objective.timesteps 50 is less than one timestep; at least 0.02"),
    ],
)  # fmt: skip
def test_timesteps_of_another_process_are_refused(
    objective: dict[str, Any], timesteps: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        RunConfig(objective=DiffusionConfig(**objective), timesteps=TimestepConfig(**timesteps))


@pytest.mark.parametrize("model", [DiTConfig(), UNetConfig()])
def test_a_learned_variance_needs_twice_the_output_channels(model: DiTConfig | UNetConfig) -> None:
    with pytest.raises(ConfigError, match=r"twice the output channels: a DiT or an ADM UNet with --model.learn_sigma$"):
        RunConfig(model=model, objective=DiffusionConfig(variance="learned"))
    assert RunConfig(model=DiTConfig(learn_sigma=True), objective=DiffusionConfig(variance="learned"))


@pytest.mark.parametrize("objective", [ZERO, {"schedule": "jsd"}])
def test_a_run_whose_images_would_come_from_predicted_noise_is_refused_at_once(objective: dict[str, Any]) -> None:
    noise = DiffusionConfig(**objective)
    with pytest.raises(ConfigError, match=r"no image can be drawn .* or draw none with --output.sample_every 0"):
        RunConfig(objective=noise)
    assert RunConfig(objective=noise, output=OutputConfig(sample_every=0))
    assert RunConfig(objective=DiffusionConfig(**objective, prediction="v"))
    # What is predicted is in the pipeline.
    validation, pipeline = ValidationConfig(prompts=("a",)), PretrainedConfig(path="some/pipeline", weights=True)
    assert RunConfig(model=UNetConfig(), objective=noise, pretrained=pipeline, validation=validation)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--objective.process", "flow", "--objective.prediction", "flow", "--objective.variance", "learned_range"],
         "which flow and edm do not have"),
        (["--objective.process", "flow", "--objective.prediction", "flow", "--timesteps.density", "importance"],
         "draws discrete timesteps by the past losses of each"),
        (["--objective.min_snr_gamma", "0"], "--objective.min_snr_gamma 0.0: above 0"),
        (["--objective.variance", "learned_range"], "--model.learn_sigma"),
        (["--objective.loss", "kl", "--objective.min_snr_gamma", "5"], "the bound has weights of its own"),
        (["--timesteps.density", "mode", "--timesteps.mode_scale", "2"], "from -1 to 1.75"),
        (["--timesteps.shift", "3"], "is for --objective.process flow"),
    ],
)  # fmt: skip
def test_the_command_line_refuses_them(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse(["--preset", "digits", *flags])


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--preset sd15-512 --objective.process flow", "--objective.schedule linear"),
        ("--preset dit-b-2-256 --objective.process flow", "--objective.variance fixed_small"),
        ("--preset digits --objective.process flow", "--objective.prediction flow, or auto"),
        ("--preset digits --objective.process edm", "--objective.prediction edm, or auto"),
        ("--preset dit-b-2-256 --objective.noise_offset 0.1", "--objective.variance fixed_small"),
        ("--preset dit-b-2-256 --objective.dream", "--objective.variance fixed_small"),
    ],
)
def test_what_a_preset_has_set_is_refused_with_the_value_to_write(flags: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"set .*{re.escape(remedy)}") as refused:
        parse(flags.split())
    assert "leave" not in str(refused.value)
    assert parse([*flags.split(), *remedy.removesuffix(", or auto").split()])


def test_a_range_without_an_end_goes_to_the_last_timestep() -> None:
    objective = DiffusionConfig(timesteps=500)
    drawn = TimestepConfig(density="range", bias_multiplier=2.0, bias_begin=400)
    assert RunConfig(objective=objective, timesteps=drawn)
    assert drawn.biased(500) == range(400, 500)


@pytest.mark.parametrize(
    "flags",
    [
        # improved-diffusion's hybrid loss with importance sampling, on its cosine schedule with 4000 steps.
        "--objective.prediction epsilon --objective.schedule cosine --objective.timesteps 4000 --model.learn_sigma "
        "--objective.variance learned_range --objective.loss rescaled_mse --timesteps.density importance",
        "--objective.prediction epsilon --objective.loss rescaled_kl --timesteps.density importance",
        "--objective.prediction epsilon --objective.loss rescaled_mse",
        "--objective.prediction x0 --objective.variance fixed_large --objective.weighting soft_min_snr",
        # SD3 and LightningDiT.
        "--objective.process flow --objective.prediction flow --timesteps.density logit_normal --timesteps.shift 3",
        "--objective.process flow --objective.prediction flow --objective.cosine_weight 1 --timesteps.density cosmap",
        # SiT's ablations.
        "--objective.process flow --objective.path gvp --objective.prediction score --objective.weighting velocity",
        "--objective.process edm --objective.prediction edm --objective.sigma_data 0.9 --timesteps.mean -0.6",
        "--timesteps.density later --timesteps.bias_multiplier 2 --timesteps.stratified",
        "--objective.zero_terminal_snr --objective.min_snr_gamma 5",
    ],
)
def test_the_command_line_takes_the_recipes(flags: str) -> None:
    assert parse(["--preset", "digits", *flags.split()])


def test_auto_is_explained_by_the_process() -> None:
    for process, predictions in PREDICTIONS.items():
        objective = DiffusionConfig(process=process)
        assert objective.predicted == predictions[0]
        assert TimestepConfig().of(objective) == DENSITIES[process][0]
    assert (DiffusionConfig().weighted, DiffusionConfig(min_snr_gamma=5.0).weighted) == ("none", "min_snr")
