"""Time of the host in a step: nearly a fixed part and one per parameter tensor, which has its hooks and its kernels.

A step cannot be faster than the processor that launches its kernels and runs DeepSpeed's hooks.
"""

from dataclasses import dataclass

SPEEDS = (1.4, 1.7, 2.0)
"""How many times faster a processor beside a GPU is than that of ``HOSTS``: high, middle and low estimate of its time.
Assumed; nothing was measured. A step measured on a GPU bounds it from below (``fastdiff_bench.scaling.projection``)."""


@dataclass(frozen=True, slots=True)
class Host:
    """Host time of a step at one ZeRO stage."""

    fixed: float
    """Seconds."""
    per_tensor: float
    """Seconds per trained parameter tensor."""

    def seconds(self, tensors: int, speed: float = 1.0) -> float:
        """Return the seconds of a step, on a processor ``speed`` times as fast as the measured one."""
        return (self.fixed + tensors * self.per_tensor) / speed


HOSTS = {
    0: Host(5.178e-3, 0.1728e-3),
    1: Host(8.228e-3, 0.2843e-3),
    2: Host(8.538e-3, 0.2280e-3),
    3: Host(13.839e-3, 0.5194e-3),
}
"""By ZeRO stage, with eager blocks on two cores of an Intel Xeon: ``bench/results/cpu-2-cores/2026-11-23_host``. An
upper bound: compiled blocks launch less."""
