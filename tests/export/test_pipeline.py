"""The parts of a pipeline other than the network under ``--format diffusers``."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig, ScheduleName
from fastdiff.diffusion.schedules import alpha_bar_of, betas
from fastdiff.errors import ConfigError
from fastdiff.export.pipeline import scheduler_config, write_pipeline
from fastdiff.export.run import Choice, export
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.tiny_pipeline import UNETS, build
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.text_runs import encode, text_run
from tests.support.runs import launch, newest


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("made") / "pipeline")


@pytest.mark.parametrize("size", ["1GB", "30KB"])
def test_a_variant_in_one_or_several_files_becomes_the_plain_one(pipeline: Path, tmp_path: Path, size: str) -> None:
    """With files in the way that belong to no variant, or to another one, and a part that was not downloaded."""
    from diffusers import StableDiffusionPipeline

    source, out = tmp_path / "source", tmp_path / "out"
    whole = StableDiffusionPipeline.from_pretrained(pipeline, torch_dtype=torch.float16)
    whole.save_pretrained(source, variant="fp16", max_shard_size=size)
    (source / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"of no variant")
    (source / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    index = (source / "model_index.json").read_text()
    never = '"safety_checker": [\n    "stable_diffusion",\n    "StableDiffusionSafetyChecker"\n  ]'
    (source / "model_index.json").write_text(re.sub(r'"safety_checker": \[[^\]]*\]', never, index))

    weights = {name: value.detach() for name, value in build_model(UNETS["sd15"], seed=5).named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    out.mkdir()
    start = PretrainedConfig(path=str(source), variant="fp16")
    config = text_run(tmp_path, source, tmp_path, pretrained=start, objective__prediction="epsilon")
    write_pipeline(out, ExportedWeights(shapes, weights.__getitem__), config, torch.float32)

    loaded = StableDiffusionPipeline.from_pretrained(out)
    assert loaded.safety_checker is None
    for part in ("vae", "text_encoder"):
        expected = getattr(whole, part).state_dict()
        assert all(
            torch.equal(value.half(), expected[name]) for name, value in getattr(loaded, part).state_dict().items()
        )
    names = [str(path.relative_to(out)) for path in out.rglob("*")]
    assert not [name for name in names if "fp16" in name or name.endswith(".bin")]
    assert any("-of-" in name for name in names) == (size == "30KB")


def test_a_run_without_a_pipeline_is_exported_as_a_unet_alone(
    world: World, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(tmp_path / "data", pipeline)
    config = text_run(
        data, pipeline, tmp_path / "run", steps=1, objective__prediction="epsilon", pretrained=PretrainedConfig()
    )
    train(config, launch(2), world)
    monkeypatch.chdir(tmp_path)
    export(Path("run"), Path("out"), Choice(format="diffusers", dtype="bf16"))
    assert sorted(path.name for path in Path("out").iterdir()) == ["README.md", "unet"]
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", Path("out", "README.md").read_text(), re.DOTALL)[0], scope)
    expected = newest(tmp_path / "run").weights(0.9)
    assert all(torch.equal(v, expected[k].bfloat16().float()) for k, v in scope["unet"].float().state_dict().items())


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize(("zero", "prediction"), [(False, "epsilon"), (True, "v"), (False, "x0")])
def test_the_scheduler_has_the_noise_of_the_run(schedule: Any, zero: bool, prediction: Any) -> None:
    import diffusers

    objective = DdpmConfig(schedule=schedule, zero_terminal_snr=zero, prediction=prediction)
    base = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}
    found = scheduler_config(base, objective)
    expected = torch.cumprod(1 - betas(objective), 0)
    torch.testing.assert_close(alpha_bar_of(found), expected, rtol=1e-6, atol=1e-9)
    scheduler = getattr(diffusers, found["_class_name"]).from_config(found)
    torch.testing.assert_close(scheduler.alphas_cumprod.double(), expected, rtol=1e-3, atol=1e-6)
    ends_in_noise = zero or schedule == "jsd"
    assert found["_class_name"] == (
        "PNDMScheduler" if prediction == "epsilon" and not ends_in_noise else "DDIMScheduler"
    )
    if ends_in_noise:
        assert (found["timestep_spacing"], found["rescale_betas_zero_snr"]) == ("trailing", zero)


@pytest.mark.parametrize(
    "objective",
    [
        FlowConfig(),
        FlowConfig(prediction="epsilon"),
        EdmConfig(),
        DdpmConfig(prediction="previous_x"),
    ],
)
def test_models_that_no_pipeline_can_sample_are_refused(objective: ObjectiveConfig) -> None:
    given = f"{objective.process} --objective.prediction {objective.predicted}; use --format safetensors"
    with pytest.raises(ConfigError, match=given):
        scheduler_config({"_class_name": "PNDMScheduler"}, objective)
