"""The trainer, whose last rank runs out of memory in its second step, in the part that OUT_OF_MEMORY_IN names.

The error is that of torch's CUDA allocator, raised by a hook.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import fastdiff.training.build
from fastdiff.train import main
from fastdiff.training.engines.deepspeed import DeepSpeedEngine


class Failing(DeepSpeedEngine):
    """An engine whose forward pass, backward pass or optimizer step runs out of memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if int(os.environ["RANK"]) + 1 < int(os.environ["WORLD_SIZE"]):
            return
        module, phase = self._engine.module, os.environ["OUT_OF_MEMORY_IN"]
        if phase == "forward":
            module.register_forward_pre_hook(lambda *_: self._fail())
        elif phase == "backward":
            module.register_forward_hook(lambda *call: call[-1].register_hook(lambda _: self._fail()) and None)
        else:
            self.optimizer.register_step_pre_hook(lambda *_: self._fail())
        self._calls = 0

    def _fail(self) -> None:
        self._calls += 1
        if self._calls >= 2:  # also the second try of a step
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


if __name__ == "__main__":
    fastdiff.training.engines.deepspeed.DeepSpeedEngine = Failing  # type: ignore[misc]
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
