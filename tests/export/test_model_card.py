"""The objective in the model card of an export; test_export has the other parts of the card."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.config.command_line.config_file import from_mapping
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.sampler import SamplingConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported
from fastdiff.export.model_card import dropped_by_set, objective_facts, sampling_facts, use_of, write_card
from fastdiff.export.schedulers import drawing_loop
from fastdiff.export.schedulers import told as told_of_scheduler
from fastdiff.export.weights import ExportedWeights

UNIFORM = TimestepConfig()


def test_the_card_of_published_recipes() -> None:
    for name, expected in {
        "dit-xl-2-256": {
            "Noise": "linear schedule of 1000 steps",
            "Prediction": "epsilon, learned_range variance",
            "Loss": "mse, weighting none",
            "Timesteps": "uniform",
            "Conditions dropped": "0.1",
        },
        "sit-xl-2-256": {
            "Noise": "flow matching, linear path, time and velocity of SiT",
            "Prediction": "flow",
            "Loss": "mse, weighting none",
            "Timesteps": "uniform",
            "Conditions dropped": "0.1",
        },
    }.items():
        config = preset(name)
        assert objective_facts(config.objective, config.timesteps) == expected


@pytest.mark.parametrize(
    ("objective", "timesteps", "name", "words"),
    [
        (DdpmConfig(zero_terminal_snr=True, prediction="v", noise_offset=0.1), UNIFORM, "Noise",
         "linear schedule of 1000 steps, zero terminal SNR, offset 0.1"),
        (DdpmConfig(schedule="cosine", multires_noise_iterations=6, input_perturbation=0.1, dream=True), UNIFORM,
         "Noise", "cosine schedule of 1000 steps, 6 coarser resolutions, input perturbation 0.1, DREAM"),
        (EdmConfig(sigma_data=0.9), UNIFORM, "Noise", "EDM, sigma of the data 0.9"),
        (EdmConfig(), UNIFORM, "Prediction", "edm"),
        (EdmConfig(), TimestepConfig(mean=-0.6), "Timesteps",
         "log_normal, mean -0.6, standard deviation 1.2"),
        (DdpmConfig(), TimestepConfig(density="logit_normal"), "Timesteps",
         "logit_normal, mean 0, standard deviation 1"),
        (DdpmConfig(variance="fixed_large"), UNIFORM, "Prediction", "epsilon, fixed_large variance"),
        (DdpmConfig(min_snr_gamma=5.0), UNIFORM, "Loss", "mse, weighting min_snr, gamma 5"),
        (DdpmConfig(weighting="soft_min_snr"), UNIFORM, "Loss", "mse, weighting soft_min_snr, gamma 5"),
        (DdpmConfig(weighting="p2", p2_gamma=0.5), UNIFORM, "Loss", "mse, weighting p2, gamma 0.5"),
        (DdpmConfig(weighting="debiased"), UNIFORM, "Loss", "mse, weighting debiased"),
        (FlowConfig(cosine_weight=1.0), UNIFORM, "Loss",
         "mse, weighting none, cosine distance times 1"),
        (FlowConfig(contrastive_weight=0.05), UNIFORM, "Loss",
         "mse, weighting none, less 0.05 times that against the target of another sample"),
        (FlowConfig(), TimestepConfig(density="mode", shift=3.0, stratified=True), "Timesteps",
         "mode, scale 1.29, shift 3, stratified"),
        (FlowConfig(convention="repa"), UNIFORM, "Noise", "flow matching, linear path, time and velocity of REPA"),
        (FlowConfig(prediction="x0"), UNIFORM, "Prediction", "x0, velocity clamped at sigma 0.05"),
        (FlowConfig(prediction="x0"), UNIFORM, "Loss", "mse, weighting velocity"),
        (FlowConfig(), TimestepConfig(density="logit_normal", truncation=0.001, shift=4.898979), "Timesteps",
         "logit_normal, mean 0, standard deviation 1, truncated to 0.001 from its ends, shift 4.89898"),
        (DdpmConfig(), TimestepConfig(density="later", bias_multiplier=2.0), "Timesteps",
         "later, 2 times as often, 0.25 of them"),
        (DdpmConfig(), TimestepConfig(density="range", bias_multiplier=2.0, bias_end=100), "Timesteps",
         "range, 2 times as often, 0 to 100"),
        (DdpmConfig(timesteps=500), TimestepConfig(density="range", bias_multiplier=2.0, bias_begin=9),
         "Timesteps", "range, 2 times as often, 9 to 500"),
    ],
)  # fmt: skip
def test_the_card_of_an_objective(objective: ObjectiveConfig, timesteps: TimestepConfig, name: str, words: str) -> None:
    assert objective_facts(objective, timesteps)[name] == words


def test_the_card_says_how_the_recipe_is_sampled() -> None:
    assert sampling_facts(SamplingConfig()) == {}
    sampling = SamplingConfig(
        scheduler="euler", steps=249, shift=1 / 0.3, cfg=10.0, cfg_channels=3, cfg_interval=(0.0, 0.9), protocol="adm"
    )
    assert sampling_facts(sampling) == {
        "Sampler (`fastdiff sample`)": "euler, 249 steps, shift 3.33333, guidance 10, of the first 3 channels, at "
        "noise levels 0 to 0.9, reference of adm"
    }
    unguided = SamplingConfig(scheduler="heun", shift="latent", cfg=1.0, clip=False, labels="balanced")
    assert list(sampling_facts(unguided).values()) == [
        "heun, shift latent, guidance 1, estimates not clamped, balanced classes"
    ]


def test_the_code_of_a_card_draws_as_the_recipe_does() -> None:
    own = SamplingConfig(scheduler="dpmsolver++", steps=12)
    plain, drawn = (RunConfig(sampling=each) for each in (SamplingConfig(), own))
    assert "sampler is" not in told_of_scheduler(plain)
    assert "The run's own sampler is dpmsolver++, which `fastdiff sample` draws with." in told_of_scheduler(drawn)
    assert "scheduler.set_timesteps(50)\n" in drawing_loop(plain, Place(Path("out")), classes=True)[0]
    assert "scheduler.set_timesteps(12)\n" in drawing_loop(drawn, Place(Path("out")), classes=True)[0]


@pytest.mark.parametrize("format_", ["dit", "safetensors"])
def test_the_time_that_a_flow_or_edm_model_gets_is_on_the_card(format_: str) -> None:
    for given, words in {
        FlowConfig(): "1000 t (t = 0: the data, 1: noise); it returns the velocity dx/dt:",
        FlowConfig(prediction="score"): "returns the score:",
        FlowConfig(prediction="x0", convention="sit"): "x and t (t = 0: noise, 1: the data); it returns x0:",
        FlowConfig(convention="repa"): "x and t (t = 0: the data, 1: noise); it returns the velocity dx/dt:",
        EdmConfig(): "c_in x and ln(sigma) / 4; it returns F of the denoiser c_skip x + c_out F",
    }.items():
        card = use_of(RunConfig(objective=given), format_, Place(Path("out")))
        assert words in card
        assert "the sampler that comes with DiT cannot use it" in card
    sit = use_of(preset("sit-xl-2-256"), format_, Place(Path("out")))
    assert (
        "Its inputs are x and t (t = 0: noise, 1: the data); it returns the velocity dx/dt in the first half of its "
        "channels: the sampler that comes with DiT cannot use it, that of SiT can: "
        '`create_transport("Linear", "velocity")`.'
    ) in sit
    assert "cannot use it" not in use_of(preset("dit-xl-2-256"), format_, Place(Path("out")))


def test_the_card_of_networks_in_pixel_space() -> None:
    adm = AdmConfig(size=32, width=64, channel_mult=(1, 2), attention_resolutions=(16,), classes=10, learn_sigma=True)
    objective = DdpmConfig(timesteps=4000, rescale_timesteps=True, variance="learned_range")
    config = RunConfig(model=adm, objective=objective, output=OutputConfig(sample_every=0))
    for format_, code, class_ in (
        (
            "iddpm",
            'torch.load("out/ema_0.9999_000123.pt", weights_only=True)',
            "UNetModel(in_channels=3, model_channels=64, ",
        ),
        ("safetensors", 'load_file("out/model.safetensors")', "attention_resolutions=(2,), dropout=0.0, "),
        ("diffusers", 'UNet2DModel.from_pretrained("out", subfolder="unet")', "Class 10 is the null class."),
    ):
        card = use_of(config, format_, Place(Path("out")), 123)
        assert code in card
        assert class_ in card
        assert "Its time input is t * 1000 / 4000 (`rescale_timesteps`), not the timestep t." in card
    guided = replace(config, model=replace(adm, head_channels=32, low_res_size=8))
    expected = "guided-diffusion; create its class with `SuperResModel(image_size=32, num_head_channels=32, "
    assert expected in use_of(guided, "iddpm", Place(Path("out")))
    for order, told in (("head_major", "use_new_attention_order=False"), ("qkv_major", "use_new_attention_order=True")):
        card = use_of(replace(guided, model=replace(guided.model, qkv_order=order)), "safetensors", Place(Path("out")))
        assert told in card
    ordered = use_of(replace(config, model=replace(adm, qkv_order="qkv_major")), "iddpm", Place(Path("out")))
    assert "guided-diffusion; create its class with `UNetModel(image_size=32" in ordered


def called(model: AdmConfig) -> tuple[str, str, dict[str, Any]]:
    """Whose class the card of a checkpoint names, which one, and with what: the code of the card, run."""
    config = RunConfig(model=model, output=OutputConfig(sample_every=0))
    read = from_mapping(as_json(config), "a checkpoint")
    card = use_of(read, "iddpm", Place(Path("out")))
    found = re.search(r"The parameter names match (\S+); create its class with `(\w+)\((.*)\)`\.", card)
    assert found is not None
    return found[1], found[2], eval(f"dict({found[3]})")


def test_the_published_class_takes_its_arguments_as_integers() -> None:
    """A checkpoint records multiples as floats, with which improved-diffusion's class fails."""
    model = AdmConfig(size=32, width=64, channel_mult=(1, 2, 4), attention_resolutions=(16, 8), heads=2)
    whose, class_, given = called(model)
    assert (whose, class_) == ("improved-diffusion", "UNetModel")
    assert repr(given["channel_mult"]) == "(1, 2, 4)"
    assert given["attention_resolutions"] == (2, 4)
    assert {name: value for name, value in given.items() if isinstance(value, float)} == {"dropout": 0.0}
    assert called(replace(model, low_res_size=8))[:2] == ("improved-diffusion", "SuperResModel")


@pytest.mark.parametrize("multiples", [(1, 1.5), (2, 3), (0.5, 1)])
def test_networks_that_improved_diffusion_cannot_build_get_guided_diffusions_class(
    multiples: tuple[float, ...],
) -> None:
    """It multiplies without rounding, and its first convolution and its last norm have the width of the network."""
    model = AdmConfig(size=16, width=64, channel_mult=multiples, attention_resolutions=(8,))
    whose, class_, given = called(model)
    assert (whose, class_) == ("guided-diffusion", "UNetModel")
    assert repr(given["channel_mult"]) == repr(multiples)
    assert given["image_size"] == 16
    assert given["num_head_channels"] == -1


@pytest.mark.parametrize("format_", ["iddpm", "safetensors"])
def test_group_norms_that_the_published_class_lacks_are_noted(format_: str) -> None:
    model = AdmConfig(size=16, width=64, channel_mult=(1, 2), attention_resolutions=(8,), norm_num_groups=16)
    config = RunConfig(model=model, output=OutputConfig(sample_every=0))
    said = "network has 16 groups, in the class of improved-diffusion 32: unless you change that class, it"
    assert said in use_of(config, format_, Place(Path("out")))
    assert "groups" not in use_of(config, "diffusers", Place(Path("out"))), "there it is an argument"
    usual = replace(config, model=replace(model, norm_num_groups=32))
    assert "groups" not in use_of(usual, format_, Place(Path("out")))


def test_the_prediction_and_its_samplers_are_on_the_card() -> None:
    adm = RunConfig(model=AdmConfig(), output=OutputConfig(sample_every=0))
    for config, whose in ((RunConfig(), "DiT"), (adm, "its class")):
        published = ("dit", "dit-training", "safetensors") if whose == "DiT" else ("iddpm", "safetensors")
        previous = "cannot use it" if whose == "DiT" else "with `model_mean_type=ModelMeanType.PREVIOUS_X`"
        for prediction, returned, ours, diffusers in (
            ("v", "v", "cannot use it", 'a scheduler needs `prediction_type="v_prediction"`, which `scheduler/` has'),
            (
                "x0",
                "x0",
                "with `predict_xstart=True`",
                'a scheduler needs `prediction_type="sample"`, which `scheduler/` has',
            ),
            ("previous_x", "the mean of the previous step", previous, "no scheduler of diffusers can use it"),
        ):
            given = replace(config, objective=DdpmConfig(prediction=prediction))  # type: ignore[arg-type]
            for format_ in published:
                card = use_of(given, format_, Place(Path("out")))
                [line] = [line for line in card.splitlines() if line.startswith("It returns ")]
                assert line.startswith(f"It returns {returned}: ")
                assert f"the sampler that comes with {whose} {ours}." in line
            assert f"It returns {returned}: {diffusers}." in use_of(given, "diffusers", Place(Path("out")))
        for format_ in (*published, "diffusers"):
            assert "It returns" not in use_of(config, format_, Place(Path("out")))


def test_time_and_prediction_are_both_on_the_card() -> None:
    objective = DdpmConfig(timesteps=4000, rescale_timesteps=True, prediction="v", variance="learned_range")
    model = AdmConfig(learn_sigma=True)
    config = RunConfig(model=model, objective=objective, output=OutputConfig(sample_every=0))
    card = use_of(config, "iddpm", Place(Path("out")))
    assert "Its time input is t * 1000 / 4000 (`rescale_timesteps`)" in card
    assert "It returns v in the first half of its channels: the sampler" in card


def test_the_file_to_load_is_the_first_average() -> None:
    config = RunConfig(model=AdmConfig(), output=OutputConfig(sample_every=0))
    for rates, name in {(0.999, 0.5): "ema_0.999_000007.pt", (): "model000007.pt"}.items():
        read = from_mapping(as_json(replace(config, ema=EmaConfig(rates=rates))), "a checkpoint")
        assert f'"out/{name}"' in use_of(read, "iddpm", Place(Path("out")), 7)


def test_the_card_of_a_dit_training() -> None:
    card = use_of(preset("dit-xl-2-256"), "dit-training", Place(Path("out")), 400_000)
    assert 'torch.load("out/0400000.pt", weights_only=True)["ema"]' in card
    assert "safe_globals([Namespace])" in card


def test_shares_of_dropped_conditions_are_those_of_the_data_sets() -> None:
    sets = {"photos": {"digest": "a", "condition_dropout": 0.1}, "dogs": {"digest": "b"}}
    assert dropped_by_set({"datasets": sets}, 0.2) == {"Conditions dropped": "photos 0.1, others 0.2"}
    assert dropped_by_set({"datasets": {"dogs": {"digest": "b"}}}, 0.2) == {} == dropped_by_set({}, 0.2)


def test_a_card_names_no_library_whose_network_would_compute_something_else(tmp_path: Path) -> None:
    """With muP the readout is divided, which the class of diffusers does not do."""
    run = preset("pixart-256")
    for base in (0, 288):
        config = replace(run, model=replace(run.model, base_width=base))  # type: ignore[call-arg]
        weights = ExportedWeights({}, lambda name: torch.zeros(()), "initial weights")
        exported = Exported(None, config, weights, torch.float32)
        write_card(tmp_path, tmp_path, exported, "safetensors", "fp32", Place(tmp_path))
        card = (tmp_path / "README.md").read_text()
        assert ("\nlibrary_name: diffusers\n" in card) == (base == 0)
