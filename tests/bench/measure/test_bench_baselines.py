"""The peers compute the same as fastdiff and train; interleaved comparisons are recorded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState  # type: ignore[import-untyped,unused-ignore]
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import SD15_UNET
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.data.shards.reader import LatentReader
from fastdiff.diffusion.objective import Objective
from fastdiff.models.cost.flops import training_flops
from fastdiff.models.load import build_network
from fastdiff.rng import Stream, normal
from fastdiff_bench import BenchError
from fastdiff_bench.__main__ import main
from fastdiff_bench.measure import baselines, synthetic
from fastdiff_bench.measure.interleaved import Effort
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.trainers import encoders, images
from fastdiff_bench.trainers.dit import Dit
from fastdiff_bench.trainers.plain import Plain
from fastdiff_bench.trainers.plain_torch import Noise, Samples, of_steps, untrained
from fastdiff_bench.trainers.scripts import diffusers
from fastdiff_bench.trainers.text_to_image import LAUNCHER, Online, TextToImage, not_in_script
from tests.support.benches.forked_programs import forked_programs
from tests.support.inputs.objectives import objective_of

CPU = torch.device("cpu")
BATCH, SEED = 6, 3
STRATIFIED = "--timesteps.stratified"
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "digits-t2i": (fixed := [{"prediction": "epsilon"}, {"prediction": "v", "min_snr_gamma": 5.0}]),
    "digits": [*fixed, {"prediction": "epsilon", "variance": "learned_range"}],
}
BASELINES = [("digits", Plain), ("digits-t2i", Plain), ("digits", Dit), ("digits-t2i", TextToImage)]
EACH_PEER = pytest.mark.parametrize(
    ("preset", "build", "best"),
    [
        # By day one of its columns.
        pytest.param(*each, best, marks=() if best == number % 2 else pytest.mark.nightly)
        for number, each in enumerate(BASELINES)
        for best in (False, True)
    ],
)


@pytest.fixture(autouse=True)
def _another_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps the precision of the first run of a process, and would take this one for a rank of many."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def config(preset: str, precision: str = "fp32", **objective: Any) -> RunConfig:
    """Constant learning rate, and an epsilon that lets the size of a gradient count in the first step of Adam."""
    found = Workload(preset=preset, batch=BATCH, precision=precision).config(Path(), Path())
    optim = replace(found.optim, lr=1e-2, eps=1e-2, weight_decay=0.1, clip=0.5, schedule="constant", warmup_steps=0)
    model = replace(found.model, learn_sigma=True) if isinstance(found.model, DiTConfig) else found.model
    objective = {"condition_dropout": 0.0, **objective}
    return replace(found, model=model, optim=optim, objective=replace(found.objective, **objective))


def batch_of(run: RunConfig) -> Batch:
    generator, model = torch.Generator().manual_seed(2), run.model
    latents = torch.randn(BATCH, model.channels, model.size, model.size, generator=generator)
    if isinstance(model, DiTConfig):
        return Batch(latents, torch.arange(BATCH), {"label": torch.arange(BATCH) % model.classes})
    context = torch.randn(BATCH, 77, model.cross_attention_dim, generator=generator)
    return Batch(latents, torch.arange(BATCH), {"context": context})


def woken(model: nn.Module) -> nn.Module:
    """With other weights, the same for the same names: adaLN-Zero starts with gradients that are 0 on all sides."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def fastdiff_step(run: RunConfig, batch: Batch) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Loss and gradients, and the noise and timesteps of them."""
    model = build_network(run)
    woken(model)
    objective = Objective(run.objective, seed=SEED, null={}, device=CPU, inputs=model.inputs)
    corruption = objective.add_noise(batch)
    loss = objective.loss(model(corruption.noisy, corruption.time, **corruption.condition), batch, corruption).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    noise = normal(SEED, Stream.NOISE, batch.position, batch.latents.shape[1:])
    return loss.detach(), gradients(model), noise, corruption.time


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("preset", "build", "objective", "best"),
    [
        # By day every objective of a peer, and both of its columns.
        pytest.param(name, build, each, best, marks=() if best == number % 2 else pytest.mark.nightly)
        for name, build in BASELINES
        for number, each in enumerate(OBJECTIVES[name])
        for best in (False, True)
    ],
)
def test_loss_and_gradients_of_a_peer_are_those_of_fastdiff(
    preset: str, build: type[Plain | Dit | TextToImage], objective: dict[str, Any], best: bool
) -> None:
    run = config(preset, **objective)
    batch = batch_of(run)
    loss, expected, noise, time = fastdiff_step(run, batch)
    peer = build(run, CPU, best=best)
    woken(peer.model)
    found = peer.loss(batch.latents, noise, time, batch.condition)
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.detach(), loss, rtol=1e-5, atol=0)
    assert loss > 0.1
    theirs = gradients(peer.model)
    assert theirs.keys() == expected.keys()
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-5 * scale, msg=f"the gradient of {name} differs"
        )


@EACH_PEER
def test_a_peer_in_bf16_trains_in_mixed_precision(
    preset: str, build: type[Plain | Dit | TextToImage], best: bool
) -> None:
    run = config(preset, precision="bf16", prediction="epsilon")
    batch = batch_of(run)
    loss, expected, noise, time = fastdiff_step(run, batch)
    peer = build(run, CPU, best=best)
    woken(peer.model)
    in_bf16 = best or build is not Dit
    assert peer.facts["precision"] == ("bf16" if in_bf16 else "fp32")
    products = in_16_bits(lambda: peer.loss(batch.latents, noise, time, batch.condition))
    assert products == (1.0 if in_bf16 else 0.0)
    found = peer.loss(batch.latents, noise, time, batch.condition)
    torch.testing.assert_close(found.detach(), loss, rtol=1e-2, atol=0)
    found.backward()  # type: ignore[no-untyped-call]
    ours, theirs = (torch.cat([g[n].flatten() for n in sorted(expected)]) for g in (expected, gradients(peer.model)))
    assert theirs.dtype == torch.float32
    assert (ours - theirs).norm() < 0.05 * ours.norm()
    before = [average.clone() for average in peer.averages]
    for _ in range(2):
        peer.update(peer.loss(batch.latents, noise, time, batch.condition))
    assert not all(torch.equal(old, new) for old, new in zip(before, peer.averages, strict=True))


def in_16_bits(call: Callable[[], object]) -> float:
    """The share of the matrix products of a call that are in bf16."""
    found: list[bool] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution):
                found.append(out.dtype == torch.bfloat16)
            return out

    with Watch():  # type: ignore[no-untyped-call]
        call()
    return sum(found) / len(found)


@pytest.mark.parametrize("build", [Plain, Dit])
def test_a_compiled_dit_in_bf16_computes_the_same(build: type[Plain | Dit], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor takes 20 s
    run = config("digits", precision="bf16")
    assert isinstance(run.model, DiTConfig)
    small = replace(run.model, hidden=32, depth=1, heads=2)
    run = replace(run, model=small)
    compiled = replace(run, performance=replace(run.performance, compile=True))
    batch = batch_of(run)
    noise, time = torch.randn_like(batch.latents), torch.arange(BATCH)
    eager, fast = (build(each, CPU, best=True) for each in (run, compiled))
    assert (eager.facts["compile"], fast.facts["compile"]) == (False, True)
    losses = []
    for peer in (eager, fast):
        woken(peer.model)
        loss = peer.loss(batch.latents, noise, time, batch.condition)
        losses.append(loss.detach())
        peer.update(loss)
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for slow, new in zip(eager.averages, fast.averages, strict=True):
        torch.testing.assert_close(slow, new, rtol=0, atol=1e-4)


@EACH_PEER
def test_an_update_of_a_peer_is_adamw_with_its_clipping_and_moves_its_average(
    preset: str, build: type[Plain | Dit | TextToImage], best: bool
) -> None:
    run = config(preset)
    batch = batch_of(run)
    peer = build(run, CPU, best=best)
    before = [p.detach().clone() for p in peer.model.parameters()]
    noise, time = torch.randn_like(batch.latents), torch.arange(BATCH)
    peer.loss(batch.latents, noise, time, batch.condition).backward()  # type: ignore[no-untyped-call]
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in peer.model.parameters()]
    peer.model.zero_grad()
    norm = torch.cat([slope.flatten() for slope in slopes]).norm()
    factor = 1.0 if build is Dit else min(1.0, run.optim.clip / (norm.item() + 1e-6))
    assert build is Dit or factor < 0.9

    peer.update(peer.loss(batch.latents, noise, time, batch.condition))
    once = [p.detach().clone() for p in peer.model.parameters()]
    for old, new, slope in zip(before, once, (factor * slope for slope in slopes), strict=True):
        moved = old * (1 - run.optim.lr * run.optim.weight_decay) - run.optim.lr * slope / (slope.abs() + run.optim.eps)
        torch.testing.assert_close(new, moved, rtol=1e-4, atol=1e-6)

    averages = [average.clone() for average in peer.averages]
    peer.update(peer.loss(batch.latents, noise, time, batch.condition))
    # diffusers' average warms up: 2 / 11 in its second update.
    rate = 2 / 11 if build is TextToImage else run.ema.rates[0]
    for average, old, weight in zip(peer.averages, averages, peer.model.parameters(), strict=True):
        torch.testing.assert_close(average, rate * old + (1 - rate) * weight.detach(), rtol=1e-5, atol=1e-7)


def test_the_samples_in_memory_are_those_of_the_shards_once_per_epoch(tmp_path: Path) -> None:
    run = config("digits")
    assert isinstance(run.model, DiTConfig)
    folder = synthetic.write(tmp_path / "shards", run.model, 3 * BATCH)
    samples = Samples(folder, BATCH, 0.0, run.model.classes, CPU)
    epoch = [samples.next() for _ in range(3)]
    found = torch.cat([latents for latents, _ in epoch])
    with LatentReader(folder) as reader:
        stored = reader.read(range(len(reader)))
        shift, scale = reader.info.normalisation.shift[0], reader.info.normalisation.scale[0]
    expected = (torch.from_numpy(stored["latent"]).float() - shift) * scale
    by_first = found[:, 0, 0, 0].argsort(), expected[:, 0, 0, 0].argsort()
    assert torch.equal(found[by_first[0]], expected[by_first[1]])
    labels = torch.cat([condition["label"] for _, condition in epoch])
    assert torch.equal(labels[by_first[0]], torch.from_numpy(stored["label"])[by_first[1]])
    _, dropped = Samples(folder, BATCH, 1.0, run.model.classes, CPU).next()
    assert dropped["label"].tolist() == [run.model.classes] * BATCH


def test_posteriors_in_memory_are_sampled_anew(tmp_path: Path) -> None:
    run = config("digits-t2i")
    folder = synthetic.write(tmp_path / "shards", run.model, BATCH)
    samples = Samples(folder, BATCH, 0.0, None, CPU)
    (first, condition), (second, _) = samples.next(), samples.next()
    assert first.shape == (BATCH, 4, 8, 8)
    assert condition["context"].dtype == torch.float32
    distances = torch.cdist(first.flatten(1), second.flatten(1))
    assert sorted(distances.argmin(1).tolist()) == list(range(BATCH))
    # Two samples with a deviation of 0.1 each around the same means.
    expected = torch.full((BATCH,), 0.1 * (2 * first[0].numel()) ** 0.5)
    torch.testing.assert_close(distances.min(1).values, expected, rtol=0.2, atol=0)


def test_online_images_are_decoded_cropped_and_normalised_with_their_captions(tmp_path: Path) -> None:
    folder = images.write(tmp_path / "images", 2 * BATCH, 64)
    assert Image.open(folder / "000000.jpg").size == (96, 80)
    loader = diffusers.loader(folder, 64, BATCH, encoders.tokenizer())
    assert len(loader) == 2
    batch = next(iter(loader))
    assert batch["pixel_values"].shape == (BATCH, 3, 64, 64)
    assert batch["pixel_values"].dtype == torch.float32
    assert -1.0 <= batch["pixel_values"].min().item() < -0.5
    assert 0.5 < batch["pixel_values"].max().item() <= 1.0
    assert batch["input_ids"].shape == (BATCH, 77)
    assert len(np.unique(batch["input_ids"].numpy(), axis=0)) > 1


def test_the_frozen_parts_are_in_stable_diffusions_proportions() -> None:
    # 1.117 and 0.0133 TFLOP over three times 0.803, by torch's counter on the published pipeline.
    autoencoder, text = shares(SD15_UNET)
    assert autoencoder == pytest.approx(1.1167 / (3 * 0.8033), rel=0.01)
    assert text == pytest.approx(0.013299 / (3 * 0.8033), rel=0.01)
    model = config("digits-t2i").model
    assert isinstance(model, UNetConfig)
    here = shares(model)
    assert here[0] == pytest.approx(autoencoder, rel=0.1)
    assert here[1] < 0.03


def shares(unet: UNetConfig) -> list[float]:
    """Operations per sample of the frozen parts over those of a training step of the UNet."""
    side = encoders.FACTOR * unet.size
    with torch.device("meta"), torch.no_grad():
        inputs = {
            encoders.autoencoder(unet).encode: torch.empty(1, 3, side, side),
            encoders.text_encoder(unet, 100): torch.empty(1, CAPTION_TOKENS, dtype=torch.int64),
        }
        found = []
        for part, example in inputs.items():
            with FlopCounterMode(display=False) as counter:
                part(example)
            found.append(counter.get_total_flops() / training_flops(unet))
    return found


@pytest.mark.parametrize(
    ("workload", "names", "message"),
    [
        (Workload(preset="digits"), ["torchrec"], "expected some of plain, dit, diffusers, each once"),
        (Workload(preset="digits"), [], "expected some of"),
        (Workload(preset="digits"), ["dit", "dit"], "each once"),
        (Workload(preset="digits-t2i"), ["dit"], "preset digits-t2i has a UNet; try --preset dit-s-2-256"),
        (Workload(preset="sit-xl-2-256"), ["plain"], "--peer plain .* sit-xl-2-256, which has --objective.process"),
        (Workload(preset="digits"), ["diffusers"], "preset digits has another network; try --preset digits-t2i"),
        (Workload(preset="digits", batch=16, micro=4), ["plain"], "--micro 4: .*leave it out"),
        (Workload(preset="sd2-512"), ["diffusers"], "preset sd2-512 accumulates gradients: .*give --batch"),
        (Workload(preset="digits", precision="fp16"), ["plain"], "--precision fp16: .*use one of them"),
    ],
)
def test_a_peer_that_cannot_train_the_workload_is_refused(
    workload: Workload, names: list[str], message: str, tmp_path: Path
) -> None:
    with record.Log(tmp_path / "peer.jsonl") as log, pytest.raises(BenchError, match=message):
        baselines.run(workload, names, Effort(rounds=2, steps=1, warm_up=1), "cpu", log)


@pytest.mark.parametrize(
    ("given", "timesteps", "flags"),
    [
        ({}, {}, []),
        ({"prediction": "x0", "variance": "fixed_large", "loss": "rescaled_mse", "weighting": "p2"}, {}, []),
        ({"prediction": "epsilon", "variance": "learned_range", "min_snr_gamma": 5.0}, {}, []),
        ({"prediction": "v", "schedule": "jsd", "timesteps": 300}, {}, []),
        ({"prediction": "previous_x"}, {}, ["--objective.prediction previous_x"]),
        ({"loss": "kl"}, {}, ["--objective.loss kl"]),
        ({"loss": "rescaled_kl", "variance": "learned_range"}, {}, ["--objective.loss rescaled_kl"]),
        ({"loss": "rescaled_mse", "variance": "learned_range"}, {}, ["--objective.loss rescaled_mse"]),
        ({"prediction": "v", "variance": "learned_range"}, {}, ["--objective.prediction v"]),
        ({"variance": "learned"}, {}, ["--objective.variance learned"]),
        ({"noise_offset": 0.1}, {}, ["--objective.noise_offset 0.1"]),
        ({"multires_noise_iterations": 6}, {}, ["--objective.multires_noise_iterations 6"]),
        ({"input_perturbation": 0.1}, {}, ["--objective.input_perturbation 0.1"]),
        ({"dream": True}, {}, ["--objective.dream True"]),
        ({"process": "edm"}, {}, ["--objective.process edm"]),
        ({"process": "flow", "cosine_weight": 1.0}, {}, ["--objective.process flow"]),
        ({}, {"density": "importance"}, ["--timesteps.density importance"]),
        ({}, {"density": "logit_normal", "stratified": True}, ["--timesteps.density logit_normal", STRATIFIED]),
        ({}, {"stratified": True}, [STRATIFIED]),
    ],
)
def test_what_the_peers_do_not_train_is_named(given: Any, timesteps: Any, flags: list[str]) -> None:
    objective, drawn = objective_of(**given), TimestepConfig(**timesteps)
    assert untrained(objective, drawn) == flags
    if not timesteps and flags:
        with pytest.raises(BenchError, match=f"{flags[0]}.*: the baselines do not support this"):
            Noise(of_steps(objective), CPU)
    weighting = ["--objective.weighting p2"] if objective.weighted == "p2" else []
    assert not_in_script(objective, drawn) == flags + weighting


@pytest.mark.parametrize("name", ["plain", "dit", "diffusers"])
def test_an_objective_that_a_baseline_would_train_otherwise_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(preset="digits-t2i" if name == "diffusers" else "digits")
    run = workload.config(tmp_path, tmp_path)
    changed = replace(run, objective=replace(run.objective, prediction="previous_x"))
    monkeypatch.setattr(Workload, "config", lambda *_: changed)
    message = (
        f"--peer {name} does not support preset {workload.preset}, which has --objective.prediction previous_x; try"
    )
    with record.Log(tmp_path / "peer.jsonl") as log, pytest.raises(BenchError, match=message):
        baselines.run(workload, [name], Effort(rounds=2, steps=1, warm_up=1), "cpu", log)


@pytest.mark.nightly
def test_a_comparison_with_diffusers_is_recorded_with_its_speed_ups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(preset="digits-t2i", batch=2, precision="bf16", deepspeed="zero1")
    with record.Log(tmp_path / "peer.jsonl") as log:
        assert baselines.run(workload, ["diffusers"], Effort(rounds=2, steps=1, warm_up=1), "cpu", log) == 0
    rows = {row.name: row for row in record.read(tmp_path / "peer.jsonl").measurements}
    case = "digits-t2i, 4x8x8, batch 2, bf16"
    where = {"fastdiff zero1": "cached", "diffusers": "online", "diffusers, best flags": "cached"}
    times = {name: rows["peer", f"{case}, {kind}", name, "step time"] for name, kind in where.items()}
    for name, kind in where.items():
        throughput = rows["peer", f"{case}, {kind}", name, "throughput"]
        assert throughput.value == pytest.approx(2e3 / times[name].value)
        assert rows["peer", f"{case}, {kind}", name, "processor time"].value > 0
        assert rows["peer", f"{case}, {kind}", name, "peak resident"].value > 0.1
    ratio = rows["peer", f"{case}, online", "fastdiff zero1 over diffusers", "speed-up"]
    assert (ratio.better, ratio.n) == ("higher", 2)
    assert ratio.p20 is not None
    assert ratio.p80 is not None
    assert 0 < ratio.p20 <= ratio.value <= ratio.p80
    assert ("peer", f"{case}, cached", "fastdiff zero1 over diffusers, best flags", "speed-up") in rows
    encoding = rows["peer", f"{case}, online", "diffusers", "phase encode"]
    assert 0 < encoding.value < times["diffusers"].value
    online = {"precision": "bf16", "channels_last": False, "best flags": False, "data": Online.kind}
    assert online.items() <= encoding.facts.items()
    shown = capsys.readouterr().out
    flags = "precision bf16, tf32 False, compile False, channels_last False, attention sdpa, fused False, foreach False"
    assert f"diffusers: {flags}, data {Online.kind}" in shown
    peaks = sum(rows["peer", f"{case}, {kind}", name, "peak resident"].value for name, kind in where.items())
    assert f"memory of all processes together: {peaks:.2f} GiB" in shown


@pytest.mark.parametrize("names", [["dit"], pytest.param(["plain", "dit"], marks=pytest.mark.nightly)], ids="-".join)
@pytest.mark.usefixtures("small_limits")
def test_a_comparison_of_dits_from_the_command_line_states_how_each_computes(tmp_path: Path, names: list[str]) -> None:
    arguments = ["--smoke", "--preset", "digits", "--precision", "bf16", "--batch", "2", "--device", "cpu"]
    arguments += ["--rounds", "2", "--steps", "1", "--out", str(tmp_path), "--peer", *names]
    with forked_programs():
        assert main(["step", *arguments]) == 0
    (path,) = record.files(tmp_path)
    found = record.read(path)
    assert not found.failures
    times = {row.provider: row for row in found.measurements if row.quantity == "step time"}
    baselines = [baseline for name in names for baseline in (name, f"{name}, best flags")]
    ours = ["zero1", "zero3"] if "plain" in names else ["zero1"]  # plain PyTorch shards nothing
    assert list(times) == [*(f"fastdiff {how}" for how in ours), *baselines]
    flags = {name: [row.facts.get(flag) for flag in ("precision", "fused", "kernels")] for name, row in times.items()}
    for name in names:
        assert flags[name] == ["bf16" if name == "plain" else "fp32", False, None]
        assert flags[f"{name}, best flags"] == ["bf16", True, None]
        assert {"data", "attention", "tf32", "compile"} <= times[name].facts.keys()
    assert "loader" not in times["dit"].facts
    speed_ups = {row.provider: row for row in found.measurements if row.quantity == "speed-up"}
    assert speed_ups.keys() == {f"fastdiff {how} over {baseline}" for how in ours for baseline in baselines}
    for ratio in speed_ups.values():
        assert (ratio.better, ratio.n) == ("higher", 2)
        assert ratio.p20 is not None
        assert ratio.p80 is not None
        assert 0 < ratio.p20 <= ratio.value <= ratio.p80
