"""The documents show commands that are run and numbers that were measured."""

import inspect
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.presets import PRESETS, digits
from fastdiff.errors import ConfigError
from fastdiff.evaluation.digits import real_digits
from fastdiff.evaluation.image_metrics import frechet_distance
from fastdiff_bench.records import record
from tests.support.reports.fault_table import FAULTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
GUIDES = "\n".join(
    path.read_text() for name in ("recipes", "how-to") for path in sorted((ROOT / "docs" / name).glob("*.md"))
)
RESULTS = ROOT / "bench" / "results" / "cpu-2-cores"


def test_the_readme_shows_the_commands_of_the_preset() -> None:
    described = inspect.getdoc(digits.digits) or ""
    assert "\tfastdiff demo" in (ROOT / "Makefile").read_text()
    (demo,) = (
        block for block in README.split("```")[1::2] if block.startswith("\nfastdiff encode digits data/digits\n")
    )
    commands = demo.split("\n")[1:-1]
    assert len(commands) == 3
    for command in commands:
        assert command in described, command


@pytest.mark.parametrize(
    ("preset", "record"),
    [
        ("digits", "2026-11-21_digits"),
        ("digits-adm", "2026-11-22_digits-adm"),
        ("digits-t2i", "2026-11-21_digits-t2i"),
        ("digits-t2i-dit", "2026-11-28_digits-t2i-dit"),
    ],
)
def test_the_numbers_of_the_readme_stand_in_the_record(preset: str, record: str) -> None:
    folder, text = RESULTS / record, preset.startswith("digits-t2i")
    result = json.loads((folder / ("digits.json" if text else "evaluation.json")).read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = re.search(rf"^\| {preset} \|(.*)\|$", BENCHMARKS, re.MULTILINE)
    assert row is not None
    accuracy, distance, step_ms = (cell.strip() for cell in row[1].split("|"))
    assert text or (result["accuracy"] >= 0.97 and result["frechet_distance"] <= 0.5)
    assert accuracy == f"{result['accuracy']:.3f}"
    assert distance == f"{result['frechet_distance']:.2f}"
    assert step_ms == f"{sorted(r['step_ms'] for r in records)[len(records) // 2]:.0f} ms"
    minutes = re.search(rf"in (\d+ min \d+ s)\s+\(`bench/results/cpu-2-cores/{record}`\)", BENCHMARKS)
    assert (minutes is not None) == text
    assert minutes is None or minutes[1] in (folder / "README.md").read_text()


def test_the_numbers_of_super_resolution_stand_in_the_record() -> None:
    result = json.loads((RESULTS / "2026-11-22_digits-sr" / "evaluation.json").read_text())
    number = r"([\d.]+)"
    pattern = rf"reaches {number} dB, bicubic interpolation\s+{number}\. .*? reads {number} .*?{number} .*?{number} of"
    told = re.search(pattern, BENCHMARKS)
    assert told is not None
    assert told.groups() == (
        f"{result['psnr_of_mean']:.1f}",
        f"{result['psnr_of_bicubic']:.1f}",
        *(f"{result[name]:.3f}" for name in ("accuracy", "accuracy_of_bicubic", "accuracy_of_real")),
    )
    assert result["psnr_of_mean"] > result["psnr_of_bicubic"]
    assert result["accuracy"] > result["accuracy_of_bicubic"]


def test_the_reference_of_the_distance_is_what_it_is() -> None:
    folder = RESULTS / "2026-11-21_digits"
    recorded = json.loads((folder / "reference.json").read_text())["frechet_distance_of_500_real_scans"]
    scans, _ = real_digits()
    for seed, distance in enumerate(recorded):
        drawn = scans[np.random.default_rng(seed).permutation(len(scans))[:500]]
        assert frechet_distance(drawn, scans) == pytest.approx(distance, rel=1e-6)
    assert f"{min(recorded):.2f} to {max(recorded):.2f} away" in " ".join(BENCHMARKS.split())


@pytest.mark.parametrize(
    ("case", "script"),
    [("t2i", "train_text_to_image.py"), ("t2i-lora", "train_text_to_image_lora.py"), ("iddpm", "improved-diffusion")],
)
def test_the_ratios_to_published_scripts_stand_in_the_records(case: str, script: str) -> None:
    steps = record.read(RESULTS / "2026-11-23_scripts" / "scripts.jsonl").measurements
    starts = record.read(RESULTS / "2026-11-23_startup" / "startup.jsonl").measurements
    ratios = {row.quantity: row.value for row in steps if row.case.startswith(f"{case},") and row.unit == "1"}
    expected = [ratios[f"ratio of the {what}"] for what in ("processor time of a step, 1 core", "time of a step")]
    for ours, theirs in (("python", "python"), ("launch local", "accelerate launch")):
        expected += [
            row.value
            for row in starts
            if (row.case, row.provider) == (case, f"fastdiff, {ours}") and row.quantity.endswith(f"/ script, {theirs}")
        ]
    told = re.search(rf"^\| {re.escape(script)} \|(.*)\|$", BENCHMARKS, re.MULTILINE)
    assert told is not None
    assert [cell.strip() for cell in told[1].split("|") if cell.strip() != "-"] == [
        f"{value:.2f}" for value in expected
    ]


def test_the_losses_of_8_bit_adam_stand_in_the_record() -> None:
    record = RESULTS / "2026-11-21_adamw8bit" / "losses.json"
    losses = json.loads(record.read_text())["losses"]
    ends = {name: [np.mean(run[-5:]) for _, run in sorted(runs.items())] for name, runs in losses.items()}
    difference = max(abs(ours / theirs - 1) for ours, theirs in zip(ends["adamw8bit"], ends["adamw"], strict=True))
    claim = re.search(r"within ([\d.]+) % of AdamW's loss\s+\((\w+) seeds", BENCHMARKS)
    assert claim is not None
    assert 100 * difference <= float(claim[1])
    assert {"three": 3}[claim[2]] == len(ends["adamw"])


def test_the_errors_of_gradient_sums_stand_in_the_record() -> None:
    rows = json.loads((RESULTS / "2026-11-23_gradient-sums" / "errors.json").read_text())
    errors = {(row["zero"], row["sums"], row["micro_batches"]): row["relative_error"] for row in rows}
    columns = [("bf16", 16), ("bf16", 256), ("fp32", 16), ("fp32", 256)]
    table = (ROOT / "deepspeed_configs" / "README.md").read_text()
    for stages in ((0, 1), (2, 3)):
        cells = re.search(rf"^\| {stages[0]}, {stages[1]} \| (.*) \|$", table, re.MULTILINE)
        assert cells is not None
        for stage in stages:
            expected = [f"{errors[stage, sums, count]:.1e}".replace("e-0", "e-") for sums, count in columns]
            assert cells[1].split(" | ") == expected


def test_the_cost_of_a_checkpoint_stands_in_the_record() -> None:
    claim = re.search(
        r"meanwhile take ([\d.]+) times.*?checkpoint takes ([\d.]+)\s+times.*?(\d+) MiB.*?`(\S+)`",
        BENCHMARKS,
        re.DOTALL,
    )
    assert claim is not None
    found = {row.quantity: row.value for row in record.read(ROOT / claim[4] / "checkpoint.jsonl").measurements}
    assert claim[1] == f"{found['step time beside a save / step time']:.2f}"
    assert claim[2] == f"{found['step time with a save that it waits for / step time']:.2f}"
    assert claim[3] == f"{found['checkpoint']:.0f}"


def test_every_fault_was_seen_to_be_survived() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \|.*\| (\d+ tests? passed(?:, \d+ trials)?) \| `test_.*\|$", page, re.MULTILINE))
    assert sorted(map(int, rows)) == sorted(FAULTS)


_TRIED = "iddpm-cifar10", "dit-xl-2-256", "sit-xl-2-256", "sr-dit-b-1-256"
"""Presets of which one has to take a flag in the text."""


def _problem(preset: str, flags: list[str]) -> str | None:
    """What the trainer says of flags, or None; what they need beside them is not in the text."""
    try:
        parse(["--preset", preset, *flags])
    except ConfigError as error:
        return None if re.search(r" needs | without |there are no ", str(error)) else str(error)
    return None


def test_the_flags_of_the_trainer_in_the_text_are_its_own() -> None:
    """Each value of ``a|b`` too; a flag that needs others, which the text does not repeat, is known none the less."""
    quoted = re.findall(r"`(--\w+\.[^`]+)`", GUIDES)
    assert len(quoted) >= 8
    for text in quoted:
        *flags, last = shlex.split(text)
        if not flags:  # named without a value
            group, name = last.removeprefix("--").replace("-", "_").split(".")
            assert any(hasattr(getattr(PRESETS[preset](), group), name) for preset in _TRIED), text
            continue
        for value in last.split("|"):
            problems = [_problem(preset, [*flags, value]) for preset in _TRIED]
            assert None in problems, problems
    (resumed,) = (text for text in quoted if "--pretrained.training" in text)
    given = parse(["--preset", "iddpm-cifar10", *resumed.split()])[1].pretrained
    assert (given.path, given.weights, given.training) == ("model500000.pt", True, True)


def test_the_best_rates_by_width_stand_in_the_record() -> None:
    page = (ROOT / "docs" / "recipes" / "dit-imagenet.md").read_text()
    place = re.search(r"`(bench/results/\S+_widths)`", page)
    assert place is not None
    found = record.read(ROOT / place[1] / "widths.jsonl").measurements
    rows = {(row.provider, row.quantity): row.value for row in found}
    for width, *cells in re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.M):
        expected = []
        for method in ("muP", "one rate"):
            of_width = (row.value for row in found if row.provider.startswith(f"{method}, width {width}, lr"))
            expected += [
                f"{rows[f'{method}, width {width}', 'best learning rate']:.4f}",
                f"{rows[f'{method}, width {width}', 'best rate over that of the widest']:.2f}",
                f"{min(of_width):.3f}",
            ]
        assert cells == expected
    ratios = [
        value for (name, what), value in rows.items() if name.startswith("muP") and what.startswith("best rate o")
    ]
    assert len(ratios) == 4
    assert all(1 / 1.3 < ratio < 1.3 for ratio in ratios)
