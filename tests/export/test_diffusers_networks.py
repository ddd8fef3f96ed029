"""Networks as classes of diffusers: equal outputs, or the reason why no class is equal."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fastdiff.cli.main import main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig, FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.export import diffusers_adm, diffusers_dit
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported, format_of
from fastdiff.export.model_card import use_of
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.adm.network import AdmUNet
from fastdiff.models.dit.network import DiT
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.world import World
from fastdiff.sampling.pixels import PixelDecoder
from fastdiff.sampling.run import Run
from fastdiff.sampling.solvers import _generator, sample
from fastdiff.training.loop import train
from tests.support.nights import by_day
from tests.support.runs import launch, tiny

ADM = AdmConfig(
    channels=2, size=16, width=8, channel_mult=(1, 2, 3), res_blocks=2, attention_resolutions=(8, 4), head_channels=4,
    norm_num_groups=4,
)  # fmt: skip
DIT = DiTConfig(depth=2, hidden=32, heads=4, patch=2, channels=3, size=8, classes=10)


def random(model: nn.Module, seed: int = 0) -> ExportedWeights:
    """Every weight of the model drawn, also those that begin as 0, and these weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
        parameter.data = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return ExportedWeights({name: tuple(value.shape) for name, value in weights.items()}, weights.__getitem__)


def inputs(channels: int, size: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, times from the first to the last and between the whole ones, and classes, the last being none."""
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(4, channels, size, size, generator=generator)
    return noisy, torch.tensor([0.0, 1.25, 500.0, 999.0]), torch.tensor([0, 1, classes - 1, classes])


@pytest.mark.parametrize(
    "config",
    by_day(
        [
            ADM,
            replace(ADM, scale_shift_norm=False, learn_sigma=True),
            replace(ADM, attention_resolutions=(16,), head_channels=8, resblock_updown=True, dropout=0.3),
        ],
        replace(ADM, resblock_updown=True, classes=5),
        replace(ADM, attention_resolutions=(), heads=2, head_channels=0, res_blocks=1),
        replace(ADM, attention_resolutions=(4,), heads=3, head_channels=0),
        replace(ADM, qkv_order="qkv_major", resblock_updown=True),
    ),
)
def test_an_adm_unet_computes_the_same_in_diffusers(tmp_path: Path, config: AdmConfig) -> None:
    from diffusers import UNet2DModel

    ours = AdmUNet(config).eval()
    weights = random(ours)
    diffusers_adm.write_unet2d(tmp_path, weights, config, torch.float32)
    theirs, report = UNet2DModel.from_pretrained(tmp_path, subfolder="unet", output_loading_info=True)
    assert not any(report.values()), "weights that are missing, too many or of another shape"
    noisy, time, label = inputs(config.channels, config.size, config.classes)
    classes = label if config.classes else None
    with torch.no_grad():
        expected = ours(noisy, time, classes)
        found = theirs(noisy, time, classes).sample
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["iddpm-cifar10", "iddpm-lsun256"])
def test_published_recipes_have_an_equal_network_in_diffusers(name: str) -> None:
    """By names and shapes, at their full size."""
    from diffusers import UNet2DModel

    config = preset(name).model
    assert isinstance(config, AdmConfig)
    with torch.device("meta"):
        ours, theirs = AdmUNet(config), UNet2DModel.from_config(diffusers_adm.to_diffusers(config))
    shapes = {key: tuple(value.shape) for key, value in ours.named_parameters()}
    made = {
        key: tuple(change(torch.empty(shapes[source], device="meta")).shape)
        for key, (source, change) in diffusers_adm.sources(config, shapes).items()
    }
    assert made == {key: tuple(value.shape) for key, value in theirs.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(ADM, low_res_size=8), "takes no low-resolution image, the run has --model.low_res_size 8"),
        (replace(ADM, channel_mult=(2, 2, 2)), "as its first level, 16, the run has --model.width 8"),
        (replace(ADM, heads=2, head_channels=0), "8 channels at a width of 16, 12 channels at a width of 24, because"),
    ],
)
def test_an_adm_unet_without_an_equal_one_is_refused(config: AdmConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        diffusers_adm.to_diffusers(config)


@pytest.mark.parametrize("learn_sigma", [False, True])
def test_a_dit_computes_the_same_in_diffusers(tmp_path: Path, learn_sigma: bool) -> None:
    from diffusers import DiTTransformer2DModel

    config = replace(DIT, learn_sigma=learn_sigma)
    ours = DiT(config).eval()
    diffusers_dit.write_transformer(tmp_path, random(ours), config, torch.float32)
    model, report = DiTTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer", output_loading_info=True)
    assert not any(report.values()), "weights that are missing, too many or of another shape"
    noisy, time, label = inputs(config.channels, config.size, config.classes)
    with torch.no_grad():
        expected = ours(noisy, time, label)
        unset = model(noisy, time, label).sample
        exec(diffusers_dit.SAME_TIMES, {"model": model})
        found = model(noisy, time, label).sample
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(unset[0], expected[0], atol=1e-5), "at time 0 the frequencies make no difference"
    assert (unset[1:] - expected[1:]).abs().amax((1, 2, 3)).min() > 1e-3, "else the code of the card is not needed"


@pytest.mark.parametrize("model", by_day([DIT], ADM))
def test_the_card_of_a_run_loads_the_network_that_it_trained(
    world: World,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: AdmConfig | DiTConfig,
) -> None:
    """And draws a picture with the scheduler beside it."""
    monkeypatch.chdir(tmp_path)
    run, out = tmp_path / "run", tmp_path / "out"
    train(tiny(digits, run, steps=1, model=replace(model, channels=1, size=8, classes=10)), launch(1), world)
    capsys.readouterr()
    assert main(["export", str(run), str(out), "--format", "diffusers"]) == 0
    assert ("has other timestep frequencies" in capsys.readouterr().err) == (model == DIT)
    [code] = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    with Image.open("image.png") as picture:
        assert (picture.mode, picture.size) == ("L", (8, 8))
        assert picture.getextrema() != (0, 0), "no flat picture"
    trained = Run(run)
    noisy, time, label = inputs(1, 8, 10)
    with torch.no_grad():
        expected = trained.model.cpu()(noisy, time, label)
        torch.testing.assert_close(names["model"](noisy, time, label).sample, expected, atol=1e-5, rtol=1e-5)


def test_networks_that_diffusers_lacks_are_refused_before_anything_is_written(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(ADM, channels=1, size=8, attention_resolutions=(4, 2), heads=2, head_channels=0)
    train(tiny(digits, tmp_path / "run", steps=1, model=model), launch(1), world)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "diffusers"]) == 2
    assert "--format diffusers: UNet2DModel has heads of one size" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_dit_with_other_mlps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an MLP ratio of 4, the run has --model.mlp_ratio 2"):
        diffusers_dit.to_diffusers(replace(DIT, mlp_ratio=2.0))


def drawn(model: nn.Module, config: RunConfig, labels: Tensor, sampler: SamplerConfig) -> Tensor:
    """Latents as ``fastdiff sample`` draws them."""
    size, null = config.model.size, torch.tensor([config.model.classes])
    shape = (config.model.channels, size, size)
    return sample(model, config.objective, {"label": labels}, sampler, shape=shape, null={"label": null})


def written(folder: Path, ours: DiT, config: RunConfig) -> None:
    folder.mkdir()
    exported = Exported(None, config, random(ours), torch.float32)
    format_of(config.model, "diffusers").write(folder, exported)


@pytest.mark.parametrize(
    ("prediction", "zero"), [("epsilon", False), ("v", False), ("x0", False), ("v", True), ("x0", True)]
)
def test_the_scheduler_of_a_dit_of_pixels_clamps_as_we_do(
    digits: Path, tmp_path: Path, prediction: Any, zero: bool
) -> None:
    """DDIM without use_clipped_model_output draws another image, from the same weights and noise."""
    from diffusers import DDIMScheduler, DiTTransformer2DModel, DPMSolverMultistepScheduler

    objective = DdpmConfig(schedule="cosine", prediction=prediction, zero_terminal_snr=zero)
    config = RunConfig(model=replace(DIT, channels=1), objective=objective, data=DataConfig(path=str(digits)))
    ours = DiT(config.model).eval()
    written(tmp_path / "out", ours, config)
    model = DiTTransformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer")
    exec(diffusers_dit.SAME_TIMES, {"model": model})
    label, steps = torch.tensor([3]), 20
    expected = drawn(ours, config, label, SamplerConfig(steps=steps, clip=True, cfg=1.0))
    [noise] = [torch.randn(1, 1, 8, 8, generator=_generator(0, 0))]

    def loop(scheduler: Any, **options: Any) -> Tensor:
        image = noise
        scheduler.set_timesteps(steps)
        with torch.no_grad():
            for time in scheduler.timesteps:
                image = scheduler.step(model(image, time.expand(1), label).sample, time, image, **options).prev_sample
        return image

    found = loop(DPMSolverMultistepScheduler.from_pretrained(tmp_path / "out", subfolder="scheduler"))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    usual = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": PREDICTION_TYPES[prediction]}
    ddim = DDIMScheduler(**usual, timestep_spacing="trailing", rescale_betas_zero_snr=zero)
    torch.testing.assert_close(loop(ddim, use_clipped_model_output=True), expected, atol=2e-3, rtol=1e-3)
    assert (loop(ddim) - expected).abs().max() > 0.05
    card = use_of(config, "diffusers", Place(tmp_path / "out"))
    assert "use_clipped_model_output=True" in card


def test_a_dit_of_latents_is_a_whole_pipeline(tmp_path: Path) -> None:
    """diffusers' own DiTPipeline draws the images of ``fastdiff sample``; its null class is 1000 for any network."""
    import diffusers

    base = build(tmp_path / "base")
    start = PretrainedConfig(path=str(base))
    config = RunConfig(model=replace(DIT, channels=4, learn_sigma=True), pretrained=start)
    ours = DiT(config.model).eval()
    written(tmp_path / "out", ours, config)
    names: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", use_of(config, "diffusers", Place(tmp_path / "out")), re.DOTALL)
    exec(compile(code.partition("image = ")[0], "card", "exec"), names)
    pipeline = names["pipeline"]
    assert isinstance(pipeline, diffusers.DiTPipeline)
    pipeline.set_progress_bar_config(disable=True)
    labels = [3, 7]
    generators = [_generator(0, number) for number in range(2)]
    found = pipeline(labels, guidance_scale=4.0, generator=generators, num_inference_steps=20, output_type="np").images
    latents = drawn(ours, config, torch.tensor(labels), SamplerConfig(steps=20, cfg=4.0))
    expected = PixelDecoder(config, None, torch.device("cpu"))(latents)
    assert expected.std() > 10, "no flat images"
    difference = torch.tensor(found * 255) - torch.tensor(expected).float()
    assert difference.abs().max() < 1


def test_what_no_pipeline_draws_right_is_no_pipeline(tmp_path: Path) -> None:
    """Its null class would be one of the run's, or it has no timesteps; the network is there."""
    base = PretrainedConfig(path=str(build(tmp_path / "base")))
    model = replace(DIT, channels=4)
    many = RunConfig(model=replace(model, classes=1200), pretrained=base)
    flow = RunConfig(model=model, pretrained=base, objective=FlowConfig())
    for name, config, parts in (("many", many, {"transformer", "scheduler"}), ("flow", flow, {"transformer"})):
        written(tmp_path / name, DiT(cast(DiTConfig, config.model)).eval(), config)
        assert {path.name for path in (tmp_path / name).iterdir()} == parts
        assert "DiTPipeline" not in use_of(config, "diffusers", Place(tmp_path / name))
