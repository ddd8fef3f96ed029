"""State of a run's optimizer in the layout of ``torch.optim.AdamW``, read from a checkpoint one moment at a time."""

import math
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from fastdiff.checkpoint.bitsandbytes_state import BlockwiseState
from fastdiff.checkpoint.reader import FRAGMENTS, Checkpoint
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.parallel.fragments import Fragment
from fastdiff.progress import Progress
from fastdiff.training.optimizer.build import lr_after
from fastdiff_kernels.adamw8bit.companding import BLOCK, decode_m_reference, decode_root_v_reference

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, Moment] = ("exp_avg", "exp_avg_sq")
Read = Callable[[Moment, str], Tensor]
"""Returns a moment of a parameter, fp32 in its shape on the CPU."""


def moments(saved: Checkpoint, optim: OptimConfig, lora: LoraConfig) -> Read | str:
    """Return a reader of the moments of every parameter, or the reason why there are none.

    Args:
        saved: a checkpoint, not a snapshot.
        optim: the run's.
        lora: the run's.
    """
    if lora.rank:
        return "it is the state of an adapter, not of the merged weights"
    if not saved.optimizer_steps:
        return "no step was taken"
    read = family_of(optim).adamw_moments
    if read is None:
        return f"--optim.name {optim.name} has no moments of an AdamW"
    return resolve_name(read)(saved)  # type: ignore[no-any-return]


def of_torch(saved: Checkpoint) -> Read:
    """Return a reader of fp32 moments."""
    return lambda moment, name: saved.slice(moment, _whole(saved, name)).view(_shape(saved, name)).float()


def of_8bit(saved: Checkpoint) -> Read:
    """Return a reader of the moments of ``fastdiff_kernels.adamw8bit``, decoded."""
    return lambda moment, name: _decoded(saved, moment, name).view(_shape(saved, name))


def of_bitsandbytes(saved: Checkpoint) -> Read | str:
    """Return a reader of the moments of bitsandbytes, decoded, or the reason why there are none."""
    if not any(True for _ in saved.keys(FRAGMENTS)):
        return "the checkpoint does not record its parameter layout"
    state = BlockwiseState(saved)
    numbers = dict(zip(MOMENTS, "12", strict=True))
    return lambda moment, name: state.moment(numbers[moment], _whole(saved, name)).view(_shape(saved, name))


def adamw_state(
    saved: Checkpoint, optim: OptimConfig, run_steps: int, state: dict[int, dict[str, Tensor]], parameters: int
) -> dict[str, Any]:
    """Return a state dict of ``torch.optim.AdamW``.

    Args:
        saved: the checkpoint, which determines the learning rate: that of the next step or, after the last one, the
            configured one, because programs that go on with the file would keep the final rate, which may be zero.
        optim: the run's.
        run_steps: of the whole run.
        state: the two moments by parameter number; an untrained parameter has none.
        parameters: number of parameters.
    """
    progress = Progress(**saved.manifest["progress"])
    lr = optim.lr if progress.steps >= run_steps else lr_after(optim, run_steps, progress.applied)
    adamw = torch.optim.AdamW([torch.zeros(1) for _ in range(parameters)], **optim.hyper_parameters() | {"lr": lr})
    steps = {number: {"step": torch.tensor(float(saved.optimizer_steps)), **found} for number, found in state.items()}
    return {**adamw.state_dict(), "state": steps}


def _shape(saved: Checkpoint, name: str) -> list[int]:
    found: list[int] = saved.manifest["parameters"][name]
    return found


def _whole(saved: Checkpoint, name: str) -> Fragment:
    return Fragment(name, 0, math.prod(_shape(saved, name)), 0)


def _decoded(saved: Checkpoint, moment: Moment, name: str) -> Tensor:
    """Decode ``[N]`` fp32 from codes in blocks of the parameter; the last block may be shorter."""
    whole = _whole(saved, name)
    codes = saved.slice(f"{moment}_codes", whole)
    scales = saved.slice(f"{moment}_scales", whole.blocks(BLOCK, 0))
    blocks = torch.nn.functional.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    if moment == "exp_avg":
        values = decode_m_reference(blocks, scales[:, None])
    else:
        values = decode_root_v_reference(blocks, scales[:, None]).square_()
    return values.view(-1)[: len(codes)]
