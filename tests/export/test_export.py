"""Exports: other programs read them, and a failed export leaves nothing behind."""

import hashlib
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastdiff.export.run
from fastdiff.checkpoint.manifest import FORMAT, MANIFEST, VERSION
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.cli.main import main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.export.card_text import Place
from fastdiff.export.model_card import use_of
from fastdiff.export.run import Choice, export
from fastdiff.export.weights import exported_weights
from fastdiff.models.build import build_model
from fastdiff.models.load import build_network
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, UNETS, Kind, build
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run, config_of
from fastdiff.training.loop import train
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.inputs.text_runs import encode, text_run
from tests.support.nights import by_day
from tests.support.processes import run_ranks
from tests.support.references.dit_reference import reference_position
from tests.support.runs import launch, newest, tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines and data of every kind."""
    folder = tmp_path_factory.mktemp("made")
    for kind in UNETS:
        encode(folder / f"{kind}-data", build(folder / kind, kind=kind))
    return folder


@pytest.fixture(scope="module")
def once(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, alone in its folder, which tests only read."""
    folder = tmp_path_factory.mktemp("once") / "run"
    train(tiny(digits, folder, steps=1), launch(1), world)
    return folder


def trained(world: World, made: Path, kind: Kind, run_folder: Path, **changes: Any) -> Path:
    train(text_run(made / f"{kind}-data", made / kind, run_folder, kind=kind, **changes), launch(1), world)
    return run_folder


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("kind", by_day(["sdxl"], "sd2"))
def test_a_pipeline_of_every_kind_draws_in_diffusers(world: World, made: Path, tmp_path: Path, kind: Kind) -> None:
    from diffusers import DiffusionPipeline

    folder, out = trained(world, made, kind, tmp_path / "run"), tmp_path / "out"
    assert main(["export", str(folder), str(out), "--format", "diffusers", "--ema", "0.5"]) == 0
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert type(pipeline).__name__ == ("StableDiffusionXLPipeline" if kind == "sdxl" else "StableDiffusionPipeline")
    assert pipeline.scheduler.config.prediction_type == ("v_prediction" if kind == "sd2" else "epsilon")
    expected = newest(folder).weights(0.5)
    assert all(torch.equal(value, expected[name]) for name, value in pipeline.unet.state_dict().items())
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("two birds", num_inference_steps=2).images[0].size == (IMAGE_SIZE, IMAGE_SIZE)
    for part in ("vae", "text_encoder"):
        assert Pretrained(str(out)).digest(part) == Pretrained(str(made / kind)).digest(part)


def test_the_code_of_the_card_works_and_the_facts_are_those_of_the_run(
    world: World, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(world, made, "sd15", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name, options in {"pipe": ["diffusers"], "plain": ["safetensors", "--raw"]}.items():
        assert main(["export", "run", name, "--format", *options]) == 0
        card = Path(name, "README.md").read_text()
        [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        exec(compile(code, "card", "exec"), {})
        for fact in ("| Steps | 2 |", "| Samples seen | 16 |", "| Base model | `sd15` |"):
            assert fact in card
        assert newest(folder).manifest["dataset"] in card
        assert str(made) not in card, "it may be published"
        assert "base_model:" not in card, "a local folder is no model of the hub"
    assert Path("image.png").exists()
    assert "EMA of rate 0.9, in fp32" in Path("pipe", "README.md").read_text()
    assert "as trained, in fp32" in card
    plain = load_file("plain/model.safetensors")
    assert all(torch.equal(plain[key], value) for key, value in newest(folder).weights().items())


def test_a_run_with_a_relative_pipeline_is_exported_and_drawn_from_any_folder(
    world: World, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    train(text_run(made / "sd15-data", Path("sd15"), tmp_path / "run", steps=1), launch(0), world)
    train(text_run(made / "sd15-data", Path("sd15"), tmp_path / "run", steps=2), launch(0), world)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "out", "--format", "diffusers"]) == 0
    assert (tmp_path / "out" / "vae").is_dir()
    assert main(["sample", "run", "--prompt", "a shoe", "--per-prompt", "1", "--steps", "1", "--grid", "a.png"]) == 0


def test_an_adapter_is_exported_alone_and_merged(world: World, made: Path, tmp_path: Path) -> None:
    """W + alpha / rank * B A is the network with the adapter beside it, and diffusers agrees about the file."""
    from diffusers import StableDiffusionPipeline

    lora = LoraConfig(rank=2, alpha=3.0)
    folder = trained(world, made, "sd15", tmp_path / "run", lora=lora, optim__lr=0.1)
    export(folder, tmp_path / "merged", Choice(format="diffusers"))
    export(folder, tmp_path / "adapter", Choice(format="lora"))
    saved = newest(folder)
    ours = build_network(config_of(saved), saved.weights(0.9)).eval()
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "merged").unet
    base = StableDiffusionPipeline.from_pretrained(made / "sd15")
    before = base.unet.conv_in.weight.clone()
    generator = torch.Generator().manual_seed(0)
    noisy, context = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 32, generator=generator)
    time = torch.tensor([3, 900])
    with torch.no_grad():
        plain = base.unet(noisy, time, context).sample
        expected = ours(noisy, time, context=context)
        base.load_lora_weights(tmp_path / "adapter")
        assert (expected - plain).abs().max() > 1e-3, "else the adapter does nothing"
        torch.testing.assert_close(merged(noisy, time, context).sample, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(base.unet(noisy, time, context).sample, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(merged.conv_in.weight, before), "what has no adapter stays as it is"


def test_an_adapter_belongs_to_its_base(world: World, made: Path, tmp_path: Path) -> None:
    """Neither goes on, nor is merged, on other weights; alone it can be exported."""
    base = Path(shutil.copytree(made / "sd15", tmp_path / "base"))
    config = text_run(made / "sd15-data", base, tmp_path / "run", steps=1, lora=LoraConfig(rank=2))
    train(config, launch(1), world)
    assert newest(tmp_path / "run").manifest["base"] == Pretrained(str(base)).digest("unet")
    path = base / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_in.bias"] += 1
    save_file(weights, path)
    with pytest.raises(ConfigError, match=r"has changed: its weights have the digest \w{12}, the adapter"):
        export(tmp_path / "run", tmp_path / "out", Choice(format="diffusers"))
    with pytest.raises(ConfigError, match="has changed: its weights"):
        Run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", Choice(format="lora"))
    longer = replace(config, samples=16)
    with pytest.raises(ConfigError, match=r"--base: \w{12} -> \w{12} .*\n.*--allow-change base"):
        train(longer, launch(1), world)
    train(longer, launch(1, allow_change=("base",)), world)
    assert newest(tmp_path / "run").manifest["base"] == Pretrained(str(base)).digest("unet")


def test_the_card_of_an_adapter_names_the_version_of_its_base(tmp_path: Path) -> None:
    start = PretrainedConfig(path="me/pipeline", revision="1" * 40, variant="fp16", weights=True)
    config = text_run(tmp_path, tmp_path, tmp_path, pretrained=start, lora=LoraConfig(rank=2))
    version = f'revision="{"1" * 40}", variant="fp16"'
    assert f'from_pretrained("me/pipeline", {version})' in use_of(config, "lora", Place(tmp_path))
    local = replace(config, pretrained=replace(start, path="/home/me/base", revision=None))
    for form in ("lora", "lora-diffusers", "single-file"):
        assert "`base` is a folder of the machine that trained the model" in use_of(local, form, Place(tmp_path))
        assert "of the machine" not in use_of(config, form, Place(tmp_path))
    assert 'from_pretrained("base", variant="fp16")' in use_of(local, "lora", Place(tmp_path))


def test_a_dit_is_exported_under_its_published_names(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=1), launch(3), world)
    export(tmp_path / "run", tmp_path / "out", Choice(format="dit"))
    state = torch.load(tmp_path / "out" / "dit.pt", weights_only=True)["ema"]
    config = tiny(digits, tmp_path / "run").model
    assert isinstance(config, DiTConfig)
    build_model(config).load_state_dict(state, strict=True)
    position = reference_position(config.size // config.patch, config.hidden)
    torch.testing.assert_close(state["pos_embed"][0], position.float())
    expected = newest(tmp_path / "run").weights(0.9)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert state.keys() - expected.keys() == {"pos_embed"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "dit.pt"]
    card = (tmp_path / "out" / "README.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0], {})


def test_an_adm_run_says_where_the_class_of_its_files_differs(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal and in the card, whose code loads the average."""
    model = AdmConfig(
        channels=1, size=8, width=8, channel_mult=(1, 2), res_blocks=1, attention_resolutions=(4,), heads=2,
        classes=10, norm_num_groups=4,
    )  # fmt: skip
    train(tiny(digits, tmp_path / "run", steps=1, model=model), launch(1), world)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["export", "run", "out", "--format", "iddpm"]) == 0
    told, card = capsys.readouterr().err, Path("out", "README.md").read_text()
    assert "of this network has 4 groups, in the class of improved-diffusion 32" in told
    assert told.partition("WARNING ")[2].splitlines()[0] in card
    assert "channel_mult=(1, 2)" in card
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0], scope)
    expected = newest(tmp_path / "run").weights(0.9)
    assert all(torch.equal(value, expected[name]) for name, value in scope["state_dict"].items())


def test_two_exports_have_the_same_bytes(world: World, digits: Path, made: Path, tmp_path: Path) -> None:
    unet = trained(world, made, "sd15", tmp_path / "unet", lora=LoraConfig(rank=2))
    train(tiny(digits, tmp_path / "dit", steps=1), launch(1), world)
    for folder, name in (
        (unet, "diffusers"),
        (unet, "lora"),
        (tmp_path / "dit", "dit"),
        (tmp_path / "dit", "dit-training"),
        (tmp_path / "dit", "diffusers"),
        (tmp_path / "dit", "safetensors"),
    ):
        found = []
        for number in range(2):
            out = tmp_path / f"{number}-{folder.name}" / name
            export(folder, out, Choice(format=name), repo_id="me/model")  # type: ignore[arg-type]
            found.append(digests(out))
        assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_dtype_and_the_step_are_those_asked_for(world: World, digits: Path, tmp_path: Path, dtype: Any) -> None:
    train(tiny(digits, tmp_path / "run", steps=2, output__checkpoint_every=1), launch(1), world)
    export(tmp_path / "run", tmp_path / "out", Choice(format="safetensors", dtype=dtype, step=1, raw=True))
    found = load_file(tmp_path / "out" / "model.safetensors")
    first = newest(tmp_path / "run").folder.with_name("step-00000001")
    expected = type(newest(tmp_path / "run"))(first).weights()
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert all(torch.equal(found[name], value.to(wanted)) for name, value in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out", "--format", "iddpm"], "is for an ADM UNet, the run has a DiT"),
        (["out", "--format", "lora"], "has no adapter"),
        (["out", "--format", "safetensors", "--ema", "0.123"], "no EMA of rate 0.123"),
        (["out", "--format", "safetensors", "--step", "7"], "no checkpoint of step 7; there are 1"),
        (["run", "--format", "safetensors"], "run exists"),
        (["out", "--format", "safetensors", "--private"], "--private needs --push-to-hub"),
        (["out", "--format", "safetensors", "--push-to-hub", "no spaces/here"], "--push-to-hub no spaces/here"),
    ],
)
def test_impossible_exports_are_refused(
    once: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options: list[str], message: str
) -> None:
    monkeypatch.chdir(once.parent)
    assert main(["export", "run", *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in once.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("/proc/x", "/proc/x.unfinished: No such file or directory; /proc/x is not written: check the path"),
        ("/dev/null/x", "Not a directory; /dev/null/x is not written: a file stands where its path needs a folder"),
    ],
)
def test_an_export_where_no_folder_can_be_made_ends(once: Path, capsys: Any, out: str, message: str) -> None:
    assert main(["export", str(once), out, "--format", "safetensors"]) == 74
    assert message in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(once: Path, tmp_path: Path) -> None:
    weights = sum(value.numel() * 4 / 2**20 for value in newest(once).weights().values())
    for name, room in (("safetensors", 0.5), ("dit", 0.5), ("dit", 1.5), ("dit-training", 5.0)):
        with tiny_disk(tmp_path / f"{name}-{room}", room * weights) as disk:
            with pytest.raises(StorageError, match=r"free some space|free twice the size"):
                export(once, disk / "out", Choice(format=name))  # type: ignore[arg-type]
            assert list(disk.iterdir()) == []


def test_weights_beyond_fp16_are_refused(world: World, digits: Path, tmp_path: Path) -> None:
    """Weights of a real run, one of which is then beyond its range."""
    from fastdiff.export.weights import exported_weights

    train(tiny(digits, tmp_path / "run", steps=1, optim__lr=1e6), launch(1), world)
    saved = newest(tmp_path / "run")
    weights = exported_weights(saved, config_of(saved), ema=None, raw=True, merge=True)
    largest = max(weights.shapes, key=lambda name: weights.read(name).abs().max().item())
    assert weights.read(largest).abs().max() > 65504
    with pytest.raises(ConfigError, match="use bf16"):
        weights.reader(torch.float16)(largest)
    with pytest.raises(ConfigError, match="use bf16"):
        export(tmp_path / "run", tmp_path / "out", Choice(format="safetensors", dtype="fp16", raw=True))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_exported_with_one_tensor_in_memory(tmp_path: Path) -> None:
    """200 MB of 20 tensors, each cut over two ranks; counted is the memory of the process that is no mapped file."""
    numel, half = 2_500_000, 1_250_000
    names = [f"layer{number}" for number in range(20)]
    for rank in range(2):
        kinds = {f"ema/0.9/{name}": torch.full((half,), float(name[5:])) for name in names}
        starts = json.dumps(dict.fromkeys(kinds, rank * half))
        save_file(kinds | {"meters": torch.zeros(2)}, tmp_path / f"rank-{rank:05d}.safetensors", {"starts": starts})
    sizes = {path.name: path.stat().st_size for path in sorted(tmp_path.glob("rank-*.safetensors"))}
    files = {name: {"bytes": size, "sha256": "0" * 64} for name, size in sizes.items()}
    parameters = {name: [numel] for name in names}
    manifest = {"format": FORMAT, "version": VERSION, "files": files, "parameters": parameters, "ema_rates": [0.9]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))

    [peak] = run_ranks(_peak_mb, tmp_path, ranks=1)
    assert 5 < peak < 80, "a few tensors of 10 MB, and not the 200 MB of the model"
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name].float(), torch.full((numel,), float(name[5:]))) for name in names)


def _peak_mb(world: World, folder: Path) -> float:
    """Memory that an export takes, without mapped files, in a process that does nothing besides."""

    def held() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

    def watch() -> None:
        while not done.wait(0.0005):
            most[0] = max(most[0], held())

    weights = exported_weights(Checkpoint(folder), RunConfig(), ema=None, raw=False, merge=True)
    before, most, done = held(), [0.0], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    write_tensors(folder / "out.safetensors", weights.shapes, torch.float32, weights.reader(torch.float32))
    done.set()
    thread.join()
    return most[0] - before


def test_folders_of_the_user_beside_an_export_stay(
    once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("out.tmp", "out.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("years of work")
    command = ["export", str(once), str(tmp_path / "out"), "--format", "safetensors"]
    assert main(command) == 2
    assert f"{tmp_path / 'out.unfinished'} exists and is not of fastdiff" in capsys.readouterr().err
    (tmp_path / "out.unfinished").rename(tmp_path / "out.other")
    assert main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.other", "out.tmp"]
    for name in ("out.tmp", "out.other"):
        assert (tmp_path / name / "mine").read_text() == "years of work"


def test_the_second_of_two_exports_at_once_is_refused(
    once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first waits before its last file until the second has ended."""
    command = ["export", str(once), str(tmp_path / "out"), "--format", "safetensors"]
    begun, ended, codes = threading.Event(), threading.Event(), list[int]()
    write_card = fastdiff.export.run.write_card

    def wait(*arguments: Any) -> None:
        begun.set()
        assert ended.wait(300)
        write_card(*arguments)

    monkeypatch.setattr(fastdiff.export.run, "write_card", wait)
    first = threading.Thread(target=lambda: codes.append(main(command)))
    first.start()
    assert begun.wait(300)
    code, said = main(command), capsys.readouterr().err
    ended.set()
    first.join()
    assert (code, codes) == (2, [0])
    assert f"another process is writing {tmp_path / 'out'}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == newest(once).weights().keys()


def test_the_streamed_file_is_a_safetensors_file(tmp_path: Path) -> None:
    weights = {name: value.detach() for name, value in build_model(UNETS["sdxl"], seed=1).named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()} | {"scalar": ()}
    weights["scalar"] = torch.tensor(3.0)
    write_tensors(tmp_path / "a.safetensors", shapes, torch.float32, weights.__getitem__)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    length = int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")
    assert length % 8 == 0
    header = json.loads((tmp_path / "a.safetensors").read_bytes()[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt"}
    with pytest.raises(ValueError, match="the header says"):
        write_tensors(tmp_path / "b.safetensors", {"scalar": (2,)}, torch.float32, weights.__getitem__)


def test_an_earlier_export_is_replaced_and_nothing_else_is(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A reader of the old one sees it whole until the new one is complete."""
    train(tiny(digits, tmp_path / "run", steps=1), launch(1), world)
    monkeypatch.chdir(tmp_path)
    command = ["export", "run", "out", "--format", "safetensors", "--raw"]
    assert main(command) == 0
    before, folder = digests(Path("out")), Path("out").stat().st_ino
    train(tiny(digits, tmp_path / "run", steps=2), launch(1), world)
    capsys.readouterr()
    assert main(command) == 2
    assert "out exists; export to a new folder, delete it, or replace an earlier export by --overwrite" in (
        capsys.readouterr().err
    )
    assert digests(Path("out")) == before
    monkeypatch.setattr("fastdiff.export.run.write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(Path("run"), Path("out"), Choice(format="safetensors", raw=True), overwrite=True)
    assert digests(Path("out")) == before, "a failure leaves the old one"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--overwrite"]) == 0
    found = load_file("out/model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in newest(tmp_path / "run").weights().items())
    assert Path("out").stat().st_ino != folder, "exchanged, not written over"
    Path("mine").mkdir()
    Path("mine", "README.md").write_text("# my own notes\n")
    Path("link").symlink_to("out")
    for other in ("mine", "run", "link"):
        capsys.readouterr()
        assert main(["export", "run", other, "--format", "safetensors", "--overwrite"]) == 2
        assert f"--overwrite: {other} is no folder that fastdiff export wrote" in capsys.readouterr().err
    Path("out", "my-notes.txt").write_text("mine")
    assert main([*command, "--overwrite"]) == 2
    assert "out has files that the export did not write (my-notes.txt); move them elsewhere" in capsys.readouterr().err
    assert Path("out", "my-notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine", "out", "run"]
