"""Every preset is a run that can be built and names its source."""

import inspect
import re

import pytest
import torch

from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import FID_400K, PRESETS, preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model

DIT = [f"dit-{letter.lower()}-{patch}-256" for letter in DIT_SIZES for patch in DIT_PATCHES]
PUBLISHED = [*DIT, "sit-xl-2-256"]
IMAGENET = ["lightningdit-xl-1-256", "jit-b-16-256", "rit-xl-256", "sr-dit-b-1-256"]

# Millions, as table 4 of Peebles & Xie 2023 has them: without the embedding of positions, which has no gradient.
TABLE_4 = {
    "s": {2: 33, 4: 33, 8: 33},
    "b": {2: 130, 4: 130, 8: 131},
    "l": {2: 458, 4: 458, 8: 459},
    "xl": {2: 675, 4: 675, 8: 676},
}
OTHERS = {
    "digits": 1.274, "digits-fast": 1.274, "digits-adm": 0.7566, "digits-sr": 0.7569, "digits-t2i": 0.793,
    "digits-t2i-dit": 1.232, "dit-xl-2-256-fast": 674.8,
    "sd15-512": 859.5, "sd2-512": 865.9, "sd15-finetune": 859.5, "sd15-lora": 859.5, "sdxl-lora": 2567.5,
    "sdxl-finetune": 2567.5,
    "dit-small-images": 4.164, "pixart-256": 610.9, "flux2-klein-lora": 3875.5, "flux2-klein": 3875.5,
    "sd35-medium-lora": 2243.2, "sd35-medium": 2243.2,
    "z-image-lora": 6154.9, "z-image": 6154.9, "qwen-image-lora": 20430.4, "qwen-image": 20430.4,
    "iddpm-imagenet64": 121.06, "iddpm-imagenet64-cond": 273.05, "iddpm-cifar10": 52.55, "iddpm-lsun256": 113.68,
    "iddpm-upsampler": 279.79,
}  # fmt: skip


def millions(config: RunConfig) -> float:
    with torch.device("meta"):
        model = build_model(config.model)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize("name", DIT)
def test_the_short_name_of_a_dit_leads_to_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown; did you mean {name}( or {name}-fast)?[?]"):
        preset(name.removesuffix("-256"))


def test_an_unknown_name_leads_to_those_that_begin_with_it_or_to_the_nearest() -> None:
    for given, hint in (
        ("sd15", "did you mean sd15-512 or sd15-finetune or sd15-lora? `fastdiff train --help` lists all presets"),
        ("digist", "did you mean digits? "),
        ("nope", "unknown; nearest: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(hint)):
            preset(given)


def test_these_are_the_presets() -> None:
    assert sorted(PRESETS) == sorted([*PUBLISHED, *IMAGENET, *OTHERS])
    assert len(DIT) == 12


@pytest.mark.parametrize("name", DIT)
def test_a_dit_has_the_parameters_of_the_paper(name: str) -> None:
    _, letter, patch, _ = name.split("-")
    assert round(millions(preset(name))) == TABLE_4[letter][int(patch)]


@pytest.mark.nightly
def test_the_other_networks_have_their_sizes() -> None:
    assert millions(preset("sit-xl-2-256")) == millions(preset("dit-xl-2-256")) == pytest.approx(674.83, abs=0.005)
    for name, expected in OTHERS.items():
        assert millions(preset(name)) == pytest.approx(expected, rel=0.01), name


def check_constant_rate(config: RunConfig, optim: AdamWConfig) -> None:
    """AdamW at a rate that never changes, and one average."""
    assert config.optim == optim
    assert (config.optim.schedule, config.optim.warmup_steps) == ("constant", 0)
    assert (config.ema.rates, config.ema.warmup) == ((0.9999,), False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_is_that_of_the_papers(name: str) -> None:
    """Sections 4 of both papers and the two train.py."""
    config = preset(name)
    assert (config.steps, config.batch.samples) == (400_000, 256)
    check_constant_rate(config, AdamWConfig(name="adamw", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, clip=0.0))
    assert (config.data.random_flip, config.objective.condition_dropout) == (True, 0.1)
    assert config.timesteps == TimestepConfig()
    assert isinstance(config.model, DiTConfig)
    assert (config.model.size, config.model.channels, config.model.classes) == (32, 4, 1000)
    assert config.model.learn_sigma, "both have the outputs for a variance"
    objective = config.objective
    assert objective.weighted == "none"
    if name in DIT:
        assert isinstance(objective, DdpmConfig)
        assert (objective.schedule, objective.timesteps, objective.loss) == ("linear", 1000, "mse")
        assert (objective.predicted, objective.variance) == ("epsilon", "learned_range")
    else:
        assert isinstance(objective, FlowConfig)
        assert (objective.path, objective.predicted) == ("linear", "flow")
        assert objective.convention == "sit", "published weights get the time that they were trained with"


def test_lightningdit_is_trained_as_its_configuration_says() -> None:
    """lightningdit_xl_vavae_f16d32.yaml, its train.py and transport."""
    config = preset("lightningdit-xl-1-256")
    assert (config.steps, config.batch.samples, config.data.random_flip) == (80_000, 1024, True)
    check_constant_rate(config, AdamWConfig(lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0, clip=0.0))
    objective = config.objective
    assert isinstance(objective, FlowConfig)
    assert (objective.path, objective.predicted, objective.convention) == ("linear", "flow", "sit")
    assert (objective.cosine_weight, objective.condition_dropout, objective.weighted) == (1.0, 0.1, "none")
    assert config.timesteps == TimestepConfig(density="logit_normal"), "mean 0, deviation 1, and no shift in training"


@pytest.mark.parametrize(
    ("name", "epochs", "batch", "per_epoch", "clip", "timesteps"),
    [
        ("jit-b-16-256", 600, 1024, 1251, 0.0, TimestepConfig(density="logit_normal", mean=0.8, std=0.8)),
        (
            "rit-xl-256", 800, 1536, 834, 1.0,
            TimestepConfig(density="logit_normal", truncation=1e-3, shift="latent"),
        ),
    ],
)  # fmt: skip
def test_jit_and_rit_are_trained_as_their_scripts_say(
    name: str, epochs: int, batch: int, per_epoch: int, clip: float, timesteps: TimestepConfig
) -> None:
    """README of JiT (its time is 1 at the data: the mean is -0.8 there), train.sh and main.py of RiT."""
    config = preset(name)
    assert (config.steps, config.batch.samples, config.data.random_flip) == (epochs * per_epoch, batch, True)
    optim = config.optim
    assert isinstance(optim, AdamWConfig)
    assert optim.lr == pytest.approx(5e-5 * batch / 256)
    assert (optim.betas, optim.weight_decay, optim.clip) == ((0.9, 0.95), 0.0, clip)
    assert (optim.schedule, optim.warmup_steps) == ("constant_with_warmup", 5 * per_epoch)
    assert config.ema.rates == (0.9999, 0.9996), "the first draws"
    objective = config.objective
    assert isinstance(objective, FlowConfig)
    assert (objective.path, objective.predicted, objective.convention) == ("linear", "x0", "sit")
    assert (objective.weighted, objective.velocity_floor, objective.condition_dropout) == ("velocity", 0.05, 0.1)
    token = (384, 0.2) if name.startswith("rit") else (0, 0.0)
    assert (config.model.teacher_width, objective.teacher_weight) == token, "--use_cls --cls_loss_weight 0.2"
    assert config.timesteps == timesteps
    assert config.time_shift == pytest.approx(4.899 if name.startswith("rit") else 1.0, abs=1e-3)


def test_sr_dit_is_trained_as_its_script_says() -> None:
    """train.sh and the defaults of train.py, models/sit.py and loss.py of SpeedrunDiT."""
    name = "sr-dit-b-1-256"
    config = preset(name)
    assert (config.steps, config.batch.samples, config.data.random_flip) == (400_000, 256, False)
    check_constant_rate(config, AdamWConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, clip=1.0))
    objective = config.objective
    assert isinstance(objective, FlowConfig)
    assert (objective.path, objective.predicted, objective.convention) == ("linear", "flow", "repa")
    assert (objective.weighted, objective.cosine_weight, objective.condition_dropout) == ("none", 0.0, 0.1)
    weights = (objective.teacher_weight, objective.alignment_weight, objective.contrastive_weight)
    assert weights == (0.03, 0.5, 0.05), "--cls --proj-coeff --cfm-coeff"
    assert objective.alignment_steps == 0, "never stopped"
    assert config.timesteps == TimestepConfig(density="uniform", shift="latent")
    assert config.time_shift == pytest.approx(2**0.5), "sqrt(32 * 16 * 16 / 4096)"
    model = config.model
    assert isinstance(model, DiTConfig)
    assert (model.depth, model.hidden, model.heads, model.patch) == (12, 768, 12, 1), "SiT-B/1"
    assert (model.channels, model.size, model.classes, model.learn_sigma) == (32, 16, 1000, False)
    assert (model.norm, model.norm_eps, model.qk_norm_eps) == ("rms", 1e-6, pytest.approx(2**-23, rel=1e-6))
    assert (model.mlp, model.positions, model.modulation) == ("gelu", "sincos", "adaln")
    route = model.route
    assert route is not None
    assert (route.blocks, route.tokens, route.kept) == (range(2, 10), 257, 64), "int(257 * 0.25) of all tokens"
    assert (route.path_drop, route.dense_share) == (0.05, 0.0)
    assert (model.aligned_width, model.aligned_hidden, model.aligned_token) == (768, 2048, True), "all 257 tokens"
    with torch.device("meta"):
        names = dict(build_model(model).named_parameters())
    assert all(f"blocks.{block}.attn.v1_lambda" in names for block in range(1, 12))
    assert names["wg_norm.weight"].shape == (768,)
    assert model.aligned_block == len(range(route.blocks.start)), "behind the last block in front of the sparse path"


def test_the_samplers_of_the_recipes_are_those_of_their_evaluations() -> None:
    """In our time, which is 1 for noise: an interval of guidance [a, b] of theirs is [1 - b, 1 - a]; JiT's is open."""
    samplers = {name: preset(name).sampling for name in ["sit-xl-2-256", *IMAGENET]}
    lightning, jit, rit, sr, sit = (samplers[name] for name in (*IMAGENET, "sit-xl-2-256"))
    assert (sit.scheduler, sit.steps, sit.cfg) == ("euler-maruyama", 250, 1.0)
    assert (lightning.scheduler, lightning.steps) == ("euler", 249)
    assert {(one.labels, one.protocol) for one in (sit, lightning)} == {("random", "adm")}
    assert (lightning.cfg, lightning.cfg_channels, lightning.cfg_interval) == (10.0, 3, (0.0, 0.9))
    theirs = 0.4
    shifted = 0.3 * theirs / (1 + (0.3 - 1) * theirs)
    ours = 1 - theirs
    assert isinstance(lightning.shift, float)
    assert 1 - lightning.shift * ours / (1 + (lightning.shift - 1) * ours) == pytest.approx(shifted)
    for one, steps, cfg, interval in ((jit, 50, 2.9, (0.0, 0.899)), (rit, 25, 3.7, (0.02, 0.9))):
        assert (one.scheduler, one.steps, one.cfg, one.cfg_interval) == ("heun", steps, cfg, interval)
        assert (one.cfg_channels, one.labels, one.protocol) == (None, "balanced", "torch-fidelity")
        assert one.shift is None, "as in training"
    assert (rit.coupled_noise, jit.coupled_noise) == (True, False)
    assert (sr.scheduler, sr.steps, sr.cfg, sr.cfg_interval) == ("euler-maruyama", 250, 2.5, (0.0, 0.85))
    assert (sr.shift, sr.labels, sr.protocol) == (None, "balanced", "adm")
    assert jit.clip is False, "its estimates of the image are not clamped"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_its_command_and_its_result(name: str) -> None:
    text = inspect.getdoc(PRESETS[name]) or ""
    assert f"--preset {name}" in text or f"make demo-{name.removeprefix('digits-')}" in text
    assert re.search(r"Measured \(bench/results/|Not measured (yet|here)\.", text)
    assert max(map(len, text.splitlines())) <= 120
    if name in (*PUBLISHED, *IMAGENET):
        assert re.search(r"arXiv:\d{4}\.\d{5}", text)
    if name in PUBLISHED:
        assert "--ema.power_stds 0.05 0.1" in text
    if name in DIT:
        _, letter, patch, _ = name.split("-")
        assert f"Expected: FID-50K {FID_400K[f'{letter.upper()}/{patch}']:.2f} without guidance" in text


def test_the_expected_results_are_those_of_the_paper() -> None:
    """Spot checks of table 4, and its order: a smaller patch and a larger network are better."""
    assert (FID_400K["XL/2"], FID_400K["B/4"], FID_400K["S/8"]) == (19.47, 68.38, 153.60)
    for letter in DIT_SIZES:
        assert FID_400K[f"{letter}/2"] < FID_400K[f"{letter}/4"] < FID_400K[f"{letter}/8"]
    for patch in DIT_PATCHES:
        values = [FID_400K[f"{letter}/{patch}"] for letter in DIT_SIZES]
        assert values == sorted(values, reverse=True)
