"""GPUs that need not be present: what a multiprocessor (SM) holds and issues, by compute capability."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a compute capability."""

    name: str
    processors: int
    """Multiprocessors."""
    memory_gib: int
    shared_kib: int
    """Most shared memory of one program; a multiprocessor has 1 KiB more, and reserves 1 KiB per program."""
    l2_mib: int
    bandwidth: float
    """Bytes per second of a large copy."""
    clock: float
    """Hertz under load."""
    programs: int = 32
    """Most programs of a multiprocessor."""
    warps: int = 64
    """Most warps of a multiprocessor."""

    @property
    def issue(self) -> float:
        """Warp instructions per second: one per clock and scheduler, of which a multiprocessor has four."""
        return 4 * self.processors * self.clock

    @property
    def special(self) -> float:
        """Special functions per second, of single lanes: 16 per clock and multiprocessor."""
        return 16 * self.processors * self.clock


GPUS = {
    80: Gpu(
        name="NVIDIA A100-SXM4-80GB", processors=108, memory_gib=80, shared_kib=163, l2_mib=40, bandwidth=1.81e12,
        clock=1.41e9,
    ),
    90: Gpu(
        name="NVIDIA H200", processors=132, memory_gib=141, shared_kib=227, l2_mib=50, bandwidth=4.256e12,
        clock=1.755e9,
    ),
    100: Gpu(
        name="NVIDIA B200", processors=148, memory_gib=180, shared_kib=227, l2_mib=126, bandwidth=7.1e12,
        clock=1.85e9,
    ),
}  # fmt: skip
"""GPU of each compute capability: sizes from NVIDIA's data sheets and CUDA's table of compute capabilities.

The copy of the H200 is measured (``bench/results/nvidia-h200/2026-11-26_gpu``: 4.256 TB/s, 0.887 of its data sheet);
the others are that share of theirs. Its clock under load is not in the record: 1.755 GHz is assumed, between 1.98 that
an idle one reports and what 700 W leave to products."""
