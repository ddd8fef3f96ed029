"""Image sets and statistics that ``fastdiff evaluate`` refuses: each with a reason, and none is executed."""

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fastdiff.errors import ConfigError, DataError
from fastdiff.evaluation.image_comparison import ImageComparisonOptions, evaluate_images
from fastdiff.evaluation.image_sets import open_images, open_reference
from fastdiff.sampling.npz import npz_member
from tests.support.injected.hostile_files import Payload
from tests.support.inputs.image_sets import folder_of, npz, pictures

PIXELS = ImageComparisonOptions(features="pixels", batch=7)


def test_a_run_is_refused_as_an_image_set(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a run; draw its images first: fastdiff sample .* --npz samples\.npz"):
        open_images(tmp_path)


def test_files_that_are_no_image_set_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither an npz file nor a folder; expected an npz file with arr_0"):
        open_images(tmp_path / "images.txt")
    with pytest.raises(DataError, match="empty holds no images"):
        open_images(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"holds mu, sigma; expected"):
        open_images(npz(tmp_path / "stats.npz", mu=np.zeros(2), sigma=np.eye(2)))
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="it is not a file"):
        open_images(tmp_path / "pipe.npz")
    with pytest.raises(ConfigError, match="holds 1 image; a distribution needs at least 2"):
        evaluate_images(npz(tmp_path / "a.npz", pictures(3)), npz(tmp_path / "b.npz", pictures(1)), PIXELS)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 4, 4, 3), np.float32),
        np.zeros((5, 4, 4), np.uint8),
        np.zeros((5, 3, 4, 4), np.uint8),
        np.zeros((5, 4, 4, 4), np.uint8),
    ],
)
def test_other_layouts_are_refused(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    with pytest.raises(DataError, match=r"arr_0 is .*; expected uint8 \[N, H, W, C\], C 1 or 3"):
        open_images(npz(tmp_path / "a.npz", array))


@pytest.mark.parametrize(
    ("mu", "sigma", "message"),
    [
        (np.zeros(3), np.eye(2), r"expected floating point \[D\] and \[D, D\]"),
        (np.zeros((2, 1)), np.eye(2), r"expected floating point \[D\] and \[D, D\]"),
        (np.zeros(2), np.eye(2, dtype=np.int64), r"expected floating point \[D\] and \[D, D\]"),
        (np.zeros(2), np.full((2, 2), np.nan), "not finite"),
        (np.zeros(2), np.array([[2.0, 0.5], [0.4, 1.0]]), r"no covariance: .* from its transpose by up to 0\.1;"),
        (np.zeros(2), np.triu(np.ones((2, 2))), "by up to 1; expected none below 0 and a symmetric matrix"),
        (np.zeros(2), np.diag([1.0, -1e-3]), r"its smallest eigenvalue is -0\.001 and its largest 1,"),
        (np.zeros(2), np.array([[1.0, 3.0], [3.0, 1.0]]), "its smallest eigenvalue is -2 and its largest 4,"),
    ],
)
def test_wrong_statistics_are_refused(
    tmp_path: Path, mu: npt.NDArray[Any], sigma: npt.NDArray[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        open_reference(npz(tmp_path / "s.npz", mu=mu, sigma=sigma))


def test_roundings_of_a_covariance_are_not_refused(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(500, 24)).astype(np.float32)
    sigma = np.cov(features, rowvar=False).astype(np.float32)
    sigma[3, 5] *= 1 + 1e-5
    assert (sigma != sigma.T).any()
    found = open_reference(npz(tmp_path / "s.npz", mu=features.mean(axis=0), sigma=sigma)).statistics
    assert found is not None
    assert np.array_equal(found.covariance, sigma)


def test_statistics_of_another_extractor_are_refused(tmp_path: Path) -> None:
    statistics = npz(tmp_path / "s.npz", mu=np.zeros(2048), sigma=np.eye(2048, dtype=np.float32))
    with pytest.raises(ConfigError, match="are of 2048 features, pixels gives 36: they were computed with another"):
        evaluate_images(npz(tmp_path / "a.npz", pictures(3)), statistics, PIXELS)


def test_bad_images_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "images", pictures(4))
    other = folder / "class 1" / "001.png"
    Image.fromarray(pictures(1, size=(4, 4))[0]).save(other)
    with pytest.raises(DataError, match=r"001\.png has 4x4 pixels, .*000\.png 3x4; all images must have one size"):
        list(open_images(folder).batches(4))
    other.write_bytes(other.read_bytes()[:60])
    with pytest.raises(DataError, match=r"001\.png: .*; repair or remove it"):
        list(open_images(folder).batches(4))


# --- hostile files -------------------------------------------------------------------------------------------------


def zipped(path: Path, header: dict[str, Any], content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """An npz file whose array says what it likes."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, header)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("arr_0.npy", buffer.getvalue() + content)
    return path


def header(*shape: int, descr: str = "|u1", fortran: bool = False) -> dict[str, Any]:
    return {"shape": shape, "descr": descr, "fortran_order": fortran}


def refused_without_memory(path: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            open_images(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    payload = np.empty(2, object)
    payload[:] = [Payload(tmp_path / "executed")] * 2
    np.savez(tmp_path / "a.npz", payload)
    refused_without_memory(tmp_path / "a.npz", r"arr_0 holds Python objects \(a pickle\), which are never loaded")
    (tmp_path / "b.npz").write_bytes(pickle.dumps(payload))
    refused_without_memory(tmp_path / "b.npz", "is damaged or no npz file")
    assert not (tmp_path / "executed").exists()


def test_claimed_sizes_are_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    refused_without_memory(zipped(path, header(10**9, 64, 64, 3), bytes(100)), "and has 100 bytes")
    refused_without_memory(zipped(path, header(-2, -2, 2, 1), bytes(8)), r"has the shape \(-2, -2, 2, 1\)")
    refused_without_memory(zipped(path, header(0, 4, 4, 3), b""), r"has the shape \(0, 4, 4, 3\)")
    text = b"{1: 2, 'descr': '|u1', 'fortran_order': False, 'shape': (1,)}\n"
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("arr_0.npy", np.lib.format.magic(1, 0) + struct.pack("<H", len(text)) + text + bytes(1))
    refused_without_memory(tmp_path / "b.npz", "is damaged or no npz file")
    refused_without_memory(zipped(path, header(2, 2, 2, 1, fortran=True), bytes(8)), r"\(Fortran order\)")
    bomb = zipped(path, header(80, 1024, 1024, 1), bytes(80 << 20), zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    refused_without_memory(bomb, rf"has {80 << 20} bytes by its header and \d+ in the file")
    refused_without_memory(zipped(path, header(8, 2, 2, 1), bytes(32), zipfile.ZIP_LZMA), "that np.savez never uses")


def test_a_lying_zip_directory_is_refused(tmp_path: Path) -> None:
    """The sizes in the zip's directory are those that its array claims, and the file is small."""
    claimed = 300 << 20
    path = zipped(tmp_path / "a.npz", header(300, 1024, 1024, 1), b"few bytes")
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\x01\x02")
    for field in (20, 24):  # packed and unpacked size
        content[directory + field : directory + field + 4] = (128 + claimed).to_bytes(4, "little")
    path.write_bytes(content)
    refused_without_memory(path, rf"has {claimed} bytes by its header and \d+ in the file")


def test_damage_is_an_error(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", pictures(40))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or no npz file .*CRC"):
        list(open_images(path).batches(7))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged or no npz file"):
        open_images(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("arr_0.npy", b"no array")
    with pytest.raises(DataError, match="damaged or no npz file"):
        npz_member(path, "arr_0")
