"""Prediction of ``bench scale``: step time and efficiency on many GPUs, from a step on one.

The step is the slower of host and device (``estimate``); every prediction has a low and a high bound beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdiff.errors import ConfigError
from fastdiff.planning.scaling.communication import Cluster, Compute, Link, Message, sent
from fastdiff.planning.scaling.estimate import Estimate, estimate
from fastdiff.planning.scaling.host import SPEEDS, Host
from fastdiff.planning.scaling.zero import Zero, parameters_of, width_of
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import open_log
from fastdiff_bench.measure.session import Fact
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.scaling import host

_LINKS = {
    # Data sheets: NVLink 4 has 450 GB/s per direction, a ConnectX-7 per GPU 400 Gbit/s; collectives reach about 80 %.
    # The latencies have the order of one hop of NCCL's ring.
    "h200": Cluster(8, Link(3e-6, 0.8 * 450e9), Link(8e-6, 0.8 * 50e9)),
    # The same nodes with one 100 Gbit/s Ethernet card, shared by 8 GPUs.
    "h200-ethernet": Cluster(8, Link(3e-6, 0.8 * 450e9), Link(30e-6, 0.8 * 12.5e9 / 8)),
}
_PER_TENSOR = 675_129_632 / 292
"""Elements per parameter tensor of DiT-XL/2."""
_GPUS = tuple(2**power for power in range(11))

FLAGS = (
    "parameters", "gpus", "links", "gpus_per_node", "inside_gb_s", "inside_us", "between_gb_s", "between_us",
    "no_overlap", "tensors", "host_record",
)  # fmt: skip
"""Flags of a prediction."""


@dataclass(frozen=True, slots=True)
class Source:
    """A step on one GPU."""

    case: str
    deepspeed: str | None
    """DeepSpeed JSON of the measurement; None: unknown."""
    seconds: float
    phases: Mapping[str, float]
    """Seconds by name, which sum to the step; or empty."""
    parameters: tuple[int, ...]
    """Elements of each parameter, or of equal pieces of all of them."""
    tensors: int
    """Number of parameter tensors."""
    precision: str
    device: str
    """Name of the GPU, ``cpu`` or ``unknown``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a prediction; the first two disable the measurement."""
    flags = parser.add_argument_group("prediction from a measured step, instead of a measurement")
    flags.add_argument("--from", dest="source", type=Path, metavar="RECORD", help="record of `bench step` on one GPU")
    flags.add_argument("--step-ms", type=float, metavar="MS", help="time of a step on one GPU, with --parameters")
    flags.add_argument("--parameters", type=int, metavar="N", help="parameters of the model, for --step-ms")
    flags.add_argument(
        "--tensors", type=int, metavar="N", help="its parameter tensors; default: as many as in DiT-XL/2"
    )
    flags.add_argument("--gpus", nargs="+", type=int, metavar="W", help="numbers of GPUs; default: 1 2 4 ... 1024")
    flags.add_argument("--links", choices=_LINKS, help="defaults of the next five flags (default: h200)")
    flags.add_argument("--gpus-per-node", type=int, metavar="N")
    flags.add_argument("--inside-gb-s", type=float, metavar="X", help="bandwidth per GPU and direction within a node")
    flags.add_argument("--inside-us", type=float, metavar="X", help="per message")
    flags.add_argument("--between-gb-s", type=float, metavar="X", help="bandwidth per GPU and direction between nodes")
    flags.add_argument("--between-us", type=float, metavar="X", help="per message")
    flags.add_argument(
        "--host-record", type=Path, metavar="RECORD", help="record of --host; default: that of this repository"
    )
    flags.add_argument("--no-overlap", action="store_true", help="communication does not overlap computation")


def wanted(arguments: argparse.Namespace) -> bool:
    """Return whether a prediction is requested."""
    return arguments.source is not None or arguments.step_ms is not None


def run(arguments: argparse.Namespace, provider: Callable[[str], str]) -> int:
    """Predict, print and record.

    Raises:
        BenchError: a flag is missing, or the record does not hold steps on one GPU.
    """
    measured = ["preset", "batch", "ranks", "device", "host"]
    refuse(arguments, measured, "with --from or --step-ms, because nothing is measured")
    if arguments.source is not None:
        refuse(
            arguments, ["step_ms", "parameters", "tensors", "precision"], "with --from, because the record contains it"
        )
    cluster = _cluster(arguments)
    sources = _from_flags(arguments) if arguments.source is None else _from_record(arguments.source)
    with open_log(arguments, "scale", "scale-prediction") as log:
        for source in sources:
            _predict(source, cluster, arguments, provider, log)
        print(f"record: {log.path}")
    return 0


def refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse flags that would have no effect.

    Raises:
        BenchError: one of them is given.
    """
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise BenchError(f"--{name.replace('_', '-')} has no effect {why}; leave it out")


def _cluster(arguments: argparse.Namespace) -> Cluster:
    base = _LINKS[arguments.links or "h200"]

    def link(name: str, base: Link) -> Link:
        us, rate = getattr(arguments, f"{name}_us"), getattr(arguments, f"{name}_gb_s")
        found = Link(base.latency if us is None else 1e-6 * us, base.bandwidth if rate is None else 1e9 * rate)
        if not (0 <= found.latency < math.inf and 0 < found.bandwidth < math.inf):
            raise BenchError(
                f"--{name}-us {us}, --{name}-gb-s {rate}: expected a latency of at least 0 and a rate above 0"
            )
        return found

    per_node = base.per_node if arguments.gpus_per_node is None else arguments.gpus_per_node
    bad = [gpus for gpus in arguments.gpus or () if gpus < 1 or (per_node > 0 and gpus > per_node and gpus % per_node)]
    if per_node < 1 or bad:
        raise BenchError(f"--gpus {bad or ''}, {per_node} per node: expected at most one node, or whole nodes")
    return Cluster(per_node, link("inside", base.inside), link("between", base.between))


def _from_flags(arguments: argparse.Namespace) -> list[Source]:
    if arguments.parameters is None or arguments.parameters < 1 or not 0 < arguments.step_ms < math.inf:
        raise BenchError("--step-ms needs a time above 0 and --parameters, the number of the model's parameters")
    precision = arguments.precision or "bf16"
    case = f"{arguments.parameters} parameters, {arguments.step_ms:g} ms, {precision}"
    # Only the buckets depend on the sizes: parameters of a million elements fill them evenly.
    blocks, rest = divmod(arguments.parameters, 2**20)
    parameters = (2**20,) * blocks + ((rest,) if rest else ())
    tensors = arguments.tensors or max(1, round(arguments.parameters / _PER_TENSOR))
    return [Source(case, None, 1e-3 * arguments.step_ms, {}, parameters, tensors, precision, "unknown")]


def _from_record(path: Path) -> list[Source]:
    found: dict[tuple[str, str], Source] = {}
    for file in record.read_all(record.files(path)):
        times = [m for m in file.measurements if m.bench == "step" and m.quantity == "step time"]
        for row in times:
            same = [m for m in file.measurements if m.name[:3] == row.name[:3]]
            # Steps may have been measured on the CPU of a machine with a GPU.
            on_cpu = any(m.quantity == "peak resident" for m in same)
            source = _source(row, _phases(row, same), "cpu" if on_cpu else file.fingerprint.device)
            key = source.case, str(source.deepspeed)
            if key not in found or source.seconds < found[key].seconds:
                found[key] = source
    if not found:
        raise BenchError(f"{path}: no step time; expected a record of `fastdiff bench step`")
    return list(found.values())


def _phases(row: Measurement, same: Sequence[Measurement]) -> dict[str, float]:
    """Return seconds by name. Phases come from a slower process with marks, so they are scaled to ``row``."""
    found = {}
    for one in same:
        if one.quantity.startswith("phase "):
            marked = one.facts.get("marked_step_ms")
            if not isinstance(marked, int | float) or marked <= 0:
                raise BenchError(f"{row.case}, {row.provider}: the record lacks marked_step_ms; measure again")
            found[one.quantity.removeprefix("phase ")] = 1e-3 * one.value * row.value / marked
    return found


def _source(row: Measurement, phases: Mapping[str, float], device: str) -> Source:
    facts = row.facts
    missing = {"preset", "precision", "deepspeed", "parameters"} - facts.keys()
    if missing:
        raise BenchError(f"{row.case}, {row.provider}: the record lacks {', '.join(sorted(missing))}")
    if facts.get("micro") not in (None, facts.get("batch")):
        raise BenchError(f"{row.case}: expected steps of one micro-batch; measure again without --micro")
    workload = Workload(preset=str(facts["preset"]), precision=str(facts["precision"]))
    parameters = tuple(parameters_of(workload.config(Path(), Path()).model))
    if sum(parameters) != facts["parameters"]:
        raise BenchError(
            f"{row.case}: {facts['parameters']} of {sum(parameters)} parameters are trained; expected a run that "
            "trains all of them"
        )
    deepspeed, precision = str(facts["deepspeed"]), str(facts["precision"])
    return Source(row.case, deepspeed, 1e-3 * row.value, phases, parameters, len(parameters), precision, device)


def _predict(
    source: Source, cluster: Cluster, arguments: argparse.Namespace, provider: Callable[[str], str], log: Log
) -> None:
    """Print one table of the assumptions and one of step time and efficiency, and record them."""
    stages = [stage for stage in arguments.stages if source.deepspeed in (None, Path(stage).stem)] or arguments.stages
    columns = ("ms", "low to high", "eff.", "limit", "GiB sent")
    rows = [["predicted", *(f"{provider(s)} {column}" for s in stages for column in columns)]]
    zeros = {stage: Zero.of(Workload(preset="digits", deepspeed=stage).deepspeed_json()) for stage in stages}
    for stage, zero in zeros.items():
        if zero.offload and source.deepspeed not in (None, Path(stage).stem):
            raise BenchError(
                f"{stage} runs the optimizer on the host: expected a record of steps measured with it, not "
                f"with {source.deepspeed}"
            )
    facts = _assumptions(source, cluster, {provider(s): zero for s, zero in zeros.items()}, arguments)
    if source.device == "cpu":
        print(f"\nwarning: {source.case} was measured on a CPU, which does not predict a cluster of GPUs")
    print(f"\n{table([['assumption', source.case], *([name, str(value)] for name, value in facts.items())], '<<')}\n")
    hosts = host.read(arguments.host_record or host.RECORD) if source.device != "cpu" else {}
    least_speed = _least_speed(source, hosts)
    for gpus in arguments.gpus or _GPUS:
        cells = []
        for stage, zero in zeros.items():
            messages = zero.messages(source.parameters, width_of(source.precision), gpus, width_of("fp32"))
            found = _estimate(source, zero, cluster, gpus, hosts, least_speed, overlap=not arguments.no_overlap)
            volume = sum(sent(message.kind, message.bytes, gpus) for message in messages) / 2**30
            cells += [*_cells(source, found), f"{volume:.3f}"]
            more: dict[str, Fact] = {"gpus": gpus, "stage": zero.stage, "sent GiB": volume}
            for row in _measurements(source, found, f"{provider(stage)}, {gpus} GPUs", {**facts, **more}):
                log.write(row)
        rows.append([f"{gpus} GPUs", *cells])
    print(table(rows, "<" + ">" * (len(rows[0]) - 1)))
    print("Stages whose ranges overlap: the model cannot tell which is faster.")


def _least_speed(source: Source, hosts: Mapping[int, Host]) -> float:
    """Return how many times faster than that of ``hosts`` the processor is at least: a measured step has its host."""
    if source.deepspeed is None or not hosts:
        return 0.0
    try:
        stage = Zero.of(Workload(preset="digits", deepspeed=source.deepspeed).deepspeed_json()).stage
    except (BenchError, ConfigError):  # a file that is not here; no stage has a shorter host time than the shortest
        return min(found.seconds(source.tensors) for found in hosts.values()) / source.seconds
    return hosts[stage].seconds(source.tensors) / source.seconds if stage in hosts else 0.0


def _estimate(
    source: Source, zero: Zero, cluster: Cluster, gpus: int, hosts: Mapping[int, Host], least_speed: float, *,
    overlap: bool,
) -> Estimate:  # fmt: skip
    messages = zero.messages(source.parameters, width_of(source.precision), gpus, width_of("fp32"))
    return estimate(
        Compute.of(source.seconds, source.phases, zero.shards),
        messages,
        _cost(cluster, gpus),
        gpus,
        overlap=overlap,
        copied=None if source.deepspeed is not None else (zero.stage, sum(source.parameters)),
        host=(hosts[zero.stage], source.tensors) if zero.stage in hosts else None,
        least_speed=least_speed,
    )


def _cells(source: Source, found: Estimate) -> list[str]:
    step = found.step
    spread = f"{1e3 * step.low:.2f} to {1e3 * step.high:.2f}"
    return [f"{1e3 * step.middle:.2f}", spread, f"{100 * source.seconds / step.middle:.1f} %", found.limit]


def _measurements(source: Source, found: Estimate, provider: str, facts: dict[str, Fact]) -> Iterator[Measurement]:
    step, one = found.step, source.seconds
    facts = {**facts, "limit": found.limit, "device, ms": 1e3 * found.device.middle}
    facts["host, ms"] = None if found.host is None else 1e3 * found.host.middle
    for quantity, unit, value, low, high in (
        ("predicted step time", "ms", 1e3 * step.middle, 1e3 * step.low, 1e3 * step.high),
        ("predicted efficiency", "1", one / step.middle, one / step.high, one / step.low),
    ):
        yield Measurement(
            bench="scale", case=source.case, provider=provider, quantity=quantity, unit=unit, value=value,
            better="neither", facts={**facts, "low": low, "high": high},
        )  # fmt: skip


def _cost(cluster: Cluster, gpus: int) -> Callable[[Message], float]:
    return lambda message: cluster.seconds(message.kind, message.bytes, gpus)


def _assumptions(
    source: Source, cluster: Cluster, zeros: Mapping[str, Zero], arguments: argparse.Namespace
) -> dict[str, Fact]:
    known = "backward" in source.phases
    sharded = "; ".join(f"{name}: {', '.join(zero.shards)}" for name, zero in zeros.items())
    beside = [name for name, zero in zeros.items() if zero.overlap and not arguments.no_overlap]
    return {
        "device": source.device,
        "step of one GPU": f"{1e3 * source.seconds:.3f} ms",
        "measured with": source.deepspeed or "unknown",
        "passes": "as measured, as shares of the step" if known else "one third forward, two thirds backward",
        "sharded over the ranks": f"{sharded}; saves time, which may put the efficiency above 100 %"
        if known
        else "none",
        "weak scaling": "the same samples per GPU, one micro-batch per step, no GPU waits for another or for data",
        "parameters": sum(source.parameters),
        "bytes per element": f"{width_of(source.precision)}, of gradients {width_of('fp32')}",
        "GPUs per node": cluster.per_node,
        "inside, GB/s": cluster.inside.bandwidth / 1e9,
        "inside, us per message": 1e6 * cluster.inside.latency,
        "between, GB/s per GPU": cluster.between.bandwidth / 1e9,
        "between, us per message": 1e6 * cluster.between.latency,
        "parameter tensors": source.tensors,
        "host": "none, the steps are of a CPU"
        if source.device == "cpu"
        else "processor time of a step by stage as measured with eager blocks, divided by "
        f"{SPEEDS[0]}, {SPEEDS[1]}, {SPEEDS[2]} for a faster processor (assumed)"
        + ("; at most the measured step at its stage, others in proportion" if source.deepspeed else ""),
        "engine": "flat at stage 0, DeepSpeed with fastdiff's shortened step at the others",
        "copies of the step": "as measured" if source.deepspeed else "bytes per parameter of the stage, less 38",
        "NCCL": "takes 16, 24 or 32 of 132 SMs from the passes that it overlaps",
        "algorithm": "within the node and between nodes one after the other; rings, or two trees between nodes",
        "overlap": f"{', '.join(beside)}: buckets beside the backward pass, gathers beside the pass that needs them"
        if beside
        else "none",
    }
