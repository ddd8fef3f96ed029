"""Imports all that a run imports, at once or later, so that a process forked from here does not; then freezes it.

Also does what a thread must not be doing for the first time when its process forks: see ``_use_a_store``.

Frozen objects are not looked at by the garbage collector, which ZeRO-3 calls at every start: that took half a second.
The processes share their memory, too, as long as nobody unfreezes them.
"""

import gc
from datetime import timedelta
from importlib import import_module

for name in (
    "bitsandbytes.optim",
    "deepspeed.moe.layer",
    "deepspeed.ops.adam",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.optimization",
    "fastdiff.cli.encode",
    "fastdiff.data.encoding.images",
    "fastdiff.models.adm.family",
    "fastdiff.models.dit.family",
    "fastdiff.models.plain.family",
    "fastdiff.models.unet.family",
    "peft",
    "pydantic.dataclasses",
    "pytest",
    "tests.support.runs",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "transformers.trainer_pt_utils",
):
    import_module(name)
import_module("fastdiff.config.run_record").versions()  # parses the metadata of nine packages


def _use_a_store() -> None:
    """Call what a thread of a supervisor calls of a TCPStore.

    The first call of each makes a counter of torch under a lock. A rank that is forked meanwhile inherits the lock, and
    waits for it in its own first call for ever.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Without libuv, which closes descriptors of its own in every later fork, whatever they have become there.
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    store = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    store.set("a", "")
    store.add("b", 1)
    store.compare_set("a", "", "c")
    store.check(["a"])
    store.wait(["a"], timedelta(seconds=60))
    store.get("a")


_use_a_store()
gc.collect()
gc.freeze()
