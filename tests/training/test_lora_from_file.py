"""A run that starts from a published adapter, on two ranks and ZeRO-3, its record, its resume and its files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.cli.main import main
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adapters import WEIGHTS_FILE
from fastdiff.export.run import Choice, export
from fastdiff.files import file_digest
from fastdiff.models.adapter_files.forms import KOHYA_DIFFUSERS, tensors_of
from fastdiff.models.adapter_files.native_names import named_network
from fastdiff.models.adapter_files.published import read_adapter
from fastdiff.models.adapter_kinds.kinds import KINDS
from fastdiff.models.adapter_kinds.kronecker_layer import KroneckerShape
from fastdiff.models.pretrained.tiny_pipeline import UNETS, build
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.inputs import kronecker
from tests.support.inputs.text_runs import encode, text_run
from tests.support.inputs.tiny_transformers import adapter
from tests.support.runs import launch, newest

NAMES = named_network(UNETS["sd15"])


ENDS = {"lora": ("lora_up.weight", "lora_down.weight"), "lokr": ("lokr_w1", "lokr_w2")}
"""Of the keys of a layer."""


def published(path: Path, alpha: float = 1.5, kind: str = "lora") -> dict[str, Any]:
    """Write an adapter of some layers, of rank 2, and of two layers of a text encoder, of rank 3."""
    layers = [layer for layer in NAMES.layers if layer.endswith(("to_q", "ff.net.2"))]
    products = kronecker.adapter(NAMES, KroneckerShape(rank=2, factor=4), alpha, layers)
    changes: dict[str, Any] = products if kind == "lokr" else dict(adapter(NAMES, 2, alpha, layers))
    text = {f"lora_te_text_model_encoder_layers_0_mlp_fc{i}": torch.ones(3, 3) for i in (1, 2)}
    of_text = {f"{layer}.{end}": value.clone() for layer, value in text.items() for end in ENDS[kind]}
    save_file(tensors_of(KOHYA_DIFFUSERS, changes, "unet") | of_text, path)
    return changes


def trained(world: World, config: RunConfig, stage: int) -> None:
    train(config, launch(stage), world)


@pytest.mark.parametrize("kind", ENDS)
def test_a_run_starts_from_the_file_and_goes_on_with_no_other(
    kind: Any, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shoe.safetensors"
    changes = published(file, kind=kind)
    data = encode(tmp_path / "data", build(tmp_path / "pipeline"))
    run = text_run(data, tmp_path / "pipeline", tmp_path / "run", optim__lr=1e-30, output__checkpoint_every=1)
    still = replace(run, lora=LoraConfig(kind=kind, init=str(file), skip_text_encoders=True))
    values(forked_ranks(trained, still, 3))
    whole = replace(still, output=replace(still.output, folder=str(tmp_path / "whole")))
    train(whole, launch(1), world)
    assert f"{file}: its 2 layers of text encoders are left out" in capsys.readouterr().err

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["lora"] == {
        "kind": kind, "rank": 2, "alpha": 1.5, "targets": ["net.2", "to_q"], "init": str(file), "quantize": "none",
        "skip_text_encoders": True, "full_matrix": False, "decompose_both": False,
        "factor": 4 if kind == "lokr" else None,
    }  # fmt: skip
    assert record["adapter"] == file_digest(file) == newest(tmp_path / "run").manifest["adapter"]

    for folder in ("run", "whole"):  # frozen weights in parts, and in one piece
        export(tmp_path / folder, tmp_path / f"{folder}-lora", Choice(format="lora", raw=True))
        found = read_adapter(tmp_path / f"{folder}-lora" / WEIGHTS_FILE, NAMES, KINDS[kind])
        assert found.keys() == changes.keys()
        for layer, change in changes.items():
            theirs = change.change()
            torch.testing.assert_close(found[layer].change(), theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))
    card = (tmp_path / "run-lora" / "README.md").read_text()
    assert f"| Started from | `shoe.safetensors` (sha256 `{file_digest(file)}`), without its text encoders |" in card

    longer = replace(still, samples=24)
    published(file, 1.25, kind)
    with pytest.raises(ConfigError, match=r"--adapter: \w+ -> \w+ \(digest of the file that the LoRA starts from\)"):
        train(longer, launch(1, allow_change=("samples", "lora.alpha")), world)
    published(file, kind=kind)
    other = file.rename(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"--lora.init: .*shoe.safetensors.* -> .*other.safetensors"):
        train(replace(longer, lora=replace(still.lora, init=str(other))), launch(1, allow_change=("samples",)), world)
    other.rename(file)
    train(longer, launch(1, allow_change=("samples",)), world)
    assert newest(tmp_path / "run").manifest["progress"]["steps"] == 3

    file.unlink()  # drawing and exporting need it no more
    main(["sample", str(tmp_path / "run"), "--prompt", "a hat", "--steps", "1", "--grid", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").exists()


def test_dry_run_and_plan_know_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path / "shoe.safetensors")
    pipeline = build(tmp_path / "pipeline")
    flags = ["--preset", "sd15-lora", "--pretrained.path", str(pipeline), "--data.path", str(tmp_path)]
    flags += ["--lora.rank", "0", "--lora.init", str(tmp_path / "shoe.safetensors"), "--lora.skip-text-encoders"]
    main(["train", *flags, "--dry-run"])
    assert '"rank": 2' in capsys.readouterr().out
    main(["plan", *flags, "--gpus", "1xh100"])
    assert "LoRA of rank 2" in capsys.readouterr().out
