"""fastdiff's loop with a forward pass of a teacher in every step, as trainers take it that store no features."""

from collections.abc import Iterator
from pathlib import Path

import torch

from fastdiff.batch import Batch
from fastdiff.models.encoders.teacher import Teacher
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.training.loop import take_steps
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers import ours

_PIXELS = 256
"""Per side of the pictures; the teacher resizes them."""


def run(timer: StepTimer, workload: Workload, data: Path, source: Path) -> None:
    """Step until ``Enough``.

    Facts: ``parameters``, as of ``trainers.ours``, and ``pictures``, which the teacher has seen so far.

    Args:
        timer: of this process.
        workload: what to train.
        data: folder of shards that fit its model.
        source: folder of the teacher.
    """
    with ours.building(timer, workload, data) as (built, _):
        state = built.state
        state.scales.end_warm_up()
        dtype = DTYPES[state.config.performance.precision]
        teacher = Teacher(str(source), state.config.model.aligned_shape[1], timer.device, dtype)
        timer.ready(parameters=ours.parameters_of(state))
        callbacks = ours.Observed(built.callbacks, ours.AfterStep(timer))
        take_steps(state, _taught(built.batches, teacher, timer), callbacks)


def _taught(batches: Iterator[Batch], teacher: Teacher, timer: StepTimer) -> Iterator[Batch]:
    """Yield the batches; show the teacher as many pictures, of noise, as each has samples."""
    pictures = torch.empty(0)
    seen = 0
    for batch in batches:
        if len(pictures) != len(batch.position):
            pictures = torch.rand(len(batch.position), 3, _PIXELS, _PIXELS, device=timer.device)
        teacher(pictures)
        seen += len(pictures)
        timer.facts["pictures"] = seen
        yield batch


def write(folder: Path, *, tiny: bool) -> None:
    """Write a DINOv2-B with random weights, which cost as much as trained ones; ``tiny``: one of two narrow layers."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} if tiny else {}
    Dinov2Model(Dinov2Config(**narrow, image_size=518, patch_size=14)).save_pretrained(folder)
    BitImageProcessor(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]).save_pretrained(folder)
