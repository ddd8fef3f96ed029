"""The section ``sampling``: its values before the defaults and behind what is given; records without it."""

from dataclasses import replace
from typing import Any

import pytest

from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.command_line.config_file import from_mapping, with_process
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig, SamplingConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError

FLOW = FlowConfig(prediction="flow")
LIGHTNING = SamplingConfig(
    scheduler="euler", steps=249, shift=1 / 0.3, cfg=10.0, cfg_channels=3, cfg_interval=(0.0, 0.9)
)
"""LightningDiT after 64 epochs."""
FULL = SamplerConfig(scheduler="euler", steps=249, shift=1 / 0.3, cfg=10.0, cfg_channels=3, cfg_interval=(0.0, 0.9))
UNGUIDED = replace(FULL, cfg=None, cfg_channels=None, cfg_interval=None)
PREVIEW = SamplerConfig(scheduler="dpmsolver++", steps=20, cfg=1.5, seed=3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, FULL),
        ({"cfg": 4.0, "steps": None}, replace(FULL, cfg=4.0)),
        ({"cfg": 1.0}, replace(UNGUIDED, cfg=1.0)),
        ({"guided": False}, UNGUIDED),
        ({"scheduler": "heun", "steps": 25, "seed": 7}, replace(FULL, scheduler="heun", steps=25, seed=7)),
        ({"usual": PREVIEW}, replace(FULL, seed=3)),
    ],
)
def test_what_is_given_is_before_the_section_and_that_before_the_usual(options: Any, expected: SamplerConfig) -> None:
    assert RunConfig(objective=FLOW, sampling=LIGHTNING).sampler(**options) == expected


def test_a_section_without_values_leaves_the_usual_ones() -> None:
    config = RunConfig(objective=FLOW, timesteps=TimestepConfig(shift=3.0))
    assert config.sampler() == SamplerConfig(shift=3.0)
    assert config.sampler(PREVIEW) == replace(PREVIEW, shift=3.0)
    only_solver = replace(config, sampling=SamplingConfig(scheduler="heun"))
    assert only_solver.sampler(PREVIEW) == replace(PREVIEW, scheduler="heun", steps=50, shift=3.0)
    by_size = replace(config, sampling=SamplingConfig(shift="latent"))
    assert by_size.sampler().shift == (config.model.channels * config.model.size**2 / 4096) ** 0.5


def test_flags_set_the_section() -> None:
    flags = "--preset sit-xl-2-256 --sampling.scheduler euler-maruyama --sampling.steps 250 --sampling.cfg 2.5 "
    flags += "--sampling.cfg-interval 0 0.85 --sampling.shift latent --sampling.labels balanced --sampling.protocol adm"
    _, config = parse(flags.split())
    assert config.sampling == SamplingConfig(
        scheduler="euler-maruyama",
        steps=250,
        cfg=2.5,
        cfg_interval=(0.0, 0.85),
        shift="latent",
        labels="balanced",
        protocol="adm",
    )
    assert parse(["--preset", "sit-xl-2-256", "--sampling.shift", "0.5"])[1].sampling.shift == 0.5


def test_records_have_the_section_and_those_without_it_mean_the_defaults() -> None:
    config = RunConfig(objective=FLOW, sampling=LIGHTNING)
    record = as_json(config)
    assert from_mapping(record, "a checkpoint") == config
    del record["sampling"]
    assert from_mapping(record, "an old checkpoint") == RunConfig(objective=FLOW)
    assert config_changes(record, as_json(config), ()) == {}, "it changes nothing of the training"


def test_another_process_has_other_solvers() -> None:
    config = RunConfig(objective=FLOW, sampling=LIGHTNING)
    assert with_process(config, "ddpm").sampling == replace(LIGHTNING, scheduler=None, shift=None)
    with pytest.raises(ConfigError, match=r"--sampling.scheduler euler is for --objective.process flow, given ddpm"):
        RunConfig(sampling=SamplingConfig(scheduler="euler"))
    with pytest.raises(ConfigError, match=r"--sampling.shift 2.0 is for --objective.process flow, given ddpm"):
        RunConfig(sampling=SamplingConfig(shift=2.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, r"--sampling.steps 0: at least 1"),
        ({"shift": 0.0}, r"--sampling.shift 0.0: above 0, or latent"),
        ({"cfg": float("inf")}, r"--sampling.cfg inf: a finite number"),
        ({"cfg_channels": 0}, r"--sampling.cfg_channels 0: at least 1"),
        ({"cfg_interval": (0.9, 0.1)}, r"--sampling.cfg_interval 0.9 0.1: the lowest and the highest"),
        (
            {"cfg": 1.0, "cfg_channels": 3, "cfg_interval": (0.0, 0.9)},
            r"--sampling.cfg_channels and --sampling.cfg_interval: there is no guidance with --sampling.cfg 1; "
            r"set --sampling.cfg_channels None --sampling.cfg_interval None, or another --sampling.cfg",
        ),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**fields)
