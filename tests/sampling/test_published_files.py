"""Published files of weights: sampled, measured and exported directly, without a run."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastdiff.cli.main import main
from fastdiff.cli.published_weights import split_fields
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError
from fastdiff.evaluation.likelihood import NllOptions, measure, read_clean
from fastdiff.evaluation.validation_set import spread
from fastdiff.models.build import Model, build_model
from fastdiff.models.load import build_on_meta, resolve
from fastdiff.models.pretrained.pickles import load_published
from fastdiff.models.pretrained.training_state import read_published_training
from fastdiff.sampling.npz import read_npz
from fastdiff.sampling.solvers import sample
from fastdiff.sampling.text import as_bytes
from tests.support.nights import by_day

SIT_ARGUMENTS = Namespace(model="SiT-S/2", path_type="Linear", prediction="velocity")
DIT = "--preset dit-s-2-256 --model.depth 2 --model.hidden 32 --model.heads 2 --model.size 8 --model.classes 10"
PIXELS = " --model.channels 1"
IDDPM = (
    "--preset iddpm-imagenet64-cond --model.channels 1 --model.size 8 --model.width 16 --model.channel_mult 1 2 "
    "--model.res_blocks 1 --model.attention_resolutions 4 --model.classes 10 --model.norm_num_groups 8 "
    "--objective.timesteps 100"
)
FILES: dict[str, tuple[str, str]] = {
    "DiT-S-2-256x256.pt": ("bare", DIT + PIXELS),
    "0400000.pt": ("dit", DIT + PIXELS),
    "sit.pt": ("sit", (DIT + PIXELS).replace("dit-s-2-256", "sit-xl-2-256")),
    "ema_0.9999_250000.pt": ("bare", IDDPM),
    "64x64_diffusion.pt": ("bare", IDDPM + " --model.qkv_order qkv_major --model.resblock_updown"),
    "dit.safetensors": ("safetensors", DIT + PIXELS),
}  # fmt: skip
"""Content and configuration of each."""
OFTEN = ["0400000.pt", "64x64_diffusion.pt", "dit.safetensors"]


def write(path: Path, content: str, flags: str) -> Path:
    """Write a network of random weights as its project publishes it."""
    weights = network(flags).state_dict()
    if content == "safetensors":
        save_file(weights, path)
    elif content == "bare":
        torch.save(weights, path)
    else:
        raw = {name: torch.zeros_like(value) for name, value in weights.items()}
        arguments = SIT_ARGUMENTS if content == "sit" else Namespace(model="DiT-S/2")
        torch.save({"model": raw, "ema": weights, "opt": {}, "args": arguments}, path)
    return path


def configuration(flags: str) -> RunConfig:
    return parse(flags.split())[1]


def network(flags: str) -> Model:
    """The network of these flags, with other weights than those that it starts from."""
    model = build_model(configuration(flags).model, seed=5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize("name", by_day(OFTEN, *sorted(FILES.keys() - set(OFTEN))))
def test_a_file_draws_what_its_network_draws(tmp_path: Path, name: str) -> None:
    content, flags = FILES[name]
    file, out = write(tmp_path / name, content, flags), tmp_path / "out.npz"
    options = [
        "--steps",
        "3",
        "--seed",
        "4",
        "--cfg",
        "1.5",
        "--classes",
        "0-2",
        "--per-class",
        "2",
        "--autoencoder",
        "identity",
    ]
    assert run("sample", file, *flags.split(), *options, "--npz", out) == 0
    images, labels = read_npz(out)
    assert labels is not None
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    objective = configuration(flags).objective
    latents: Tensor = sample(
        network(flags),
        objective,
        {"label": torch.from_numpy(labels)},
        SamplerConfig(steps=3, seed=4, cfg=1.5, clip=True),
        shape=(1, 8, 8),
        null={"label": torch.tensor(10)},
        batch=64,
    )
    expected = as_bytes(latents).permute(0, 2, 3, 1).numpy()
    assert abs(images.astype(int) - expected.astype(int)).max() <= 1
    assert images.std() > 1

    assert run("sample", file, *flags.split(), *options, "--npz", out) == 0, "it is complete already"
    moved = file.rename(tmp_path / f"moved{file.suffix}")
    assert run("sample", moved, *flags.split(), "--steps", 2, "--per-class", 1, "--grid", tmp_path / "grid.png") == 0
    assert (tmp_path / "grid.png").exists()


@pytest.mark.parametrize("name", ["DiT-S-2-256x256.pt", "ema_0.9999_250000.pt"])
def test_the_likelihood_of_a_file_is_that_of_its_network(tmp_path: Path, digits: Path, name: str) -> None:
    content, flags = FILES[name]
    flags = f"{flags} --objective.timesteps 50"
    file = write(tmp_path / name, content, flags)
    assert run("evaluate", file, *flags.split(), "--nll", "--samples", 4, "--data", digits) == 0
    result = json.loads((tmp_path / f"{file.stem}.nll.json").read_text())
    assert (result["step"], result["weights"]) == (None, f"weights of {name}")
    assert (tmp_path / f"{file.stem}.nll.npz").exists()
    model, objective = network(flags), configuration(flags).objective
    assert isinstance(objective, DdpmConfig)
    with LatentReader(digits) as reader:
        batches = read_clean(reader, spread(len(reader), 4), model.inputs, torch.device("cpu"), 0)
        found = measure(model, objective, batches, NllOptions(clip=True))
    assert result["total_bpd"] == pytest.approx(found.summary()["total_bpd"], rel=1e-5)
    assert run("evaluate", file, *flags.split(), "--nll", "--samples", 4) == 2, "the preset's data are not the file's"


@pytest.mark.parametrize("name", OFTEN)
def test_a_file_is_exported_with_its_network(tmp_path: Path, name: str) -> None:
    content, flags = FILES[name]
    file = write(tmp_path / name, content, flags)
    expected = dict(network(flags).named_parameters())
    assert run("export", file, tmp_path / "out", *flags.split(), "--format", "safetensors") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"converted from `{name}` by fastdiff" in card
    assert f"| Weights | weights of {name}, in fp32 |" in card
    assert "Learning rate" not in card, "nobody knows it"
    assert run("export", file, tmp_path / "diffusers", *flags.split(), "--format", "diffusers") == 0
    if "dit" in flags:
        assert run("export", file, tmp_path / "dit", *flags.split(), "--format", "dit", "--dtype", "fp16") == 0
        again = load_published(tmp_path / "dit" / "dit.pt")
        assert all(torch.equal(again[key], value.half()) for key, value in expected.items())


def test_a_file_of_sit_needs_its_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "sit.pt", *FILES["sit.pt"])
    assert run("sample", file, *(DIT + PIXELS).split(), "--steps", 2, "--grid", tmp_path / "grid.png") == 2
    assert "was trained by SiT with path_type Linear and prediction velocity" in capsys.readouterr().err


FLAGS = (DIT + PIXELS).split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "FILE"], "name its network by --preset, for example dit-xl-2-256"),
        (["sample", "FILE", "--model.depth", 2], "--model.depth 2: only a published file of weights has such flags"),
        (["sample", "FOLDER", "--preset", "digits"], "--preset digits is for a file of weights (.pt or .safetensors)"),
        (["sample", "FILE", "--preset", "dit-s"], "--preset dit-s: unknown; did you mean"),
        (["sample", "MISSING", *FLAGS], "missing.pt: no such file of weights"),
        (["sample", "FILE", "--preset", "digits"], "the weights belong to another network"),
        (["sample", "FILE", "--preset", "sd15-512"], "published text-to-image networks are pipelines"),
        (["sample", "FILE", *FLAGS, "--ema", 0.9], "--ema: FOLDER/dit.pt is a file of weights, not a run"),
        (["sample", "FILE", *FLAGS, "--ema-std", 0.1], "--ema-std: FOLDER/dit.pt is a file of weights, not a run"),
        (["sample", "FILE", *FLAGS, "--step", 3], "--step: FOLDER/dit.pt is a file of weights, not a run"),
        (["sample", *FLAGS, "FILE"], "RUN|FILE is missing; usage: fastdiff sample RUN|FILE [FLAGS]"),
        (["sample", "FILE", *FLAGS, "--num", 2, "--npz", "FOLDER/x.npz", "--autoencoder", "identity",
          "--model.channels", 4], "another network"),
        (["evaluate", "FILE", *FLAGS], "give --nll for its likelihood"),
        (["evaluate", "FILE", *FLAGS, "--nll"], "dit.pt is a file of weights: name the data to measure by --data"),
        (["evaluate", "FILE", "--reference", "FOLDER", "--ema", 0.9], "--ema applies to a network"),
        (["evaluate", "FILE", "--reference", "FOLDER", "--scales", 2], "FOLDER/dit.pt is no run, and no published"),
        (["evaluate", "FILE", "--reference", "FOLDER", "--model.depth", 2], "--model.depth applies to a published"),
        (["export", "FILE", "OUT", *FLAGS, "--format", "dit-training"], "has no optimizer and no averages"),
        (["export", "FILE", "OUT", *FLAGS, "--format", "dit", "--raw"], "--raw: FOLDER/dit.pt is a file of weights"),
        (["export", "FILE", "OUT", *FLAGS, "--format", "lora"], "has no adapter"),
        (["verify", "FOLDER", "--model.depth", 2], "--model.depth: unknown flag"),
    ],
)  # fmt: skip
def test_wrong_commands_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[Any], message: str
) -> None:
    write(tmp_path / "dit.pt", "bare", DIT + PIXELS)
    names = {"FILE": tmp_path / "dit.pt", "MISSING": tmp_path / "missing.pt", "OUT": tmp_path / "out"}
    given = [names.get(str(each), str(each).replace("FOLDER", str(tmp_path))) for each in arguments]
    assert run(*given) == 2
    assert message.replace("FOLDER", str(tmp_path)) in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("plain.pt", "projectors.0.0.weight"),
        ("0400000.pt", "decoder_blocks.0.attn.qkv.weight"),
        ("sit.safetensors", "projectors.0.0.weight"),
    ],
)
def test_weights_of_repa_are_refused_by_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, name: str
) -> None:
    """In the three forms in which it is published, for sampling, an export, and a training that goes on."""
    flags = (DIT + PIXELS).replace("dit-s-2-256", "sit-xl-2-256")
    weights = {**network(flags).state_dict(), name: torch.zeros(4, 4)}
    path = tmp_path / form
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        arguments = Namespace(model="SiT-XL/2", path_type="linear", prediction="v", proj_coeff=0.5, enc_type="dinov2-b")
        whole = {"model": weights, "ema": weights, "opt": {}, "args": arguments, "steps": 400_000}
        torch.save(weights if form == "plain.pt" else whole, path)
    commands = [
        ["sample", str(path), "--grid", "x.png"],
        ["export", str(path), str(tmp_path / "out"), "--format", "dit"],
    ]
    for command in commands:
        assert main([*command, *flags.split()]) == 2
        said = capsys.readouterr().err
        assert f"{path} is a checkpoint of REPA: it has {name} for its projections" in said
        assert "save the weights under 'ema' without projectors.*" in said
    start = ["--pretrained.path", str(path), "--pretrained.weights", "--output.folder", str(tmp_path / "run")]
    config = resolve(parse([*flags.split(), *start])[1])
    with pytest.raises(ConfigError, match="is a checkpoint of REPA"):
        build_on_meta(config)
    if form == "0400000.pt":
        with pytest.raises(ConfigError, match="is a checkpoint of REPA"):
            read_published_training(path)


def test_fields_of_a_configuration_are_split_from_the_other_arguments() -> None:
    line = "export a.pt OUT --ema.rates 0.9 0.99 --format dit --timesteps.mean -0.5 -.5 --model.size=8 --raw"
    own, fields = split_fields(line.split())
    assert " ".join(own) == "export a.pt OUT --format dit --raw"
    assert " ".join(fields) == "--ema.rates 0.9 0.99 --timesteps.mean -0.5 -.5 --model.size=8"
