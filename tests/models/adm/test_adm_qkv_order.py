"""Both orders of the channels of ``qkv`` in the attention of an ADM UNet; ``test_adm.py`` has each against fp64."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastdiff.config.command_line.config_file import from_mapping, lay_over, read
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adm.blocks import AttentionBlock
from fastdiff.models.adm.network import AdmUNet
from fastdiff.models.build import load_model
from tests.support.references.adm_networks import SMALL, built, inputs
from tests.support.references.unet_reference import difference


def as_qkv_major(model: AdmUNet) -> dict[str, Tensor]:
    """The weights of a head-major network, those of each ``qkv`` in the other order."""
    heads = {name: module.heads for name, module in model.named_modules() if isinstance(module, AttentionBlock)}
    found = {}
    for name, value in model.state_dict().items():
        block, qkv, _ = name.rpartition(".qkv.")
        rows = torch.arange(len(value))
        found[name] = value[rows.view(heads[block], 3, -1).transpose(0, 1).flatten()] if qkv else value
    return found


def test_both_orders_of_qkv_are_one_network_with_its_weights_in_another_order() -> None:
    config = SMALL["iddpm"]
    model, arguments = built(config), inputs(config)
    other = load_model(replace(config, qkv_order="qkv_major"), as_qkv_major(model))
    assert torch.equal(other(**arguments), model(**arguments))
    same_weights = load_model(replace(config, qkv_order="qkv_major"), model.state_dict())
    assert difference(same_weights(**arguments), model(**arguments)) > 1e-3, "else the order would not matter"


def test_a_configuration_from_before_there_was_an_order_is_head_major(tmp_path: Path) -> None:
    fields = asdict(SMALL["iddpm"])
    assert fields.pop("qkv_order") == "head_major"
    (tmp_path / "old.json").write_text(json.dumps({"model": fields}))
    assert lay_over(RunConfig(), read(str(tmp_path / "old.json")).fields, "file").model == SMALL["iddpm"]
    assert from_mapping({"model": fields}, "a manifest").model == SMALL["iddpm"]
    given = parse(["--preset", "iddpm-cifar10", "--model.qkv_order", "qkv_major"])[1].model
    assert isinstance(given, AdmConfig)
    assert given.qkv_order == "qkv_major"
    with pytest.raises(ConfigError, match="expected one of 'head_major', 'qkv_major', given legacy"):
        parse(["--preset", "iddpm-cifar10", "--model.qkv_order", "legacy"])
