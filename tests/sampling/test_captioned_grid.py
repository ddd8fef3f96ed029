"""Pictures under the texts of their prompts, in labelled columns."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import ImageFont

from fastdiff.sampling import lettering
from fastdiff.sampling.captioned_grid import LAYOUT, captioned_grid, pictures_of_grid, plain_grid, wrapped
from fastdiff.sampling.image_grid import encoded
from fastdiff.sampling.lettering import font_for
from tests.support.inputs.captioned_pictures import in_grid

FONT = ImageFont.load_default(14)


def colours(count: int, side: int, seed: int) -> torch.Tensor:
    levels = torch.randint(256, (count, 3, 1, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return levels.expand(-1, -1, side, side).contiguous()


@pytest.mark.parametrize(("prompts", "side"), [(1, 16), (3, 64), (4, 128), (9, 64)])
def test_every_picture_is_where_the_layout_says(tmp_path: Path, prompts: int, side: int) -> None:

    columns = {name: colours(2 * prompts, side, seed) for seed, name in enumerate(("base", "step 1,000"))}
    picture, layout = captioned_grid([f"prompt of number {n}, with more words" for n in range(prompts)], columns)
    path = tmp_path / "grid.png"
    path.write_bytes(encoded(picture, ".png", {LAYOUT: layout.as_text()}))
    found, scale = in_grid(path), max(1, 64 // side)
    for name, expected in columns.items():
        assert np.array_equal(found[name][:, ::scale, ::scale], expected.permute(0, 2, 3, 1).numpy())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two birds", ["two birds"]),
        ("  two\n\tbirds ", ["two birds"]),
        ("Käse à la crème", ["Kase a la creme"]),
        ("a 猫 on a mat", ["a ? on a mat"]),
        ("猫", []),
        ("", []),
    ],
)
def test_a_text_has_the_letters_that_the_font_has(text: str, expected: list[str]) -> None:
    assert wrapped(text, FONT, 400) == expected


@pytest.mark.parametrize("text", ["a red cat on a mat " * 3, "x" * 90, "many words " * 500, "y" * 5000])
def test_lines_fit_and_nothing_of_a_short_text_is_lost(text: str) -> None:
    lines = wrapped(text, FONT, 200)
    assert all(FONT.getlength(line) <= 200 for line in lines)
    if len(text) < 100:
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert len(lines) > 1
    else:
        assert len(lines) == 4
        assert lines[-1].endswith("…")


def test_another_script_is_drawn_by_a_font_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    monkeypatch.setattr(lettering, "_OF_MACHINES", ("no such font.ttf", wide))
    found = {text: font_for(text, 14) for text in ("two birds", "ein großer Bär", "кот", "a 猫", "große 猫")}
    assert [getattr(font, "path", None) == wide for font in found.values()] == [False, True, True, False, True]
    drawn = [" ".join(wrapped(text, font, 400)) for text, font in found.items()]
    assert drawn == ["two birds", "ein großer Bär", "кот", "a ?", "große ?"]
    pixels = {"base": colours(2, 64, 0)}
    pictures = [np.asarray(captioned_grid(["a", prompt], pixels)[0]) for prompt in ("кот", "кит", "prompt 2")]
    assert len({each.tobytes() for each in pictures}) == 3


def test_a_text_that_the_first_font_has_opens_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(lettering, "_opened", lambda name, size: opened.append(name))
    font_for("two birds", 14)
    assert not opened
    font_for("猫", 14)
    assert opened == list(lettering._OF_MACHINES)


def test_a_prompt_without_a_letter_of_a_font_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "_OF_MACHINES", ())
    pixels = {"base": colours(2, 64, 0)}
    alike = [np.asarray(captioned_grid(["a", prompt], pixels)[0]) for prompt in ("猫", "prompt 2", "prompt 3")]
    assert np.array_equal(alike[0], alike[1])
    assert not np.array_equal(alike[0], alike[2])


def test_a_plain_grid_gives_back_its_pictures() -> None:
    pixels = torch.randint(256, (6, 3, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    levels = torch.from_numpy(np.array(plain_grid(pixels, 3)))
    assert torch.equal(pictures_of_grid(levels, (3, 5, 7)), pixels)
