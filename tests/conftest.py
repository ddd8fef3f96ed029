"""Options, fixtures and checks that all tests share."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import worker
from tests.support.forked import share_server
from tests.support.reports import durations

if TYPE_CHECKING:
    from fastdiff.parallel.world import World

# Triton reads this when it is first imported; without a GPU its kernels run in the interpreter, on a CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The commands of this environment, as in a shell that has activated it.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

_OPS = Path(__file__).parent / "ops"
MUCH_MEMORY = 1 << 27  # bytes
_skipped_without_reason: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also the long trials, each as often as a night allows")
    parser.addoption("--gpu", action="store_true", help="only the tests of the kernels and those that need a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """End at SIGTERM as at Ctrl-C: tests and fixtures stop what they started.

    Processes that a shell starts in the background (``make test &``) ignore Ctrl-C, and so would those of the tests.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if config.getoption("--gpu") and not torch.cuda.is_available():
        raise pytest.UsageError("--gpu: torch sees no CUDA device; fastdiff doctor tells why")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let the workers be forks of one server, which imports for all of them; it sees no GPU."""
    if not torch.cuda.is_available():
        share_server()
        for spec in specs:
            spec.python = f"{sys.executable} {worker.__file__}"


@pytest.fixture(scope="session")
def nightly(request: pytest.FixtureRequest) -> bool:
    """True in a nightly run, which has time for many trials."""
    return bool(request.config.getoption("--nightly"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select_trials(config, items)
    select_for_gpu(config, items)
    items.sort(key=lambda item: -durations.expected(item.path))
    for item in items:
        item.user_properties += [("fault", mark.args[0]) for mark in item.iter_markers("fault")]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def select_trials(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked ``nightly``; with --nightly, also mark tests that have more trials by night."""
    if config.getoption("--nightly"):
        for item in items:
            if "nightly" in getattr(item, "fixturenames", ()):
                item.add_marker("nightly")
        return
    long = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def select_for_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --gpu, deselect what neither needs a GPU nor is a test of the kernels, which a GPU compiles."""
    if config.getoption("--gpu"):
        wanted = [item for item in items if item.get_closest_marker("gpu") or _OPS in item.path.parents]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not {"gpu", "shell"} & report.keywords.keys() and not torch.cuda.is_available():
        _skipped_without_reason.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped, which proves nothing, except for want of a GPU or of another shell."""
    if _skipped_without_reason:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _skipped_without_reason:
        terminalreporter.write_line(f"ERROR {name} was skipped; only tests marked gpu or shell may be")


@pytest.fixture(autouse=True, scope="session")
def fast_interpreter() -> Iterator[None]:
    from tests.support.benches.interpreter import patching_once

    with patching_once():
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled code out of the cache folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FASTDIFF_CACHE", str(tmp_path_factory.mktemp("cache") / "own"))
        yield


@pytest.fixture(autouse=True)
def _as_for_the_first_test() -> Iterator[None]:
    """Undo what a run leaves in its process.

    Warnings that are given once, signals that it ignores at its end, the line that a supervisor leaves to its ranks,
    and the linear layer with which ZeRO-3 replaces torch's, which rounds differently in bf16.
    """
    from fastdiff.console import once
    from fastdiff.live_line import live_line

    once.given.clear()
    shares = live_line.shares
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear, live_line.shares = linear, shares
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoded digits."""
    from fastdiff.data.encoding.builtin import encode_digits

    folder = tmp_path_factory.mktemp("data") / "digits"
    encode_digits(folder)
    return folder


def resident() -> int:
    """Resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def memory_then() -> list[int]:
    """Resident memory when the engines of a module were last released, in bytes; one number."""
    return [resident()]


@pytest.fixture(scope="module", autouse=True)
def released(memory_then: list[int]) -> Iterator[None]:
    """Release what a module leaves in its process, once this is much: looking for it takes some tenths of a second."""
    yield
    if resident() > memory_then[0] + MUCH_MEMORY:
        release()
        memory_then[0] = resident()


def release() -> None:
    """Give back the memory of DeepSpeed's engines and of compiled code.

    Hooks of autograd refer to an engine, where the garbage collector does not look: it would never find one.
    """
    of_library = [one for one in gc.get_objects() if getattr(type(one), "__module__", "") == "deepspeed.runtime.engine"]
    engines = [one for one in of_library if hasattr(one, "destroy") and vars(one.module)]
    for engine in engines:
        engine.destroy()
    for part in [part for engine in engines for part in (engine.optimizer, engine.module)]:
        vars(part).clear()
    del of_library, engines
    torch._dynamo.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def world() -> World:
    """This process as the only rank."""
    import tests.support.imported  # noqa: F401
    from fastdiff.parallel.world import start_world

    return start_world()


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the networks that a test registers, also by reading a document or a plug-in."""
    from fastdiff.config.networks import registry, user_defined

    monkeypatch.setattr(registry, "_registered", dict(registry.networks()))
    monkeypatch.setattr(user_defined, "_known", dict(user_defined._known))
