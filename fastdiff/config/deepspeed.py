"""The DeepSpeed JSON of a run: every "auto" filled from RunConfig, every contradiction refused.

RunConfig owns batch size, accumulation, precision, clipping and optimizer; the JSON owns ZeRO, offload and
communication. Each number has one source of truth.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded
from fastdiff.version import PACKAGE

DsConfig = dict[str, Any]

_LARGEST = 1 << 20  # bytes of the file

ZERO1: DsConfig = {
    "zero_optimization": {
        "stage": 1,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 100_000_000,
        "allgather_bucket_size": 100_000_000,
    }
}
"""Default of several ranks, equal to ``deepspeed_configs/zero1.json``. It shards the optimizer state; DeepSpeed
all-reduces the gradients and gathers the parameters, 1.5 times the traffic of plain data parallelism."""
_ZERO0: DsConfig = {"zero_optimization": {"stage": 0}}

_FOREIGN = {
    "optimizer": "--optim.*",
    "scheduler": "--optim.schedule",
    "data_types.param_dtype": "--performance.precision",
    "data_types.buffer_dtype": "--performance.precision",
    "data_types.keep_in_fp32_modules": "--performance.precision",
}


def named() -> dict[str, Path]:
    """Return the files of ``deepspeed_configs`` by name: of the installed package, or else of the repository."""
    installed, repository = (above / "deepspeed_configs" for above in (PACKAGE, PACKAGE.parent))
    folder = installed if installed.is_dir() else repository
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def read(given: str) -> DsConfig:
    """Return the JSON object of a configuration, by its name or as the path of a file; ConfigError if there is none."""
    path = named().get(given, Path(given))
    try:
        raw = json.loads(read_bounded(path, _LARGEST))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.json")], n=1, cutoff=0.4)
        known = ", ".join(named())
        hint = f"did you mean {path.parent / near[0]}?" if near else f"expected the path of one, or a name: {known}"
        raise ConfigError(f"--deepspeed_config {given}: no such file; {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--deepspeed_config {given}: not a readable JSON file ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--deepspeed_config {given}: expected a JSON object, found {type(raw).__name__}")
    return raw


_DECIDED_AT_START = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
"""Fields that stay "auto" with ``--batch.micro auto`` until the device is known."""


def resolve(raw: Mapping[str, Any] | None, config: RunConfig, ranks: int) -> DsConfig:
    """Return ``raw`` (None: the default) with every "auto" filled in for ``ranks`` ranks.

    Raises:
        ConfigError: a literal that disagrees with RunConfig, a section that RunConfig owns, or an unknown "auto".
    """
    raw = _default(config.optim, config.performance, ranks) if raw is None else raw
    for section, flag in _FOREIGN.items():
        parent, _, key = section.rpartition(".")
        place = raw.get(parent) if parent else raw
        if isinstance(place, Mapping) and key in place:
            raise ConfigError(f'the DeepSpeed JSON has "{section}", which {flag} decides; remove it from the file')
    resolved: DsConfig = json.loads(json.dumps(raw))
    for path, (value, flag) in _owned_by_run_config(config, ranks).items():
        *parents, key = path.split(".")
        place = resolved
        for depth, parent in enumerate(parents, start=1):
            place = _section(place, parent, ".".join(parents[:depth]))
        given = place.get(key, "auto")
        if given not in ("auto", value):
            raise ConfigError(
                f'the DeepSpeed JSON has "{path}": {json.dumps(given)}, but {flag} gives {json.dumps(value)}; '
                f'write "auto" in the file or change the flag'
            )
        place[key] = value
    open_ = _DECIDED_AT_START if config.batch.micro == "auto" else set()
    if unknown := [path for path in _autos(resolved) if path not in open_]:
        raise ConfigError(f'the DeepSpeed JSON has "{unknown[0]}": "auto", which fastdiff does not fill; write a value')
    _check_zero(resolved)
    return resolved


def _default(optim: OptimConfig, performance: PerformanceConfig, ranks: int) -> DsConfig:
    """Return ZeRO-1; ZeRO-0 for one rank, which shards nothing, where that changes the losses by rounding at most."""
    keeps_bits = performance.precision == "fp32" and family_of(optim).bits == 32
    return _ZERO0 if ranks == 1 and keeps_bits else ZERO1


def zero_stage(resolved: Mapping[str, Any]) -> int:
    """Return the ZeRO stage, 0 to 3."""
    return int(resolved.get("zero_optimization", {}).get("stage", 0))


def offloads_optimizer(resolved: DsConfig) -> bool:
    """Whether the optimizer steps on the CPU."""
    offload = resolved.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") == "cpu")


def with_sums(resolved: DsConfig, *, wide: bool) -> DsConfig:
    """Return the JSON for DeepSpeed; ``wide``: several gradients are added up in fp32 and not in their own dtype.

    A single gradient needs no second buffer. At stage 0 DeepSpeed refuses other sums, see
    ``training.engines.deepspeed``.
    """
    own = {"data_types"} if zero_stage(resolved) == 0 else set()
    left_out = own if wide else {"data_types", "communication_data_type"}
    return {key: value for key, value in resolved.items() if key not in left_out}


def with_sums_in_parts(resolved: DsConfig) -> DsConfig:
    """Return the JSON for DeepSpeed with stage 2 in place of 1: a rank adds up its part of the gradients alone."""
    zero = resolved["zero_optimization"]
    return {**resolved, "zero_optimization": {**zero, "stage": max(zero["stage"], 2)}}


def _owned_by_run_config(config: RunConfig, ranks: int) -> dict[str, tuple[Any, str]]:
    config.batch.require_divisible(ranks)
    undecided, batch = config.batch.micro == "auto", config.batch
    micro: int | str = "auto" if undecided else batch.per_rank(ranks)
    accumulation: int | str = "auto" if undecided else batch.accumulation(ranks)
    precision = config.performance.precision
    return {
        "train_batch_size": (config.batch.samples, "--batch.samples"),
        "train_micro_batch_size_per_gpu": (micro, f"--batch.micro with {ranks} ranks"),
        "gradient_accumulation_steps": (accumulation, "--batch.samples / (--batch.micro x ranks)"),
        "gradient_clipping": (config.optim.clip, "--optim.clip"),
        "bf16.enabled": (precision == "bf16", "--performance.precision"),
        "fp16.enabled": (precision == "fp16", "--performance.precision"),
        "data_types.grad_accum_dtype": (config.performance.sums, "--performance.grad_accum_dtype"),
        "communication_data_type": (config.performance.sums, "--performance.grad_accum_dtype"),
        # auto_cast would round the time (0 to 1000 in flow) to multiples of 0.5. The model casts other inputs itself.
        "fp16.auto_cast": (False, "fastdiff"),
        # By default DeepSpeed refuses 8-bit optimizers, and accepts only its own Adam with offload.
        "zero_allow_untested_optimizer": (True, "fastdiff"),
        "zero_force_ds_cpu_optimizer": (False, "fastdiff"),
        # DeepSpeed's timer synchronises with the GPU twice per micro-batch.
        "timers.throughput.enabled": (False, "fastdiff"),
    }


def _section(tree: DsConfig, key: str, path: str) -> DsConfig:
    """Return the object ``tree[key]``; create it if it is missing."""
    section = tree.setdefault(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f'the DeepSpeed JSON has "{path}": {json.dumps(section)}; expected an object')
    return section


def _autos(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


def _check_zero(resolved: DsConfig) -> None:
    zero = _section(resolved, "zero_optimization", "zero_optimization")
    stage = zero.setdefault("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ConfigError(f'the DeepSpeed JSON has "zero_optimization.stage": {stage}; expected 0, 1, 2 or 3')
    for name in ("offload_optimizer", "offload_param"):
        offload = _section(zero, name, f"zero_optimization.{name}") if zero.get(name) is not None else {}
        if offload.get("device", "none") == "nvme":
            raise ConfigError(f'"zero_optimization.{name}.device": "nvme" is not supported; use "cpu" or "none"')
    if stage in (1, 2) and zero.get("round_robin_gradients"):
        raise ConfigError(
            'the DeepSpeed JSON has "zero_optimization.round_robin_gradients": true, with which DeepSpeed 0.19 names '
            "wrong places of the weights in its buffers, so that checkpoints would be wrong; remove it"
        )
