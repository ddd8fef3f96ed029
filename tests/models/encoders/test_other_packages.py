"""Encoders and a network of another package go all the way; nothing of fastdiff knows their pipeline."""

import errno
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError
from fastdiff.models.encoders import registry
from fastdiff.models.encoders.autoencoder import Autoencoder
from fastdiff.models.encoders.autoencoder_kl import AUTOENCODER_KL
from fastdiff.models.encoders.clip import ONE_CLIP, Clip
from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace, TextEncoderFamily
from fastdiff.models.encoders.registry import encoder_of
from fastdiff.models.encoders.text_encoders import TextEncoders
from fastdiff.sampling.npz import read_npz
from tests.support.inputs.encoding import captioned, picture
from tests.support.installed.packages import install
from tests.support.processes import ROOT, Finished
from tests.support.runs import losses, newest
from tests.support.scripts import COMMAND, DYING, TRAIN, run_job, run_script
from tests.support.toy_pipeline.text_encoder import ToyText

CAPTIONS = ["red", "a red cat", "two blue birds", "", "one two three four five six seven", "cat", "a cat", "birds"]
PACKAGES = {"plugin.autoencoder": "autoencoder of toy-pipeline 1.0", "plugin.text_encoder": "text of toy-pipeline 1.0"}
SOURCES = sorted((ROOT / "fastdiff").rglob("*.py"))
ENGINES = {
    "flat": ["--deepspeed_config", "deepspeed_configs/ddp.json", "--performance.engine", "flat"],
    "zero0": ["--deepspeed_config", "deepspeed_configs/ddp.json", "--performance.engine", "deepspeed"],
    **{f"zero{n}": ["--deepspeed_config", f"deepspeed_configs/zero{n}.json"] for n in (1, 2, 3)},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    encoders = "text = toy_pipeline.text_encoder:TOY_TEXT\nautoencoder = toy_pipeline.autoencoder:TOY_AUTOENCODER"
    networks = "toy-text = toy_pipeline.network:ToyTextConfig"
    site = tmp_path_factory.mktemp("installed") / "site"
    return install(site, "toy_pipeline", {"fastdiff.encoders": encoders, "fastdiff.networks": networks})


def ended(finished: Finished) -> str:
    assert finished.code == 0, finished.output
    return finished.output


@pytest.fixture(scope="module")
def fastdiff(site: Path) -> Callable[..., str]:
    return lambda *words: ended(run_script(COMMAND, *words, PYTHONPATH=str(site)))


@pytest.fixture(scope="module")
def pipeline(site: Path) -> Path:
    folder = site.parent / "pipeline"
    writing = site.parent / "write.py"
    writing.write_text("import sys\nfrom pathlib import Path\nfrom toy_pipeline.write import write_pipeline\n"
                       "write_pipeline(Path(sys.argv[1]))\n")  # fmt: skip
    ended(run_script(writing, folder, PYTHONPATH=str(site)))
    return folder


@pytest.fixture(scope="module")
def shards(pipeline: Path, fastdiff: Callable[..., str]) -> Path:
    images = captioned(pipeline.parent / "images", CAPTIONS, [(8, 8)] * len(CAPTIONS))
    out = pipeline.parent / "shards"
    said = fastdiff(
        "encode", images, out, "--pretrained", pipeline, "--resolution", "8", "--decode", "pillow", "--dtype", "float32"
    )
    assert "longer than the 6 tokens that the text encoder reads: 1 (first: 004.png)" in said
    return out


def train_flags(shards: Path, pipeline: Path, folder: Path, steps: int, engine: str) -> list[str | Path]:
    return [
        "--preset", "sd15-finetune", "--pretrained.path", pipeline,
        "--data.path", shards, "--output.folder", folder, "--samples", str(8 * steps), "--batch.samples", "8",
        "--output.log-every", "1", "--output.checkpoint-every", "1", "--output.sample-every", "0",
        "--batch.micro", "4", "--optim.name", "adamw", "--optim.lr", "1e-3",
        "--performance.precision", "fp32", "--performance.device", "cpu",
        "--validation.prompts", "a red cat", "--validation.every", "4",
        "--validation.steps", "2", *ENGINES[engine],
    ]  # fmt: skip


def test_shards_hold_what_the_encoders_gave(shards: Path, pipeline: Path) -> None:
    info = DatasetInfo.read(shards)
    assert (info.kind, info.latent.shape) == ("mean", (12, 4, 4))
    assert "pixel / 127.5 - 1; latents in fp32, batches of 16" in info.provenance.transform
    assert info.provenance.packages == PACKAGES
    weights = load_file(pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    assert info.normalisation.shift == tuple(weights["mean"].tolist())
    np.testing.assert_allclose(info.normalisation.scale, 1 / weights["std"].numpy())
    with LatentReader(shards) as reader:
        found = reader.read(np.arange(len(CAPTIONS)))
        assert reader.null()["context_mask"].tolist() == [1, 0, 0, 0, 0, 0]
    assert found["context_mask"].sum(1).tolist() == [2, 4, 4, 1, 6, 2, 3, 2], "the words of each caption, and the end"
    assert not found["context"][np.asarray(found["context_mask"]) == 0].any()
    pixels = torch.from_numpy(np.stack([np.asarray(picture(number, (8, 8))) for number in range(len(CAPTIONS))]))
    images = torch.nn.functional.pixel_unshuffle(pixels.permute(0, 3, 1, 2) / 127.5 - 1, 2)
    expected = torch.einsum("dc,bchw->bdhw", weights["rotation"], images)
    np.testing.assert_allclose(found["latent"], expected, atol=1e-5)


@pytest.mark.parametrize(
    "engine", [name if name in ("flat", "zero3") else pytest.param(name, marks=pytest.mark.nightly) for name in ENGINES]
)
def test_a_killed_training_goes_on_with_fewer_ranks(
    engine: str, shards: Path, pipeline: Path, site: Path, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    ended(run_job(TRAIN, *train_flags(shards, pipeline, whole, 4, engine), ranks=1, PYTHONPATH=str(site)))
    flags = train_flags(shards, pipeline, folder, 4, engine)
    killed = run_job(DYING, "12", TRAIN, *flags, ranks=2, PYTHONPATH=str(site))
    assert killed.code == -9, killed.output
    said = ended(run_job(TRAIN, *flags, ranks=1, PYTHONPATH=str(site)))
    assert "resuming from step " in said
    assert all(map(math.isfinite, losses(folder)))
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    assert (folder / "samples" / "step-00000004.png").is_file(), "drawn by the pipeline's encoders"


@pytest.fixture(scope="module")
def run(shards: Path, pipeline: Path, site: Path) -> Path:
    folder = site.parent / "run"
    ended(run_job(TRAIN, *train_flags(shards, pipeline, folder, 2, "flat"), ranks=1, PYTHONPATH=str(site)))
    return folder


def test_a_run_is_sampled_and_exported(run: Path, pipeline: Path, tmp_path: Path, fastdiff: Callable[..., str]) -> None:
    out, index = tmp_path / "out", pipeline / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"layers": [10, 20, 30]}))  # no part
    fastdiff(
        "sample", run, "--npz", tmp_path / "drawn.npz", "--prompt", "a red cat", "--per-prompt", "1", "--steps", "2"
    )
    images, _ = read_npz(tmp_path / "drawn.npz")
    assert images.shape == (1, 8, 8, 3)
    fastdiff("export", run, out, "--format", "diffusers", "--raw")
    index, before = (json.loads((folder / "model_index.json").read_text()) for folder in (out, pipeline))
    assert index == before
    for record in (json.loads((run / "run.json").read_text()), newest(run).manifest):
        assert record["versions"].items() >= PACKAGES.items()
    card = (out / "README.md").read_text()
    assert "| Text encoder of a package | `text of toy-pipeline 1.0` |" in card
    assert "diffusers has no `ToyPipeline`, the class of this pipeline" in card
    assert "`text_encoder` is `toy_pipeline.ToyTextModel`" in card
    assert "import DiffusionPipeline" not in card
    weights, trained = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors"), newest(run).weights()
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in weights)
    for name in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "vae/config.json"):
        assert (out / name).read_bytes() == (pipeline / name).read_bytes()


def test_a_plan_is_of_the_network_of_the_pipeline(pipeline: Path, fastdiff: Callable[..., str]) -> None:
    said = fastdiff("plan", "--preset", "sd15-finetune", "--pretrained.path", pipeline, "--gpus", "1xH100")
    assert said.startswith("a toy network of text, 0.015 M parameters")


def test_images_are_encoded_while_training(run: Path, pipeline: Path, site: Path, tmp_path: Path) -> None:
    online = tmp_path / "online"
    flags = train_flags(pipeline.parent / "images", pipeline, online, 2, "flat")
    flags += ["--data.online", "--data.resolution", "8", "--data.center-crop", "--data.decode", "pillow"]
    ended(run_job(TRAIN, *flags, ranks=1, PYTHONPATH=str(site)))
    assert losses(online) == pytest.approx(losses(run), rel=1e-2), "but for the rounding to 16 bits"
    assert newest(online).manifest["versions"].items() >= PACKAGES.items()


def test_without_its_package_the_classes_of_a_pipeline_are_named(pipeline: Path, tmp_path: Path) -> None:
    images, out = captioned(tmp_path / "images", ["a cat"]), tmp_path / "out"
    refused = run_script(COMMAND, "encode", images, out, "--pretrained", pipeline, "--resolution", "8")
    assert refused.code == 2
    assert "has an autoencoder of class ToyAutoencoder; expected AutoencoderKL or AutoencoderDC or " in refused.output


def test_nobody_names_the_class_of_an_encoder() -> None:
    """But its own file, what builds a pipeline, and formats of others that have no other one."""
    named = re.compile(r"Autoencoder(KL|DC|RAE)|CLIPTextModel")
    files = {str(path.relative_to(ROOT / "fastdiff")) for path in SOURCES if named.search(path.read_text())}
    assert {file for file in files if not file.startswith("models/encoders/")} == {
        "models/pipeline_files.py",  # old pipelines name no class
        "models/pretrained/tiny_pipeline.py",
        "cli/compat/kohya/given.py",  # prints the command that builds one
        "cli/demo_t2i.py",
        "export/diffusers_dit.py",
        "export/ldm_autoencoder.py",
        "export/original_names.py",
    }


def test_records_are_found_by_all_classes_of_a_pipeline() -> None:
    assert encoder_of(TextEncoderFamily, ("CLIPTextModel",), "p").conditions == ("context",)
    both = ("CLIPTextModel", "CLIPTextModelWithProjection")
    assert encoder_of(TextEncoderFamily, both, "p").conditions == ("context", "pooled")
    with pytest.raises(
        ConfigError, match="p has text encoders of class CLIPTextModel with T5EncoderModel; expected CLIP"
    ):
        encoder_of(TextEncoderFamily, ("CLIPTextModel", "T5EncoderModel"), "p")
    with pytest.raises(
        ConfigError, match="p has an autoencoder of class CLIPTextModel; expected AutoencoderKL or AutoencoderDC or "
    ):
        encoder_of(AutoencoderFamily, ("CLIPTextModel",), "p")


def text_encoders(change: Callable[[dict[str, Tensor]], Any]) -> TextEncoders:
    """The toy text encoder, which returns something else."""

    class Changed(ToyText):
        def __call__(self, captions: Sequence[str]) -> Any:
            return change(super().__call__(captions))

        def null(self) -> Any:
            return change({name: value[0] for name, value in ToyText.__call__(self, [""]).items()})

    family = TextEncoderFamily(classes=("T5",), conditions=("context", "context_mask"), load=lambda *_: None)
    return TextEncoders(family, Changed(torch.ones(65, 8, requires_grad=True)), "meta", torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {"pooled": found["context"]}, "returns pooled, expected context and context_mask, the condit"),
        (lambda found: {"context": found["context"]}, "returns context, expected context and context_mask, the condit"),
        (lambda found: found | {"context_mask": found["context_mask"].float()},
         r"returns context_mask in torch\.float32, expected torch\.bool"),
        (lambda found: found | {"context_mask": found["context_mask"] & False},
         "returns a context_mask without a valid token, expected at least one"),
        (lambda found: found | {"context": found["context"][..., :4, :]}, r"returns wrong shapes.*with 4 tokens"),
        (lambda found: found["context"], "returns a Tensor, expected a dict of tensors: context, context_mask"),
        (lambda found: found["contexts"], rf"raises KeyError \('contexts'\) at {__file__}:\d+; mend that code"),
        (lambda found: {"context": found["context"] @ torch.ones(3)},
         rf"raises RuntimeError \(size mismatch.*\) at {__file__}:\d+; mend that code"),
    ],
)  # fmt: skip
def test_what_text_encoders_return_is_compared_with_their_record(change: Any, message: str) -> None:
    encoders = text_encoders(change)
    for call, method in ((lambda: encoders(["cat"]), "__call__"), (encoders.null, "null")):
        with pytest.raises(ConfigError, match=f"the text encoder T5 \\(.*Changed\\): {method} {message}"):
            call()


def raising(error: Exception) -> Callable[[dict[str, Tensor]], Any]:
    def change(_: dict[str, Tensor]) -> Any:
        raise error

    return change


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOSPC, "no space")])
def test_an_error_of_the_machine_keeps_its_own_message(error: Exception) -> None:
    with pytest.raises(type(error), match=r"out of memory|no space"):
        text_encoders(raising(error))(["cat"])


def test_a_fault_of_a_built_in_encoder_keeps_its_traceback() -> None:
    space = LatentSpace(channels=1, factor=1, shift=(0.0,), scale=(1.0,), values_per_pixel=1)
    with pytest.raises(AttributeError, match="has no attribute 'encode'"):
        Autoencoder(AUTOENCODER_KL, space, torch.nn.Linear(1, 1)).encode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(TypeError, match="not iterable"):
        TextEncoders(ONE_CLIP, Clip([None], [None], torch.device("cpu")), "cpu", torch.float32)(3)  # type: ignore[arg-type]


def test_text_encoders_without_a_method_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ToyText, "cut")
    with pytest.raises(
        ConfigError, match=r"Changed\) has no method lost or cut; expected __call__, null, parameters, lost or cut"
    ):
        text_encoders(dict)


def test_embeddings_arrive_in_the_dtype_and_on_the_device_of_the_caller() -> None:
    encoders = text_encoders(lambda found: found | {"context": found["context"].double()})
    for found in (encoders(["a cat", "birds"]), encoders.null()):
        assert {name: (value.dtype, value.device.type) for name, value in found.items()} == {
            "context": (torch.float16, "meta"),
            "context_mask": (torch.bool, "meta"),
        }
        assert not found["context"].requires_grad


def test_a_wrong_latent_space_is_named() -> None:
    space = LatentSpace(channels=3, factor=4, shift=(0.0,) * 3, scale=(1.0,) * 3, values_per_pixel=3)
    halved = partial(torch.nn.functional.avg_pool2d, kernel_size=2)
    family = AutoencoderFamily(
        classes=("Half",), space=lambda _: space, load=lambda *_: module,
        encode=lambda _, images: halved(images), decode=lambda _, latents: latents,
    )  # fmt: skip
    module = torch.nn.BatchNorm2d(3)
    for call in (Autoencoder(family, space, module).encode, Autoencoder(family, space, module).decode):
        with pytest.raises(
            ConfigError, match=r"the autoencoder Half returns .*LatentSpace, channels=3, factor=4, .*; cor"
        ):
            call(torch.zeros(1, 3, 8, 8))
    right = Autoencoder(replace(family, space=partial(lambda _: space)), replace(space, factor=2), module)
    assert right.encode(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 4, 4), "a record may have any callable"
    with pytest.raises(ConfigError, match="has 4 channels, 3 values of shift and 3 of scale, expected one per channel"):
        replace(space, channels=4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text = toy_pipeline.nowhere:X", r"the encoder text of toy-pipeline cannot be imported \(No module .*nowhere"),
        ("text = math:pi", "the encoder text of toy-pipeline is a float, expected an AutoencoderFamily"),
        (
            "one = wrong:ONE\ntwo = wrong:TWO",
            "the encoder one of toy-pipeline and the encoder two of toy-pipeline both register Twice; rename or unins",
        ),
        ("one = wrong:ONE\ntwo = wrong:ONE", "expected Twice or CLIP.*, or install the package .* fastdiff.encoders$"),
        (
            "text = wrong:CLIP",
            "the encoder text of toy-pipeline registers CLIPTextModel, which is of fastdiff; ren",
        ),
        ("text = wrong:TEXT", "the encoder text of toy-pipeline gives the condition words; expected label, context, "),
    ],
)
def test_wrong_entry_points_are_named(
    entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wrong.py").write_text(
        "from fastdiff.models.encoders.family import TextEncoderFamily\n"
        "TEXT = TextEncoderFamily(classes=('Wrong',), conditions=('words',), load=None)\n"
        "ONE, TWO = (TextEncoderFamily(classes=('Twice',), conditions=('context',), load=f) for f in (min, max))\n"
        "CLIP = TextEncoderFamily(classes=('CLIPTextModel',), conditions=('context',), load=None)\n"
    )
    monkeypatch.syspath_prepend(install(tmp_path / "site", "toy_pipeline", {"fastdiff.encoders": entry}))
    monkeypatch.setattr(registry, "_installed", registry._installed.__wrapped__)
    assert encoder_of(TextEncoderFamily, ("CLIPTextModel",), "p").conditions == ("context",), "it stops nothing else"
    with pytest.raises(ConfigError, match=message):
        encoder_of(TextEncoderFamily, ("ToyTextModel",), "p")
    said = capsys.readouterr().err
    assert (re.search(message, said) is not None) == ("CLIP" in entry), "only this one is of no unknown name"
