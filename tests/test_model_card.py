"""What the card of an exported model says of its objective; the rest of it is in test_export."""

from __future__ import annotations

import pytest

from fastdiff.model_card import objective_facts
from fastdiff.objective_config import DiffusionConfig, TimestepConfig
from fastdiff.presets import preset

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
        (DiffusionConfig(process="edm"), TimestepConfig(mean=-0.6), "Timesteps", "log_normal, mean -0.6"),
        (DiffusionConfig(variance="fixed_large"), UNIFORM, "Prediction", "epsilon, fixed_large variance"),
        (DiffusionConfig(min_snr_gamma=5.0), UNIFORM, "Loss", "mse, weighting min_snr, gamma 5"),
        (DiffusionConfig(process="flow", cosine_weight=1.0), UNIFORM, "Loss",
         "mse, weighting none, cosine distance times 1"),
        (DiffusionConfig(process="flow"), TimestepConfig(density="mode", shift=3.0, stratified=True), "Timesteps",
         "mode, scale 1.29, shift 3, stratified"),
        (DiffusionConfig(), TimestepConfig(density="later", bias_multiplier=2.0), "Timesteps",
         "later, 2 times as often, 0.25 of them"),
        (DiffusionConfig(), TimestepConfig(density="range", bias_multiplier=2.0, bias_end=100), "Timesteps",
         "range, 2 times as often, 0 to 100"),
    ],
)  # fmt: skip
def test_of_an_objective(objective: DiffusionConfig, timesteps: TimestepConfig, name: str, words: str) -> None:
    assert objective_facts(objective, timesteps)[name] == words
