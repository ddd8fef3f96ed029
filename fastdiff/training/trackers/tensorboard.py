"""Events of TensorBoard."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.buffered_writes import AppendedFile
from fastdiff.training.trackers.background import FINISH_S


class TensorBoard:
    """Events in a new file in ``tensorboard/`` of the run folder; events after the step of a resume are hidden.

    The file is written as the log is, without the thread of torch's ``SummaryWriter``, which prints a traceback on a
    full disk and leaves half an event, behind which nothing is read.

    Args:
        run: the run folder.
        step: of the resume.
        buffered: events wait in memory while the disk is full.
    """

    finish_s = FINISH_S

    def __init__(self, run: Path, step: int, *, buffered: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # only rank 0 needs it

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_OPENED):06d}"
        self._file = AppendedFile(run / "tensorboard" / name, buffered=buffered)
        self._append(file_version="brain.Event:2")
        # TensorBoard hides earlier events of this step and of later ones.
        self._append(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def text(self, name: str, value: str, step: int) -> None:
        """Show a text, of which TensorBoard renders Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        shown = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[value.encode()])
        self._append(step=step, summary=Summary(value=[Summary.Value(tag=name, metadata=shown, tensor=tensor)]))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(step=step, summary=Summary(value=shown))

    def images(self, images: Mapping[str, Tensor], step: int, section: str) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption, the N side by side."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for caption, pixels in images.items():
            row = torch.cat(list(pixels), dim=-1).permute(1, 2, 0)  # [N, 3, H, W] -> [H, N W, 3]
            shown = Summary.Image(height=row.shape[0], width=row.shape[1], colorspace=3, encoded_image_string=_png(row))
            self._append(step=step, summary=Summary(value=[Summary.Value(tag=f"{section}/{caption}", image=shown)]))

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


def _png(pixels: Tensor) -> bytes:
    """Return uint8 ``[H, W, 3]`` as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(file, "PNG")
    return file.getvalue()


_OPENED = itertools.count()
"""Numbers of this process's event files, of which two may be of one second; TensorBoard reads them by name."""
