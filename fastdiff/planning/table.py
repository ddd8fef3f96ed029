"""The plan in words and numbers: a table of the best options, why others fall out, and the command that starts one."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastdiff import sanitize
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.durations import in_words
from fastdiff.planning.options import NAMES, Planned, Refused
from fastdiff.tables import table

_HEAD = ("GPUs", "ZeRO", "micro", "recompute", "moments", "GiB of a rank", "images/s", "low-high", "time", "kWh")
_IDLE = 0.75
"""Share of the board's power that a training draws. Assumed."""


def watts(planned: Planned) -> float:
    """Return the power of all GPUs, without their hosts."""
    return _IDLE * planned.option.gpus.count * planned.option.gpus.kind.watts


def figures(planned: Planned, samples: int, price: float | None) -> dict[str, Any]:
    """Return an option as plain numbers, in GiB, samples per second, days, kWh and the currency of the price.

    ``time`` is the middle of the days in words.
    """
    option, hours = planned.option, planned.hours(samples)
    assert planned.time is not None
    found: dict[str, Any] = {
        "gpus": option.gpus.name,
        "ranks": option.gpus.count,
        "zero_stage": option.stage,
        "micro": option.micro,
        "recompute": option.recompute,
        "stored_blocks": option.stored_blocks,
        "blocks": option.blocks,
        "optimizer": option.optimizer,
        "memory_gib": {name: size / 2**30 for name, size in asdict(planned.memory).items()},
        "peak_gib": planned.memory.peak / 2**30,
        "room_gib": planned.room / 2**30,
        "step_s": asdict(planned.time.whole),
        "images_per_s": asdict(planned.images_per_s),
        "limit": planned.time.limit,
        "days": asdict(hours * (1 / 24)),
        "time": in_words(3600 * hours.middle),
        "gpu_hours": planned.gpu_hours(samples),
        "mfu": planned.mfu,
        "kwh": watts(planned) * hours.middle / 1000,
        "basis": planned.basis.words,
    }
    if price is not None:
        found["price"] = price * planned.gpu_hours(samples)
    return found


def rows(best: Iterable[Planned], samples: int, price: float | None) -> Iterator[Sequence[str]]:
    """Yield the head and a row per option."""
    yield (*_HEAD, *(["price"] if price is not None else []))
    for planned in best:
        one = figures(planned, samples, price)
        rate = one["images_per_s"]
        yield (
            one["gpus"],
            str(one["zero_stage"]),
            str(one["micro"]),
            planned.option.recomputes,
            f"{planned.option.bits}-bit",
            f"{one['peak_gib']:.1f}/{one['room_gib']:.1f}",
            _round(rate["middle"]),
            f"{_round(rate['low'])}-{_round(rate['high'])}",
            one["time"],
            _round(one["kwh"]),
            *([_round(one["price"])] if price is not None else []),
        )


def text(
    heading: str,
    best: Sequence[Planned],
    refused: Sequence[Refused],
    samples: int,
    price: float | None,
    launch: Launch,
    reports: Sequence[str] = (),
    room: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a plan.

    Args:
        heading: the run in words.
        best: options, the fastest first.
        refused: why others fall out.
        samples: of the run.
        price: per GPU and hour, or None.
        launch: command line of the run.
        reports: the cost of the run as its authors report it.
        room: columns of the terminal, if it is one.
    """
    yield heading
    if best:
        yield ""
        yield table(list(rows(best, samples, price)), room=room)
    if refused:
        yield ""
        yield "not possible:"
        for one in refused:
            options = f"{one.options} options " if one.options > 1 else ""
            yield f"  {one.gpus.name}: {options}{one.reason}"
    if reports:
        yield ""
        yield from reports
    yield ""
    if not best:
        remedy = "give more or larger GPUs by --gpus, or a smaller network"
        memory = any(one.lacks_memory for one in refused)
        yield f"no option fits; {remedy}" if memory else "no option is possible; change what the reasons name"
        return
    yield "the fastest starts with:"
    yield f"  {command(best[0], launch)}"
    bases = dict.fromkeys(planned.basis.words for planned in best)
    yield f"times rest on {'; '.join(bases)}; a power of {_IDLE:.0%} of the boards' is assumed"


def command(planned: Planned, launch: Launch) -> str:
    """Return the command that starts an option, without the credentials of addresses."""
    option = planned.option
    gpus = option.gpus
    given = _without(launch.argv, ("--batch.micro", "--optim.name"))
    flags = [*map(sanitize.argument, given), "--batch.micro", str(option.micro)]
    if option.optimizer != RunConfig().optim.name or launch.gives("--optim.name"):
        flags += ["--optim.name", option.optimizer]
    if launch.deepspeed is None:
        flags += ["--deepspeed_config", NAMES[option.stage]]
    if option.recompute and "--performance.recompute" not in flags:
        flags.append("--performance.recompute")
    if option.stored_blocks and not launch.gives("--performance.stored_blocks"):
        flags += ["--performance.stored_blocks", str(option.stored_blocks)]
    if gpus.nodes == 1:
        return shlex.join(["fastdiff", "train", "--ranks", str(gpus.count), *flags])
    size = ["--nodes", str(gpus.nodes), "--ranks-per-node", str(gpus.per_node)]
    return shlex.join(["fastdiff", "launch", "slurm", *size, "--", *flags])


def _without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the arguments of a run without some flags of one value."""
    kept: list[str] = []
    skips = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if skips:
            skips = False
        elif name in flags:
            skips = not equals
        else:
            kept.append(argument)
    return kept


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
