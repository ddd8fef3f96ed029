"""What an earlier version wrote: losses of short runs, checkpoints, shards and records, which later versions reproduce.

``runs/NAME/config.json`` is the configuration of a run of six steps at commit acc60a6, ``losses.json`` its losses (OMP
with one thread), ``runs/NAME/at-step-3`` the run folder in the middle, and ``shards`` what ``fastdiff encode`` made of
``sources``. Losses of the DiT in fp32 were recorded again when a product of patches took the place of a convolution,
which moved them by at most 6.7e-8 of their value; ``resumed`` are those of a run that continues from the folder, where
they differ. Where torch's operations round as on the machine of the record, losses are equal to the bit; elsewhere they
are close.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastdiff import Run
from fastdiff.cli.main import main
from fastdiff.config.command_line.train_flags import parse
from fastdiff.data.shards.verify import verify
from fastdiff.models.pretrained import tiny_pipeline
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import losses

HERE = Path(__file__).parent
RECORD: dict[str, Any] = json.loads((HERE / "losses.json").read_text())
BY_DAY = ("dit-flat", "dit-zero3-bf16-adamw8bit")
KEPT = sorted(folder.parent.name for folder in HERE.glob("runs/*/at-step-3"))
ENCODED = {"classes": ("--autoencoder", "identity", "--resolution", "8", "--samples-per-shard", "24")}
TEXT = ("--resolution", "32", "--samples-per-shard", "12")
ENCODED |= {"sd15": TEXT, "sdxl": TEXT, "buckets": (*TEXT, "--buckets", "--bucket-step", "8")}


def probe() -> str:
    """Return a digest of the operations of a network, by which machines that round alike are known."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, w = torch.randn(8, 64, 64), torch.randn(64, 64)
        found = [
            x @ w,
            F.gelu(x, approximate="tanh"),
            F.layer_norm(x, (64,)),
            x.softmax(-1),
            x.bfloat16() @ w.bfloat16(),
        ]
        found += [F.conv2d(x[:, None], w[:9, :9].reshape(9, 1, 3, 3)), F.scaled_dot_product_attention(x, x, x)]
    return hashlib.sha256(b"".join(t.float().contiguous().numpy().tobytes() for t in found)).hexdigest()


def nightly_but(names: tuple[str, ...], every: list[str]) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.nightly) for name in every]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines of Stable Diffusion, as those of the record."""
    folder = tmp_path_factory.mktemp("golden")
    tiny_pipeline.build(folder / "sd15", kind="sd15")
    tiny_pipeline.build(folder / "sdxl", kind="sdxl")
    return folder


def flags_of(name: str, place: Path, folder: Path) -> list[str]:
    """Return the flags of a run of the record, in another folder."""
    text = (HERE / "runs" / name / "config.json").read_text()
    text = text.replace("DATA/", f"{HERE}/shards/").replace("PIPELINE/", f"{place}/").replace("FOLDER", str(folder))
    config = folder.with_suffix(".json")
    config.write_text(text)
    stage = RECORD["runs"][name]["deepspeed"]
    moved = ["--allow-change", "pretrained.path"]  # the pipelines
    return ["--config", str(config), *moved, *(["--deepspeed_config", stage] if stage else [])]


def train_flagged(world: World, flags: list[str]) -> str:
    launch, config = parse(flags)
    train(config, launch, world)
    return probe()


def check_losses(name: str, place: Path, folder: Path, kind: str = "losses") -> None:
    """Run to the end and compare the losses of all steps with the record."""
    record = RECORD["runs"][name]
    recorded = record.get(kind, record["losses"])
    [found, *_] = values(forked_ranks(train_flagged, flags_of(name, place, folder), ranks=record["ranks"]))
    expected = [float.fromhex(text) for text in recorded]
    if found == RECORD["probe"]:
        assert [loss.hex() for loss in losses(folder)] == recorded
    else:
        assert losses(folder) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", nightly_but(BY_DAY, list(RECORD["runs"])))
def test_losses_are_those_of_the_record(name: str, place: Path, tmp_path: Path) -> None:
    check_losses(name, place, tmp_path / name)


@pytest.mark.parametrize("name", nightly_but(("dit-flat-adamw8bit-ema-power", "sdxl-lora-zero3"), KEPT))
def test_a_checkpoint_of_the_record_resumes(name: str, place: Path, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(HERE / "runs" / name / "at-step-3", folder)
    assert Run(folder).config.samples == 48  # its run.json opens
    check_losses(name, place, folder, "resumed")


def members(folder: Path) -> dict[str, bytes]:
    """Return the files in the shards of a folder, without the names of the source files."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                content = file.read()
                if member.name.endswith(".json"):
                    content = json.dumps(json.loads(content) | {"name": ""}).encode()
                found[f"{shard.name}/{member.name}"] = content
    return found


@pytest.mark.parametrize("name", nightly_but(("classes", "sdxl"), list(ENCODED)))
def test_shards_of_the_record_are_written_again(name: str, place: Path, tmp_path: Path) -> None:
    """In every byte, but for the paths of the sources; what a network computes where it rounds alike."""
    kept, source = HERE / "shards" / name, HERE / "sources" / ("classes" if name == "classes" else "captions")
    assert verify(kept).ok
    options = ["--pretrained", str(place / ("sdxl" if name == "sdxl" else "sd15"))] if name != "classes" else []
    flags = [*options, *ENCODED[name], "--decode", "pillow", "--workers", "1"]
    assert main(["encode", str(source), str(tmp_path / name), *flags]) == 0
    found, expected = members(tmp_path / name), members(kept)
    assert found.keys() == expected.keys()
    computed: tuple[str, ...] = (
        () if name == "classes" or probe() == RECORD["probe"] else ("latent.npy", "context.npy", "pooled.npy")
    )
    differ = [file for file in expected if found[file] != expected[file] and not file.endswith(computed)]
    assert not differ
    described = [json.loads((folder / "dataset.json").read_text()) for folder in (kept, tmp_path / name)]
    assert described[0]["columns"] == described[1]["columns"]
