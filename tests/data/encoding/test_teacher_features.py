"""``encode --teacher``: reduced features in int8 beside latents or pixels, equal for kills and any ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.conditions import FEATURES, TEACHER_TOKEN
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.teacher_features import BASIS_FILE, Basis
from fastdiff.data.joined.reader import JoinedReader
from fastdiff.data.joined.reading import open_shards, read_info
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.loading.fit import require_features
from fastdiff.data.shards.format import DatasetInfo, Normalisation
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError
from fastdiff.models.encoders.teacher import Teacher
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.encoding import classed, encode, encode_part, files
from tests.support.inputs.teachers import WIDTH, tiny_teacher

IMAGES, SIDE, PIXELS = 10, 4, 64
PIXEL_SPACE: dict[str, Any] = {"autoencoder": "identity", "resolution": PIXELS, "teacher_side": SIDE}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classed(tmp_path_factory.mktemp("sources") / "images", range(IMAGES), PIXELS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_teacher(tmp_path_factory.mktemp("teacher") / "dinov2", "dinov2")


def pixels(source: Path, out: Path, model: Path, **options: Any) -> list[str]:
    return encode(source, out, "", **{"teacher": str(model), **PIXEL_SPACE, **options})


def batch(folder: Path, *, flipped: bool = False) -> Batch:
    """All samples, as a network gets them."""
    with LatentReader(folder) as reader:
        choice = {"latent": np.full(len(reader), int(flipped))} if reader.info.flipped else {}
        found = {
            name: torch.from_numpy(value) for name, value in reader.read(np.arange(len(reader)), choice=choice).items()
        }
        found["position"] = torch.arange(len(reader))
        return Normaliser(reader.info, torch.device("cpu"))(found)


def features(teacher: Path, levels: Tensor) -> tuple[Tensor, Tensor | None]:
    return Teacher(str(teacher), SIDE, torch.device("cpu"), torch.float32)(levels.float() / 255)


def test_features_are_those_of_the_pixels_beside_them(source: Path, teacher: Path, tmp_path: Path) -> None:
    said = pixels(source, tmp_path / "out", teacher, teacher_width=0, teacher_token=True, flip=True)
    info, basis = DatasetInfo.read(tmp_path / "out"), Basis.read(tmp_path / "out")
    assert info.columns[FEATURES].dtype == "int8"
    assert info.provenance.teacher == str(teacher)
    assert info.provenance.teacher_digest == basis.digest
    assert basis.kept == pytest.approx(1)
    assert any("keeps 100.0% of the squared norm" in line for line in said)
    verify(tmp_path / "out")
    stored = [batch(tmp_path / "out", flipped=flipped) for flipped in (False, True)]
    assert torch.equal(stored[0].latents.flip(3), stored[1].latents)
    for each in stored:
        expected, token = features(teacher, each.latents)
        found = each.condition[FEATURES]  # in the components of the class token
        assert F.cosine_similarity(found, expected, dim=1).min() > 0.99  # a mirrored value may be clipped
        assert token is not None
        torch.testing.assert_close(each.condition[TEACHER_TOKEN].float(), token, rtol=1e-3, atol=1e-3)
    assert not torch.equal(stored[0].condition[FEATURES].flip(3), stored[1].condition[FEATURES])


def test_fewer_components_keep_what_a_singular_value_decomposition_keeps(
    source: Path, teacher: Path, tmp_path: Path
) -> None:
    pixels(source, tmp_path / "out", teacher, teacher_width=6)
    basis = Basis.read(tmp_path / "out")
    exact, _ = features(teacher, batch(tmp_path / "out").latents)
    rows = exact.flatten(2).transpose(1, 2).reshape(-1, WIDTH).double()
    values = torch.linalg.svdvals(rows).square()
    assert basis.kept == pytest.approx(float(values[:6].sum() / values.sum()), rel=1e-4)
    torch.testing.assert_close(basis.matrix.T @ basis.matrix, torch.eye(6), rtol=0, atol=1e-5)
    reduced = rows @ basis.matrix.double()
    stored = batch(tmp_path / "out").condition[FEATURES].flatten(2).transpose(1, 2).reshape(-1, 6)
    assert (stored - reduced).abs().amax(0).le(0.51 * basis.scale.double()).all(), "half a level"


def test_latents_have_features_too(source: Path, teacher: Path, tmp_path: Path) -> None:
    kl = tiny_autoencoder(tmp_path / "kl", "kl4")
    encode(source, tmp_path / "out", kl, resolution=PIXELS, teacher=str(teacher), teacher_width=8)
    latent = DatasetInfo.read(tmp_path / "out").latent.shape[1]
    assert DatasetInfo.read(tmp_path / "out").columns[FEATURES].shape == (8, latent // 2, latent // 2)


def test_a_killed_encode_goes_on_with_its_map(source: Path, teacher: Path, tmp_path: Path) -> None:
    options = {"teacher": str(teacher), **PIXEL_SPACE, "teacher_width": 6}
    encode(source, tmp_path / "whole", "", **options)
    encode_part(source, tmp_path / "cut", "", 1, **options)
    first = (tmp_path / "cut" / BASIS_FILE).read_bytes()
    encode(source, tmp_path / "cut", "", **options)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert (tmp_path / "cut" / BASIS_FILE).read_bytes() == first


def test_two_data_sets_share_a_map(source: Path, teacher: Path, tmp_path: Path) -> None:
    pixels(source, tmp_path / "first", teacher, teacher_width=6)
    pixels(source / "class0", tmp_path / "second", teacher, teacher_width=6, teacher_basis=str(tmp_path / "first"))
    assert (tmp_path / "first" / BASIS_FILE).read_bytes() == (tmp_path / "second" / BASIS_FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"has 6 components; use --teacher-width 6"):
        pixels(source, tmp_path / "third", teacher, teacher_width=5, teacher_basis=str(tmp_path / "first"))
    other = tiny_teacher(tmp_path / "clip", "clip")
    with pytest.raises(ConfigError, match="is of another teacher"):
        pixels(source, tmp_path / "third", other, teacher_width=6, teacher_basis=str(tmp_path / "first"))
    with pytest.raises(ConfigError, match=rf"no map of a teacher's features .*{BASIS_FILE}"):
        pixels(source, tmp_path / "third", teacher, teacher_basis=str(source))


def test_data_sets_with_maps_of_their_own_do_not_join(source: Path, teacher: Path, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    pixels(source, Path(first), teacher, teacher_width=6)
    pixels(source, Path(second), teacher, teacher_width=6, max_samples=6)
    with pytest.raises(ConfigError, match=f"the normalisation of features .*, the second with --teacher-basis {first}"):
        read_info(DataConfig(sets=(first, second)))
    pixels(source, Path(third), tiny_teacher(tmp_path / "clip", "clip"), teacher_width=6)
    with pytest.raises(ConfigError, match=r"differ in the teacher \(digest\)"):
        read_info(DataConfig(sets=(first, third)))


def test_pixels_without_mirrored_features_are_not_mirrored_beside_others(
    source: Path, teacher: Path, tmp_path: Path
) -> None:
    """Their features would be those of another picture."""
    pixels(source, tmp_path / "first", teacher, teacher_width=6, flip=True)
    pixels(source, tmp_path / "second", teacher, teacher_width=6, teacher_basis=str(tmp_path / "first"))
    with open_shards(DataConfig(sets=(str(tmp_path / "first"), str(tmp_path / "second")))) as both:
        assert isinstance(both, JoinedReader)
        assert both.can_mirror([0, IMAGES]).tolist() == [True, False]
        assert "not mirrored" in both.info.lines(mirrors=True)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": ""}, "--teacher-side needs --teacher"),
        ({"teacher_width": 99}, f"--teacher-width 99: the features of this teacher have {WIDTH}"),
        ({"teacher_width": -1}, "--teacher-width -1"),
        ({"buckets": True}, "--teacher with --buckets"),
    ],
)
def test_options_that_contradict_are_refused(
    source: Path, teacher: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pixels(source, tmp_path / "out", teacher, **options)


def test_the_class_token_of_an_autoencoder_is_not_aligned_beside_features_of_a_teacher(
    source: Path, teacher: Path, tmp_path: Path
) -> None:
    pixels(source, tmp_path / "out", teacher, teacher_width=0, teacher_token=True)
    info, data = DatasetInfo.read(tmp_path / "out"), DataConfig(path=str(tmp_path / "out"), random_flip=False)
    network = DiTConfig(
        depth=1, hidden=16, heads=2, channels=3, size=PIXELS, patch=PIXELS // SIDE, teacher_width=WIDTH,
        aligned_width=WIDTH, aligned_block=1, aligned_token=True,
    )  # fmt: skip
    require_features(network, data, info)
    info.normalisations[TEACHER_TOKEN] = Normalisation(shift=(0.0,) * WIDTH, scale=(2.0,) * WIDTH)
    with pytest.raises(ConfigError, match=r"--model.aligned_token: .* holds the class token of its autoencoder"):
        require_features(network, data, info)


def test_a_data_set_whose_features_lack_their_scale_is_refused(source: Path, teacher: Path, tmp_path: Path) -> None:
    pixels(source, tmp_path / "out", teacher, teacher_width=6)
    info = DatasetInfo.read(tmp_path / "out")
    info.normalisations.clear()
    assert info.problem() == f"normalisations lacks {FEATURES}"
    path = tmp_path / "out" / "dataset.json"
    assert json.loads(path.read_bytes())["provenance"]["teacher"] == str(teacher)
