"""The kinds of adapters by name."""

from collections.abc import Mapping
from typing import Any

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.models.adapter_kinds.dora import DORA
from fastdiff.models.adapter_kinds.kind import AdapterKind
from fastdiff.models.adapter_kinds.lokr import LOKR
from fastdiff.models.adapter_kinds.lora import LORA

KINDS: Mapping[str, AdapterKind[Any]] = {"lora": LORA, "dora": DORA, "lokr": LOKR}
"""By ``LoraConfig.kind``."""


def kind_of(config: LoraConfig) -> AdapterKind[Any]:
    """Return the kind of an adapter."""
    return KINDS[config.kind]
