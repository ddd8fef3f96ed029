"""The targets of speed on one H200, and a page that says which of them the records of a folder meet.

``python -m fastdiff_bench.records.targets FOLDER`` prints the page; ``bench/gpu.sh`` writes it to ``FOLDER/README.md``.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastdiff_bench import BenchError
from fastdiff_bench.records import record
from fastdiff_bench.records.number_format import interval, machine, number
from fastdiff_bench.records.record import Measurement, Record

DIT, SD2 = "dit-xl-2-256, 4x32x32", "sd2-512, 4x64x64"
_COMPILED = r"fastdiff zero1"
_EAGER = r"fastdiff zero1 eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure, its target, and how a record has it."""

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
    in_every_case: bool = False
    """The worst case counts; otherwise the best."""
    basis: str = ""
    """Where the target comes from, or a published figure to compare with."""

    def __post_init__(self) -> None:
        assert self.least is None or self.most is None

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

    def verdict(self, value: float) -> Literal["met", "missed", ""]:
        """Compare a value with the target; empty if there is none."""
        if self.least is None and self.most is None:
            return ""
        reached = value >= self.least if self.least is not None else value <= (self.most or 0.0)
        return "met" if reached else "missed"

    @property
    def bound(self) -> str:
        """The target in words."""
        if self.least is not None:
            return f"at least {number(self.least)}"
        return "" if self.most is None else f"at most {number(self.most)}"


def _step(name: str, part: str, case: str, least: float, mfu: float, basis: str) -> Iterator[Target]:
    """Yield the targets of a preset's training step on one GPU."""
    case, group = f"^{case}, batch .*bf16", "step"

    def target(
        what: str, quantity: str, *, least: float | None = None, most: float | None = None, in_every_case: bool = False
    ) -> Target:
        return Target(
            what=f"{name}: {what}", part=part, bench=group, quantity=quantity, case=case, provider=_COMPILED,
            basis=basis if quantity == "throughput" else "", least=least, most=most,
            in_every_case=in_every_case,
        )  # fmt: skip

    yield target("images per second", "throughput", least=least)
    yield target("MFU of 989 TFLOP/s", "mfu", least=mfu)
    yield target("graph breaks", "graph breaks in code", most=0, in_every_case=True)
    yield target("step", "step time")
    yield target("waiting for data in a step", "phase data", most=1)
    yield target("peak memory", "peak allocated")
    yield Target(
        what=f"{name}, eager: images per second", part=f"{part}-eager", bench=group, quantity="throughput", case=case,
        provider=_EAGER, basis="compiled should be 1.1 to 1.4 times as fast",
    )  # fmt: skip
    yield Target(
        what=f"{name}: largest batch without recomputation", part=part.replace("step", "largest"), bench=group,
        quantity="largest batch", case=case.replace("batch .*", "any batch.*"), provider=_COMPILED,
        least=350 if case.startswith("^dit") else 110, basis="139 GiB by saved activations",
    )  # fmt: skip


def _op(op: str, case: str, what: str, quantity: str, provider: str, **rest: object) -> Target:
    full = {"what": what, "part": f"op-{op}", "bench": "op", "quantity": quantity, "case": f"^{op} {case}"}
    return Target(provider=provider, **full, **rest)  # type: ignore[arg-type]


_COPY = "4.3 TB/s is the copy bandwidth"
TARGETS: tuple[Target, ...] = (
    *_step("DiT-XL/2, 256 px", "step-dit", DIT, 700, 0.45, "best published: 285 on an H800 (LightningDiT)"),
    *_step("SD 2, 512 px", "step-sd2", SD2, 200, 0.40, "best published: 129 (MLPerf v4.0, H200, fp16)"),
    *(
        _op("group_norm", rf"320x64x64-nhwc bfloat16 {way}", f"GroupNorm + SiLU, {way}", "bandwidth", "triton",
            least=3600, basis=_COPY)
        for way in ("forward", "backward")
    ),
    *(
        _op("group_norm", rf"320x64x64-nhwc bfloat16 {way}", f"GroupNorm + SiLU, {way}, over torch.compile",
            "over compile", "triton", least=1.5, basis="Inductor: 6.2 and 18.1 bytes per element, the kernel: 6 and 10")
        for way in ("forward", "backward")
    ),
    _op("adaln", r"DiT-XL\S* bfloat16 backward", "adaLN, backward, over torch.compile", "over compile", "triton",
        least=1.3, in_every_case=True, basis="6 instead of 10 bytes per element"),
    _op("adaln", r"DiT-XL\S* bfloat16 backward", "adaLN, backward, share of copying", "of copy", "triton", least=0.8,
        in_every_case=True),
    _op("adamw8bit", r".*forward", "8-bit AdamW, share of copying", "of copy", "triton", least=0.8, in_every_case=True,
        basis="16 bytes per parameter"),
    _op("adamw8bit", r".*forward", "8-bit AdamW", "time", "triton"),
    _op("adamw8bit", r".*forward", "8-bit AdamW of bitsandbytes", "time", "bitsandbytes"),
    _op("noising", r".*forward", "noise-add, over torch.compile", "over compile", "triton", least=1,
        in_every_case=True),
    _op("loss", r".*forward", "loss, over torch.compile", "over compile", "triton", least=1, in_every_case=True),
    *(
        _op("attention", rf"{shape}\S* bfloat16 {way}", f"attention, {name}, {way}", "rate",
            "auto|cudnn|flash|sdpa", least=least, basis="useful operations; head dims of 40 and 72 are padded inside")
        for shape, name, bounds in (
            ("dit-xl-16x256x72", "256 tokens, head dim 72", (230, 160)),
            ("sd2-5x4096x64-self", "4,096 tokens, head dim 64", (400, 300)),
            ("sd15-8x4096x40-self", "4,096 tokens, head dim 40", (200, 130)),
        )
        for way, least in zip(("forward", "backward"), bounds, strict=True)
    ),
    *(
        Target(
            what=f"times as fast as {name}", part=part, bench="peer", quantity="speed-up", case=f"^{case}",
            provider=rf"fastdiff.* over {peer}, best flags", least=1, basis="with their best flags",
        )
        for name, part, case, peer in (
            ("DiT's trainer", "peer-dit", "dit-xl-2-256", "dit"),
            ("a plain loop", "peer-plain", "dit-s-2-256", "plain"),
            ("diffusers' trainer", "peer-diffusers", "sd2-512", "diffusers"),
        )
    ),
    Target(what="shards read, samples per second", part="data", bench="data", quantity="throughput",
         case=r"151 KB.*warm",
         provider="fastdiff (reader|prefetch)", least=7000, basis="ten times what DiT-XL/2 takes"),
    Target(what="step beside a save over step", part="checkpoint", bench="checkpoint",
         quantity="step time beside a save / step time", case=r"^dit-xl-2-256", provider="fastdiff.*", most=1.05),
)  # fmt: skip
"""In the order of ``bench/gpu.sh``."""


def page(folder: Path) -> str:
    """Return the page about the records of a folder, in Markdown."""
    records, damaged = _readable(folder)
    measurements = [m for one in records for m in one.measurements]
    rows = [_row(target, target.of(measurements)) for target in TARGETS]
    met, missed = (sum(row[4] == verdict for row in rows) for verdict in ("met", "missed"))
    lines = [
        "# One GPU against the targets",
        "",
        *dict.fromkeys(f"{machine(one.fingerprint)}, {one.fingerprint.date[:10]}.  " for one in records),
        f"{met} of {met + missed} measured targets are met; {sum(not row[2] for row in rows)} are not measured.",
        "",
        *_table([("figure", "target", "measured", "p20 to p80", "", "case or missing part", "basis"), *rows]),
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


def _row(target: Target, found: Measurement | None) -> tuple[str, ...]:
    if found is None:
        return (target.what, target.bound, "", "", "", f"`bash bench/gpu.sh {target.part}`", target.basis)
    where = f"{found.case}; {found.provider}"
    return (target.what, target.bound, _value(found), interval(found), target.verdict(found.value), where, target.basis)


def _value(found: Measurement) -> str:
    return number(found.value) if found.unit == "1" else f"{number(found.value)} {found.unit}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    head, *rest = rows
    yield f"| {' | '.join(head)} |"
    yield "| --- | ---: | ---: | ---: | --- | --- | --- |"
    for row in rest:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
