"""Machines that the tests of this folder share, and the losses of an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.nodes import Cluster, cluster
from tests.slurm.slurm import Slurm, start_slurm
from tests.slurm.ssh import start_sshd
from tests.slurm.training import command_line
from tests.support.processes import deepspeed
from tests.support.runs import losses


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            # Longer than others: a requeued job waits for Slurm.
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and two nodes, which reach one another by ssh."""
    folder = tmp_path_factory.mktemp("machines")
    with cluster(folder / "network") as found:
        start_sshd(found, folder / "keys", {"OMP_NUM_THREADS": "1"})
        yield found


@pytest.fixture(scope="session")
def _slurm(machines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return start_slurm(machines, tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def queue(_slurm: Slurm) -> Iterator[Slurm]:
    """Slurm on them; no job outlives its test."""
    yield _slurm
    _slurm.cancel_all()


@pytest.fixture(scope="session")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = deepspeed(*command_line(digits, folder), ranks=2)
    assert done.code == 0, done.output
    return losses(folder)


@pytest.fixture(autouse=True)
def _nothing_is_left(machines: Cluster) -> Iterator[None]:
    yield
    left = [(node.name, line) for node in machines.all for line in node.commands("python")]
    assert not left, f"orphans: {left}"
