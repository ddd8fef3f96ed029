"""The noise levels that sampling visits."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastdiff.cli.main import main
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.sampling.respacing import flow_shares, karras_sigmas, spaced, trailing
from fastdiff.training.loop import train
from tests.support.runs import launch, tiny


def test_trailing_levels() -> None:
    assert trailing(1000, 4) == [249, 499, 749, 999]
    assert trailing(1000, 3) == [333, 666, 999]
    assert trailing(1000, 1000) == list(range(1000))
    for steps in range(1, 51):
        times = trailing(50, steps)
        assert len(set(times)) == steps
        assert (min(times) >= 0, times[-1], times) == (True, 49, sorted(times))


@pytest.mark.parametrize("steps", [0, 1001])
def test_impossible_steps_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"{steps} sampling steps; choose 1 to 1000"):
        trailing(1000, steps)


@pytest.mark.parametrize(
    ("timesteps", "text", "levels"),
    [
        (1000, "1", [0]),
        (1000, "2", [0, 999]),
        (1000, "4", [0, 333, 666, 999]),
        # 4.5 is rounded to the even number.
        (10, "3", [0, 4, 9]),
        (10, "10", list(range(10))),
        # Three sections of which the first is the longest: 0-3, 4-6, 7-9.
        (10, "2,2,1", [0, 3, 4, 6, 7]),
        (10, "0,1,3", [4, 7, 8, 9]),
        (10, "2, 2", [0, 4, 5, 9]),
        (300, "10,15,20", None),
        (1000, "ddim4", [0, 250, 500, 750]),
        (10, "ddim4", [0, 3, 6, 9]),
        (1000, "ddim1000", list(range(1000))),
        (10, "ddim2", [0, 5]),
    ],
)
def test_respacing_of_improved_diffusion(timesteps: int, text: str, levels: list[int] | None) -> None:
    chosen = spaced(timesteps, text)
    if levels is None:
        ends = [0, 99, 100, 199, 200, 299]
        counts = [
            sum(low <= level <= high for level in chosen) for low, high in zip(ends[::2], ends[1::2], strict=True)
        ]
        assert counts == [10, 15, 20]
        assert set(ends) <= set(chosen)
    else:
        assert chosen == levels


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 4000), st.data())
def test_sections_are_spread_evenly_from_end_to_end(timesteps: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, min(5, timesteps)))
    size = timesteps // parts
    counts = data.draw(st.lists(st.integers(0, size), min_size=parts, max_size=parts))
    assume(any(counts))
    chosen = spaced(timesteps, ",".join(map(str, counts)))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == sum(counts)
    start = 0
    for i, count in enumerate(counts):
        length = size + (i < timesteps % parts)
        mine = [level - start for level in chosen if start <= level < start + length]
        assert len(mine) == count
        even = [k * (length - 1) / max(1, count - 1) for k in range(count)]
        assert all(abs(level - exact) <= 0.5 + 1e-6 for level, exact in zip(mine, even, strict=True))
        start += length


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 4000), st.integers(1, 4000))
def test_ddim_has_a_whole_stride_or_is_refused(timesteps: int, count: int) -> None:
    possible = [stride for stride in range(1, timesteps) if -(-timesteps // stride) == count]
    if possible:
        assert spaced(timesteps, f"ddim{count}") == list(range(0, timesteps, possible[0]))
    else:
        with pytest.raises(ConfigError, match=f"ddim{count}: no integer stride takes {count} of {timesteps} levels"):
            spaced(timesteps, f"ddim{count}")


@pytest.mark.parametrize("text", ["", "ddim", "ddim5,5", "ddim-5", "-5", "10,,20", "2.5", "fast", "ddim 50", "٣x", "²"])
def test_malformed_numbers_of_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--respacing .*expected a number of steps like 250.*10,15,20.*ddim50"):
        spaced(1000, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1001", r"1001 steps from levels 0 to 999; choose at most 1000"),
        ("10,600", r"600 steps from levels 500 to 999; choose at most 500"),
        ("0", "no steps at all"),
        ("0,0", "no steps at all"),
        ("ddim0", "no integer stride takes 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--respacing {text}: {message}"):
        spaced(1000, text)


def test_times_of_flow() -> None:
    torch.testing.assert_close(flow_shares(4, 1.0), torch.tensor([0.25, 0.5, 0.75, 1.0]).double(), rtol=0, atol=1e-15)
    # Esser et al. 2024: of time 1/2, shift / (1 + shift).
    assert float(flow_shares(2, 3.0)[0]) == pytest.approx(0.75, abs=1e-15)
    assert flow_shares(100, 3.0)[-1] == 1


def test_sigmas_of_edm() -> None:
    sigmas = karras_sigmas(18)
    assert (float(sigmas[0]), float(sigmas[-1])) == pytest.approx((0.002, 80.0), rel=1e-12)
    roots = sigmas ** (1 / 7)
    torch.testing.assert_close(roots.diff(), roots.diff()[:1].expand(17), rtol=1e-10, atol=0)
    assert karras_sigmas(1).tolist() == pytest.approx([80.0])


@pytest.mark.parametrize("levels", [lambda: flow_shares(0, 1.0), lambda: karras_sigmas(0)])
def test_no_steps_are_refused(levels: object) -> None:
    assert callable(levels)
    with pytest.raises(ConfigError, match="0 sampling steps; choose 1 or more"):
        levels()


# ---- fastdiff sample -----------------------------------------------------------------------------------


def test_a_run_with_a_learned_variance_is_drawn_with_respaced_steps(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = {"objective__variance": "learned_range", "objective__timesteps": 50}
    train(tiny(digits, tmp_path / "run", steps=1, model__learn_sigma=True, **learned), launch(), world)

    def drawn(*options: str) -> bytes | str:
        png = tmp_path / "grid.png"
        png.unlink(missing_ok=True)
        code = main(["sample", str(tmp_path / "run"), "--per-class", "1", *options, "--grid", str(png)])
        return png.read_bytes() if code == 0 else capsys.readouterr().err

    every_tenth = drawn("--scheduler", "ddpm", "--respacing", "ddim5")
    assert isinstance(every_tenth, bytes)
    assert every_tenth not in (drawn("--scheduler", "ddpm", "--steps", "5"), drawn("--respacing", "ddim5"))
    assert drawn("--respacing", "50") == drawn("--steps", "50")
    assert "--respacing fast: expected a number of steps" in str(drawn("--respacing", "fast"))
    assert "not allowed with argument" in str(drawn("--respacing", "4", "--steps", "4"))
