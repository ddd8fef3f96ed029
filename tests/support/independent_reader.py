"""Runs, data sets and exports read from their bytes alone, without fastdiff and without safetensors.

Formats: safetensors is 8 bytes of length, a JSON header and the values (https://github.com/huggingface/safetensors); a
manifest lists files with size and sha256; a shard is a tar; a log has one JSON object per line.
"""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

TIMES = {"samples_per_s", "step_ms", "data_wait_ms", "peak_gib", "mfu", "compile_s"}
"""Fields of a log that measure the machine."""


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor of a safetensors file, which must have no gap and no rest."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    values, found, place = content[8 + size :], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        assert start == place, f"{path}: {name} starts at {start}, expected {place}"
        found[name], place = (entry["dtype"], tuple(entry["shape"]), values[start:end]), end
    assert place == len(values), f"{path}: {len(values)} bytes of values, expected {place}"
    return found


def step_folder(folder: Path) -> dict[str, Any]:
    """Return progress and tensors of a checkpoint or a snapshot, whose files must have the digests of its manifest."""
    manifest = json.loads((folder / "MANIFEST.json").read_bytes())
    assert {path.name for path in folder.iterdir()} == {"MANIFEST.json", *manifest["files"]}, folder
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"]), folder / name
    return {"progress": manifest["progress"], **{name: tensors(folder / name) for name in manifest["files"]}}


def log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, each float as its hexadecimal digits, without the fields of the machine."""
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == "", f"{path} ends within a line"
    records = [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]
    return [{k: v.hex() if isinstance(v, float) else v for k, v in record.items()} for record in records]


def shards(folder: Path) -> dict[str, Any]:
    """Return the members of every shard of a data set, which must have the digests of its dataset.json."""
    info = json.loads((folder / "dataset.json").read_bytes())
    found: dict[str, Any] = {}
    for shard in info["shards"]:
        path = folder / shard["name"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"], path
        with tarfile.open(path) as tar:
            found[shard["name"]] = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return found


def run(folder: Path) -> dict[str, Any]:
    """Return logs, checkpoints and snapshots of a run, without the ledger, which has the times of each start."""
    logs = {path.name: log(path) for path in sorted(folder.glob("*.jsonl")) if path.name != "ledger.jsonl"}
    saved = {f"{path.parent.name}/{path.name}": step_folder(path) for path in sorted(folder.glob("*/step-????????"))}
    assert saved, f"{folder} has no checkpoint"
    return {**logs, **saved}


def leftovers(root: Path) -> list[Path]:
    """Return what a killed process has left below a folder."""
    return [path for path in root.rglob("*") if path.name.endswith((".tmp", ".unfinished", ".parts", ".encoding"))]
