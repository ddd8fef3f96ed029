"""``fastdiff.train``: a run on this machine, under the supervisor of ``fastdiff train``, in processes of its own."""

import codecs
import contextlib
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastdiff.api.config import for_ranks
from fastdiff.api.display import open_display
from fastdiff.api.run import Run
from fastdiff.cluster.launchers.job import SUPERVISOR, local_job
from fastdiff.config.launch_options import Resume
from fastdiff.config.run import RunConfig
from fastdiff.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FastdiffError,
    NoMemoryError,
    Preempted,
    ProcessLimitError,
    StorageError,
)
from fastdiff.version import PACKAGE

_ERRORS: dict[int, type[FastdiffError]] = {
    kind.exit_code: kind for kind in (ConfigError, DataError, DivergedError, ProcessLimitError, StorageError, Preempted)
}
"""Type of the error by exit code of the run."""
_MESSAGE = re.compile(r"^fastdiff: error(?: \(rank \d+\))?: (.*?)(?=^fastdiff: |\Z)", re.M | re.S)
"""Message of a rank, up to the line of the supervisor."""
_OUTCOME = re.compile(r"^fastdiff: (.*)$", re.M)
"""Line of the supervisor."""
_STOPPED = re.compile(r"^fastdiff: (.*(?:saved step|nothing saved).*)$", re.M)
_NO_MEMORY = re.compile(r"out of memory|memory of", re.IGNORECASE)
_QUIET_S = 0.5
"""Time without output after which a display may show what the log of the run has gained."""
_LONGEST = 1 << 16
"""Characters of the output that are kept for the message of an error."""


class RunError(FastdiffError):
    """A run ended by a bug, by a signal, or because a rank or a node did not answer; ``exit_code`` says which."""

    exit_code = 1

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train(
    config: RunConfig,
    *,
    ranks: int | None = None,
    deepspeed: str | Path | None = None,
    resume: Resume = "auto",
    allow_change: Sequence[str] = (),
    preflight: bool = True,
) -> Run:
    """Train a run to its end, or continue it, as ``fastdiff train`` does.

    The ranks are processes of their own; nothing of them stays in this process. Their output goes to standard error, in
    a notebook below a live view of the run. Ctrl-C, or the stop button of a notebook, saves the current step and raises
    ``Preempted``; twice, the run ends at once. The same call continues the run.

    Args:
        config: of the run; its ``output.folder`` is the run folder.
        ranks: processes, one per GPU; None: one per visible GPU, or one on the CPU.
        deepspeed: DeepSpeed JSON, a file or a name such as ``zero3``; None: ZeRO-1, or ZeRO-0 on one rank.
        resume: auto: continue the run in the folder, if any; must: fail if there is none; never: fail if there is one.
        allow_change: fields that may differ from those of the run that is continued.
        preflight: check the data and the disk first.

    Returns:
        The run, complete.

    Raises:
        ConfigError: values that do not fit the data, the machine or the run in the folder.
        DataError: data that are missing or damaged.
        DivergedError: the training diverged.
        NoMemoryError: the memory does not suffice.
        ProcessLimitError: threads or processes that cannot be started.
        StorageError: files that cannot be read or written.
        Preempted: the run was interrupted, and is saved.
        RunError: any other end.
    """
    with tempfile.TemporaryDirectory(prefix="fastdiff-api-") as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(for_ranks(config))
        path.chmod(0o600)
        name = getattr(config, "preset", None)
        flags = [*(["--preset", name] if name else []), "--config", str(path), "--resume", resume]
        flags += ["--deepspeed_config", str(deepspeed)] if deepspeed is not None else []
        flags += [word for key in allow_change for word in ("--allow-change", key)]
        job = local_job(flags, ranks, preflight=preflight)
        assert job is not None, "this is no --dry-run"
        code, output = _supervised(job.arguments("127.0.0.1", 0), config)
    if code:
        raise _error(code, output)
    return Run(config.output.folder)


def _supervised(arguments: Sequence[str], config: RunConfig) -> tuple[int, str]:
    """Run a supervisor to its end; return its exit code and the end of its output."""
    command = [sys.executable, "-m", SUPERVISOR, "--end-with-input", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # ends with this process, however it ends; the run then saves and stops
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,  # a terminal would send Ctrl-C to the ranks as well
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    display, kept = open_display(config), ""
    try:
        while True:
            try:
                for text in _chunks(process, decoder):
                    display.write(text)
                    kept = (kept + text)[-_LONGEST:]
                break
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
        return process.wait(), kept
    finally:
        try:
            display.close()
        finally:
            _end(process)


def _chunks(process: subprocess.Popen[bytes], decoder: codecs.IncrementalDecoder) -> Iterator[str]:
    """Yield the output of a process as it comes, and "" while there is none; it ends with the process and its ranks."""
    assert process.stdout is not None
    while True:
        if not select.select([process.stdout], [], [], _QUIET_S)[0]:
            yield ""
        elif content := os.read(process.stdout.fileno(), 1 << 16):
            yield decoder.decode(content)  # a character may be cut in two
        else:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor that still runs, after an error of this process; it saves first."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        process.terminate()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of the ranks, which import the same packages as this process."""
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    roots = [str(PACKAGE.parent)]
    kernels = importlib.util.find_spec("fastdiff_kernels")
    if kernels is not None and kernels.origin is not None:
        roots.append(str(Path(kernels.origin).parents[1]))
    own = [root for root in dict.fromkeys(roots) if root not in installed]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*own, *given])), "PYTHONUNBUFFERED": "1"}


def _error(code: int, output: str) -> FastdiffError:
    """Return the error of a run that ended with an exit code, with the message of its first rank that failed."""
    found = [match.strip() for match in _MESSAGE.findall(output) or _OUTCOME.findall(output)]
    message = found[-1] if found else ""
    if code == Preempted.exit_code:
        stopped = _STOPPED.findall(output)
        return Preempted((stopped[-1] if stopped else message).replace("the same command", "the same call"))
    if code == DivergedError.exit_code and _NO_MEMORY.search(message):
        return NoMemoryError(message)
    if code in _ERRORS and message:
        return _ERRORS[code](message)
    last = [line.strip() for line in output.splitlines() if line.strip()]
    reason = message or (last[-1] if last else "no output")
    return RunError(f"the run ended with exit code {code}: {reason}", code)
