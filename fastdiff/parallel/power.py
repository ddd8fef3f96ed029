"""Electrical power of a GPU."""

import torch


class PowerMeter:
    """Reading of the power of this rank's GPU by NVML, through torch; a CPU is not measured.

    It needs the package nvidia-ml-py (import name pynvml), which fastdiff does not install.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def watts(self) -> float | None:
        """Return the power in watts, which the driver averages over a second at most; None: it cannot be read."""
        if self._device is None:
            return None
        try:
            return torch.cuda.power_draw(self._device) / 1e3
        except Exception:  # no package, no permission, or a GPU that does not tell: a class for each
            self._device = None
            return None
