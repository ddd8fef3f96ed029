"""Checks of the data before the first step of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.config.presets import preset
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.loading.training_set import null_condition, with_captions
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.inputs.text_runs import encode


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


def test_prompts_are_captions_of_the_data_unless_they_are_given(tmp_path: Path) -> None:
    encode_synthetic(tmp_path / "plain", shape=(1, 4, 4), samples=10)
    with LatentReader(tmp_path / "plain") as plain:
        template = DatasetInfo(
            columns=plain.info.columns, normalisation=plain.info.normalisation, provenance=plain.info.provenance
        )
        config = preset("sd15-lora")
        assert with_captions(config, plain).validation.prompts == (), "there are no captions"
        with ShardWriter(tmp_path / "captioned", template, samples_per_shard=4) as writer:
            for number in range(10):
                captions = [] if number == 5 else [f"picture {number % 8}", "another text"]
                writer.add(f"{number:03d}", {"latent": plain.read([number])["latent"][0]}, meta={"captions": captions})
    with LatentReader(tmp_path / "captioned") as reader:
        assert reader.captions([0, 5, 9]) == ["picture 0", "picture 1"]
        assert with_captions(config, reader).validation.prompts == ("picture 0", "picture 2", "picture 7")
        many = replace(config, validation=replace(config.validation, captions=10))
        assert with_captions(many, reader).validation.prompts == (
            *(f"picture {number}" for number in (0, 1, 2, 3, 4, 6, 7)),
        )
        given = replace(config, validation=replace(config.validation, prompts=("a hat",)))
        assert with_captions(given, reader) == given
        assert with_captions(preset("digits"), reader) == preset("digits"), "which asks for none"


def test_a_damaged_caption_ends_the_start_or_is_done_without(tmp_path: Path) -> None:
    encode_synthetic(tmp_path / "plain", shape=(1, 4, 4), samples=4)
    with LatentReader(tmp_path / "plain") as plain:
        template = DatasetInfo(
            columns=plain.info.columns, normalisation=plain.info.normalisation, provenance=plain.info.provenance
        )
        with ShardWriter(tmp_path / "data", template, samples_per_shard=4) as writer:
            for number in range(4):
                writer.add(
                    str(number), {"latent": plain.read([number])["latent"][0]}, meta={"captions": ["a unique text"]}
                )
    (shard,) = (tmp_path / "data").glob("*.tar")
    shard.write_bytes(shard.read_bytes().replace(b"a unique text", b"a unisue text"))
    config = preset("sd15-lora")
    with LatentReader(tmp_path / "data") as reader, pytest.raises(DataError, match="crc32"):
        with_captions(config, reader)
    with LatentReader(tmp_path / "data", substitute=True) as reader:
        assert with_captions(config, reader).validation.prompts == ()
