"""``bench plan``: steps of several micro-batches, measured in one run, beside what one of them predicts for the others.

``fastdiff plan --from RECORD`` rests on this: a step that is measured with one micro-batch corrects the model of a
step, which then predicts other micro-batches.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch

from fastdiff.planning import gpus
from fastdiff.planning.calibration import Basis, Measured, calibrated
from fastdiff.planning.gpus import CPU, Gpus
from fastdiff.planning.network import Network, read_network
from fastdiff.planning.options import work_of
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, device, open_log
from fastdiff_bench.measure import sweep, synthetic
from fastdiff_bench.measure.interleaved import Effort, Program, Result, run_interleaved
from fastdiff_bench.measure.stepping import run_fastdiff
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import table

_FULL, _SMOKE = Effort(rounds=6, steps=5, warm_up=3), Effort(rounds=2, steps=2, warm_up=2)
_SAMPLES = 256


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("plan")
    parser.add_argument("--preset", default="digits", help="default: %(default)s")
    parser.add_argument("--micro", nargs="+", type=int, metavar="N", help="micro-batches; default: 16 32 64 128")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"), help="default: %(default)s")
    sweep.add_deepspeed(parser, "ddp")
    add_measuring(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    on, sizes = device(arguments), arguments.micro or ([4, 8] if arguments.smoke else [16, 32, 64, 128])
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise BenchError(f"--micro {' '.join(map(str, sizes))}: expected at least two different sizes")
    workloads = {
        f"micro-batch {size}": Workload(
            preset=arguments.preset, batch=size, precision=arguments.precision, deepspeed=arguments.deepspeed
        )
        for size in sorted(set(sizes))
    }
    threads = {} if on == "cuda" else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as folder, open_log(arguments, "plan") as log:
        data = Path(folder) / "data"
        synthetic.write(data, next(iter(workloads.values())).config(data, data).model, _SAMPLES)
        programs = [Program(name, run_fastdiff, (one, data), 1, threads) for name, one in workloads.items()]
        results = run_interleaved(programs, _SMOKE if arguments.smoke else _FULL, device=on)
        failed = {name: result.failure for name, result in results.items() if result.failure is not None}
        for name, reason in failed.items():
            log.write(Failure(bench="plan", case=workloads[name].case, provider=name, reason=str(reason)))
        if not failed:
            _report(workloads, results, on, log)
    return int(bool(failed))


def _report(workloads: dict[str, Workload], results: dict[str, Result], on: str, log: Log) -> None:
    """Predict every size from every other one."""
    rows = [["micro-batch", "measured ms", *(f"from {name.rpartition(' ')[2]}, ms" for name in workloads), "worst"]]
    configs = {name: one.config(Path("data"), Path("run")) for name, one in workloads.items()}
    first = next(iter(configs.values()))
    network = read_network(first, torch.device(on))
    kind = CPU if on == "cpu" else gpus.of_device(torch.cuda.get_device_name())
    if kind is None:
        raise BenchError(f"{torch.cuda.get_device_name()} is not in the table of GPUs; add it to gpus.toml")
    machine = Gpus(kind, 1, 1)
    bases = {
        name: _basis(workloads[name], results[name], network, machine) for name in workloads
    }  # fmt: skip
    for name, workload in workloads.items():
        work = work_of(configs[name], workload.deepspeed_json(), network, 1)
        seconds = results[name].timing.median
        found = {source: basis.step_time(work, machine).whole.middle for source, basis in bases.items()}
        errors = {source: value / seconds - 1 for source, value in found.items() if source != name}
        worst = max(errors.values(), key=abs)
        cells = [f"{1e3 * value:.1f}" for value in found.values()]
        rows.append([name, f"{1e3 * seconds:.1f}", *cells, "-" if log.fingerprint.smoke else f"{worst:+.1%}"])
        row = partial(Measurement.of, "plan", workload.case, name, facts=workload.facts)
        log.write(row("step time", "ms", results[name].timing, "lower", scale=1e3))
        log.write(*(row(f"prediction error from {source}", "1", one, "neither") for source, one in errors.items()))
    print(table(rows, "<" + ">" * (len(rows[0]) - 1)))


def _basis(workload: Workload, result: Result, network: Network, machine: Gpus) -> Basis:
    """Return the basis of one measured size."""
    step = Measured(
        source=workload.case, config=workload.config(Path("data"), Path("run")), deepspeed=workload.deepspeed_json(),
        ranks=1, device=machine.kind.name, seconds=result.timing.median, passes=None,
    )  # fmt: skip
    return calibrated(step, work_of(step.config, step.deepspeed, network, 1), machine)
