"""File with the state of a run for Prometheus (``--output.prometheus``), in its text format.

https://prometheus.io/docs/instrumenting/exposition_formats/; the node exporter's textfile collector reads it. The
format is a line per number: the package ``prometheus_client`` would bring a registry and a server, and save ten lines.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from fastdiff.buffered_writes import WholeFiles
from fastdiff.json_lines import Record
from fastdiff.ledger.records import Account

_GAUGES = {
    "written": ("fastdiff_written_timestamp_seconds", "Time of writing, in seconds since 1970."),
    "step": ("fastdiff_step", "Optimizer steps taken."),
    "samples": ("fastdiff_samples", "Samples seen."),
    "skipped": ("fastdiff_skipped_steps", "Steps without effect on the weights."),
    "loss": ("fastdiff_loss", "Mean loss since the last line of the log."),
    "lr": ("fastdiff_learning_rate", "Learning rate of the last step."),
    "grad_norm": ("fastdiff_gradient_norm", "Norm of the last gradient before clipping."),
    "samples_per_s": ("fastdiff_samples_per_second", "Throughput since the last line of the log."),
    "mfu": ("fastdiff_mfu_ratio", "Model FLOPs utilization since the last line of the log."),
    "peak_gib": ("fastdiff_peak_memory_gib", "Largest memory use of rank 0."),
}
"""Metric and its help by the name in the log; ``written`` is not in there."""
_SECONDS = "fastdiff_seconds_total"


class PrometheusFile:
    """A file that is replaced as a whole; what keeps it from being written is a warning."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._files = path, WholeFiles(buffered=True)
        self._run = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    def write(self, record: Record, seconds: Mapping[Account, float]) -> None:
        """Replace the file.

        Args:
            record: line of ``metrics.jsonl``.
            seconds: of this start by account of the ledger.
        """
        lines, record = [], {"written": time.time(), **record}
        for name, (metric, text) in _GAUGES.items():
            if record.get(name) is not None:
                lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"]
                lines.append(f'{metric}{{run="{self._run}"}} {float(record[name])!r}')
        lines += [f"# HELP {_SECONDS} Time of this start by account.", f"# TYPE {_SECONDS} counter"]
        lines += [f'{_SECONDS}{{run="{self._run}",account="{name}"}} {spent!r}' for name, spent in seconds.items()]
        self._files.write(self._path, "\n".join([*lines, ""]).encode(), durable=False)

    def close(self) -> None:
        """Write what still waits, if possible."""
        self._files.close()
