"""Real ranks in which torch's OutOfMemoryError is raised at a given place, once: by hooks of modules and calls.

A supervised run gets ``environment(lack, folder)``. Its ranks plant the hooks when they have built their state, and its
supervisor when it starts; the product knows nothing of it.
"""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

import psutil
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[3]
Where = Literal["construction", "rehearsal", "forward", "backward", "step", "validation", "sampling"]
_VARIABLE = "LACK_OF_MEMORY"
_NOBODY = 1
"""Port on which nobody listens."""
_SITE = """
import os, sys
sys.path.insert(0, {root!r})
from tests.support.injected import lack_of_memory
lack_of_memory.plant_in_this_rank() if "RANK" in os.environ else lack_of_memory.plant_in_this_supervisor()
"""


@dataclass(frozen=True)
class Lack:
    """A place at which a rank runs out of memory."""

    where: Where
    rank: int = 0
    step: int = 1
    """Steps taken before."""
    micro: int = 0
    """Micro-batches of the step before; only for the passes."""
    module: str = "blocks.1"
    """Whose forward pass, or the gradient of whose output, fails."""
    stops: Literal["nobody", "others", "itself"] = "nobody"
    """Ranks of the node that stop like a process under a debugger: the others at once, the one that lacks memory once
    it has noted that."""
    noted: bool = True
    """Whether the run folder shows the file that the rank writes, or a network file system too late."""
    refused: bool = False
    """Whether nobody listens where this supervisor first connects for the next start."""


def environment(lack: Lack, folder: Path) -> dict[str, str]:
    """Return the variables for the supervisor; ``folder/occurred`` appears when the memory has run out."""
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SITE.format(root=str(ROOT)))
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {_VARIABLE: json.dumps({"file": str(folder / "occurred"), **asdict(lack)}), "PYTHONPATH": path}


def _given() -> tuple[Lack, Path]:
    given = json.loads(os.environ[_VARIABLE])
    occurred = Path(given.pop("file"))
    return Lack(**given), occurred


def plant_in_this_supervisor() -> None:
    """Let the supervisor of node 0 be late after the lack of memory, as this one sees it."""
    lack, occurred = _given()
    if not lack.refused:
        return
    from fastdiff.cluster.supervisor import nodes

    connect = nodes._connect
    met: list[int] = []

    def meet(host: str, port: int) -> Any:
        if not occurred.exists() or met:
            return connect(host, port)
        met.append(port)
        return connect(host, _NOBODY)

    nodes._connect = meet


def plant_in_this_rank() -> None:
    """Let this process run out of memory at the place in its environment."""
    lack, occurred = _given()
    if lack.rank != int(os.environ["RANK"]) or occurred.exists():
        return
    from fastdiff.parallel import heartbeat
    from fastdiff.training import build

    if lack.where == "construction":
        engine = "fastdiff.training.engines.build.build_engine"
        mock.patch(engine, side_effect=lambda *_: _fail(lack, occurred)).start()
    if not lack.noted:
        mock.patch("fastdiff.training.memory.smaller_batch.publish").start()
    if lack.stops == "itself":
        note = heartbeat.note_failure

        def note_and_stop(*arguments: Any, **options: Any) -> None:
            note(*arguments, **options)
            os.kill(os.getpid(), signal.SIGSTOP)

        mock.patch("fastdiff.training.failure.note_failure", note_and_stop).start()
    make = build._build_state

    def make_and_plant(*arguments: Any) -> Any:
        state = make(*arguments)
        _plant(state, lack, occurred)
        return state

    build._build_state = make_and_plant


def _fail(lack: Lack, occurred: Path) -> NoReturn:
    occurred.touch()
    if lack.stops == "others":
        for process in psutil.Process(os.getppid()).children():
            if process.pid != os.getpid():
                process.suspend()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def _plant(state: Any, lack: Lack, occurred: Path) -> None:
    def fail_if_due(phase: str, micro: int) -> None:
        at = (state.progress.steps, state.heartbeat.phase, micro)
        if not occurred.exists() and at == (lack.step, phase, lack.micro):
            _fail(lack, occurred)

    def taken() -> int:
        return len(state.guard._losses)

    def at_output(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if lack.where == "rehearsal":
            fail_if_due("start", 0)
        elif lack.where == "forward":
            fail_if_due("forward", taken())
        elif first.requires_grad:
            first.register_hook(lambda _: fail_if_due("backward", taken() - 1))

    def before(owner: Any, name: str, phase: str) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def fail_or_call(*arguments: Any, **options: Any) -> Any:
            fail_if_due(phase, 0)
            return own(*arguments, **options)

        mock.patch.object(owner, name, fail_or_call).start()

    if lack.where in ("rehearsal", "forward", "backward"):
        state.engine.module.get_submodule(lack.module).register_forward_hook(at_output)
    elif lack.where == "step":
        engine = state.engine
        owner, name = (engine.optimizer, "step") if engine.kind == "deepspeed" else (engine._update, "take")
        before(owner, name, "step")
    else:
        from fastdiff.training.callbacks import previews
        from fastdiff.training.callbacks.validation import ValidationLoss

        before(*((ValidationLoss, "_measure") if lack.where == "validation" else (previews, "sample")), "callbacks")
