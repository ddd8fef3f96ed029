"""Checks of the data before the first step of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.config.objective import DdpmConfig
from fastdiff.config.presets import preset
from fastdiff.data.loading.training_set import null_condition
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.text_runs import encode


def test_captions_cannot_be_dropped_without_an_embedding_of_none(tmp_path: Path) -> None:
    whole = encode(tmp_path / "whole", build(tmp_path / "pipeline"), count=8)
    with LatentReader(whole) as reader:
        config = preset("sd15-512")
        assert null_condition(config, reader)["context"].shape == (77, 32)
        template = DatasetInfo(
            columns=reader.info.columns,
            normalisation=reader.info.normalisation,
            provenance=reader.info.provenance,
            kind="posterior",
        )
        sample = {name: value[0] for name, value in reader.read([0]).items()}
    with ShardWriter(tmp_path / "without", template, samples_per_shard=8) as writer:
        writer.add("0", sample)
    with LatentReader(tmp_path / "without") as reader:
        with pytest.raises(ConfigError, match=r"no embedding of the empty caption.*condition_dropout 0$"):
            null_condition(config, reader)
        assert null_condition(replace(config, objective=DdpmConfig(condition_dropout=0.0)), reader) == {}
