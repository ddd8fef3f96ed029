"""Scripts in processes of the fork server, which has imported everything: exit code and output in two seconds."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.support.forked import WITHOUT_GPU, end_with_the_tests, fork_server
from tests.support.processes import ROOT, Finished

TRAIN = ROOT / "fastdiff" / "train.py"


def run_script(path: Path, *arguments: str | Path, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a file as Python would; kill it and fail after ``timeout_s``."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **WITHOUT_GPU, **environment}
    with NamedTemporaryFile("r") as output:
        words = [str(path), *(str(argument) for argument in arguments)]
        process = fork_server().Process(target=_run, args=(output.name, words, given))
        process.start()
        try:
            process.join(timeout_s)
            code = process.exitcode
        finally:
            process.kill()
            process.join()
        assert code is not None, f"still running after {timeout_s} s:\n{output.read()}"
        return Finished(code, output.read())


def _run(output: str, words: list[str], environment: dict[str, str]) -> None:
    end_with_the_tests()
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    import torch

    torch.set_num_threads(1)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as Python does
    runpy.run_path(words[0], run_name="__main__")
