"""A run in the checkpoint files of improved-diffusion and of DiT.

A pickle is written from all tensors at once. They lie in a memory-mapped scratch file, so the export takes twice the
space on disk, but not in memory.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastdiff.checkpoint.power_function import constant_name
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.console import log
from fastdiff.errors import StorageError
from fastdiff.export.adamw_state import MOMENTS, Moment, Read, adamw_state, moments
from fastdiff.export.card_text import Place, load_pickle
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.weights import ExportedWeights, exported_weights
from fastdiff.models.family import family_of
from fastdiff.models.pretrained.transport import transport
from fastdiff.sanitize import address


def write_dit(folder: Path, exported: Exported) -> None:
    """Write ``dit.pt`` with the state dict under ``ema``, all that DiT's sampling reads; StorageError if it cannot."""
    with _state_dict(folder / "scratch", exported.weights, exported.config.model, exported.dtype) as state:
        _save(folder / "dit.pt", {"ema": state})


def write_dit_training(folder: Path, exported: Exported) -> None:
    """Write ``NNNNNNN.pt`` with ``model``, ``ema``, ``opt`` and ``args``, as DiT's train.py does, in fp32.

    Args:
        folder: exists and is empty.
        exported: of a DiT run; its weights are stored under ``ema``.

    Raises:
        StorageError: it could not be written.
    """
    saved, config, fp32 = exported.checkpoint, exported.config, torch.float32
    step = saved.manifest["progress"]["steps"]
    raw = _as_trained(saved, config)
    read = _moments_or_say(saved, config.optim, config.lora)
    with (
        _state_dict(folder / "model.scratch", raw, config.model, fp32) as model,
        _state_dict(folder / "ema.scratch", exported.weights, config.model, fp32) as ema,
        _optimizer(folder / "opt.scratch", saved, config, raw, read) as opt,
    ):
        content = {"model": model, "ema": ema, "opt": opt, "args": _arguments(config)}
        if opt is None:
            del content["opt"]
        _save(folder / f"{step:07d}.pt", content)


def write_iddpm(folder: Path, exported: Exported) -> None:
    """Write ``modelNNNNNN.pt``, ``ema_RATE_NNNNNN.pt`` and ``optNNNNNN.pt``, as improved-diffusion does, in fp32.

    Only averages of a constant rate have such a file.

    Args:
        folder: exists and is empty.
        exported: of a run of an ADM UNet.

    Raises:
        StorageError: a file could not be written.
    """
    saved, config = exported.checkpoint, exported.config
    step, raw = saved.manifest["progress"]["steps"], _as_trained(saved, config)
    if saved.ema_stds:
        log.warning(f"the averages of the stds {list(saved.ema_stds)} are left out: file names hold rates only")
    averages = {
        f"ema_{constant_name(rate)}_": exported_weights(saved, config, ema=rate, raw=False, merge=True)
        for rate in saved.ema_rates
    }
    for name, weights in {"model": raw, **averages}.items():
        with _state_dict(folder / "scratch", weights, config.model, torch.float32) as state:
            _save(folder / f"{name}{step:06d}.pt", state)
    with _optimizer(folder / "scratch", saved, config, raw, _moments_or_say(saved, config.optim, config.lora)) as opt:
        if opt is not None:
            _save(folder / f"opt{step:06d}.pt", opt)
    published = family_of(config.model).published(config.model)
    if published is not None and published.note:
        log.warning(published.note)


def _as_trained(saved: Checkpoint, config: RunConfig) -> ExportedWeights:
    return exported_weights(saved, config, ema=None, raw=True, merge=True)


def _moments_or_say(saved: Checkpoint, optim: OptimConfig, lora: LoraConfig) -> Read | None:
    found = moments(saved, optim, lora)
    if isinstance(found, str):
        log.warning(f"the state of the optimizer is left out: {found}")
        return None
    return found


@contextmanager
def _state_dict(
    scratch: Path, weights: ExportedWeights, network: ModelConfig, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in the order of the published model, after its buffers, which are parameters there."""
    first = {name: value.to(dtype) for name, value in family_of(network).buffers(network).items()}
    with _mapped(scratch, weights.shapes, dtype, weights.reader(dtype)) as state:
        yield first | state


@contextmanager
def _optimizer(
    scratch: Path, saved: Checkpoint, config: RunConfig, weights: ExportedWeights, read: Read | None
) -> Iterator[dict[str, Any] | None]:
    """Yield the state dict of ``torch.optim.AdamW`` in the published order, or None without moments."""
    if read is None:
        yield None
        return
    first = len(family_of(config.model).buffers(config.model))  # never trained
    places: dict[str, tuple[Moment, str]] = {
        f"{moment}/{name}": (moment, name) for name in weights.shapes for moment in MOMENTS
    }
    shapes = {key: weights.shapes[name] for key, (_, name) in places.items()}
    with _mapped(scratch, shapes, torch.float32, lambda key: read(*places[key])) as found:
        state: dict[int, dict[str, Tensor]] = {
            number: {moment: found[f"{moment}/{name}"] for moment in MOMENTS}
            for number, name in enumerate(weights.shapes, first)
        }
        yield adamw_state(saved, config.optim, config.steps, state, first + len(weights.shapes))


@contextmanager
def _mapped(
    scratch: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield tensors of a memory-mapped scratch file, in the order of ``shapes``."""
    from safetensors import safe_open

    write_tensors(scratch, shapes, dtype, read)
    with safe_open(scratch, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in shapes}
    yield tensors
    scratch.unlink()


def _save(path: Path, content: dict[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch's error on a full disk
        raise StorageError(
            f"{path}: could not be written ({str(error).splitlines()[0]}); free twice the size of the weights, "
            "or export to another disk"
        ) from None


def _arguments(config: RunConfig) -> argparse.Namespace:
    """Return the arguments of DiT's or SiT's train.py; None for values unknown to the run, base names of folders."""
    model, output, of_sit = cast(DiTConfig, config.model), config.output, transport(config.objective)
    shapes = {
        (depth, hidden, heads, patch): f"{'SiT' if of_sit else 'DiT'}-{letter}/{patch}"
        for letter, (depth, hidden, heads) in DIT_SIZES.items()
        for patch in DIT_PATCHES
    }
    return argparse.Namespace(
        data_path=Path(address(config.data.path)).name,
        results_dir=Path(output.folder).name,
        model=shapes.get((model.depth, model.hidden, model.heads, model.patch)),
        image_size=8 * model.size,
        num_classes=model.classes,
        epochs=None,
        global_batch_size=config.batch.samples,
        global_seed=config.seed,
        vae=None,
        num_workers=config.data.workers,
        log_every=output.log_every,
        ckpt_every=output.checkpoint_every,
        **of_sit,
    )


def _use_dit(config: RunConfig, place: Place, step: int) -> str:
    return load_pickle(config.model, config.objective, place, "dit.pt", '["ema"]')


def _use_dit_training(config: RunConfig, place: Place, step: int) -> str:
    return load_pickle(config.model, config.objective, place, f"{step:07d}.pt", '["ema"]', namespace=True)


def _use_iddpm(config: RunConfig, place: Place, step: int) -> str:
    average = f"ema_{constant_name(config.ema.rates[0])}_" if config.ema.rates else "model"
    return load_pickle(config.model, config.objective, place, f"{average}{step:06d}.pt")


DIT = ExportFormat(write=write_dit, use=_use_dit)
DIT_TRAINING = ExportFormat(write=write_dit_training, use=_use_dit_training, training=True)
IDDPM = ExportFormat(write=write_iddpm, use=_use_iddpm, training=True, every_average=True)
