"""What a run says that is not as in the published recipe of its preset."""

from dataclasses import replace

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import preset
from fastdiff.config.presets.departures import departure
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplingConfig

NAME = "lightningdit-xl-1-256"


def test_another_network_rate_or_process_is_named_with_the_value_of_the_recipe() -> None:
    recipe = preset(NAME)
    assert isinstance(recipe.model, DiTConfig)
    assert isinstance(recipe.optim, AdamWConfig)
    latents = replace(recipe, model=replace(recipe.model, channels=4, size=32))
    assert departure(latents, NAME) == (
        f"not the recipe of {NAME}: model.channels 4 instead of 32, model.size 32 instead of 16"
    )
    rate = replace(recipe, optim=replace(recipe.optim, lr=1e-4), ema=EmaConfig(rates=(0.999,)))
    assert departure(rate, NAME).endswith(
        f"{NAME}: optim.lr 0.0001 instead of 0.0002, ema.rates (0.999,) instead of (0.9999,)"
    )
    process = departure(replace(recipe, objective=DdpmConfig(), sampling=SamplingConfig()), NAME)
    assert "objective.process ddpm instead of flow" in process
    assert "objective.cosine_weight None instead of 1.0" in process
    assert "objective.schedule linear instead of None" in process


def test_what_a_preset_itself_has_otherwise_is_named_before_the_flags() -> None:
    name = "sr-dit-b-1-256"
    recipe = preset(name)
    itself = departure(recipe, name)
    assert itself.startswith(f"not the recipe of {name}: a contrastive term of the pairs by position instead of ")
    shorter = departure(replace(recipe, samples=1024), name)
    assert shorter == f"{itself}, samples 1024 instead of 102400000"


def test_a_recipe_and_what_does_not_change_it_are_not_named() -> None:
    recipe = preset(NAME)
    machine = replace(
        recipe, seed=3, batch=BatchConfig(samples=1024, micro=16), performance=PerformanceConfig(device="cpu"),
        ema=EmaConfig(rates=(0.9999,), power_stds=(0.05, 0.1), snapshot_every=100),
    )  # fmt: skip
    assert departure(recipe, NAME) == departure(machine, NAME) == ""
    shorter = replace(recipe, samples=1024)
    assert departure(shorter, "digits") == departure(shorter, None) == "", "of no published recipe"
