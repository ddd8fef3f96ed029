"""What every test shares."""

import os
from pathlib import Path

import pytest

# Triton reads this when it is first imported; without a GPU its kernels run in the interpreter, on a CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoded digits."""
    from fastdiff.data.encode import encode_digits

    folder = tmp_path_factory.mktemp("data") / "digits"
    encode_digits(folder)
    return folder


@pytest.fixture(scope="session")
def torch_extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private folder for the operators that DeepSpeed compiles, with those of a CPU run in it.

    Built once, in a process of its own, so that no test that is killed can leave a lock in it.
    """
    from tests.processes import build_operators, run_ranks

    folder = tmp_path_factory.mktemp("torch_extensions")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    run_ranks(build_operators, ranks=1)
    return folder
