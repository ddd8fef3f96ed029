"""Hostile inputs, and a program that opens them: ``python -m tests.support.injected.hostile harmless|hostile FOLDER``.

It prints one JSON object: how every input ended, and the peak of its resident memory in bytes. Each input that could
run code would make the file ``FOLDER/executed``.
"""

import json
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.support.injected.hostile_files import (
    HUGE,
    Payload,
    bytearray_pickle,
    member,
    named_from_the_stack,
    png,
    repeated,
    sparse,
    tar_of,
    zip_of,
)


def open_weights(path: Path) -> None:
    from fastdiff.config.networks.dit import DiTConfig
    from fastdiff.models.build import load_model
    from fastdiff.models.pretrained.pickles import load_published

    tiny = DiTConfig(depth=1, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10)
    load_model(tiny, {name: value.float() for name, value in load_published(path).items()})


def pickled_weights(folder: Path) -> None:
    torch.save({"ema": {"w": torch.zeros(1)}, "args": Payload(folder.parent / "executed")}, folder / "dit.pt")
    open_weights(folder / "dit.pt")


def old_pickled_weights(folder: Path) -> None:
    (folder / "dit.pt").write_bytes(pickle.dumps({"w": Payload(folder.parent / "executed")}, protocol=2))
    open_weights(folder / "dit.pt")


def repeated_weights(folder: Path) -> None:
    zip_of(folder / "dit.pt", repeated)
    open_weights(folder / "dit.pt")


def weights_of_bytearray(folder: Path) -> None:
    zip_of(folder / "dit.pt", bytearray_pickle)
    open_weights(folder / "dit.pt")


def weights_named_from_the_stack(folder: Path) -> None:
    zip_of(folder / "dit.pt", named_from_the_stack)
    open_weights(folder / "dit.pt")


def compressed_weights(folder: Path) -> None:
    zip_of(folder / "dit.pt", lambda content: content, zipfile.ZIP_DEFLATED)
    open_weights(folder / "dit.pt")


def pretrained_pickle(folder: Path) -> None:
    from fastdiff.models.pretrained.pipeline import Pretrained

    for part in ("vae", "unet"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text("{}")
    with (folder / "vae" / "diffusion_pytorch_model.bin").open("wb") as file:
        pickle.dump(Payload(folder.parent / "executed"), file)
    (folder / "model_index.json").write_text("{}")
    Pretrained(str(folder)).autoencoder()


def pretrained_header(folder: Path) -> None:
    """A header of safetensors that is said to be longer than the file."""
    from fastdiff.models.pretrained.pipeline import Pretrained

    (folder / "unet").mkdir()
    lying = HUGE.to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(lying)
    Pretrained(str(folder)).weights("unet")


def pretrained_values(folder: Path) -> None:
    """A tensor of 745 GiB in a file of a few bytes."""
    from fastdiff.models.pretrained.pipeline import Pretrained

    (folder / "unet").mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}).encode()
    content = len(header).to_bytes(8, "little") + header
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(content)
    Pretrained(str(folder)).weights("unet")


def pretrained_json(folder: Path) -> None:
    from fastdiff.models.pretrained.pipeline import Pretrained

    (folder / "unet").mkdir()
    sparse(folder / "unet" / "config.json", HUGE)
    Pretrained(str(folder)).network_config()


def shards(folder: Path) -> Path:
    """Two shards of latents, of which everything is right."""
    from fastdiff.data.encoding.builtin import encode_synthetic

    encode_synthetic(folder / "latents", (2, 4, 4), 16, classes=7, samples_per_shard=8)
    return folder / "latents"


def read_shards(folder: Path) -> None:
    from fastdiff.data.shards.reader import LatentReader

    with LatentReader(folder) as reader:
        reader.read(np.arange(16))


def shard_with_lying_array(folder: Path) -> None:
    """An array that says it has 10**11 numbers, under a digest that is right."""
    data = shards(folder)
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    header += b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,), }".ljust(117) + b"\n"
    redeclare(data, 128, header)
    read_shards(data)


def shard_with_pickled_array(folder: Path) -> None:
    """An array of objects, which numpy would unpickle, under a digest that is right."""
    data = shards(folder)
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    header += b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    redeclare(data, 192, header + pickle.dumps(Payload(folder.parent / "executed"), protocol=2)[:64].ljust(64, b"."))
    read_shards(data)


def redeclare(folder: Path, size: int, content: bytes) -> None:
    """Replace the first ``size`` bytes of the first array, and let the index and dataset.json fit."""
    import dataclasses
    import hashlib
    import zlib

    from fastdiff.data.shards.format import DatasetInfo
    from fastdiff.data.shards.index import ShardIndex

    tar, path = folder / "train-000000.tar", folder / "train-000000.index.json"
    index = ShardIndex.from_bytes(path.read_bytes())
    place, column = index.place("latent.npy", 0), index.components["latent.npy"]
    with tar.open("r+b") as file:
        file.seek(place.offset)
        file.write(content[:size])
        file.seek(place.offset)
        column.crc32[0] = zlib.crc32(file.read(place.length))
    path.write_bytes(index.to_bytes())
    info = DatasetInfo.read(folder)
    first = dataclasses.replace(info.shards[0], index_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    dataclasses.replace(info, shards=(first, *info.shards[1:])).write(folder)


def large_dataset_json(folder: Path) -> None:
    data = shards(folder)
    sparse(data / "dataset.json", HUGE, b"{")
    read_shards(data)


def nested_dataset_json(folder: Path) -> None:
    data = shards(folder)
    (data / "dataset.json").write_text('{"columns":' + "[" * 200_000)
    read_shards(data)


def dataset_json_with_path(folder: Path) -> None:
    """A shard that would lie outside of the folder."""
    data = shards(folder)
    (data / "dataset.json").write_text((data / "dataset.json").read_text().replace("train-000000", "../../etc/x"))
    read_shards(data)


def large_index(folder: Path) -> None:
    data = shards(folder)
    sparse(data / "train-000000.index.json", HUGE, b"{")
    read_shards(data)


def large_index_of_large_shard(folder: Path) -> None:
    """The index is bounded by the size of its shard, which dataset.json may make as large as it likes."""
    import dataclasses

    from fastdiff.data.shards.format import DatasetInfo

    data = shards(folder)
    info = DatasetInfo.read(data)
    dataclasses.replace(info, shards=(dataclasses.replace(info.shards[0], bytes=HUGE), *info.shards[1:])).write(data)
    sparse(data / "train-000000.tar", HUGE)
    sparse(data / "train-000000.index.json", HUGE, b"{")
    read_shards(data)


def nested_index(folder: Path) -> None:
    data = shards(folder)
    (data / "train-000000.index.json").write_text("[" * 8000)
    read_shards(data)


def pipe_as_index(folder: Path) -> None:
    """Nobody writes to it: who opens it waits for ever."""
    data = shards(folder)
    (data / "train-000000.index.json").unlink()
    os.mkfifo(data / "train-000000.index.json")
    read_shards(data)


def verified_tar(folder: Path) -> None:
    """A tar whose only header says 745 GiB; ``fastdiff verify`` reads it to say where it differs."""
    from fastdiff.data.shards.verify import verify
    from fastdiff.errors import DataError

    data = shards(folder)
    tar_of(data / "train-000000.tar", [(member("000000000.latent.npy", HUGE), b"x")])
    (data / "train-000001.index.json").unlink()
    pax = [(member("x", HUGE, type=tarfile.XHDTYPE), b"x")]
    tar_of(data / "train-000001.tar", pax)
    raise DataError(str(verify(data)))


def images(folder: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Read all of a tar of images, as ``fastdiff encode --bad fail`` does."""
    from fastdiff.data.images.items import BadItem
    from fastdiff.data.images.options import SourceOptions
    from fastdiff.data.images.sources import open_source
    from fastdiff.errors import DataError

    good = png()
    first = [(member("0.png", len(good)), good), (member("0.txt", 5), b"a cat")]
    tar_of(folder / "images.tar", [*first, *members])
    for item in open_source(SourceOptions(source=str(folder / "images.tar"), samples_per_shard=8)).items(0):
        if isinstance(item, BadItem):
            raise DataError(f"{item.name}: {item.reason}")


def tar_with_pickles(folder: Path) -> None:
    """A pickle that webdataset would load; here it is no part of a sample."""
    content = pickle.dumps(Payload(folder.parent / "executed"))
    kinds = ("pyd", "pkl", "pickle", "pth", "pt", "npy")
    images(folder, [(member(f"1.{kind}", len(content)), content) for kind in kinds])


def tar_with_link(folder: Path) -> None:
    images(folder, [(member("1.png", 0, type=tarfile.SYMTYPE, linkname="/etc/passwd"), b""), TEXT])


def tar_with_path(folder: Path) -> None:
    """It would be written outside of the folder if it were extracted."""
    content = png()
    images(folder, [(member("../../escaped.png", len(content)), content)])


def tar_that_lies(folder: Path) -> None:
    images(folder, [(member("1.png", HUGE), b"x"), TEXT])


def tar_of_long_header(folder: Path) -> None:
    images(folder, [(member("x", HUGE, type=tarfile.XHDTYPE), b"x")])


def long_caption(folder: Path) -> None:
    content, caption = png(), b"a" * (10 << 20)
    images(folder, [(member("1.png", len(content)), content), (member("1.txt", len(caption)), caption)])


TEXT = (member("1.txt", 5), b"a dog")


def image_bomb(folder: Path) -> None:
    """50,000 x 50,000 pixels in a few kB."""
    from fastdiff.data.images.decode import BadImage, ImageTransform, open_decoder
    from fastdiff.errors import DataError
    from tests.support.inputs.images import empty_png

    (found,) = open_decoder("pillow", ImageTransform(64, "center", "bicubic"), 1).decode([empty_png(50_000, 50_000)])
    if isinstance(found, BadImage):
        raise DataError(found.reason)


def rows_that_point_elsewhere(folder: Path) -> None:
    """A parquet file whose image is a file of this machine."""
    import pyarrow
    import pyarrow.parquet

    from fastdiff.data.images.hugging_face import HuggingFaceSource
    from fastdiff.data.images.items import BadItem
    from fastdiff.data.images.options import SourceOptions
    from fastdiff.errors import DataError

    (folder / "rows").mkdir()
    image = {"bytes": None, "path": "/etc/passwd"}
    table = pyarrow.table({"image": [image], "text": ["a cat"]})
    pyarrow.parquet.write_table(table, folder / "rows" / "train.parquet")
    item = HuggingFaceSource(SourceOptions(source=str(folder / "rows"), samples_per_shard=1)).item(0)
    if isinstance(item, BadItem):
        raise DataError(item.reason)


def yaml_of_aliases(folder: Path) -> None:
    """Nine lines that stand for 10**9 entries."""
    from fastdiff.config.command_line import config_file

    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (folder / "run.yaml").write_text("\n".join([*lines, "ema: {rates: *i}"]))
    config_file.read(str(folder / "run.yaml"))


def yaml_with_code(folder: Path) -> None:
    from fastdiff.config.command_line import config_file

    command = f"touch {folder.parent / 'executed'}"
    (folder / "run.yaml").write_text(f"seed: !!python/object/apply:os.system ['{command}']\n")
    config_file.read(str(folder / "run.yaml"))


def large_deepspeed_json(folder: Path) -> None:
    from fastdiff.config import deepspeed as deepspeed_config

    deepspeed_config.read(str(sparse(folder / "ds.json", HUGE, b"{")))


HOSTILE: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        pickled_weights, old_pickled_weights, repeated_weights, weights_of_bytearray,
        weights_named_from_the_stack, compressed_weights, pretrained_pickle,
        pretrained_header, pretrained_values, pretrained_json, shard_with_lying_array, shard_with_pickled_array,
        large_dataset_json, nested_dataset_json, dataset_json_with_path, large_index, large_index_of_large_shard,
        nested_index, pipe_as_index,
        verified_tar, tar_with_link, tar_that_lies, tar_of_long_header, long_caption, image_bomb,
        rows_that_point_elsewhere, yaml_of_aliases, yaml_with_code, large_deepspeed_json, tar_with_pickles,
        tar_with_path,
    )
}  # fmt: skip


def harmless(folder: Path) -> None:
    """The same libraries, and a small input of every kind."""
    import datasets  # noqa: F401
    import diffusers.models.autoencoders.autoencoder_kl  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    read_shards(shards(folder))
    images(folder, [])
    zip_of(folder / "dit.pt", lambda content: content)


def main(kind: str, folder: Path) -> None:
    """Open inputs and say how each ended."""
    from fastdiff.errors import FastdiffError
    from fastdiff.models.pipeline_files import readable
    from fastdiff.training.metrics import peak_resident_bytes

    ended: dict[str, str] = {}
    (folder / "harmless").mkdir()
    harmless(folder / "harmless")
    for name, function in HOSTILE.items() if kind == "hostile" else ():
        (folder / name).mkdir()
        try:
            with readable(folder / name):  # as those who open weights do
                function(folder / name)
            ended[name] = "nothing"
        except FastdiffError as error:
            ended[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"ended": ended, "peak": peak_resident_bytes()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
