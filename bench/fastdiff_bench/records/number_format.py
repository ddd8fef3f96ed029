"""Formatting of measured values."""

import math

from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.record import Measurement


def number(value: float) -> str:
    """Format with three significant digits, integers in full: ``0.0123``, ``1.50``, ``12,300``, ``1,801``."""
    if not math.isfinite(value):
        return f"{value:g}"
    if value == int(value):
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(decimals, 0)}f}"


def interval(measurement: Measurement) -> str:
    """Return ``p20 to p80``; empty if the measurement was not repeated."""
    if measurement.p20 is None and measurement.p80 is None:
        return ""
    return " to ".join(map(number, measurement.interval))


def label(quantity: str, unit: str) -> str:
    """Return an axis label: ``throughput, samples/s``; a ratio or a count has no unit."""
    return quantity if unit == "1" else f"{quantity}, {unit}"


def machine(f: Fingerprint) -> str:
    """Describe the machine and the commit of a measurement in one line."""
    device = f"{f.cpu}, {f.cores} cores" if f.device == "cpu" else f"{f.device}, driver {f.driver}, {f.power_cap}"
    return f"{device}, torch {f.torch}, DeepSpeed {f.deepspeed}, commit {f.git}"
