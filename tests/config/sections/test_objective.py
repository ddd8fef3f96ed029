"""Nonsensical objectives cannot be expressed or are refused with the reason; published recipes are accepted."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.command_line.config_file import from_mapping, with_process
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import DEFAULTS, PROCESSES, DdpmConfig, EdmConfig, FlowConfig, Process, in_full
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.timesteps import DENSITIES, TimestepConfig
from fastdiff.errors import ConfigError
from tests.support.inputs.objectives import objective_of

LEARNED = {"variance": "learned_range"}
FLOW, EDM = {"process": "flow"}, {"process": "edm"}
ZERO = {"zero_terminal_snr": True}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        # Processes.
        ({**EDM, "sigma_data": 0.0}, "--objective.sigma_data 0.0: from 0.001 to 1000"),
        ({**EDM, "sigma_data": 1e4}, "--objective.sigma_data 10000.0: from 0.001 to 1000"),
        ({"timesteps": 1}, "--objective.timesteps 1: at least 2"),
        ({"timesteps": 20}, "the linear schedule needs more than 20"),
        ({"timesteps": 20, "schedule": "warmup50"}, "the warmup50 schedule needs more than 20"),
        # The bound and its variance.
        ({"loss": "kl", "min_snr_gamma": 5.0}, "with --objective.weighting min_snr: the bound has its own weights"),
        ({"loss": "rescaled_kl", "weighting": "p2"}, "with --objective.weighting p2: the bound has its own weights"),
        ({"loss": "kl", **ZERO}, "the KL of epsilon prediction is infinite; use --objective.prediction v or x0"),
        ({**LEARNED, **ZERO, "prediction": "epsilon"}, "the KL of epsilon prediction is infinite"),
        ({**LEARNED, "schedule": "jsd"}, "a schedule that ends in pure noise"),
        ({"loss": "rescaled_kl", "dream": True}, "--objective.dream, which changes input and target"),
        ({**LEARNED, "dream": True}, "--objective.dream, which changes input and target"),
        ({**LEARNED, "noise_offset": 0.1}, "so the variational bound does not hold"),
        ({"loss": "kl", "multires_noise_iterations": 6}, "so the variational bound does not hold"),
        ({**LEARNED, "loss": "rescaled_mse", "input_perturbation": 0.1}, "the variational bound does not hold"),
        # Weightings.
        ({"min_snr_gamma": 0.0}, "--objective.min_snr_gamma 0.0: above 0"),
        ({"min_snr_gamma": -5.0}, "--objective.min_snr_gamma -5.0: above 0"),
        ({"min_snr_gamma": NAN}, "--objective.min_snr_gamma nan: above 0"),
        ({"min_snr_gamma": 5.0, "weighting": "p2"}, "--objective.weighting p2 does not use it"),
        ({"p2_gamma": 0.0, "weighting": "p2"}, "--objective.p2_gamma 0.0: above 0"),
        ({"p2_gamma": NAN, "weighting": "p2"}, "--objective.p2_gamma nan: above 0"),
        ({"p2_gamma": 0.5}, "--objective.weighting auto does not use it"),
        ({"p2_gamma": 0.5, "weighting": "debiased"}, "set --objective.weighting p2, or --objective.p2_gamma 1"),
        ({**FLOW, "weighting": "likelihood"}, "is for --objective.prediction epsilon or score"),
        ({**FLOW, "weighting": "velocity"}, "is for --objective.prediction x0 or epsilon or score"),
        ({**FLOW, "prediction": "x0", "weighting": "likelihood"}, "is for --objective.prediction epsilon or score"),
        ({**FLOW, "prediction": "x0", "weighting": "cosmap"}, "is for the velocity of the linear path"),
        ({**FLOW, "prediction": "x0", "velocity_floor": 0.0}, "--objective.velocity_floor 0.0: at least 0.001"),
        ({**FLOW, "prediction": "x0", "velocity_floor": NAN}, "--objective.velocity_floor nan: at least 0.001"),
        ({**FLOW, "velocity_floor": 0.1}, "--objective.prediction flow does not use it; set --objective.prediction x0"),
        ({**FLOW, "prediction": "score", "weighting": "sigma_sqrt"}, "is for the velocity of the linear path"),
        ({**FLOW, "path": "gvp", "weighting": "cosmap"}, "of the linear path"),
        ({"prediction": "previous_x", "min_snr_gamma": 5.0}, "--objective.weighting min_snr with --objective"),
        ({"prediction": "previous_x", "weighting": "debiased"}, "with --objective.prediction previous_x"),
        # The other terms.
        ({**FLOW, "prediction": "epsilon", "cosine_weight": 1.0}, "because it compares the directions of velocities"),
        ({**FLOW, "cosine_weight": -1.0}, "--objective.cosine_weight -1.0: 0, or above"),
        ({"dream": True, "prediction": "v"}, "--objective.dream needs --objective.prediction epsilon, given v"),
        ({"dream_detail_preservation": -1.0}, "dream_detail_preservation -1.0: a finite number, at least 0"),
        ({"noise_offset": -0.1}, "--objective.noise_offset -0.1: a finite number"),
        ({"input_perturbation": INF}, "--objective.input_perturbation inf: a finite number"),
        ({"multires_noise_iterations": -1}, "--objective.multires_noise_iterations -1"),
        ({"multires_noise_discount": 0.0}, "--objective.multires_noise_discount 0.0: above 0, at most 1"),
        ({"condition_dropout": 1.5}, "--objective.condition_dropout 1.5: a fraction"),
    ],
)  # fmt: skip
def test_an_impossible_objective_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        objective_of(**given)


OTHERS: list[tuple[Process, str, Any, str]] = [
    ("flow", "schedule", "cosine", "ddpm"),
    ("edm", "timesteps", 500, "ddpm"),
    ("flow", "zero_terminal_snr", True, "ddpm"),
    ("edm", "rescale_timesteps", True, "ddpm"),
    ("flow", "variance", "learned_range", "ddpm"),
    ("flow", "variance", "fixed_large", "ddpm"),
    ("edm", "loss", "rescaled_mse", "ddpm"),
    ("flow", "p2_gamma", 0.5, "ddpm"),
    ("flow", "dream", True, "ddpm"),
    ("ddpm", "path", "vp", "flow"),
    ("ddpm", "cosine_weight", 1.0, "flow"),
    ("ddpm", "velocity_floor", 0.1, "flow"),
    ("flow", "sigma_data", 0.9, "edm"),
]
"""Process, field that it does not have, value, and the process that has it."""


def as_flag(name: str, value: object) -> list[str]:
    return [f"--objective.{name}"] if value is True else [f"--objective.{name}", str(value)]


@pytest.mark.parametrize(("process", "name", "value", "owner"), OTHERS)
def test_a_field_of_another_process_cannot_be_said(
    process: Process, name: str, value: object, owner: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=name):
        objective_of(process, **{name: value})
    message = rf"--objective.{name} {value} is for --objective.process {owner}, given {process}; leave it out, or set"
    flags = ["--preset", "digits", "--objective.process", process]
    with pytest.raises(ConfigError, match=message):
        parse([*flags, *as_flag(name, value)])
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"objective": {"process": process, name: value}}))
    with pytest.raises(ConfigError, match=message):
        parse(["--preset", "digits", "--config", str(file)])


@pytest.mark.parametrize(
    ("process", "name", "value"),
    [
        ("flow", "prediction", "v"),
        ("edm", "prediction", "epsilon"),
        ("ddpm", "prediction", "score"),
        ("ddpm", "weighting", "velocity"),
        ("ddpm", "weighting", "cosmap"),
        ("flow", "weighting", "p2"),
        ("edm", "weighting", "snr"),
    ],
)
def test_a_value_of_another_process_cannot_be_said(process: Process, name: str, value: str, tmp_path: Path) -> None:
    has = get_args(get_type_hints(PROCESSES[process])[name])
    assert value not in has
    flags = ["--preset", "digits", "--objective.process", process]
    with pytest.raises(ConfigError) as stopped:
        parse([*flags, f"--objective.{name}", value])
    said = str(stopped.value)
    assert all(choice in said for choice in (value, f"--objective.{name}", *has))
    file = tmp_path / "run.yaml"
    file.write_text(f"objective: {{process: {process}, {name}: {value}}}")
    with pytest.raises(ConfigError, match=rf"objective\.{name}: .*'{has[-1]}', given '{value}'"):
        parse(["--preset", "digits", "--config", str(file)])


def test_a_process_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--objective.process: ddim: .*expected one of ddpm, flow, edm"):
        parse(["--preset", "digits", "--objective.process", "ddim"])
    (tmp_path / "run.yaml").write_text("objective: {process: ddim}")
    with pytest.raises(ConfigError, match=r"run.yaml: objective.process: expected ddpm, flow, edm, given 'ddim'"):
        parse(["--preset", "digits", "--config", str(tmp_path / "run.yaml")])


def test_defaults_of_other_processes_may_be_given() -> None:
    """As commands did that set back what a preset said."""
    flags = "--preset dit-b-2-256 --objective.process flow --objective.variance fixed_small --objective.schedule linear"
    same = "--objective.no-zero_terminal_snr --objective.no_dream --objective.rescale-timesteps --objective.p2-gamma 1"
    expected = parse(flags.split()[:4])[1]
    assert expected.objective == FlowConfig(prediction="epsilon")
    for given in (flags, f"{flags} {same.replace('rescale', 'no-rescale')}"):
        assert parse(given.split())[1] == expected
    with pytest.raises(ConfigError, match=r"rescale_timesteps True is for --objective.process ddpm"):
        parse(f"{flags} {same}".split())
    with pytest.raises(ConfigError, match=r"--objective.timesteps: invalid int value: 'many'"):
        parse(f"{flags} --objective.timesteps many".split())


def test_another_process_keeps_what_it_can_have() -> None:
    """Of a preset or a file; what it cannot have gets its default."""
    noise = {"noise_offset": 0.1, "min_snr_gamma": 3.0}
    base = DdpmConfig(**noise, prediction="epsilon", schedule="cosine", zero_terminal_snr=True)
    drawn = TimestepConfig(density="importance", stratified=True)
    changed = with_process(RunConfig(objective=base, timesteps=drawn, output=OutputConfig(sample_every=0)), "flow")
    assert changed.objective == FlowConfig(**noise, prediction="epsilon")
    assert changed.timesteps == TimestepConfig(stratified=True)
    flow = RunConfig(
        objective=FlowConfig(weighting="cosmap", cosine_weight=1.0, condition_dropout=0.2),
        timesteps=TimestepConfig(density="logit_normal", mean=0.5, shift=3.0),
    )
    changed = with_process(flow, "ddpm")
    assert changed.objective == DdpmConfig(condition_dropout=0.2)
    assert changed.timesteps == TimestepConfig(density="logit_normal", mean=0.5)
    assert with_process(flow, "edm").timesteps == TimestepConfig()
    assert with_process(RunConfig(objective=EdmConfig(), timesteps=TimestepConfig(mean=-0.4)), "flow").timesteps == (
        TimestepConfig()
    )


RECORDED = [
    DdpmConfig(prediction="v", min_snr_gamma=5.0, schedule="cosine"),
    FlowConfig(path="gvp", prediction="score", weighting="velocity"),
    EdmConfig(sigma_data=0.75),
]


def recorded(config: RunConfig) -> dict[str, Any]:
    """The record of a run from when one type held the fields of all processes."""
    return as_json(config) | {"objective": in_full(config.objective)}


@pytest.mark.parametrize("objective", RECORDED)
def test_a_record_of_all_fields_is_read_and_continued(objective: Any, tmp_path: Path) -> None:
    config = replace(preset("digits"), objective=objective)
    record = recorded(config)
    assert record["objective"].keys() == DEFAULTS.keys()
    assert from_mapping(record, "a checkpoint") == config
    (tmp_path / "run.json").write_text(json.dumps({"config": record}))
    assert parse(["--config", str(tmp_path / "run.json")])[1] == config
    assert config_changes(record, as_json(config), ()) == {}


def test_a_value_without_effect_was_taken_by_every_process() -> None:
    """DREAM's exponent, without DREAM: records and commands of flow and edm may have it."""
    config = replace(preset("digits"), objective=EdmConfig())
    record = recorded(config)
    record["objective"]["dream_detail_preservation"] = 2.0
    assert from_mapping(record, "a checkpoint") == config
    flags = ["--preset", "digits", "--objective.process", "edm", "--objective.dream-detail-preservation", "2"]
    assert parse(flags)[1] == config


def test_a_record_with_a_value_of_another_process_is_refused() -> None:
    record = recorded(replace(preset("digits"), objective=FlowConfig()))
    record["objective"]["schedule"] = "cosine"
    with pytest.raises(ConfigError, match=r"--objective.schedule cosine is for --objective.process ddpm, given flow"):
        from_mapping(record, "a checkpoint")


def test_another_process_of_a_continued_run_is_one_change() -> None:
    before, now = (replace(preset("digits"), objective=kind()) for kind in (DdpmConfig, FlowConfig))
    for record in (recorded(before), as_json(before)):
        assert config_changes(record, as_json(now), ()) == {"objective.process": '"ddpm" -> "flow"'}
        vp = replace(now, objective=FlowConfig(path="vp"))
        assert config_changes(record, as_json(vp), ("objective.process",)) == {"objective.path": '"linear" -> "vp"'}


def test_processes_that_share_a_field_share_its_default() -> None:
    for kind in PROCESSES.values():
        assert {f.name: f.default for f in fields(kind) if f.name != "process"}.items() <= DEFAULTS.items()


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
        ({"shift": 0.0}, "--timesteps.shift 0.0: above 0, or latent (by the size of the latents), or pipeline"),
        ({"density": "logit_normal", "truncation": 0.5}, "--timesteps.truncation 0.5: 0 (none) or above, below 0.5"),
        ({"density": "logit_normal", "truncation": NAN}, "--timesteps.truncation nan: 0 (none) or above"),
        ({"truncation": 0.001}, "--timesteps.truncation 0.001 is for --timesteps.density logit_normal, given auto"),
        ({"density": "logit_normal", "mean": -9.0, "truncation": 0.1}, "only 5e-12 of the draws of logit_normal with"),
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
        ({"density": "later"}, "--timesteps.bias_multiplier 1 is uniform; set the multiplier to 2"),
        ({"density": "range", "bias_end": 100}, "with --timesteps.bias_multiplier 1 is uniform"),
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
        ({}, {"shift": "latent"}, "--timesteps.shift latent is for --objective.process flow, given ddpm"),
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
        RunConfig(objective=objective_of(**objective), timesteps=TimestepConfig(**timesteps))


@pytest.mark.parametrize("model", [DiTConfig(), UNetConfig()])
def test_a_learned_variance_needs_twice_the_output_channels(model: DiTConfig | UNetConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"twice the output channels: a DiT, a PixArt or an ADM UNet with --model.learn_sigma$"
    ):
        RunConfig(model=model, objective=DdpmConfig(variance="learned"))
    assert RunConfig(model=DiTConfig(learn_sigma=True), objective=DdpmConfig(variance="learned"))


@pytest.mark.parametrize("objective", [ZERO, {"schedule": "jsd"}])
def test_a_run_whose_images_would_come_from_predicted_noise_is_refused_at_once(objective: dict[str, Any]) -> None:
    noise = DdpmConfig(**objective)
    with pytest.raises(
        ConfigError, match=r"epsilon prediction cannot sample .* or turn the sampling off with --output.sample_every 0"
    ):
        RunConfig(objective=noise)
    assert RunConfig(objective=noise, output=OutputConfig(sample_every=0))
    assert RunConfig(objective=DdpmConfig(**objective, prediction="v"))
    # What is predicted is in the pipeline.
    validation, pipeline = ValidationConfig(prompts=("a",)), PretrainedConfig(path="some/pipeline", weights=True)
    assert RunConfig(model=UNetConfig(), objective=noise, pretrained=pipeline, validation=validation)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--preset dit-b-2-256 --objective.noise_offset 0.1", "--objective.variance fixed_small"),
        ("--preset dit-b-2-256 --objective.dream", "--objective.variance fixed_small"),
    ],
)
def test_an_inapplicable_value_of_a_preset_is_refused_with_the_value_to_write(flags: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"set .*{re.escape(remedy)}") as refused:
        parse(flags.split())
    assert "leave" not in str(refused.value)
    assert parse([*flags.split(), *remedy.split()])


def test_a_range_without_an_end_goes_to_the_last_timestep() -> None:
    objective = DdpmConfig(timesteps=500)
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
    for process, predicted in {"ddpm": "epsilon", "flow": "flow", "edm": "edm"}.items():
        objective = PROCESSES[process]()
        assert objective.predicted == predicted
        assert TimestepConfig().of(objective) == DENSITIES[process][0]
    assert (DdpmConfig().weighted, DdpmConfig(min_snr_gamma=5.0).weighted) == ("none", "min_snr")


def test_the_weighting_of_a_predicted_image_is_that_of_the_velocity() -> None:
    assert FlowConfig(prediction="x0").weighted == "velocity"
    assert FlowConfig(prediction="x0", weighting="none").weighted == "none"
    assert FlowConfig(prediction="x0", min_snr_gamma=5.0).weighted == "min_snr"
    assert FlowConfig().weighted == DdpmConfig(prediction="x0").weighted == "none"


@pytest.mark.parametrize(("channels", "size", "shift"), [(768, 16, 6.928203), (384, 16, 4.898979), (32, 16, 1.414214)])
def test_the_time_shift_follows_from_the_latents(channels: int, size: int, shift: float) -> None:
    """Of RAE, RiT and SR-DiT."""
    model = DiTConfig(channels=channels, size=size, patch=1)
    config = RunConfig(model=model, objective=FlowConfig(), timesteps=TimestepConfig(shift="latent"))
    assert config.time_shift == pytest.approx(shift, rel=1e-6)
    assert config.drawn_levels == TimestepConfig(shift=config.time_shift)
    assert from_mapping(as_json(config), "a checkpoint") == config
    assert replace(config, timesteps=TimestepConfig(shift=3.0)).time_shift == 3.0
