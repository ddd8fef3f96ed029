"""The preset of SR-DiT with a small network on tiny pictures: encode, two steps, its sampler, an export."""

from pathlib import Path

import numpy as np
import pytest

from fastdiff.cli.main import main
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.encoding import classed, encode
from tests.support.inputs.teachers import WIDTH, tiny_teacher
from tests.support.runs import records

SIDE, NAME = 32, "sr-dit-b-1-256"
SMALL = (
    "--model.depth", "5", "--model.hidden", "32", "--model.heads", "2", "--model.teacher-width", str(WIDTH),
    "--model.aligned-width", str(WIDTH), "--model.aligned-hidden", "32", "--steps", "2", "--batch.samples", "4",
    "--batch.micro", "2", "--performance.device", "cpu", "--output.log-every", "1", "--output.sample-steps", "2",
)  # fmt: skip


def test_a_small_network_is_trained_and_drawn_from_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    classed(tmp_path / "images", range(8), SIDE)
    encode(
        tmp_path / "images", tmp_path / "encoded", tiny_autoencoder(tmp_path / "vae", "kl32"), resolution=SIDE,
        crop="adm", posterior="once", teacher=str(tiny_teacher(tmp_path / "teacher", "dinov2")), teacher_side=SIDE // 4,
        teacher_width=0, teacher_token=True,
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", NAME, "--data.path", "encoded", *SMALL])
    told = capfd.readouterr().err
    assert ended.value.code == 0, told
    assert f"not the recipe of {NAME}: a contrastive term of the pairs by position instead of" in told
    assert "model.aligned_width 32 instead of 768" in told
    run = Path("runs") / NAME
    found = records(run)
    assert len(found) == 2
    for record in found:
        parts = [record[f"loss_{name}"] for name in ("latents", "teacher", "alignment")]
        assert sum(parts) == pytest.approx(record["loss"], rel=1e-5)
        assert all(parts), "none is left out"
        assert record["grad_norm"] > 0

    assert main(["sample", str(run), "--num", "4", "--npz", "drawn.npz", "--steps", "2"]) == 0
    with np.load("drawn.npz") as drawn:
        assert drawn["arr_0"].shape == (4, SIDE, SIDE, 3)
    assert main(["export", str(run), "exported", "--format", "safetensors"]) == 0
