"""The loader that needs nothing but torch: pinned memory and copies beside the training stream."""

from __future__ import annotations

from typing import ClassVar

import torch

from fastdiff.data.batches import ShardBatches, Tensors


class PrefetchBatches(ShardBatches):
    """Micro-batches that a thread reads ahead; with CUDA into pinned memory, copied without waiting."""

    name: ClassVar[str] = "prefetch"

    def load(self, index: int) -> Tensors:
        """Read one micro-batch and start its copy to the device."""
        positions = self.positions(index)
        ids = self.order.samples(positions)
        arrays = {"position": positions, **self.reader.empty(len(ids), self.reader.bucket_of(ids))}
        # torch's allocator of pinned memory hands a block out again only after the copies from it have ended.
        host = {
            name: torch.empty_like(torch.from_numpy(array), pin_memory=self.on_cuda) for name, array in arrays.items()
        }
        host["position"].copy_(torch.from_numpy(positions))
        self.read(positions, ids, {name: tensor.numpy() for name, tensor in host.items() if name != "position"})
        return {name: tensor.to(self.device, non_blocking=self.on_cuda) for name, tensor in host.items()}
