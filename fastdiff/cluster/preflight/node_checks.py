"""Checks of one node: versions, devices, data and storage."""

import hashlib
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

import fastdiff_kernels
from fastdiff.checkpoint.manifest import committed, read_manifest
from fastdiff.cluster.supervisor.waiting import value_of
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import versions
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.performance import Device
from fastdiff.data.joined.reading import paths_of
from fastdiff.data.shards.cache import open_shards_folder
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.remote import is_remote, resource
from fastdiff.errors import StorageError, require
from fastdiff.models import load
from fastdiff.models.build import build_model
from fastdiff.models.matrices import elements_in, matrices_of
from fastdiff.parallel.devices import require_gpu, usable_gpus
from fastdiff.version import PACKAGE

_CHECKPOINTS = 3
"""Checkpoints that must fit: two kept and one being written."""
_DELAY_S = 10.0
"""Wait for a new file to appear on the other nodes of a shared file system."""


def node_versions(asked: Device = "auto") -> dict[str, str]:
    """Return versions of what affects the results, and a digest of fastdiff; for ``asked`` cpu the GPUs may differ."""
    return versions() | _gpus(asked) | {"fastdiff's source": _source_digest()}


def examine_devices(ranks_per_node: int, asked: Device) -> int:
    """Check that a node has the device of the run, and one GPU per rank; it creates no CUDA context.

    Returns:
        Number of GPUs that the run uses on this node; 0: it runs on the CPU.

    Raises:
        ConfigError: a GPU is present that torch cannot use; there are fewer GPUs than ranks, or none, unless the run
            asks for the CPU.
    """
    gpus = usable_gpus(asked)
    require(
        gpus > 0 or asked == "cpu",
        "no GPU is visible on this node; ask the scheduler for GPUs, or train on the CPUs of several nodes on purpose "
        "with --performance.device cpu",
    )
    if gpus:
        require_gpu(gpus, ranks_per_node - 1, ranks_per_node)
    return min(gpus, ranks_per_node)


def _gpus(asked: Device) -> dict[str, str]:
    if asked == "cpu" or not torch.cuda.is_available():
        return {"the set of GPUs": "none"}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    rows = [line.split(", ") for line in found if ", " in line]
    names, drivers = ("/".join(sorted(set(column))) for column in zip(*rows, strict=True)) if rows else ("?", "?")
    return {
        "the set of GPUs": f"{torch.cuda.device_count()} x {names}",
        "the driver of the GPUs": drivers,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def _source_digest() -> str:
    digest = hashlib.sha256()
    for folder in (PACKAGE, Path(fastdiff_kernels.__path__[0])):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def examine_data(data: DataConfig, validation: ValidationConfig) -> dict[str, str]:
    """Read the first and the last sample of every data set of shards, and verify their checksums.

    Returns:
        Digests of the data sets, by path.

    Raises:
        DataError: a data set is missing or damaged.
        StorageError: a data set cannot be read.
    """
    paths = {validation.data} if validation.every else set()
    if not data.online:
        paths.update(paths_of(data))
    digests = {}
    for path in sorted(paths - {""}):
        folder, fetch = open_shards_folder(path, data.cache)
        with LatentReader(folder, open_shards=1, fetch=fetch) as reader:
            for sample in (0, len(reader) - 1):
                reader.read([sample])
            digests[resource(path) if is_remote(path) else path] = reader.info.digest
    return digests


def examine_space(config: RunConfig) -> None:
    """Check that the disk of the output folder, which need not exist yet, has room for three checkpoints.

    Raises:
        StorageError: it has too little room.
        ConfigError: the pretrained pipeline of the run cannot be read.
    """
    folder = Path(config.output.folder)
    present = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    needed, free = _CHECKPOINTS * checkpoint_bytes(config), shutil.disk_usage(present).free
    kept = len(committed(folder / "checkpoints"))
    if free < needed - kept * needed // _CHECKPOINTS:
        raise StorageError(
            f"no space on {folder}: {_CHECKPOINTS} checkpoints need {needed / 2**30:.2f} GiB, {kept} are there, "
            f"{free / 2**30:.2f} GiB are free; free some, or choose another --output.folder"
        )


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the size of the newest checkpoint, or an estimate; ConfigError: the pretrained pipeline is unreadable."""
    newest = next(iter(committed(Path(config.output.folder) / "checkpoints")), None)
    if newest is not None:
        return sum(int(entry["bytes"]) for entry in read_manifest(newest)["files"].values())
    averages = len(config.ema.rates) + len(config.ema.power_stds)
    resolved = load.resolve(config)
    shapes = _trained_shapes(resolved.model, resolved.lora)
    trained, inside = sum(map(prod, shapes.values())), elements_in(matrices_of(resolved, shapes), shapes)
    return round(trained * (4 + family_of(config.optim).state_bytes(inside / trained) + 4 * averages))


def _trained_shapes(network: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build_model(network)
        if lora.rank:
            from fastdiff.models.lora import add_lora  # needs peft, which is optional

            add_lora(model, replace(lora, quantize="none"), seed=0)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


class SharedFolder:
    """Check that all nodes share one output folder.

    Args:
        folder: the run folder.
        keys: store of the nodes.
        node: number of this node.
        deadline: latest time, on the monotonic clock, for the answer of node 0.
    """

    def __init__(self, folder: Path, keys: Store, node: int, deadline: float) -> None:
        self._folder = folder
        self._keys = keys
        self._node = node
        self._deadline = deadline
        self._probe = folder / f".preflight-{secrets.token_hex(8)}"  # replaced by node 0's name on the other nodes

    def write(self) -> None:
        """Create a file of this node next to that of node 0; StorageError: it cannot, or does not see that folder."""
        if self._node == 0:
            self._make()
        else:
            self._find()
        (self._probe / str(self._node)).touch()

    def _make(self) -> None:
        try:
            self._probe.mkdir(parents=True)
        finally:
            self._keys.set("probe", self._probe.name)

    def _find(self) -> None:
        self._probe = self._folder / value_of(self._keys, "probe", self._deadline).decode()
        if not _appear([self._probe]):
            raise StorageError(
                f"does not see the files of node 0 in {self._folder}; --output.folder must be on storage shared by all "
                "nodes"
            )

    def unseen(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes whose files are not visible here (on node 0); all ``nodes`` have written theirs."""
        files = {node: self._probe / str(node) for node in nodes}
        return [] if _appear(files.values()) else [node for node, file in files.items() if not file.exists()]

    def remove(self) -> None:
        """Remove all probe files, and the run folder if it is empty then (on node 0)."""
        shutil.rmtree(self._probe, ignore_errors=True)
        with suppress(OSError):
            self._folder.rmdir()


def _appear(paths: Iterable[Path]) -> bool:
    """Wait a while for all of ``paths``."""
    deadline = time.monotonic() + _DELAY_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
    return True
