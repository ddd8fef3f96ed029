"""DeepSpeed's compiled operators for one job, in a private folder without the locks of other jobs.

The folder is a copy of a per-user cache. Without a cache, one process builds the operators before any rank starts, and
publishes them for the next job. Locks are never copied, and the cache changes only by renaming whole folders.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fastdiff.cluster.supervisor.ranks import kill_group, spawn
from fastdiff.errors import ConfigError
from fastdiff.files import fsync
from fastdiff.parallel.extension_locks import OURS

_TIMEOUT_S = 1800.0
_SHOWN_LINES = 15


def prepare(folder: Path, say: Callable[[str], None]) -> None:
    """Create ``folder`` with the operators that a run needs on this machine.

    An exception from a signal handler ends the build.

    Args:
        folder: the ``TORCH_EXTENSIONS_DIR`` of the ranks of this job and node; must not exist.
        say: prints a line of progress.

    Raises:
        ConfigError: the build failed; the message ends with the compiler's last lines.
    """
    _require_exec(folder.parent)
    cached = cache_folder()
    try:
        if cached.is_dir():
            _copy(cached, folder)
            return
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        say(f"the operators in {cached} cannot be used ({error}); delete that folder")
    folder.mkdir()
    say("compiling DeepSpeed's operators; later jobs reuse them")
    _build(folder)
    try:
        publish(folder, cached)
    except OSError as error:
        say(f"the operators cannot be cached in {cached} ({error}); the next job compiles them again")


def _require_exec(folder: Path) -> None:
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise ConfigError(
            f"{folder} is on a file system mounted noexec, so compiled operators cannot be loaded from it; set TMPDIR "
            "to a folder on another file system of this machine"
        )


def publish(folder: Path, cached: Path) -> None:
    """Copy ``folder`` to ``cached`` atomically; an existing copy stays.

    Raises:
        OSError: the copy cannot be written.
    """
    temporary = cached.with_name(f".{cached.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _copy(folder, temporary)
        for path in temporary.rglob("*"):
            fsync(path)
        temporary.rename(cached)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another job was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cache_folder() -> Path:
    """Return the cache folder of the operators for this machine and these versions."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fastdiff" / "operators" / _key()


def _key() -> str:
    """Return a digest of all that the compiled code depends on; with ``-march=native``, also the processor."""
    parts = [importlib.metadata.version(package) for package in ("torch", "deepspeed")]
    parts += [sys.version, sys.prefix, platform.machine(), _processor_flags(), _compiler()]
    parts += [os.environ.get("TORCH_CUDA_ARCH_LIST", ""), os.environ.get("CUDA_HOME", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _processor_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compiler() -> str:
    try:
        command = [os.environ.get("CXX", "c++"), "--version"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _build(folder: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}
    command = [sys.executable, "-m", "fastdiff.cluster.supervisor.operators"]
    process = spawn(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"compiling DeepSpeed's operators took longer than {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            kill_group(process)
            process.wait()
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        raise ConfigError(
            f"DeepSpeed's operators cannot be compiled on {socket.gethostname()} (exit code {process.returncode}); "
            "`fastdiff doctor` lists missing tools. The last lines:\n" + "\n".join(lines)
        )


def _copy(source: Path, target: Path) -> None:
    """Copy a tree with its modification times, which ninja uses to find outdated files."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock", OURS))


if __name__ == "__main__":
    from fastdiff.training.engine import build_operators

    build_operators()
