"""Pictures of many images: every pixel where it belongs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fastdiff.sampling import lettering
from fastdiff.sampling.image_grid import image_grid, save_picture
from tests.support.injected.tiny_disk import fill, tiny_disk

BORDER, GRAY = 2, 96


def test_gray_images_lie_row_by_row_with_sharp_pixels() -> None:
    images = torch.linspace(-1, 1, 6 * 4).view(6, 1, 2, 2)
    picture = np.asarray(image_grid(images, rows=2, scale=3))
    assert picture.shape == (BORDER + 2 * (6 + BORDER), BORDER + 3 * (6 + BORDER))
    for n in range(6):
        top, left = BORDER + n // 3 * (6 + BORDER), BORDER + n % 3 * (6 + BORDER)
        for i in range(6):
            for j in range(6):
                value = (float(images[n, 0, i // 3, j // 3]) + 1) / 2 * 255
                assert picture[top + i, left + j] == round(value)
    assert (picture[:BORDER] == GRAY).all()
    assert (picture[:, -BORDER:] == GRAY).all()
    assert (picture[BORDER + 6 : BORDER + 6 + BORDER] == GRAY).all()


def test_rgb_is_clipped_and_keeps_its_channels() -> None:
    images = torch.tensor([9.0, -9.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 64, 64)
    image = image_grid(images)
    assert image.mode == "RGB"
    assert image.getpixel((BORDER, BORDER)) == (255, 0, 128)


@pytest.mark.parametrize("channels", [2, 4])
def test_latents_show_three_channels_each_over_its_whole_range(channels: int) -> None:
    images = torch.randn(3, channels, 8, 8) * 20 + 7
    image = image_grid(images, rows=1)
    assert image.mode == "RGB"
    picture = np.asarray(image)[BORDER:-BORDER]
    for c in range(min(3, channels)):
        assert (picture[..., c].min(), picture[..., c].max()) == (0, 255)


def test_small_images_grow_and_large_ones_stay() -> None:
    assert image_grid(torch.zeros(1, 1, 8, 8)).size == (64 + 2 * BORDER, 64 + 2 * BORDER)
    assert image_grid(torch.zeros(1, 3, 256, 256)).size == (256 + 2 * BORDER, 256 + 2 * BORDER)


def test_empty_places_and_default_rows() -> None:
    picture = np.asarray(image_grid(torch.ones(5, 1, 8, 8), scale=1))
    assert picture.shape == (BORDER + 2 * 10, BORDER + 3 * 10)
    assert (picture[-8 - BORDER :, -8 - BORDER :] == GRAY).all()
    assert (picture[BORDER : BORDER + 8, -8 - BORDER : -BORDER] == 255).all()


def test_diverged_images_are_drawn_not_refused() -> None:
    picture = np.asarray(image_grid(torch.full((1, 1, 8, 8), float("nan")), scale=1))
    assert (picture[BORDER:-BORDER, BORDER:-BORDER] == 0).all()
    assert image_grid(torch.full((2, 4, 8, 8), float("nan"))).mode == "RGB"


@pytest.mark.parametrize(("shape", "rows"), [((8, 8), 1), ((0, 1, 8, 8), 1), ((1, 1, 8, 8), 0)])
def test_refusals(shape: tuple[int, ...], rows: int) -> None:
    with pytest.raises(ValueError, match=r"expected|at least 1"):
        image_grid(torch.zeros(shape), rows=rows)


def test_a_picture_without_room_leaves_the_earlier_one(tmp_path: Path) -> None:
    picture = image_grid(torch.zeros(1, 1, 8, 8))
    with tiny_disk(tmp_path / "disk", 1) as disk:
        save_picture(disk / "grid.png", picture)
        earlier = (disk / "grid.png").read_bytes()
        fill(disk)
        with pytest.raises(OSError, match="grid"):
            save_picture(disk / "grid.png", image_grid(torch.ones(9, 1, 8, 8)))
        assert (disk / "grid.png").read_bytes() == earlier
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "grid.png"]


def test_titles_stand_above_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to the width of a column; blank where every font lacks a letter. The images stay as they are."""
    monkeypatch.setattr(lettering, "_OF_MACHINES", ())
    images = torch.zeros(6, 3, 64, 64)
    plain = np.asarray(image_grid(images, rows=2))
    titled = np.asarray(image_grid(images, rows=2, titles=["flower", "W" * 100, "花"]))
    header = len(titled) - len(plain)
    assert np.array_equal(titled[header:], plain)
    lit = [(titled[:header, 66 * column + 2 : 66 * column + 66] > 200).any() for column in range(3)]
    assert lit == [True, True, False]
    assert not (titled[:header, [66, 67, 132, 133]] > 200).any(), "no title leaves its column"
    accented, bare = (np.asarray(image_grid(images, rows=2, titles=[name, "", ""])) for name in ("café", "cafe"))
    assert np.array_equal(accented, bare)
    partly, marked = (np.asarray(image_grid(images, rows=2, titles=[name, "", ""])) for name in ("straße", "stra?e"))
    assert np.array_equal(partly, marked), "one letter that the font lacks"
