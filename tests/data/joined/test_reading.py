"""Several data sets as one: the same samples as from each alone, what must agree, and names and shares."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.data_sets import ListedSet, apportioned, write_list
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.builtin import encode_digits, encode_synthetic
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reader import JoinedReader
from fastdiff.data.joined.reading import open_shards, read_info
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError
from tests.support.inputs import captioned
from tests.support.inputs.captioned import encode


@pytest.fixture
def plain(tmp_path: Path) -> tuple[str, str]:
    """Two data sets of 30 and 12 samples of one size."""
    encode_synthetic(tmp_path / "photos", shape=(4, 8, 8), samples=30)
    encode_synthetic(tmp_path / "dogs", shape=(4, 8, 8), samples=12)
    return str(tmp_path / "photos"), str(tmp_path / "dogs")


def joined(*sets: str, **options: object) -> JoinedReader:
    reader = open_shards(DataConfig(sets=sets, **options))  # type: ignore[arg-type]
    assert isinstance(reader, JoinedReader)
    return reader


def info_of(*sets: str) -> JoinedInfo:
    info = read_info(DataConfig(sets=sets))
    assert isinstance(info, JoinedInfo)
    return info


def test_samples_are_those_of_each_data_set(plain: tuple[str, str]) -> None:
    with joined(plain[0], plain[1]) as both, LatentReader(plain[0]) as photos, LatentReader(plain[1]) as dogs:
        found = both.read([41, 3, 30, 29])
        np.testing.assert_array_equal(found["latent"][[1, 3]], photos.read([3, 29])["latent"])
        np.testing.assert_array_equal(found["latent"][[0, 2]], dogs.read([11, 0])["latent"])
        assert found["data_set"].tolist() == [1, 0, 1, 0]
        assert both.keys([30]) == [f"dogs:{dogs.keys([0])[0]}"]
        with pytest.raises(IndexError, match="sample 42 of 42"):
            both.read([42])


def test_buckets_captions_and_flips_are_those_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets with sizes in another order, and with other numbers of captions, without flips or with a longer one."""
    encode(tmp_path / "a", count=40)
    other = ((5, 5), (4, 6))
    monkeypatch.setattr(captioned, "SIZES", other)
    encode(tmp_path / "b", count=20, buckets=other)
    with joined(str(tmp_path / "a"), str(tmp_path / "b")) as both:
        sizes = set(both.info.buckets)
        assert sizes == {(4, 6), (6, 4), (5, 5)}
        readers = [LatentReader(tmp_path / name) for name in "ab"]
        for number in range(60):
            reader, own = (readers[0], number) if number < 40 else (readers[1], number - 40)
            choice = {"latent": np.array([1]), "caption": np.array([0.7])}
            found, expected = both.read([number], choice=choice), reader.read([own], choice=choice)
            assert both.info.buckets[both.bucket_of([number])] == expected["latent"].shape[2:]
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("loader", ["prefetch", "dali"])
def test_batches_have_the_numbers_of_the_data_sets(plain: tuple[str, str], loader: str) -> None:
    data = DataConfig(sets=(f"{plain[0]}:2", f"{plain[1]}:5"), loader=loader)  # type: ignore[arg-type]
    with open_shards(data) as reader:
        order = build_order(reader.info, seed=1, window_shards=4, global_batch=8)
        opened = build_batches(
            reader, order, config=data, seed=1, device=torch.device("cpu"), start_samples=0, rank=0, ranks=1, micro=4,
            global_batch=8,
        )  # fmt: skip
        with opened as batches:
            assert batches.name == loader
            first = [next(batches) for _ in range(30)]
    of_set = torch.cat([batch.data_set for batch in first if batch.data_set is not None])
    assert torch.bincount(of_set).tolist() == [60, 60]
    latents = torch.cat([batch.latents for batch in first])
    with LatentReader(plain[1]) as dogs:
        stored = torch.from_numpy(dogs.read(range(12))["latent"]).float()
    normal = reader.info.normalisation
    shift, scale = (torch.tensor(values).view(1, -1, 1, 1) for values in (normal.shift, normal.scale))
    expected = (stored - shift) * scale
    equal = (latents[of_set == 1][:, None] == expected[None]).flatten(2).all(2)
    assert equal.sum(0).tolist() == [5] * 12


def test_a_folder_of_several_stands_for_them_with_its_repeats(plain: tuple[str, str]) -> None:
    """Regularisation pictures of a group have as many samples as the others, whatever their number."""
    root = Path(plain[0]).parent
    write_list(root, [ListedSet(folder="photos", repeats=4), ListedSet(folder="dogs", regularisation=True)])
    info = read_info(DataConfig(path=str(root)))
    assert isinstance(info, JoinedInfo)
    assert [(each.name, each.per_epoch) for each in info.sets] == [("photos", 120), ("dogs", 120)]
    doubled = info_of(f"{root}:2", plain[1])
    assert [each.per_epoch for each in doubled.sets] == [240, 240, 12]
    assert [each.name for each in doubled.sets] == ["photos", "dogs", "dogs_2"]
    weighted = info_of(f"{root}:weight=3", f"more={plain[1]}:weight=1:loss_weight=0.5")
    assert [each.per_epoch for each in weighted.sets] == [95, 94, 63]
    assert [each.loss_weight for each in weighted.sets] == [1.0, 1.0, 0.5]
    assert weighted.lines()[2] == (
        f"more: {plain[1]}, 12 images, 5.25 times each = 63 of 252 samples of an epoch (25.0%), loss x 0.5"
    )
    write_list(root, [ListedSet(folder="photos", condition_dropout=0.0), ListedSet(folder="dogs")])
    dropped = info_of(str(root), f"{plain[1]}:3:condition_dropout=0.25")
    assert [each.condition_dropout for each in dropped.sets] == [0.0, None, 0.25]
    assert dropped.condition_dropouts(0.1) == (0.0, 0.1, 0.25)
    assert info_of(*plain).condition_dropouts(0.1) == ()
    assert dropped.lines()[2].endswith("conditions dropped 0.25")
    with pytest.raises(DataError, match="holds several data sets; give one of the folders in it"):
        DatasetInfo.read(root)
    (root / "sets.json").write_text("{}")
    with pytest.raises(DataError, match=r"sets.json is not usable \(Field required\)"):
        read_info(DataConfig(path=str(root)))


def test_the_digest_is_that_of_what_is_read(plain: tuple[str, str]) -> None:
    photos, dogs = plain
    first = info_of(photos, dogs)
    assert info_of(f"other={photos}", dogs).digest == first.digest
    others = [info_of(photos, f"{dogs}:2"), info_of(dogs, photos), info_of(photos, f"{dogs}:loss_weight=0.5")]
    others.append(info_of(photos, f"{dogs}:condition_dropout=0.5"))
    assert len({first.digest, *(each.digest for each in others), DatasetInfo.read(photos).digest}) == 6


def written(folder: Path, **changes: object) -> str:
    """A data set of one sample of 2 x 4 x 4."""
    column = Column(dtype="float16", shape=(2, 4, 4))
    fields = {
        "columns": {"latent": column},
        "normalisation": Normalisation(shift=(0.0, 0.0), scale=(1.0, 1.0)),
        "provenance": Provenance(source="test", transform="none", autoencoder_digest="a" * 64),
    }
    template = DatasetInfo(**(fields | changes))  # type: ignore[arg-type]
    with ShardWriter(folder, template, samples_per_shard=4) as writer:
        shape, dtype = template.latent.shape, template.latent.dtype
        writer.add("0", {"latent": np.zeros(shape, dtype)}, 0 if template.classes else None)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"latent": Column(dtype="float32", shape=(2, 4, 4))}}, r"the latent \(float16 2 channels and flo"),
        ({"normalisation": Normalisation(shift=(0.5, 0.0), scale=(1.0, 1.0))}, "the normalisation of the latents"),
        ({"kind": "posterior"}, "the content of the latents (mean and posterior)"),
        ({"classes": 3}, "the number of classes (None and 3)"),
        ({"provenance": Provenance(source="", transform="", autoencoder_digest="b" * 64)}, "the autoencoder (digest)"),
    ],
)
def test_data_sets_that_do_not_agree_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    one, other = written(tmp_path / "one"), written(tmp_path / "other", **changes)
    pattern = message if "\\" in message else message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=f"--data.sets: {one} and {other} differ in {pattern}"):
        info_of(one, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:0",), r"repeats 0: expected 1 to 1000000"),
        (("a:2:weight=3",), "give the repeats or a weight, not both"),
        (("a:weight=1", "b"), "a has a weight and b has none"),
        (("a:loss_weight=0",), "loss_weight 0: expected a number above 0"),
        (("a:condition_dropout=1.5",), "condition_dropout 1.5: expected a share from 0 to 1"),
        (("a:2:3",), "repeats stands twice"),
        (("a:wieght=3",), r"expected \[NAME=\]PATH\[:REPEATS\]"),
    ],
)
def test_a_wrong_entry_is_named(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(sets=given)


def test_one_source_of_the_data_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--data.path and --data.sets both name the data"):
        DataConfig(path="a", sets=("b",))
    with pytest.raises(ConfigError, match=r"--data.online reads one source"):
        DataConfig(sets=("b",), online=True)


def test_a_share_of_no_sample_is_refused(plain: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="its share of an epoch of 42 samples is less than one sample"):
        info_of(f"{plain[0]}:weight=1000", f"{plain[1]}:weight=1")


def test_a_bucket_that_gets_no_sample_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encode(tmp_path / "a", count=40)
    encode(tmp_path / "b", count=20)
    info = info_of(f"{tmp_path / 'a'}:weight=1", f"{tmp_path / 'b'}:weight=29")
    assert [each.per_epoch for each in info.sets] == [2, 58]
    order = build_order(info, seed=0, window_shards=2, global_batch=4)
    assert len(order) == 60
    assert caplog.text.count("of a with latents of") == 1
    assert "are never trained on, as none of the 2 that an epoch has of the data set fall to them" in caplog.text
    assert sum(info.share_of(n) for n in range(len(info.shards))) == pytest.approx(1)


def test_largest_remainders() -> None:
    assert apportioned(10, [Fraction(1), Fraction(1), Fraction(1)]) == [4, 3, 3]
    assert apportioned(7, [Fraction("0.1"), Fraction("0.2"), Fraction("0.7")]) == [1, 1, 5]
    assert apportioned(0, [Fraction(0), Fraction(0)]) == [0, 0]


def test_damage_is_replaced_within_its_data_set(tmp_path: Path) -> None:
    """The record of replacements is one for all data sets."""
    encode_digits(tmp_path / "a", samples_per_shard=300)
    encode_digits(tmp_path / "b", samples_per_shard=300)
    shard = next(iter(sorted((tmp_path / "b").glob("*.tar"))))
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    with joined(str(tmp_path / "a"), str(tmp_path / "b"), damaged="skip") as both:
        both.read([1797], positions=np.array([17]))
        (found,) = both.substituted.items()
        assert found[0] == 17
        assert replace(found[1], reason="").damaged.startswith("train-000000")


def test_data_sets_replace_the_path_of_a_preset(plain: tuple[str, str], tmp_path: Path) -> None:
    """And so do those of a file; an epoch and the network follow from them. A path replaces those of a file."""
    flags = ["--preset", "digits", "--epochs", "2", "--batch.samples", "6", "--output.folder", str(tmp_path / "run")]
    _, config = parse([*flags, "--data.sets", f"{plain[0]}:2", plain[1]])
    assert (config.data.path, len(config.data.sets)) == ("", 2)
    assert config.samples == 2 * 72
    assert (config.model.channels, config.model.classes) == (4, 1000)
    file = tmp_path / "run.yaml"
    file.write_text(f"data:\n  sets: ['{plain[0]}:2', {plain[1]}]\n")
    assert parse([*flags, "--config", str(file)])[1].samples == 2 * 72
    assert parse([*flags, "--config", str(file), "--data.path", plain[1]])[1].samples == 2 * 12
    with pytest.raises(ConfigError, match="both name the data"):
        parse([*flags, "--data.path", plain[0], "--data.sets", plain[1]])
