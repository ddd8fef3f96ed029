"""Encoding of images and captions: latents, embeddings, buckets, several ranks and refusals."""

import fcntl
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.encoding.plan import EncodeFolder, PartitionRecord
from fastdiff.data.encoding.source_metadata import PartitionMetadata
from fastdiff.data.shards.format import DatasetInfo, index_path
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError, Preempted, StorageError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.launcher import VARIABLES, Place, place_in_any_job
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.inputs.encoding import captioned, classed, encode, encode_part, files, picture

CAPTIONS = ["a cat", "a dog", "a cat", "a seven", "a dog", "a cat"]


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioned(tmp_path_factory.mktemp("sources") / "images", CAPTIONS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, source: Path, sd: Path) -> Path:
    """The source, encoded without disturbance."""
    out = tmp_path_factory.mktemp("encoded") / "plain"
    encode(source, out, sd)
    return out


def read(folder: Path, numbers: list[int] | None = None, **choice: Any) -> dict[str, Any]:
    assert not verify(folder).problems
    with LatentReader(folder) as reader:
        ids = list(range(len(reader))) if numbers is None else numbers
        return reader.read(ids, choice={name: np.array([value] * len(ids)) for name, value in choice.items()})


def meta(folder: Path) -> dict[str, dict[str, Any]]:
    """By key: what stands in the json components."""
    found = {}
    for shard in DatasetInfo.read(folder).shards:
        content = (folder / shard.name).read_bytes()
        index = ShardIndex.from_bytes(index_path(folder / shard.name).read_bytes())
        for place in index.places():
            if place.component == "json":
                found[place.key] = json.loads(content[place.offset : place.offset + place.length])
    return found


def posterior(pipeline: Path, images: list[Image.Image]) -> np.ndarray[Any, Any]:
    """Mean and standard deviation as diffusers computes them."""
    vae = Pretrained(str(pipeline)).autoencoder().module
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = vae.encode(pixels.float() / 127.5 - 1).latent_dist
    return torch.cat([found.mean, found.std], 1).numpy()


def test_latents_and_embeddings_are_those_of_diffusers(tmp_path: Path, source: Path, sd: Path) -> None:
    said = encode(source, tmp_path / "out", sd, flip=True, dtype="float32")
    images = [picture(number) for number in range(6)]
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    arrays, flipped = read(tmp_path / "out"), read(tmp_path / "out", latent=1)
    np.testing.assert_allclose(arrays["latent"], posterior(sd, images), atol=1e-5)
    np.testing.assert_allclose(flipped["latent"], posterior(sd, mirrored), atol=1e-5)
    assert np.abs(arrays["latent"] - flipped["latent"]).max() > 1e-2
    text = Pretrained(str(sd)).text()
    np.testing.assert_allclose(arrays["context"], text(CAPTIONS)["context"].numpy(), atol=1e-5)
    with LatentReader(tmp_path / "out") as reader:
        np.testing.assert_allclose(reader.null()["context"], text([""])["context"][0].numpy(), atol=1e-5)
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.kind, info.samples, len(info.shards), info.classes) == ("posterior", 6, 2, None)
    assert info.normalisation.shift == (0.0,) * 8
    assert info.normalisation.scale == (0.18215,) * 8
    assert info.provenance.autoencoder_digest == Pretrained(str(sd)).digest("vae")
    assert info.provenance.text_encoder_digest == Pretrained(str(sd)).digest("text_encoder")
    assert meta(tmp_path / "out")["000000003"] == {
        "name": str(source / "003.png"), "captions": ["a seven"], "original_size": [32, 32], "crop": [0, 0],
    }  # fmt: skip
    assert said[0].startswith("rank 0: 6 images in ")
    assert all(stage in said[0] for stage in ("images/s", "read", "decode", "VAE", "text", "write"))


def test_half_precision_is_stored_by_default(plain: Path, sd: Path) -> None:
    arrays = read(plain)
    assert arrays["latent"].dtype == arrays["context"].dtype == np.float16
    np.testing.assert_allclose(
        arrays["latent"], posterior(sd, [picture(number) for number in range(6)]), atol=2e-3, rtol=1e-3
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_near(tmp_path: Path, source: Path, sd: Path, plain: Path, precision: str) -> None:
    encode(source, tmp_path / "out", sd, precision=precision, max_samples=2)
    half, full = read(tmp_path / "out"), read(plain, [0, 1])
    for name in ("latent", "context"):
        difference = half[name].astype(np.float32) - full[name]
        assert 0 < np.square(difference).mean() < 0.03**2 * np.square(full[name], dtype=np.float32).mean()


def test_an_autoencoder_that_overflows_in_fp16_is_in_fp32(tmp_path: Path) -> None:
    """As the configuration of SDXL's says; that of sdxl-vae-fp16-fix says that it does not."""
    pipeline = build(tmp_path / "sdxl", kind="sdxl")
    file = pipeline / "vae" / "config.json"
    for upcast in (True, False):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"force_upcast": upcast}))
        for dtype in (torch.float16, torch.bfloat16):
            weights = Pretrained(str(pipeline)).autoencoder(dtype=dtype).module.parameters()
            assert {each.dtype for each in weights} == {torch.float32 if upcast and dtype == torch.float16 else dtype}


def test_sdxl_has_pooled_embeddings_and_sizes(tmp_path: Path) -> None:
    pipeline = build(tmp_path / "sdxl", kind="sdxl")
    source = captioned(tmp_path / "images", ["a cat", "a dog"], [(96, 64), (32, 80)])
    encode(source, tmp_path / "out", pipeline, dtype="float32")
    arrays = read(tmp_path / "out")
    expected = Pretrained(str(pipeline)).text()(["a cat", "a dog"])
    np.testing.assert_allclose(arrays["context"], expected["context"].numpy(), atol=1e-5)
    np.testing.assert_allclose(arrays["pooled"], expected["pooled"].numpy(), atol=1e-5)
    # 96x64 becomes 48x32, of which 8 rows are cut off on either side; of 32x80 it is 24 columns.
    assert arrays["time_ids"].tolist() == [[96, 64, 8, 0, 32, 32], [32, 80, 0, 24, 32, 32]]
    with LatentReader(tmp_path / "out") as reader:
        assert not reader.null()["context"].any(), "the pipeline says that an empty prompt is zeros"


def test_sizes_are_stored_for_a_network_that_takes_them_or_is_unknown(
    tmp_path: Path, source: Path, sd: Path, plain: Path
) -> None:
    assert "time_ids" not in DatasetInfo.read(plain).columns
    shutil.copytree(sd, tmp_path / "encoders", ignore=shutil.ignore_patterns("unet"))
    encode(source, tmp_path / "out", tmp_path / "encoders", max_samples=2)
    assert read(tmp_path / "out")["time_ids"].shape == (2, 6)
    shutil.copytree(sd / "unet", tmp_path / "encoders" / "unet")
    with pytest.raises(ConfigError, match=r"other options \(image_conditions was \['time_ids'\], is "):
        encode(source, tmp_path / "out", tmp_path / "encoders", max_samples=2)


def test_buckets_keep_the_aspect_ratio(tmp_path: Path, sd: Path) -> None:
    sizes = [(32, 64), (32, 32), (64, 32), (64, 128), (48, 48), (32, 64), (30, 60)]
    source = captioned(tmp_path / "images", [f"picture {n}" for n in range(7)], sizes)
    encode(
        source, tmp_path / "out", sd, buckets=True, bucket_step=16, resolution=48, samples_per_shard=7, dtype="float32"
    )
    info = DatasetInfo.read(tmp_path / "out")
    by_size = {info.buckets[shard.bucket]: shard for shard in info.shards}
    assert {size: shard.samples for size, shard in by_size.items()} == {(8, 16): 4, (12, 12): 2, (16, 8): 1}
    assert by_size[8, 16].name == "train-000000-8x16.tar"
    with LatentReader(tmp_path / "out") as reader:
        wide = reader.read(range(4))
        assert [key[-1] for key in reader.keys(range(4))] == ["0", "3", "5", "6"]
    image = picture(0, (32, 64))
    assert wide["latent"].shape == (4, 8, 8, 16)
    np.testing.assert_allclose(wide["latent"][:1], posterior(sd, [image]), atol=1e-5)
    assert meta(tmp_path / "out")["000000003"]["original_size"] == [64, 128]


def test_classes_need_no_text(tmp_path: Path, sd: Path) -> None:
    said = encode(classed(tmp_path / "images", range(4)), tmp_path / "out", sd)
    arrays = read(tmp_path / "out")
    assert arrays["label"].tolist() == [0, 0, 1, 1]
    assert set(arrays) == {"latent", "label"}
    assert "no captions" in said[0]
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.null, info.provenance.text_encoder, info.provenance.text_encoder_digest) == ({}, None, None)
    said = encode(tmp_path / "images", tmp_path / "by autoencoder", sd / "vae")
    assert not any("captions" in line for line in said), "an autoencoder alone embeds none"


def test_a_tar_is_a_shard(tmp_path: Path, sd: Path) -> None:
    for tar, count in enumerate((5, 2)):
        with tarfile.open(tmp_path / f"{tar}.tar", "w") as archive:
            for number in range(count):
                image = io.BytesIO()
                picture(10 * tar + number).save(image, "PNG")
                for kind, content in (("png", image.getvalue()), ("txt", f"picture {number}".encode())):
                    member = tarfile.TarInfo(f"{tar}{number}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    encode(tmp_path / "{0..1}.tar", tmp_path / "out", sd, captions="all", dtype="float32")
    info = DatasetInfo.read(tmp_path / "out")
    assert ([shard.samples for shard in info.shards], info.captions) == ([5, 2], 1)
    images = [picture(number) for number in (0, 1, 2, 3, 4, 10, 11)]
    np.testing.assert_allclose(read(tmp_path / "out")["latent"], posterior(sd, images), atol=1e-5)


def test_several_captions(tmp_path: Path, sd: Path) -> None:
    source = captioned(tmp_path / "images", [["one", "two", "three"], "alone", ["first", "second"]])
    encode(source, tmp_path / "all", sd, captions="all", dtype="float32")
    text = Pretrained(str(sd)).text()
    for choice, expected in ((0.0, ["one", "alone", "first"]), (0.99, ["three", "alone", "second"])):
        found = read(tmp_path / "all", caption=choice)["context"]
        np.testing.assert_allclose(found, text(expected)["context"].numpy(), atol=1e-5)
    assert DatasetInfo.read(tmp_path / "all").captions == 3
    said = encode(source, tmp_path / "first", sd)
    assert DatasetInfo.read(tmp_path / "first").captions == 1
    told = "pictures with more captions than the 1 embedded; --captions all embeds all: 2 (first: 000.png, 002.png)"
    assert any(told in line for line in said)


def test_what_is_lost_of_captions_and_pictures_is_counted_and_named(tmp_path: Path, sd: Path) -> None:
    """The same whether one process encodes all, or one is interrupted and another one goes on."""
    long = "a very large yellow house on a hill under a grey sky near the blue sea at dusk, " * 4
    captions = ["a hut", long + "with a green door", "", [long, "a house"], "w" * 70, "a hut"]
    sizes = [(32, 32), (31, 64), (64, 64), (8, 8), (32, 40), (40, 40)]
    source = captioned(tmp_path / "images", captions, sizes)
    said = encode(source, tmp_path / "out", sd)
    lost = sum(len(caption.replace(" ", "")) + 2 - 77 for caption in (captions[1], long))  # a token per letter
    told = {
        "pictures smaller than the resolution, so enlarged: they are blurred: 2 (first: 001.png, 003.png)",
        "pictures with a caption that was cut: it is longer than the 77 tokens that the text encoder reads: 2 "
        "(first: 001.png, 003.png)",
        f"tokens beyond the first 77 of a caption, which were not read: {lost} (first: 001.png, 003.png)",
        "pictures with an empty caption, trained as the empty prompt: 1 (first: 002.png)",
        "pictures with more captions than the 1 embedded; --captions all embeds all: 1 (first: 003.png)",
    }
    assert {line.removeprefix("  note: ") for line in said if line.startswith("  note: ")} == told
    assert "  33.3% of the pictures have a caption that was cut after 77 tokens" in said
    selection = DatasetInfo.read(tmp_path / "out").selection
    assert selection is not None
    assert {str(each) for each in selection.noted} == told
    encode_part(source, tmp_path / "again", sd, 1)
    encode(source, tmp_path / "again", sd)
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_bad_images_end_the_encode_or_are_listed(tmp_path: Path, sd: Path) -> None:
    source = captioned(tmp_path / "images", [f"picture {n}" for n in range(9)])
    (source / "005.png").write_bytes((source / "005.png").read_bytes()[:700])
    (source / "006.png").write_text("no image at all")
    (source / "008.png").unlink()
    with pytest.raises(DataError, match=r"005\.png cannot be used.*--bad skip"):
        encode(source, tmp_path / "out", sd)
    assert (tmp_path / "out" / "train-000000.tar").exists(), "the first partition is finished"
    assert not (tmp_path / "out" / "dataset.json").exists()
    said = encode(source, tmp_path / "out", sd, bad="skip")
    assert "4 more were already encoded" in said[0]
    assert "3 bad images skipped, listed in" in said[0]
    lines = (tmp_path / "out" / "bad_images.jsonl").read_text().splitlines()
    assert [Path(json.loads(line)["name"]).name for line in lines] == ["005.png", "006.png", "008.png"]
    assert all(json.loads(line)["reason"] for line in lines)
    encode(source, tmp_path / "again", sd, bad="skip")
    assert files(tmp_path / "out") == files(tmp_path / "again")
    assert len(read(tmp_path / "out")["latent"]) == 6


def test_images_that_were_left_out_are_an_error_when_the_policy_changes(tmp_path: Path, sd: Path) -> None:
    source = captioned(tmp_path / "images", [f"picture {n}" for n in range(9)])
    (source / "000.png").write_text("no image at all")
    assert "2 of 3 shards are kept" in str(encode_part(source, tmp_path / "out", sd, 2, bad="skip"))
    with pytest.raises(DataError, match=r"000\.png cannot be used"):
        encode(source, tmp_path / "out", sd)


def test_latents_that_are_not_finite_are_bad(tmp_path: Path, source: Path, sd: Path) -> None:
    broken = shutil.copytree(sd, tmp_path / "broken")
    path = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["quant_conv.bias"].fill_(1e30)
    save_file(weights, path)
    with pytest.raises(DataError, match=r"000\.png.*not finite.*--precision"):
        encode(source, tmp_path / "out", broken)
    with pytest.raises(DataError, match="all 6 images of the source are unusable"):
        encode(source, tmp_path / "out", broken, bad="skip")


JOBS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    "a template": {"RANK": "7", "WORLD_SIZE": "8"},
    "a step of Slurm": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
}


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *JOBS["a step of Slurm"]):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize("job", JOBS)
def test_a_process_alone_encodes_all_whatever_the_variables_of_a_job_say(
    tmp_path: Path, source: Path, sd: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    for name, value in JOBS[job].items():
        monkeypatch.setenv(name, value)
    said = encode(source, tmp_path / "out", sd)
    assert files(tmp_path / "out") == files(plain)
    [told] = [line for line in said if "goes on with shards of other ranks" in line]
    assert all(f"{name}={JOBS[job][name]}" in told for name in list(JOBS[job])[-3:-1] if "LOCAL" not in name)
    # A rank that comes late finds everything done.
    assert encode(source, tmp_path / "out", sd) == [f"{tmp_path / 'out'} is already complete"]
    assert files(tmp_path / "out") == files(plain)


@pytest.mark.usefixtures("no_job")
def test_the_shell_of_an_interactive_step_of_slurm_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOBS["a step of Slurm"].items():
        monkeypatch.setenv(name, value)
    assert place_in_any_job().size == 4
    monkeypatch.setenv("SLURM_STEP_ID", "4294967290")
    assert place_in_any_job() == Place()


def test_a_partition_that_another_process_holds_is_waited_for_and_taken_when_that_process_ends(
    tmp_path: Path, source: Path, sd: Path, plain: Path
) -> None:
    encode_part(source, tmp_path / "out", sd, 1)
    other = (tmp_path / "out" / ".encoding" / "unit-000001.lock").open("wb")
    fcntl.flock(other, fcntl.LOCK_EX)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "waiting for 1 shards that other processes write" in text:
            other.close()

    encode(source, tmp_path / "out", sd, say=say)
    assert len([text for text in said if "waiting for" in text]) == 1
    assert files(tmp_path / "out") == files(plain)


def test_shards_that_do_not_stay_end_with_75(
    tmp_path: Path, source: Path, sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(EncodeFolder, "record", lambda folder, partition: None)
    with pytest.raises(Preempted, match=r"2 of 2 shards are missing .*RANK=1, WORLD_SIZE=2.* rank 1 of 2"):
        encode(source, tmp_path / "out", sd)


def test_the_number_of_threads_does_not_matter(tmp_path: Path, source: Path, sd: Path) -> None:
    """Ranks that share a machine have fewer threads each than one that has it for itself."""
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        encode(source, tmp_path / f"{threads}", sd, resolution=128, batch=6, max_samples=6)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.fault(9)
def test_a_damaged_shard_of_a_killed_encode_is_written_again(
    tmp_path: Path, source: Path, sd: Path, plain: Path
) -> None:
    encode_part(source, tmp_path / "out", sd, 1)
    shard = tmp_path / "out" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    encode(source, tmp_path / "out", sd)
    assert files(tmp_path / "out") == files(plain)


def test_other_options_are_refused(tmp_path: Path, source: Path, sd: Path) -> None:
    encode_part(source, tmp_path / "out", sd, 1)
    before = files(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"other options \(batch was 3, is 2; flip was False, is True\)"):
        encode(source, tmp_path / "out", sd, batch=2, flip=True)
    assert files(tmp_path / "out") == before
    encode(source, tmp_path / "out", sd)
    with pytest.raises(ConfigError, match="already holds a data set with another source or other options"):
        encode(source, tmp_path / "out", sd, batch=2)


def test_folders_of_others_are_left_alone(tmp_path: Path, source: Path, sd: Path, digits: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train-notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"train-notes\.txt, which was not written"):
        encode(source, tmp_path / "mine", sd)
    assert list(files(tmp_path / "mine")) == ["train-notes.txt"]
    before = files(digits)
    with pytest.raises(ConfigError, match="already holds a data set"):
        encode(source, digits, sd)
    assert files(digits) == before
    (tmp_path / "home" / "thesis").mkdir(parents=True)
    for begin in (lambda: encode(source, tmp_path / "home", sd), lambda: encode_digits(tmp_path / "home")):
        with pytest.raises(
            ConfigError, match=r"home: the folder holds nothing of this command, but thesis; name a new"
        ):
            begin()
    assert [path.name for path in (tmp_path / "home").rglob("*")] == ["thesis"]
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    encode_digits(tmp_path / "disk")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".encoding").touch()
    with pytest.raises(ConfigError, match="unfinished encode of digits or synthetic"):
        encode(source, tmp_path / "begun", sd)
    with pytest.raises(ConfigError, match="is inside the source"):
        encode(source, source / "out", sd)


NEIGHBOURS = (
    "dataset.json.bak", "null.context.npy.orig", "null.tmp", "bad_images.jsonl.orig", "bad_images.jsonl.1.tmp", "tmp",
)  # fmt: skip
"""Names of a user that resemble those of an encode."""


def neighbours(out: Path) -> dict[str, bytes]:
    """Write files of a user, and return their content."""
    out.mkdir()
    for name in NEIGHBOURS:
        (out / name).write_text("years of work")
    return files(out)


def test_files_of_the_user_beside_encoded_images_stay(tmp_path: Path, source: Path, sd: Path, plain: Path) -> None:
    mine = neighbours(tmp_path / "out")
    (tmp_path / "out" / ".encoding").mkdir()
    (tmp_path / "out" / ".encoding" / "mine").write_text("years of work")
    encode(source, tmp_path / "out", sd)
    assert files(tmp_path / "out" / ".encoding") == {"mine": b"years of work"}
    shutil.rmtree(tmp_path / "out" / ".encoding")
    assert files(tmp_path / "out") == mine | files(plain)


def test_files_of_the_user_beside_encoded_digits_stay(tmp_path: Path, digits: Path) -> None:
    mine = neighbours(tmp_path / "out")
    (tmp_path / "out" / ".encoding").touch()  # of an encode that was killed at its start
    encode_digits(tmp_path / "out")
    assert files(tmp_path / "out") == mine | files(digits)


@pytest.mark.parametrize("name", ["null.context.npy", "train-000000.tar"])
def test_a_file_that_an_encode_would_replace_is_refused(tmp_path: Path, source: Path, sd: Path, name: str) -> None:
    (tmp_path / name).write_text("years of work")
    for begin in (lambda: encode(source, tmp_path, sd), lambda: encode_digits(tmp_path)):
        with pytest.raises(ConfigError, match="which was not written by an unfinished encode"):
            begin()
    (tmp_path / ".encoding").mkdir()  # without a plan, no encode has begun
    with pytest.raises(ConfigError, match="which was not written by an unfinished encode"):
        encode(source, tmp_path, sd)
    assert files(tmp_path) == {name: b"years of work"}


def test_an_unfinished_encode_is_replaced_without_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / ".encoding").touch()
    for name in ("train-000099.tar", "null.context.npy.123-0123abcd.tmp", "train-notes.txt"):
        (tmp_path / name).write_text("left")
    encode_digits(tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_file() and path.read_bytes() == b"left"}
    assert left == {"train-notes.txt"}


def test_a_mark_of_someone_else_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ".encoding").symlink_to(tmp_path / "mine")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / ".encoding").write_text("years of work")
    with pytest.raises(StorageError, match=r"link/\.encoding"):
        encode_digits(tmp_path / "link")
    with pytest.raises(ConfigError, match="is not the mark of an unfinished encode"):
        encode_digits(tmp_path / "file")
    assert (tmp_path / "mine").read_text() == (tmp_path / "file" / ".encoding").read_text() == "years of work"


@pytest.mark.fault(27)
def test_a_partition_is_written_by_one_process(tmp_path: Path) -> None:
    first, second = (EncodeFolder(tmp_path, {}, 2, lambda: 1) for _ in range(2))
    assert first.claim(0)
    assert not second.claim(0)
    assert second.claim(1)
    first.release_all()
    assert second.claim(0)
    second.finish(0, PartitionRecord((), ()), PartitionMetadata(None, ()))
    assert not first.claim(0)
    assert first.unfinished() == [1]


@pytest.mark.fault(8)
def test_after_a_full_disk_the_same_command_goes_on(tmp_path: Path, source: Path, sd: Path, plain: Path) -> None:
    with tiny_disk(tmp_path / "disk", 0.5) as disk:
        ballast, out = disk / "ballast", disk / "out"
        ballast.write_bytes(bytes(460_000))
        with pytest.raises(StorageError, match=r"No space left.*same command resumes"):
            encode(source, out, sd)
        assert not (out / "dataset.json").exists()
        ballast.unlink()
        encode(source, out, sd)
        assert files(out) == files(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": 30}, "--resolution 30: expected a multiple of 4.*use 28 or 32"),
        ({"buckets": True, "bucket_step": 6}, "--bucket-step 6: expected a multiple of 4"),
        ({"buckets": True, "bucket_step": 64}, "aspect-ratio buckets of resolution 32, step 64"),
        ({"bucket_step": 8}, "--bucket-step needs --buckets"),
        ({"pretrained": "no/such-pipeline-anywhere"}, "no/such-pipeline-anywhere"),
        ({"caption_column": "nothing"}, "no caption column 'nothing'"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, source: Path, sd: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        encode(source, tmp_path / "out", Path(options.pop("pretrained", sd)), **options)
    assert not (tmp_path / "out").exists()


def test_a_wrong_pipeline_is_told_before_the_source_is_opened(tmp_path: Path) -> None:
    """The source may be on the hub, whose silence takes half a minute."""
    with pytest.raises(ConfigError, match="--pretrained no such folder: neither a folder on this machine nor an id"):
        EncodeOptions(source="some/images", out=tmp_path / "out", pretrained="no such folder")
