"""Plausible records of every benchmark, written by its own log."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

from fastdiff_bench.records.record import Failure, Log, Measurement


def measurement(draw: random.Random, names: str, quantity: str, unit: str, value: float, **more: object) -> Measurement:
    """``names`` is "bench | case | provider"; with a spread unless it is a count."""
    bench, case, provider = names.split(" | ")
    better = "higher" if unit in ("samples/s", "GB/s", "MB/s", "TFLOP/s") or quantity in _SHARES else "lower"
    counted = quantity.startswith("predicted") or (unit == "1" and quantity not in _SHARES)
    spread = {} if counted else _spread(draw, value)
    return Measurement(
        bench=bench, case=case, provider=provider, quantity=quantity, unit=unit, value=value, better=better,
        facts=more, **spread,
    )  # fmt: skip


_SHARES = {"speed-up", "mfu", "of matmul", "of copy", "over compile", "predicted efficiency"}


def _spread(draw: random.Random, value: float) -> dict[str, float | int]:
    return {"p20": value * (1 - draw.uniform(0, 0.04)), "p80": value * (1 + draw.uniform(0, 0.06)), "n": 20}


def step(draw: random.Random, speed: float = 1.0) -> Iterator[Measurement]:
    for provider, factor in (("fastdiff ddp", 1.0), ("fastdiff ddp compiled", 1.35)):
        for batch in (8, 16, 32, 64, 128, 256):
            rate = speed * factor * 580 * batch / (batch + 20)
            names = f"step | dit-xl-2-256, 4x32x32, batch {batch}, bf16 | {provider}"
            facts = {"preset": "dit-xl-2-256", "batch": batch, "parameters": 675_000_000, "flops_per_sample": 712e9}
            ms = 1e3 * batch / rate
            yield measurement(draw, names, "step time", "ms", ms, **facts)
            yield measurement(draw, names, "throughput", "samples/s", rate, **facts)
            for phase, share in zip(
                ("data", "objective", "forward", "backward", "optimizer", "ema", "other"),
                (0.004, 0.02, 0.27, 0.55, 0.1, 0.04, 0.016), strict=True,
            ):  # fmt: skip
                yield measurement(draw, names, f"phase {phase}", "ms", ms * share, **facts)
            yield measurement(draw, names, "peak allocated", "GiB", 11 + 0.22 * batch / factor, **facts)
            yield measurement(draw, names, "peak reserved", "GiB", 13 + 0.24 * batch / factor, **facts)
            yield measurement(draw, names, "mfu", "1", rate * 712e9 / 989e12, **facts)
            yield measurement(draw, names, "launches", "1", 1800, **facts)


def peer(draw: random.Random) -> Iterator[Measurement]:
    for kind, published, best in (("cached", 1.04, 0.97), ("online", 1.9, 1.55)):
        case = f"digits-t2i, 4x8x8, batch 8, fp32, {kind}"
        for provider, ms in (
            ("fastdiff ddp", 208),
            ("diffusers", 208 * published),
            ("diffusers, best flags", 208 * best),
        ):
            names = f"peer | {case} | {provider}"
            yield measurement(draw, names, "step time", "ms", ms, batch=8)
            yield measurement(draw, names, "peak resident", "GiB", 1.4)
            for phase, share in (("forward", 0.3), ("backward", 0.6), ("optimizer", 0.1)):
                yield measurement(draw, names, f"phase {phase}", "ms", ms * share)
            if provider.startswith("diffusers"):
                yield measurement(draw, f"peer | {case} | fastdiff ddp over {provider}", "speed-up", "1", ms / 208)


def op(draw: random.Random) -> Iterator[Measurement]:
    rates = {"matmul rate bf16": 760.0, "matmul rate fp32": 49.0}
    for quantity, value in ({"copy bandwidth": 4100.0} | rates).items():
        unit = "TFLOP/s" if quantity in rates else "GB/s"
        yield measurement(draw, "op | limits | torch", quantity, unit, value)
    for name, shapes in (("adaln", ("dit-xl-256", "dit-s-256")), ("group_norm", ("sd-512-64x64", "sd-512-8x8"))):
        for shape in shapes:
            for dtype in ("bfloat16", "float32"):
                for direction in ("forward", "backward"):
                    for provider, rate in (("triton", 3700), ("compile", 3300), ("eager", 1400), ("liger", 2600)):
                        names = f"op | {name} {shape} {dtype} {direction} | {provider}"
                        found, moved = rate * draw.uniform(0.8, 1.05), 2**28
                        yield measurement(draw, names, "time", "us", moved / found / 1e3, bytes=moved)
                        yield measurement(draw, names, "bandwidth", "GB/s", found, bytes=moved, operations=9 * moved)
                        yield measurement(draw, names, "of copy", "1", found / 4100)
                        yield measurement(draw, names, "over compile", "1", found / 3300)
    for shape, tokens in (("dit-xl-256", 256), ("sd-512", 4096), ("sd-cross", 77)):
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            for provider, share in (("cudnn", 0.62), ("flash", 0.58), ("xformers", 0.4), ("reference", 0.05)):
                operations, moved = int(factor * 2**20 * tokens**2), int((1 + factor) * 2**20 * tokens)
                rate = share * min(760, operations / moved * 4.1) * draw.uniform(0.85, 1)
                names, facts = f"op | attention {shape} bfloat16 {direction} | {provider}", {"bytes": moved}
                facts["operations"] = operations
                yield measurement(draw, names, "time", "us", operations / rate / 1e6, **facts)
                yield measurement(draw, names, "rate", "TFLOP/s", rate, **facts)
                yield measurement(draw, names, "bandwidth", "GB/s", rate * moved / operations * 1e3, **facts)
                yield measurement(draw, names, "of matmul", "1", rate / 760, **facts)


def data(draw: random.Random) -> Iterator[Measurement]:
    rates = {
        "fastdiff reader": 9400, "fastdiff prefetch": 9100, "fastdiff dali": 8200, "dali webdataset": 5100,
        "webdataset": 610, "webdataset 2 workers": 930, "npy dataloader": 3100, "npy dataloader 2 workers": 4200,
    }  # fmt: skip
    for case, slower in (("151 KB samples, batch 64, warm", 1.0), ("151 KB samples, batch 64, cold", 2.2)):
        for provider, rate in rates.items():
            names = f"data | {case} | {provider}"
            yield measurement(draw, names, "throughput", "samples/s", rate / slower)
            yield measurement(draw, names, "bandwidth", "MB/s", rate * 0.151 / slower)
            yield measurement(draw, names, "cpu time", "us", 1e6 / rate)
            yield measurement(draw, names, "peak resident", "GiB", 0.5)
            if provider != "fastdiff reader":
                over = f"data | {case} | fastdiff reader over {provider}"
                yield measurement(draw, over, "speed-up", "1", rates["fastdiff reader"] / rate)


def scale(draw: random.Random) -> Iterator[Measurement]:
    case = "dit-xl-2-256, 4x32x32, batch 256, bf16"
    for stage in range(4):
        for ranks in (1, 2):
            names = f"scale | {case} | zero{stage}, {ranks} ranks"
            yield measurement(draw, names, "step time", "ms", 440 + 30 * stage * (ranks - 1), ranks=ranks, stage=stage)
            yield measurement(draw, names, "collectives", "1", (ranks - 1) * (3 + 60 * stage))
        for exponent in range(11):
            gpus = 2**exponent
            lost = (0.01 + 0.02 * stage) * math.log2(gpus) ** 1.2 / 3
            names, facts = f"scale | {case} | zero{stage}, {gpus} gpus", {"gpus": gpus, "stage": stage, "links": "h200"}
            yield measurement(draw, names, "predicted step time", "ms", 440 / (1 - lost), **facts)
            yield measurement(draw, names, "predicted efficiency", "1", 1 - lost, **facts)


BENCHES = {"op": op, "step": step, "peer": peer, "data": data, "scale": scale}


def write(folder: Path, *benches: str, seed: int = 0) -> Path:
    """One record per bench, all benches if none is named, in ``folder``, which it returns."""
    for bench in benches or BENCHES:
        with Log(folder / f"{bench}.jsonl") as log:
            for one in BENCHES[bench](random.Random(seed)):
                log.write(one)
            if bench == "op":
                log.write(
                    Failure(bench="op", case="adaln dit-xl-256 bfloat16", provider="apex", reason="not installed: ")
                )
    return folder
