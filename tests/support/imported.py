"""Imports all that a run imports, at once or later, so that a process forked from here does not; then freezes it.

Frozen objects are not looked at by the garbage collector, which ZeRO-3 calls at every start: that took half a second.
A test that asks whether something is released unfreezes them.
"""

from __future__ import annotations

import gc
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
gc.collect()
gc.freeze()
