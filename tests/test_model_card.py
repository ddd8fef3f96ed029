"""What the card of an exported model says of its objective; the rest of it is in test_export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.config import OutputConfig, RunConfig
from fastdiff.model_card import Place, objective_facts, use_of
from fastdiff.model_config import AdmConfig
from fastdiff.objective_config import DiffusionConfig
from fastdiff.presets import preset
from fastdiff.timestep_config import TimestepConfig

UNIFORM = TimestepConfig()


def test_of_the_published_recipes() -> None:
    for name, expected in {
        "dit-xl-2-256": {
            "Noise": "linear schedule of 1000 steps",
            "Prediction": "epsilon, learned_range variance",
            "Loss": "mse, weighting none",
            "Timesteps": "uniform",
            "Conditions dropped": "0.1",
        },
        "sit-xl-2-256": {
            "Noise": "flow matching, linear path",
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
        (DiffusionConfig(zero_terminal_snr=True, prediction="v", noise_offset=0.1), UNIFORM, "Noise",
         "linear schedule of 1000 steps, zero terminal SNR, offset 0.1"),
        (DiffusionConfig(schedule="cosine", multires_noise_iterations=6, input_perturbation=0.1, dream=True), UNIFORM,
         "Noise", "cosine schedule of 1000 steps, 6 coarser resolutions, input perturbation 0.1, DREAM"),
        (DiffusionConfig(process="edm", sigma_data=0.9), UNIFORM, "Noise", "EDM, sigma of the data 0.9"),
        (DiffusionConfig(process="edm"), UNIFORM, "Prediction", "edm"),
        (DiffusionConfig(process="edm"), TimestepConfig(mean=-0.6), "Timesteps",
         "log_normal, mean -0.6, standard deviation 1.2"),
        (DiffusionConfig(), TimestepConfig(density="logit_normal"), "Timesteps",
         "logit_normal, mean 0, standard deviation 1"),
        (DiffusionConfig(variance="fixed_large"), UNIFORM, "Prediction", "epsilon, fixed_large variance"),
        (DiffusionConfig(min_snr_gamma=5.0), UNIFORM, "Loss", "mse, weighting min_snr, gamma 5"),
        (DiffusionConfig(weighting="soft_min_snr"), UNIFORM, "Loss", "mse, weighting soft_min_snr, gamma 5"),
        (DiffusionConfig(weighting="p2", p2_gamma=0.5), UNIFORM, "Loss", "mse, weighting p2, gamma 0.5"),
        (DiffusionConfig(weighting="debiased"), UNIFORM, "Loss", "mse, weighting debiased"),
        (DiffusionConfig(process="flow", cosine_weight=1.0), UNIFORM, "Loss",
         "mse, weighting none, cosine distance times 1"),
        (DiffusionConfig(process="flow"), TimestepConfig(density="mode", shift=3.0, stratified=True), "Timesteps",
         "mode, scale 1.29, shift 3, stratified"),
        (DiffusionConfig(), TimestepConfig(density="later", bias_multiplier=2.0), "Timesteps",
         "later, 2 times as often, 0.25 of them"),
        (DiffusionConfig(), TimestepConfig(density="range", bias_multiplier=2.0, bias_end=100), "Timesteps",
         "range, 2 times as often, 0 to 100"),
        (DiffusionConfig(timesteps=500), TimestepConfig(density="range", bias_multiplier=2.0, bias_begin=9),
         "Timesteps", "range, 2 times as often, 9 to 500"),
    ],
)  # fmt: skip
def test_of_an_objective(objective: DiffusionConfig, timesteps: TimestepConfig, name: str, words: str) -> None:
    assert objective_facts(objective, timesteps)[name] == words


@pytest.mark.parametrize("format_", ["dit", "safetensors"])
def test_what_a_model_without_timesteps_is_told(format_: str) -> None:
    for given, words in {
        DiffusionConfig(process="flow"): "1000 t (t = 0: the data, 1: noise) and returns the velocity dx/dt:",
        DiffusionConfig(process="flow", prediction="score"): "returns the score:",
        DiffusionConfig(process="edm"): "c_in x and ln(sigma) / 4 and returns F of the denoiser c_skip x + c_out F",
    }.items():
        card = use_of(RunConfig(objective=given), format_, Place(Path("out")))
        assert words in card
        assert "the sampler that comes with DiT cannot use it" in card
    assert "in the first half of its channels:" in use_of(preset("sit-xl-2-256"), format_, Place(Path("out")))
    assert "cannot use it" not in use_of(preset("dit-xl-2-256"), format_, Place(Path("out")))


def test_of_networks_in_pixel_space() -> None:
    adm = AdmConfig(size=32, width=64, channel_mult=(1, 2), attention_resolutions=(16,), classes=10, learn_sigma=True)
    objective = DiffusionConfig(timesteps=4000, rescale_timesteps=True, variance="learned_range")
    config = RunConfig(model=adm, objective=objective, output=OutputConfig(sample_every=0))
    for format_, code, class_ in (
        (
            "iddpm",
            'torch.load("out/model000123.pt", weights_only=True)',
            "UNetModel(in_channels=3, model_channels=64, ",
        ),
        ("safetensors", 'load_file("out/model.safetensors")', "attention_resolutions=(2,), dropout=0.0, "),
        ("diffusers", 'UNet2DModel.from_pretrained("out", subfolder="unet")', "Class 10 stands for no class."),
    ):
        card = use_of(config, format_, Place(Path("out")), 123)
        assert code in card
        assert class_ in card
        assert "It is told t * 1000 / 4000 (`rescale_timesteps`) instead of the timestep t." in card
    guided = replace(config, model=replace(adm, head_channels=32, low_res_size=8))
    expected = "guided-diffusion, whose class takes them as `SuperResModel(image_size=32, num_head_channels=32, "
    assert expected in use_of(guided, "iddpm", Place(Path("out")))
    for order, told in (("head_major", "use_new_attention_order=False"), ("qkv_major", "use_new_attention_order=True")):
        card = use_of(replace(guided, model=replace(guided.model, qkv_order=order)), "safetensors", Place(Path("out")))
        assert told in card
    ordered = use_of(replace(config, model=replace(adm, qkv_order="qkv_major")), "iddpm", Place(Path("out")))
    assert "guided-diffusion, whose class takes them as `UNetModel(image_size=32" in ordered


def test_of_a_training_of_dit() -> None:
    card = use_of(preset("dit-xl-2-256"), "dit-training", Place(Path("out")), 400_000)
    assert 'torch.load("out/0400000.pt", weights_only=True)["ema"]' in card
    assert "safe_globals([Namespace])" in card
