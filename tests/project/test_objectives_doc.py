"""``docs/objectives.md``: its translations of other trainers' flags are accepted and compute the same."""

import re
from collections.abc import Iterator
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.cli.main import _parser
from fastdiff.config.command_line.config_file import lay_over
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.schedules import Schedule
from fastdiff.errors import ConfigError
from fastdiff.rng import Stream, normal
from fastdiff_bench.commands.objectives import OBJECTIVES
from fastdiff_bench.records.fingerprint import ROOT

TEXT = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## Coming from another trainer")[2].partition("\n## ")[0]
ROWS = [(row[1], row[2]) for row in re.finditer(r"^\| (.+) \| (.+) \|$", SECTION, re.MULTILINE) if row[1] != "theirs"]
"""(theirs, ours)."""
PRESETS = ("digits", "sd15-finetune", "dit-s-8-256", "sit-xl-2-256")
DEFAULTS = ("--objective.schedule linear", "--objective.variance fixed_small")
"""Rows that change nothing."""
NOISES = re.compile("dream|noise_offset|multires|input_perturbation")


def variants(cell: str, begin: str) -> list[str]:
    """Return the commands in a cell; a word without flags replaces the last word of the command before."""
    found: list[str] = []
    for quoted in re.findall(r"`([^`]+)`", cell):
        if quoted.startswith(begin):
            found.append(quoted)
        elif found and " " not in quoted and not quoted.startswith("-"):
            found.append(f"{found[-1].rpartition(' ')[0]} {quoted}")
    return found


TRAINING = [flags for _, ours in ROWS for flags in variants(ours, "--")]
COMMANDS = [command for _, ours in ROWS for command in variants(ours, "fastdiff ")]
SD3 = [
    pair
    for theirs, ours in ROWS
    if theirs.startswith("SD3: `--precondition_outputs")
    for pair in zip(variants(theirs, "--"), variants(ours, "--"), strict=True)
]


def set_back(flags: str) -> str:
    """Return the values of presets in the text."""
    kinds = {
        kind: " ".join(re.findall(r"`(--[^`]+)`", rest)) for kind, rest in re.findall(r"^- ([^:]+): (.+)$", LIST, re.M)
    }
    assert len(kinds) == 2
    noises, ddpm = kinds.values()
    if "--objective.process" in flags:
        return ""
    return f"{ddpm} {noises}" if NOISES.search(flags) else ddpm


LIST = re.sub(r"\n +", " ", SECTION.partition("###")[0])
"""The head of the section, an entry of its list per line."""


def test_the_tables_are_read() -> None:
    assert len(ROWS) > 45
    assert len(TRAINING) > 55
    assert len(COMMANDS) >= 5
    assert [ours for _, ours in ROWS if not variants(ours, "--") and not variants(ours, "fastdiff ")] == [
        "none",
        "none: the interval of t is that of their defaults",
        "none",
        "none",
        "none",
    ]


@cache
def plain(flags: str) -> RunConfig:
    """The defaults of the trainer with these flags."""
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("output: {folder: runs/here}")
        file.flush()
        return parse(["--config", file.name, *flags.split()])[1]


def with_preset(name: str, *flags: str) -> RunConfig:
    """A preset with flags, the later ones before the others, without the time that a parser takes."""
    parts: dict[str, dict[str, Any]] = {}
    for some in flags:
        for part, field in re.findall(r"--(\w+)\.(\w+)", some):
            parts.setdefault(part, {})[field] = getattr(getattr(plain(some), part), field)
    return lay_over(preset(name), parts, "the flags")


@pytest.mark.parametrize("flags", TRAINING)
def test_each_row_is_accepted(flags: str) -> None:
    assert plain(flags) != plain("") or flags in DEFAULTS


@pytest.mark.parametrize("name", PRESETS)
def test_each_row_is_accepted_with_presets_that_are_set_back(name: str) -> None:
    dit = isinstance(preset(name).model, DiTConfig)
    refused = 0
    for flags in TRAINING:
        if "learn_sigma" in flags and not dit:
            continue
        try:
            with_preset(name, flags)
        except ConfigError:
            refused += 1
            with_preset(name, set_back(flags), flags)
    wanted = name in ("dit-s-8-256", "sit-xl-2-256")
    assert (refused > 0) == wanted, "the list of what is set back names those that need it"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_accepted(command: str) -> None:
    assert _parser().parse_args(command.split()[1:]).run


def objective_of(flags: str) -> Objective:
    config = with_preset("digits", set_back(flags), flags)
    return Objective(config.objective, timesteps=config.timesteps, seed=1, null={}, device="cpu")


def of_sd3(theirs: str) -> Iterator[tuple[str, float]]:
    """Its flags, those that are no numbers as 0."""
    words = theirs.split()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        yield flag.removeprefix("--"), 0.0 if value.isidentifier() else float(value)


@pytest.mark.parametrize(("theirs", "ours"), SD3)
def test_what_sd3_becomes_is_what_its_script_computes(theirs: str, ours: str) -> None:
    """train_dreambooth_sd3.py draws places in the scheduler's list of timesteps, which descends."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

    numbers = dict(of_sd3(theirs))
    scheme = theirs.split()[theirs.split().index("--weighting_scheme") + 1]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    objective = objective_of(ours)

    options = {name: value for name, value in numbers.items() if name in ("logit_mean", "logit_std", "mode_scale")}
    share = compute_density_for_timestep_sampling(scheme, 4000, **options, generator=torch.Generator().manual_seed(8))
    places = (share * scheduler.config.num_train_timesteps).long()
    drawn, importance = objective.timesteps.draw(torch.arange(4000))
    assert importance is None
    assert stats.ks_2samp(drawn.numpy(), scheduler.timesteps[places].numpy() / 1000).pvalue > 0.01

    chosen = torch.tensor([0, 3, 500, 871, 999])
    sigmas = scheduler.sigmas[chosen]
    latents = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    guess = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(3))
    batch = Batch(latents, torch.arange(5), {})
    noise = normal(1, Stream.NOISE, batch.position, (4, 6, 6))
    weight = compute_loss_weighting_for_sd3(scheme, sigmas)
    expected = weight * sd3_error(guess, latents, noise, sigmas[:, None, None, None], numbers["precondition_outputs"])
    found = objective.loss(guess, batch, objective.add_noise(batch, native=sigmas))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def sd3_error(guess: Tensor, latents: Tensor, noise: Tensor, sigmas: Tensor, preconditioned: float) -> Tensor:
    """Squared error of the script: of x0 as the velocity tells it, or of the velocity."""
    noisy = (1 - sigmas) * latents + sigmas * noise
    error = noisy - sigmas * guess - latents if preconditioned else guess - (noise - latents)
    return error.square().mean(dim=(1, 2, 3))


def test_the_last_levels_of_short_schedules_are_those_that_are_told() -> None:
    told = re.search(r"at T = (\d+) the last abar is ([\d.]+) and ([\d.]+)", TEXT)
    assert told is not None
    for schedule, value in (("scaled_linear", told[2]), ("sigmoid", told[3])):
        flags = f"--objective.process ddpm --objective.schedule {schedule} --objective.timesteps {told[1]}"
        _, config = parse(["--preset", "digits", *flags.split()])
        assert f"{float(Schedule.build(config.objective, 'cpu').alpha[-1] ** 2):.2f}" == value


def test_soft_min_snr_of_k_diffusion() -> None:
    (flags,) = (ours for ours in TRAINING if "soft_min_snr" in ours)
    objective, sigma = objective_of(f"{flags} --objective.sigma_data 0.6"), torch.logspace(-3, 2, 30)
    theirs = (sigma * 0.6) ** 2 / (sigma**2 + 0.6**2) ** 2
    torch.testing.assert_close(objective.process.levels(sigma).weights, theirs, rtol=1e-5, atol=0)


def test_edm_meets_as_much_noise_of_the_digits_as_is_told() -> None:
    told = re.search(r"(\d+) % of the draws have more noise than digit; .* would give (\d+) %", TEXT)
    assert told is not None
    flags = OBJECTIVES["EDM"]
    for given, percent in ((flags, told[1]), (flags.partition("--timesteps")[0], told[2])):
        objective = objective_of(given)
        sigma = objective.process.draw((torch.arange(10_000) + 0.5) / 10_000)
        assert f"{100 * float((sigma > objective.config.sigma_data).float().mean()):.0f}" == percent
