"""Runs that ``fastdiff compat`` starts, against the published steps of the scripts that it translates.

A run is dumped (clean images, noise, timesteps and conditions of every micro-batch, and the initial weights) and fed to
an independent rendering of the script's step in float64: network, loss, accumulation, clipping, AdamW, schedule and
average. Nothing of fastdiff computes there.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from fastdiff.batch import Batch, Condition
from fastdiff.cli.compat.run import translate
from fastdiff.cli.main import main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.models.load import build_network, resolve
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.training import build as building
from fastdiff.training.loop import train
from fastdiff_kernels.noising import dequantised
from tests.cli.test_compat import run_of
from tests.support.inputs.family_pipelines import TOKENS, family_pipeline
from tests.support.inputs.images import encode, natural
from tests.support.nights import by_day
from tests.support.references.adm_reference import Reference as AdmReference
from tests.support.references.dit_reference import reference_forward
from tests.support.references.transformer_families import FAMILIES
from tests.support.references.variational_reference import cosine_betas, linear_betas
from tests.support.runs import launch, losses, newest, records

STEPS = 20
TOLERANCE = 1e-5
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Micro:
    """A micro-batch as the network saw it: ``clean`` and ``noise`` ``[B, C, H, W]``, ``time`` ``[B]``, in float64."""

    clean: Tensor
    noise: Tensor
    time: Tensor
    condition: Condition
    depth: Tensor
    """``[B]``, the share of noise: t of flow."""


@pytest.fixture
def dump(monkeypatch: pytest.MonkeyPatch) -> list[Micro]:
    """Every micro-batch of the steps of a test's runs, without the rehearsals."""
    found: list[Micro] = []
    add_noise = Objective.add_noise

    def dumped(self: Objective, batch: Batch, *args: Any, **options: Any) -> Any:
        made = add_noise(self, batch, *args, **options)
        shape, clean = made.noisy.shape[1:], dequantised(batch.latents, torch.float64)
        if self.posterior:
            mean, std = clean.chunk(2, dim=1)
            clean = mean + std * normal(self.seed, Stream.POSTERIOR, batch.position, shape)
        noise = normal(self.seed, Stream.NOISE, batch.position, shape).double()
        condition = {
            name: value.double() if value.is_floating_point() else value for name, value in made.condition.items()
        }
        levels = made.levels
        found.append(Micro(clean, noise, levels.row.clone(), condition, levels.depth[levels.row].double()))
        return made

    monkeypatch.setattr(Objective, "add_noise", dumped)
    rehearse = building.rehearse

    def rehearsed(*arguments: Any) -> None:
        rehearse(*arguments)
        found.clear()

    monkeypatch.setattr(building, "rehearse", rehearsed)
    return found


@dataclass
class Script:
    """The training step of a script, without its loss."""

    rate: Callable[[int], float]
    """Learning rate of step n, from 0."""
    weight_decay: float
    clip: float = 0.0
    summed: bool = False
    """Whether the gradients of the micro-batches are summed instead of averaged."""
    decays: dict[float, Callable[[int], float]] = field(default_factory=dict)
    """Decay of each average after step n, from 1, by its name in the run."""

    def replay(
        self, weights: Weights, loss_of: Callable[[Weights, Micro], Tensor], dump: list[Micro]
    ) -> tuple[list[float], dict[float, Weights]]:
        """Return the loss of every step, and the averages after the last one."""
        accumulation = len(dump) // STEPS
        optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.999), eps=1e-8, weight_decay=self.weight_decay)
        averages = {rate: {name: value.detach().clone() for name, value in weights.items()} for rate in self.decays}
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = self.rate(step)
            micros = dump[step * accumulation : (step + 1) * accumulation]
            values = [loss_of(weights, micro) for micro in micros]
            (torch.stack(values).sum() / (1 if self.summed else accumulation)).backward()
            if self.clip:
                torch.nn.utils.clip_grad_norm_(weights.values(), self.clip)
            optimizer.step()
            for rate, decay in self.decays.items():
                for name, value in averages[rate].items():
                    value.lerp_(weights[name].detach(), 1.0 - decay(step + 1))
            found.append(float(torch.stack(values).detach().mean()))
        return found, averages


def run(config: RunConfig, world: World, dump: list[Micro]) -> tuple[RunConfig, Weights]:
    """Train; return the resolved configuration and the initial weights, as leaves in float64."""
    config = resolve(config)
    start = {name: value for name, value in build_network(config).named_parameters() if value.requires_grad}
    train(config, launch(1), world)
    assert len(dump) == STEPS * config.batch.accumulation(1)
    assert len({float(micro.noise.flatten()[0]) for micro in dump}) == len(dump), "each has its own noise"
    return config, {name: value.detach().double().requires_grad_() for name, value in start.items()}


def assert_replayed(config: RunConfig, found: list[float], averages: dict[float, Weights]) -> None:
    folder = Path(config.output.folder)
    assert losses(folder) == pytest.approx(found, rel=TOLERANCE)
    assert abs(found[0] - found[-1]) > 100 * TOLERANCE * found[0]
    for rate, average in averages.items():
        ours = newest(folder).weights(rate)
        assert ours.keys() == average.keys()
        for name, value in average.items():
            torch.testing.assert_close(ours[name].double(), value, rtol=TOLERANCE, atol=TOLERANCE)


# diffusers' train_text_to_image.py, train_text_to_image_lora.py and both for Stable Diffusion XL


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipeline") / "sd15")


@pytest.fixture(scope="module")
def text_flags(pipeline: Path, pictures: Path) -> list[str]:
    return flags_of_text(pipeline, pictures)


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With embeddings of deviation 1, as layer norms of real encoders give; larger ones leave fp32 no gradients."""
    folder = build(tmp_path_factory.mktemp("pipeline") / "sdxl", kind="sdxl")
    for part in ("text_encoder", "text_encoder_2"):
        file = folder / part / "model.safetensors"
        summed = ("embedding.weight", "out_proj.weight", "fc2.weight")  # into what the layers pass on
        weights = {name: w / 32 if name.endswith(summed) else w for name, w in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def xl_flags(xl: Path, pictures: Path) -> list[str]:
    return flags_of_text(xl, pictures)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images with captions."""
    folder = tmp_path_factory.mktemp("images")
    rows = [json.dumps({"file_name": f"{number}.png", "text": f"picture {number}"}) for number in range(12)]
    for number in range(12):
        (folder / f"{number}.png").write_bytes(encode(natural(40, 60, seed=number), "PNG"))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def flags_of_text(pipeline: Path, pictures: Path) -> list[str]:
    return [
        "--pretrained_model_name_or_path", str(pipeline), "--train_data_dir", str(pictures), "--resolution", "32",
        "--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_train_steps", str(STEPS), "--seed", "3",
        "--lr_scheduler", "cosine", "--lr_warmup_steps", "5", "--learning_rate", "1e-3", "--random_flip",
    ]  # fmt: skip


def warmed_cosine(step: int) -> float:
    if step < 5:
        return 1e-3 * step / 5
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * (step - 5) / (STEPS - 5)))


def unet_of(pipeline: Path) -> tuple[Any, Any]:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet").double()
    return unet, DDPMScheduler.from_pretrained(pipeline, subfolder="scheduler")


def adapted(unet: Any, weights: Weights, alpha: float | None = None) -> Weights:
    """The adapted weights of a network, by LoRA matrices; alpha is the rank unless given."""
    base, found = dict(unet.named_parameters()), {}
    layers = sorted({name.partition(".lora_")[0] for name in weights})
    assert len(layers) >= 4 * 2
    for layer in layers:
        down, up = (weights[f"{layer}.lora_{which}.default.weight"] for which in "AB")
        scale = 1.0 if alpha is None else alpha / len(down)
        found[f"{layer}.weight"] = base[f"{layer}.weight"].detach() + scale * up @ down
    return found


def error_of(unet: Any, weights: Weights, scheduler: Any, micro: Micro, target: Tensor | None = None) -> Tensor:
    noisy, condition = scheduler.add_noise(micro.clean, micro.noise, micro.time), micro.condition
    options: dict[str, Any] = {"return_dict": False}
    given = (noisy, micro.time, condition["context"])
    if "pooled" in condition:  # Stable Diffusion XL
        options["added_cond_kwargs"] = {"text_embeds": condition["pooled"], "time_ids": condition["time_ids"]}
    prediction = functional_call(unet, weights, given, options)[0]
    return (prediction - (micro.noise if target is None else target)).square().mean(dim=(1, 2, 3))


def diffusers_average(step: int) -> float:
    """Decay of its EMAModel after a step, from 1."""
    return (1 + step - 1) / (10 + step - 1) if step > 1 else 0.0


def test_text_to_image(world: World, pipeline: Path, text_flags: list[str], dump: list[Micro], tmp_path: Path) -> None:
    own = ["--use_ema", "--snr_gamma", "5", "--max_grad_norm", "0.5", "--output_dir", str(tmp_path / "run")]
    config, weights = run(run_of("t2i", [*text_flags, *own])[0], world, dump)
    unet, scheduler = unet_of(pipeline)
    abar = scheduler.alphas_cumprod.double()

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        snr = abar[micro.time] / (1 - abar[micro.time])
        return (error_of(unet, weights, scheduler, micro) * snr.clamp(max=5) / snr).mean()

    decays = {0.9999: diffusers_average}
    script = Script(warmed_cosine, weight_decay=1e-2, clip=0.5, decays=decays)
    assert_replayed(config, *script.replay(weights, loss_of, dump))


@pytest.mark.nightly
def test_lora(world: World, pipeline: Path, text_flags: list[str], dump: list[Micro], tmp_path: Path) -> None:
    # Their clipping has no effect, because its list of parameters is empty.
    own = ["--rank", "4", "--max_grad_norm", "0", "--output_dir", str(tmp_path / "run")]
    config, weights = run(run_of("t2i-lora", [*text_flags, *own])[0], world, dump)
    unet, scheduler = unet_of(pipeline)

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        return error_of(unet, adapted(unet, weights), scheduler, micro).mean()

    script = Script(warmed_cosine, weight_decay=1e-2)
    assert_replayed(config, *script.replay(weights, loss_of, dump))


def test_text_to_image_xl(world: World, xl: Path, xl_flags: list[str], dump: list[Micro], tmp_path: Path) -> None:
    own = ["--use_ema", "--snr_gamma", "5", "--max_grad_norm", "0.5", "--output_dir", str(tmp_path / "run")]
    bias = ["--timestep_bias_strategy", "earlier", "--timestep_bias_multiplier", "3"]
    config, weights = run(run_of("train_text_to_image_sdxl", [*xl_flags, *own, *bias])[0], world, dump)
    unet, scheduler = unet_of(xl)
    abar = scheduler.alphas_cumprod.double()

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        snr = abar[micro.time] / (1 - abar[micro.time])
        return (error_of(unet, weights, scheduler, micro) * snr.clamp(max=5) / snr).mean()

    decays = {0.9999: diffusers_average}
    script = Script(warmed_cosine, weight_decay=1e-2, clip=0.5, decays=decays)
    assert_replayed(config, *script.replay(weights, loss_of, dump))
    times = torch.cat([micro.time for micro in dump])
    assert 0.3 < (times < 250).double().mean() < 0.7, "a quarter of the timesteps is three times as frequent"
    sizes = torch.cat([micro.condition["time_ids"] for micro in dump])
    assert (sizes[:, :2] == torch.tensor([40, 60])).all()
    assert (sizes[:, 4:] == 32).all()
    assert sizes[:, 3].unique().numel() > 1, "each sample has its own crop"


def test_lora_xl(world: World, xl: Path, xl_flags: list[str], dump: list[Micro], tmp_path: Path) -> None:
    own = ["--rank", "4", "--max_grad_norm", "0.1", "--prediction_type", "v_prediction"]
    words = [*xl_flags, *own, "--output_dir", str(tmp_path / "run")]
    config, weights = run(run_of("train_text_to_image_lora_sdxl", words)[0], world, dump)
    unet, scheduler = unet_of(xl)

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        target = scheduler.get_velocity(micro.clean, micro.noise, micro.time)
        return error_of(unet, adapted(unet, weights), scheduler, micro, target).mean()

    script = Script(warmed_cosine, weight_decay=1e-2, clip=0.1)
    assert_replayed(config, *script.replay(weights, loss_of, dump))


# diffusers' DreamBooth scripts for LoRA of transformers

OF_FAMILIES = {
    "z-image": ("train_dreambooth_lora_z_image", ["--lora_alpha", "2"]),
    "flux2": ("train_dreambooth_lora_flux2_klein", ["--lora_alpha", "2"]),
    "qwen-image": ("train_dreambooth_lora_qwen_image", ["--lora_alpha", "2", "--weighting_scheme", "sigma_sqrt"]),
    "sd3": ("train_dreambooth_lora_sd3", []),
}
"""Script of each family, and flags of its own."""


@pytest.mark.parametrize("kind", by_day(["z-image", "sd3"], "flux2", "qwen-image"))
def test_dreambooth(
    world: World, kind: str, pictures: Path, dump: list[Micro], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pictures, tmp_path / "pictures", ignore=shutil.ignore_patterns("*.jsonl"))
    base = family_pipeline(tmp_path / kind, kind)
    script, own = OF_FAMILIES[kind]
    flags = [
        "--pretrained_model_name_or_path", str(base), "--instance_data_dir", "pictures", "--instance_prompt", "a dog",
        "--resolution", str(8 * Pretrained(str(base)).latent_space.factor), "--max_sequence_length", str(TOKENS[kind]),
        "--train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_train_steps", str(STEPS), "--seed", "3",
        "--lr_scheduler", "cosine", "--lr_warmup_steps", "5", "--learning_rate", "1e-3", "--max_grad_norm", "0.1",
        "--rank", "4", "--output_dir", "run", *own,
    ]  # fmt: skip
    assert main(translate(script, flags, gpus=1).commands[0][1:]) == 0
    config, weights = run(run_of(script, flags)[0], world, dump)
    network = getattr(diffusers, config.model.diffusers_class).from_pretrained(base, subfolder="transformer").double()
    alpha = 2.0 if "--lora_alpha" in own else 4.0
    # Of the squared error of the output: SD3's script compares estimates of the latents.
    weight = {"qwen-image": lambda sigma: sigma**-2, "sd3": lambda sigma: sigma**2}.get(kind, torch.ones_like)

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        merged = adapted(network, weights, alpha)
        model = lambda *given, **options: functional_call(network, merged, given, options)  # noqa: E731
        output, target = FAMILIES[kind].step(model, micro.clean, micro.noise, micro.depth, micro.condition)
        error = (output - target).square().mean(dim=(1, 2, 3))
        return (weight(micro.depth) * error).mean()

    script_steps = Script(warmed_cosine, weight_decay=1e-4, clip=0.1)
    assert_replayed(config, *script_steps.replay(weights, loss_of, dump))


# kohya's sdxl_train_network.py


def test_network_of_kohya(
    world: World, xl: Path, pictures: Path, dump: list[Micro], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer of the transformer blocks, with alpha apart from the rank."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    shutil.copytree(pictures, tmp_path / "pictures" / "2_a picture", ignore=shutil.ignore_patterns("*.jsonl"))
    words = (
        "--train_data_dir pictures --output_dir out --resolution 32 --network_module networks.lora --network_dim 4 "
        "--network_alpha 2 --network_train_unet_only --unet_lr 1e-3 --lr_scheduler cosine --lr_warmup_steps 5 "
        f"--max_train_steps {STEPS} --train_batch_size 2 --seed 3 --min_snr_gamma 5 --max_grad_norm 0.1"
    )
    flags = ["--pretrained_model_name_or_path", str(xl), *words.split()]
    assert main(translate("sdxl_train_network", flags, gpus=1).commands[0][1:]) == 0
    config, weights = run(run_of("sdxl_train_network", flags)[0], world, dump)
    unet, scheduler = unet_of(xl)
    abar = scheduler.alphas_cumprod.double()

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        snr = abar[micro.time] / (1 - abar[micro.time])
        return (error_of(unet, adapted(unet, weights, alpha=2), scheduler, micro) * snr.clamp(max=5) / snr).mean()

    script = Script(warmed_cosine, weight_decay=1e-2, clip=0.1)
    assert_replayed(config, *script.replay(weights, loss_of, dump))


# facebookresearch/DiT and openai/improved-diffusion: a learned variance


class Diffusion:
    """Hybrid loss of Nichol & Dhariwal 2021: squared error, and the bound, which trains the variance."""

    def __init__(self, betas: np.ndarray[Any, np.dtype[np.float64]], factor: float) -> None:
        self.beta, self.factor = torch.from_numpy(betas), factor
        self.abar = torch.cumprod(1 - self.beta, 0)
        self.before = torch.cat([torch.ones(1, dtype=torch.float64), self.abar[:-1]])
        variance = self.beta * (1 - self.before) / (1 - self.abar)
        self.log_smallest = torch.cat([variance[1:2], variance[1:]]).log()

    def at(self, values: Tensor, micro: Micro) -> Tensor:
        return values[micro.time].view(-1, 1, 1, 1)

    def noisy(self, micro: Micro) -> Tensor:
        abar = self.at(self.abar, micro)
        return abar.sqrt() * micro.clean + (1 - abar).sqrt() * micro.noise

    def loss(self, output: Tensor, micro: Micro) -> Tensor:
        epsilon, share = output.chunk(2, dim=1)
        error = (epsilon - micro.noise).square().mean(dim=(1, 2, 3))
        return (error + self.factor * self.bound(epsilon.detach(), share, micro)).mean()

    def bound(self, epsilon: Tensor, share: Tensor, micro: Micro) -> Tensor:
        beta, abar, before = (self.at(values, micro) for values in (self.beta, self.abar, self.before))
        low, high = self.at(self.log_smallest, micro), beta.log()
        log_variance = (share + 1) / 2 * high + (1 - share) / 2 * low
        noisy = self.noisy(micro)
        estimate = (noisy - (1 - abar).sqrt() * epsilon) / abar.sqrt()
        of_clean, of_noisy = before.sqrt() * beta / (1 - abar), (1 - beta).sqrt() * (1 - before) / (1 - abar)
        truth, mean = of_clean * micro.clean + of_noisy * noisy, of_clean * estimate + of_noisy * noisy
        divergence = 0.5 * (
            log_variance - low - 1 + (low - log_variance).exp() + (truth - mean) ** 2 / log_variance.exp()
        )
        decoded = -self.log_likelihood(micro.clean, mean, log_variance / 2)
        terms = torch.where(micro.time.view(-1, 1, 1, 1) == 0, decoded, divergence)
        return terms.mean(dim=(1, 2, 3)) / math.log(2)

    def log_likelihood(self, clean: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Of pixels in bins of 2 / 255, with the tanh approximation of the normal distribution function."""

        def below(x: Tensor) -> Tensor:
            return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        upper = below((clean - mean + 1 / 255) * (-log_std).exp())
        lower = below((clean - mean - 1 / 255) * (-log_std).exp())
        inner = torch.where(clean > 0.999, 1 - lower, upper - lower)
        return torch.where(clean < -0.999, upper, inner).clamp(min=1e-12).log()


def on_digits(config: RunConfig, digits: Path, folder: Path, **changes: Any) -> RunConfig:
    """A translated run with a small network on other data."""
    data = DataConfig(path=str(digits), loader="prefetch")
    output = replace(config.output, folder=str(folder))
    return replace(config, data=data, output=output, samples=STEPS * config.batch.samples, **changes)


def test_dit(world: World, digits: Path, dump: list[Micro], tmp_path: Path) -> None:
    flags = ["--data-path", "none", "--global-batch-size", "4", "--epochs", "1", "--log-every", "1"]
    model = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10, learn_sigma=True)
    config, weights = run(on_digits(run_of("dit", flags)[0], digits, tmp_path / "run", model=model), world, dump)
    assert 10 in torch.cat([micro.condition["label"] for micro in dump]), "a label was dropped"
    diffusion = Diffusion(linear_betas(1000), factor=1.0)

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        output = reference_forward(weights, model, diffusion.noisy(micro), micro.time, micro.condition["label"])
        return diffusion.loss(output, micro)

    script = Script(lambda step: 1e-4, weight_decay=0.0, decays={0.9999: lambda step: 0.9999})
    assert_replayed(config, *script.replay(weights, loss_of, dump))


@pytest.mark.nightly
def test_iddpm(world: World, digits: Path, dump: list[Micro], tmp_path: Path) -> None:
    flags = (
        "--data_dir none --image_size 32 --learn_sigma True --diffusion_steps 400 --noise_schedule cosine "
        f"--batch_size 4 --microbatch 2 --lr 1e-3 --weight_decay 0.01 --lr_anneal_steps {STEPS} --ema_rate 0.99,0.9 "
        "--log_interval 1 --class_cond True --use_checkpoint True"
    )
    model = AdmConfig(
        channels=1, size=8, width=16, norm_num_groups=4, attention_resolutions=(4,), channel_mult=(1, 2), res_blocks=1,
        heads=2, classes=10, learn_sigma=True,
    )  # fmt: skip
    config, weights = run(
        on_digits(run_of("iddpm", flags.split())[0], digits, tmp_path / "run", model=model), world, dump
    )
    diffusion = Diffusion(cosine_betas(400), factor=400 / 1000)

    def loss_of(weights: Weights, micro: Micro) -> Tensor:
        network = AdmReference(weights, model)
        return diffusion.loss(network(diffusion.noisy(micro), micro.time * 2.5, micro.condition["label"]), micro)

    script = Script(
        lambda step: 1e-3 * (1 - step / STEPS), weight_decay=0.01, summed=True,
        decays={rate: lambda step, rate=rate: rate for rate in (0.99, 0.9)},  # type: ignore[misc]
    )  # fmt: skip
    assert_replayed(config, *script.replay(weights, loss_of, dump))
    for record in records(Path(config.output.folder)):
        assert record["mse"] + record["vb"] == pytest.approx(record["loss"], rel=1e-6)
        counted = [record[f"mse_q{n}"] for n in range(4)]
        assert [value is None for value in counted] == [record[f"loss_q{n}"] is None for n in range(4)]
