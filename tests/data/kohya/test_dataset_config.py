"""kohya's configurations of data sets: every key is taken or refused with a reason, and the innermost value counts."""

from pathlib import Path

import pytest

from fastdiff.data.kohya.dataset_config import read_dataset_config
from fastdiff.data.kohya.keys import KEYS, SUBSET
from fastdiff.errors import ConfigError

_CONFIG = """
[general]
shuffle_caption = true
caption_extension = '.txt'
keep_tokens = 1

[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2
enable_bucket = true

  [[datasets.subsets]]
  image_dir = 'photos'
  class_tokens = 'sks dog'
  num_repeats = 10

  [[datasets.subsets]]
  image_dir = 'dogs'
  class_tokens = 'dog'
  is_reg = true
  keep_tokens = 3
  caption_extension = '.caption'

[[datasets]]
resolution = [768, 512]

  [[datasets.subsets]]
  image_dir = 'photos'
"""


def _written(folder: Path, text: str, name: str = "data.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_innermost_value_counts(tmp_path: Path) -> None:
    """Subset before data set before general before the script's flags before kohya's defaults."""
    path = _written(tmp_path, _CONFIG)
    found = read_dataset_config(path, {"caption_tag_dropout_rate": 0.1, "batch_size": 2, "resolution": 1024})
    first, reg, other = found.subsets
    assert [each.folder for each in found.subsets] == ["photos", "dogs", "photos"]
    assert [each.dataset for each in found.subsets] == [0, 0, 1]
    assert [each["keep_tokens"] for each in found.subsets] == [2, 3, 1]
    assert [each["caption_extension"] for each in found.subsets] == [".txt", ".caption", ".txt"]
    assert [each["resolution"] for each in found.subsets] == [512, 512, [768, 512]]
    assert [each["batch_size"] for each in found.subsets] == [4, 4, 2]
    assert (first["num_repeats"], reg["is_reg"], other["class_tokens"]) == (10, True, None)
    assert first["caption_tag_dropout_rate"] == 0.1
    assert (first["min_bucket_reso"], first["max_bucket_reso"]) == (256, 1024)
    assert not found.refusals
    assert not found.left_out


_REFUSED = {
    "network_multiplier": "0.5", "validation_split": "0.1",
    "secondary_separator": "';;;'", "enable_wildcard": "true", "caption_dropout_every_n_epochs": "2",
    "token_warmup_step": "0.5", "color_aug": "true", "random_crop": "true", "face_crop_aug_range": "[1.0, 3.0]",
    "custom_attributes": "{own = 1}",
}  # fmt: skip
"""A value of every key that is refused."""


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_taken_or_refused_with_a_reason(tmp_path: Path, key: str) -> None:
    """A key that is not in the list of refusals says what becomes of it."""
    known = KEYS[key]
    assert bool(known.ours) != bool(known.refused) == (key in _REFUSED)
    if not known.refused:
        return
    row, of_set = (f"{key} = {_REFUSED[key]}", "") if SUBSET in known.places else ("", f"{key} = {_REFUSED[key]}")
    text = f"[[datasets]]\n{of_set}\n[[datasets.subsets]]\nimage_dir = 'photos'\n{row}\n"
    (refusal,) = read_dataset_config(_written(tmp_path, text)).refusals
    assert (refusal.key, refusal.reason) == (key, known.refused)
    (of_flag,) = read_dataset_config(
        _written(tmp_path, text.replace(f"{key} = {_REFUSED[key]}", "")), {key: refusal.value}
    ).refusals
    assert str(of_flag).startswith(f"-- {key} = ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[datasets]]\nnum_repeat = 2\n", r"data.toml: \[\[datasets\]\] 1 num_repeat: no key of kohya's sd-scripts"),
        (
            "[[datasets]]\nimage_dir = 'a'\n",
            r"\[\[datasets\]\] 1 image_dir: expected in \[\[datasets.subsets\]\]",
        ),
        ("[general]\nresolution = 0\n", r"\[general\] resolution = 0: expected a side in pixels"),
        ("[general]\nflip_aug = 1\n", r"\[general\] flip_aug = 1: expected true or false"),
        ("[general]\n", "names no pictures"),
        (
            "[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2\n",
            r"\[\[datasets.subsets\]\] 1.1: image_dir is missing",
        ),
        ("datasets = 3\n", r"expected \[\[datasets\]\], tables in a list"),
        ("[general\n", "data.toml cannot be read: .*line 1"),
        ("[others]\n", r"others: expected \[general\] and \[\[datasets\]\]"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_dataset_config(_written(tmp_path, text))


def test_what_kohya_leaves_out_is_told(tmp_path: Path) -> None:
    """Subsets without repeats, and a folder twice in one data set; JSON is read alike."""
    rows = '{"image_dir": "a"}, {"image_dir": "b", "num_repeats": 0}, {"image_dir": "a", "num_repeats": 2}'
    found = read_dataset_config(_written(tmp_path, f'{{"datasets": [{{"subsets": [{rows}]}}]}}', "data.json"))
    assert [each.folder for each in found.subsets] == ["a"]
    assert found.left_out == (
        "[[datasets.subsets]] 1.2: num_repeats is 0, so kohya leaves it out",
        "[[datasets.subsets]] 1.3: a stands twice in this [[datasets]]; kohya takes the first",
    )


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "kohya-data.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {key.ours or f'refused: {key.refused}'} |" for name, key in KEYS.items()]
