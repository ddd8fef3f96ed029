"""The targets of speed on one H200 or H100 of 80 GB, and a page that says which of them the records of a folder meet.

``python -m fastdiff_bench.records.targets FOLDER`` prints the page; ``bench/gpu.sh`` writes it to ``FOLDER/README.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastdiff_bench import BenchError
from fastdiff_bench.records import record
from fastdiff_bench.records.number_format import interval, machine, number
from fastdiff_bench.records.record import Measurement, Record

DIT, SD2 = "dit-xl-2-256, 4x32x32", "sd2-512, 4x64x64"
_FLAT = "fastdiff ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure, its target on an H200, and how a record has it."""

    what: str
    part: str
    """Part of ``bench/gpu.sh`` that measures it."""
    bench: str
    quantity: str
    case: str
    """Regular expression, found in the case."""
    provider: str
    """Regular expression of the whole provider."""
    least: float | None = None
    most: float | None = None
    """Bounds; neither: the figure is wanted, and has no target."""
    on_h100: float | None = None
    """The bound on an H100 of 80 GB; None: the same."""
    in_every_case: bool = False
    """The worst case counts; otherwise the best."""
    basis: str = ""
    """Where the target comes from, or a published figure to compare with."""

    def __post_init__(self) -> None:
        assert self.least is None or self.most is None
        assert self.on_h100 is None or self.bounded

    def of(self, measurements: Sequence[Measurement]) -> Measurement | None:
        """Return the measurement that counts; None: there is none."""
        found = [
            m
            for m in measurements
            if (m.bench, m.quantity) == (self.bench, self.quantity)
            and re.search(self.case, m.case)
            and re.fullmatch(self.provider, m.provider)
        ]
        highest = found and (found[0].better == "lower") == self.in_every_case
        return (max if highest else min)(found, key=lambda m: m.value, default=None)

    @property
    def bounded(self) -> bool:
        """Whether there is a target."""
        return self.least is not None or self.most is not None

    def on(self, device: str) -> Target:
        """Return the target as it is on this GPU."""
        if self.on_h100 is None or "H100" not in device:
            return self
        if self.least is not None:
            return replace(self, on_h100=None, least=self.on_h100)
        return replace(self, on_h100=None, most=self.on_h100)

    def verdict(self, value: float) -> Literal["met", "missed", ""]:
        """Compare a value with the target; empty if there is none."""
        if not self.bounded:
            return ""
        reached = value >= self.least if self.least is not None else value <= (self.most or 0.0)
        return "met" if reached else "missed"

    @property
    def bound(self) -> str:
        """The target in words."""
        if self.least is not None:
            return f"at least {number(self.least)}"
        return "" if self.most is None else f"at most {number(self.most)}"


_BASES = {DIT: "best published: 285 on an H800 (LightningDiT)", SD2: "best published: 129 (MLPerf v4.0, H200, fp16)"}
_NAMES = {DIT: "DiT-XL/2, 256 px", SD2: "SD 2, 512 px"}


def _of_step(
    part: str, network: str, what: str, quantity: str, batch: str = ".*", provider: str = _FLAT, **rest: Any
) -> Target:
    return Target(
        what=f"{_NAMES[network]}{what}", part=part, bench="step", quantity=quantity,
        case=f"^{network}, batch {batch}, bf16", provider=provider, **rest,
    )  # fmt: skip


def _step(part: str, network: str, rate: tuple[float, float], mfu: tuple[float, float]) -> Iterator[Target]:
    """Yield the targets of a preset's training step; ``rate`` and ``mfu`` are bounds on an H200 and an H100."""
    of = partial(_of_step, part, network)
    yield of(": images per second", "throughput", least=rate[0], on_h100=rate[1], basis=_BASES[network])
    yield of(": MFU of 989 TFLOP/s", "mfu", least=mfu[0], on_h100=mfu[1])
    yield of(": graph breaks", "graph breaks in code", most=0, in_every_case=True)
    yield of(": step", "step time")
    yield of(": waiting for data in a step", "phase data", most=1)
    yield of(": idle share of a traced step", "traced idle share")
    yield of(": peak memory", "peak allocated")


def _op(op: str, case: str, what: str, quantity: str, provider: str, **rest: object) -> Target:
    full = {"what": what, "part": f"op-{op}", "bench": "op", "quantity": quantity, "case": f"^{op} {case}"}
    return Target(provider=provider, **full, **rest)  # type: ignore[arg-type]


_COPY = "4.3 TB/s is the copy bandwidth"
TARGETS: tuple[Target, ...] = (
    *_step("step-dit", DIT, (670, 620), (0.48, 0.445)),
    _of_step("step-dit-zero1", DIT, ", ZeRO-1: images per second", "throughput", provider="fastdiff zero1"),
    _of_step("step-dit-short", DIT, ", short attention: images per second", "throughput",
        provider=f"{_FLAT} attention=short"),
    _of_step("step-dit-graph", DIT, ", CUDA graph: images per second", "throughput", provider=f"{_FLAT} graph"),
    _of_step("step-dit-fp8", DIT, ", FP8: images per second", "throughput", provider=f"{_FLAT} fp8", least=800,
        on_h100=740, basis="products in FP8 at 1.6 times the rate of bf16"),
    _of_step("step-dit-fp8-wgrad", DIT, ", FP8 with dW in bf16: images per second", "throughput",
        provider=f"{_FLAT} fp8 dW in bf16"),
    *_step("step-sd2", SD2, (150, 135), (0.36, 0.33)),
    *(
        Target(
            what=f"times as fast as {name}", part=part, bench="peer", quantity="speed-up", case=f"^{case}",
            provider=rf"fastdiff.* over {peer}, best flags", least=1.1, basis="with their best flags",
        )
        for name, part, case, peer in (
            ("DiT's trainer", "peer-dit", "dit-xl-2-256", "dit"),
            ("a plain loop", "peer-plain", "dit-s-2-256", "plain"),
            ("diffusers' trainer", "peer-diffusers", "sd2-512", "diffusers"),
        )
    ),
    _op("adaln", r"DiT-XL-gated\S* bfloat16 forward", "adaLN, forward, share of copying", "of copy", "triton",
        least=0.8),
    _op("adaln", r"DiT-XL\S* bfloat16 backward", "adaLN, backward, share of copying", "of copy", "triton", least=0.75,
        in_every_case=True),
    _op("adaln", r"DiT-XL\S* bfloat16 backward", "adaLN, backward, over torch.compile", "over compile", "triton",
        least=1.3, in_every_case=True, basis="6 instead of 10 bytes per element"),
    *(
        _op("attention", rf"{shape}\S* bfloat16 {way}", f"attention, {name}, {way}", "rate",
            "auto|short|cudnn|flash|sdpa", least=least,
            basis="useful operations; head dims of 40 and 72 are padded inside")
        for shape, name, bounds in (
            ("dit-xl-16x256x72", "256 tokens, head dim 72", (230, 160)),
            ("sd2-5x4096x64-self", "4,096 tokens, head dim 64", (400, 300)),
            ("sd15-8x4096x40-self", "4,096 tokens, head dim 40", (200, 130)),
        )
        for way, least in zip(("forward", "backward"), bounds, strict=True)
    ),
    _op("gelu", r"DiT-XL bfloat16 backward", "GELU, backward, share of copying", "of copy", "triton", least=0.85),
    _op("geglu", r"SD2-4096x320 bfloat16 backward", "GEGLU, backward, share of copying", "of copy", "triton"),
    *(
        _op("group_norm", rf"320x64x64-nhwc bfloat16 {way}", f"GroupNorm + SiLU, {way}, {what}", quantity, "triton",
            least=least, basis=basis)
        for what, quantity, least, basis in (
            ("share of copying", "of copy", 0.8, ""),
            ("over torch.compile", "over compile", 1.5,
                "Inductor: 6.2 and 18.1 bytes per element, the kernel: 6 and 10"),
        )
        for way in ("forward", "backward")
    ),
    _op("adamw8bit", r".*forward", "8-bit AdamW, share of copying", "of copy", "triton", least=0.8, in_every_case=True,
        basis="16 bytes per parameter"),
    _op("adamw8bit", r".*forward", "8-bit AdamW", "time", "triton"),
    _op("adamw8bit", r".*forward", "8-bit AdamW of bitsandbytes", "time", "bitsandbytes"),
    _op("adamw", r".*copy-ema\S* \S+ forward", "AdamW, share of copying", "of copy", "triton", least=0.9),
    _op("noising", r".*forward", "noise-add, over torch.compile", "over compile", "triton", least=1,
        in_every_case=True),
    _op("loss", r".*forward", "loss, over torch.compile", "over compile", "triton", least=1, in_every_case=True),
    _of_step("step-dit-32", DIT, ", 32 images: images per second", "throughput", "32", f"{_FLAT}( graph)?", least=570,
        on_h100=530, basis="0.9 of what a large batch gives"),
    _of_step("step-dit-deterministic", DIT, ", deterministic: images per second", "throughput",
        provider=f"{_FLAT} deterministic", least=600, on_h100=555, basis="0.9 of what the default gives"),
    _of_step("start-warm", DIT, ", compiled code at hand: seconds until the first step", "start", "64",
        f"{_FLAT} compiled", most=25),
    _of_step("start-warm", DIT, ", compiled code at hand: parts of graphs compiled", "parts of graphs compiled", "64",
        f"{_FLAT} compiled", most=0),
    Target(what="step beside a save over step", part="checkpoint", bench="checkpoint",
         quantity="step time beside a save / step time", case=r"^dit-xl-2-256", provider="fastdiff.*", most=1.05),
)  # fmt: skip
"""In the order of ``bench/gpu.sh``."""


def page(folder: Path) -> str:
    """Return the page about the records of a folder, in Markdown."""
    records, damaged = _readable(folder)
    measurements = [m for one in records for m in one.measurements]
    device = records[0].fingerprint.device if records else ""
    rows = [_row(target, target.of(measurements), device) for target in TARGETS]
    met, missed = (sum(row[5] == verdict for row in rows) for verdict in ("met", "missed"))
    lines = [
        "# One GPU against the targets",
        "",
        *dict.fromkeys(f"{machine(one.fingerprint)}, {one.fingerprint.date[:10]}.  " for one in records),
        f"{met} of {met + missed} measured targets are met; {sum(not row[3] for row in rows)} are not measured.",
        "",
        *_table(
            [("figure", "target", "on an H100", "measured", "p20 to p80", "", "case or missing part", "basis"), *rows]
        ),
    ]
    failures = [f for one in records for f in one.failures]
    if failures or damaged:
        lines += ["", "## What failed", ""]
        lines += [f"- {f.bench}, {f.case}, {f.provider}: {' '.join(f.reason.split())[:300]}" for f in failures]
        lines += [f"- {text}" for text in damaged]
    summary = folder / "summary.txt"
    if summary.is_file():
        lines += ["", "## Parts", "", "```", *summary.read_text().splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _readable(folder: Path) -> tuple[list[Record], list[str]]:
    """Return the records of a folder, by date, and what is wrong with the others: a part may have been cut."""
    found, damaged = [], []
    for file in sorted(folder.glob("**/*.jsonl")):
        try:
            found.append(record.read(file))
        except BenchError as error:
            damaged.append(str(error))
    return sorted(found, key=lambda one: one.fingerprint.date), damaged


def _row(target: Target, found: Measurement | None, device: str) -> tuple[str, ...]:
    bounds = (target.what, target.bound, target.on("H100").bound)
    if found is None:
        return (*bounds, "", "", "", f"`bash bench/gpu.sh {target.part}`", target.basis)
    verdict, where = target.on(device).verdict(found.value), f"{found.case}; {found.provider}"
    return (*bounds, _value(found), interval(found), verdict, where, target.basis)


def _value(found: Measurement) -> str:
    return number(found.value) if found.unit == "1" else f"{number(found.value)} {found.unit}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    head, *rest = rows
    yield f"| {' | '.join(head)} |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | --- | --- |"
    for row in rest:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
