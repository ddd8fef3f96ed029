"""A fine-tuned network draws with the scheduler and the settings of its pipeline: the pictures are the pipeline's."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, FlowConvention
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.export.card_text import drawing
from fastdiff.models.load import build_network, pretrained, resolve
from fastdiff.models.pipeline_settings import PipelineSettings, linear_mu
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.models.transformers.flux2 import FLUX2
from fastdiff.sampling.guidance import Guidance, guided
from fastdiff.sampling.pipeline_sampler import pipeline_sampler, with_scheduler
from fastdiff.sampling.pipeline_solver import describe
from fastdiff.sampling.run import drawing_dtype
from fastdiff.sampling.solvers import sample
from fastdiff.sampling.text import encode_prompts
from tests.support.inputs.family_pipelines import family_pipeline
from tests.support.inputs.text_runs import text_run

PROMPTS = ["a red cat", "two birds"]
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
PNDM = NOISE | {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}
EULER = NOISE | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading", "steps_offset": 1}
BETWEEN = NOISE | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "linspace"}
DPM = NOISE | {"_class_name": "DPMSolverMultistepScheduler", "timestep_spacing": "linspace", "solver_order": 2}
ANCESTRAL = NOISE | {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}


def made(folder: Path, kind: Any, scheduler: Mapping[str, Any]) -> tuple[Any, RunConfig]:
    """A tiny pipeline with this scheduler, opened by diffusers, and a run that fine-tunes it."""
    import diffusers

    path = build(folder / "pipeline", kind=kind)
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = json.loads((path / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (path / "model_index.json").write_text(json.dumps(index))
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet.conv_out.weight.data.mul_(0.1)  # a random network else amplifies rounding over 50 steps
    pipeline.unet.save_pretrained(path / "unet")
    return pipeline, resolve(text_run(folder, path, folder, kind=kind))


def noise(config: RunConfig) -> Tensor:
    """The noise of the first two images of seed 0."""
    model = config.model
    shape = (model.channels, model.size, model.size)
    seeds = (np.random.SeedSequence([0, image]).generate_state(1, np.uint64)[0] for image in range(2))
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds])


def drawn(config: RunConfig, sampler: SamplerConfig) -> Tensor:
    condition, null = encode_prompts(pretrained(config.pretrained), PROMPTS, config.model)
    model = config.model
    shape = (model.channels, model.size, model.size)
    return sample(build_network(config).eval(), config.objective, condition, sampler, shape=shape, null=null)


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [
        ("sd15", PNDM),
        ("sd2", PNDM | {"prediction_type": "v_prediction"}),
        ("sdxl", EULER),
        ("sd15", BETWEEN),
        ("sdxl", DPM),
    ],
)
def test_pictures_are_those_of_the_pipeline_by_its_own_defaults(
    tmp_path: Path, kind: Any, scheduler: Mapping[str, Any]
) -> None:
    pipeline, config = made(tmp_path, kind, scheduler)
    expected = pipeline(PROMPTS, latents=noise(config), output_type="latent").images
    usual = pipeline_sampler(config)
    assert usual is not None
    found = drawn(config, with_scheduler(config.sampler(usual), config))
    assert expected.std() > 0.1
    assert difference(found, expected) < 1e-4
    other = drawn(config, with_scheduler(config.sampler(usual, steps=20), config))
    assert difference(other, expected) > 1e-3


def test_noise_of_the_steps_is_of_each_image(tmp_path: Path) -> None:
    pipeline, config = made(tmp_path, "sd15", ANCESTRAL)
    sampler = with_scheduler(replace(pipeline_sampler(config) or SamplerConfig(), steps=5), config)
    found = drawn(config, sampler)
    generators = []
    for image in range(2):
        seed = int(np.random.SeedSequence([0, image]).generate_state(1, np.uint64)[0])
        generators.append(torch.Generator().manual_seed(seed))
    expected = pipeline(PROMPTS, generator=generators, num_inference_steps=5, output_type="latent").images
    assert difference(found, expected) < 1e-4


@pytest.mark.parametrize("convention", ["sd3", "sit", "repa"])
@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ({"shift": 3.0}, PipelineSettings()),
        ({"shift": 6.0}, PipelineSettings(even_sigmas=True)),
        (
            {"use_dynamic_shifting": True, "shift_terminal": 0.02},
            PipelineSettings(even_sigmas=True, mu=lambda scheduler, tokens, steps: 0.01 * tokens + 0.1 * steps),
        ),
    ],
)
def test_flow_is_drawn_by_the_levels_and_the_sign_of_its_scheduler(
    convention: FlowConvention, scheduler: dict[str, Any], settings: PipelineSettings
) -> None:
    """Against the loop of diffusers' pipelines, with a velocity that depends on latents and time."""
    import diffusers

    steps, tokens = 7, 16
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **scheduler}
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config(scheduler)
    mu = {"mu": 0.16 + 0.7} if settings.mu else {}
    if settings.even_sigmas:
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **mu)
    else:
        theirs.set_timesteps(steps, **mu)
    config = FlowConfig(convention=convention)

    def velocity(noisy: Tensor, sigma: Tensor) -> Tensor:
        return torch.sin(3 * noisy) + sigma.view(-1, 1, 1, 1) * noisy

    def network(noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        at = config.time
        sigma = (time - at.at_data) / (at.at_noise - at.at_data)
        return (1 if at.to_noise else -1) * velocity(noisy, sigma)

    published = describe(scheduler, settings, tokens=tokens, steps=steps)
    sampler = SamplerConfig(scheduler="pipeline", steps=steps, published=published)
    label = {"label": torch.zeros(2)}
    found = sample(network, config, label, sampler, shape=(4, 4, 4), null={})
    seeds = (np.random.SeedSequence([0, image]).generate_state(1, np.uint64)[0] for image in range(2))
    latents = torch.stack([torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds])
    for level in theirs.timesteps:
        output = velocity(latents, (level / 1000).expand(2))
        latents = theirs.step(output, level, latents, return_dict=False)[0]
    torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-5)


def test_a_distilled_pipeline_is_drawn_in_few_steps_without_guidance(tmp_path: Path) -> None:
    """As published: the code of its pipeline has the steps and the guidance of the one that is not distilled."""
    pipeline = family_pipeline(tmp_path, "flux2")
    start = preset("flux2-klein-lora")
    index = pipeline / "model_index.json"
    for distilled, expected in (
        (False, (50, 4.0, "")),
        (True, (4, 1.0, ", num_inference_steps=4, guidance_scale=1.0")),
    ):
        index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": distilled}))
        config = resolve(replace(start, pretrained=replace(start.pretrained, path=str(pipeline))))
        steps, guidance, told = expected
        usual = pipeline_sampler(config)
        assert usual is not None
        assert (usual.steps, usual.cfg) == (steps, guidance)
        assert f'like those of the training"{told}).images' in drawing(config)


@pytest.mark.parametrize("steps", [4, 28, 50])
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4300, 6000])
def test_the_dynamic_shift_is_that_of_the_pipelines(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    found = FLUX2.drawing(Flux2Config()).mu
    assert found is not None
    assert found({}, tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps))
    points = {"base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9}
    assert linear_mu(points, tokens, steps) == pytest.approx(calculate_shift(tokens, *points.values()))
    assert linear_mu({}, tokens, steps) == pytest.approx(calculate_shift(tokens))


def test_a_guided_prediction_keeps_the_norm_of_every_token() -> None:
    """Qwen-Image's pipeline, on packed tokens ``[B, N, C * 2 * 2]``."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(4, 16, 6, 4, generator=generator)

    def packed(maps: Tensor) -> Tensor:
        batch, channels, height, width = maps.shape
        tokens = maps.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return tokens.reshape(batch, -1, channels * 4)

    predict = guided(lambda *_, **__: both, {"c": torch.zeros(2)}, {}, Guidance(scale=4.0, channels=16, norm=2))
    found = predict(both[:2], torch.zeros(2), 0.5)
    conditional, other = packed(both[:2]), packed(both[2:])
    combined = other + 4.0 * (conditional - other)
    expected = combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(packed(found), expected)


def test_flags_go_before_the_pipeline(tmp_path: Path) -> None:
    path = build(tmp_path / "pipeline")
    config = resolve(text_run(tmp_path, path, tmp_path, sampling__scheduler="dpmsolver++", sampling__cfg=3.0))
    usual = pipeline_sampler(config)
    found = with_scheduler(config.sampler(usual, steps=4), config)
    assert (found.scheduler, found.steps, found.cfg, found.published) == ("dpmsolver++", 4, 3.0, None)
    flow = text_run(tmp_path, path, tmp_path, objective=FlowConfig(convention="repa"), sampling__shift=2.0)
    shifted = with_scheduler(flow.sampler(pipeline_sampler(flow)), flow)
    assert json.loads(shifted.published or "")["scheduler"]["shift"] == 2.0


@pytest.mark.parametrize("objective", [EdmConfig(), FlowConfig(prediction="x0"), DdpmConfig(prediction="previous_x")])
def test_what_no_pipeline_draws_keeps_our_solvers(tmp_path: Path, objective: Any) -> None:
    path = build(tmp_path / "pipeline")
    config = text_run(tmp_path, path, tmp_path, objective=objective)
    assert pipeline_sampler(config) is None
    sampler = with_scheduler(SamplerConfig(scheduler="pipeline", steps=4), config)
    label = {"label": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"no scheduler of such a pipeline has --objective\.process"):
        sample(lambda noisy, *_, **__: noisy, objective, label, sampler, shape=(4, 4, 4), null={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"published": None}, "--scheduler pipeline is for a network of --pretrained.path"),
        ({"respacing": "10"}, "--respacing changes our own solvers"),
        ({"clip": True}, "--clip-denoised changes our own solvers"),
        ({"published": '{"scheduler": {"_class_name": "NoSuch"}, "mu": null}'}, "diffusers has no NoSuch"),
    ],
)
def test_what_a_pipeline_cannot_is_refused(options: dict[str, Any], message: str) -> None:
    published = describe(PNDM, PipelineSettings(), tokens=1, steps=3)
    sampler = replace(SamplerConfig(scheduler="pipeline", steps=3, published=published), **options)
    label = {"label": torch.zeros(1)}
    with pytest.raises(ConfigError, match=message):
        sample(lambda noisy, *_, **__: noisy, DdpmConfig(), label, sampler, shape=(4, 4, 4), null={})


def test_a_fine_tuned_network_draws_on_a_gpu_in_the_dtype_of_its_training() -> None:
    config = preset("z-image-lora")
    for device, expected in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        assert drawing_dtype(config, torch.device(device)) == expected
    assert drawing_dtype(preset("digits-t2i"), torch.device("cuda")) == torch.float32
