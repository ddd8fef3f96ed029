"""Small runs on the real digits: their configurations and the files that they leave."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoint.manifest import committed, digest_of, verify
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.unchanged import flatten
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.parallel.world import World
from fastdiff.training.loop import train

STEPS = 6


def tiny(data: Path, folder: Path, steps: int = STEPS, **changes: Any) -> RunConfig:
    """A DiT of two blocks on the digits, every step logged; ``changes`` replace fields of the parts by dotted name."""
    config = replace(
        preset("digits"),
        samples=steps * 16,
        model=DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10),
        data=DataConfig(path=str(data), loader="prefetch"),
        batch=BatchConfig(samples=16),
        optim=AdamWConfig(lr=1e-2, schedule="constant"),
        ema=EmaConfig(rates=(0.9, 0.5)),
        output=OutputConfig(folder=str(folder), log_every=1, checkpoint_every=0, sample_every=0),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        config = replace(config, **{part: replace(getattr(config, part), **{field: value}) if field else value})
    return config


def held_out(digits: Path) -> Path:
    """Digits to validate on, beside the encoded ones: the same digits in other shards."""
    folder = digits.with_name("held-out")
    if not folder.exists():
        encode_digits(folder, samples_per_shard=200)
    return folder


def launch(stage: int = 3, **options: Any) -> Launch:
    """ZeRO of this stage, every parameter really partitioned."""
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return Launch(deepspeed={"zero_optimization": zero}, **options)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    found = records(folder)
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    return [record["loss"] for record in found]


def intact(folder: Path) -> list[int]:
    """Return the steps of the intact checkpoints of a run, newest first."""
    return [int(step.name.removeprefix("step-")) for step in committed(folder / "checkpoints") if not verify(step)]


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run."""
    return Checkpoint(committed(folder / "checkpoints")[0])


def renew_digest(manifest: Path) -> None:
    """Renew the digest of a manifest that a test has edited."""
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "sha256": digest_of(content)}, indent=1))


def hexes(numbers: list[float]) -> list[str]:
    """Return each number as hexadecimal digits, which show every bit."""
    return [number.hex() for number in numbers]


def assert_same_checkpoint(first: Path, second: Path) -> None:
    """Check that the newest checkpoints have equal bytes: weights, optimizer state, EMAs, sums of the log."""
    a, b = newest(first).manifest, newest(second).manifest
    assert a["progress"] == b["progress"]
    assert a["files"] == b["files"]


def train_losses(world: World, config: RunConfig, start: Launch) -> list[float]:
    """Train, and return the losses of all steps."""
    train(config, start, world)
    return losses(Path(config.output.folder))


def copy_run(world: World, start: Path, run: Path) -> None:
    """Copy a run once all ranks have left it."""
    world.raise_on_all(None)
    world.on_rank0(lambda: shutil.copytree(start, run))


def flags(config: RunConfig) -> list[str]:
    """The command-line flags that turn the preset digits into ``config``."""
    base, wanted = _flat(preset("digits")), _flat(config)
    found = ["--preset", "digits"]
    for key, value in wanted.items():
        if value != base[key]:
            values = value if isinstance(value, list) else [value]
            found += [f"--{key}", *(str(v) for v in values)]
    return found


def _flat(config: RunConfig) -> dict[str, Any]:
    return flatten(as_json(config))


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all parameters together, relative to the expected ones; without the biases of the keys.

    These shift all logits of a query alike, so their gradient is zero but for rounding, which AdamW scales to steps.
    """
    assert found.keys() == expected.keys()
    a, b = (torch.cat([_moved(name, tensors[name]) for name in expected]).double() for tensors in (found, expected))
    return float((a - b).norm() / b.norm())


def _moved(name: str, values: Tensor) -> Tensor:
    if not name.endswith("qkv.bias"):
        return values.flatten()
    query, _, value = values.chunk(3)
    return torch.cat([query, value])


FRUIT = ("apple", "pear", "plum", "fig", "kiwi", "lime", "date", "nut", "melon", "grape")
"""Names of the classes of ``named`` and ``numbered`` digits."""


def named(digits: Path, folder: Path, names: Sequence[str]) -> Path:
    """A copy of the encoded digits with names of the classes."""
    shutil.copytree(digits, folder)
    replace(DatasetInfo.read(folder), class_names=tuple(names)).write(folder)
    return folder


def numbered(digits: Path, folder: Path, names: Sequence[str], *, told: bool = True) -> Path:
    """Forty digits under the names of ``FRUIT``, numbered in the order of ``names``, without classes that it lacks."""
    with LatentReader(digits) as reader:
        found, info = reader.read(range(40)), reader.info
    info = replace(info, shards=(), samples=0, classes=len(names), class_names=tuple(names) if told else ())
    with ShardWriter(folder, info, samples_per_shard=40) as writer:
        for n, (latent, label) in enumerate(zip(found["latent"], found["label"].tolist(), strict=True)):
            if FRUIT[label] in names:
                writer.add(f"{n:03d}", {"latent": latent}, label=names.index(FRUIT[label]))
    return folder
