"""The implementation of each op in a run: forced by flags, refused at the start, shown in a line and a table."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.cli.machines import doctor
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.models import kernel_choice
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.training.loop import train
from fastdiff_kernels import dispatch
from fastdiff_kernels import launch as kernel_launch
from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import OPS, Backend
from tests.support.runs import launch, renew_digest, tiny, train_losses

CPU = torch.device("cpu")


def performance(config: RunConfig, **changes: str) -> RunConfig:
    return replace(config, performance=replace(config.performance, **changes))


@pytest.mark.parametrize(
    ("given", "forced"),
    [
        ("auto", {}),
        ("triton", dict.fromkeys(OPS, "triton")),
        ("adaln=compile", {"adaln": "compile"}),
        ("auto, adaln=compile,loss=reference", {"adaln": "compile", "loss": "reference"}),
        ("reference,loss=auto", {op: "reference" for op in OPS if op != "loss"}),
    ],
)
def test_kernels_are_a_default_and_exceptions(given: str, forced: dict[str, str]) -> None:
    assert PerformanceConfig(kernels=given).kernel_backends() == forced


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tritn", "'tritn' is none of auto, triton, reference, compile"),
        ("auto,adaln=cuda", "'cuda' is none of auto, triton, reference, compile"),
        ("auto,adalm=triton", "'adalm' is none of the ops philox, noising, loss, group_norm, adaln, dropout, adamw"),
        ("adaln=triton,adaln=compile", "adaln is named twice"),
        ("triton,reference", "'reference' is none of the ops"),
        ("", "'' is none of auto"),
    ],
)
def test_a_wrong_list_of_kernels_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--performance.kernels {given}: {message}"):
        PerformanceConfig(kernels=given)


@pytest.mark.parametrize("name", ["digits", "dit-xl-2-256"])
def test_every_op_of_every_preset_is_named(name: str) -> None:
    config = preset(name)
    rows = kernel_choice.choices(config, CPU)
    layers = {layer for layer, choice in rows if choice.op == "attention"}
    assert len(layers) == config.model.depth
    assert {choice.op for _, choice in rows} == {"attention", "adaln", "philox", "noising", "loss", config.optim.name}
    assert all(choice.forward and choice.backward and choice.why for _, choice in rows)


CUDA = torch.device("cuda")


def eight_bit(**changes: str) -> RunConfig:
    config = performance(preset("digits"), **changes)
    return replace(config, optim=replace(config.optim, name="adamw8bit"))


def backends(config: RunConfig, device: torch.device, optimizer_device: torch.device) -> dict[str, Backend]:
    return kernel_choice.backends(config.optim, config.performance, device, optimizer_device)


def of_optimizer(config: RunConfig) -> Choice:
    """Of a network on a GPU with the state on the host."""
    return kernel_choice._of_optimizer(family_of(config.optim), config.performance, CUDA, CPU)


def test_state_on_the_host_of_a_gpu_is_updated_by_compiled_code() -> None:
    assert backends(eight_bit(), CUDA, CPU) == {"adamw8bit": "compile"}
    assert of_optimizer(eight_bit()) == Choice("adamw8bit", "compile", "-", "its state is on the host")


@pytest.mark.parametrize(
    ("config", "device", "optimizer_device", "forced"),
    [
        (eight_bit(), CUDA, CUDA, {}),
        (eight_bit(), CPU, CPU, {}),
        (preset("digits"), CUDA, CPU, {}),
        (eight_bit(kernels="adamw8bit=reference"), CUDA, CPU, {"adamw8bit": "reference"}),
        (eight_bit(kernels="adamw8bit=compile"), CPU, CPU, {"adamw8bit": "compile"}),
    ],
)
def test_nothing_else_compiles_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, device: torch.device, optimizer_device: torch.device,
    forced: dict[str, str],
) -> None:  # fmt: skip
    """Above all not a run on a CPU, whose start would take longer."""
    monkeypatch.setattr("fastdiff_kernels.adamw8bit.compiled.unavailable", lambda: pytest.fail("it was compiled"))
    assert backends(config, device, optimizer_device) == forced


def test_without_a_compiler_the_host_runs_the_reference_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastdiff_kernels.adamw8bit.compiled.unavailable", lambda: "there is no C++ compiler (g++)")
    assert backends(eight_bit(), CUDA, CPU) == {}
    for _ in range(2):
        assert of_optimizer(eight_bit()).forward == "reference"
    said = capsys.readouterr().err
    assert said.count("plain torch, a multiple slower than compiled: there is no C++ compiler (g++)") == 1


def test_a_forced_compilation_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdiff_kernels.adamw8bit.compiled.unavailable", lambda: "there is no C++ compiler (g++)")
    config = eight_bit(kernels="adamw8bit=compile")
    with pytest.raises(ConfigError, match=r"^--performance.kernels adamw8bit=compile: .* no C\+\+ compiler"):
        kernel_choice.choices(config, CPU)


def test_a_deterministic_run_compiles_without_benchmarks() -> None:
    assert kernel_choice.compile_options(preset("digits").performance) == {}
    config = replace(preset("digits"), performance=PerformanceConfig(deterministic=True))
    found = kernel_choice.compile_options(config.performance)
    assert found == {"options": {"deterministic": True}}
    assert found["options"].keys() <= set(torch._inductor.list_options())


def test_in_words() -> None:
    rows = [
        ("blocks.0.attn", Choice("attention", "sdpa (cudnn)", "sdpa (cudnn)", "first choice on sm_90")),
        ("blocks.0", Choice("adaln", "compile", "triton", "on CUDA")),
        ("blocks.1", Choice("adaln", "compile", "triton", "on CUDA")),
        ("objective", Choice("noising", "triton", "-", "on CUDA")),
        ("objective", Choice("loss", "triton", "triton", "on CUDA")),
    ]
    assert kernel_choice.in_words(rows) == (
        "attention by sdpa (cudnn) (first choice on sm_90); adaln by compile/triton (on CUDA); "
        "noising, loss by triton (on CUDA)"
    )


def test_attention_that_differs_between_layers_is_counted() -> None:
    short, other = (
        Choice("attention", "short", "short", "asked for"),
        Choice("attention", "sdpa", "sdpa", "short takes"),
    )
    rows = [("a", short), ("b", other), ("c", short), ("d", Choice("loss", "triton", "triton", "on CUDA"))]
    assert kernel_choice.in_words(rows) == (
        "attention of 2 of 3 layers by short (asked for); attention of 1 of 3 layers by sdpa (short takes); "
        "loss by triton (on CUDA)"
    )


def short(preset_name: str, **changes: int) -> RunConfig:
    config = preset(preset_name)
    return performance(replace(config, model=replace(config.model, **changes)), attention="short")


def test_short_attention_is_forced_where_the_layers_allow_it() -> None:
    """In DiT-S/8 all layers, heads of 64 channels; in an ADM UNet those of the small maps."""
    rows = kernel_choice.choices(short("dit-s-8-256", depth=2), CPU)
    assert [(name, c.forward, c.why) for name, c in rows if c.op == "attention"] == [
        (f"blocks.{n}.attn", "short", "asked for") for n in (0, 1)
    ]
    changes = {"size": 32, "channels": 3, "width": 64, "channel_mult": (1, 1), "res_blocks": 1}
    changes |= {
        "attention_resolutions": (32, 16),
        "heads": 1,
        "qkv_order": "qkv_major",
        "classes": 0,
        "learn_sigma": True,
    }
    config = replace(preset("dit-s-8-256"), model=AdmConfig(**changes))
    rows = kernel_choice.choices(performance(config, attention="short"), CPU)
    found = {c.why: c.forward for _, c in rows if c.op == "attention"}
    assert found.pop("asked for") == "short"
    assert found.keys() == {"short takes 1 to 256 tokens, these are 1024"}


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("dit-s-8-256", {"heads": 12}, "blocks.0.attn: short takes head dims 64, 72, 80, this is 32"),
        ("sd15-512", {}, "attn1: short takes a packed projection"),
    ],
)
def test_short_attention_that_no_layer_can_use_is_refused(name: str, changes: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--performance.attention short: no layer .*{why}.* use auto$"):
        kernel_choice.choices(short(name, **changes), CPU)


def test_the_table_puts_equal_layers_on_one_line() -> None:
    attention = Choice("attention", "sdpa (flash)", "sdpa (flash)", "asked for")
    names = [f"blocks.{n}.attn" for n in range(12)] + [f"down.{a}.{b}.attn" for a in (0, 1) for b in (0, 2)]
    rows = [(name, attention) for name in names] + [("blocks.12.attn", replace(attention, why="else"))]
    rows += [("final", Choice("adaln", "reference", "-", "the tensor is on cpu"))]
    assert list(doctor._table(rows)) == [
        "layer              op         forward       backward      why",
        "blocks.0-11.attn   attention  sdpa (flash)  sdpa (flash)  asked for",
        "down.0-1.0,2.attn  attention  sdpa (flash)  sdpa (flash)  asked for",
        "blocks.12.attn     attention  sdpa (flash)  sdpa (flash)  else",
        "final              adaln      reference     -             the tensor is on cpu",
    ]


def test_the_doctor_explains_a_preset() -> None:
    title, header, *lines = doctor.explain("dit-xl-2-256")
    assert title == "preset dit-xl-2-256 on cpu, bf16, blocks eager:" or torch.cuda.is_available()
    assert header.split() == ["layer", "op", "forward", "backward", "why"]
    assert any(line.startswith("blocks.0-27.attn  attention  sdpa (") for line in lines)
    assert any(line.startswith("objective") and " loss " in line for line in lines)
    assert len(lines) < 12


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean dit-xl-2-256"):
        list(doctor.explain("dit-xl-22"))


# --- a run ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "cudnn"}, r"^--performance.attention cudnn: attention backend 'cudnn': needs a CUDA device"),
        ({"attention": "short"}, r"^--performance.attention short: attention backend 'short': needs a CUDA device"),
        ({"attention": "xformers"}, "attention backend 'xformers': needs a CUDA device"),
        (
            {"kernels": "triton"},
            r"^--performance.kernels triton: Triton kernels need a GPU, .* on the CPU; leave the flag out",
        ),
        ({"kernels": "auto,loss=triton"}, r"^--performance.kernels auto,loss=triton: Triton kernels need a GPU"),
    ],
)
def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str) -> None:
    monkeypatch.setattr(kernel_launch, "INTERPRETED", False)
    config = performance(preset("dit-s-8-256"), **changes)
    with pytest.raises(ConfigError, match=message):
        kernel_choice.choices(config, CPU)
    assert dispatch.choose("loss", torch.empty(0)) == "reference", "nothing stays forced"


def test_what_is_not_forced_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(dispatch, "explain", broken)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        kernel_choice.choices(preset("dit-s-8-256"), CPU)


def test_a_run_is_refused_before_anything_is_written(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", performance__kernels="loss=compile")
    with pytest.raises(ConfigError, match=r"attention backend 'flash': (needs a CUDA device|computes in fp16)"):
        train(performance(config, attention="flash"), launch(), world)
    assert not (tmp_path / "run").exists()
    assert dispatch.choose("loss", torch.empty(0)) == "reference", "nothing stays forced"


def test_the_first_line_says_what_computes(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(digits, tmp_path / "run", steps=1, performance__kernels="auto,adaln=reference")
    train(replace(config, performance=replace(config.performance, attention="reference")), launch(), world)
    said = capsys.readouterr().err
    assert "attention by reference (asked for)" in said
    assert "adaln by reference (forced)" in said
    assert "loss by reference (the tensor is on cpu)" in said or world.device.type == "cuda"


def test_kernels_and_attention_change_nothing_but_rounding(world: World, digits: Path, tmp_path: Path) -> None:
    """The objective in Triton (on a CPU in its interpreter) and the plain attention, against the references."""
    plain = tiny(digits, tmp_path / "plain", steps=2, performance__kernels="reference")
    kernels = "reference,noising=triton,loss=triton"
    other = performance(tiny(digits, tmp_path / "other", steps=2), kernels=kernels, attention="reference")
    assert train_losses(world, other, launch()) == pytest.approx(train_losses(world, plain, launch()), rel=1e-5)


def test_a_run_with_forced_backends_is_sampled_where_they_cannot_run(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the run was trained on a GPU, and is sampled on a laptop."""
    config = tiny(digits, tmp_path / "run", steps=1)
    train(config, launch(), world)
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    manifest = (saved / "MANIFEST.json").read_text()
    foreign = manifest.replace('"kernels": "auto"', '"kernels": "triton"').replace(
        '"attention": "auto"', '"attention": "cudnn"'
    )
    assert foreign != manifest
    (saved / "MANIFEST.json").write_text(foreign)
    renew_digest(saved / "MANIFEST.json")
    monkeypatch.setattr(kernel_launch, "INTERPRETED", False)
    run = Run(tmp_path / "run")
    assert run.config.performance.attention == "cudnn"
    labels = torch.tensor([0, 1])
    images = run.draw(labels, SamplerConfig(scheduler="dpmsolver++", steps=2, cfg=1.0), progress=False)
    assert images.isfinite().all()
