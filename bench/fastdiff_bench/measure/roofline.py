"""Roofline limits of the machine: bandwidth of a large copy, and rate of large matrix products.

They are measured in the same run as the compared ops, so clocks, power cap and other load are equal. Commands that
write into one folder within an hour, on one machine, share what the first of them has measured.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastdiff_bench import BenchError
from fastdiff_bench.measure.timing import Effort, Stopwatch, Timing
from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.record import Measurement, Record, read

CASE = "limits"
PROVIDER = "torch"
_COPY, _MATMUL = "copy bandwidth", "matmul rate "
_CURRENT = timedelta(hours=1)

_COPIED_BYTES = {"cuda": 2**31, "cpu": 2**26}
_SIDE = {"cuda": 8192, "cpu": 1024}
"""Side of the square matrices."""
_DTYPES = {
    "cuda": {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
    # Without fp16 arithmetic a processor takes seconds for one product.
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one machine."""

    copy: Timing
    """Bytes per second read plus written by a copy within the device's memory."""
    matmul: dict[str, Timing]
    """Floating-point operations per second by precision (fp32, tf32, bf16, fp16); a multiply-add counts as two.

    Only precisions with hardware support.
    """

    @property
    def copy_bytes_per_s(self) -> float:
        """Median rate of the copy."""
        return self.copy.median

    @property
    def matmul_flops_per_s(self) -> dict[str, float]:
        """Median rates of the products."""
        return {precision: rate.median for precision, rate in self.matmul.items()}

    def measurements(self, bench: str) -> list[Measurement]:
        """Return the limits for the record of the command ``bench``; they do not rate the code."""
        rates = {_COPY: ("GB/s", self.copy, 1e-9)}
        rates |= {f"{_MATMUL}{precision}": ("TFLOP/s", rate, 1e-12) for precision, rate in self.matmul.items()}
        return [
            Measurement.of(bench, CASE, PROVIDER, quantity, unit, rate, "neither", scale=scale)
            for quantity, (unit, rate, scale) in rates.items()
        ]


def kept(folder: Path, device: str, effort: Effort, *, smoke: bool) -> Limits:
    """Return the limits that a record in ``folder`` has of this machine in this hour; if none has, measure them."""
    for record in _records(folder, device, smoke):
        rows = {m.quantity: m for m in record.measurements if (m.case, m.provider) == (CASE, PROVIDER)}
        rates = {name.removeprefix(_MATMUL): _timing(m, 1e12) for name, m in rows.items() if name.startswith(_MATMUL)}
        if _COPY in rows and rates:
            return Limits(_timing(rows[_COPY], 1e9), rates)
    return measure(device, effort)


def _records(folder: Path, device: str, smoke: bool) -> Iterator[Record]:
    here = Fingerprint.here(smoke=smoke)
    wanted = (here.device if device == "cuda" else "cpu", here.cpu, here.cores, here.torch, here.power_cap, smoke)
    for file in sorted(folder.glob("*.jsonl")):
        with suppress(BenchError):  # another command may have been cut
            record = read(file)
            had = record.fingerprint
            found = (had.device, had.cpu, had.cores, had.torch, had.power_cap, had.smoke)
            if found == wanted and datetime.now(UTC) - datetime.fromisoformat(had.date) < _CURRENT:
                yield record


def _timing(row: Measurement, scale: float) -> Timing:
    p20, p80 = row.interval
    return Timing(scale * row.value, scale * p20, scale * p80, row.n)


def measure(device: str, effort: Effort) -> Limits:
    """Measure the limits of ``cuda`` or ``cpu``; the memory is released at the end."""
    stopwatch = Stopwatch(device, effort)
    copy = stopwatch.measure({"copy": _copy(device)})["copy"].per_second(2 * _COPIED_BYTES[device])
    products = {precision: _product(precision, dtype, device) for precision, dtype in _DTYPES[device].items()}
    operations = 2 * _SIDE[device] ** 3
    matmul = {name: timing.per_second(operations) for name, timing in stopwatch.measure(products).items()}
    del stopwatch, products
    if device == "cuda":
        torch.cuda.empty_cache()
    return Limits(copy, matmul)


def _copy(device: str) -> Callable[[], Tensor]:
    source = torch.zeros(_COPIED_BYTES[device], dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _product(precision: str, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """Return a product of random matrices: on zeros a GPU draws less power and runs faster."""
    a, b = (torch.randn(_SIDE[device], _SIDE[device], device=device).to(dtype) for _ in range(2))
    call = partial(torch.mm, a, b, out=torch.empty_like(a))
    return (lambda: _in_tf32(call, precision == "tf32")) if device == "cuda" else call


def _in_tf32(call: Callable[[], Tensor], allowed: bool) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
