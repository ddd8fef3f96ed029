"""GPUs that a run can be planned for, and sets of them as written on the command line: ``8xH100``, ``2x8xH100``."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded
from fastdiff.planning.rates import COPY
from fastdiff.planning.scaling.communication import Cluster, Link

_LARGEST = 1 << 20
"""Bytes of a file of GPUs."""
_REACHED = 0.8
"""Share of a link's data sheet that collectives reach."""
_HOP_S, _NETWORK_HOP_S = 3e-6, 8e-6
"""Seconds per message within and between nodes: the order of one hop of NCCL's ring."""
_MOST = 1 << 16
"""GPUs of one set."""
_OPTIONAL = "multiprocessors"
"""Figures that a GPU of a table may lack."""
_SET = re.compile(r"(?:(?:(\d{1,6})x)?(\d{1,6})x)?(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessors:
    """The multiprocessors (SM) of a GPU; the units of a file are in ``gpus.toml``."""

    capability: int
    """Compute capability: 90 is sm_90."""
    count: int
    shared_kib: int
    """Most shared memory of one program; a multiprocessor has 1 KiB more, and reserves 1 KiB per program."""
    l2_mib: int
    """Cache that all of them share."""
    clock: float
    """Hertz under load."""

    @property
    def issue(self) -> float:
        """Warp instructions per second under load: one per clock for each of four schedulers."""
        return 4 * self.count * self.clock

    @property
    def special(self) -> float:
        """Special functions per second under load, of single lanes: 16 per clock."""
        return 16 * self.count * self.clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU, by its data sheet; the units of a file are in ``gpus.toml``."""

    names: tuple[str, ...]
    """Parts of the name that the driver reports; the first is its name here."""
    memory_gib: float
    bandwidth: float
    """Bytes per second."""
    rates: dict[str, float]
    """Dense operations per second by dtype: fp32, tf32, bf16, fp16, fp8; without those that it lacks."""
    link: float
    """Bytes per second and direction to another GPU of the node."""
    per_node: int
    """GPUs of a usual node."""
    network: float
    """Bytes per second and direction to another node."""
    watts: float
    source: str
    multiprocessors: Multiprocessors | None = None
    """None: not in the table, so that counted kernels have no time there."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.names[0]

    @property
    def peak(self) -> float | None:
        """Dense operations per second in 16 bits, by which MFU is counted; None: the table has no such rate."""
        return self.rates.get("bf16", self.rates.get("fp16"))

    def mfu(self, flops_per_s: float) -> float | None:
        """Return the share of ``peak`` that the operations of one GPU take; None: there is no peak."""
        return flops_per_s / self.peak if self.peak else None

    @property
    def copy_rate(self) -> float:
        """Bytes per second of a large copy."""
        return COPY * self.bandwidth

    def known_multiprocessors(self) -> Multiprocessors:
        """Return its multiprocessors; ConfigError: they are not in the table."""
        if self.multiprocessors is None:
            raise ConfigError(f"{self.name}: no multiprocessors in the table of GPUs, expected them to count kernels")
        return self.multiprocessors


@dataclass(frozen=True, slots=True)
class Gpus:
    """Several GPUs of one kind."""

    kind: Gpu
    nodes: int
    per_node: int

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """As written on the command line."""
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.kind.name}"

    @property
    def cluster(self) -> Cluster:
        """Links between them."""
        inside = Link(_HOP_S, _REACHED * self.kind.link)
        return Cluster(self.per_node, inside, Link(_NETWORK_HOP_S, _REACHED * self.kind.network))


CPU = Gpu(
    names=("cpu",),
    memory_gib=float("inf"),
    bandwidth=3e10,
    rates={"fp32": 1.5e11, "bf16": 1.5e11, "fp16": 1.5e11, "tf32": 1.5e11},
    link=1e10,
    per_node=1 << 16,
    network=1e9,
    watts=100,
    source="none: only their ratio counts, a measurement scales them",
)
"""A CPU, which only a measurement can predict."""


@cache
def known() -> tuple[Gpu, ...]:
    """Return the GPUs of the package's table."""
    return _parse(Path(__file__).with_name("gpus.toml").read_text(), "gpus.toml")


def read(path: Path) -> tuple[Gpu, ...]:
    """Return the GPUs of a file like ``gpus.toml``, then the package's; ConfigError: unreadable, or no figures."""
    try:
        text = read_bounded(path, _LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--gpu-file {path}: not a readable file ({error})") from None
    return *_parse(text, f"--gpu-file {path}"), *known()


def of_device(name: str, among: Iterable[Gpu] | None = None) -> Gpu | None:
    """Return the GPU of a name that the driver reports; None if there is none.

    Args:
        name: for example ``NVIDIA H100 80GB HBM3``.
        among: the GPUs that are known; None: those of the package.
    """
    parts = ((part, gpu) for gpu in (among or known()) for part in gpu.names)
    # As a whole word: an L40 is no L4.
    found = [
        (len(part), gpu) for part, gpu in parts if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", name, re.IGNORECASE)
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def parse(text: str, among: Sequence[Gpu]) -> Gpus:
    """Return the GPUs that ``COUNTxNAME``, ``NODESxCOUNTxNAME`` or ``NAME`` names; ConfigError: no such GPU or count.

    A count beyond a usual node is spread over whole ones.
    """
    match = _SET.fullmatch(text)
    nodes, count, name = match.groups() if match else (None, None, text)
    kind = next((gpu for gpu in among if name.lower() in [part.lower() for part in gpu.names]), None)
    if kind is None:
        raise ConfigError(f"--gpus {text}: no GPU is called {name}; {_near(name, among)}")
    total = int(nodes or 1) * int(count or 1)
    if not 1 <= total <= _MOST:
        raise ConfigError(f"--gpus {text}: {total} GPUs, expected from 1 to {_MOST}, as in 8xH100 or 2x8xH100")
    if nodes is not None or total <= kind.per_node:
        return Gpus(kind, int(nodes or 1), int(count or 1))
    if total % kind.per_node:
        raise ConfigError(
            f"--gpus {text}: {total} fill no whole nodes of {kind.per_node}; write NODESxGPUSx{kind.name}, for example "
            f"{-(-total // kind.per_node)}x{kind.per_node}x{kind.name}"
        )
    return Gpus(kind, total // kind.per_node, kind.per_node)


def _near(name: str, among: Sequence[Gpu]) -> str:
    names = {part.lower(): part for gpu in among for part in gpu.names}
    near = [names[found] for found in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}known: {', '.join(gpu.name for gpu in among)}; others by --gpu-file"


def _parse(text: str, where: str) -> tuple[Gpu, ...]:
    try:
        rows = tomllib.loads(text).get("gpu", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML ({error})") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ConfigError(f"{where}: no [[gpu]]; expected entries as in {Path(__file__).with_name('gpus.toml')}")
    return tuple(_gpu(row, where) for row in rows)


def _gpu(row: dict[str, Any], where: str) -> Gpu:
    wanted = {field.name for field in fields(Gpu)} - {"rates", _OPTIONAL} | {"tflops"}
    _expect_keys(row, wanted, {_OPTIONAL}, f"{where}: the GPU {row.get('names', '')}")
    held, rates = row.get(_OPTIONAL), row["tflops"]
    numbers = [row[name] for name in wanted - {"names", "source", "tflops"}]
    numbers += rates.values() if isinstance(rates, dict) else [rates]
    if held is not None:
        of_one = {field.name for field in fields(Multiprocessors)}
        _expect_keys(held, of_one, set(), f"{where}: {_OPTIONAL} of the GPU {row['names']}")
        numbers += held.values()
    if not row["names"] or not isinstance(rates, dict) or not rates or not all(map(_is_figure, numbers)):
        raise ConfigError(f"{where}: the GPU {row['names']}: expected names, and every figure above 0")
    return Gpu(
        names=tuple(row["names"]),
        memory_gib=float(row["memory_gib"]),
        bandwidth=1e9 * row["bandwidth"],
        rates={dtype: 1e12 * rate for dtype, rate in rates.items()},
        link=1e9 * row["link"],
        per_node=int(row["per_node"]),
        network=1e9 * row["network"],
        watts=float(row["watts"]),
        source=str(row["source"]),
        multiprocessors=None if held is None else Multiprocessors(**{**held, "clock": 1e9 * held["clock"]}),
    )


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _expect_keys(row: Any, wanted: set[str], optional: set[str], what: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{what} is {row!r}, expected a table with {', '.join(sorted(wanted))}")
    missing, unknown = sorted(wanted - row.keys()), sorted(row.keys() - wanted - optional)
    if missing or unknown:
        found = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is no figure"
        raise ConfigError(f"{what} {found}; expected {', '.join(sorted(wanted))}")
