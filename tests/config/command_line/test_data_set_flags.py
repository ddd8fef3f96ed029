"""The fields of the network that the data set decides."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.checkpoint.manifest import MANIFEST
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import preset
from fastdiff.config.presets.small_images import patch_of
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.loading.fit import check_data_set
from fastdiff.errors import ConfigError


def described(folder: Path, shape: tuple[int, int, int], **fields: object) -> str:
    """A folder with what the flags read of a data set."""
    folder.mkdir()
    columns = {"latent": {"dtype": "float16", "shape": shape}, **fields.pop("columns", {})}  # type: ignore[dict-item]
    (folder / "dataset.json").write_text(json.dumps({"columns": columns, **fields}))
    return str(folder)


def run_of(*flags: str) -> RunConfig:
    return parse(flags)[1]


def shape_of(config: RunConfig) -> tuple[int, int, int]:
    return config.model.channels, config.model.size, config.model.classes


def test_a_preset_fits_its_data(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    encode_synthetic(tmp_path / "data", shape=(3, 16, 16), samples=8, classes=7)
    config = run_of("--preset", "digits", "--data.path", path)
    assert shape_of(config) == (3, 16, 7)
    check_data_set(config, "digits")
    assert config.model == replace(preset("digits").model, channels=3, size=16, classes=7)  # type: ignore[type-var]


@pytest.mark.parametrize("given", ["--model.classes=12", "--model.classes 12"])
def test_what_is_given_stays(tmp_path: Path, given: str) -> None:
    path = described(tmp_path / "data", (8, 32, 32), kind="posterior", classes=7)
    assert shape_of(run_of("--preset", "dit-s-8-256", "--data.path", path)) == (4, 32, 7)
    assert shape_of(run_of("--preset", "dit-s-8-256", "--data.path", path, *given.split())) == (4, 32, 12)
    (tmp_path / "run.yaml").write_text(f"model: {{size: 64}}\ndata: {{path: {path}}}\n")
    assert shape_of(run_of("--preset", "dit-s-8-256", "--config", str(tmp_path / "run.yaml"))) == (4, 64, 7)


def test_a_value_that_contradicts_the_data_names_theirs(tmp_path: Path) -> None:
    encode_synthetic(tmp_path / "data", shape=(4, 8, 8), samples=8, classes=10)
    config = run_of("--preset", "dit-s-8-256", "--data.path", str(tmp_path / "data"), "--model.classes", "5")
    with pytest.raises(ConfigError, match=r"has 10 classes, but the model has 5; use --model\.classes 10"):
        check_data_set(config, None)
    config = run_of("--preset", "dit-s-8-256", "--data.path", str(tmp_path / "data"), "--model.channels", "3")
    with pytest.raises(ConfigError, match=r"shape \(4, 8, 8\).* use --model\.channels 4 --model\.size 8"):
        check_data_set(config, None)


def test_a_preset_that_mirrors_names_the_flag_of_data_that_cannot_be(tmp_path: Path) -> None:
    encode_synthetic(tmp_path / "data", shape=(4, 8, 8), samples=8, classes=10)
    words = ["--preset", "dit-s-8-256", "--data.path", str(tmp_path / "data")]
    with pytest.raises(ConfigError, match=r"holds no flipped latents; .* or train with --data.no-random-flip"):
        check_data_set(run_of(*words), None)
    check_data_set(run_of(*words, "--data.no-random-flip"), None)


def test_an_unconditional_network_stays_so_and_missing_classes_are_told(tmp_path: Path) -> None:
    with_classes = described(tmp_path / "with", (3, 32, 32), classes=10)
    assert shape_of(run_of("--preset", "iddpm-cifar10", "--data.path", with_classes)) == (3, 32, 0)
    without = described(tmp_path / "without", (3, 64, 64))
    assert shape_of(run_of("--preset", "iddpm-imagenet64-cond", "--data.path", without)) == (3, 64, 1000)


def test_captions_decide_the_width_of_the_text_and_the_size_follows(tmp_path: Path) -> None:
    columns = {"context": {"shape": (77, 1024)}, "pooled": {"shape": (1280,)}}
    path = described(tmp_path / "data", (8, 32, 32), kind="posterior", columns=columns)
    model = run_of("--preset", "sd15-512", "--data.path", path).model
    assert isinstance(model, UNetConfig)
    assert (model.size, model.cross_attention_dim) == (32, 1024)
    assert model.pooled_dim == 0, "a network without that input"
    odd = described(tmp_path / "odd", (8, 33, 33), kind="posterior", columns=columns)
    assert run_of("--preset", "sd15-512", "--data.path", odd).model.size == 64, "the check before the start explains it"


@pytest.mark.parametrize(
    ("longest", "tokens"), [({"longest_caption": 19}, 24), ({"longest_caption": 118}, 120), ({}, 120)]
)
def test_the_longest_caption_decides_what_is_counted(tmp_path: Path, longest: dict[str, int], tokens: int) -> None:
    """The tokens of a batch, by which operations and memory are counted."""
    columns = {"context": {"shape": (120, 64)}, "context_mask": {"shape": (120,)}}
    path = described(tmp_path / "data", (8, 32, 32), kind="posterior", columns=columns, **longest)
    model = run_of("--preset", "pixart-256", "--data.path", path).model
    assert isinstance(model, PixArtConfig)
    assert (model.caption_dim, model.caption_tokens) == (64, tokens)


@pytest.mark.parametrize(("buckets", "sides"), [([[16, 16], [8, 32]], (16, 16)), ([[24, 40], [40, 24]], (32, 30))])
def test_pictures_of_buckets_are_drawn_as_squares_of_as_many_pixels(
    tmp_path: Path, buckets: list[list[int]], sides: tuple[int, int]
) -> None:
    """Their side is a multiple of what each network needs, 8 and 2."""
    path = described(tmp_path / "data", (8, *buckets[0]), kind="posterior", buckets=buckets)
    assert run_of("--preset", "sd15-512", "--data.path", path).model.size == sides[0]
    assert run_of("--preset", "z-image-lora", "--data.path", path).model.size == sides[1]
    assert run_of("--preset", "z-image-lora", "--data.path", path, "--model.size", "64").model.size == 64


def test_pretrained_weights_leave_the_network_alone(tmp_path: Path) -> None:
    weights = ["--pretrained.path", "DiT.pt", "--pretrained.weights"]
    one = described(tmp_path / "one", (8, 16, 16), kind="posterior", classes=3)
    assert shape_of(run_of("--preset", "dit-s-8-256", "--data.path", one, *weights)) == (4, 32, 1000)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": {"latent": {"shape": [0, 4, 4]}}}', '{"columns": 3}'])
def test_what_cannot_be_read_is_left_to_the_checks(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    assert run_of("--preset", "digits", "--data.path", str(tmp_path)).model == preset("digits").model
    assert run_of("--preset", "digits", "--data.path", "nowhere").model == preset("digits").model
    assert run_of("--preset", "digits", "--data.path", "s3://bucket/data").model == preset("digits").model


def committed(run: Path, config: RunConfig) -> None:
    """A run folder with one committed checkpoint, as far as the flags read it."""
    manifest = run / "checkpoints" / "step-00000001" / MANIFEST
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("{}")
    (run / "run.json").write_text(json.dumps({"config": as_json(config)}))


def test_a_resumed_run_keeps_its_network(tmp_path: Path) -> None:
    path = described(tmp_path / "data", (8, 32, 32), kind="posterior", classes=7)
    flags = ["--preset", "dit-s-8-256", "--data.path", path, "--output.folder", str(tmp_path / "run")]
    committed(tmp_path / "run", run_of(*flags, "--model.classes", "1000"))
    assert shape_of(run_of(*flags)) == (4, 32, 1000)
    assert shape_of(run_of(*flags, "--resume", "never")) == (4, 32, 7)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {"model": {"kind": "unet", "classes": 3}}}))
    assert shape_of(run_of(*flags)) == (4, 32, 7)


@pytest.mark.parametrize("later", ["s3://bucket/d28", "moved/away", ""])
def test_a_resumed_run_keeps_its_network_wherever_its_data_lie(tmp_path: Path, later: str) -> None:
    path = described(tmp_path / "d28", (1, 28, 28), classes=7)
    flags = ["--preset", "dit-small-images", "--output.folder", str(tmp_path / "run")]
    first = run_of(*flags, "--data.path", path)
    assert shape_of(first) == (1, 28, 7)
    committed(tmp_path / "run", first)
    assert run_of(*flags, "--data.path", later).model == first.model
    assert shape_of(run_of(*flags, "--data.path", later, "--model.classes", "9")) == (1, 28, 9)


def test_a_run_without_a_committed_checkpoint_takes_the_network_of_its_data(tmp_path: Path) -> None:
    """Such as one that was stopped in its first step, and whose images were encoded again at another size."""
    flags = ["--preset", "dit-small-images", "--output.folder", str(tmp_path / "run"), "--data.path"]
    committed(tmp_path / "run", run_of(*flags, described(tmp_path / "d28", (1, 28, 28), classes=7)))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    (tmp_path / "run" / "checkpoints" / "step-00000001.tmp").mkdir()
    again = run_of(*flags, described(tmp_path / "d16", (3, 16, 16), classes=2))
    assert shape_of(again) == (3, 16, 2)


@pytest.mark.parametrize(
    ("size", "patch"),
    [
        (1, 1), (2, 1), (5, 1), (8, 2), (16, 2), (28, 2), (31, 1), (32, 2), (33, 3), (34, 2), (38, 2), (46, 2),
        (48, 3), (58, 2), (62, 2), (64, 4), (128, 8), (256, 8),
    ],
)  # fmt: skip
def test_the_patch_of_small_images_follows_from_their_size(tmp_path: Path, size: int, patch: int) -> None:
    path = described(tmp_path / "data", (1, size, size), classes=4)
    model = run_of("--preset", "dit-small-images", "--data.path", path).model
    assert isinstance(model, DiTConfig)
    assert patch_of(size) == model.patch == patch
    assert (model.channels, model.size, model.classes) == (1, size, 4)
    given = run_of("--preset", "dit-small-images", "--data.path", path, "--model.patch", "1").model
    assert isinstance(given, DiTConfig)
    assert given.patch == 1


def test_no_size_leaves_one_token_alone() -> None:
    assert all(patch_of(size) < size for size in range(2, 33))


@pytest.mark.parametrize(("size", "patch", "fewer"), [(37, 1, 36), (512, 8, 128)])
def test_a_size_without_a_fitting_patch_is_refused(tmp_path: Path, size: int, patch: int, fewer: int) -> None:
    flags = ["--preset", "dit-small-images", "--data.path", described(tmp_path / "data", (1, size, size))]
    with pytest.raises(ConfigError, match=rf"{size} px.*--resolution {fewer}, or .*--model\.patch {patch}$"):
        run_of(*flags)
    model = run_of(*flags, "--model.patch", str(patch)).model
    assert isinstance(model, DiTConfig)
    assert model.patch == patch


def test_the_patch_follows_from_a_size_that_is_given(tmp_path: Path) -> None:
    flags = ["--preset", "dit-small-images"]
    (tmp_path / "size.yaml").write_text("model: {size: 64}\n")
    for more in (
        ["--model.size", "64"],
        ["--model.size=64", "--data.path", "s3://bucket/pictures"],
        ["--config", str(tmp_path / "size.yaml"), "--data.path", described(tmp_path / "data", (3, 32, 32))],
    ):
        model = run_of(*flags, *more).model
        assert isinstance(model, DiTConfig)
        assert (model.size, model.patch) == (64, 4), more


def test_super_resolution_takes_its_large_size_from_the_data(tmp_path: Path) -> None:
    path = described(tmp_path / "data", (3, 128, 128), classes=5)
    model = run_of("--preset", "iddpm-upsampler", "--data.path", path, "--model.attention_resolutions", "16", "8").model
    assert isinstance(model, AdmConfig)
    assert (model.size, model.low_res_size, model.classes) == (128, 64, 5)
