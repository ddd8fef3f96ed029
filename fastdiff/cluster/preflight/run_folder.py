"""Check of a run folder that already holds a run, before the ranks start and before any word on shapes of the data.

Advice on how the network could fit a data set would be wrong where the folder holds a run on another one.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.checkpoint.unchanged import Metadata, check_resume, check_unchanged, newest_manifest
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json, plugins, require_run_folder
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reading import paths_of, read_info
from fastdiff.data.loading.fit import require_fit
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError, DataError, StorageError, require_utf8
from fastdiff.sanitize import is_address


def check_run_folder(config: RunConfig, launch: Launch) -> None:
    """Refuse a folder of someone else, with a run on other data or of another configuration, or with no UTF-8 path.

    What is only known later is left to the ranks: data at an address or encoded online, and the fields that a pipeline
    decides. ConfigError has the state of that run, and the flag for another folder.
    """
    run = Path(config.output.folder)
    require_utf8("", str(run.absolute()))
    found = None if launch.resume == "never" else newest_manifest(run)
    check_resume(run, launch.resume, resumable=found is not None)
    if found is None:
        require_run_folder(run)
        return
    folder, manifest = found
    info, fits = _read(config.model, config.data, config.pretrained)
    # Data of other shapes are another run's, whatever may change.
    allowed = [name for name in launch.allow_change if fits or name != "dataset"]
    metadata: Metadata = {
        "config": as_json(config),
        "dataset": None if info is None else info.digest,
        "datasets": info.facts if isinstance(info, JoinedInfo) else None,
        "base": None,
        "versions": manifest.get("versions", {}),
    }
    with suppress(ConfigError):  # of code that is not here, also told later
        metadata["versions"] = plugins(config)
    if config.pretrained.path and not config.pretrained.is_file:
        metadata["config"] = _as_saved(metadata["config"], manifest["config"])
        network = {"plugin.network"}
        saved = {name: value for name, value in manifest.get("versions", {}).items() if name in network}
        metadata["versions"] = {
            name: metadata["versions"][name] for name in metadata["versions"].keys() - network
        } | saved
    else:
        prediction: Any = config.objective.predicted
        metadata["config"] = as_json(replace(config, objective=replace(config.objective, prediction=prediction)))
    if config.lora.init:
        metadata["config"]["lora"] = _as_in_file(metadata["config"]["lora"], manifest["config"].get("lora", {}))
    check_unchanged(folder, manifest, metadata, allowed, fits=fits)


def _read(network: ModelConfig, data: DataConfig, pretrained: PretrainedConfig) -> tuple[DatasetInfo | None, bool]:
    """Return the description of the data, None if it is not known here, and whether the network takes them."""
    try:
        if data.online or not data.entries or any(map(is_address, paths_of(data))):
            return None, True
        info = read_info(data)
    except (ConfigError, DataError, StorageError):  # told by the check of the data
        return None, True
    if pretrained.path and not pretrained.is_file:
        return info, True  # the pipeline is read later
    try:
        require_fit(network, data.described, info)
    except ConfigError:
        return info, False
    return info, True


def _as_in_file(lora: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a LoRA with the fields that its file decides as the run has recorded them."""
    decided = [name for name in ("alpha", "targets") if not lora[name]]
    return {**lora, **{name: saved[name] for name in decided if name in saved}}


def _as_saved(config: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run with those that its pipeline decides as the run has recorded them."""
    return {**config, **{name: saved[name] for name in ("model", "objective", "pretrained") if name in saved}}
