"""``bench scripts``: the renderings of published scripts are those scripts, and the record says what was measured."""

import os
from pathlib import Path

import pytest
import torch

from fastdiff_bench.__main__ import main
from fastdiff_bench.commands import scripts
from fastdiff_bench.records import record
from fastdiff_bench.trainers.scripts.iddpm_network import UNet
from tests.support.references.adm_networks import SMALL, built


@pytest.mark.nightly
def test_a_smoke_run_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nightly: bool) -> None:
    """By day of one script and with small batches; ``test_bench_startup`` takes a step of the other."""
    if not nightly:
        monkeypatch.setattr(scripts, "_BATCH", 2)
    cores, chosen = os.sched_getaffinity(0), ["t2i-lora", "iddpm"] if nightly else ["iddpm"]
    assert main(["scripts", *chosen, "--smoke", "--out", str(tmp_path)]) == 0
    read = record.read(tmp_path / "scripts.jsonl")
    assert not read.failures
    assert {(row.case.split(",")[0], row.provider, row.quantity, row.unit) for row in read.measurements} == {
        (script, provider, f"{prefix}{quantity}", unit)
        for script in chosen
        for quantity in ("processor time of a step, 1 core", "time of a step")
        for provider, prefix, unit in (
            ("fastdiff", "", "ms"),
            ("script", "", "ms"),
            ("fastdiff over script", "ratio of the ", "1"),
        )
    }
    assert os.sched_getaffinity(0) == cores
    assert all(row.value > 0 and row.n == 2 for row in read.measurements)


def test_an_unknown_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scripts", "iddpm", "nonesuch", "--out", str(tmp_path)]) == 2
    assert "no such case: nonesuch; expected some of: t2i, t2i-lora, iddpm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_round_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scripts", "--rounds", "1", "--out", str(tmp_path)]) == 2
    assert "--rounds 1: at least 2" in capsys.readouterr().err


def test_the_network_of_the_rendering_is_fastdiffs() -> None:
    """Equal weights give equal outputs: the two differ only in how they compute."""
    ours = built(SMALL["iddpm"])
    config = ours.config
    theirs = UNet(config)
    assert sum(p.numel() for p in theirs.parameters()) == sum(
        p.numel() for name, p in ours.named_parameters() if not name.startswith("label_emb")
    )
    renamed = {_published(name): value for name, value in ours.state_dict().items() if name != "label_emb.weight"}
    theirs.load_state_dict(renamed)
    noisy = torch.randn(3, config.channels, 8, 8, generator=torch.Generator().manual_seed(1))
    time = torch.arange(3) * 40
    torch.testing.assert_close(theirs(noisy, time), ours(noisy, time), rtol=1e-4, atol=1e-5)


def _published(name: str) -> str:
    """Return the rendering's name of a weight: its second norm stands by itself, as do its strided convolutions."""
    return name.replace("out_layers.0.", "norm.").replace("out_layers.3.", "out_layers.2.").replace(".op.", ".")
